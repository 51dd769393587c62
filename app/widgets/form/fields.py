"""One field class for each kind of setting: how a raw value becomes text or a choice, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIcon, QKeySequence, QShortcut
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QMenu, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import ComboBox, LinkButton, NumberEdit, PathEdit, ProseEdit, Switch
from app.widgets.basic.dialogs import open_file, open_folder
from app.widgets.basic.labels import PlainLabel, give_menu, key_name
from app.widgets.form import value_text
from app.widgets.form.field import Field, LineField
from backend.config import first_choices
from backend.config.setting import Choice, Setting
from backend.rewards.catalogue.catalog import split_names
from backend.runs import saved_weights
from backend.runs.run_folder import find_run
from backend.runs.saved_weights import END, peft_folder, runs_with_adapters
from backend.utils import places
from backend.utils.errors import UserError
from backend.utils.files import possible_path


class TextField(LineField):
    """Text as it is typed; the default is the placeholder."""

    def line(self) -> QLineEdit:
        line = QLineEdit(self)
        line.setPlaceholderText(str(self.setting.default or ""))
        return line


class NumberField(LineField):
    """A number with its unit; scientific notation such as 1e-5 is kept as typed."""

    def line(self) -> QLineEdit:
        line = NumberEdit(self.setting.unit, self)
        line.setPlaceholderText(value_text.number_text(self.setting.default))
        return line

    def value(self) -> Any:
        text = self.control.text()
        if self.setting.optional and not text.strip():
            return None
        return value_text.number_value(text, self.setting.kind == "int")

    def text_of(self, raw: Any) -> str:
        return value_text.number_text(raw)


class ListField(LineField):
    """A list of texts, separated by commas."""

    wide = True

    def value(self) -> Any:
        return value_text.list_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return value_text.list_text(raw)


class RewardsField(ListField):
    """A list of reward functions; an entry may have arguments in brackets, with commas between them."""

    def value(self) -> Any:
        return split_names(self.control.text())

    def text_of(self, raw: Any) -> str:
        return ", ".join(map(str, raw)) if isinstance(raw, list) else str(raw or "")


class NumbersField(LineField):
    """A list of numbers, separated by commas."""

    wide = True

    def line(self) -> QLineEdit:
        line = NumberEdit(parent=self)
        line.setPlaceholderText("1 for each")
        return line

    def value(self) -> Any:
        return value_text.numbers_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return value_text.numbers_text(raw)


_SUGGESTIONS = {"system_prompt": first_choices.SYSTEM_PROMPT}
"""Setting → a text that is offered while the field is empty."""


class MenuField(Field):
    """A choice from a combo box; each item's sentence is its tool tip."""

    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox(self)
        for choice in self._entries():
            if not choice.is_written:
                self._add(choice)
        self.control.activated.connect(self.emit_edited)  # not currentIndexChanged: `activated` is the user's alone
        return self.control

    def _add(self, choice: Choice) -> None:
        self.control.addItem(choice.label, choice.value)
        self.control.setItemData(self.control.count() - 1, choice.sentence, Qt.ItemDataRole.ToolTipRole)

    def _entries(self) -> list[Choice]:
        """The choices, and before them an entry for the default where there is one. Both have its value, so picking either stays as it
        is picked, and a file that names the value shows the first."""
        choices, label = list(self.setting.choices), self.setting.default_entry
        if not label:
            return choices
        default = next(choice for choice in choices if choice.value == self.setting.default)
        return [Choice(default.value, f"{label} ({default.label})", default.sentence), *choices]

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        for choice in self._entries():
            if choice.is_written and choice.value == raw and self.control.findData(raw) < 0:
                self._add(choice)
        self.control.choose(str(raw))


class ExplainedMenuField(MenuField):
    """A combo box with its help beside it, for a choice that decides which other settings apply."""

    wide = True

    def build(self) -> QWidget:
        row, help = QWidget(self), PlainLabel(self.setting.help, wordWrap=True)
        help.setProperty("role", "muted")
        across = QHBoxLayout(row)
        across.setContentsMargins(0, 0, 0, 0)
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(super().build(), 1, Qt.AlignmentFlag.AlignTop)
        across.addWidget(help, 3)
        return row


