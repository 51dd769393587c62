"""One process of a run, from taking its lock to the event log's last line. A run that ends early is saved at its last
finished step. After a GPU error the run does not end: this process saves it, leaves the event log without a last line
and the lock held, and its caller execs a program that trains on with smaller micro-batches."""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from backend.config.config import Config
from backend.distributed.ranks import LostRankError, WorkerError
from backend.engine.cpu import left_nothing
from backend.export.writer import save_model
from backend.runs import checkpoint
from backend.runs.checkpoint import newest_whole, set_aside
from backend.runs.events import EventLog, check_format, truncate_file
from backend.runs.run_folder import RunFolder, hand_on_lock, hold_lock, inherited_lock
from backend.runs.saved_weights import Checkpoint, DamagedCheckpoint
from backend.runs.steering import Steering
from backend.trainer.control import Stopped, StopPending
from backend.trainer.machine import GpuError, gpu_error
from backend.trainer.run_context import LoadContext, load_context
from backend.trainer.run_inputs import RunInputs
from backend.trainer.trackers.follow import RunTrackers
from backend.trainer.trainer import RESTART, Ending, Trainer
from backend.utils.disk import DiskError, fault_of
from backend.utils.errors import UserError, log_traceback


def train(
    config: Config,
    run: RunFolder,
    *,
    command: str,
    echo: Callable[[Any], None] | None = None,
    inputs: RunInputs | None = None,
    may_restart: bool = False,
    changes: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    look: Callable[[], None] | None = None,
    load: LoadContext = load_context,
    goes_on: bool = False,
    lock: int | None = None,
) -> Ending:
    """Train `config` in `run`, from its newest checkpoint if it has one.

    `inputs`: what `preflight` read. `changes`: raw settings to change from the step after that checkpoint on. `look` is
    called wherever the run may stop, and may raise Stopped or UserError. `load` builds what the run computes with.
    `goes_on`: losing a rank ends this process and not the run. `lock`: of the run, if the caller has it; closed here.

    Errors of the run are written to the event log and returned in the Ending. Raises UserError when another process
    holds the run, its files are damaged, or `changes` are invalid. With `may_restart` the Ending may be a RESTART: the
    run stays locked, the stop signals stay blocked, and the caller has to exec a program that calls this again.
    """
    # An flock, which the kernel releases however this process ends. It is held before the checkpoint is read and the
    # files are truncated, so that two processes never append to one event log.
    inherited = inherited_lock(run)
    keep_words = inherited is not None or lock is not None  # commands that came since the run was locked
    if lock is None:
        lock = hold_lock(run) if inherited is None else inherited
    trackers = RunTrackers(run)
    try:
        notes, starts_trackers = [*warnings], inherited is None  # else they still follow the run
        while True:
            trainer, saved = open_run(config, run, echo, changes=changes, keep_words=keep_words, notes=notes)
            if starts_trackers:
                trackers.start(config.report_to, trainer.note)
                starts_trackers = False
            trainer.control.looks += [partial(trackers.look, trainer.warn), *([look] if look else [])]
            ending = ending_of(partial(_run, trainer, saved, command, inputs, load), trainer)
            if ending.damaged is None:
                break
            trainer.close()
            notes.append(set_aside(ending.damaged))
            changes, keep_words = None, True  # recorded already; meant for this process
        ending = end_run(trainer, ending, config.retry_on_gpu_error if may_restart else 0, goes_on=goes_on)
        if ending.kind == RESTART:
            hand_on_lock(os.dup(lock))
        return ending
    except UserError:
        raise
    except Exception as error:  # a bug before the run was open, or after its ending
        return write_ending(EventLog(run.events), ending_after(error))
    finally:
        trackers.let_go()
        if inputs is not None:
            inputs.scorer.close()  # where the run ended before it took them over
        os.close(lock)


def _run(
    trainer: Trainer, saved: Checkpoint | None, command: str, inputs: RunInputs | None, load: LoadContext
) -> Ending:
    with stops_as_exceptions(trainer, trainer.control.obey_signal):
        trainer.load(saved, command, inputs, load_parts=load)
        trainer.train_until(None)
        return trainer.complete()


def record_changes(config: Config, run: RunFolder, changes: Mapping[str, Any]) -> None:
    """For a run that another process is about to resume. Raises UserError."""
    if not changes:
        return
    lock = hold_lock(run)
    try:
        saved, _ = newest_whole(run)
        Steering(run, config).record(changes, saved.state.step if saved else 0, at_resume=True)
    finally:
        os.close(lock)


