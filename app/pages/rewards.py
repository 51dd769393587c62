"""The Rewards page, the bench: what would my reward functions say? Completions from the model, a run or a file, every
function's score for each, the verdict in words, and the reward file beside them to be mended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import (
    QDragEnterEvent,
    QDropEvent,
    QGuiApplication,
    QKeySequence,
    QResizeEvent,
    QShortcut,
    QShowEvent,
)
from PySide6.QtWidgets import (
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QSplitter,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.bench import Bench
from app.reward_file import RewardFile
from app.studio import Studio
from app.widgets.completion_detail import CompletionDetail
from app.widgets.controls import ElidedLabel
from app.widgets.numbers import THIN, figure
from app.widgets.parts import button, label
from app.widgets.reward_board import BoardModel, RewardBoard
from app.widgets.reward_case_table import CaseModel, CaseTable
from app.widgets.reward_file_panel import RewardFilePanel
from app.widgets.reward_scores import ScoreModel, ScoreTable
from app.widgets.reward_source import RewardSource
from app.widgets.reward_verdict import RewardVerdict
from app.widgets.segments import Segments
from backend.spec import places
from backend.spec.faults import Mistake

NARROW = 900
"""Below this width scores and what stands beside them take turns."""
SHORT, TALL = 560, 760
"""Heights below which the verdict and the functions are kept brief."""
VIEWS = {"scores": "Scores", "completion": "Completion", "file": "Reward file", "cases": "Cases"}
STALE = "Settings or files have changed since these scores."


class RewardsPage(QWidget):
    def __init__(self, studio: Studio, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.studio, self.draft = studio, studio.draft
        self.bench: Bench = studio.bench
        self.file = RewardFile(studio.consent, self)
        self.setAcceptDrops(True)
        self._seed = 0
        self._line: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self._compose()
        self._lay_out()
        self._connect()
        self._open_file()
        self._show()

    # Composition

    def _compose(self) -> None:
        self.source, self.verdict = RewardSource(), RewardVerdict()
        self.functions = BoardModel(self)
        self.board = RewardBoard(self.functions)
        self.completions = ScoreModel(self)
        self.table = ScoreTable(self.completions)
        self.detail, self.panel = CompletionDetail(upright=True), RewardFilePanel()
        self.case_model = CaseModel(self)
        self.cases = CaseTable(self.case_model)
        self.views = Segments(VIEWS, "Show")
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font())
        self.again = button("Score Again", self.bench.score, tip="Ctrl+Return")
        self.keep = button(
            "Keep as Case", self._keep, tip="With the scores that your file's functions give it now (Ctrl+K)"
        )
        self.drop = button("Remove", self.cases.drop, tip="Throw the chosen case away (Delete)")
        self.nothing = _nothing()
        for keys, do in (
            ("Ctrl+Return", self.bench.score),
            ("Ctrl+D", self.source.sample.click),
            ("Ctrl+K", self._keep),
        ):
            QShortcut(QKeySequence(keys), self, do, context=Qt.ShortcutContext.WidgetWithChildrenShortcut)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(label("Rewards", theme.title_font()))
        head.addSpacing(theme.SPACE)
        head.addWidget(self.about, 1)
        head.addWidget(self.views)
        head.addSpacing(theme.SPACE)
        head.addWidget(self.again)
        self.parts = QSplitter(Qt.Orientation.Horizontal, childrenCollapsible=False, handleWidth=12)
        self.parts.setStyleSheet("QSplitter::handle { background: transparent; }")
        self.parts.addWidget(self._results())
        self.parts.addWidget(self._side())
        self.parts.setStretchFactor(0, 3)
        self.parts.setStretchFactor(1, 2)
        self.parts.setSizes([592, 476])
        column = QVBoxLayout(self)
        column.setContentsMargins(*(theme.GUTTER,) * 4)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.source)
        column.addWidget(self.parts, 1)

    def _results(self) -> QWidget:
        shown = QWidget()
        column = QVBoxLayout(shown)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        column.addWidget(self.verdict)
        column.addWidget(self.board.in_card())
        column.addWidget(self.table.in_card(), 1)
        whole = QWidget()
        self._stack = QStackedLayout(whole)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(shown)
        return whole

    def _side(self) -> QWidget:
        side = QWidget()
        side.setMinimumWidth(320)
        self._sides = QStackedLayout(side)
        self._sides.setContentsMargins(0, 0, 0, 0)
        self._sides.addWidget(_with_button(self.detail, self.keep))
        self._sides.addWidget(self.panel)
        self._sides.addWidget(self._cases())
        return side

    def _cases(self) -> QWidget:
        self.kept = label(role="muted", wrap=True)
        whole = _with_button(self.cases.in_card(), self.drop)
        column = whole.layout()
        assert isinstance(column, QVBoxLayout)
        column.insertWidget(0, self.kept)
        return whole

    def _connect(self) -> None:
        bench, source, panel = self.bench, self.source, self.panel
        bench.changed.connect(self._show)
        bench.busy_changed.connect(source.show_busy)
        bench.progress.connect(source.show_progress)
        source.sample_wanted.connect(self._sample)
        source.run_wanted.connect(bench.take_run)
        source.file_wanted.connect(self._read_completions)
        source.paste_wanted.connect(self._paste)
        source.cancelled.connect(bench.cancel)
        source.refused.connect(self.studio.message)
        self.views.chosen.connect(lambda _: self._show_views())
        self.table.chosen.connect(self._choose)
        self.board.error_wanted.connect(lambda row: self._show_error(row["error"], go=True))
        self.cases.drop_wanted.connect(bench.drop_case)
        self.functions.weighed.connect(lambda weights: self.draft.set("reward_weights", weights))
        panel.save_wanted.connect(self.save)
        panel.score_wanted.connect(bench.score)
        panel.new_wanted.connect(self._new_file)
        panel.open_wanted.connect(self._choose_file)
        panel.reload_wanted.connect(self._reload)
        self.file.changed_elsewhere.connect(self._on_changed_elsewhere)
        self.draft.changed.connect(self._on_setting)
        theme.signals.changed.connect(self._show)

    # What is shown

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.source.show_runs([run.path for run in places.all_runs() if run.completions.exists()])
        if self.bench.stale:
            self.bench.score_quietly()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        height = self.height()
        self.verdict.show_at_most(1 if height < SHORT else 2 if height < TALL else 99)
        self.board.show_at_most(3 if height < SHORT else 5 if height < TALL else 8)
        self._show_views()

    def _show_views(self) -> None:
        """In a wide page the scores stand beside the rest; in a narrow one they are one of the views."""
        narrow, key = self.width() < NARROW, self.views.key
        self.views.set_shown("scores", narrow)
        if key == "scores" and not narrow:
            self.views.buttons["completion"].setChecked(True)
            key = "completion"
        empty = key == "completion" and not self.bench.groups
        self.parts.widget(0).setVisible(not narrow or key == "scores")
        self.parts.widget(1).setVisible(key != "scores" if narrow else not empty)
        if key != "scores":
            self._sides.setCurrentIndex(("completion", "file", "cases").index(key))

    def _show(self) -> None:
        bench = self.bench
        self.source.show_size(int(self.draft.sound()["group_size"]))
        self._stack.setCurrentIndex(1 if bench.groups or bench.failed else 0)
        self.again.setEnabled(bool(bench.groups))
        self._show_views()
        self._show_scores()
        self.about.setText(self._told())
        failing = sum(bool(one["failures"]) for one in bench.cases)
        self.case_model.show_cases(bench.cases)
        count = len(bench.cases)
        self.views.show_word(
            "cases", f"Cases: {failing} of {count} fail" if failing else f"Cases ({count})" if count else "Cases"
        )
        self.drop.setEnabled(bool(count))
        self.kept.setText(_about_cases(bench.reward_file, count))

    def _show_scores(self) -> None:
        bench = self.bench
        error = bench.failed or next((one["error"] for one in bench.functions if one["error"]), None)
        findings = [_failed(bench.failed)] if bench.failed else bench.findings
        self.verdict.tell(([_STALE] if bench.stale and not bench.failed else []) + list(findings))
        self.functions.show_functions(bench.functions, bench.groups)
        names = [one["name"] for one in bench.functions]
        labels = [one["label"] for one in bench.functions]
        row = max(self.table.currentIndex().row(), 0)
        self.completions.show_groups(bench.groups, names, labels)
        self.detail.set_rewards(names, labels)
        self.table.begin()
        if 0 < row < self.completions.rowCount():
            self.table.selectRow(row)
        self._show_error(error)

    def _told(self) -> str:
        """What lies on the bench, and how long scoring took."""
        bench = self.bench
        if not bench.groups:
            return ""
        told = f"{_counted(len(bench.groups), 'prompt')}, {_counted(bench.count, 'completion')} {bench.origin}"
        if bench.seconds is None or not bench.functions:
            return told
        return f"{told}; scored in {_span(bench.seconds)}"

    def _show_error(self, error: dict[str, Any] | None, *, go: bool = False) -> None:
        """Mark the line where the person's file went wrong; and go there."""
        mine = error is not None and self.file.path is not None and Path(error["file"]) == self.file.path.resolve()
        self.panel.show_error(error if mine else None)
        if go and mine and error is not None:
            self.views.choose("file")
            self.panel.editor.reveal(error["line"])

    def _choose(self, row: dict[str, Any], completion: dict[str, Any] | None) -> None:
        self._line = (row, completion)
        self.detail.show_completion(row, completion)
        self.keep.setEnabled(completion is not None and self.bench.reward_file is not None)

    def _on_setting(self, key: str) -> None:
        if key in ("", "reward_functions_file"):
            self._open_file()
        if key in ("", "group_size"):
            self.source.show_size(int(self.draft.sound()["group_size"]))

    # What a person does

    def _sample(self, how: str, count: int, numbers: list[int], size: int) -> None:
        self._seed += 1  # another draw each time
        self.bench.sample(how, count, numbers, size, self._seed)

    def _read_completions(self) -> None:
        chosen = self.choose_completions()
        if chosen is not None:
            self.studio.prefs.last_folder = chosen.parent
            self.bench.read(chosen)

    def _paste(self) -> None:
        text = QGuiApplication.clipboard().text()
        if not text.strip():
            self.studio.message.emit("There is no text on the clipboard.")
            return
        self.bench.paste(text)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if _dropped(event) is not None:
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        path = _dropped(event)
        if path is None:
            return
        event.acceptProposedAction()
        if path.suffix == ".jsonl":
            self.bench.read(path)
        else:
            self.draft.set("reward_functions_file", str(path))

    def _keep(self) -> None:
        if self._line is not None and self._line[1] is not None:
            self.bench.keep(self._line[0], self._line[1])

    # The reward file

    def _open_file(self) -> None:
        """Show the file that the settings name, unless it is shown already or holds edits that were not saved."""
        path = self.bench.reward_file
        if path == self.file.path and path is not None:
            return
        try:
            self.file.open(path)
        except Mistake as mistake:
            self.studio.message.emit(mistake.faults[0].sentence)
        self.views.show_word("file", path.name if path else VIEWS["file"])
        self.panel.show_file(str(self.file.path or ""), self.file.text if self.file.path else None)

    def save(self) -> None:
        """Write what is edited, and score again with it."""
        if self.file.path is None:
            return
        if not self.file.is_as_it_was and self.panel.reload.isHidden():
            self.panel.say(
                f"{self.file.path.name} was changed by another program. Save again to write over that.", reload=True
            )
            return
        try:
            self.file.save(self.panel.editor.toPlainText())
        except Mistake as mistake:
            self.panel.say(mistake.faults[0].sentence)
            return
        self.panel.say("")
        self.panel.editor.document().setModified(False)
        self.draft.changed.emit("reward_functions_file")  # its functions may be others now
        self.bench.score()

    def _reload(self) -> None:
        self.panel.say("")
        path, self.file.path = self.file.path, None
        if path is not None:
            self._open_file()
            self.draft.changed.emit("reward_functions_file")  # its functions may be others now
            self.bench.score_quietly()

    def _on_changed_elsewhere(self) -> None:
        if self.panel.is_edited:
            self.panel.say(f"{self.panel.path.toolTip()} was changed by another program.", reload=True)
        else:
            self._reload()

    def _new_file(self) -> None:
        path = self.choose_new_file()
        if path is None:
            return
        try:
            self.file.create(path)
        except Mistake as mistake:
            self.studio.message.emit(mistake.faults[0].sentence)
            return
        self.file.path = None
        self.draft.set("reward_functions_file", str(path))

    def _choose_file(self) -> None:
        path = self.choose_file()
        if path is not None:
            self.draft.set("reward_functions_file", str(path))

    # Questions, each in a method of its own so that tests can answer them

    def choose_completions(self) -> Path | None:
        return self._chosen("Open completions", "Completions (*.jsonl)")

    def choose_file(self) -> Path | None:
        return self._chosen("Open reward file", "Python (*.py *.txt)")

    def choose_new_file(self) -> Path | None:
        start = str(self.studio.prefs.last_folder / "my_rewards.py")
        chosen, _ = QFileDialog.getSaveFileName(self, "New reward file", start, "Python (*.py)")
        return Path(chosen) if chosen else None

    def _chosen(self, title: str, kinds: str) -> Path | None:
        chosen, _ = QFileDialog.getOpenFileName(self, title, str(self.studio.prefs.last_folder), kinds)
        return Path(chosen) if chosen else None


