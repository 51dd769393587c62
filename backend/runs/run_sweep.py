"""The course of a sweep: its runs in turns, rung by rung.

Each run is an ordinary run folder and an ordinary trainer, which takes `round_steps` steps at a time. Nothing of it
changes between its turns, and runs share only frozen arrays, so each computes what it would compute alone, bit for bit.
Runs of several bases, or of full fine-tuning, are loaded one after the other at each rung.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from backend.config.config import Config, load, parse
from backend.data.rows import SPLITS, LazyRows, Rows, Splits
from backend.engine.cpu import left_nothing
from backend.models.policy import load_base
from backend.rewards.scorer import SharedProcesses
from backend.rewards.worker import RewardWorker
from backend.runs import checkpoint
from backend.runs.events import last_event
from backend.runs.run_folder import RunFolder, hand_on_lock, hold_lock
from backend.runs.steering import stage_configs
from backend.runs.sweep import Member, Rung, SweepPlan
from backend.runs.sweep_results import (
    RungResult,
    SweepFolder,
    SweepResults,
    fresh_results,
    measured,
    read_results,
    write_results,
)
from backend.trainer import control
from backend.trainer.control import Stopped, read_word
from backend.trainer.memory.plan import dtype_here
from backend.trainer.preflight import preflight
from backend.trainer.run_context import SharedResources, load_context
from backend.trainer.run_inputs import RunInputs, read_inputs
from backend.trainer.run_process import end_run, ending_after, ending_of, open_run, stops_as_exceptions
from backend.trainer.trackers.follow import RunTrackers
from backend.trainer.trainer import RESTART, Ending, Trainer
from backend.utils.errors import ConfigProblem, UserError

END = Rung(1 << 62, 0)  # the end of every run, however long it is


@dataclass
class SweepCommands:
    """The words pause, resume and stop in a sweep's folder, and stop signals, for the run whose turn it is."""

    folder: RunFolder
    stop_reason: str = ""

    def listen(self) -> None:
        """Call in the main thread, as `signal.signal` requires."""

        def on_signal(number: int, _: Any) -> None:
            self.stop_reason = self.stop_reason or f"{signal.Signals(number).name} was received"

        control.on_stop_signals(on_signal)
        control.unblock_stop_signals()  # a program before this one may have blocked them (`Control`)

    def is_stopping(self) -> bool:
        """Any thread may call it."""
        if not self.stop_reason and read_word(self.folder.control) == "stop":
            self.stop_reason = "the sweep was asked to stop"
            self.folder.control.unlink(missing_ok=True)
        return bool(self.stop_reason)

    def claim(self) -> str:
        """The word since the last call; a stop each time."""
        if self.is_stopping():
            return "stop"
        if word := read_word(self.folder.control):
            self.folder.control.unlink(missing_ok=True)
        return word if word in ("pause", "resume") else ""


class Stop(Exception):
    """Ends the sweep, not its runs: it was asked to stop, or the GPU refuses all further work."""


