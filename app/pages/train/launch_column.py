"""The column beside the form: a summary of the run, the Run button, the problems, the memory, help on the focused field,
and the command line. It checks and estimates nothing itself: the page sets its content and connects to its signals.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from PySide6.QtCore import QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QGuiApplication, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.state.memory import MemoryParts, amount
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels import PlainLabel, label
from app.widgets.basic.layout import clear_layout, set_style_property
from app.widgets.form.value_text import limits_text
from backend.config.config import SETTINGS
from backend.config.other_programs.translation import other_names
from backend.config.setting import Setting
from backend.utils.errors import ConfigProblem

# The memory bar: the estimated memory of a run by part, against what this machine has.

BAR_HEIGHT = 14
LISTED_MIN_SHARE = 0.01
"""Parts below this share of the total are summed up as “Other”."""
ROW_MIN_BYTES = 0.5e6
"""Below this there is no row, neither for a part nor for “Other”: it would say 0 MB."""


class MemoryBar(QWidget):
    """A bar, a row for each part, and a sentence. Hidden while there is no estimate.

    Attributes:
        memory_parts – the estimate shown, or None.
        sentence – label: whether it fits.
        advice – label: what to change if it may not, or what would make it faster if it does.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.memory_parts: MemoryParts | None = None
        self._bar = _StackedBar()
        self.sentence, self.advice = label(wrap=True), label(wrap=True, role="muted")
        self._rows = QGridLayout()
        self._rows.setContentsMargins(0, 0, 0, 0)
        self._rows.setHorizontalSpacing(theme.SPACE)
        self._rows.setVerticalSpacing(2)
        self._rows.setColumnStretch(1, 1)
        title = label("Memory", theme.heading_font())
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        for part in (title, self._bar):
            column.addWidget(part)
        column.addLayout(self._rows)
        for part in (self.sentence, self.advice):
            column.addWidget(part)
        self.setAccessibleName("Memory")
        theme.signals.changed.connect(self._update_role)
        self.hide()

    def show_memory(self, memory_parts: MemoryParts | None) -> None:
        """Show the estimate; None hides the bar."""
        if memory_parts == self.memory_parts:
            return  # every edit of the form leads here, and most leave the estimate as it is
        self.memory_parts = memory_parts
        self.setVisible(memory_parts is not None)
        clear_layout(self._rows)
        if memory_parts is None:
            return
        parts = _listed_parts(memory_parts)
        for row, (name, size, about) in enumerate(parts):
            self._add_row(row, name, size, about)
        self.sentence.setText(memory_parts.sentence)
        advice = memory_parts.row_tip if memory_parts.verdict == "fits" else memory_parts.advice
        self.advice.setText(advice)
        self.advice.setVisible(bool(advice))
        self._bar.show_parts([size for _, size, _ in parts], memory_parts.limit)
        listed = ", ".join(f"{name} {amount(size)}" for name, size, _ in parts)
        self.setAccessibleDescription(
            f"{memory_parts.sentence} {listed}."
        )  # a screen reader cannot read the painted bar
        self._update_role()

    def _add_row(self, row: int, name: str, size: float, about: str) -> None:
        swatch = _Swatch(row)
        figure = label(amount(size), theme.figures_font(), align=Qt.AlignmentFlag.AlignRight)
        for column, widget in enumerate((swatch, label(name, role="muted"), figure)):
            widget.setToolTip(f"<p>{about}</p>" if about else "")
            self._rows.addWidget(widget, row, column)

    def _update_role(self) -> None:
        """Show the sentence in the colour of problems where the run may not fit."""
        tight = self.memory_parts is not None and self.memory_parts.verdict != "fits"
        set_style_property(self.sentence, "role", "problem" if tight else "muted")
        self.update()