def _dropped(event: QDropEvent) -> Path | None:
    """The one file of completions, or reward file, that is being dropped."""
    urls = event.mimeData().urls()
    path = Path(urls[0].toLocalFile()) if len(urls) == 1 and urls[0].isLocalFile() else None
    return path if path is not None and path.suffix in (".jsonl", ".py") else None


_STALE = {"level": "note", "sentence": STALE, "advice": "Press Score Again."}


def _failed(error: dict[str, Any]) -> dict[str, str]:
    return {"level": "error", "sentence": error["sentence"], "advice": "A run would stop before its first step."}


def _about_cases(file: Path | None, count: int) -> str:
    if file is None:
        return "Cases are kept with a reward file of your own."
    if not count:
        return f"Choose a completion and keep it as a case: what {file.name} gives it now, it should go on giving."
    return f"Kept in {file.stem}.cases.jsonl, and scored again with everything else."


def _span(seconds: float) -> str:
    return f"{round(seconds * 1000)}{THIN}ms" if seconds < 1 else f"{figure(seconds)}{THIN}s"


def _with_button(widget: QWidget, do: QWidget) -> QWidget:
    """A widget, and below it to the right what can be done with what is chosen there."""
    whole = QWidget()
    column = QVBoxLayout(whole)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(theme.SPACE)
    column.addWidget(widget, 1)
    column.addWidget(do, 0, Qt.AlignmentFlag.AlignRight)
    return whole


def _nothing() -> QFrame:
    """Before anything was sampled: what this page is for."""
    card = QFrame()
    card.setProperty("role", "card")
    column = QVBoxLayout(card)
    column.setContentsMargins(*(3 * theme.SPACE,) * 4)
    column.setSpacing(12)
    centre = Qt.AlignmentFlag.AlignCenter
    column.addStretch(2)
    column.addWidget(label("Try the rewards before training", theme.heading_font(), align=centre))
    told = (
        "Sample a few completions, and see what each function gives them, where the groups differ, and whether there is "
        "anything to learn from."
    )
    column.addWidget(label(told, role="muted", wrap=True, align=centre))
    column.addStretch(3)
    return card


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
