"""The column beside the form: notices, summary of the run, problems, memory, help on a setting, and the command."""

import html
from collections.abc import Sequence
from functools import partial
from typing import Literal

from PySide6.QtCore import QRectF, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QWidget

from app import theme
from app.state.draft import Draft
from app.state.memory import MemoryParts, amount
from app.widgets.basic.controls import CopyLink, Dot, ElidedLabel, LinkButton
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import button, label, show_text
from app.widgets.basic.layout import (
    TabArea,
    card,
    clear_layout,
    column,
    configure,
    grid,
    holder,
    reserve_gutter,
    row,
    set_style_property,
)
from app.widgets.basic.number_format import counted
from app.widgets.form.value_text import limits_text
from backend.config.config import SETTINGS
from backend.config.other_programs.translation import other_names
from backend.config.setting import Setting
from backend.utils.errors import ConfigProblem
from backend.utils.files import exists

WIDTH, NARROW_WIDTH = 312, 272  # width of the column in pixels before scaling: usual, and in a narrow page
SHOWN_PROBLEMS = 6
LISTED_MIN_SHARE = 0.01
SMALL_SHARE = 0.1  # of the machine's memory: a run that needs less has its parts folded
ROW_MIN_BYTES = 0.5e6  # a smaller part gets no row: it would say 0 MB
DEMO = (
    "The demo is loaded: a small bundled model learns, from rewards alone, to work sums out instead of guessing them. "
    "It takes about a minute and downloads nothing. To train on your own questions, drop a csv or jsonl file anywhere."
)
FEW = 6
MARGINS = (2 * theme.SPACE, 12, 2 * theme.SPACE, 12)
LEFT = Qt.AlignmentFlag.AlignLeft


class LaunchColumn(TabArea):
    problem_pressed = Signal(str)  # setting
    guide_pressed = Signal(str)  # setting

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFixedWidth(theme.scaled(WIDTH))
        heading, small = theme.heading_font(), theme.mono_font(theme.CAPTION)
        indent = (theme.SPACE, 0, 0, 0)
        self.summary = label(font=heading, wrap=True)
        # Paragraphs; show_plan escapes their text.
        self.details = label(role="muted", wrap=True, textFormat=Qt.TextFormat.RichText)
        self._problem_title = label(font=heading)
        self._problem_rows, self._warning_rows = column(), column()
        self._problems = holder(column(self._problem_title, self._problem_rows, margins=indent), visible=False)
        title = label("Worth a second look", heading)
        self._warnings = holder(column(title, self._warning_rows, margins=indent), visible=False)
        self.memory = MemoryBar()
        self._help_title = label("About a setting", heading)
        self._help = label("Select a setting to see its help.", role="muted", wrap=True)
        self._help_key = label(font=small, role="muted", wrap=True, selectable=True)
        go, tip = lambda: self.guide_pressed.emit(self._help_key.text()), "Effect and advice on values (F1)"
        self.more = LinkButton("More in the guide", on_click=go, tip=tip, visible=False)
        self.copy = CopyLink("Copy the command", "Copy the whole command")
        self.command = ElidedLabel(Qt.TextElideMode.ElideMiddle, font=small)

        self.notices = column()  # the page adds what it has to say about the form
        about = (self._help_title, self._help, self._help_key, (self.more, 0, LEFT))
        terminal = row((label("From a terminal", role="muted"), 1), self.copy)
        self._parts = column(
            self.notices,
            card(column(self.summary, self.details, spacing=12, margins=MARGINS)),
            *(self._problems, self._warnings, self.memory),
            *(holder(column(*about, spacing=4, margins=indent)), None),
            column(terminal, self.command, spacing=4, margins=indent),
            spacing=2 * theme.SPACE,
            margins=(0, 0, 0, 2 * theme.SPACE),
        )
        self.setWidget(holder(self._parts, objectName="page"))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self._parts)

    def show_plan(self, summary: str, details: Sequence[str], command: str, short: str) -> None:
        """`short` is the command as it is shown: the tool tip and Copy have all of it."""
        self.summary.setText(summary)
        lines = (f'<p style="margin: 0px 0px 4px 0px">{html.escape(line)}</p>' for line in details)
        self.details.setText("".join(lines))
        self.copy.content = command
        configure(self.command, text=short, tip=f"<p>{html.escape(command)}</p>")

    def show_problems(self, problems: Sequence[ConfigProblem], warnings: Sequence[ConfigProblem]) -> None:
        self._problem_title.setText(counted(len(problems), "problem"))
        for whole, rows, listed, role in (
            (self._problems, self._problem_rows, problems, "problem"),
            (self._warnings, self._warning_rows, warnings, "muted"),
        ):
            clear_layout(rows)
            whole.setVisible(bool(listed))
            for problem in listed[:SHOWN_PROBLEMS]:
                setting = SETTINGS.get(problem.setting)
                press, name = partial(self.problem_pressed.emit, problem.setting), setting.label if setting else ""
                link = LinkButton(name or problem.setting, on_click=press, tip="Go to the field")
                sentence = label(problem.sentence, role=role, wrap=True)
                rows.addWidget(holder(column((link, 0, LEFT), sentence, spacing=0)))
            if len(listed) > SHOWN_PROBLEMS:
                rows.addWidget(label(f"and {len(listed) - SHOWN_PROBLEMS} more", role="muted"))

    def show_help(self, setting: Setting) -> None:
        names = other_names(setting.key)
        elsewhere = f"Elsewhere called {', '.join(names)}." if names else ""
        choices = [
            f"{choice.label}: {choice.sentence}"
            for choice in setting.choices
            if choice.sentence and not choice.is_hidden
        ]
        self._help_title.setText(setting.label)
        self._help.setText("\n".join(filter(None, [setting.help, limits_text(setting), elsewhere, *choices])))
        self._help_key.setText(setting.key)
        self.more.show()


