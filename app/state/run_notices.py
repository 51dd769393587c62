"""News of a run: notifications and health findings."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from PySide6.QtCore import QObject, Signal

from app.state.run import Run
from app.state.run_summary import count_text
from backend.config.config import SETTINGS
from backend.runs.archive import averaging_window, first_and_last_means
from backend.runs.metric_names import MEASURES
from backend.runs.run_names import name_of
from backend.runs.steering import changed
from backend.trainer.health.watch import Episode, reported
from backend.utils.errors import UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from app.state.session import Session

ENDINGS = ("finished", "stopped", "failed", "crashed")
TROUBLE = ("warning", "bad")
LONGEST_NOTE = 600
WINDOW = averaging_window(1_000_000)
LEVELS = ("error", "warning", "info")


def finite_values(run: Run, metric: str) -> list[float]:
    values = run.series(metric)[1]
    return values[np.isfinite(values)].tolist()


def before_and_after(run: Run, metric: str, full: float = 1.0) -> tuple[float | None, float | None]:
    """Means of a metric over the first and the last few steps, as parts of `full`; (None, the only one) below two."""
    values = run.series(metric)[1] / full
    known = values[np.isfinite(values)]
    if (size := len(known)) > 4 * WINDOW:  # only the ends are averaged, and a tile asks twice a second
        known = np.concatenate([known[:WINDOW], known[-WINDOW:]])
    return first_and_last_means(known.tolist(), size)


class RunNotices(QObject):
    """Follows the run on show, and raises each piece of news once: (title, sentence)."""

    raised = Signal(str, str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._run: Run | None = None
        self._was_live = False
        self._known: set[str] = set()
        self._was_silent = False

    def follow(self, run: Run | None, *, is_launched: bool = False) -> None:
        """`is_launched`: it was just started, so that even an end at once is news."""
        self._run = run
        self._was_live = is_launched
        self._was_silent = False
        self._known = set()
        if run is not None:
            run.changed.connect(self._on_changed)
            run.state_changed.connect(self._on_state)

    def _on_state(self, state: str) -> None:
        run = self._run
        if run is None or run is not self.sender():
            return
        if run.is_live:
            self._was_live = True
        elif self._was_live and state in ENDINGS:
            self._was_live = False
            self.raised.emit(f"{name_of(run.folder)} {state}", run.problem or _result(run))

    def _on_changed(self) -> None:
        run = self._run
        if run is None or run is not self.sender():
            return
        is_news = self._was_live  # findings of before are only remembered
        self._was_live = self._was_live or (run.is_live and run.folder.is_locked())
        for finding in run.data.health:
            code = str(finding.get("code"))
            if code not in self._known and finding.get("level") in TROUBLE:
                self._known.add(code)
                if is_news:
                    self.raised.emit(name_of(run.folder), str(finding.get("sentence") or code))
        if run.silence and not self._was_silent:
            self.raised.emit(name_of(run.folder), run.silence)
        self._was_silent = bool(run.silence)


def _result(run: Run) -> str:
    if run.state == "stopped":
        return str((run.data.ending or {}).get("sentence") or "Everything is saved.")
    before, after = before_and_after(run, run.measure)
    steps = f"{count_text(run.step, 'step')}."
    if before is None or after is None:
        return steps
    return f"{steps} {MEASURES[run.measure].capitalize()} {before:.3g} → {after:.3g}."


def findings_of(run: Run, dismissed: Container[tuple[str, int | None]]) -> list[Episode]:
    """The findings that hold, the worst first, then past ones."""
    episodes = [*reported(run.data.health)]
    for note in run.data.notes:
        if note.get("level") == "warning" and not {"answers", "during"} & note.keys():  # a pause's has a card
            episodes.append(Episode(note_text(note), note_text(note), "", title="Warning"))
    episodes = [episode for episode in episodes if (episode.code, episode.since) not in dismissed]

    def rank(episode: Episode) -> tuple[int, int]:
        return LEVELS.index(episode.level) if episode.level in LEVELS else 1, -(episode.since or 0)

    current = sorted((episode for episode in episodes if episode.until is None), key=rank)
    return [*current, *(episode for episode in reversed(episodes) if episode.until is not None)]


def note_text(note: Mapping[str, Any]) -> str:
    return quote(note.get("sentence") or "", LONGEST_NOTE)


def _may_change(run: Run, settings: Mapping[str, Any]) -> bool:
    with suppress(UserError):  # fixed in every run, or in one that began as this one
        changed(run.settings_now()[0], settings, run.step)
        return True
    return False


def take_up(session: Session, run: Run | None, settings: Mapping[str, Any]) -> None:
    """Apply settings in the live run if they can change there, else in the form, with the other settings of a run
    that the form did not start. Raises UserError."""

    def shown(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else f"“{value}”" if isinstance(value, str) else str(value)

    labels = ", ".join(f"{SETTINGS[key].label} {shown(value)}" for key, value in settings.items())
    if run is not None and run.state in ("running", "paused") and _may_change(run, settings):
        run.change(settings)
        session.message.emit(f"Asked for {labels}, from the next step on.")
    elif run is None or session.is_launched(run.folder):
        session.draft.update(settings, "Advice of the doctor")
        session.show_setting(next(iter(settings)))
        session.message.emit(f"The form has {labels} now; Undo brings back what was there.")
    elif session.load_settings(run.folder, settings, f", with {labels}"):
        session.show_setting(next(iter(settings)))
