"""The app's own settings, typed: window geometry, theme, recent files. Nothing about training.

One folder holds them (`prefs.ini`) and the autosaved form (`draft.yaml`); GRPO_STUDIO_PREFS moves it, as tests do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QByteArray, QObject, QSettings

from app.state.charts import NAMINGS, Naming
from backend.utils import file_lock, places
from backend.utils.private_files import make_private_folder, restrict_to_user

RECENT = 10
"""Recent files that are kept."""
SLOTS = 100
"""Most windows that can each have a form of their own at the same time."""

CLOSING = ("ask", "keep", "stop")
"""Values of `when_closing`."""


class Prefs(QObject):
    """Typed access to QSettings. Every read names its type: from an INI file, False comes back as the text "false".

    Attributes:
        folder – where everything is stored.
        slot – the number of this window's form, from 1.
    """

    def __init__(self, folder: Path | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder = folder or places.preferences_folder()
        make_private_folder(self.folder)
        if self.folder == places.preferences_folder():
            restrict_to_user(self.folder)  # an earlier version made it as wide as the umask said
        self.slot = 1
        self._claimed: int | None = None
        self._settings = QSettings(str(self.folder / "prefs.ini"), QSettings.Format.IniFormat)

    def claim(self) -> int:
        """Lock the first form that no other window has, for the life of this process; returns its number, from 1.

        Two windows with one file would overwrite each other's edits silently.
        """
        for number in range(1, SLOTS + 1):
            handle = file_lock.try_hold(self.folder / f"draft-{number}.lock")
            if handle is None:
                continue
            self._claimed, self.slot = handle, number
            return number
        return self.slot

    def release(self) -> None:
        """Unlock the form for another window."""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    @property
    def draft_file(self) -> Path:
        """Where the form is stored between launches; a second window has a file of its own."""
        return self.folder / ("draft.yaml" if self.slot == 1 else f"draft-{self.slot}.yaml")

    @property
    def config_file(self) -> Path | None:
        """The YAML file that the form was opened from or saved to."""
        return self._path(self._of_slot("config_file"))

    @config_file.setter
    def config_file(self, path: Path | None) -> None:
        self._settings.setValue(self._of_slot("config_file"), str(path or ""))

    def _of_slot(self, key: str) -> str:
        return key if self.slot == 1 else f"{key}_{self.slot}"

    def folder_of(self, kind: str) -> Path | None:
        """The folder in which a thing of this kind (config, dataset, model, …) was last chosen."""
        return self._path(f"folder_{kind}")

    def remember_folder(self, kind: str, folder: Path) -> None:
        self._settings.setValue(f"folder_{kind}", str(folder))

    @property
    def recent_files(self) -> list[Path]:
        """Configs that were opened or saved, the latest first."""
        return [Path(text) for text in self._text("recent_files").split("\n") if text]

    def remember(self, path: Path) -> None:
        """Put a config first among the recent files."""
        others = [recent for recent in self.recent_files if recent != path]
        self._settings.setValue("recent_files", "\n".join(map(str, [path, *others][:RECENT])))
        self.remember_folder("config", path.parent)

    def forget_recent(self) -> None:
        self._settings.remove("recent_files")

    @property
    def open_cards(self) -> set[str]:
        """Cards of the form whose Advanced was left open."""
        return set(self._text("open_cards").split())

    def set_card_open(self, key: str, opened: bool) -> None:
        now = self.open_cards | {key} if opened else self.open_cards - {key}
        self._settings.setValue("open_cards", " ".join(sorted(now)))

    def used(self, kind: str) -> list[str]:
        """Models or datasets that were chosen recently, the latest first."""
        return [text for text in self._text(f"used_{kind}").split("\n") if text]

    def remember_used(self, kind: str, name: str) -> None:
        others = [recent for recent in self.used(kind) if recent != name]
        self._settings.setValue(f"used_{kind}", "\n".join([name, *others][:RECENT]))

    def favourites(self, kind: str) -> set[str]:
        """Models or datasets with a star."""
        return {text for text in self._text(f"favourite_{kind}").split("\n") if text}

    def set_favourite(self, kind: str, name: str, starred: bool) -> None:
        now = self.favourites(kind) | {name} if starred else self.favourites(kind) - {name}
        self._settings.setValue(f"favourite_{kind}", "\n".join(sorted(now)))

    @property
    def run_columns(self) -> list[tuple[str, int]]:
        """Columns of the table of runs, in order: (key, width in pixels); empty until they were chosen."""
        try:
            found = json.loads(self._text("run_columns") or "[]")
            return [(str(key), int(width)) for key, width in found]
        except (TypeError, ValueError, RecursionError):
            return []

    @run_columns.setter
    def run_columns(self, columns: Sequence[tuple[str, int]]) -> None:
        self._settings.setValue("run_columns", json.dumps(columns))

    @property
    def run_details_shown(self) -> bool:
        """Whether the details of the selected run are shown beside the table."""
        return bool(self._settings.value("run_details_shown", True, type=bool))

    @run_details_shown.setter
    def run_details_shown(self, shown: bool) -> None:
        self._settings.setValue("run_details_shown", shown)

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
    def log_charts(self) -> set[str]:
        """Titles of the charts whose value axis is logarithmic."""
        return {text for text in self._text("log_charts").split("\n") if text}

    def set_log_chart(self, title: str, log: bool) -> None:
        now = self.log_charts | {title} if log else self.log_charts - {title}
        self._settings.setValue("log_charts", "\n".join(sorted(now)))

    @property
    def chart_marks(self) -> bool:
        """Whether charts show marks."""
        return bool(self._settings.value("chart_marks", True, type=bool))

    @chart_marks.setter
    def chart_marks(self, shown: bool) -> None:
        self._settings.setValue("chart_marks", shown)

    @property
    def chart_columns(self) -> Naming:
        """What the columns of a chart's CSV table are called."""
        known: dict[str, Naming] = {naming: naming for naming in NAMINGS}
        return known.get(self._text("chart_columns"), "labels")

    @chart_columns.setter
    def chart_columns(self, naming: Naming) -> None:
        self._settings.setValue("chart_columns", naming)

    @property
    def check_updates(self) -> bool:
        """Whether to ask for a newer version at start; off until the user turns it on."""
        return bool(self._settings.value("check_updates", False, type=bool))

    @check_updates.setter
    def check_updates(self, check: bool) -> None:
        self._settings.setValue("check_updates", check)

    @property
    def notifies(self) -> bool:
        """Whether the desktop shows a notification when a run ends or is in trouble and the window is not in front."""
        return bool(self._settings.value("notifies", True, type=bool))

    @notifies.setter
    def notifies(self, notify: bool) -> None:
        self._settings.setValue("notifies", notify)

    @property
    def shows_progress(self) -> bool:
        """Whether the app's icon in the Dock or launcher shows the percent of the run."""
        return bool(self._settings.value("shows_progress", True, type=bool))

    @shows_progress.setter
    def shows_progress(self, show: bool) -> None:
        self._settings.setValue("shows_progress", show)

    @property
    def when_closing(self) -> str:
        """What becomes of a training when the window is closed: ask, keep or stop."""
        answer = self._text("when_closing")
        return answer if answer in CLOSING else "ask"

    @when_closing.setter
    def when_closing(self, answer: str) -> None:
        self._settings.setValue("when_closing", answer)

    @property
    def offered_crash(self) -> str:
        """The crash that was last offered to be resumed, so that each is offered once."""
        return self._text("offered_crash")

    @offered_crash.setter
    def offered_crash(self, crash: str) -> None:
        self._settings.setValue("offered_crash", crash)

    @property
    def updates_checked(self) -> float:
        """When a newer version was last asked for, in unix seconds; 0 for never."""
        return float(str(self._settings.value("updates_checked", 0.0)))

    @updates_checked.setter
    def updates_checked(self, time_s: float) -> None:
        self._settings.setValue("updates_checked", time_s)

    @property
    def geometry(self) -> QByteArray:
        """The bytes of QWidget.saveGeometry; empty before the first quit."""
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
