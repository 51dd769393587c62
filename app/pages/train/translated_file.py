"""A banner on what was made of an opened file for another program: what was translated, and what was left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels_and_buttons import label
from backend.config.other_programs.translation import TranslatedKey

FEW = 6
"""Words without effect that the summary lists; more are counted there, and listed on request."""


class TranslatedFileBanner(QFrame):
    """The banner; hidden for a file that has no word of another program.

    Attributes:
        sentence, translated – the label with the summary, and the one with what became of each word, shown on request.
        show_button, close_button – the links that show those words, and close the banner.

    Signals:
        closed – the user clicked Close.
    """

    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "banner")
        self.sentence = label(wrap=True, selectable=True)
        self.translated = label(wrap=True, selectable=True)
        self.show_button, self.close_button = LinkButton("Show them"), LinkButton("Close")
        self.show_button.setAccessibleName("Show what each word of the file was read as")
        self.close_button.setAccessibleName("Close the note on the words of the file")
        self.show_button.clicked.connect(lambda: self._show_each(not self.translated.isVisibleTo(self)))
        self.close_button.clicked.connect(self.closed)
        across = QHBoxLayout(self)
        across.setContentsMargins(2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        across.setSpacing(2 * theme.SPACE)
        texts = QVBoxLayout()
        texts.addWidget(self.sentence)
        texts.addWidget(self.translated)
        across.addLayout(texts, 1)
        for button in (self.show_button, self.close_button):
            across.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
        self.hide()

    def show_words(self, file: Path | None, program: str, words: Sequence[TranslatedKey]) -> None:
        """Say what was made of a file's words; none hide the banner. `program`: whose file it is, empty where that is open."""
        self.sentence.setText(summary(file, program, words))
        self.translated.setText("\n".join(_details(words)))
        self.show_button.setVisible(bool(self.translated.text()))
        self._show_each(False)
        self.setVisible(any(word.fate != "as here" for word in words))

    def _show_each(self, is_shown: bool) -> None:
        self.translated.setVisible(is_shown)
        self.show_button.setText("Hide them" if is_shown else "Show them")


def summary(file: Path | None, program: str, words: Sequence[TranslatedKey]) -> str:
    """Whose file it is, how many words were translated, and which were left out, with their reasons where they are few."""
    name = file.name if file is not None else "The file"
    translated, left_out = (sum(word.fate == fate for word in words) for fate in ("translated", "without effect"))
    sentences = [f"{name} is a file for {program}; what it leaves out has GRPO Studio's defaults."] if program else []
    if translated:
        sentences.append(f"{translated} {'word of it was' if translated == 1 else 'words of it were'} translated.")
    if left_out > FEW:
        sentences.append(f"{left_out} are without effect here.")
    elif left_out:
        sentences.append(f"Left out{'' if program else f' of {name}'}: {'; '.join(_left_out(words))}.")
    return " ".join(sentences)


def _left_out(words: Sequence[TranslatedKey]) -> list[str]:
    """The words without effect, by reason."""
    by_reason: dict[str, list[str]] = {}
    for word in words:
        if word.fate == "without effect":
            by_reason.setdefault(word.sentence, []).append(word.word)
    return [f"{', '.join(named)} ({why})" for why, named in by_reason.items()]


def _details(words: Sequence[TranslatedKey]) -> list[str]:
    """A line for each word that was translated, and for each reason of those without effect, where the summary counts them."""
    translated = [f"{word.word} → {word.sentence}" for word in words if word.fate == "translated"]
    left_out = sum(word.fate == "without effect" for word in words)
    return [*translated, *(["", "Without effect here:", *_left_out(words)] if left_out > FEW else [])]