class _StackedBar(QWidget):
    """The parts side by side. Its width stands for the machine's memory, or for the run's where that is more."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: list[float] = []
        self._limit = 0.0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:
        return QSize(120, BAR_HEIGHT)

    def show_parts(self, sizes: list[float], limit: float) -> None:
        """Show parts of these sizes against the machine's memory `limit`; both in bytes."""
        self._sizes, self._limit = sizes, limit
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        full_width_bytes = max(sum(self._sizes), self._limit)
        if full_width_bytes <= 0:
            return
        colours, painter = theme.palette(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colours.hover)
        painter.drawRoundedRect(QRectF(self.rect()), 4, 4)
        left = 0.0
        for index, size in enumerate(self._sizes):
            width = self.width() * size / full_width_bytes
            # One pixel of gap between neighbours, yet never nothing: a listed part must be visible.
            painter.fillRect(QRectF(left, 0, max(width - 1, 1), self.height()), part_colour(index))
            left += width
        if self._limit < full_width_bytes:
            # A line where the machine's memory ends, edged in the background's colour to show on any part.
            x = self.width() * self._limit / full_width_bytes
            painter.fillRect(QRectF(x - 2, 0, 4, self.height()), colours.window)
            painter.fillRect(QRectF(x - 1, 0, 2, self.height()), colours.text)


class _Swatch(QWidget):
    """A square in a part's colour. It is painted, not styled, so a change of theme needs no new style sheet."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self.setFixedSize(theme.scaled_size(QSize(10, 10)))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(part_colour(self._index))
        painter.drawRoundedRect(self.rect(), 3, 3)


def part_colour(index: int) -> QColor:
    """The colour of the part at `index`: the palette's hues in turn, from the seventh part on once more, half transparent."""
    colours = theme.palette()
    hues = (colours.accent, colours.length, colours.kl, colours.clip, colours.good, colours.warning)
    colour = QColor(hues[index % len(hues)])  # a copy: setAlphaF would change the palette's own
    colour.setAlphaF(1.0 if index < len(hues) else 0.5)
    return colour


def _listed_parts(memory_parts: MemoryParts) -> list[tuple[str, float, str]]:
    """(name, bytes, tool tip) of each row: the parts in their order, then the sum of the small ones, named in its tip."""
    min_bytes = max(memory_parts.total * LISTED_MIN_SHARE, ROW_MIN_BYTES)
    rows = [(part.name, part.bytes, part.about) for part in memory_parts.parts if part.bytes >= min_bytes]
    rest = [part for part in memory_parts.parts if 0 < part.bytes < min_bytes]
    if sum(part.bytes for part in rest) >= ROW_MIN_BYTES:
        names = ", ".join(f"{part.name} {amount(part.bytes)}" for part in rest)
        rows.append(("Other", sum(part.bytes for part in rest), names))
    return rows


# ── setting help ─────────────────────────────────────────────────────────────────────────────────────────────────────

# What is to be known about a setting, for the column beside the form.


def help_lines(setting: Setting) -> list[str]:
    """Its help, its limits, its names in other programs, its choices: a line each, where there is one."""
    names = other_names(setting.key)
    elsewhere = f"Elsewhere called {', '.join(names)}." if names else ""
    choices = [f"{choice.label}: {choice.sentence}" for choice in setting.choices if choice.sentence]
    return [line for line in (setting.help, limits_text(setting), elsewhere, *choices) if line]


# ── launch column ────────────────────────────────────────────────────────────────────────────────────────────────────

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

    def show_problems(self, faults: Sequence[ConfigProblem]) -> None:
        """List up to SHOWN_PROBLEMS faults, each below a link to its field; no faults hide the list."""
        clear_layout(self._problem_rows)
        self._problems.setVisible(bool(faults))
        count = len(faults)
        self._problem_title.setText("1 problem to mend" if count == 1 else f"{count} problems to mend")
        for fault in faults[:SHOWN_PROBLEMS]:
            self._problem_rows.addWidget(self._problem_row(fault))
        if count > SHOWN_PROBLEMS:
            self._problem_rows.addWidget(_muted_label(f"and {count - SHOWN_PROBLEMS} more"))

    def show_warnings(self, warnings: Sequence[ConfigProblem]) -> None:
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

    def _problem_row(self, fault: ConfigProblem, role: str = "problem") -> QWidget:
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