class MemoryBar(QWidget):
    """The estimated memory of a run by part, against the memory of this machine. Hidden without an estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_parts: MemoryParts | None = None
        self._bar = StackedBar()
        self.sentence, self.advice = label(wrap=True), label(wrap=True, role="muted")
        self._rows = grid((), stretch=1, spacing=(theme.SPACE, 2))
        self.legend = holder(self._rows)
        self.more = LinkButton("", on_click=lambda: self._unfold(self.legend.isHidden()))
        head = row((label("Memory", theme.heading_font()), 1), self.more)
        parts = (head, self._bar, self.sentence, self.advice, self.legend)
        column(*parts, into=self, spacing=6, margins=(theme.SPACE, 0, 0, 0))
        configure(self, accessibleName="Memory", visible=False)

    def show_memory(self, memory_parts: MemoryParts | None) -> None:
        if memory_parts == self.memory_parts:
            return
        was_small = self._is_small
        self.memory_parts = memory_parts
        if self._is_small != was_small:  # what the user folds stays so until the need is another matter
            self._unfold(not self._is_small)
        self.setVisible(memory_parts is not None)
        clear_layout(self._rows)
        if memory_parts is None:
            return
        min_bytes = max(memory_parts.total * LISTED_MIN_SHARE, ROW_MIN_BYTES)
        parts = [part for part in memory_parts.parts if part[-1] >= min_bytes]
        rest = [part for part in memory_parts.parts if 0 < part[-1] < min_bytes]
        if (small := sum(size for *_, size in rest)) >= ROW_MIN_BYTES:
            parts.append(("Other", ", ".join(f"{name} {amount(size)}" for name, _, size in rest), small))
        for i, (name, about, size) in enumerate(parts):
            figure = label(amount(size), theme.figures_font(), align=Qt.AlignmentFlag.AlignRight)
            swatch = Dot(partial(part_colour, i), square=True)
            for place, widget in enumerate((swatch, label(name, role="muted"), figure)):
                widget.setToolTip(f"<p>{about}</p>" if about else "")
                self._rows.addWidget(widget, i, place)
        self.sentence.setText(memory_parts.sentence)
        set_style_property(self.sentence, "role", "muted" if memory_parts.fits else "problem")
        show_text(self.advice, memory_parts.speed_note if memory_parts.fits else memory_parts.advice)
        self._bar.sizes, self._bar.limit = [size for *_, size in parts], memory_parts.limit
        self._bar.update()
        listed = ", ".join(f"{name} {amount(size)}" for name, _, size in parts)
        self.setAccessibleDescription(f"{memory_parts.sentence} {listed}.")

    @property
    def _is_small(self) -> bool | None:
        parts = self.memory_parts
        return None if parts is None else parts.total < SMALL_SHARE * parts.limit

    def _unfold(self, is_open: bool) -> None:
        self.legend.setVisible(is_open)
        self.more.setText("Hide parts" if is_open else "Show parts")
        self.more.setAccessibleName(f"{self.more.text()} of the memory")


class StackedBar(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[float] = []
        self.limit = 0.0
        self.setFixedHeight(14)

    def paintEvent(self, event: QPaintEvent) -> None:
        full_width_bytes = max(sum(self.sizes), self.limit)
        if full_width_bytes <= 0:
            return
        colours, painter = theme.palette(), theme.painter(self)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colours.hover)
        painter.drawRoundedRect(QRectF(self.rect()), 4, 4)
        left = 0.0
        for index, size in enumerate(self.sizes):
            width = self.width() * size / full_width_bytes
            painter.fillRect(QRectF(left, 0, max(width - 1, 1), self.height()), part_colour(index))
            left += width
        if self.limit < full_width_bytes:  # a line where the machine's memory ends
            x = self.width() * self.limit / full_width_bytes
            painter.fillRect(QRectF(x - 2, 0, 4, self.height()), colours.window)
            painter.fillRect(QRectF(x - 1, 0, 2, self.height()), colours.text)


def part_colour(index: int) -> QColor:
    """The colour of the part at `index`: the palette's hues in turn, from the seventh part on half transparent."""
    colours = theme.palette()
    hues = (colours.accent, colours.length, colours.kl, colours.clip, colours.good, colours.warning)
    colour = QColor(hues[index % len(hues)])
    colour.setAlphaF(1.0 if index < len(hues) else 0.5)
    return colour


