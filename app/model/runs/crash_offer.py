"""A run that crashed while no window looked: what was lost, and whether it was offered to be resumed before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.model.runs.run_files import newest_checkpoint
from backend.spec.run_folder import RunFolder, all_runs
from backend.spec.runs.archive import summary
from backend.spec.runs.queue import is_fresh


@dataclass(frozen=True, slots=True)
class CrashOffer:
    """A crashed run. `step`: the last one in its diary; `checkpoint`: the step that a resume goes on from, None for the start.
    `key` tells this crash from every other."""

    folder: RunFolder
    step: int
    checkpoint: int | None
    key: str

    @property
    def question(self) -> str:
        return f"{self.folder.name} ended unexpectedly {f'after step {self.step:,}' if self.step else 'before its first step'}."

    @property
    def detail(self) -> str:
        if self.checkpoint is None:
            return "There is no checkpoint yet, so it would start over."
        lost = self.step - self.checkpoint
        again = (
            "Nothing is lost."
            if lost <= 0
            else f"The {f'{lost:,} steps' if lost > 1 else 'step'} after it would be trained again."
        )
        return f"It can go on from step {self.checkpoint:,}. {again}"

    @property
    def action(self) -> str:
        return "Start over" if self.checkpoint is None else f"Resume from step {self.checkpoint:,}"


def last_run(folder: Path | None = None) -> RunFolder | None:
    """The run in `folder` (the runs folder by default) that has trained last; None where none has ever begun."""
    begun = (run for run in all_runs(folder) if not is_fresh(run))
    return max(begun, key=_written_at, default=None)


def crash_offer(run: RunFolder, offered: str) -> CrashOffer | None:
    """The offer to resume this run; None where it has not crashed, or `offered` is the key of this crash."""
    about = summary(run)
    key = f"{run.path}:{run.events.stat().st_size if run.has_diary else 0}"
    if about.state != "crashed" or key == offered:
        return None
    return CrashOffer(run, about.step or 0, newest_checkpoint(run), key)


def _written_at(run: RunFolder) -> float:
    try:
        return run.events.stat().st_mtime
    except OSError:  # deleted in the meantime
        return 0.0
