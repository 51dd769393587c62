"""Counts of a dataset, and below them a histogram of prompt lengths or figures on the variety of the prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QEvent, QRectF, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QFrame, QGridLayout, QLabel, QSizePolicy, QToolTip, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels import label, plain_tip, progress_bar
from app.widgets.basic.layout import NestedStack, column, holder, row, set_style_property
from app.widgets.basic.number_format import DASH, ticks
from app.widgets.basic.tables import LEFT, RIGHT

BAR_PITCH = 7
FIGURES = {
    "rows": ("Rows", "Rows of this split. Of a large file only the first are shown and counted, and ~ is an estimate."),
    "too_long": (
        "Too long",
        "Prompts above Max prompt, or without room for a completion. Training skips or cuts them.",
    ),
    "unanswered": ("No answer", "Rows whose answer is missing or empty: rewards that compare give them nothing."),
    "repeated": ("Repeated", "Rows whose prompt is the same as that of an earlier row."),
    "refused": ("Unusable", "Rows without a usable prompt. Training refuses the dataset until they are fixed."),
}
LENGTHS, VARIETY = "Lengths", "Variety"


class DatasetFigures(QFrame):
    """Counts above a histogram or the figures on variety. An unknown count is a dash."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        tip = "Repetitions, wording and balance of the answers; or the lengths of the prompts."
        self.other = LinkButton(VARIETY, on_click=lambda: self.show_variety(not self.shows_variety), tip=tip)
        self.histogram, self.variety = Histogram(), VarietyFigures()
        self._shown = NestedStack(self)
        self._shown.addWidget(self.histogram)
        self._shown.addWidget(self.variety)
        self.about = ElidedLabel(font=theme.figures_font(theme.CAPTION))
        self.progress = progress_bar("Prompts counted")
        self.progress.setFixedWidth(64)
        self._numbers = {key: label(DASH, theme.figures_font(15)) for key in FIGURES}
        self._figures: dict[str, QWidget] = {}
        for key, (word, tip) in FIGURES.items():
            title = label(word, theme.caption_font(), "caption")
            self._figures[key] = holder(column(title, self._numbers[key], spacing=0))
            self._figures[key].setToolTip(plain_tip(tip))
        figures = row(*self._figures.values(), None, spacing=12)
        foot = row((self.about, 1), (self.progress, 0, Qt.AlignmentFlag.AlignVCenter), self.other, spacing=6)
        column(figures, (self._shown, 1), foot, into=self, spacing=4, margins=(12, 8, 12, 8))

    @property
    def shows_variety(self) -> bool:
        return self._shown.currentWidget() is self.variety

    def show_variety(self, shown: bool) -> None:
        self._shown.setCurrentWidget(self.variety if shown else self.histogram)
        self.other.setText(LENGTHS if shown else VARIETY)

    def show_figure(self, key: str, number: int | None, *, sample: bool = False) -> None:
        """Show one of FIGURES; None is unknown."""
        text = DASH if number is None else f"{'~' if sample and number else ''}{number:,}"
        self._numbers[key].setText(text)
        self._figures[key].setAccessibleName(f"{FIGURES[key][0]}: {text}")
        is_bad = key not in ("rows", "repeated") and bool(number)
        set_style_property(self._numbers[key], "role", "problem" if is_bad else "")
        if key == "refused":  # rare, and more important than duplicates, which it replaces
            self._figures["refused"].setVisible(bool(number))
            self._figures["repeated"].setVisible(not number)

    def figure(self, key: str) -> str:
        return self._numbers[key].text()

    def show_progress(self, seen: int, rows: int) -> None:
        self.progress.setVisible(0 < seen < rows)
        self.progress.setRange(0, max(1, rows))
        self.progress.setValue(seen)


