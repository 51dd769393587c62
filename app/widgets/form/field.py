"""The base class of the editors of settings: a label above, the control, and notes and problems below."""

import tomllib
from typing import Any

from PySide6.QtCore import QEvent, QKeyCombination, QObject, Qt, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QApplication, QLabel, QLineEdit, QPlainTextEdit, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton, PathEdit
from app.widgets.basic.labels import label
from app.widgets.basic.layout import column, configure, row, set_style_property
from app.widgets.form.value_text import limits_text
from backend.config.config import SETTINGS
from backend.config.setting import Setting
from backend.utils import places

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
        description = " ".join([setting.help, limits_text(setting)]).strip()
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

    def show_problem(self, sentence: str) -> None:
        self._problem = self._show_caption(self._problem, sentence, "problem")
        set_style_property(self.control, "problem", bool(sentence))

    def show_warning(self, sentence: str) -> None:
        if not self.control.property("problem"):
            self._problem = self._show_caption(self._problem, sentence, "muted")

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
