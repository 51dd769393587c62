"""The use of a file dropped on the window or opened from the desktop, decided by its name and, for a folder, by its contents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QMimeData

from backend.config.model_and_data_names import DATA_SUFFIXES
from backend.runs.run_folder import RunFolder

Kind = Literal["config", "run", "data", "model", "reward_functions_file"]

_DEEDS: dict[Kind, str] = {
    "config": "Drop to open {}",
    "run": "Drop to show the run {}",
    "data": "Drop to train on the questions of {}",
    "model": "Drop to train the model {}",
    "reward_functions_file": "Drop to score with the functions of {}",
}


@dataclass(frozen=True, slots=True)
class DroppedFile:
    """`kind` is its use: a config to open, a run to show, or the setting to put its path into."""

    kind: Kind
    path: Path

    @property
    def sentence(self) -> str:
        """What dropping it does."""
        return _DEEDS[self.kind].format(self.path.name)


def dropped_file(mime: QMimeData) -> DroppedFile | None:
    """The file or folder being dropped; None for anything but a single one of a known kind."""
    urls = mime.urls()
    if len(urls) != 1 or not urls[0].isLocalFile():
        return None
    path = Path(urls[0].toLocalFile())
    kind = kind_of(path)
    return DroppedFile(kind, path) if kind else None


def kind_of(path: Path) -> Kind | None:
    """A folder with a event log is a run, one with a config.json a model, any other a dataset."""
    suffix = path.suffix.lower()
    if path.is_dir():
        if RunFolder(path).has_event_log:
            return "run"
        return "model" if (path / "config.json").is_file() else "data"
    if suffix in (".yaml", ".yml"):
        return "config"
    if suffix in DATA_SUFFIXES:
        return "data"
    return "reward_functions_file" if suffix in (".py", ".txt") else None
