"""The field for a path or a Hugging Face id: typed, chosen with Browse or from a list, or dropped; with a note on what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIcon, QKeySequence, QShortcut
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QMenu, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import PathEdit
from app.widgets.basic.file_dialogs import open_file, open_folder
from app.widgets.basic.key_names import key_name
from app.widgets.basic.labels_and_buttons import give_menu
from app.widgets.form import value_text
from app.widgets.form.field import LineField
from backend.config import first_choices
from backend.runs import weight_choices
from backend.runs.adapter_source import peft_folder, runs_with_adapters
from backend.runs.run_folder import find_run
from backend.runs.weight_choices import END
from backend.utils import places
from backend.utils.errors import UserError
from backend.utils.files import possible_path

_ACCEPTS: dict[str, Callable[[Path], bool]] = {
    "model": Path.is_dir,
    "adapter": lambda path: path.is_dir() or path.suffix.lower() == ".safetensors",
    "dataset": lambda path: False,
    "file": lambda path: path.suffix.lower() in (".py", ".txt"),
    "hosts": lambda path: path.suffix.lower() == ".json",
}
"""Kind of setting → whether a dropped path is accepted. A dataset is always left to the window, which sets its columns too."""
_PLACEHOLDERS = {
    "model": f"such as {first_choices.MODEL}, or drop a folder here",
    "data": f"such as {first_choices.DATASET}, or drop a file here",
    "adapter": "none: starts from the base model",
    "reward_functions_file": "drop a Python file here",
    "hosts": "none: this machine alone",
}
_BROWSE_LABELS = {"reward_functions_file": "Import…"}
"""Setting → the button's label, where it is another than Browse."""


class PathField(LineField):
    """A line edit with a Browse button.

    Attributes:
        hand_over – if set, it is called with a chosen value, and sets the field and whatever belongs to the value.

    Signals:
        pick_requested – the user wants to choose from a list; only after `offer_list`.
    """

    pick_requested = Signal()
    wide = True

    def line(self) -> QLineEdit:
        line = PathEdit(_ACCEPTS[self.setting.kind])
        line.setPlaceholderText(_PLACEHOLDERS.get(self.setting.key, ""))
        return line

    def value(self) -> Any:
        return value_text.path_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return value_text.path_text(raw)

    def build(self) -> QWidget:
        row = QWidget(self)
        across = QHBoxLayout(row)
        across.setContentsMargins(0, 0, 0, 0)
        across.setSpacing(theme.SPACE)
        across.addWidget(super().build(), 1)
        self.browse = QPushButton(_BROWSE_LABELS.get(self.setting.key, "Browse…"))
        self.browse.setMinimumWidth(
            theme.scaled(116)
        )  # with and without a menu's arrow alike, so that the fields align
        self.browse.setAccessibleName(f"Browse for {self.setting.label}")
        across.addWidget(self.browse)
        self._wire_browse()
        return row

    def tab_stops(self) -> list[QWidget]:
        return [self.control, self.browse]

    hand_over: Callable[[str], object] | None = None

    def take(self, path: str) -> None:
        """Set the path as if it had been typed; an empty one (a cancelled dialog) changes nothing."""
        if path and self.hand_over is not None:
            self.hand_over(path)
        elif path:
            self.set_control_value(path)
            self.emit_edited()

    def offer_list(self) -> None:
        """Add an arrow to the line that emits `pick_requested`, as the Down key does then."""
        self._arrow = self.control.addAction(QIcon(), QLineEdit.ActionPosition.TrailingPosition)
        self._arrow.setToolTip(f"Choose from a list ({key_name(QKeySequence(Qt.Key.Key_Down))})")
        self._arrow.triggered.connect(self.pick_requested)
        shortcut = QShortcut(QKeySequence(Qt.Key.Key_Down), self.control, self.pick_requested.emit)
        shortcut.setContext(Qt.ShortcutContext.WidgetShortcut)
        theme.signals.changed.connect(self._draw_arrow)
        self._draw_arrow()

    def _draw_arrow(self) -> None:
        self._arrow.setIcon(icons.icon("chevron-down", theme.palette().muted, 16))

    def _wire_browse(self) -> None:
        if self.setting.kind == "dataset":
            menu = QMenu(self.browse)
            menu.addAction("File…", self.choose_file)
            menu.addAction("Folder…", self.choose_folder)
            give_menu(self.browse, menu)
        else:
            self.browse.clicked.connect(self.choose_folder if self.setting.kind == "model" else self.choose_file)

    def choose_file(self) -> None:
        kinds = {
            "file": "Python (*.py *.txt)",
            "hosts": "Hosts (*.json)",
            "dataset": "Data (*.jsonl *.json *.csv *.parquet)",
        }
        self.take(
            str(open_file(self, self.setting.key, self.setting.label, kinds[self.setting.kind], self._near()) or "")
        )

    def choose_folder(self) -> None:
        self.take(str(open_folder(self, self.setting.key, self.setting.label, self._near()) or ""))

    def _near(self) -> Path | None:
        """The path in the field, if it is the user's own: what is bundled lies in the app's folder, where nobody keeps files."""
        path = possible_path(self.value())
        return path if path is not None and path.is_absolute() and not path.is_relative_to(places.resources()) else None


