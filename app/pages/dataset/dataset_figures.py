"""Counts of a dataset: rows, prompts that are too long, missing answers, duplicates; and either a histogram of prompt lengths, or their variety."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QEvent, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import (
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QSizePolicy,
    QToolTip,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels import label, plain_tip
from app.widgets.basic.layout import NestedStack, set_style_property
from app.widgets.basic.number_format import DASH, ticks

# A histogram of prompt lengths in tokens, with a line at the longest prompt that leaves space for a completion.

BAR_PITCH = 7
"""Pixels from one bar to the next."""


class Histogram(QWidget):
    """Shows pairs (tokens, rows), ascending in tokens, which it adds up into bins."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lengths: Sequence[tuple[int, int]] = ()
        self._prompt_limit, self._placeholder = 0, ""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName("Lengths of the prompts")
        theme.signals.changed.connect(self.update)

    def show_lengths(self, lengths: Sequence[tuple[int, int]], prompt_limit: int, placeholder: str = "") -> None:
        """`prompt_limit`: most tokens of a prompt; `placeholder`: the text while there are no lengths."""
        self._lengths, self._prompt_limit, self._placeholder = lengths, prompt_limit, placeholder
        longest = lengths[-1][0] if lengths else 0
        self.setAccessibleDescription(
            f"From {lengths[0][0]} to {longest} tokens; {prompt_limit} fit." if lengths else placeholder
        )
        self.update()

    def sizeHint(self) -> QSize:
        return theme.scaled_size(QSize(200, 88))

    def minimumSizeHint(self) -> QSize:
        return theme.scaled_size(QSize(120, 64))

    @property
    def _line(self) -> int:
        """Height of the line of labels below the bars, and of the one above them."""
        return theme.scaled(16)

    # Bins

    def bins(self) -> list[tuple[int, int]]:
        """(shortest length, rows) of each bar."""
        step, count = self._binning()
        rows = [0] * count
        for tokens, number in self._lengths:
            rows[min(count - 1, tokens // step)] += number
        return [(i * step, number) for i, number in enumerate(rows)]

    def _binning(self) -> tuple[int, int]:
        """(tokens per bar, number of bars), up to the longest prompt, or up to the limit if that is less than twice as far."""
        longest = self._lengths[-1][0] if self._lengths else 1
        reach = max(longest, self._prompt_limit if self._prompt_limit < 2 * longest else 0) + 1
        step = max(1, math.ceil(reach / max(8, self.width() // BAR_PITCH)))
        return step, math.ceil(reach / step)

    # Drawing

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours = QPainter(self), theme.palette()
        floor = self.height() - self._line
        if not self._lengths:
            painter.setPen(colours.muted)
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.rect().adjusted(8, 0, -8, 0), flags, self._placeholder)
            return
        painter.fillRect(QRectF(0, floor, self.width(), 1), colours.hairline)
        bins = self.bins()
        highest, width = max(rows for _, rows in bins), self.width() / len(bins)
        for i, (first, rows) in enumerate(bins):
            if rows:  # at least two pixels: a single long prompt among thousands must be visible
                height = max(2.0, (floor - self._line) * rows / highest)
                colour = colours.warning if first > self._prompt_limit else colours.length
                painter.fillRect(QRectF(i * width, floor - height, max(1.0, width - 1), height), colour)
        self._draw_axis(painter, floor, len(bins) * self._binning()[0])

    def _draw_axis(self, painter: QPainter, floor: int, reach: int) -> None:
        colours = theme.palette()
        painter.setFont(theme.figures_font(theme.CAPTION))
        painter.setPen(colours.muted)
        left, right = ticks([0, reach])
        below = QRectF(0, floor + 1, self.width(), self._line)
        painter.drawText(below, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, left)
        painter.drawText(below, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, f"{right} tokens")
        if 0 < self._prompt_limit < reach:
            self._draw_limit(painter, floor, self.width() * self._prompt_limit / reach)

    def _draw_limit(self, painter: QPainter, floor: int, x: float) -> None:
        """Draw the limit as a dashed line, and its label on the side with more space."""
        painter.setPen(QPen(theme.palette().text, 1, Qt.PenStyle.DashLine))
        painter.drawLine(int(x), 0, int(x), floor)
        side = Qt.AlignmentFlag.AlignRight if x > self.width() / 2 else Qt.AlignmentFlag.AlignLeft
        beside = (
            QRectF(0, 0, x - 5, self._line)
            if x > self.width() / 2
            else QRectF(x + 5, 0, self.width() - x - 5, self._line)
        )
        painter.setPen(theme.palette().text)
        painter.drawText(beside, side | Qt.AlignmentFlag.AlignTop, f"{self._prompt_limit:,} fit")

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and self._lengths and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.tool_tip_at(event.pos().x()), self)
            return True
        return super().event(event)

    def tool_tip_at(self, x: int) -> str:
        """“120 to 127 tokens: 31 rows”, for the bar at `x` in pixels."""
        bins, step = self.bins(), self._binning()[0]
        first, rows = bins[max(0, min(len(bins) - 1, x * len(bins) // max(1, self.width())))]
        span = f"{first:,}" if step == 1 else f"{first:,} to {first + step - 1:,}"
        return f"{span} tokens: {rows:,} {'row' if rows == 1 else 'rows'}"


# ── variety figures ──────────────────────────────────────────────────────────────────────────────────────────────────

# What is known of the variety of a dataset's prompts: figures in two columns, names and values.

COLUMNS = 2
"""Figures in a line."""


class VarietyFigures(QWidget):
    """Shows (name, value, help) of each figure; a placeholder while there are none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName("Variety of the prompts")
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(theme.SPACE)
        self._grid.setVerticalSpacing(0)
        self._cells: list[tuple[QLabel, ElidedLabel]] = []
        self._instead = label(font=theme.caption_font(), role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        self._grid.addWidget(self._instead, 0, 0, 1, 2 * COLUMNS)
        for column in range(COLUMNS):
            self._grid.setColumnStretch(2 * column + 1, 1)

    def show_figures(self, figures: Sequence[tuple[str, str, str]], placeholder: str = "") -> None:
        """Show these instead of those before. `placeholder`: the text where there are none."""
        self._instead.setText(placeholder)
        self._instead.setVisible(not figures)
        for _ in range(len(self._cells), len(figures)):
            self._add()
        for place, cells in enumerate(self._cells):
            for widget in cells:
                widget.setVisible(place < len(figures))
        for (named, shown), (name, value, tip) in zip(self._cells, figures, strict=False):
            named.setText(name)
            shown.setText(value)
            shown.setAccessibleName(f"{name}: {value}")
            for widget in (named, shown):
                widget.setToolTip(plain_tip(f"{value}\n{tip}"))

    def _add(self) -> None:
        named, shown = label(font=theme.caption_font(), role="caption"), ElidedLabel()
        shown.setFont(theme.figures_font(theme.CAPTION))
        line, column = divmod(len(self._cells), COLUMNS)
        for offset, widget in enumerate((named, shown)):
            self._grid.addWidget(widget, line, 2 * column + offset)
        self._cells.append((named, shown))


# ── dataset figures ──────────────────────────────────────────────────────────────────────────────────────────────────

FIGURES = {
    "rows": ("Rows", "Rows of this split. Of a large file the first are shown and counted, and ~ is an estimate."),
    "too_long": (
        "Too long",
        "Prompts that leave no room for the completion under Max Seq, or are above Max prompt. Training leaves them out, or cuts them.",
    ),
    "unanswered": (
        "No answer",
        "Rows whose answer is missing or empty: rewards that compare find nothing right there.",
    ),
    "repeated": ("Repeated", "Rows whose prompt stood in an earlier row already."),
    "refused": (
        "Unusable",
        "Rows without a prompt that can be used. Training refuses the dataset until they are mended.",
    ),
}

LENGTHS, VARIETY = "Lengths", "Variety"


class DatasetFigures(QFrame):
    """Counts above a histogram or the figures on variety. An unknown count is a dash; a count extrapolated from a sample has a “~”.

    Attributes:
        other – the link to the one that is not shown.
        histogram – of prompt lengths in tokens.
        variety – how varied the prompts are.
        about – a caption below it.
        progress – how many prompts were tokenized.

    Signals:
        turned – the other of the two is shown.
    """

    turned = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.other = LinkButton(VARIETY)
        self.other.setToolTip(
            plain_tip("What repeats, how prompts are worded, and whether one answer prevails; or how long they are.")
        )
        self.histogram, self.variety = Histogram(), VarietyFigures()
        self._shown = NestedStack(self)
        self._shown.addWidget(self.histogram)
        self._shown.addWidget(self.variety)
        self.other.clicked.connect(lambda: self.show_variety(not self.shows_variety))
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font(theme.CAPTION))
        self.progress = QProgressBar(textVisible=False)
        self.progress.setAccessibleName("Prompts counted")
        self.progress.setFixedWidth(64)
        self._figures = {key: _Figure(word, tip) for key, (word, tip) in FIGURES.items()}
        figures = QHBoxLayout()
        figures.setSpacing(12)
        for widget in self._figures.values():
            figures.addWidget(widget)
        figures.addStretch(1)
        foot = QHBoxLayout()
        foot.addWidget(self.about, 1)
        foot.addWidget(self.progress, 0, Qt.AlignmentFlag.AlignVCenter)
        foot.addWidget(self.other)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 12, 8)
        column.setSpacing(4)
        column.addLayout(figures)
        column.addLayout(self._shown, 1)
        column.addLayout(foot)

    @property
    def shows_variety(self) -> bool:
        return self._shown.currentWidget() is self.variety

    def show_variety(self, shown: bool) -> None:
        """Show the figures on variety, or the lengths."""
        self._shown.setCurrentWidget(self.variety if shown else self.histogram)
        self.other.setText(LENGTHS if shown else VARIETY)
        self.turned.emit()

    def show_figure(self, key: str, number: int | None, *, sample: bool = False) -> None:
        """Show one of FIGURES; None is unknown. Counts of bad rows above 0 are in the colour of problems."""
        self._figures[key].show_number(number, warn=key not in ("rows", "repeated"), sample=sample)
        if key == "refused":  # rare, and more important than duplicates, which it replaces
            self._figures["refused"].setVisible(bool(number))
            self._figures["repeated"].setVisible(not number)

    def figure(self, key: str) -> str:
        return self._figures[key].number.text()

    def show_progress(self, seen: int, rows: int) -> None:
        """Show how many prompts were tokenized; the bar is hidden once all are."""
        self.progress.setVisible(0 < seen < rows)
        self.progress.setRange(0, max(1, rows))
        self.progress.setValue(seen)


class _Figure(QWidget):
    def __init__(self, word: str, tip: str) -> None:
        super().__init__()
        self._word = word
        self.setToolTip(plain_tip(tip))
        self.number = label(DASH, theme.figures_font(15))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(label(word, theme.caption_font(), "caption"))
        column.addWidget(self.number)

    def show_number(self, number: int | None, *, warn: bool, sample: bool) -> None:
        self.number.setText(DASH if number is None else f"{'~' * (sample and number > 0)}{number:,}")
        self.setAccessibleName(f"{self._word}: {self.number.text()}")
        set_style_property(self.number, "role", "problem" if warn and number else "")
