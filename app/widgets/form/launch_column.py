"""The column beside the form: a summary of the run, the Run button, the problems, the memory, help on the focused field,
and the command line. It shows what it is given and emits what was clicked.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QScrollArea, QVBoxLayout, QWidget

from app import theme
from app.model.memory_parts import MemoryParts
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.form.memory_bar import MemoryBar
from app.widgets.form.value_text import limits_text
from backend.spec.aliases import other_names
from backend.spec.config import SETTINGS
from backend.spec.faults import Fault
from backend.spec.setting import Setting

WIDTH, NARROW_WIDTH = 296, 256
SHOWN_PROBLEMS = 6


class LaunchColumn(QScrollArea):
    """The column: plan and Run button, problems, memory, help, command.

    Signals:
        run_pressed – the Run button was clicked.
        problem_pressed(setting) – the link of a problem was clicked.
    """

    run_pressed = Signal()
    problem_pressed = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setFixedWidth(theme.scaled(WIDTH))
        page = QWidget()
        page.setObjectName("page")
        self._column = QVBoxLayout(page)
        self._column.setContentsMargins(0, 0, 0, 2 * theme.SPACE)
        self._column.setSpacing(2 * theme.SPACE)
        self._build_plan()
        self._build_problems()
        self._build_memory()
        self._build_help()
        self._column.addStretch()
        self._build_command()
        self.setWidget(page)

    # What is shown

    def show_plan(self, summary: str, details: Sequence[str]) -> None:
        self.summary.setText(summary)
        lines = (f'<p style="margin: 0px 0px 4px 0px">{html.escape(line)}</p>' for line in details)
        self.details.setText("".join(lines))

    def show_problems(self, faults: Sequence[Fault]) -> None:
        """One line each, the first few; pressing one leads to its field."""
        self._empty_problems()
        self._problems.setVisible(bool(faults))
        count = len(faults)
        self._problem_title.setText("1 problem to mend" if count == 1 else f"{count} problems to mend")
        for fault in faults[:SHOWN_PROBLEMS]:
            self._problem_rows.addWidget(self._problem_row(fault))
        if count > SHOWN_PROBLEMS:
            self._problem_rows.addWidget(_muted(f"and {count - SHOWN_PROBLEMS} more"))

    def show_command(self, command: str, short: str) -> None:
        """`short` is what there is room for; the whole is in the tip, and is what is copied."""
        self._whole_command = command
        self.command.setText(short)
        self.command.setToolTip(f"<p>{html.escape(command)}</p>")

    def show_help(self, setting: Setting | None) -> None:
        """Explain one setting; None shows how to get help."""
        if setting is None:
            self._help_title.setText("About a setting")
            self._help.setText("Its help stands here while the cursor is in it.")
            return
        self._help_title.setText(setting.label)
        self._help.setText(
            "\n".join(filter(None, [setting.help, limits_text(setting), *_also(setting), *_choices(setting)]))
        )
        self._help_key.setText(setting.key)

    def set_run(self, text: str, primary: bool, enabled: bool) -> None:
        """Name the Run button, and say whether it is the one that stands out."""
        self.run.setText(text)
        self.run.setEnabled(enabled)
        role = "primary" if primary else ""
        if self.run.property("role") != role:
            self.run.setProperty("role", role)
            self.run.style().unpolish(self.run)
            self.run.style().polish(self.run)

    def show_memory(self, memory_parts: MemoryParts | None) -> None:
        """The memory that the run will need; None where nobody knows."""
        self.memory.show_memory(memory_parts)
        self._memory_holder.setVisible(memory_parts is not None)

    # Parts

    def _build_plan(self) -> None:
        box = self._box()
        self.summary = QLabel(wordWrap=True)
        self.summary.setFont(theme.heading_font())
        self.details = _muted("")
        self.run = QPushButton("Run")
        self.run.setToolTip("Trains in a process of its own; closing the window need not stop it.")
        self.run.clicked.connect(self.run_pressed)
        for part in (self.summary, self.details, self.run):
            box.addWidget(part)
        self.set_run("Run", primary=True, enabled=True)

    def _build_memory(self) -> None:
        self._memory_holder, self.memory = QWidget(), MemoryBar()
        column = QVBoxLayout(self._memory_holder)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.addWidget(self.memory)
        self._memory_holder.hide()
        self._column.addWidget(self._memory_holder)

    def _build_problems(self) -> None:
        self._problems = QWidget()
        self._column.addWidget(self._problems)
        column = QVBoxLayout(self._problems)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        self._problem_title = QLabel()
        self._problem_title.setFont(theme.heading_font())
        column.addWidget(self._problem_title)
        self._problem_rows = QVBoxLayout()
        self._problem_rows.setSpacing(theme.SPACE)
        column.addLayout(self._problem_rows)

    def _problem_row(self, fault: Fault) -> QWidget:
        row = QWidget()
        column = QVBoxLayout(row)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        setting = SETTINGS.get(fault.setting)
        link = LinkButton(setting.label if setting else fault.setting)
        link.setToolTip("Go to the field")
        link.clicked.connect(lambda: self.problem_pressed.emit(fault.setting))
        sentence = QLabel(fault.sentence, wordWrap=True)
        sentence.setProperty("role", "problem")
        column.addWidget(link, 0, Qt.AlignmentFlag.AlignLeft)
        column.addWidget(sentence)
        return row

    def _empty_problems(self) -> None:
        while (item := self._problem_rows.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.hide()
                widget.deleteLater()

    def _build_help(self) -> None:
        holder = QWidget()
        column = QVBoxLayout(holder)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.setSpacing(theme.SPACE // 2)
        self._help_title, self._help, self._help_key = QLabel(), _muted(""), _muted("")
        self._help_title.setFont(theme.heading_font())
        self._help_key.setFont(theme.mono_font(theme.CAPTION))
        self._help_key.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        for part in (self._help_title, self._help, self._help_key):
            column.addWidget(part)
        self._column.addWidget(holder)
        self.show_help(None)

    def _build_command(self) -> None:
        holder = QWidget()
        column = QVBoxLayout(holder)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.setSpacing(theme.SPACE // 2)
        across = QHBoxLayout()
        across.addWidget(_muted("From a terminal"), 1)
        self.copy = LinkButton("Copy")
        self.copy.setToolTip("Copy the whole command")
        self.copy.setAccessibleName("Copy the command")
        self.copy.clicked.connect(self.copy_command)
        across.addWidget(self.copy)
        self._whole_command = ""
        self.command = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.command.setFont(theme.mono_font(theme.CAPTION))
        column.addLayout(across)
        column.addWidget(self.command)
        self._column.addWidget(holder)

    def copy_command(self) -> None:
        QGuiApplication.clipboard().setText(self._whole_command)
        self.copy.setText("Copied")
        QTimer.singleShot(1500, self.copy, lambda: self.copy.setText("Copy"))

    def _box(self) -> QVBoxLayout:
        card = QFrame()
        card.setProperty("role", "card")
        self._column.addWidget(card)
        column = QVBoxLayout(card)
        column.setContentsMargins(2 * theme.SPACE, 12, 2 * theme.SPACE, 2 * theme.SPACE)
        column.setSpacing(12)
        return column


def _muted(text: str) -> QLabel:
    label = QLabel(text, wordWrap=True)
    label.setProperty("role", "muted")
    return label


def _also(setting: Setting) -> list[str]:
    names = other_names(setting.key)
    return [f"Elsewhere called {', '.join(names)}."] if names else []


def _choices(setting: Setting) -> list[str]:
    return [f"{choice.label}: {choice.sentence}" for choice in setting.choices if choice.sentence]
