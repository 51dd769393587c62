"""What the Train page says about the file in the form: it is the demo, it was converted, it has problems."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QWidget

from app import theme
from app.state.draft import Draft
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import clear_layout, column, holder, row
from app.widgets.basic.number_format import counted
from backend.config.config import SETTINGS
from backend.utils.errors import ConfigProblem

DEMO = (
    "The demo is loaded: a small bundled model learns, from rewards alone, to work sums out instead of guessing them. "
    "It takes about a minute and downloads nothing. To train on your own questions, drop a csv or jsonl file anywhere."
)
FEW = 6
MARGINS = (2 * theme.SPACE, 12, 2 * theme.SPACE, 12)
LEFT = Qt.AlignmentFlag.AlignLeft


class FileProblemsPanel(QFrame):
    """Every problem of the file that was opened, with its line: a misspelt key can be corrected, a value be changed."""

    field_requested = Signal(str)  # setting

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft
        self.setProperty("role", "alert")
        self.title, self.sentence = label(font=theme.heading_font(), wrap=True), label(wrap=True)
        self.rows = column(spacing=12)
        self.open_button = LinkButton("Open the file", on_click=self._open_file)
        self.close_button = LinkButton("Close", on_click=draft.close_file_problems, name="Close the list of problems")
        links = row(self.open_button, None, self.close_button)
        column(self.title, self.sentence, self.rows, links, into=self, margins=MARGINS)
        self.hide()

    def show_problems(self, problems: Sequence[ConfigProblem]) -> list[ConfigProblem]:
        """Show what of the file was not read, and those of the form's problems that are in it; return the others."""
        found = self._draft.file_problems
        in_file = [each for each in problems if found is not None and found.lines.get(each.setting)]
        clear_layout(self.rows)
        if found is None or not (found.refusal or found.unread or in_file):
            self.hide()
            return list(problems)
        count = len(found.unread)
        self.title.setText(f"{found.path.name} was not opened" if found.refusal else f"Problems in {found.path.name}")
        told = f"{counted(count, 'setting')} could not be read. The rest is in the form." if count else ""
        self.sentence.setText(found.refusal or told)
        self.sentence.setVisible(bool(self.sentence.text()))
        listed: list[tuple[int, str, QWidget | None]] = []
        for each in found.unread:
            fix = partial(self._draft.correct_key, each)
            link = button(f"Use {each.meant}", fix, name=f"Use {each.meant} for {each.key}") if each.meant else None
            listed.append((found.lines.get(each.key, 0), each.sentence, link))
        for each in in_file:
            go = partial(self.field_requested.emit, each.setting)
            link = LinkButton(f"Go to {SETTINGS[each.setting].label}", on_click=go)
            listed.append((found.lines[each.setting], each.sentence, link))
        for line, sentence, link in sorted(listed, key=lambda each: each[0]):
            text = label(sentence, role="problem", wrap=True, selectable=True)
            place = label(f"Line {line}", theme.caption_font(), role="muted", shown=bool(line))
            parts = [(link, 0, LEFT)] if link is not None else []
            self.rows.addWidget(holder(column(place, text, *parts, spacing=4)))
        self.show()
        return [each for each in problems if each not in in_file]

    def _open_file(self) -> None:
        if self._draft.file_problems is not None:
            open_path(self._draft.file_problems.path)


class TranslatedFileBanner(QFrame):
    """Tells which settings of another program's file were converted, which were ignored and why, and whose defaults
    the others have."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft, self._closed = draft, None
        self.setProperty("role", "banner")
        self.sentence, self.translated = label(wrap=True, selectable=True), label(wrap=True, selectable=True)
        show_name = "Show how each setting of the file was converted"
        self.defaults_button = LinkButton("", on_click=self._change_defaults)
        self.show_button = LinkButton("Show them", on_click=self._toggle_list, name=show_name)
        self.close_button = LinkButton("Close", on_click=self._close, name="Close the note on the settings of the file")
        links = row(self.show_button, None, self.close_button)
        parts = (self.sentence, self.translated, (self.defaults_button, 0, LEFT), links)
        column(*parts, into=self, margins=MARGINS)
        self.hide()

    def show_words(self) -> None:
        """Describe the settings of the draft's file; none hide the banner."""
        file, translation = self._draft.path, self._draft.translation
        if translation is None or translation is self._closed:
            self.hide()
            return
        program = translation.program.name if translation.program else ""
        by_reason: dict[str, list[str]] = {}
        for word in translation.words:
            if word.fate == "without effect":
                by_reason.setdefault(word.sentence, []).append(word.word)
        ignored = [f"{', '.join(named)} ({why})" for why, named in by_reason.items()]
        listed = [f"{word.word} → {word.sentence}" for word in translation.words if word.fate == "translated"]
        count, name = sum(map(len, by_reason.values())), file.name if file is not None else "The file"
        sentences = [f"{name} is a file for {program}."] if program else []
        if converted := sum(word.fate == "translated" and word.word in translation.file for word in translation.words):
            sentences.append(f"{counted(converted, 'setting')} converted.")
        if count > FEW:
            sentences.append(f"{count} ignored.")
            listed += ["", "Ignored:", *ignored]
        elif count:
            sentences.append(f"Ignored{'' if program else f' in {name}'}: {'; '.join(ignored)}.")
        if translation.defaults:
            sentences.append(f"{counted(len(translation.defaults), 'setting')} left out: {program}'s defaults.")
            listed += ["", f"{program}'s defaults:", translation.listed_defaults()]
        elif program:
            sentences.append("Settings that it leaves out have GRPO Studio's defaults.")
        self.defaults_button.setText(f"Use {'GRPO Studio' if translation.defaults else program}'s defaults")
        self.defaults_button.setVisible(bool(program))
        self.sentence.setText(" ".join(sentences))
        self.translated.setText("\n".join(listed))
        self.translated.show()
        self._toggle_list()
        self.show_button.setVisible(bool(listed))
        self.setVisible(bool(program) or any(word.fate != "as here" for word in translation.words))

    def _change_defaults(self) -> None:
        translation = self._draft.translation
        self._draft.use_defaults("ours" if translation is not None and translation.defaults else "theirs")

    def _close(self) -> None:
        self._closed = self._draft.translation
        self.hide()

    def _toggle_list(self) -> None:
        is_shown = self.translated.isHidden()
        self.translated.setVisible(is_shown)
        self.show_button.setText("Hide them" if is_shown else "Show them")
