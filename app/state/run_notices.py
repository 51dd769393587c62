"""What a user who looks elsewhere should hear of a run: that it has ended, or is in trouble. It decides and shows nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from PySide6.QtCore import QObject, Signal

from app.state.run import Run
from app.state.run_summary import count_text
from backend.config.config import SETTINGS
from backend.runs.archive import first_and_last_means
from backend.runs.steering import STEERABLE
from backend.trainer.health.watch import Episode, reported
from backend.utils.text import quote

if TYPE_CHECKING:
    from app.state.run import Run
    from app.state.session import Session

# The reward at the two ends of a run: what the training has changed.

MOST_AVERAGED = 20
"""Rewards kept of each end: at least as many as `first_and_last_means` averages."""


def rewards_at_the_ends(run: Run) -> list[float]:
    """The first and the last rewards of a run that are numbers, as many as `first_and_last_means` may need."""
    return _ends(_finite_rewards(run))


def reward_before_and_after(run: Run) -> tuple[float | None, float | None]:
    """Mean reward over the first and over the last few steps; (None, the only one) below two."""
    rewards = _finite_rewards(run)  # of 100,000 steps only the ends become Python numbers
    return first_and_last_means(_ends(rewards), len(rewards))


def _finite_rewards(run: Run) -> np.ndarray:
    rewards = run.series("reward")[1]
    return rewards[np.isfinite(rewards)]


def _ends(values: np.ndarray) -> list[float]:
    has_middle = len(values) > 2 * MOST_AVERAGED
    return (np.concatenate([values[:MOST_AVERAGED], values[-MOST_AVERAGED:]]) if has_middle else values).tolist()


# ── run notices ──────────────────────────────────────────────────────────────────────────────────────────────────────

TITLES = {"finished": "finished", "stopped": "stopped", "failed": "failed", "crashed": "crashed"}
"""A state that ends a run → its word in the title."""
TROUBLE = ("warning", "bad")
"""Levels of a health finding that are told."""


class RunNotices(QObject):
    """Follows the run that is shown, and tells each piece of news once. What was so when the run was opened is no news.

    Signals:
        raised(title, sentence) – something that a notification should say.
    """

    raised = Signal(str, str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._run: Run | None = None
        self._was_live = False
        self._known: set[str] = set()
        self._was_silent = False

    def follow(self, run: Run | None, *, is_launched: bool = False) -> None:
        """Follow this run from now on. `is_launched`: it was just started, so that even an end at once is news."""
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
        elif self._was_live and state in TITLES:
            self._was_live = False
            self.raised.emit(f"{run.folder.name} {TITLES[state]}", run.problem or _result(run))

    def _on_changed(self) -> None:
        run = self._run
        if run is None or run is not self.sender():
            return
        is_news = self._was_live  # findings of before are only remembered
        self._was_live = self._was_live or (run.is_live and run.folder.is_locked())
        for finding in run.health:
            code = str(finding.get("code"))
            if code not in self._known and finding.get("level") in TROUBLE:
                self._known.add(code)
                if is_news:
                    self.raised.emit(run.folder.name, str(finding.get("sentence") or code))
        if run.silence and not self._was_silent:
            self.raised.emit(run.folder.name, run.silence)
        self._was_silent = bool(run.silence)


def _result(run: Run) -> str:
    """“32 steps. Reward 1.48 → 2.17.”; of a stopped run, the sentence of its ending."""
    if run.state == "stopped":
        return str((run.ending or {}).get("sentence") or "Everything is saved.")
    before, after = reward_before_and_after(run)
    steps = f"{count_text(run.step, 'step')}."
    return f"{steps} Reward {before:.3g} → {after:.3g}." if before is not None and after is not None else steps


LONGEST_NOTE = 600
"""Characters shown of a note; the trainer's are shorter, and an event log may be somebody else's."""
LEVELS = ("error", "warning", "info")
"""The worst first."""


class Findings:
    """What is found in one run; findings that were dismissed stay so as long as the run is on show."""

    def __init__(self) -> None:
        self._dismissed: set[tuple[str, int | None]] = set()

    def dismiss(self, episode: Episode) -> None:
        self._dismissed.add((episode.code, episode.since))

    def of(self, run: Run) -> list[Episode]:
        """Those that hold, the worst first; then those that no longer do, the newest first. A warning of the trainer counts as one."""
        warnings = [
            _warning(event) for event in run.notes if event.get("level") == "warning" and "answers" not in event
        ]
        episodes = [episode for episode in (*reported(run.health), *warnings) if self._is_shown(episode)]
        current = [episode for episode in episodes if episode.until is None]
        past = [episode for episode in episodes if episode.until is not None]
        return [*sorted(current, key=_rank), *reversed(past)]

    def _is_shown(self, episode: Episode) -> bool:
        return (episode.code, episode.since) not in self._dismissed


def note_text(note: Mapping[str, Any]) -> str:
    """The sentence of a note on one printable line."""
    return quote(note.get("sentence") or "", LONGEST_NOTE)


def take_up(session: Session, run: Run | None, settings: Mapping[str, Any]) -> None:
    """Set what a finding proposes: in the run, if it is live and the settings can change during one, else in the form, with Undo.
    Raises UserError where the run cannot be asked."""
    labels = ", ".join(f"{SETTINGS[key].label} {_shown(value)}" for key, value in settings.items())
    if run is not None and run.state in ("running", "paused") and set(settings) <= set(STEERABLE):
        run.change(settings)
        session.message.emit(f"Asked for {labels}, from the next step on.")
        return
    session.draft.update(settings, "Advice of the doctor")
    session.page_requested.emit("train")
    session.field_requested.emit(next(iter(settings)))
    session.message.emit(f"The form has {labels} now; Undo brings back what was there.")


def _warning(event: Mapping[str, Any]) -> Episode:
    sentence = note_text(event)
    return Episode(sentence, "Warning", "warning", sentence, "", None)


def _rank(episode: Episode) -> tuple[int, int]:
    level = LEVELS.index(episode.level) if episode.level in LEVELS else 1
    return level, -(episode.since or 0)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"“{value}”" if isinstance(value, str) else str(value)
