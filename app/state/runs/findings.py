"""The health findings of the run on show, in the order in which the window shows them, and what becomes of a proposal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from backend.config.config import SETTINGS
from backend.runs.steering import STEERABLE
from backend.trainer.health.watch import Episode, reported
from backend.utils.text import quote

if TYPE_CHECKING:
    from app.state.runs.run import Run
    from app.state.session import Session

LONGEST_NOTE = 600
"""Characters shown of a note; the trainer's are shorter, and a event log may be somebody else's."""
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
