"""The app's own few settings, typed: how the window looked and where people last were. Nothing about training.

One folder holds them (`prefs.ini`) and the autosaved form (`draft.yaml`); GRPO_STUDIO_PREFS moves it, as tests do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from PySide6.QtCore import QByteArray, QObject, QSettings, QStandardPaths

FOLDER_VARIABLE = "GRPO_STUDIO_PREFS"


def default_folder() -> Path:
    """The platform's folder for a person's application data; beside it `places.runs_folder` puts the runs."""
    moved = os.environ.get(FOLDER_VARIABLE)
    if moved:
        return Path(moved).expanduser()
    base = QStandardPaths.writableLocation(QStandardPaths.StandardLocation.GenericDataLocation)
    return Path(base) / ("GRPO Studio" if sys.platform == "darwin" else "grpo-studio")


class Prefs(QObject):
    """Typed access to QSettings. Every read names its type, since an INI file gives back the text "false" for False."""

    def __init__(self, folder: Path | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder = folder or default_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._settings = QSettings(str(self.folder / "prefs.ini"), QSettings.Format.IniFormat)

    @property
    def draft_file(self) -> Path:
        """Where the form is kept between two launches."""
        return self.folder / "draft.yaml"

    @property
    def config_file(self) -> Path | None:
        """The YAML file that the form was opened from or saved to."""
        return self._path("config_file")

    @config_file.setter
    def config_file(self, path: Path | None) -> None:
        self._settings.setValue("config_file", str(path or ""))

    @property
    def last_folder(self) -> Path:
        """Where the last file was chosen."""
        return self._path("last_folder") or Path.home()

    @last_folder.setter
    def last_folder(self, path: Path) -> None:
        self._settings.setValue("last_folder", str(path))

    @property
    def theme(self) -> str:
        return self._text("theme") or "system"

    @theme.setter
    def theme(self, mode: str) -> None:
        self._settings.setValue("theme", mode)

    @property
    def sidebar_collapsed(self) -> bool:
        return bool(self._settings.value("sidebar_collapsed", False, type=bool))

    @sidebar_collapsed.setter
    def sidebar_collapsed(self, collapsed: bool) -> None:
        self._settings.setValue("sidebar_collapsed", collapsed)

    @property
    def geometry(self) -> QByteArray:
        """What QWidget.saveGeometry gave; empty before the first quit."""
        value = self._settings.value("geometry")
        return value if isinstance(value, QByteArray) else QByteArray()

    @geometry.setter
    def geometry(self, geometry: QByteArray) -> None:
        self._settings.setValue("geometry", geometry)

    def sync(self) -> None:
        """Write to disk now."""
        self._settings.sync()

    def _text(self, key: str) -> str:
        return str(self._settings.value(key, "", type=str))

    def _path(self, key: str) -> Path | None:
        text = self._text(key)
        return Path(text) if text else None
