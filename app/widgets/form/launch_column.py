"""The column beside the form: a summary of the run, the Run button, the problems, the memory, help on the focused field,
and the command line. It checks and estimates nothing itself: the page sets its content and connects to its signals.
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
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.basic.layout import clear_layout, set_style_property
from app.widgets.form.memory_bar import MemoryBar
from app.widgets.form.setting_help import help_lines
from backend.spec.config import SETTINGS
from backend.spec.faults import Fault
from backend.spec.setting import Setting

WIDTH, NARROW_WIDTH = 296, 256
"""Width in pixels before scaling: usual, and in a narrow page."""
SHOWN_PROBLEMS = 6
"""Problems listed; of the others only the number is shown."""


class LaunchColumn(QScrollArea):
    """The column: plan and Run button, problems, memory, help, command.

    Attributes:
        summary, details – labels of the plan.
        run – the Run button.
        memory – the MemoryBar.
        command, copy – the elided command line and its Copy button.

    Signals:
        run_pressed – the Run button was clicked.
        problem_pressed(setting) – the link of a problem was clicked.
        guide_pressed(setting) – show what the guide says about the setting.
        editing_given_up – the settings of a waiting run should stay as they are.
    """

    run_pressed = Signal()
    problem_pressed = Signal(str)
    editing_given_up = Signal()
    guide_pressed = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(
            Qt.FocusPolicy.NoFocus
        )  # a scroll area takes Tab by default, and this one has nothing to edit
        self.setFixedWidth(theme.scaled(WIDTH))
        page = QWidget()
        page.setObjectName("page")
        self._column = QVBoxLayout(page)
        self._column.setContentsMargins(0, 0, 0, 2 * theme.SPACE)
        self._column.setSpacing(2 * theme.SPACE)
        self._build_plan()
        self._problems, self._problem_title, self._problem_rows = self._build_list("")
        self._warnings, _, self._warning_rows = self._build_list("Worth a second look")
        self._build_memory()
        self._build_help()
        self._column.addStretch()
        self._build_command()
        self.setWidget(page)

    # Showing

    def show_plan(self, summary: str, details: Sequence[str]) -> None:
        """Show the run in one sentence and, below it, a paragraph for each of `details`."""
        self.summary.setText(summary)
        lines = (f'<p style="margin: 0px 0px 4px 0px">{html.escape(line)}</p>' for line in details)
        self.details.setText("".join(lines))

    def show_problems(self, faults: Sequence[Fault]) -> None:
        """List up to SHOWN_PROBLEMS faults, each below a link to its field; no faults hide the list."""
        clear_layout(self._problem_rows)
        self._problems.setVisible(bool(faults))
        count = len(faults)
        self._problem_title.setText("1 problem to mend" if count == 1 else f"{count} problems to mend")
        for fault in faults[:SHOWN_PROBLEMS]:
            self._problem_rows.addWidget(self._problem_row(fault))
        if count > SHOWN_PROBLEMS:
            self._problem_rows.addWidget(_muted_label(f"and {count - SHOWN_PROBLEMS} more"))

    def show_warnings(self, warnings: Sequence[Fault]) -> None:
        """List values that can be used and are unusual; Run stays enabled."""
        clear_layout(self._warning_rows)
        self._warnings.setVisible(bool(warnings))
        for warning in warnings[:SHOWN_PROBLEMS]:
            self._warning_rows.addWidget(self._problem_row(warning, "muted"))

    def show_command(self, command: str, short: str) -> None:
        """Show `short`; the tool tip and Copy have the complete `command`."""
        self._full_command = command
        self.command.setText(short)
        self.command.setToolTip(f"<p>{html.escape(command)}</p>")

    def show_help(self, setting: Setting | None) -> None:
        """Explain a setting: its help, its limits, its names in other programs, its choices. None: how to get help."""
        if setting is None:
            self._help_title.setText("About a setting")
            self._help.setText("Its help stands here while the cursor is in it.")
            return
        self._explained = setting.key
        self.more.show()
        self._help_title.setText(setting.label)
        self._help.setText("\n".join(help_lines(setting)))
        self._help_key.setText(setting.key)

    def set_run(self, text: str, primary: bool, enabled: bool) -> None:
        """Set the Run button's text and state; `primary` gives it the accent colour."""
        self.run.setText(text)
        self.run.setEnabled(enabled)
        set_style_property(self.run, "role", "primary" if primary else "")

    def show_edited(self, name: str) -> None:
        """Say that the form holds the settings of this waiting run; an empty name hides that."""
        self._edited.setVisible(bool(name))
        self._edited_name.setText(f"The settings of {name}, which waits in the queue")

    def show_memory(self, memory_parts: MemoryParts | None) -> None:
        """Show the estimated memory of the run; None (no estimate) hides it."""
        self.memory.show_memory(memory_parts)
        # The bar hides itself, but its holder's margins would keep their gap in the column.
        self._memory_holder.setVisible(memory_parts is not None)

    # Building

    def _build_plan(self) -> None:
        card = QFrame()
        card.setProperty("role", "card")
        self._column.addWidget(card)
        column = QVBoxLayout(card)
        column.setContentsMargins(2 * theme.SPACE, 12, 2 * theme.SPACE, 2 * theme.SPACE)
        column.setSpacing(12)
        self.summary = PlainLabel(wordWrap=True)
        self.summary.setFont(theme.heading_font())
        self.details = _muted_label("")
        self.details.setTextFormat(Qt.TextFormat.RichText)  # paragraphs; show_plan escapes their text
        self.run = QPushButton("Run")
        self.run.setToolTip("Trains in a process of its own; closing the window need not stop it.")
        self.run.clicked.connect(self.run_pressed)
        for part in (self._build_edited(), self.summary, self.details, self.run):
            column.addWidget(part)
        self.set_run("Run", primary=True, enabled=True)

    def _build_edited(self) -> QWidget:
        self._edited, self._edited_name = QWidget(), PlainLabel(wordWrap=True)
        self._edited_name.setProperty("role", "problem")
        give_up = LinkButton("Leave them as they are")
        give_up.clicked.connect(self.editing_given_up)
        column = QVBoxLayout(self._edited)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE // 2)
        column.addWidget(self._edited_name)
        column.addWidget(give_up, 0, Qt.AlignmentFlag.AlignLeft)
        self._edited.hide()
        return self._edited

    def _build_memory(self) -> None:
        self._memory_holder, self.memory = QWidget(), MemoryBar()
        column = QVBoxLayout(self._memory_holder)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.addWidget(self.memory)
        self._memory_holder.hide()
        self._column.addWidget(self._memory_holder)

    def _build_list(self, title: str) -> tuple[QWidget, QLabel, QVBoxLayout]:
        """A list of sentences about settings: its widget, hidden while it is empty, its title, and the layout of its rows."""
        holder, heading, rows = QWidget(), PlainLabel(title), QVBoxLayout()
        column = QVBoxLayout(holder)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        heading.setFont(theme.heading_font())
        column.addWidget(heading)
        rows.setSpacing(theme.SPACE)
        column.addLayout(rows)
        holder.hide()
        self._column.addWidget(holder)
        return holder, heading, rows

    def _problem_row(self, fault: Fault, role: str = "problem") -> QWidget:
        row = QWidget()
        column = QVBoxLayout(row)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        setting = SETTINGS.get(fault.setting)
        link = LinkButton(setting.label if setting else fault.setting)
        link.setToolTip("Go to the field")
        link.clicked.connect(lambda: self.problem_pressed.emit(fault.setting))
        sentence = PlainLabel(fault.sentence, wordWrap=True)
        sentence.setProperty("role", role)
        column.addWidget(link, 0, Qt.AlignmentFlag.AlignLeft)
        column.addWidget(sentence)
        return row

    def _build_help(self) -> None:
        holder = QWidget()
        column = QVBoxLayout(holder)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.setSpacing(theme.SPACE // 2)
        self._help_title, self._help, self._help_key = PlainLabel(), _muted_label(""), _muted_label("")
        self._help_title.setFont(theme.heading_font())
        self._help_key.setFont(theme.mono_font(theme.CAPTION))
        self._help_key.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.more, self._explained = LinkButton("More in the guide"), ""
        self.more.setToolTip("What it does, and which way to move it (F1)")
        self.more.clicked.connect(lambda: self.guide_pressed.emit(self._explained))
        self.more.hide()
        for part in (self._help_title, self._help, self._help_key):
            column.addWidget(part)
        column.addWidget(self.more, 0, Qt.AlignmentFlag.AlignLeft)
        self._column.addWidget(holder)
        self.show_help(None)

    def _build_command(self) -> None:
        holder = QWidget()
        column = QVBoxLayout(holder)
        column.setContentsMargins(theme.SPACE, 0, 0, 0)
        column.setSpacing(theme.SPACE // 2)
        across = QHBoxLayout()
        across.addWidget(_muted_label("From a terminal"), 1)
        self.copy = LinkButton("Copy")
        self.copy.setToolTip("Copy the whole command")
        self.copy.setAccessibleName("Copy the command")
        self.copy.clicked.connect(self.copy_command)
        across.addWidget(self.copy)
        self._full_command = ""
        self.command = ElidedLabel(Qt.TextElideMode.ElideMiddle)  # the verb and the file's name are at the two ends
        self.command.setFont(theme.mono_font(theme.CAPTION))
        column.addLayout(across)
        column.addWidget(self.command)
        self._column.addWidget(holder)

    def copy_command(self) -> None:
        """Put the complete command on the clipboard."""
        QGuiApplication.clipboard().setText(self._full_command)
        self.copy.setText("Copied")
        # With the button as context, Qt drops the call if the button is deleted before the time is up.
        QTimer.singleShot(1500, self.copy, lambda: self.copy.setText("Copy"))


def _muted_label(text: str) -> QLabel:
    label = PlainLabel(text, wordWrap=True)
    label.setProperty("role", "muted")
    return label
