"""The course of a sweep: its runs in turns, rung by rung.

Runs on one base take turns of `round_steps` steps. Where a sweep has several bases, or runs of full fine-tuning, which
change every weight, they are loaded one after the other at each rung.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from backend.config.config import load
from backend.engine.cpu import left_nothing
from backend.models.policy import load_base
from backend.runs.events import last_event
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

POLL_S = 0.3
END = Rung(1 << 62, 0)  # the end of every run, however long it is


class SweepCommands:
    """The words pause, resume and stop in the folder of a sweep, and stop signals, passed to the run whose turn it is.
    `stop_reason` is set for good once a stop has come."""

    def __init__(self, process: RunFolder) -> None:
        self.current: RunFolder | None = None
        self.stop_reason = ""
        self._word = ""  # passed to a run that may not have read it yet
        self._process = process
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sweep commands", daemon=True)
        remove_word(process.control)  # for a process that is no more

    def listen(self) -> None:
        """Call in the main thread, as `signal.signal` requires."""
        control.on_stop_signals(lambda number, _: self._stop(f"{signal.Signals(number).name} was received"))
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
        if (run := self.current) is not None:
            with contextlib.suppress(DiskError):  # a disk without room for a word: the next run's turn begins with it
                run.say(word)


def run_sweep(
    plan: SweepPlan,
    folder: SweepFolder,
    inputs: SweepInputs,
    *,
    command: str,
    echo: Callable[[SweepResults], None] = lambda results: None,
    may_restart: bool = False,
) -> Ending:
    """Train a sweep from where it was, in folders that exist, with their settings inside.

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
        self.plan, self.folder, self._echo = plan, folder, echo
        self.results = read_results(folder) or fresh_results(plan)
        self.results.began = self.results.began or time.time()
        self.commands = SweepCommands(folder.process)
        self.members: dict[str, MemberRun] = {}
        for member in plan.members():
            run = folder.run(member.run)
            config = load(run.config)
            self.members[member.run] = MemberRun(
                config,
                run,
                self.results.run(member.run),
                partial(inputs.of, member, config),
                command=command,
                gpu_retries=config.retry_on_gpu_error if may_restart else 0,
                stop_reason=lambda: self.commands.stop_reason,
            )

    def run(self) -> Ending:
        self.commands.listen()
        self.results.state, self.results.sentence = "running", ""
        groups = self.plan.groups()
        self.results.notes = [
            f"{len(group)} runs share one base model in memory." for group in groups if len(group) > 1
        ]
        alone = sum(self.members[group[0].run].config.train_type == "full" for group in groups)
        if alone > 1:
            full = f"{alone} runs fine-tune every weight, so they share no base and are loaded one after the other."
            self.results.notes.append(full)
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
                    # Every run that is still in the sweep, base by base.
                    groups = [group for group in map(self._unfinished, self.plan.groups()) if group]
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
        best, metric = self.results.ranked[0], self.plan.metric
        sentence = f"No configuration has a held-out {metric} for every seed."
        if best.value is not None:
            label = self.plan.configurations[best.number - 1].label
            sentence = f"The best configuration is {best.number} ({label}): held-out {metric} {best.value:.3g}."
        return Ending("finished", 0, sentence, 0)

    def _train_group(self, group: list[MemberRun], rung: Rung, *, parks: bool) -> None:
        """Train the runs of one base to a rung, in turns. Those of several bases are parked then, to make room for the
        next."""
        if not all(run.is_loaded for run in group if run.ending is None):
            first = group[0].config
            shared = SharedResources(None if first.train_type == "full" else load_base(first))
            for run in group:
                self._turn(run, partial(run.load, shared))

        def behind() -> list[int]:
            open_runs = [(run.result.step, run.trainer.parts.steps) for run in group if run.trainer is not None]
            return [step for step, steps in open_runs if step < min(rung.step, steps)]

        while steps := behind():
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

    def _unfinished(self, group: list[Member]) -> list[MemberRun]:
        """The runs of a group that are still in the sweep and have not ended in this process or for good."""
        alive = {run.run for each in self.results.alive for run in each.runs}
        runs = [self.members[member.run] for member in group if member.run in alive]
        return [run for run in runs if run.ending is None and not self._has_finished(run)]

    def _has_finished(self, run: MemberRun) -> bool:
        last = {} if run.is_open else last_event(run.folder)
        if last.get("kind") != "finished":
            return False
        run.result.state, run.result.step, run.result.sentence = "finished", last["step"], str(last.get("sentence", ""))
        self._read_value(run)
        return True

    def _turn(self, run: MemberRun, work: Callable[[], None]) -> None:
        """Let a run work, and write its result. Raises Stop."""
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
                reached = "it has none" if each.value is None else f"its mean is {each.value:.4g}"
                sentence = (
                    f"Stopped at step {rung.step}: by held-out {self.plan.metric} its configuration is not among the "
                    f"best {rung.keep} of {len(alive)} in the sweep {self.plan.name} ({reached}); everything is saved."
                )
                for result in each.runs:
                    self.members[result.run].stop(sentence, is_given_up=True)
        # After the runs have ended: if this process dies in between, the next one judges the same rung alike.
        self.results.rungs.append(RungResult(rung.step, kept))
        self.report()

    def _read_value(self, run: MemberRun) -> None:
        """The run's metric at its last held-out evaluation, from its event log."""
        values = held_out_values(run.folder, self.plan.metric)
        if values:
            run.result.evaluated = max(values)
            run.result.value = values[run.result.evaluated]

    def _after_stop(self) -> Ending:
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

    def report(self) -> None:
        write_results(self.folder, self.results)
        self._echo(self.results)