def open_run(
    config: Config,
    run: RunFolder,
    echo: Callable[[Any], None] | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    keep_words: bool = False,
    notes: Sequence[str] = (),
) -> tuple[Trainer, Checkpoint | None]:
    """A trainer for a run whose lock this process holds, and the newest whole checkpoint, to which the run's files are
    cut back. Sets damaged checkpoints aside, and logs it after the warnings `notes`. Raises UserError as `train`."""
    check_format(run)
    saved, damaged = newest_whole(run)
    step = saved.state.step if saved else 0
    steering = Steering(run, config)
    if changes:
        steering.record(changes, step, at_resume=True)
    # After a kill both files are ahead of the checkpoint: see the docstring of backend/runs/checkpoint.py.
    notes = [*notes, *map(set_aside, damaged)]
    events_bytes, completions_bytes = checkpoint.lengths_at(run, saved) if saved else (0, 0)
    truncate_file(run.events, events_bytes)
    truncate_file(run.completions, completions_bytes)
    settings = steering.config_at(step)
    checkpoint.rotate(run, settings.keep_checkpoints)  # a process that was killed may not have done it
    trainer = Trainer(settings, run, EventLog(run.events, echo), steering, keep_words=keep_words)
    for sentence in notes:
        trainer.warn(sentence)
    return trainer, saved


@contextlib.contextmanager
def stops_as_exceptions(trainer: Trainer, obey_signal: Callable[[], None]) -> Iterator[None]:
    """Turn what a stop has interrupted into Stopped: a wait for reward functions, or mlx's compiler."""
    try:
        yield
    except StopPending:
        trainer.control.obey()
        raise Stopped("it was asked to stop") from None  # by a command that another has replaced since
    except RuntimeError as error:
        # No finished step may be lost: the last one is on disk (step 0 needs no file), or its weights are in memory.
        is_saved = trainer.state.step == (trainer.saver.saved_step or 0)
        if left_nothing(error) and (is_saved or trainer.has_whole_step):
            obey_signal()
        raise


def end_run(trainer: Trainer, ending: Ending, gpu_retries: int = 0, *, goes_on: bool = False) -> Ending:
    """Save what is not saved, write the event log's last line unless the run continues, and close the files."""
    place, step = trainer.held.place(), trainer.state.step
    if place is None:
        trainer.close()
        lost = f"The folder of the run {trainer.folder.name} was deleted while it trained, or its disk is gone"
        return Ending("failed", step, f"run: {lost}, so step {step} could not be saved.", 2)
    if place != trainer.folder.path and ending.kind != "finished":
        with contextlib.suppress(UserError):  # it was begun where the folder no longer is
            trainer.saver.wait()
        trainer.folder = trainer.control.run = trainer.saver.run = RunFolder(place)
        moved = f"because its folder was moved to {place}; everything is saved there."
        ending = Ending("stopped", ending.step, f"Stopped at step {ending.step} {moved}", 3)
    try:
        if ending.gpu_error is not None:
            ending = _after_gpu_error(trainer, ending, ending.gpu_error, gpu_retries)
        elif ending.kind != "finished":
            ending = _saved(trainer, ending)
        if ending.lost_rank is not None and goes_on:
            ending = replace(ending, kind=RESTART)
        elif ending.lost_rank is not None:
            saved = f" Step {trainer.saver.saved_step} is saved." if trainer.saver.saved_step else ""
            advice = "Resume the run when the machine is back, or without it: resume RUN --hosts FILE, or --hosts none"
            ending = replace(ending, sentence=f"{ending.sentence}{saved} {advice} for this machine alone.")
    except DiskError as error:
        ending = after_fault(ending, error)
    if ending.kind != RESTART:
        with contextlib.suppress(DiskError):  # which `write_ending` reports
            if trainer.folder.change_request.exists():
                sentence = "The change was not made: the run had ended."
                trainer.event_log.write("note", level="warning", sentence=sentence, answers="change")
        ending = write_ending(trainer.event_log, ending)
        with contextlib.suppress(OSError):  # deleted when the run is resumed
            trainer.control.discard_commands()
    trainer.close()
    return ending