@dataclass
class Sweep:
    """Trains a sweep from where it was, in folders that exist. `echo` is called after every turn."""

    plan: SweepPlan
    folder: SweepFolder
    inputs: SweepInputs
    command: str
    echo: Callable[[SweepResults], None] = lambda results: None
    may_restart: bool = False

    def run(self, lock: int) -> Ending:
        """Errors of single runs end those runs; errors of the sweep are returned in the Ending. With `may_restart` that
        may be a RESTART. `lock`: the sweep's, which is closed at the end."""
        try:
            self.results = read_results(self.folder) or fresh_results(self.plan)
            self.results.began, self.results.rank_by = self.results.began or time.time(), self.plan.rank_by
            self.commands = SweepCommands(self.folder)
            self.members = {member.run: MemberRun(self, member) for member in self.plan.members()}
            self.commands.listen()
            self.results.state, self.results.sentence = "running", ""
            self.groups = [[self.members[member.run] for member in group] for group in self.plan.groups()]
            counts = [len(group) for group in self.groups if len(group) > 1]
            self.results.notes = [f"{count} runs share one base model in memory." for count in counts]
            alone = sum(group[0].config.train_type == "full" for group in self.groups)
            if alone > 1:
                full = f"{alone} runs fine-tune every weight, so they share no base and are loaded one after the other."
                self.results.notes.append(full)
            self.report()
            ending = ending_of(self._train)
            if ending.kind == RESTART:
                hand_on_lock(os.dup(lock))
                return ending
            if ending.kind != "finished":
                self._stop_all(f"its sweep ended: {ending.sentence}")
            self.results.state = ending.kind  # pyright: ignore[reportAttributeAccessIssue]
            self.results.sentence = ending.sentence
            self.report()
            return ending
        finally:
            os.close(lock)

    def _train(self) -> Ending:
        try:
            for rung in [*self.plan.rungs(), END]:
                if rung.step not in [judged.step for judged in self.results.rungs]:
                    groups = list(filter(None, map(self._unfinished, self.groups)))
                    for group in groups:
                        self._train_group(group, rung, parks=len(groups) > 1)
                    if rung is not END:
                        self._judge(rung)
        except Stop:
            return self._after_stop()
        except RuntimeError as error:
            if left_nothing(error) and self.commands.stop_reason:  # as in `MemberRun`, while the base was loaded
                return self._after_stop()
            raise
        best, measure = self.results.ranked[0], self.results.measure
        sentence = f"No configuration has a {measure} for every seed."
        if best.value is not None:
            label = self.plan.configurations[best.number - 1].label
            sentence = f"The best configuration is {best.number} ({label}): {measure} {best.value:.3g}."
        return Ending("finished", 0, sentence, 0)

    def _train_group(self, group: list[MemberRun], rung: Rung, *, parks: bool) -> None:
        if not all(run.is_loaded for run in group):
            first = group[0].config
            dtype = dtype_here([stage for run in group for stage in stage_configs(run.config)])
            base = None if first.train_type == "full" else load_base(first.model_copy(update={"dtype": dtype[0]}))
            shared = SharedResources(base, dtype)
            for run in group:
                self._turn(run, partial(run.load, shared))

        while steps := [run.result.step for run in group if run.is_open and run.result.step < rung.step]:
            until = min((min(steps) // self.plan.round_steps + 1) * self.plan.round_steps, rung.step)
            for run in group:
                if run.is_open and run.result.step < until:
                    self._turn(run, partial(run.train, until))
        if parks:
            for run in group:
                if run.is_open:
                    self._turn(run, run.park)
            gc.collect()  # module trees have cycles, and the next base must not come on top of this one
            mx.clear_cache()

    def _unfinished(self, group: list[MemberRun]) -> list[MemberRun]:
        alive, found = {run.run for each in self.results.alive for run in each.runs}, list[MemberRun]()
        for run in (run for run in group if run.result.run in alive):
            last = {} if run.is_open else last_event(run.folder)
            if last.get("kind") == "finished":
                run.result.state, run.result.step = "finished", last["step"]
                run.result.sentence = str(last.get("sentence", ""))
                self._read_value(run)
            elif run.ending is None:
                found.append(run)
        return found

    def _turn(self, run: MemberRun, work: Callable[[], None]) -> None:
        work()
        self._read_value(run)
        self.report()
        if self.commands.is_stopping() or (run.ending is not None and run.ending.gpu_error is not None):
            raise Stop

    def _judge(self, rung: Rung) -> None:
        alive = self.results.alive
        best = self.results.ranked[: rung.keep]
        if all(each.value is None for each in alive):
            best = alive
            note = f"No run was stopped at step {rung.step}: no configuration has a {self.results.measure}."
            self.results.notes.append(note)
        kept = sorted(each.number for each in best)
        for each in alive:
            if each.number not in kept:
                reached = "it has none" if each.value is None else f"its mean is {each.value:.4g}"
                sentence = (
                    f"Stopped at step {rung.step}: by {self.results.measure} its configuration is not among the "
                    f"best {rung.keep} of {len(alive)} in the sweep {self.plan.name} ({reached}); everything is saved."
                )
                for result in each.runs:
                    self.members[result.run].stop(sentence, is_given_up=True)
        # After the runs have ended: if this process dies in between, the next one judges the same rung alike.
        self.results.rungs.append(RungResult(rung.step, kept))
        self.report()

    def _read_value(self, run: MemberRun) -> None:
        if (found := measured(run.folder, self.plan.metric, self.plan.rank_by)) is not None:
            run.result.evaluated, run.result.value = found

    def _after_stop(self) -> Ending:
        failed = [run.ending for run in self.members.values() if run.ending is not None and run.ending.gpu_error]
        if not failed:
            reason = self.commands.stop_reason
            self._stop_all(reason)
            return Ending("stopped", 0, f"Stopped because {reason}; every run is saved.", 3)
        for trainer in filter(None, (run.trainer for run in self.members.values())):
            trainer.save_without_gpu()  # the GPU may be useless to this process
        if failed[0].kind == RESTART:
            for run in self.members.values():
                run.leave()
            return failed[0]
        return Ending("failed", 0, f"The sweep ended with a run: {failed[0].sentence}", 2)

    def _stop_all(self, reason: str) -> None:
        for run in self.members.values():
            run.stop(f"Stopped at step {run.result.step} because {reason}; everything is saved.")

    def report(self) -> None:
        write_results(self.folder, self.results)
        self.echo(self.results)


class MemberRun:
    """One run of a sweep. `result` is its line of the sweep's results, `ending` its end in this process."""

    def __init__(self, sweep: Sweep, member: Member) -> None:
        self.folder, self.result = sweep.folder.run(member.run), sweep.results.run(member.run)
        self.config = load(self.folder.config)
        self.command, self.commands = sweep.command, sweep.commands
        self._read_inputs = partial(sweep.inputs.of, member, self.config)
        self._gpu_retries = self.config.retry_on_gpu_error if sweep.may_restart else 0  # each answered by a RESTART
        self.ending: Ending | None = None
        self.trainer: Trainer | None = None
        self._lock = -1  # held while the run is open
        self._completions_before = self.result.completions

    @property
    def is_open(self) -> bool:
        return self.trainer is not None

    @property
    def is_loaded(self) -> bool:
        return self.trainer is not None and self.trainer.has_parts

    def load(self, shared: SharedResources) -> None:
        """Take the run's lock and load it, from its newest checkpoint if it has one; after `park`, where it was."""
        if self.trainer is not None:
            return self._unpark(shared)
        # The lock stays with the sweep until the run has ended: a run that waits for its turn is not crashed.
        self._lock = hold_lock(self.folder)
        self.trainer, saved = open_run(self.config, self.folder)
        self.trainer.control.outer = self.commands
        self.result.state = "training"

        def load(trainer: Trainer) -> Ending | None:
            trainer.load(saved, self.command, self._read_inputs(), shared=shared)
            return _train(trainer, trainer.state.step)  # an evaluation that is due before the next step

        self._guarded(load)

    def train(self, until: int) -> None:
        self._guarded(lambda trainer: _train(trainer, until))

    def park(self) -> None:
        def save(trainer: Trainer) -> None:
            if trainer.saver.saved_step != trainer.state.step:
                trainer.save()
                trainer.saver.wait()  # it logs the checkpoint
                trainer.event_log.write("phase", phase="waiting")
            trainer.parts.background_tokenizer.close()
            del trainer.parts

        self._guarded(save)
        self._completions_before = self.result.completions

    def _unpark(self, shared: SharedResources) -> None:
        def load(trainer: Trainer) -> None:
            # Its notes are in the event log since the first time.
            size, stages = trainer.gpu_errors.step_size, stage_configs(trainer.steering.config)
            parts = load_context(trainer.config, lambda sentence: None, self._read_inputs(), size, shared, stages)
            saved = checkpoint.newest(self.folder)
            if saved is None:
                raise UserError("run", f"The checkpoints of {self.folder.name} were deleted while it waited.")
            parts.restore(saved, trainer.config, trainer.note)
            trainer.take_parts(parts)

        self._guarded(load)

    def _guarded(self, work: Callable[[Trainer], Ending | None]) -> None:
        """Do a part of the run's work; end the run where `work` returns its ending, fails or is stopped."""
        trainer = self.trainer
        assert trainer is not None

        def obey_signal() -> None:
            if reason := self.commands.stop_reason:
                raise Stopped(reason)

        samplers = trainer.parts.samplers if trainer.has_parts else []  # the end of a run drops its parts
        try:
            with stops_as_exceptions(trainer, obey_signal):
                ending = work(trainer)
        except Exception as error:
            ending = ending_after(error, trainer.state.step)
        if samplers:
            self.result.completions = self._completions_before + sum(sampler.completions for sampler in samplers)
        self.result.step = trainer.state.step
        if ending is not None:
            self._end(ending)

    def stop(self, sentence: str, *, is_given_up: bool = False) -> None:
        """End the run between two turns, saved, as stopped. One that is given up keeps its whole model."""
        if is_given_up and self.is_open and self.config.train_type == "full" and not self.is_loaded:
            self._unpark(SharedResources(None))
        if self.is_open:
            self._end(Ending("stopped", self.result.step, sentence, 3))
            self.result.state = "given up" if is_given_up else self.result.state

    def _end(self, ending: Ending) -> None:
        """Write the run's ending and close it. After a GPU error it may be left open for the next process (RESTART)."""
        assert self.trainer is not None
        self.ending = end_run(self.trainer, ending, self._gpu_retries)
        self._release()
        if self.ending.kind in ("finished", "stopped", "failed"):
            self.result.state, self.result.sentence = self.ending.kind, self.ending.sentence
            # Only now: as many processes as a sweep has runs would wait for their turns.
            if self.folder.config.exists():
                RunTrackers(self.folder).start(self.config.report_to, lambda sentence: None)

    def leave(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
            self._release()

    def _release(self) -> None:
        self.trainer = None
        os.close(self._lock)


def _train(trainer: Trainer, until: int) -> Ending | None:
    if trainer.train_until(until if until < trainer.parts.steps else None):
        return trainer.complete()
    trainer.saver.wait()  # no thread writes while another run has its turn
    trainer.event_log.write("phase", phase="waiting")
    return None


class SweepInputs:
    def __init__(self) -> None:
        self._read: dict[str, RunInputs] = {}
        self._rows: list[Rows] = []
        # One process for all reward functions that may use the network, one for the others.
        self._processes: SharedProcesses = {network: RewardWorker(network) for network in (False, True)}

    def check(self, plan: SweepPlan) -> list[Splits]:
        """Check the inputs of every configuration, once for all seeds. Raises UserError with all problems."""
        found: dict[ConfigProblem, None] = {}
        for member in plan.members():
            if member.seed == plan.seeds[0]:
                try:
                    self._read[member.run] = self._shared(preflight(parse(plan.raw_settings(member)), self._processes))
                except UserError as error:
                    found |= dict.fromkeys(error.faults)
        if found:
            raise UserError(list(found))
        return [inputs.splits for inputs in self._read.values()]

    def of(self, member: Member, config: Config) -> RunInputs:
        """The inputs of one run, read now if `check` has not read them. Raises UserError."""
        if member.run not in self._read:
            self._read[member.run] = self._shared(read_inputs(config, self._processes))
        return self._read[member.run]

    def _shared(self, inputs: RunInputs) -> RunInputs:
        rows: dict[str, Any] = {split: self._known(inputs.splits.rows(split)) for split in SPLITS}
        stages = tuple((self._known(rows), source) for rows, source in inputs.stages)
        return replace(inputs, splits=replace(inputs.splits, **rows), stages=stages)

    def _known(self, rows: Rows) -> Rows:
        if isinstance(rows, LazyRows):  # on the disk, and to compare them would mean to read them
            return rows
        known = next((known for known in self._rows if known == rows), rows)
        if known is rows:
            self._rows.append(rows)
        return known
