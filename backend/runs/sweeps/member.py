"""One run of a sweep: an ordinary run folder and an ordinary trainer, which take a few steps at a time.

Nothing of a run changes between its turns, and runs share only frozen arrays. So each computes what it would compute
alone, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backend.config.config import Config
from backend.data.rows import SPLITS, LazyRows, Rows
from backend.rewards.scorer import SharedProcesses
from backend.rewards.worker_process import RewardWorker
from backend.runs.checkpoints import checkpoint
from backend.runs.run_folder import RunFolder
from backend.runs.run_lock import hold_lock
from backend.runs.sweeps.sweep import Member, SweepPlan
from backend.runs.sweeps.sweep_results import MemberResult
from backend.trainer.control import Stopped
from backend.trainer.ending import RESTART, Ending, ending_of
from backend.trainer.preflight import preflight
from backend.trainer.run_context import SharedResources, load_context
from backend.trainer.run_inputs import RunInputs, read_inputs
from backend.trainer.run_process import end_run, open_run, save_without_gpu, stops_as_exceptions
from backend.trainer.trackers.follow import RunTrackers
from backend.trainer.trainer import Trainer
from backend.utils.errors import ConfigProblem, UserError

TURN_OVER = "turn over"  # the kind of an ending after which the run continues at its next turn


class MemberRun:
    """One run of a sweep. `result` is its line of the sweep's results, `ending` its end in this process.

    `read_inputs` is called when the run is loaded. `gpu_retries`: how often a GPU error may be answered by a RESTART.
    `stop_reason`: why the sweep is to stop, "" while it continues.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        result: MemberResult,
        read_inputs: Callable[[], RunInputs],
        *,
        command: str,
        gpu_retries: int = 0,
        stop_reason: Callable[[], str] = str,
    ) -> None:
        self.config, self.folder, self.result = config, folder, result
        self.ending: Ending | None = None
        self._read_inputs, self._command, self._gpu_retries = read_inputs, command, gpu_retries
        self._stop_reason = stop_reason
        self.trainer: Trainer | None = None
        self._lock: int | None = None
        self._completions_before = result.completions

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
        trainer, saved = open_run(self.config, self.folder, shared=shared)
        self.trainer = trainer
        self.result.state = "training"

        def load() -> Ending | None:
            trainer.load(saved, self._command, self._read_inputs())
            return self._train(trainer.state.step)  # an evaluation that is due before the next step

        self._guarded(load)

    def train(self, until: int) -> None:
        """Train up to step `until`, and to the run's end if that is its last one."""
        self._guarded(lambda: self._train(until))

    def _train(self, until: int) -> Ending | None:
        trainer = self.trainer
        assert trainer is not None
        if trainer.train_until(until if until < trainer.parts.steps else None):
            return trainer.complete()
        trainer.saver.wait()  # no thread writes while another run has its turn
        return None

    def park(self) -> None:
        """Save the run and free its memory, until the next `load`."""
        trainer = self.trainer
        assert trainer is not None

        def save() -> None:
            if trainer.saver.saved_step != trainer.state.step:
                trainer.save()
            trainer.saver.wait()
            trainer.parts.background_tokenizer.close()
            del trainer.parts

        self._guarded(save)
        self._completions_before = self.result.completions

    def _unpark(self, shared: SharedResources) -> None:
        trainer = self.trainer
        assert trainer is not None

        def load() -> None:
            # Its notes are in the event log since the first time.
            parts = load_context(
                trainer.config,
                lambda sentence: None,
                self._read_inputs(),
                trainer.gpu_errors.step_size,
                shared,
                trainer.steering.stage_configs(),
            )
            saved = checkpoint.newest(self.folder)
            if saved is None:
                raise UserError("run", f"The checkpoints of {self.folder.name} were deleted while it waited.")
            parts.restore(saved, trainer.note)
            trainer.take_parts(parts)

        self._guarded(load)

    def _guarded(self, work: Callable[[], Ending | None]) -> None:
        """Do a part of the run's work; end the run where `work` returns its ending, fails or is stopped."""
        trainer = self.trainer
        assert trainer is not None

        def obey_signal() -> None:  # the sweep has the signals of its process
            if reason := self._stop_reason():
                raise Stopped(reason)

        def part() -> Ending:
            with stops_as_exceptions(trainer, obey_signal):
                return work() or Ending(TURN_OVER, trainer.state.step, "", 0)

        rollout = trainer.parts.rollout if trainer.has_parts else None  # the end of a run drops its parts
        ending = ending_of(part, lambda: trainer.state.step)
        if rollout is not None:
            self.result.completions = self._completions_before + rollout.completions
        self.result.step = trainer.state.step
        if ending.kind != TURN_OVER:
            self._end(ending)

    def stop(self, sentence: str, *, is_given_up: bool = False) -> None:
        """End the run between two turns, saved, as stopped. One that is given up will not be resumed, so it keeps its
        whole model; a parked one is loaded for that."""
        if is_given_up and self.is_open and self.config.train_type == "full" and not self.is_loaded:
            self._unpark(SharedResources(None))
        if self.is_open:
            self._end(Ending("stopped", self.result.step, sentence, 3))
            self.result.state = "given up" if is_given_up else self.result.state

    def _end(self, ending: Ending) -> None:
        """Write the run's ending and close it. After a GPU error it may be left open for the next process (RESTART)."""
        trainer, self.trainer = self.trainer, None
        assert trainer is not None
        self.ending = end_run(trainer, ending, self._gpu_retries)
        self._release(trainer)
        if self.ending.kind in ("finished", "stopped", "failed"):
            self.result.state, self.result.sentence = self.ending.kind, self.ending.sentence
            # Only now: as many processes as a sweep has runs would wait for their turns.
            if self.folder.config.exists():
                RunTrackers(self.folder).start(self.config.report_to, lambda sentence: None)

    def save_without_gpu(self) -> None:
        """Save after a GPU error of another run, which may have made the GPU useless to this process."""
        if self.trainer is not None:
            save_without_gpu(self.trainer)

    def leave(self) -> None:
        """Close the run without an ending, for the next process."""
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            trainer.close()
            self._release(trainer)
            self.ending = Ending(RESTART, trainer.state.step, "", 0)

    def _release(self, trainer: Trainer) -> None:
        if trainer.has_parts:
            del trainer.parts
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class SweepInputs:
    """The inputs of a sweep's runs besides their model."""

    def __init__(self) -> None:
        self._read: dict[str, RunInputs] = {}
        self._rows: list[Rows] = []
        # One process for all reward functions that may use the network, one for the others.
        self._processes: SharedProcesses = {network: RewardWorker(network) for network in (False, True)}

    def check(self, plan: SweepPlan) -> None:
        """Check the inputs of every configuration, once for all seeds. Raises UserError with all problems."""
        found: dict[ConfigProblem, None] = {}
        for member in plan.members():
            if member.seed == plan.seeds[0]:
                try:
                    self._read[member.run] = self._shared(preflight(plan.raw_settings(member), self._processes))
                except UserError as error:
                    found |= dict.fromkeys(error.faults)
        if found:
            raise UserError(list(found))

    def of(self, member: Member, config: Config) -> RunInputs:
        """The inputs of one run, read now if `check` has not read them. Raises UserError."""
        if member.run not in self._read:
            self._read[member.run] = self._shared(read_inputs(config, self._processes))
        return self._read[member.run]

    def _shared(self, inputs: RunInputs) -> RunInputs:
        """The same inputs with equal lists of rows of another run."""
        rows: dict[str, Any] = {split: self._known(inputs.splits.rows(split)) for split in SPLITS}
        stages = {id(stage): replace(stage, rows=self._known(stage.rows)) for stage in inputs.stages}
        of_stages = tuple(stages[id(stage)] for stage in inputs.stages)  # two stages may have the same object
        return RunInputs(replace(inputs.splits, **rows), inputs.scorer, of_stages)

    def _known(self, rows: Rows) -> Rows:
        if isinstance(rows, LazyRows):  # on the disk, and to compare them would mean to read them
            return rows
        known = next((known for known in self._rows if known == rows), None)
        if known is None:
            self._rows.append(rows)
        return rows if known is None else known
