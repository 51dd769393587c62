"""Fills the completions table: with a step's groups, or with what a filter, a search or a prompt leaves of the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from PySide6.QtWidgets import QLabel

from app.pages.completions.filter_bar import FilterBar
from app.state import charts
from app.state.completion_facts import CompletionFacts, Query, listed_completions, scores_of, select, sort, why_empty
from app.state.run import Run
from app.state.run_completions import RunCompletions
from app.widgets.completions.completion_detail import CompletionDetail
from app.widgets.completions.completion_model import CompletionLine, CompletionModel, lines_of_row
from app.widgets.completions.completion_table import CompletionTable

if TYPE_CHECKING:
    from app.state.run import Run


# The lines of the completions table: those of a step under their prompts, or any of a run's, read when they are
# shown.

_KEPT_LINES = 512
"""Lines kept once read: a table asks for each of the visible ones a hundred times a repaint."""


def step_lines(
    placed_rows: Sequence[tuple[int, Mapping[str, Any]]],
    query: Query,
    order: tuple[str, bool],
    largest: dict[str, float] | None,
) -> list[CompletionLine]:
    """The lines of a step's rows, (offset, row): each prompt with what the query leaves of its completions, sorted within the group by
    (column, descending); a prompt of which it leaves nothing is left out. `largest` as in `select`."""
    facts = CompletionFacts()
    for offset, row in placed_rows:
        facts.append(row, offset)
    numbers = select(facts, query, largest)
    if order[0]:
        numbers = sort(facts, numbers, order[0], descending=order[1])
    of_row = facts.column("row")[numbers]
    lines: list[CompletionLine] = []
    for group, (offset, row) in enumerate(placed_rows):
        prompt, *completions = lines_of_row(group, row, offset)
        chosen = facts.column("place")[numbers[of_row == group]].tolist()
        if chosen or not completions:
            lines += [prompt, *(completions[place] for place in chosen)]
    return lines


class RunLines(Sequence[CompletionLine]):
    """Completions of a run by their numbers among `facts`; `read_row` reads the row at an offset."""

    def __init__(
        self, facts: CompletionFacts, numbers: np.ndarray, read_row: Callable[[int], Mapping[str, Any] | None]
    ) -> None:
        self.numbers = numbers
        self._offsets = facts.per_completion("offset")[numbers]
        self._places = facts.column("place")[numbers]
        self._read_row = read_row
        self._lines: dict[int, CompletionLine] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> CompletionLine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CompletionLine]: ...
    def __getitem__(self, index: int | slice) -> CompletionLine | Sequence[CompletionLine]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if index not in range(-len(self), len(self)):
            raise IndexError(index)
        if index not in self._lines:
            if len(self._lines) >= _KEPT_LINES:
                self._lines.clear()
            self._lines[index] = self._read(index)
        return self._lines[index]

    def place(self, index: int) -> tuple[int, int]:
        """(offset of its row, place in it) of a line, without reading it."""
        return int(self._offsets[index]), int(self._places[index])

    def begins_with(self, other: Sequence[CompletionLine]) -> bool:
        """Whether these lines are `other` and perhaps more."""
        return (
            isinstance(other, RunLines)
            and np.array_equal(self._offsets[: len(other)], other._offsets)
            and (np.array_equal(self._places[: len(other)], other._places))
        )

    def _read(self, index: int) -> CompletionLine:
        offset, place = self.place(index)
        row = self._read_row(offset) or {}
        completions = listed_completions(row)
        # {}: the file was cut back since, and is about to be read again.
        return CompletionLine(0, row, completions[place] if place < len(completions) else {}, offset, place)


# ── completion lists ─────────────────────────────────────────────────────────────────────────────────────────────────

# The weights behind the totals of a step.


def weights_at(run: Run, step: int, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The weight of each of `run.reward_names` at a step, in that order. Empty where they are not known: what the settings or the
    event log say must make up the total of every completion in `rows`."""
    names = run.reward_names
    candidates = (_from_event_log(run, names, step), _from_settings(run, names))
    return next((weights for weights in candidates if weights and _explains(names, weights, rows)), [])


def _from_event_log(run: Run, names: Sequence[str], step: int) -> list[float]:
    """The metrics that a run with varying weights writes at every step."""
    weights = []
    for name in names:
        steps, values = run.series(f"reward_weights/{name}")
        at = int(np.searchsorted(steps, step))
        if at == len(steps) or steps[at] != step:
            return []
        weights.append(float(values[at]))
    return weights


def _from_settings(run: Run, names: Sequence[str]) -> list[float]:
    listed = run.config.get("reward_weights") or [1.0] * len(names)
    are_numbers = isinstance(listed, list) and all(isinstance(x, (int, float)) for x in listed)
    return [float(x) for x in listed] if are_numbers and len(listed) == len(names) else []


