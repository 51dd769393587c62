"""What a file that is dropped on the window is for. Only its name and what lies beside it are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QMimeData

from backend.spec.model_and_data_names import DATA_SUFFIXES

Kind = Literal["config", "data", "model", "reward_functions_file"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """`kind` is what to do with it: open it, or put it into the setting of that name."""

    kind: Kind
    path: Path


def dropped(mime: QMimeData) -> Dropped | None:
    """What is being dropped; None for anything but one file or folder of a kind we can use."""
    urls = mime.urls()
    if len(urls) != 1 or not urls[0].isLocalFile():
        return None
    path = Path(urls[0].toLocalFile())
    kind = kind_of(path)
    return Dropped(kind, path) if kind else None


def kind_of(path: Path) -> Kind | None:
    """A folder is a model where it holds one, else a dataset."""
    suffix = path.suffix.lower()
    if path.is_dir():
        return "model" if (path / "config.json").is_file() else "data"
    if suffix in (".yaml", ".yml"):
        return "config"
    if suffix in DATA_SUFFIXES:
        return "data"
    return "reward_functions_file" if suffix in (".py", ".txt") else None