class Histogram(QWidget):
    """Prompt lengths in tokens as bars, with a line at the longest prompt that leaves space for a completion."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lengths: Sequence[tuple[int, int]] = ()
        self._prompt_limit, self._placeholder = 0, ""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMinimumSize(theme.scaled_size(QSize(120, 64)))
        self.setAccessibleName("Lengths of the prompts")
        theme.signals.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return theme.scaled_size(QSize(200, 88))

    def show_lengths(self, lengths: Sequence[tuple[int, int]], prompt_limit: int, placeholder: str = "") -> None:
        """Show (tokens, rows), ascending; `prompt_limit` is the most tokens of a prompt."""
        self._lengths, self._prompt_limit, self._placeholder = lengths, prompt_limit, placeholder
        described = f"From {lengths[0][0]} to {lengths[-1][0]} tokens; {prompt_limit} fit." if lengths else placeholder
        self.setAccessibleDescription(described)
        self.update()

    def bins(self) -> tuple[int, list[int]]:
        """(tokens per bar, rows of each bar), up to the longest prompt or a limit not far beyond it."""
        longest = self._lengths[-1][0] if self._lengths else 1
        reach = max(longest, self._prompt_limit if self._prompt_limit < 2 * longest else 0) + 1
        step = max(1, math.ceil(reach / max(8, self.width() // BAR_PITCH)))
        rows = [0] * math.ceil(reach / step)
        for tokens, number in self._lengths:
            rows[min(len(rows) - 1, tokens // step)] += number
        return step, rows

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours, line = QPainter(self), theme.palette(), theme.scaled(16)
        painter.setPen(colours.muted)
        if not self._lengths:
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.rect().adjusted(8, 0, -8, 0), flags, self._placeholder)
            return
        full, floor = self.width(), self.height() - line
        painter.fillRect(QRectF(0, floor, full, 1), colours.hairline)
        step, bins = self.bins()
        width, reach = full / len(bins), step * len(bins)
        for i, rows in enumerate(bins):
            if rows:  # at least two pixels: a single long prompt among thousands must be visible
                height = max(2.0, (floor - line) * rows / max(bins))
                colour = colours.warning if i * step > self._prompt_limit else colours.length
                painter.fillRect(QRectF(i * width, floor - height, max(1.0, width - 1), height), colour)
        painter.setFont(theme.figures_font(theme.CAPTION))
        left, right = ticks([0, reach])
        below = QRectF(0, floor + 1, full, line)
        painter.drawText(below, LEFT, left)
        painter.drawText(below, RIGHT, f"{right} tokens")
        if 0 < self._prompt_limit < reach:
            x = full * self._prompt_limit / reach
            painter.setPen(QPen(colours.text, 1, Qt.PenStyle.DashLine))
            painter.drawLine(int(x), 0, int(x), floor)
            beside = QRectF(0, 0, x - 5, line) if x > full / 2 else QRectF(x + 5, 0, full - x - 5, line)
            painter.drawText(beside, RIGHT if x > full / 2 else LEFT, f"{self._prompt_limit:,} fit")

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and self._lengths and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.tool_tip_at(event.pos().x()), self)
            return True
        return super().event(event)

    def tool_tip_at(self, x: int) -> str:
        """“120 to 127 tokens: 31 rows”, for the bar at `x` in pixels."""
        step, bins = self.bins()
        place = max(0, min(len(bins) - 1, x * len(bins) // max(1, self.width())))
        span = f"{place:,}" if step == 1 else f"{place * step:,} to {place * step + step - 1:,}"
        return f"{span} tokens: {bins[place]:,} {'row' if bins[place] == 1 else 'rows'}"


class VarietyFigures(QWidget):
    COLUMNS = 2

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName("Variety of the prompts")
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(theme.SPACE)
        self._grid.setVerticalSpacing(0)
        self._cells: list[tuple[QLabel, ElidedLabel]] = []
        self._instead = label(font=theme.caption_font(), role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        self._grid.addWidget(self._instead, 0, 0, 1, 2 * self.COLUMNS)
        for i in range(self.COLUMNS):
            self._grid.setColumnStretch(2 * i + 1, 1)

    def show_figures(self, figures: Sequence[tuple[str, str, str]], placeholder: str = "") -> None:
        """Show (name, value, help) of each figure, or the placeholder without any."""
        self._instead.setText(placeholder)
        self._instead.setVisible(not figures)
        while len(self._cells) < len(figures):
            named = label(font=theme.caption_font(), role="caption")
            shown = ElidedLabel(font=theme.figures_font(theme.CAPTION))
            line, place = divmod(len(self._cells), self.COLUMNS)
            self._grid.addWidget(named, line, 2 * place)
            self._grid.addWidget(shown, line, 2 * place + 1)
            self._cells.append((named, shown))
        for i, (named, shown) in enumerate(self._cells):
            named.setVisible(i < len(figures))
            shown.setVisible(i < len(figures))
            if i < len(figures):
                name, value, tip = figures[i]
                named.setText(name)
                shown.setText(value)
                shown.setAccessibleName(f"{name}: {value}")
                for widget in (named, shown):
                    widget.setToolTip(plain_tip(f"{value}\n{tip}"))