def _explains(names: Sequence[str], weights: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether Σ weight · score is the reward of every completion, as far as it has one."""
    for completion in (completion for row in rows for completion in listed_completions(row)):
        scores, reward = scores_of(completion), completion.get("reward")
        known = [(weight, scores.get(name)) for name, weight in zip(names, weights, strict=True)]
        total = sum(weight * score for weight, score in known if isinstance(score, (int, float)))
        if isinstance(reward, (int, float)) and abs(total - reward) > 1e-6 * max(1.0, abs(reward)):
            return False
    return True


# ── completion lists ─────────────────────────────────────────────────────────────────────────────────────────────────

MOST_LINES = 100_000
"""Lines that a list of the whole run shows."""


class CompletionLists:
    """Shows lists in a page's table, and says in `about` and the filter bar what they are.

    Attributes:
        order – (column of the facts, descending); "" is the order of the file.
    """

    def __init__(
        self, model: CompletionModel, table: CompletionTable, detail: CompletionDetail, bar: FilterBar, about: QLabel
    ) -> None:
        self.order: tuple[str, bool] = ("", True)
        self._model, self._table, self._detail, self._bar, self._about = model, table, detail, bar, about

    def show_step(self, run: Run, completions: RunCompletions, step: int) -> None:
        placed = run.placed_groups(step)
        rows = [row for _, row in placed]
        names, labels, weights = run.reward_names, labels_of(run), weights_at(run, step, rows)
        logged = logged_names(rows)
        self._model.set_columns(names, labels, weights, logged)
        self._bar.set_measures(names, labels, logged)
        self._model.show_lines(step_lines(placed, self._bar.query, self.order, completions.facts.largest or None))
        self._reset_view()
        count = sum(len(row.get("completions") or ()) for row in rows)
        shown = sum(line.completion is not None for line in self._model.lines)
        self._about.setText(f"{_counted(len(rows), 'prompt')}, {_counted(count, 'completion')}")
        found = f"{shown:,} of {_counted(count, 'completion')} of this step" if self._bar.is_filtering else ""
        self._tell_found(run, found, is_empty=shown == 0)

    def show_run(self, run: Run, completions: RunCompletions) -> None:
        lines = self._run_lines(completions)
        names, labels, logged = run.reward_names, labels_of(run), completions.found.logged
        self._model.set_columns(names, labels, (), logged, has_steps=True)
        self._bar.set_measures(names, labels, logged)
        self._model.show_lines(lines, completions.facts.largest or None)
        self._reset_view()
        self._tell_run(run, completions)

    def show_weights(self, run: Run, line: CompletionLine) -> None:
        """Write the scores of this line as the sum that makes up its reward."""
        step = line.row.get("step")
        weights = weights_at(run, step, [line.row]) if isinstance(step, int) else []
        self._detail.set_rewards(run.reward_names, labels_of(run), weights)

    def grow(self, run: Run, completions: RunCompletions) -> None:
        """More of the file was read: add what belongs to the list of the whole run."""
        # Sorting takes a tenth of a second where there are a million: once, at the end. A list that is full stays as it is.
        is_full = not self.order[0] and self._model.is_flat and self._model.rowCount() == MOST_LINES
        if (not self.order[0] or completions.is_complete) and not is_full:
            lines = self._run_lines(completions)
            is_new = not (self._model.is_flat and self._model.rowCount() and lines.begins_with(self._model.lines))
            if is_new or self._model.logged != completions.found.logged:
                self.show_run(run, completions)
                return
            self._model.extend(lines)
        self._tell_run(run, completions)

    def _run_lines(self, completions: RunCompletions) -> RunLines:
        numbers = completions.select(self._bar.query)
        if self.order[0]:
            numbers = sort(completions.found, numbers, self.order[0], descending=self.order[1])
        return RunLines(completions.found, numbers[:MOST_LINES], completions.row_at)

    def _reset_view(self) -> None:
        self._table.reset_view()
        self._table.show_sorting(self.order[0], descending=self.order[1])

    def _tell_run(self, run: Run, completions: RunCompletions) -> None:
        count = self._model.rowCount()
        is_cut = count == MOST_LINES or (completions.search is not None and completions.search.is_cut_short)
        parts = [f"The first {count:,} completions" if is_cut else _counted(count, "completion")]
        if not completions.is_complete:
            parts.append(f"{completions.share:.0%} of the file read")
        self._about.setText("Whole run")
        self._tell_found(run, ", ".join(parts), is_empty=not count and completions.is_complete)

    def _tell_found(self, run: Run, sentence: str, *, is_empty: bool) -> None:
        reason = why_empty(self._bar.query, run.reward_names) if is_empty else ""
        self._bar.tell(reason or sentence)


def labels_of(run: Run) -> list[str]:
    return [charts.label_of(name) for name in run.reward_names]


def logged_names(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """The columns that reward functions logged for these rows, and whether any of their values is a number."""
    facts = CompletionFacts()
    for row in rows:
        facts.append(row, 0)
    return facts.logged


def called(line: CompletionLine) -> str:
    """A completion in a few words."""
    return f"step {line.row.get('step')}, number {line.place + 1}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
