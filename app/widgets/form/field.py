"""The base class of the editors of settings: a label above, the control, and a problem below if there is one.

A field shows a raw value and emits what was typed; it holds no config and checks nothing.
"""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QEvent, QKeyCombination, QObject, Qt, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QApplication, QHBoxLayout, QLabel, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton, PathEdit
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.basic.layout import set_style_property
from app.widgets.form.field_hints import HINTS, WHEN_EMPTY
from app.widgets.form.value_text import limits_text
from backend.spec.config import SETTINGS
from backend.spec.setting import Setting


class Field(QWidget):
    """The editor of one setting. Subclasses create the control and convert between its content and the raw value.

    Attributes:
        setting – the setting that is edited.
        control – the widget that takes the focus.
        wide – whether the field takes a row of the form for itself.

    Signals:
        edited(key, raw value) – the user changed the value; not emitted by `show_value`.
    """

    edited = Signal(str, object)
    wide = False
    control: QWidget

    def __init__(self, setting: Setting, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setting = setting
        self._problem: QLabel | None = None
        self._note: QLabel | None = None
        self._remedy: LinkButton | None = None
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(3)
        self._column.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.label = PlainLabel(setting.label, self)
        self.label.setProperty("role", "muted")
        self.hint = ElidedLabel(parent=self)
        self.hint.setFont(theme.caption_font())
        self.hint.setText(HINTS.get(setting.key, ""))
        self.hint.setVisible(bool(self.hint.text()))  # an empty one would widen its column, and that one alone
        across = QHBoxLayout()
        across.setSpacing(6)
        across.addWidget(self.label)
        across.addWidget(self.hint, 1)
        if self.hint.isHidden():
            across.addStretch()
        self._column.addLayout(across)
        self._column.addWidget(self.build())
        if setting.key in WHEN_EMPTY and isinstance(self.control, QLineEdit | QPlainTextEdit):
            self.control.setPlaceholderText(WHEN_EMPTY[setting.key])
        self._explain()
        if setting.note:
            self.show_note(setting.note)
        if setting.stays_visible:
            self._add_remedy()

    def build(self) -> QWidget:
        """Create `control`; returns the widget for the form: the control, or a widget that contains it."""
        raise NotImplementedError

    def tab_stops(self) -> list[QWidget]:
        """The widgets that Tab visits, in order."""
        return [self.control] if self._remedy is None else [self.control, self._remedy]

    def value(self) -> Any:
        """The raw value that the control shows."""
        raise NotImplementedError

    def show_value(self, raw: Any) -> None:
        """Show `raw`, unless it is shown already: setting the text again would move the cursor while the user types."""
        # The types too: 1 == 1.0 == True, and the text "1" is not the number.
        if not (type(self.value()) is type(raw) and self.value() == raw):
            self.set_control_value(raw)

    def set_control_value(self, raw: Any) -> None:
        """Put `raw` into the control."""
        raise NotImplementedError

    def show_note(self, sentence: str, *, wrong: bool = False) -> None:
        """Show a caption below the field: what is to be known about it, or (`wrong`) why its value cannot be used; "" hides it."""
        if self._note is None:
            self._note = PlainLabel(wordWrap=True)
            self._note.setFont(theme.caption_font())
            self._column.addWidget(self._note)
        self._note.setText(sentence)
        set_style_property(self._note, "role", "problem" if wrong else "muted")
        self._note.setVisible(bool(sentence))

    def show_idle(self, is_idle: bool) -> None:
        """Of a setting that stays visible: whether another one leaves it without effect. It is disabled then, with a link that sets
        the other."""
        self.control.setEnabled(not is_idle)
        if self._remedy is not None:
            self._remedy.setVisible(is_idle)

    def _add_remedy(self) -> None:
        assert self.setting.when is not None
        key, values = self.setting.when
        self._remedy = LinkButton(f"Turn on {SETTINGS[key].label}", self)
        self._remedy.setAccessibleName(f"Turn on {SETTINGS[key].label}, which {self.setting.label} belongs to")
        self._remedy.setToolTip(f"<p>{self.setting.label} is used while {SETTINGS[key].label} is on.</p>")
        self._remedy.setFont(theme.caption_font())
        self._remedy.clicked.connect(lambda: self.edited.emit(key, values[0]))
        self._remedy.hide()
        self._column.addWidget(self._remedy, 0, Qt.AlignmentFlag.AlignLeft)

    def show_problem(self, sentence: str) -> None:
        """Show the sentence below the control and mark the control; "" removes both."""
        self._show_below(sentence, "problem")
        self._mark(bool(sentence))

    def show_warning(self, sentence: str) -> None:
        """Show below the control what is remarkable about a value that can be used; no warning while there is a problem."""
        if not self.control.property("problem"):
            self._show_below(sentence, "muted")

    def _show_below(self, sentence: str, role: str) -> None:
        if self._problem is None and sentence:
            self._problem = PlainLabel()
            self._problem.setFont(theme.caption_font())
            self._problem.setWordWrap(True)
            self._column.addWidget(self._problem)
        if self._problem is not None:
            self._problem.setText(sentence)
            self._problem.setVisible(bool(sentence))
            set_style_property(self._problem, "role", role)

    def emit_edited(self, *_: object) -> None:
        self.edited.emit(self.setting.key, self.value())

    def _explain(self) -> None:
        self.label.setBuddy(self.control)
        description = " ".join([self.setting.help, limits_text(self.setting)]).strip()
        self.control.setAccessibleName(self.setting.label)
        self.control.setAccessibleDescription(description)
        for widget in (self.label, self.control):
            widget.setToolTip(f"<p>{description}</p>")  # rich text wraps; plain text would be one long line
        if not isinstance(self.control, PathEdit):
            self.control.setAcceptDrops(False)  # the event goes on to the window, which knows where a file belongs

    def _mark(self, wrong: bool) -> None:
        """Colour the control's border by the style sheet's `problem` property."""
        set_style_property(self.control, "problem", wrong)


class LineField(Field):
    """A field with a line edit; subclasses convert between text and value."""

    control: QLineEdit

    def build(self) -> QWidget:
        self.control = self.line()
        self.control.textEdited.connect(self.emit_edited)
        return self.control

    def line(self) -> QLineEdit:
        return QLineEdit(self)

    def value(self) -> Any:
        return self.control.text()

    def set_control_value(self, raw: Any) -> None:
        self.control.setText(self.text_of(raw))
        self.control.setCursorPosition(0)  # else a long text would be scrolled to its end

    def text_of(self, raw: Any) -> str:
        return "" if raw is None else str(raw)


class UndoKeys(QObject):
    """Gives the undo and redo shortcuts to the window's menu while a field has the focus.

    A line edit claims them for its own history of typed characters, by accepting ShortcutOverride. This event filter
    answers that event in its place; it is installed on whichever control of a field gets the focus.
    """

    REDO = QKeyCombination(Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier, Qt.Key.Key_Z)
    """Our menu's redo shortcut, also on platforms where the standard one is another."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        app.focusChanged.connect(self._follow)

    def _follow(self) -> None:
        # The slot takes none of the signal's arguments: the widget that lost the focus may be half destroyed, and PySide
        # must not wrap it in a Python object.
        focused = QApplication.focusWidget()
        if focused is not None and _is_control_of_a_field(focused):
            focused.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent):
            keys = QKeySequence.StandardKey
            if event.matches(keys.Undo) or event.matches(keys.Redo) or event.keyCombination() == self.REDO:
                event.ignore()
                return True
        return super().eventFilter(watched, event)


def field_of(widget: QWidget | None) -> Field | None:
    """The field that a widget is part of."""
    while widget is not None and not isinstance(widget, Field):
        widget = widget.parentWidget()
    return widget


def _is_control_of_a_field(widget: QWidget) -> bool:
    field = field_of(widget)
    return field is not None and field.control is widget