class SwitchField(Field):
    """A bool as a switch; text such as “yes” from a file counts as on."""

    control: Switch

    def build(self) -> QWidget:
        self.control = Switch(self)
        self.control.clicked.connect(self.emit_edited)
        return self.control

    def value(self) -> Any:
        return self.control.isChecked()

    def set_control_value(self, raw: Any) -> None:
        self.control.setChecked(raw is True or str(raw).strip().lower() in ("true", "yes", "on", "1"))


class ProseField(Field):
    """Text of several lines, with a suggestion for some settings.

    Attributes:
        suggestion – a link that fills in the suggested text; hidden unless there is one and the field is empty.
    """

    control: ProseEdit
    wide = True
    lines = 4

    def build(self) -> QWidget:
        self._is_setting_text = False
        self.control = ProseEdit(self.lines, self)
        self.control.setUndoRedoEnabled(False)  # undo is the form's
        self.control.edited.connect(self._emit_typed)
        self.suggestion = LinkButton("Use the suggested text")
        self.suggestion.setAccessibleName(f"Use the suggested text for {self.setting.label}")
        self.suggestion.clicked.connect(self._take_suggestion)
        self.control.textChanged.connect(self._offer_suggestion)
        holder = QWidget(self)
        column = QVBoxLayout(holder)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.control)
        column.addWidget(self.suggestion, 0, Qt.AlignmentFlag.AlignLeft)
        self._offer_suggestion()  # only now that it has a parent: before, it would be shown as a window for a moment
        return holder

    def tab_stops(self) -> list[QWidget]:
        return [self.control, self.suggestion]

    def _offer_suggestion(self) -> None:
        self.suggestion.setVisible(self.setting.key in _SUGGESTIONS and not self.control.toPlainText().strip())

    def _take_suggestion(self) -> None:
        self.set_control_value(_SUGGESTIONS[self.setting.key])
        self.emit_edited()
        self.control.setFocus()

    def value(self) -> Any:
        return self.control.toPlainText()

    def set_control_value(self, raw: Any) -> None:
        # QPlainTextEdit has no signal like QLineEdit's textEdited, for the user's changes alone.
        self._is_setting_text = True
        self.control.setPlainText(self.text_of(raw))
        self._is_setting_text = False

    def text_of(self, raw: Any) -> str:
        return str(raw or "")

    def _emit_typed(self) -> None:
        if not self._is_setting_text:
            self.emit_edited()


class MappingField(ProseField):
    """A mapping, one `key: value` per line."""

    lines = 2

    def value(self) -> Any:
        return value_text.mapping_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return value_text.mapping_text(raw)


class StagesField(ProseField):
    """Stages, one JSON object per line."""

    lines = 3

    def build(self) -> QWidget:
        holder = super().build()
        self.control.setPlaceholderText(
            'One stage a line, such as {"iters": 100, "max_completion_length": 256}\n'
            '{"iters": 300, "max_completion_length": 1024, "learning_rate": 5e-6}'
        )
        return holder

    def value(self) -> Any:
        return value_text.stages_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return value_text.stages_text(raw)


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
            found = saved_weights.choices(find_run(name))
        except UserError:  # deleted since the menu was opened
            found = []
        for choice in found:
            text = name if choice.key == END else f"{name}@{choice.key}"
            menu.addAction(choice.label, lambda text=text: self.take(text))


_KINDS: dict[str, type[Field]] = {
    "int": NumberField,
    "float": NumberField,
    "bool": SwitchField,
    "text": TextField,
    "prose": ProseField,
    "choice": MenuField,
    "file": PathField,
    "hosts": PathField,
    "model": PathField,
    "adapter": AdapterField,
    "dataset": PathField,
    "list": ListField,
    "numbers": NumbersField,
    "rewards": RewardsField,
    "mapping": MappingField,
    "stages": StagesField,
}


def make_field(setting: Setting, parent: QWidget | None = None) -> Field:
    """The field for a setting's kind. Pass the final parent: a widget that is reparented is polished again."""
    if setting.section == "algorithm" and setting.kind == "choice":
        return ExplainedMenuField(setting, parent)
    return _KINDS[setting.kind](setting, parent)
