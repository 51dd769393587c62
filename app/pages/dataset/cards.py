"""The cards of the Dataset page: the use of splits and columns, and counts with a histogram or figures on variety."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from PySide6.QtCore import QEvent, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QFrame, QLabel, QSizePolicy, QToolTip, QWidget

from app import theme
from app.state.dataset import Dataset
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton
from app.widgets.basic.labels import button, label, plain_tip, progress_bar, show_text
from app.widgets.basic.layout import card, column, configure, grid, holder, row, set_shown, set_style_property, stack
from app.widgets.basic.number_format import DASH, counted, ticks
from app.widgets.basic.tables import LEFT, RIGHT
from app.widgets.form.field import Field
from backend.config.config import SETTINGS
from backend.utils.errors import ConfigProblem

NONE = "None"
SPLIT_KEYS = ("train_split", "valid_split", "test_split")
COLUMNS = 4
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


class NameMenuField(Field):
    """A setting whose choices are names in the dataset; `offer` replaces them when the dataset changes."""

    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox(length=3, activated=self.emit_edited)  # four fit side by side in a small window
        self.hint.hide()
        return self.control

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        index = self.control.findData(raw)
        if index < 0:  # the dataset has no such name: the field is coloured, and a sentence below the menus says it
            self.control.addItem(str(raw) if raw else NONE, raw)
            index = self.control.count() - 1
        self.control.setCurrentIndex(index)

    def offer(self, names: Sequence[str], default: str | None, tips: Mapping[str, str] | None = None) -> None:
        """Offer these names, with tool tips by name.

        `default` labels the setting's default value where that is not a name itself; None leaves it out.
        """
        current, default_value = self.value(), self.setting.default
        items = {} if default is None or default_value in names else {default_value: default}
        items |= {name: name for name in names}
        self.control.fill(items)
        for i, value in enumerate(items):
            self.control.setItemData(i, (tips or {}).get(value, ""), Qt.ItemDataRole.ToolTipRole)
        self.set_control_value(default_value if current is None else current)

    def offer_splits(self, names: Sequence[str], form: str, used: Mapping[str, Any] | None) -> None:
        """Offer the dataset's splits.

        `form` is file, folder or hub; `used` describes the split that was read for this use, None if there is none.
        """
        raw, source = self.value(), used["source"] if used else ""
        name = source.rpartition(", ")[2] if form == "hub" else PurePath(source).stem
        if raw not in (None, self.setting.default):
            default = "Default"
        elif form == "file" and source:
            default = "Whole file"
        else:
            default = name or ("Held out of train" if used else NONE)
        self.offer([split for split in names if split != name or raw == split], default)


class ColumnMapping(QFrame):
    edited = Signal(str, object)  # key, raw value

    def __init__(self, uses: Mapping[str, str], parent: QWidget | None = None) -> None:
        """`uses` maps each setting that names a column to the use of that column."""
        super().__init__(parent)
        self.setProperty("role", "card")
        self._uses = uses
        self.config = NameMenuField(SETTINGS["dataset_config"])
        self.splits = {key: NameMenuField(SETTINGS[key]) for key in SPLIT_KEYS}
        self.columns = {key: NameMenuField(SETTINGS[key]) for key in uses}
        self.fields: dict[str, NameMenuField] = {**self.splits, "dataset_config": self.config, **self.columns}
        caption = theme.caption_font()
        self.problem = label(font=caption, role="problem", wrap=True, selectable=True)
        self.verdict = label(font=caption, wrap=True, selectable=True)
        self.offered = label(wrap=True)
        self.use = button("Use them", primary=True)
        self.offer = card(row((self.offered, 1), self.use, margins=(12, 6, 6, 6)), "banner")
        cells = self._cells = grid((), spacing=(theme.SPACE, theme.SPACE))
        for i, field in enumerate(self.fields.values()):
            field.edited.connect(self.edited)
            cells.addWidget(field, i // COLUMNS, i % COLUMNS, Qt.AlignmentFlag.AlignTop)
            cells.setColumnStretch(i % COLUMNS, 1)
        column(cells, self.problem, self.offer, self.verdict, None, into=self, margins=(12, 8, 12, 12))
        self.tab_stops = [*(stop for field in self.fields.values() for stop in field.tab_stops), self.use]

    def show_values(self, values: Mapping[str, Any]) -> None:
        for key, field in self.fields.items():
            field.show_value(values[key])

    def offer_names(self, dataset: Dataset) -> None:
        preview, choices = dataset.preview, dataset.choices
        form, columns = preview.get("form", "file"), preview.get("columns", ())
        self.config.offer(choices["configs"], "Default" if form == "hub" else NONE)
        for key, field in self.splits.items():
            used = dataset.splits.get(key.removesuffix("_split"))
            field.offer_splits(choices["splits"] or preview.get("names", []), form, used)
        for field in (self.config, *self.splits.values()):
            set_shown(field, field.control.count() > 1)
        names = [each["name"] for each in columns]
        tips = {each["name"]: f"{each['kind']}: {each['example']}" for each in columns}
        for key, field in self.columns.items():
            field.offer(names, None if key == "prompt_feature" else NONE, tips)
            field.control.setEnabled(bool(columns))

    def show_columns(self, keys: Collection[str]) -> None:
        for field in self.columns.values():
            self._cells.removeWidget(field)
            set_shown(field, field.setting.key in keys)
        for i, key in enumerate(keys):
            self._cells.addWidget(self.columns[key], 1 + i // COLUMNS, i % COLUMNS, Qt.AlignmentFlag.AlignTop)

    def show_problems(self, problems: Sequence[ConfigProblem]) -> None:
        own = [problem for problem in problems if problem.setting in self.fields]
        show_text(self.problem, "\n".join(f"{SETTINGS[each.setting].label}: {each.sentence}" for each in own))
        wrong = {problem.setting for problem in own}
        for key, field in self.fields.items():
            set_style_property(field.control, "problem", key in wrong)

    def show_likely(self, likely: Mapping[str, str]) -> None:
        """Suggest columns (setting → name) for settings whose own column does not exist."""
        clauses = [
            f"{name} {'' if i else 'looks '}like the {self._uses[key]}" for i, (key, name) in enumerate(likely.items())
        ]
        self.offered.setText(f"{', '.join(clauses)}.")
        self.offer.setVisible(bool(likely))
        self.use.setText("Use them" if len(likely) > 1 else "Use it")


class DatasetFigures(QFrame):
    """Counts above a histogram or the figures on variety. An unknown count is a dash."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        tip = "Repetitions, wording and balance of the answers; or the lengths of the prompts."
        self.other = LinkButton(VARIETY, on_click=lambda: self.show_variety(not self.shows_variety), tip=tip)
        self.histogram, self.variety = Histogram(), VarietyFigures()
        self._shown = stack(self.histogram, self.variety, into=self, nested=True)
        self.about = ElidedLabel(font=theme.figures_font(theme.CAPTION))
        self.progress = progress_bar("Prompts counted", fixedWidth=64)
        self._numbers = {key: label(DASH, theme.figures_font(15)) for key in FIGURES}
        self._figures: dict[str, QWidget] = {}
        for key, (word, tip) in FIGURES.items():
            title = label(word, theme.caption_font(), "caption")
            self._figures[key] = holder(column(title, self._numbers[key], spacing=0), toolTip=plain_tip(tip))
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

    def __init__(self) -> None:
        super().__init__()
        self._lengths: Sequence[tuple[int, int]] = ()
        self._prompt_limit, self._placeholder = 0, ""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        configure(self, minimumSize=theme.scaled_size(QSize(120, 64)), accessibleName="Lengths of the prompts")

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
        return f"{span} tokens: {counted(bins[place], 'row')}"


class VarietyFigures(QWidget):
    COLUMNS = 2

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Variety of the prompts")
        self._grid = grid((), self, spacing=(theme.SPACE, 0))
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
                name, value, about = figures[i]
                tip = plain_tip(f"{value}\n{about}")
                configure(named, text=name, toolTip=tip)
                configure(shown, text=value, toolTip=tip, accessibleName=f"{name}: {value}")
