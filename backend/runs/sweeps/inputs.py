"""Rows and reward functions of a sweep's runs, each dataset in memory once.

Every run executes its reward files by itself, as it would alone: a function may keep state from call to call. They share a process,
which costs memory once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backend.config.config import Config
from backend.data.row_views import LazyRows, Rows
from backend.data.rows import SPLITS
from backend.rewards.sandbox.process import ScoringProcess
from backend.rewards.scorer import SharedProcesses
from backend.runs.sweeps.sweep import Member, SweepPlan
from backend.trainer.preflight import preflight
from backend.trainer.run_inputs import RunInputs, read_inputs
from backend.utils.errors import ConfigProblem, UserError


class SweepInputs:
    """What the runs of a sweep read before their model."""

    def __init__(self) -> None:
        self._read: dict[str, RunInputs] = {}
        self._rows: list[Rows] = []
        self._processes: SharedProcesses = {network: ScoringProcess(network) for network in (False, True)}
        """Where the runs' reward functions are scored: one for all that may use the network, one for the others."""

    def check(self, plan: SweepPlan) -> None:
        """Check everything that every configuration points to, once for all seeds. Raises UserError with all faults."""
        faults: dict[ConfigProblem, None] = {}
        for member in plan.members():
            if member.seed != plan.seeds[0]:
                continue
            try:
                self._read[member.run] = self._shared(preflight(plan.raw_settings(member), self._processes))
            except UserError as mistake:
                faults |= dict.fromkeys(mistake.faults)
        if faults:
            raise UserError(list(faults))

    def of(self, member: Member, config: Config) -> RunInputs:
        """The inputs of one run, read now if `check` has not read them. Raises UserError."""
        if member.run not in self._read:
            self._read[member.run] = self._shared(read_inputs(config, self._processes))
        return self._read[member.run]

    def _shared(self, inputs: RunInputs) -> RunInputs:
        """The same inputs with lists of rows that another run has already, where they are equal."""
        rows: dict[str, Any] = {split: self._known(inputs.splits.rows(split)) for split in SPLITS}
        stages = {id(stage): replace(stage, rows=self._known(stage.rows)) for stage in inputs.stages}
        return RunInputs(
            replace(inputs.splits, **rows), inputs.scorer, tuple(stages[id(stage)] for stage in inputs.stages)
        )

    def _known(self, rows: Rows) -> Rows:
        if isinstance(rows, LazyRows):  # on the disk, and to compare them would mean to read them
            return rows
        for known in self._rows:
            if known == rows:
                return known
        self._rows.append(rows)
        return rows
