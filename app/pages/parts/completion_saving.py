"""Saving completions into a file: asks where, writes in slices on the event loop, and says how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QFileDialog, QWidget

from app.model.completions.export import SUFFIXES, CompletionExport, Place
from backend.spec.faults import Mistake

SLICE_S = 0.010


class CompletionSaving:
    """One export at a time. `tell` takes a sentence, `changed` is called when an export has begun or ended."""

    def __init__(self, page: QWidget, tell: Callable[[str], object], changed: Callable[[], object]) -> None:
        self._page, self._tell, self._changed = page, tell, changed
        self._export: CompletionExport | None = None
        self._timer = QTimer(page)
        self._timer.timeout.connect(self._advance)

    @property
    def is_busy(self) -> bool:
        return self._export is not None

    def ask(self, source: Path, places: Sequence[Place]) -> None:
        """Ask for a file, and write these completions of `source` into it."""
        filters = ";;".join(f"{name} (*{suffix})" for suffix, name in SUFFIXES.items())
        start = str(Path.home() / f"{source.parent.name} completions.jsonl")
        chosen, name = QFileDialog.getSaveFileName(self._page, "Save completions", start, filters)
        if chosen:
            target = Path(chosen)
            typed = target.suffix in SUFFIXES
            suffix = next((suffix for suffix, text in SUFFIXES.items() if name.startswith(text)), ".jsonl")
            self.save(source, places, target if typed else target.with_name(target.name + suffix))

    def save(self, source: Path, places: Sequence[Place], target: Path) -> None:
        """Begin to write; the event loop goes on with it."""
        try:
            self._export = CompletionExport(source, places, target)
        except Mistake as mistake:
            self._tell(mistake.faults[0].sentence)
            return
        self._timer.start(0)
        self._changed()

    def cancel(self) -> None:
        """Stop the export; nothing of it is left."""
        if self._export is not None:
            self._export.cancel()
            self._end(f"{self._export.target.name} was not saved.")

    def _advance(self) -> None:
        export = self._export
        if export is None:
            self._timer.stop()
            return
        try:
            if export.advance(SLICE_S):
                self._tell(f"Saving {export.written:,} of {export.total:,} completions…")
            else:
                self._end(f"{export.written:,} completions are in {export.target.name}.")
        except Mistake as mistake:
            self._end(mistake.faults[0].sentence)

    def _end(self, sentence: str) -> None:
        self._timer.stop()
        self._export = None
        self._tell(sentence)
        self._changed()
