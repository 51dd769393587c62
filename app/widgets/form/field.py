"""What every editor of a setting shares: the label above, the control, and the problem below where there is one.

A field shows raw values and says what was typed; it holds no config and judges nothing.
"""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QEvent, QKeyCombination, QObject, Qt, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QApplication, QLabel, QLineEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import PathEdit
from app.widgets.form.limits import limits
from backend.spec.setting import Setting


class Field(QWidget):
    """A setting's editor.

    Attributes: about – the setting; control – the widget that takes the focus; wide – whether it wants a whole row.
    Signals: edited(key, raw value) when a person changed it, never when `show_value` did.
    """

    edited = Signal(str, object)
    wide = False
    control: QWidget

    def __init__(self, setting: Setting, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setting = setting
        self._problem: QLabel | None = None
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(3)
        self._column.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.label = QLabel(setting.label, self)
        self.label.setProperty("role", "muted")
        self._column.addWidget(self.label)
        self._column.addWidget(self.build())
        self._explain()

    def build(self) -> QWidget:
        """Make `control`, and the widget that stands in the form: itself, or what holds it."""
        raise NotImplementedError

    def tab_stops(self) -> list[QWidget]:
        """Where Tab halts in this field."""
        return [self.control]

    def value(self) -> Any:
        raise NotImplementedError

    def show_value(self, raw: Any) -> None:
        """Show `raw`; nothing is moved while it is already there, so that the cursor stays put."""
        if not (type(self.value()) is type(raw) and self.value() == raw):
            self.set_control_value(raw)

    def set_control_value(self, raw: Any) -> None:
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

    def emit_edited(self, *_: object) -> None:
        self.edited.emit(self.setting.key, self.value())

    def _explain(self) -> None:
        self.label.setBuddy(self.control)
        told = " ".join([self.setting.help, limits(self.setting)]).strip()
        self.control.setAccessibleName(self.setting.label)
        self.control.setAccessibleDescription(told)
        for widget in (self.label, self.control):
            widget.setToolTip(f"<p>{told}</p>")  # a paragraph wraps; plain text would be one long line
        if not isinstance(self.control, PathEdit):
            self.control.setAcceptDrops(False)  # a file that is dropped here is the window's to place

    def _mark(self, wrong: bool) -> None:
        self.control.setProperty("problem", wrong)
        self.control.style().unpolish(self.control)
        self.control.style().polish(self.control)


class LineField(Field):
    """Anything typed on one line; subclasses say how text and value belong together."""

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
        self.control.setCursorPosition(0)  # of what does not fit, the beginning shows

    def text_of(self, raw: Any) -> str:
        return "" if raw is None else str(raw)


class UndoKeys(QObject):
    """Undo and redo are the form's, not the line's own, which would take only its own letters back: whichever field has
    the cursor lets these keys pass."""

    REDO = QKeyCombination(Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier, Qt.Key.Key_Z)
    """Our menu's key for it, also where the platform has another."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        app.focusChanged.connect(self._follow)

    def _follow(self) -> None:
        """Takes none of the signal's arguments: the widget that had the focus may be half destroyed, and Python must not
        make an object of it."""
        now = QApplication.focusWidget()
        if now is not None and _is_control_of_a_field(now):
            now.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent):
            keys = QKeySequence.StandardKey
            if event.matches(keys.Undo) or event.matches(keys.Redo) or event.keyCombination() == self.REDO:
                event.ignore()
                return True
        return super().eventFilter(watched, event)


def _is_control_of_a_field(widget: QWidget) -> bool:
    holder = widget.parentWidget()
    while holder is not None and not isinstance(holder, Field):
        holder = holder.parentWidget()
    return holder is not None and holder.control is widget
