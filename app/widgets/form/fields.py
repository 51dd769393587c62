"""The editors of settings, one for each kind: how a raw value becomes text or a choice, and back."""

import json
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEvent, QKeyCombination, QObject, Qt, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QApplication, QLabel, QLineEdit, QMenu, QPlainTextEdit, QWidget

from app import theme
from app.state.messages import problems_to
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton, NumberEdit, PathEdit, ProseEdit, Switch
from app.widgets.basic.dialogs import open_file, open_folder
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import column, configure, holder, row, set_style_property
from app.widgets.form import value_text
from backend.config import first_choices
from backend.config.config import SETTINGS
from backend.config.setting import Choice, Setting
from backend.rewards.catalogue import split_names
from backend.runs import saved_weights
from backend.runs.run_folder import find_run
from backend.runs.saved_weights import peft_folder, runs_with_adapters
from backend.tools.catalogue import classes_of
from backend.utils import places
from backend.utils.errors import UserError
from backend.utils.files import possible_path

_TEXTS = tomllib.loads((places.resources() / "field_hints.toml").read_text("utf-8"))
HINTS: dict[str, str] = _TEXTS["hints"]
WHEN_EMPTY: dict[str, str] = _TEXTS["when_empty"]


class Field(QWidget):
    """The editor of one setting. Subclasses create the control and convert between its content and the raw value."""

    edited = Signal(str, object)  # key, raw value
    wide = False
    control: QWidget
    explanation: QLabel | None = None  # the help beside the control, where there is room for it

    def __init__(self, setting: Setting, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setting = setting
        self._problem: QLabel | None = None
        self._note: QLabel | None = None
        self._remedy: LinkButton | None = None
        self.label = label(setting.label, role="muted", parent=self)
        hint = HINTS.get(setting.key, "")  # an empty one would widen its column
        self.hint = ElidedLabel(parent=self, font=theme.caption_font(), text=hint, shown=bool(hint))
        head = row(self.label, (self.hint, 1), spacing=6)
        if not hint:
            head.addStretch(1)
        self.tab_stops: list[QWidget] = []
        self._column = column(head, self.build(), into=self, spacing=3)
        self.tab_stops.insert(0, self.control)
        if setting.key in WHEN_EMPTY and isinstance(self.control, QLineEdit | QPlainTextEdit):
            self.control.setPlaceholderText(WHEN_EMPTY[setting.key])
        self.label.setBuddy(self.control)
        description = " ".join([setting.help, value_text.limits_text(setting)]).strip()
        tip = f"<p>{description}</p>"  # rich text wraps; plain text would be one long line
        configure(self.control, name=setting.label, tip=tip, accessibleDescription=description)
        self.label.setToolTip(tip)
        if not isinstance(self.control, PathEdit):
            self.control.setAcceptDrops(False)  # the window handles dropped files
        if setting.note:
            self.show_note(setting.note)
        if setting.stays_visible and setting.when is not None:
            key, values = setting.when
            self._remedy = LinkButton(
                f"Turn on {SETTINGS[key].label}",
                self,
                on_click=lambda: self.edited.emit(key, values[0]),
                tip=f"<p>{setting.label} is used while {SETTINGS[key].label} is on.</p>",
                name=f"Turn on {SETTINGS[key].label}, which {setting.label} belongs to",
                font=theme.caption_font(),
                shown=False,
            )
            self.tab_stops.append(self._remedy)
            self._column.addWidget(self._remedy, 0, Qt.AlignmentFlag.AlignLeft)

    def build(self) -> QWidget:
        """Create `control`, add other widgets to `tab_stops`, and return the widget to show."""
        raise NotImplementedError

    def value(self) -> Any:
        raise NotImplementedError

    def set_control_value(self, raw: Any) -> None:
        raise NotImplementedError

    def show_value(self, raw: Any) -> None:
        """Show `raw`, unless it is shown already: setting the same text would move the cursor while the user types."""
        # The types too: 1 == 1.0 == True, and the text "1" is not the number.
        if not (type(self.value()) is type(raw) and self.value() == raw):
            self.set_control_value(raw)

    def show_note(self, sentence: str, *, wrong: bool = False) -> None:
        """Show a caption below the field; "" hides it."""
        self._note = self._show_caption(self._note, sentence, "problem" if wrong else "muted")

    def show_problem(self, problem: str, warning: str = "") -> None:
        """Show a problem, which also marks the control, else a warning."""
        self._problem = self._show_caption(self._problem, problem or warning, "problem" if problem else "muted")
        set_style_property(self.control, "problem", bool(problem))

    def show_idle(self, is_idle: bool) -> None:
        self.control.setEnabled(not is_idle)
        if self._remedy is not None:
            self._remedy.setVisible(is_idle)

    def _show_caption(self, caption: QLabel | None, sentence: str, role: str) -> QLabel | None:
        if caption is None and sentence:
            caption = label(font=theme.caption_font(), wrap=True)
            self._column.addWidget(caption)
        if caption is not None:
            caption.setText(sentence)
            set_style_property(caption, "role", role)
            caption.setVisible(bool(sentence))
        return caption

    def emit_edited(self, *_: object) -> None:
        self.edited.emit(self.setting.key, self.value())


class LineField(Field):
    control: QLineEdit

    def build(self) -> QWidget:
        self.control = self.line()
        self.control.textEdited.connect(self.emit_edited)
        return self.control

    def line(self) -> QLineEdit:
        return QLineEdit(self, placeholderText=str(self.setting.default or ""))

    def value(self) -> Any:
        return self.control.text()

    def set_control_value(self, raw: Any) -> None:
        self.control.setText(self.text_of(raw))
        self.control.setCursorPosition(0)  # else a long text is scrolled to its end

    def text_of(self, raw: Any) -> str:
        return "" if raw is None else str(raw)


class NumberField(LineField):
    """A number with its unit; scientific notation such as 1e-5 is kept as typed."""

    def line(self) -> QLineEdit:
        return NumberEdit(self.setting.unit, self, placeholderText=value_text.number_text(self.setting.default))

    def value(self) -> Any:
        text = self.control.text()
        if self.setting.optional and not text.strip():
            return None
        return value_text.number_value(text, self.setting.kind == "int")

    def text_of(self, raw: Any) -> str:
        return value_text.number_text(raw)


class ListField(LineField):
    """A list of texts, names of reward functions or numbers, separated by commas."""

    wide = True

    def line(self) -> QLineEdit:
        if self.setting.kind != "numbers":
            return QLineEdit(self)
        return NumberEdit(parent=self, placeholderText="1 for each")

    def value(self) -> Any:
        text = self.control.text()
        if self.setting.kind == "numbers":
            parts = (part.strip().replace("−", "-") for part in text.strip().strip("[]").split(","))
            return [value_text.float_value(part) for part in parts if part]
        return value_text.list_value(text) if self.setting.kind == "list" else split_names(text)

    def text_of(self, raw: Any) -> str:
        if self.setting.kind == "list":
            return value_text.list_text(raw)
        write = value_text.number_text if self.setting.kind == "numbers" else str
        return ", ".join(map(write, raw)) if isinstance(raw, list) else str(raw or "")


class MenuField(Field):
    """A choice from a combo box; one that decides which other settings apply has its help beside it."""

    control: ComboBox

    def build(self) -> QWidget:
        self._choices, default_label = list(self.setting.choices), self.setting.default_entry
        if default_label:
            default = next(choice for choice in self._choices if choice.value == self.setting.default)
            entry = Choice(default.value, f"{default_label} ({default.label})", default.sentence)
            self._choices.insert(0, entry)
        self.control = ComboBox(self)
        for choice in self._choices:
            if not choice.is_hidden:
                self._add(choice)
        self.control.activated.connect(self.emit_edited)
        if self.setting.section != "algorithm":
            return self.control
        self.wide = True
        self.explanation = label(self.setting.help, role="muted", wrap=True)
        top = (self.control, 1, Qt.AlignmentFlag.AlignTop)
        return holder(row(top, (self.explanation, 3), spacing=2 * theme.SPACE))

    def _add(self, choice: Choice) -> None:
        self.control.addItem(choice.label, choice.value)
        self.control.setItemData(self.control.count() - 1, choice.sentence, Qt.ItemDataRole.ToolTipRole)

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        for choice in self._choices:
            if choice.is_hidden and choice.value == raw and self.control.findData(raw) < 0:
                self._add(choice)
        self.control.choose(str(raw))


class SwitchField(Field):
    control: Switch

    def build(self) -> QWidget:
        self.control = Switch(self, clicked=self.emit_edited)
        return self.control

    def value(self) -> Any:
        return self.control.isChecked()

    def set_control_value(self, raw: Any) -> None:
        self.control.setChecked(raw is True or str(raw).strip().lower() in ("true", "yes", "on", "1"))


class ProseField(Field):
    """Text of several lines; `write` and `read` convert the raw value."""

    control: ProseEdit
    wide = True
    lines = 4
    placeholder = ""
    write: Callable[[Any], str] = staticmethod(lambda raw: str(raw or ""))
    read: Callable[[str], Any] = staticmethod(str)

    def build(self) -> QWidget:
        self._is_setting_text = False
        # Undo is the form's.
        self.control = ProseEdit(self.lines, self, undoRedoEnabled=False, placeholderText=self.placeholder)
        name = f"Use the suggested text for {self.setting.label}"
        self.suggestion = LinkButton("Use the suggested text", self, on_click=self._take_suggestion, name=name)
        self.tab_stops.append(self.suggestion)
        self.control.textChanged.connect(self._on_text)
        self._on_text()
        return holder(column(self.control, (self.suggestion, 0, Qt.AlignmentFlag.AlignLeft), spacing=0))

    def _on_text(self) -> None:
        is_empty = not self.control.toPlainText().strip()
        self.suggestion.setVisible(self.setting.key == "system_prompt" and is_empty)
        if not self._is_setting_text:
            self.emit_edited()

    def _take_suggestion(self) -> None:
        self.set_control_value(first_choices.SYSTEM_PROMPT)
        self.emit_edited()
        self.control.setFocus()

    def value(self) -> Any:
        return self.read(self.control.toPlainText())

    def set_control_value(self, raw: Any) -> None:
        self._is_setting_text = True  # QPlainTextEdit has no signal for the user's changes alone
        self.control.setPlainText(self.write(raw))
        self._is_setting_text = False


class MappingField(ProseField):
    write = staticmethod(value_text.mapping_text)
    read = staticmethod(value_text.mapping_value)


class EnvironmentField(MappingField):
    """A class as file.py::Class, or a mapping of names to classes."""

    lines = 2
    read = staticmethod(lambda text: value_text.mapping_value(text) or "")

    def build(self) -> QWidget:
        built = super().build()
        name = "Browse for a file with an environment"
        self.browse = button("Browse…", self._choose_file, name=name, minimumWidth=theme.scaled(116))
        self.tab_stops.append(self.browse)
        return holder(row((built, 1), (self.browse, 0, Qt.AlignmentFlag.AlignTop)))

    def _choose_file(self) -> None:
        path = open_file(self, self.setting.key, self.setting.label, FILE_PATTERNS["file"])
        if path is None:
            return
        with problems_to(self.show_problem):
            classes = classes_of(path) or ["Class"]
            entries = {kind.lower(): f"{path}::{kind}" for kind in classes}
            self.set_control_value(entries if len(classes) > 1 else f"{path}::{classes[0]}")
            self.emit_edited()


class StagesField(ProseField):
    lines = 3
    placeholder = (
        'One stage per line, such as {"iters": 100, "max_completion_length": 256}\n'
        '{"iters": 300, "max_completion_length": 1024, "learning_rate": 5e-6}'
    )

    @staticmethod
    def write(raw: Any) -> str:
        return "\n".join(json.dumps(stage, ensure_ascii=False) for stage in raw) if isinstance(raw, list) else str(raw)

    @staticmethod
    def read(text: str) -> Any:
        """The stages, or the text itself if a line is not JSON."""
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            return text


_ACCEPTS: dict[str, Callable[[Path], bool]] = {
    "model": Path.is_dir,
    "adapter": lambda path: path.is_dir() or path.suffix.lower() == ".safetensors",
    "dataset": lambda path: False,
    "file": lambda path: path.suffix.lower() in (".py", ".txt"),
    "hosts": lambda path: path.suffix.lower() == ".json",
}
_PLACEHOLDERS = {
    "model": f"such as {first_choices.MODEL}, or drop a folder here",
    "data": f"such as {first_choices.DATASET}, or drop a file here",
    "adapter": "none: starts from the base model",
    "reward_functions_file": "drop a Python file here",
    "tools_file": "none; drop a Python file with functions here",
    "hosts": "none: this machine alone",
}
FILE_PATTERNS = {
    "file": "Python (*.py *.txt)",
    "hosts": "Hosts (*.json)",
    "dataset": "Data (*.jsonl *.json *.csv *.parquet)",
    "adapter": "Adapters (*.safetensors)",
}


class PathField(LineField):
    """A path or a Hugging Face id: typed, dropped, or chosen with Browse."""

    pick_requested = Signal()
    wide = True
    hand_over: Callable[[str], object] | None = None

    def line(self) -> QLineEdit:
        return PathEdit(_ACCEPTS[self.setting.kind], placeholderText=_PLACEHOLDERS.get(self.setting.key, ""))

    def value(self) -> Any:
        text = self.control.text()
        is_ours = text.startswith(places.BUNDLED)
        return f"{places.resources()}/{text.removeprefix(places.BUNDLED)}" if is_ours else text

    def text_of(self, raw: Any) -> str:
        return places.path_text(str(raw or ""))

    def set_control_value(self, raw: Any) -> None:
        super().set_control_value(raw)
        if self.control.text().startswith(("/", "~")):
            self.control.end(False)  # the name of the file tells more than the folders before it

    def build(self) -> QWidget:
        has_menu, self.menu = self.setting.kind in ("dataset", "adapter"), QMenu(self)
        self.menu.addAction("File…", self.choose_file)
        self.menu.addAction("Folder…", self.choose_folder)
        self.browse = button(
            "Import…" if self.setting.key == "reward_functions_file" else "Browse…",
            None if has_menu else self.choose_folder if self.setting.kind == "model" else self.choose_file,
            menu=self.menu if has_menu else None,
            name=f"Browse for {self.setting.label}",
            minimumWidth=theme.scaled(116),  # with and without a menu's arrow, so that the fields align
        )
        self.tab_stops.append(self.browse)
        return holder(row((super().build(), 1), self.browse))

    def take(self, path: Path | str | None) -> None:
        """Set the path as if it had been typed; an empty one (a cancelled dialog) changes nothing."""
        if path and self.hand_over is not None:
            self.hand_over(str(path))
        elif path:
            self.set_control_value(str(path))
            self.emit_edited()

    def choose_file(self) -> None:
        pattern = FILE_PATTERNS[self.setting.kind]
        self.take(open_file(self, self.setting.key, self.setting.label, pattern, self.near()))

    def choose_folder(self) -> None:
        self.take(open_folder(self, self.setting.key, self.setting.label, self.near()))

    def near(self) -> Path | None:
        path = possible_path(self.value())
        return path if path is not None and path.is_absolute() and not path.is_relative_to(places.resources()) else None


class AdapterField(PathField):
    """Adapters to start from: a folder, a file, or a checkpoint of a run."""

    import_requested = Signal(str)  # folder

    def build(self) -> QWidget:
        self.import_button = button(
            "Import for this model",
            lambda: self.import_requested.emit(str(peft_folder(str(self.value())))),
            tip="<p>Converts it to mlx-lm's format beside its folder, and compares the logits.</p>",
            name="Import the adapter of peft for the model of this run",
            shown=False,
        )
        built = holder(column(super().build(), (self.import_button, 0, Qt.AlignmentFlag.AlignLeft)))
        self.tab_stops.append(self.import_button)
        self.control.textChanged.connect(self._offer_import)
        self.menu.addSection("Your runs")
        self.menu.aboutToShow.connect(self._list_runs)
        return built

    def show_importing(self, sentence: str) -> None:
        """Show the progress of the import; "" when it has ended."""
        self.import_button.setEnabled(not sentence)
        self.show_note(sentence)

    def _offer_import(self) -> None:
        is_peft = peft_folder(str(self.value())) is not None
        self.import_button.setVisible(is_peft)
        self.show_note("An adapter of peft, as TRL and others train them." if is_peft else "")

    def _list_runs(self) -> None:
        for action in self.menu.actions()[3:]:  # after File, Folder and the heading
            self.menu.removeAction(action)
        names = runs_with_adapters()
        for name in names:
            of_run = self.menu.addMenu(name.replace("&", "&&"))
            of_run.aboutToShow.connect(partial(self._fill_checkpoints, of_run, name))
        if not names:
            self.menu.addAction("None has adapters yet").setEnabled(False)

    def _fill_checkpoints(self, menu: QMenu, name: str) -> None:
        menu.clear()
        with suppress(UserError):  # deleted since the menu was opened
            for choice in saved_weights.choices(find_run(name)):
                text = name if choice.key == saved_weights.END else f"{name}@{choice.key}"
                menu.addAction(choice.label, partial(self.take, text))


_KINDS: dict[str, type[Field]] = {
    **dict.fromkeys(("int", "float"), NumberField),
    "bool": SwitchField,
    "text": LineField,
    "prose": ProseField,
    "choice": MenuField,
    **dict.fromkeys(("file", "hosts", "model", "dataset"), PathField),
    "adapter": AdapterField,
    **dict.fromkeys(("list", "numbers", "rewards"), ListField),
    "mapping": MappingField,
    "stages": StagesField,
}


def make_field(setting: Setting, parent: QWidget | None = None) -> Field:
    kind = EnvironmentField if setting.key == "environment" else _KINDS[setting.kind]
    return kind(setting, parent)


class UndoKeys(QObject):
    """Gives the undo and redo shortcuts to the window's menu while a field has the focus."""

    REDO = QKeyCombination(Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier, Qt.Key.Key_Z)

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        theme.application().focusChanged.connect(self._follow)

    def _follow(self) -> None:
        # The slot ignores the signal's arguments: PySide must not wrap a widget that is half destroyed.
        focused = QApplication.focusWidget()
        field = field_of(focused)
        if focused is not None and field is not None and field.control is focused:
            focused.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent):
            keys = QKeySequence.StandardKey
            if event.matches(keys.Undo) or event.matches(keys.Redo) or event.keyCombination() == self.REDO:
                event.ignore()
                return True
        return super().eventFilter(watched, event)


def field_of(widget: QWidget | None) -> Field | None:
    while widget is not None and not isinstance(widget, Field):
        widget = widget.parentWidget()
    return widget
