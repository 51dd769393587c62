"""The course of a sweep: its runs in turns, rung by rung, and what is written about them.

Runs on one base take turns of `round_steps` steps. Where a sweep has several bases, or runs of full fine-tuning, which
change every weight, they are loaded one after the other at each rung. Nothing here computes; a run's turn is
`backend.runs.sweeps.member`'s.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import mlx.core as mx

from backend.config.config import load
from backend.engine.cpu import left_nothing
from backend.models.policy import load_base
from backend.runs.events import first_and_last_events
from backend.runs.run_folder import RunFolder
from backend.runs.run_lock import hand_on_lock, hold_lock, inherited_lock
from backend.runs.sweeps.member import MemberRun, SweepInputs
from backend.runs.sweeps.sweep import Member, Rung, SweepPlan
from backend.runs.sweeps.sweep_results import (
    RungResult,
    SweepFolder,
    SweepResults,
    fresh_results,
    held_out_values,
    keep_best,
    read_results,
    write_results,
)
from backend.trainer import control
from backend.trainer.control import read_word, remove_word
from backend.trainer.ending import RESTART, Ending, ending_of
from backend.trainer.run_context import SharedResources
from backend.utils.disk_faults import DiskError

# Commands to a whole sweep: the words pause, resume and stop in its folder, and the signals that mean stop.

POLL_S = 0.3


class SweepCommands:
    """`current` is the run whose turn it is, None between turns. `stop_reason` is set for good once a stop has come."""

    def __init__(self, process: RunFolder) -> None:
        self.current: RunFolder | None = None
        self._word = ""
        """Told to a run that may not have read it yet."""
        self.stop_reason = ""
        self._process = process
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sweep commands", daemon=True)
        remove_word(process.control)  # for a process that is no more

    def listen(self) -> None:
        """To be called in the main thread, as `signal.signal` requires."""
        control.on_stop_signals(self._on_signal)
        control.unblock_stop_signals()  # a program before this one may have blocked them (`Control`)
        self._watcher.start()

    def close(self) -> None:
        self._ended.set()
        self._watcher.join()

    def begin_turn(self, run: RunFolder) -> None:
        self.current = run
        if self._word:  # it came between two turns
            run.say(self._word)

    def end_turn(self) -> None:
        run, self.current = self.current, None
        if run is not None and self._word and read_word(run.control) == self._word:
            run.control.unlink(missing_ok=True)  # not read before the turn's end: it is for the next run
        elif self._word != "stop":
            self._word = ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(f"{signal.Signals(number).name} was received")

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            word = read_word(self._process.control)
            with contextlib.suppress(OSError):
                remove_word(self._process.control)
            if word == "stop":
                self._stop("the sweep was asked to stop")
            elif word in ("pause", "resume"):
                self._tell(word)

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        self._tell("stop")

    def _tell(self, word: str) -> None:
        self._word = word
        run = self.current
        if run is not None:
            with contextlib.suppress(DiskError):  # a disk without room for a word: the next run's turn begins with it
                run.say(word)


END = Rung(1 << 62, 0)
"""The end of every run, however long it is."""


def run_sweep(
    plan: SweepPlan,
    folder: SweepFolder,
    inputs: SweepInputs,
    *,
    command: str,
    echo: Callable[[SweepResults], None] = lambda results: None,
    may_restart: bool = False,
) -> Ending:
    """Train a sweep, from where it was if it has been begun. Its folder and its runs' folders exist, with their
    settings inside.

    Errors of single runs end those runs; errors of the sweep are returned in the Ending. With `may_restart` that may be
    a RESTART, as in `backend.trainer.run_process.train`. Raises UserError when another process trains the sweep. `echo`
    is called after every turn.
    """
    process = folder.process
    inherited = inherited_lock(process)
    lock = hold_lock(process) if inherited is None else inherited
    try:
        sweep = Sweep(plan, folder, inputs, command, echo, may_restart)
        ending = sweep.run()
        if ending.kind == RESTART:
            hand_on_lock(os.dup(lock))
        return ending
    finally:
        os.close(lock)


class Stop(Exception):
    """Ends the sweep, not its runs: it was asked to stop, or the GPU refuses all further work."""


class Sweep:
    """One process of a sweep. `results` are written after every turn."""

    def __init__(
        self,
        plan: SweepPlan,
        folder: SweepFolder,
        inputs: SweepInputs,
        command: str,
        echo: Callable[[SweepResults], None],
        may_restart: bool,
    ) -> None:
        self.plan, self.folder, self.inputs, self._command, self._echo = plan, folder, inputs, command, echo
        self._may_restart = may_restart
        self.results = read_results(folder) or fresh_results(plan)
        self.results.began = self.results.began or time.time()
        self.commands = SweepCommands(folder.process)
        self.members = {member.run: self._member(member) for member in plan.members()}

    def _member(self, member: Member) -> MemberRun:
        run = self.folder.run(member.run)
        config = load(run.config)
        return MemberRun(
            config,
            run,
            self.results.run(member.run),
            lambda: self.inputs.of(member, config),
            command=self._command,
            gpu_retries=config.retry_on_gpu_error if self._may_restart else 0,
            stop_reason=lambda: self.commands.stop_reason,
        )

    def run(self) -> Ending:
        self.commands.listen()
        self.results.state, self.results.sentence = "running", ""
        self.results.notes = self._notes()
        self.report()
        try:
            ending = ending_of(self._train, lambda: 0)
        finally:
            self.commands.close()
        if ending.kind == RESTART:
            return ending
        if ending.kind != "finished":
            self._stop_all(f"its sweep ended: {ending.sentence}")
        self.results.state, self.results.sentence = ending.kind, ending.sentence  # pyright: ignore[reportAttributeAccessIssue]
        self.report()
        return ending

    def _train(self) -> Ending:
        try:
            for rung in [*self.plan.rungs(), END]:
                if rung.step not in [judged.step for judged in self.results.rungs]:
                    self._train_to(rung)
                    if rung is not END:
                        self._judge(rung)
        except Stop:
            return self._after_stop()
        except RuntimeError as error:
            if left_nothing(error) and self.commands.stop_reason:  # as in `MemberRun`, while the base was loaded
                return self._after_stop()
            raise
        return Ending("finished", 0, self._result(), 0)

    def _train_to(self, rung: Rung) -> None:
        """Bring every run that is still in the sweep to this rung, base by base."""
        groups = [group for group in map(self._unfinished, self.plan.groups()) if group]
        for group in groups:
            self._train_group(group, rung, parks=len(groups) > 1)

    def _train_group(self, group: list[MemberRun], rung: Rung, *, parks: bool) -> None:
        """Train the runs of one base to a rung, in turns. Those of several bases are parked then, to make room for the
        next."""
        if not all(run.is_loaded for run in group if run.ending is None):
            first = group[0].config
            shared = SharedResources(None if first.train_type == "full" else load_base(first))
            for run in group:
                self._turn(run, partial(run.load, shared))
        for step in self._rounds(group, rung):
            for run in group:
                if run.is_open and run.result.step < step:
                    self._turn(run, partial(run.train, step))
        if parks:
            for run in group:
                if run.is_open:
                    self._turn(run, run.park)
            gc.collect()  # module trees have cycles, and the next base must not come on top of this one
            mx.clear_cache()

    def _unfinished(self, group: list[Member]) -> list[MemberRun]:
        """The runs of a group that are still in the sweep and have not ended in this process or for good."""
        alive = {run.run for each in self.results.alive for run in each.runs}
        runs = [self.members[member.run] for member in group if member.run in alive]
        return [run for run in runs if run.ending is None and not self._has_finished(run)]

    def _has_finished(self, run: MemberRun) -> bool:
        last = [] if run.is_open else first_and_last_events(run.folder.events)[1]
        if not last or last[-1]["kind"] != "finished":
            return False
        run.result.state, run.result.step = "finished", last[-1]["step"]
        run.result.sentence = str(last[-1].get("sentence", ""))
        self._read_value(run)
        return True

    def _rounds(self, group: list[MemberRun], rung: Rung) -> Iterator[int]:
        """The steps up to which the runs of a group train in turn, as long as any is not there."""
        while behind := [run for run in group if run.is_open and run.result.step < min(rung.step, run.steps)]:
            slowest = min(run.result.step for run in behind)
            yield min((slowest // self.plan.round_steps + 1) * self.plan.round_steps, rung.step)

    def _turn(self, run: MemberRun, work: Callable[[], None]) -> None:
        """Let a run work, and write what came of it. Raises Stop."""
        self.commands.begin_turn(run.folder)
        try:
            work()
        finally:
            self.commands.end_turn()
        self._read_value(run)
        self.report()
        if self.commands.stop_reason or (run.ending is not None and run.ending.gpu_error is not None):
            raise Stop

    def _judge(self, rung: Rung) -> None:
        """Keep the best configurations at a rung, and end the runs of the others."""
        alive = self.results.alive
        kept = keep_best(alive, rung.keep)
        for each in alive:
            if each.number not in kept:
                sentence = self._given_up(rung, len(alive), each.value)
                for result in each.runs:
                    self.members[result.run].stop(sentence, is_given_up=True)
        # After the runs have ended: if this process dies in between, the next one comes to the same rung and
        # judges it alike.
        self.results.rungs.append(RungResult(rung.step, kept))
        self.report()

    def _given_up(self, rung: Rung, count: int, value: float | None) -> str:
        reached = "it has none" if value is None else f"its mean is {value:.4g}"
        return (
            f"Stopped at step {rung.step}: by held-out {self.plan.metric} its configuration is not among the best "
            f"{rung.keep} of {count} in the sweep {self.plan.name} ({reached}); everything is saved."
        )

    def _read_value(self, run: MemberRun) -> None:
        """The run's metric at its last held-out evaluation, from its event log."""
        values = held_out_values(run.folder, self.plan.metric)
        if values:
            run.result.evaluated = max(values)
            run.result.value = values[run.result.evaluated]

    def _after_stop(self) -> Ending:
        """Every other run is saved and ends as the one that stopped did."""
        failed = [run.ending for run in self.members.values() if run.ending is not None and run.ending.gpu_error]
        if not failed:
            reason = self.commands.stop_reason
            self._stop_all(reason)
            return Ending("stopped", 0, f"The sweep was stopped because {reason}; every run is saved.", 3)
        for run in self.members.values():
            run.save_without_gpu()
        if failed[0].kind == RESTART:
            for run in self.members.values():
                run.leave()
            return failed[0]
        return Ending("failed", 0, f"The sweep ended with a run: {failed[0].sentence}", 2)

    def _stop_all(self, reason: str) -> None:
        for run in self.members.values():
            run.stop(f"Stopped at step {run.result.step} because {reason}; everything is saved.")

    def _result(self) -> str:
        best = self.results.ranked[0]
        if best.value is None:
            return f"No configuration has a held-out {self.plan.metric} for every seed."
        label = self.plan.configurations[best.number - 1].label
        return f"The best configuration is {best.number} ({label}): held-out {self.plan.metric} {best.value:.3g}."

    def _notes(self) -> list[str]:
        groups = self.plan.groups()
        shared = [f"{len(group)} runs share one base model in memory." for group in groups if len(group) > 1]
        alone = sum(self.members[group[0].run].config.train_type == "full" for group in groups)
        full = f"{alone} runs fine-tune every weight, so they share no base and are loaded one after the other."
        return [*shared, *([full] if alone > 1 else [])]

    def report(self) -> None:
        write_results(self.folder, self.results)
        self._echo(self.results)