class FileProblemsPanel(QFrame):
    """Every problem of the file that was opened, with its line: a misspelt key can be corrected, a value be changed."""

    field_requested = Signal(str)  # setting

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft
        self.setProperty("role", "alert")
        self.title, self.sentence = label(font=theme.heading_font(), wrap=True), label(wrap=True)
        self.rows, self._links = column(spacing=12), list[QWidget]()
        self.open_button = LinkButton(
            "Open the file", on_click=lambda: draft.file_problems and open_path(draft.file_problems.path)
        )
        self.close_button = LinkButton("Close", on_click=draft.close_file_problems, name="Close the list of problems")
        links = row(self.open_button, None, self.close_button)
        column(self.title, self.sentence, self.rows, links, into=self, margins=MARGINS)
        self.hide()

    def show_problems(self, problems: Sequence[ConfigProblem]) -> list[ConfigProblem]:
        """Show what of the file was not read, and those of the form's problems that are in it; return the others."""
        found = self._draft.file_problems
        in_file = [each for each in problems if found is not None and each.setting in found.settings]
        focused = next((i for i, link in enumerate(self._links) if link.hasFocus()), None)
        if focused is not None:  # hidden, it would pass the focus on to what is below, and the column scroll there
            self.close_button.setFocus()
        clear_layout(self.rows)
        self._links = []
        if found is None or not (found.refusal or found.unread or in_file):
            self.hide()
            return list(problems)
        self.open_button.setVisible(exists(found.path))
        count = len(found.unread)
        self.title.setText(f"{found.path.name} was not opened" if found.refusal else f"Problems in {found.path.name}")
        told = f"{counted(count, 'setting')} could not be read. The rest is in the form." if count else ""
        show_text(self.sentence, found.refusal or told)
        listed: list[tuple[str, QWidget | None]] = []
        for each in found.unread:
            fix = partial(self._draft.correct_key, each)
            link = button(f"Use {each.meant}", fix, name=f"Use {each.meant} for {each.key}") if each.meant else None
            listed.append((each.sentence, link))
        for each in in_file:
            go = partial(self.field_requested.emit, each.setting)
            listed.append((each.sentence, LinkButton(f"Go to {SETTINGS[each.setting].label}", on_click=go)))
        for sentence, link in listed:
            text = label(sentence, role="problem", wrap=True, selectable=True)
            parts = [(link, 0, LEFT)] if link is not None else []
            self.rows.addWidget(holder(column(text, *parts, spacing=4)))
        self._links = [link for _, link in listed if link is not None]
        if focused is not None and self._links:
            following = self._links[min(focused, len(self._links) - 1)]
            QTimer.singleShot(0, following, following.setFocus)  # once it has its place
        self.show()
        return [each for each in problems if each not in in_file]


class TranslatedFileBanner(QFrame):
    """Which settings of another program's file were converted or ignored, and whose defaults the others have."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft, self._closed = draft, None
        self.setProperty("role", "banner")
        self.sentence, self.translated = label(wrap=True, selectable=True), label(wrap=True, selectable=True)
        show_name = "Show how each setting of the file was converted"
        self._offered: Literal["ours", "theirs"] = "theirs"
        self.defaults_button = LinkButton("", on_click=lambda: draft.use_defaults(self._offered))
        self.show_button = LinkButton("Show them", on_click=self._toggle_list, name=show_name)
        self.close_button = LinkButton("Close", on_click=self._close, name="Close the note on the settings of the file")
        links = row(self.show_button, None, self.close_button)
        column(self.sentence, self.translated, (self.defaults_button, 0, LEFT), links, into=self, margins=MARGINS)
        self.hide()

    def show_words(self) -> None:
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
        self._offered = "ours" if translation.defaults else "theirs"
        self.defaults_button.setText(f"Use {'GRPO Studio' if translation.defaults else program}'s defaults")
        self.defaults_button.setVisible(bool(program))
        self.sentence.setText(" ".join(sentences))
        configure(self.translated, text="\n".join(listed), visible=True)
        self._toggle_list()
        self.show_button.setVisible(bool(listed))
        self.setVisible(bool(program) or any(word.fate != "as here" for word in translation.words))

    def _close(self) -> None:
        self._closed = self._draft.translation
        self.hide()

    def _toggle_list(self) -> None:
        is_shown = self.translated.isHidden()
        self.translated.setVisible(is_shown)
        self.show_button.setText("Hide them" if is_shown else "Show them")
