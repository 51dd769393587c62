"""One editor for each kind of setting: label above, control, and the problem below where there is one.

A field shows raw values and says what was typed; it holds no config and judges nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QLabel, QLineEdit, QMenu, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets import texts
from app.widgets.controls import Menu, NumberEdit, PathEdit, ProseEdit, Switch
from backend.spec.setting import Setting


class Field(QWidget):
    """A setting's editor.

    Attributes: about – the setting; control – the widget that takes the focus; wide – whether it wants a whole row.
    Signals: edited(key, raw value) when a person changed it, never when `show_value` did.
    """

    edited = Signal(str, object)
    wide = False
    control: QWidget

    def __init__(self, about: Setting, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.about = about
        self._problem: QLabel | None = None
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(3)
        self._column.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.label = QLabel(about.label)
        self.label.setProperty("role", "muted")
        self._column.addWidget(self.label)
        self._column.addWidget(self.build())
        self._explain()

    def build(self) -> QWidget:
        """Make `control`, and the widget that stands in the form: itself, or what holds it."""
        raise NotImplementedError

    def stops(self) -> list[QWidget]:
        """Where Tab halts in this field."""
        return [self.control]

    def value(self) -> Any:
        raise NotImplementedError

    def show_value(self, raw: Any) -> None:
        """Show `raw`; nothing is moved while it is already there, so that the cursor stays put."""
        if not (type(self.value()) is type(raw) and self.value() == raw):
            self.put(raw)

    def put(self, raw: Any) -> None:
        raise NotImplementedError

    def show_problem(self, sentence: str) -> None:
        """Show the sentence below the control, or take it away."""
        if self._problem is None and sentence:
            self._problem = QLabel()
            self._problem.setProperty("role", "problem")
            self._problem.setFont(theme.caption_font())
            self._problem.setWordWrap(True)
            self._column.addWidget(self._problem)
        if self._problem is not None and self._problem.text() != sentence:
            self._problem.setText(sentence)
            self._problem.setVisible(bool(sentence))
            self._mark(bool(sentence))

    def say_edited(self, *_: object) -> None:
        self.edited.emit(self.about.key, self.value())

    def _explain(self) -> None:
        self.label.setBuddy(self.control)
        self.control.setAccessibleName(self.about.label)
        self.control.setAccessibleDescription(self.about.help)
        for widget in (self.label, self.control):
            widget.setToolTip(f"<p>{self.about.help}</p>")  # a paragraph wraps; plain text would be one long line

    def _mark(self, wrong: bool) -> None:
        self.control.setProperty("problem", wrong)
        self.control.style().unpolish(self.control)
        self.control.style().polish(self.control)


class LineField(Field):
    """Anything typed on one line; subclasses say how text and value belong together."""

    control: QLineEdit

    def build(self) -> QWidget:
        self.control = self.line()
        self.control.textEdited.connect(self.say_edited)
        return self.control

    def line(self) -> QLineEdit:
        return QLineEdit()

    def value(self) -> Any:
        return self.control.text()

    def put(self, raw: Any) -> None:
        self.control.setText(self.text_of(raw))
        self.control.setCursorPosition(0)  # of what does not fit, the beginning shows

    def text_of(self, raw: Any) -> str:
        return "" if raw is None else str(raw)


class TextField(LineField):
    def line(self) -> QLineEdit:
        line = QLineEdit()
        line.setPlaceholderText(str(self.about.default or ""))
        return line


class NumberField(LineField):
    """Takes 1e-5 and keeps it as typed."""

    def line(self) -> QLineEdit:
        line = NumberEdit(self.about.unit)
        line.setPlaceholderText(texts.number_text(self.about.default))
        return line

    def value(self) -> Any:
        text = self.control.text()
        if self.about.optional and not text.strip():
            return None
        return texts.number_value(text, self.about.kind == "int")

    def text_of(self, raw: Any) -> str:
        return texts.number_text(raw)


class ListField(LineField):
    wide = True

    def value(self) -> Any:
        return texts.list_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return texts.list_text(raw)


class NumbersField(LineField):
    wide = True

    def line(self) -> QLineEdit:
        line = NumberEdit()
        line.setPlaceholderText("1 for each")
        return line

    def value(self) -> Any:
        return texts.numbers_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return texts.numbers_text(raw)


class PathField(LineField):
    """A file, a folder or an id: typed, chosen with Browse, or dropped."""

    wide = True

    def line(self) -> QLineEdit:
        return PathEdit()

    def value(self) -> Any:
        return texts.path_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return texts.path_text(raw)

    def build(self) -> QWidget:
        row = QWidget()
        across = QHBoxLayout(row)
        across.setContentsMargins(0, 0, 0, 0)
        across.setSpacing(theme.SPACE)
        across.addWidget(super().build(), 1)
        self.browse = QPushButton("Browse…")
        self.browse.setMinimumWidth(116)  # with and without a menu's arrow alike, so that the fields align
        self.browse.setAccessibleName(f"Browse for {self.about.label}")
        across.addWidget(self.browse)
        self._wire_browse()
        return row

    def stops(self) -> list[QWidget]:
        return [self.control, self.browse]

    def take(self, path: str) -> None:
        """As if the path had been typed; an empty one (a dialog called off) changes nothing."""
        if path:
            self.put(path)
            self.say_edited()

    def _wire_browse(self) -> None:
        if self.about.kind == "dataset":
            menu = QMenu(self.browse)
            menu.addAction("File…", self.choose_file)
            menu.addAction("Folder…", self.choose_folder)
            self.browse.setMenu(menu)
            self.browse.setProperty("menu", True)
        else:
            self.browse.clicked.connect(self.choose_folder if self.about.kind == "model" else self.choose_file)

    def choose_file(self) -> None:
        kinds = {"file": "Python (*.py *.txt)", "dataset": "Data (*.jsonl *.json *.csv *.parquet)"}
        self.take(QFileDialog.getOpenFileName(self, self.about.label, self._start(), kinds[self.about.kind])[0])

    def choose_folder(self) -> None:
        self.take(QFileDialog.getExistingDirectory(self, self.about.label, self._start()))

    def _start(self) -> str:
        path = Path(self.value()).expanduser()
        return str(path.parent if self.value() and path.parent.is_dir() else Path.home())


class MenuField(Field):
    control: Menu

    def build(self) -> QWidget:
        self.control = Menu()
        for place, choice in enumerate(self.about.choices):
            self.control.addItem(choice.label, choice.value)
            self.control.setItemData(place, choice.sentence, Qt.ItemDataRole.ToolTipRole)
        self.control.activated.connect(self.say_edited)
        return self.control

    def value(self) -> Any:
        return self.control.currentData()

    def put(self, raw: Any) -> None:
        self.control.choose(str(raw))


class ExplainedMenuField(MenuField):
    """A menu with the help beside it, where the choice shapes the whole form."""

    wide = True

    def build(self) -> QWidget:
        row, said = QWidget(), QLabel(self.about.help, wordWrap=True)
        said.setProperty("role", "muted")
        across = QHBoxLayout(row)
        across.setContentsMargins(0, 0, 0, 0)
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(super().build(), 1, Qt.AlignmentFlag.AlignTop)
        across.addWidget(said, 3)
        return row


class SwitchField(Field):
    control: Switch

    def build(self) -> QWidget:
        self.control = Switch()
        self.control.clicked.connect(self.say_edited)
        return self.control

    def value(self) -> Any:
        return self.control.isChecked()

    def put(self, raw: Any) -> None:
        self.control.setChecked(raw is True or str(raw).strip().lower() in ("true", "yes", "on", "1"))


class ProseField(Field):
    control: ProseEdit
    wide = True
    lines = 4

    def build(self) -> QWidget:
        self._showing = False
        self.control = ProseEdit(self.lines)
        self.control.edited.connect(self._say_typed)
        return self.control

    def value(self) -> Any:
        return self.control.toPlainText()

    def put(self, raw: Any) -> None:
        # A plain text edit has no signal for what was typed by hand alone, as a line edit has.
        self._showing = True
        self.control.setPlainText(self.text_of(raw))
        self._showing = False

    def text_of(self, raw: Any) -> str:
        return str(raw or "")

    def _say_typed(self) -> None:
        if not self._showing:
            self.say_edited()


class MappingField(ProseField):
    """One `key: value` a line."""

    lines = 2

    def value(self) -> Any:
        return texts.mapping_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return texts.mapping_text(raw)


class StagesField(ProseField):
    """One stage a line, as a JSON object such as {"iters": 100, "reward_weights": [1, 0.5]}."""

    lines = 3

    def value(self) -> Any:
        return texts.stages_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return texts.stages_text(raw)


class FactField(Field):
    """Something to know that cannot be changed."""

    wide = True

    def build(self) -> QWidget:
        self.control = QLabel(self.about.help)
        self.control.setWordWrap(True)
        self._raw: Any = self.about.default
        return self.control

    def value(self) -> Any:
        return self._raw

    def put(self, raw: Any) -> None:
        self._raw = raw


_KINDS: dict[str, type[Field]] = {
    "int": NumberField,
    "float": NumberField,
    "bool": SwitchField,
    "text": TextField,
    "prose": ProseField,
    "choice": MenuField,
    "file": PathField,
    "model": PathField,
    "dataset": PathField,
    "list": ListField,
    "numbers": NumbersField,
    "rewards": ListField,
    "mapping": MappingField,
    "stages": StagesField,
    "fact": FactField,
}


def field(about: Setting) -> Field:
    """The editor for a setting's kind."""
    if about.section == "algorithm" and about.kind == "choice":
        return ExplainedMenuField(about)
    return _KINDS[about.kind](about)
