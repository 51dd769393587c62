"""Several runs followed together, for charts with a curve for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PySide6.QtCore import QObject, Signal

from app.state.charts import CHARTS, Chart, curves_of
from app.state.evaluations import read_evaluations
from app.state.run import Run
from backend.runs.completion_rows import GroupRow, prompt_key
from backend.runs.metric_names import MEASURES
from backend.runs.run_folder import RunFolder

AXES = {"step": "Step", "tokens": "Tokens", "time": "Time"}
POINTS = 2000  # points of a curve over tokens or time
SEARCHED_STEPS = 100  # newest common steps that are searched for a prompt of both


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """A chart of a comparison; `chart`: that of Monitor which it belongs to."""

    metric: str
    title: str
    chart: Chart


class RunComparison(QObject):
    changed = Signal()  # something new was read; several times a second at most

    def __init__(self, folders: Sequence[Path], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.runs: list[Run] = []  # opened so far, in the order asked for
        self._waiting = list(folders)
        self._positions: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}
        self._open_next()

    @property
    def is_reading(self) -> bool:
        return bool(self._waiting) or not all(run.has_caught_up for run in self.runs)

    def _open_next(self) -> None:
        if self._waiting:
            run = Run(RunFolder(self._waiting.pop(0)), self)
            run.changed.connect(self._on_changed)
            run.state_changed.connect(lambda _state: self._on_changed())
            self.runs.append(run)

    def _on_changed(self) -> None:
        if self.runs[-1].has_caught_up:
            self._open_next()
        self.changed.emit()

    def close(self) -> None:
        self._waiting = []
        for run in self.runs:
            run.close()

    def metrics(self) -> list[ComparedMetric]:
        """Metrics of at least one run, what they improve first, then as on Monitor."""
        rewards = list(dict.fromkeys(name for run in self.runs for name in run.reward_names))
        found = []
        for chart in CHARTS:
            data = (run.data.evals if chart.held_out else run.data.steps for run in self.runs)
            names = dict.fromkeys(name for series in data for name in series.names())
            curves = [curve for curve in curves_of(chart, names, rewards) if curve.metric in names]
            for curve in curves:
                label = curve.label if chart.title == "Other" else f"{chart.title}: {curve.label}"
                found.append(ComparedMetric(curve.metric, chart.title if len(curves) == 1 else label, chart))
        first = {run.measure for run in self.runs}
        return sorted(found, key=lambda one: (one.chart.section != found[0].chart.section, one.metric not in first))

    def curve(self, run: Run, metric: ComparedMetric, axis: str) -> tuple[np.ndarray, np.ndarray]:
        steps, values = run.series(metric.metric, held_out=metric.chart.held_out)
        if axis == "step" or not len(steps):
            return steps, values
        all_steps, positions = self._positions_of(run, axis)
        if not len(positions):
            return np.empty(0), np.empty(0)
        x = np.interp(steps, all_steps, positions)
        return resampled(x, values, self._grid(axis)) if not metric.chart.held_out else (np.round(x), values)

    def changes(self, run: Run, axis: str) -> list[tuple[int, str]]:
        found = [(mark.step, mark.sentence) for mark in run.data.marks if mark.kind == "change"]
        if axis == "step" or not found:
            return found
        all_steps, positions = self._positions_of(run, axis)
        if not len(positions):
            return []
        at = np.interp([step for step, _ in found], all_steps, positions)
        return [(round(x), sentence) for x, (_, sentence) in zip(at.tolist(), found, strict=True)]

    def _grid(self, axis: str) -> np.ndarray:
        ends = [positions[-1] for run in self.runs if len(positions := self._positions_of(run, axis)[1])]
        grid = np.unique(np.round(np.linspace(0, max(ends, default=0.0), POINTS)))
        return np.append(grid, grid[-1] + 1) if len(grid) % 2 else grid

    def _positions_of(self, run: Run, axis: str) -> tuple[np.ndarray, np.ndarray]:
        kept, span = self._positions.get((id(run), axis)), run.data.steps.span
        if kept is None or span is None or len(kept[0]) == 0 or kept[0][-1] != span[1]:
            steps, values = run.series("num_tokens" if axis == "tokens" else "time/step")
            counts = np.nan_to_num(values)
            rising = np.maximum.accumulate(counts) if axis == "tokens" else np.round(np.cumsum(counts) * 1000)
            kept = self._positions[id(run), axis] = (steps, rising)
        return kept

    def span(self, axis: str) -> tuple[float, float] | None:
        """First and last x of all runs, or None."""
        spans = [run.data.steps.span for run in self.runs if run.data.steps.span is not None]
        if not spans:
            return None
        if axis == "step":
            return min(first for first, _ in spans), max(last for _, last in spans)
        grid = self._grid(axis)
        return (float(grid[0]), float(grid[-1])) if len(grid) > 1 else None

    def shared_prompts(self, first: Run, second: Run) -> list[tuple[GroupRow, GroupRow]]:
        """Rows of both runs for each prompt that they share, at the newest step with any."""
        common = sorted(set(first.index.steps()) & set(second.index.steps()), reverse=True)
        for step in common[:SEARCHED_STEPS]:
            theirs = {prompt_key(group): group for group in second.index.rows(step)}
            found = [(group, theirs[key]) for group in first.index.rows(step) if (key := prompt_key(group)) in theirs]
            if found:
                return found
        return []


def figure_of(run: Run) -> tuple[float | None, float | None, float | None, str] | None:
    """A reward, share or loss, the ends of its 95 % interval, and where it was measured.

    Of the run's newest evaluation, else the mean of its measure in training over the last quarter of its steps.
    """
    if (newest := next(read_evaluations(run.folder), None)) is not None:
        made = newest.evaluation
        figures = list(made.headline.sides.values())[-1].figures
        of, where = figures.reward, made.data.split
        if figures.pass_at:
            k, of = min(figures.pass_at.items())
            where = f"pass@{k} on {where}"
        return of.value, of.low, of.high, where
    values = run.series(run.measure)[1]
    last = values[-max(1, len(values) // 4) :]
    last = last[np.isfinite(last)]
    if not len(last):
        return None
    mean = float(last.mean())
    half = 1.96 * float(last.std(ddof=1)) / len(last) ** 0.5 if len(last) > 1 else None
    where = "training" if run.measure == "reward" else f"training {MEASURES[run.measure]}"
    return (mean, None, None, where) if half is None else (mean, mean - half, mean + half, where)


def resampled(x: np.ndarray, values: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(grid, values `[len(grid)]`): at each point the last value reached by then; NaN before and after the run.

    No spike is lost: where more than two steps end between a pair of points, the two get the least and the largest of
    their values. `grid` `[even]` is ascending.
    """
    if not len(x):
        return grid, np.full(len(grid), np.nan)
    at = np.searchsorted(x, grid, side="right") - 1
    found = np.where(at >= 0, values[np.maximum(at, 0)], np.nan)
    starts = np.append(0, at[1::2] + 1)  # of the steps that belong to each pair; the last one ends the last pair
    many = np.flatnonzero(np.diff(starts) > 2)
    padded = np.append(values, np.nan)  # reduceat takes no start behind the end
    found[2 * many] = np.fmin.reduceat(padded, starts)[many]
    found[2 * many + 1] = np.fmax.reduceat(padded, starts)[many]
    # The first point that is not before the end still belongs to the run: it has the value of the last step.
    end = int(np.searchsorted(grid, x[-1]))
    found[end : end + 1], found[end + 1 :] = values[-1], np.nan
    return grid, found