def _saved(trainer: Trainer, ending: Ending) -> Ending:
    try:
        if trainer.has_unsaved_step():
            trainer.save()
            trainer.saver.wait()
        if ending.kind == "stopped" and trainer.config.train_type == "full" and trainer.has_whole_step:
            save_model(trainer.parts.policy, trainer.config, trainer.folder.model)
    except Exception as error:
        failure = ending_after(error, trainer.state.step)
        if ending.kind == "stopped" or failure.sentence == ending.sentence:
            return failure
        return replace(failure, sentence=f"{ending.sentence} {failure.sentence}")
    return ending


def _after_gpu_error(trainer: Trainer, ending: Ending, error: GpuError, retries: int) -> Ending:
    log, step = trainer.gpu_errors, trainer.state.step
    in_use = trainer.parts.step_size(trainer.config) if trainer.has_parts else log.step_size
    try:
        logged = log.add(error, ending.gpu_text, step=step, in_use=in_use, retries=retries)
    except DiskError as full:  # without the log the next process would take the same large steps
        trainer.save_without_gpu()
        return replace(ending, sentence=f"{ending.sentence} It is not retried. {full.faults[0].sentence}")
    if logged.is_retried:  # before saving, so that the checkpoint's length of the event log includes the note
        trainer.warn(logged.sentence)
        trainer.state.gpu_errors_told = len(log.errors)
    trainer.save_without_gpu()
    ending = replace(ending, sentence=logged.sentence)
    if not logged.is_retried:
        return ending
    try:
        trainer.control.obey()
        trainer.control.hand_on_signals()
    except Exception as stopped:
        return ending_after(stopped, step)
    return replace(ending, kind=RESTART)


def ending_of(work: Callable[[], Ending], trainer: Trainer | None = None) -> Ending:
    """Call `work` and turn its exception into an Ending at the last finished step of `trainer`."""
    try:
        return work()
    except Exception as error:
        return ending_after(error, trainer.state.step if trainer is not None else 0)


def ending_after(error: Exception, step: int = 0) -> Ending:
    def failed(error: object, exit_code: int = 2, **more: Any) -> Ending:
        return Ending("failed", step, str(error), exit_code, **more)

    match error:
        case Stopped():
            return Ending("stopped", step, f"Stopped at step {step} because {error}; everything is saved.", 3)
        case LostRankError():
            return failed(error, lost_rank=error.rank)
        case WorkerError():  # as if it had gone wrong here, but with the machine's name
            gpu = gpu_error(RuntimeError(error.gpu_text)) if error.gpu_text else None
            gpu = gpu and replace(gpu, happened=f"{error.place}: {gpu.happened}")
            about = {"traceback": error.traceback, "gpu_error": gpu, "gpu_text": error.gpu_text}
            return failed(error, error.exit_code, **about)
        case DamagedCheckpoint():
            return failed(error, damaged=error)
        case UserError():
            return failed(f"{error}{log_traceback(error.traceback)}")
    if (gpu := gpu_error(error)) is not None:
        # For log.txt. Without a traceback: where in our code mlx noticed the error says nothing.
        traceback.print_exception(error, limit=0)
        return failed(f"{gpu.happened} {gpu.advice}", gpu_error=gpu, gpu_text=str(error))
    if (disk := fault_of(error)) is not None:  # from code that is not ours
        return failed(disk)
    traceback.print_exception(error)
    return failed(f"{type(error).__name__}: {error}", 1, traceback="".join(traceback.format_exception(error)))


def write_ending(event_log: EventLog, ending: Ending) -> Ending:
    """Write the event log's last line. → the ending; a failure if the line could not be written."""
    event = {"step": ending.step, "reason": ending.reason or ending.kind, "sentence": ending.sentence}
    extra = {"ends_with": ending.ends_with, "lost_rank": ending.lost_rank, "traceback": ending.traceback or None}
    event |= {name: value for name, value in extra.items() if value is not None}
    try:
        event_log.write(ending.kind, **event)
    except DiskError as error:
        return after_fault(ending, error)
    return ending


def after_fault(ending: Ending, error: DiskError) -> Ending:
    if ending.exit_code in (0, 3):
        return replace(ending, kind="failed", exit_code=2, sentence=str(error))
    sentence = ending.sentence if str(error) in ending.sentence else f"{ending.sentence} {error}"
    return replace(ending, kind="failed", sentence=sentence)