# ── adapter field ────────────────────────────────────────────────────────────────────────────────────────────────────

# The field for trained adapters to start from: a folder, a file, or a run of the user's at its end or at a
# checkpoint.


class AdapterField(PathField):
    """A path field whose Browse menu also lists the user's runs, and of each its end, its best checkpoint and the others. For an adapter of
    peft it shows a button that asks to import it.

    Signals:
        import_requested(folder) – the user wants the adapter of peft in this folder as one of mlx-lm's.
    """

    import_requested = Signal(str)

    def build(self) -> QWidget:
        self.import_button = QPushButton("Import for this model")
        self.import_button.setToolTip(
            "<p>It is written anew in mlx-lm's format, beside its folder, and compared by logits with what peft makes of it.</p>"
        )
        self.import_button.setAccessibleName("Import the adapter of peft for the model of this run")
        self.import_button.clicked.connect(self._request_import)
        self.import_button.hide()
        both = QWidget(self)
        column = QVBoxLayout(both)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addWidget(super().build())
        column.addWidget(self.import_button, 0, Qt.AlignmentFlag.AlignLeft)
        self.control.textChanged.connect(self._offer_import)
        return both

    def tab_stops(self) -> list[QWidget]:
        return [*super().tab_stops(), self.import_button]

    def show_importing(self, sentence: str) -> None:
        """Show what the import is doing; "" when it has ended."""
        self.import_button.setEnabled(not sentence)
        self.show_note(sentence)

    def _offer_import(self) -> None:
        is_peft = peft_folder(str(self.value())) is not None
        self.import_button.setVisible(is_peft)
        self.show_note("An adapter of peft, as TRL and others train them." if is_peft else "")

    def _request_import(self) -> None:
        if (folder := peft_folder(str(self.value()))) is not None:
            self.import_requested.emit(str(folder))

    def _wire_browse(self) -> None:
        menu = QMenu(self.browse)
        menu.aboutToShow.connect(lambda: self._fill(menu))
        give_menu(self.browse, menu)

    def choose_file(self) -> None:
        kinds = "Adapters (*.safetensors)"
        self.take(str(open_file(self, self.setting.key, self.setting.label, kinds, self._near()) or ""))

    def _fill(self, menu: QMenu) -> None:
        menu.clear()
        menu.addAction("Folder…", self.choose_folder)
        menu.addAction("File…", self.choose_file)
        menu.addSection("Your runs")
        names = runs_with_adapters()
        for name in names:
            of_run = menu.addMenu(name.replace("&", "&&"))
            of_run.aboutToShow.connect(lambda of_run=of_run, name=name: self._fill_checkpoints(of_run, name))
        if not names:
            menu.addAction("None has adapters yet").setEnabled(False)

    def _fill_checkpoints(self, menu: QMenu, name: str) -> None:
        """One entry for each state of a run's weights."""
        menu.clear()
        try:
            found = weight_choices.choices(find_run(name))
        except UserError:  # deleted since the menu was opened
            found = []
        for choice in found:
            text = name if choice.key == END else f"{name}@{choice.key}"
            menu.addAction(choice.label, lambda text=text: self.take(text))
