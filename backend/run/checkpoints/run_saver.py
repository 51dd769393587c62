"""The saving of a run as its diary tells it: one checkpoint at a time in the background, its event once it is complete, the seconds it took.

Decides neither when to save nor what a checkpoint holds: a snapshot is handed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backend.run.checkpoints.checkpoint_writer import CheckpointWriter, Snapshot
from backend.spec.events import Diary, JsonLines
from backend.spec.run_folder import RunFolder


class RunSaver:
    """The checkpoints of one run. `clock` is the trainer's, in seconds."""

    def __init__(
        self, run: RunFolder, diary: Diary, completions: JsonLines, keep: int, clock: Callable[[], float]
    ) -> None:
        self.saved_step: int | None = None
        """The step of the newest checkpoint that is complete; None before there is one."""
        self._run, self._diary, self._logs = run, diary, (diary, completions)
        self._writer = CheckpointWriter(run, keep)
        self._clock = clock
        self._seconds = 0.0

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint begun last needs no more waiting for, and has no event yet."""
        return self._writer.is_done

    def begin(self, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot and begin to write it; `wait` writes its event. Raises DiskFault if the checkpoint before could not be written,
        and what `take` raises."""
        self.wait()
        began = self._clock()
        self._writer.begin(take(), self._logs)
        self._seconds += self._clock() - began

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete, and write its event. Raises DiskFault if it could not be written."""
        began = self._clock()
        if (written := self._writer.wait()) is not None:
            self.tell(written.step, written.path)
            self._seconds += self._clock() - began

    def write_here(self, taken: Snapshot) -> None:
        """As `begin` and `wait`, in the calling thread and on its stream."""
        written = self._writer.write_here(taken, self._logs)
        self.tell(written.step, written.path)

    def tell(self, step: int, path: Path) -> None:
        """Write the event of a complete checkpoint."""
        self.saved_step = step
        self._diary.write("checkpoint", step=step, path=str(path.relative_to(self._run.path)))

    def take_seconds(self) -> float:
        """Seconds that saving has held the run up since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def move_to(self, run: RunFolder) -> None:
        """Write to another place from now on: the run's folder was moved there."""
        self._run = self._writer.run = run

    def close(self) -> None:
        self._writer.close()
