"""Counts of a dataset: rows, prompts that are too long, missing answers, duplicates; and either a histogram of prompt lengths, or their variety."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels_and_buttons import label, plain_tip
from app.widgets.basic.layout import NestedStack, set_style_property
from app.widgets.basic.number_format import DASH
from app.widgets.dataset.dataset_histogram import Histogram
from app.widgets.dataset.variety_figures import VarietyFigures

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
