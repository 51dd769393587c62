"""The panels around the charts: tiles with single figures, the machines of a run, and the log."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QFont, QGuiApplication, QHideEvent, QPaintEvent, QResizeEvent, QShowEvent, QTextCursor
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.state.guide import place_of
from app.state.messages import problems_to
from app.state.run import RankNow, Run
from app.state.run_completions import FILTERS
from app.state.run_notices import findings_of, take_up
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import label, plain_tip
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, holder, paint_edge, row, set_shown
from app.widgets.basic.number_format import DASH, MINUS, THIN, counted, figure, finite, signed
from app.widgets.basic.tables import Column, RowsModel
from backend.config.config import SETTINGS
from backend.trainer.health.rules import RULES
from backend.trainer.health.watch import Episode
from backend.utils.files import open_regular
from backend.utils.text import as_in_a_terminal

MAX_READ = 64 << 10  # bytes read at a time
FOLDED = 2
MOST_OF_PAGE = 0.25  # share of the page's height that findings may take


class MetricTile(QFrame):
    def __init__(self, name: str, role: str = "text", unit: str = "", help: str = "") -> None:
        super().__init__()
        self._name, self._role, self._unit = name, role, unit
        configure(self, role="card", tip=help, minimumWidth=theme.scaled(84))
        # Ignored: tiles share the row's width equally, and a longer figure must not widen its tile during a run.
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        small = theme.figures_font(theme.CAPTION)
        name_line, self.caption = ElidedLabel(font=small, text=name), ElidedLabel(font=small)
        self._number = label(font=theme.figures_font(theme.TITLE, QFont.Weight.DemiBold))
        self._unit_label = label(font=theme.caption_font(), role="muted")
        number = row(self._number, (self._unit_label, 0, Qt.AlignmentFlag.AlignBottom), None, spacing=5)
        self._layout: QVBoxLayout = column(name_line, number, self.caption, into=self, spacing=0)
        self.set_low(False)
        theme.signals.changed.connect(self._recolour)
        self.show_value(None)

    def show_value(self, now: float | None, start: float | None = None, instead: str = "") -> None:
        """Show the value and its difference from `start`; `instead` replaces the caption (why there is no value)."""
        number, _, unit = figure(now, self._unit).partition(THIN)
        self._number.setText(number)
        self._unit_label.setText(unit)
        change = _change(finite(now), finite(start), number, unit)
        self.caption.setText(instead or (f"{change} since start" if change else ""))
        self.setAccessibleName(f"{self._name} {self.figure()} {self.caption.text()}".strip())
        self._recolour()
        self._fit()

    def set_low(self, low: bool) -> None:
        set_shown(self.caption, not low)
        self._layout.setContentsMargins(9, 2 if low else 6, 9, 3 if low else 7)

    def figure(self) -> str:
        return f"{self._number.text()}{THIN}{self._unit_label.text()}".removesuffix(THIN)

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._fit()

    def _fit(self) -> None:
        needed = self._number.sizeHint().width() + 5 + self._unit_label.sizeHint().width()
        set_shown(self._unit_label, bool(self._unit_label.text()) and needed <= self.width() - 18)

    def _recolour(self) -> None:
        role = "placeholder" if self._number.text() == DASH else self._role
        self._number.setStyleSheet(f"color: {getattr(theme.palette(), role).name()};")


def _change(now: float | None, start: float | None, number: str, unit: str) -> str:
    if now is None or start is None:
        return ""
    fraction = number.partition(".")[2] if now else "000"
    change = (now - start) * {"%": 100, "MB": 1000}.get(unit, 1)
    if not fraction.isdigit() and fraction:  # a large number that has a letter for its scale
        return signed(change)
    size = f"{abs(change):,.{len(fraction)}f}"
    return f"{'+' if change > 0 else MINUS}{size}" if size.strip("0,.") else ""


class RankModel(RowsModel):
    columns = (
        Column("Rank", 48, True, "Rank 0 runs on this machine and writes the run folder"),
        Column("Machine"),
        Column("Chip"),
        Column("Sampling", 118, True, "Sampling speed in the newest step"),
        Column("Learning", 118, True, "Training speed in the newest step"),
        Column("Prompts", 64, True, "Prompts of the newest step that this rank sampled"),
        Column("Peak memory", 146, True, "Largest memory use so far, and the machine's memory"),
        Column("Waiting", 72, True, "Share of the newest step spent waiting"),
        Column("State", 56, tip="Lost: the machine stopped answering"),
    )

    def text(self, row: RankNow, column: int) -> str:
        info, peak = row.info, figure(row.memory_gb, "GB")
        return (
            *(str(info.rank), info.machine, info.chip),
            *(figure(row.sampling, "tokens/s"), figure(row.learning, "tokens/s")),
            figure(None if row.prompts is None else round(row.prompts)),
            f"{peak} of {figure(info.memory_gb, 'GB')}" if info.memory_gb else peak,
            *(figure(row.waiting_share, "share"), "Lost" if row.is_lost else ""),
        )[column]

    def colour(self, row: RankNow, column: int) -> str:
        title = self.columns[column].title
        if row.is_lost:
            return "bad" if title in ("Machine", "State") else "muted"
        waits_long = title == "Waiting" and (row.waiting_share or 0) > RULES["machines_wait"].threshold
        return "warning" if waits_long else "text"

    def tip(self, row: RankNow, column: int) -> str:
        info = row.info
        versions = ((name, number) for name, number in (("mlx", info.mlx), ("Python", info.python)) if number)
        where = f"at {info.address}" if info.address else "this machine" if info.rank == 0 else ""
        lines = (where, ", ".join(map(" ".join, versions)), f"Its output: {info.log}" if info.log else "")
        return plain_tip("\n".join(filter(None, lines)))


class LogView(QFrame):
    """The tail of a log file, followed while it is visible: its last line when folded, a panel when unfolded."""

    def __init__(self) -> None:
        super().__init__()
        self._path: Path | None = None
        self._offset = 0  # of the first line that is not complete yet
        self._newest = ""
        self.setProperty("role", "card")
        self._timer = configure(QTimer(self, interval=500), timeout=self.read_on)
        self.toggle = IconButton("chevron-right", "Log", "Show or fold the log", checkable=True, toggled=self._fold)
        self._line = ElidedLabel(font=theme.mono_font(theme.CAPTION))
        self.text = QPlainTextEdit(readOnly=True, maximumBlockCount=2000)
        configure(self.text, name="Log", font=theme.mono_font(), lineWrapMode=QPlainTextEdit.LineWrapMode.NoWrap)
        self._height = self.text.fontMetrics().lineSpacing() * 9 + 16
        self.fill(False)
        put, tip = lambda: QGuiApplication.clipboard().setText(self.text.toPlainText()), "Copy the log"
        copy = LinkButton("Copy", on_click=put, tip=tip, name=tip)
        reveal = LinkButton("Open log", on_click=self.open_file)
        head = row(self.toggle, (self._line, 1), copy, reveal, spacing=2 * theme.SPACE)
        column(head, self.text, into=self, spacing=2, margins=(4, 2, 12, 2))
        self._fold(False)

    def follow(self, path: Path | None) -> None:
        self._path, self._offset, self._newest = path, 0, ""
        self.text.clear()
        self.read_on()

    def unfold(self, open: bool = True) -> None:
        self.toggle.setChecked(open)

    def fill(self, fills: bool) -> None:
        self.text.setMinimumHeight(0 if fills else self._height)
        self.text.setMaximumHeight(10_000 if fills else self._height)

    def open_file(self) -> None:
        if self._path is not None and self._path.exists():
            open_path(self._path)

    def read_on(self) -> None:
        chunk = b""
        with suppress(OSError):
            if self._path is not None:
                with open_regular(self._path) as file:
                    size = os.fstat(file.fileno()).st_size
                    if size < self._offset:  # truncated, so it is read from the start again
                        self._offset = 0
                        self.text.clear()
                    if size - self._offset > MAX_READ:
                        file.seek(size - MAX_READ)
                        self._offset = size - MAX_READ + len(file.readline())  # which is cut
                    file.seek(self._offset)
                    chunk = file.read(MAX_READ)
        *lines, partial = (as_in_a_terminal(line) for line in chunk.decode("utf-8", errors="replace").split("\n"))
        self._offset += chunk.rfind(b"\n") + 1
        if lines:
            bar = self.text.verticalScrollBar()
            at_end = bar.value() >= bar.maximum() - 4  # a user who has scrolled up is reading, and must not be moved
            is_first = self.text.document().isEmpty()
            self.text.appendPlainText("\n".join(lines))
            if is_first:  # Qt shows the cursor, which is at the end of a line that may be long
                self.text.moveCursor(QTextCursor.MoveOperation.StartOfLine)
            if at_end:
                bar.setValue(bar.maximum())
        self._newest = next((line for line in (partial, *reversed(lines)) if line.strip()), self._newest)
        self._line.setText("" if self.toggle.isChecked() else self._newest.strip())

    def _fold(self, open: bool) -> None:
        self.text.setVisible(open)
        self.toggle.set_icon("chevron-down" if open else "chevron-right")
        self._line.setText("" if open else self._newest.strip())
        bar = self.text.verticalScrollBar()
        bar.setValue(bar.maximum())

    def showEvent(self, event: QShowEvent) -> None:
        self._timer.start()
        self.read_on()

    def hideEvent(self, event: QHideEvent) -> None:
        self._timer.stop()


class HealthRow(QFrame):
    def __init__(self, episode: Episode, actions: Sequence[tuple[str, str, Callable[[], object]]]) -> None:
        super().__init__()
        self.episode = episode
        self._is_current = episode.until is None
        self.setAccessibleName(f"{episode.title}, {when(episode)}")
        role = "" if self._is_current else "muted"
        title = label(episode.title, theme.heading_font(), role)
        advice = episode.advice if self._is_current else ""
        self.text = label(f"{episode.sentence} {advice}".strip(), role=role, wrap=True, selectable=True)
        self.links = [
            LinkButton(text, on_click=on_click, tip=tip, name=f"{text}: {episode.title}")
            for text, tip, on_click in actions
        ]
        head = row(title, (label(when(episode), theme.caption_font(), "caption"), 1))
        links = row(*self.links, None, spacing=2 * theme.SPACE)
        column(head, self.text, links, into=self, spacing=2, margins=(theme.GUTTER, 4, 12, 4))

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        role = {"error": "bad", "info": "accent"}.get(self.episode.level, "warning") if self._is_current else "outline"
        paint_edge(self, getattr(theme.palette(), role), 6)


class HealthCards(QFrame):
    def __init__(self, session: Session, page: QWidget) -> None:
        super().__init__()
        self._session, self._page = session, page
        self._run: Run | None = None
        self._dismissed: set[tuple[str, int | None]] = set()  # code and first step
        self._episodes: list[Episode] = []
        self._rows: list[HealthRow] = []
        self._is_open = self._is_live = False
        self._layout: QVBoxLayout = column(spacing=0)
        content = holder(self._layout)
        self._area = TabArea(horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._area.setWidget(content)
        for part in (self._area.viewport(), content):
            part.setAutoFillBackground(False)  # the card's own colour
        self.more = LinkButton("", on_click=lambda: self.unfold(not self._is_open))
        foot = row(self.more, None, margins=(theme.GUTTER, 0, 12, 2))
        column(self._area, foot, into=self, spacing=0, margins=(1, 2, 1, 2))
        configure(self, role="card", name="Health findings", shown=False)

    def show_episodes(self, episodes: Sequence[Episode], *, live: bool = False) -> None:
        if (list(episodes), live) != (self._episodes, self._is_live):  # new rows would take the button from the mouse
            self._episodes, self._is_live = list(episodes), live
            self._show_rows()

    def unfold(self, is_open: bool) -> None:
        if is_open != self._is_open:
            self._is_open = is_open
            self._show_rows()

    def _show_rows(self) -> None:
        clear_layout(self._layout)
        current = [episode for episode in self._episodes if episode.until is None]
        shown = self._episodes if self._is_open else current[:FOLDED]
        self._rows = [HealthRow(episode, self._actions(episode)) for episode in shown]
        for each in self._rows:
            self._layout.addWidget(each)
            each.show()  # at once, since its height counts
        rest = len(self._episodes) - len(shown)
        self.more.setText(f"{rest} more" if shown else f"{counted(rest, 'finding')} of earlier steps")
        if self._is_open:
            self.more.setText("Show less")
        set_shown(self.more, self._is_open or rest > 0)
        set_shown(self._area, bool(shown))
        set_shown(self, bool(self._episodes))
        self.fit()

    def fit(self) -> None:
        """As high as the findings, but leave the charts most of the page: beyond that the findings scroll."""
        needed = sum(each.heightForWidth(max(1, self.width() - 2)) for each in self._rows)
        self._area.setFixedHeight(min(needed, round(MOST_OF_PAGE * self._page.height())))

    def _actions(self, episode: Episode) -> list[tuple[str, str, Callable[[], object]]]:
        actions: list[tuple[str, str, Callable[[], object]]] = []
        is_current, session = episode.until is None, self._session
        if episode.since is not None:
            step = episode.since if episode.until is None else episode.until
            read = f"Read the completions of step {step}"
            # Filters that show just what a rule is about have its name.
            wanted = episode.rule if episode.rule in FILTERS else None
            actions.append(("Read completions", read, lambda: session.completions_requested.emit(step, wanted)))
        if is_current and episode.setting:
            show = f"Show {SETTINGS[episode.setting].label} in the form"
            actions.append(("Go to the setting", show, lambda: session.show_setting(episode.setting)))
        if is_current and episode.settings:
            text, full = f"Do it: {proposal(episode.settings)}", f"Set {proposal(episode.settings, full=True)}"

            def take_it_up() -> None:
                with problems_to(session.message.emit):
                    take_up(session, self._run, dict(episode.settings))

            actions.append((text, full, take_it_up))
        if episode.rule in RULES:  # an old event log may name a rule that was removed
            place, tip = place_of("health", episode.rule), "What it means and what to do, step by step"
            actions.append(("Guide", tip, lambda: session.guide_requested.emit(place)))
        if episode.rule == "solved" and is_current and self._is_live:
            actions.append(("Stop the run", "Stops after this step and saves", lambda: session.send("stop")))

        def dismiss() -> None:
            self._dismissed.add((episode.code, episode.since))
            self.show_run(self._run)

        actions.append(("Dismiss", "Hide this finding", dismiss))
        return actions

    def resizeEvent(self, event: QResizeEvent) -> None:
        self.fit()

    def show_run(self, run: Run | None) -> None:
        if run is not self._run:
            self._run, self._dismissed = run, set()
            self.unfold(False)
        live = run is not None and run.is_live
        self.show_episodes(findings_of(run, self._dismissed) if run is not None else [], live=live)


def when(episode: Episode) -> str:
    """“since step 12”, “step 12 until step 40”."""
    if episode.since is None:
        return ""
    since = f"step {episode.since:,}"
    return f"since {since}" if episode.until is None else f"{since} until step {episode.until:,}"


def proposal(settings: Mapping[str, Any], *, full: bool = False) -> str:
    """“Learning Rate 5e-05”; of a long text its label alone, unless `full`."""
    parts = []
    for key, value in settings.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        is_short = full or not isinstance(value, str) or len(value) < 16
        parts.append(f"{SETTINGS[key].label} {shown}" if is_short else SETTINGS[key].label)
    return ", ".join(parts)
