"""The Rewards page: completions from the model, a run, a file or the clipboard, scored by every reward function."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QSplitter, QWidget

from app import theme
from app.pages.rewards.bench import BenchResults, CompletionSource, rows_text
from app.pages.rewards.reward_file import RewardFilePanel
from app.state.reward_bench import JudgeCheck
from app.state.session import Session
from app.widgets.basic.controls import ComboBox, Dot, ElidedLabel, NumberEdit, Segments, dropped_path
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import REMOVE_KEYS, button, label, on_remove, progress_bar, show_text
from app.widgets.basic.layout import card, column, configure, connect, holder, row, set_shown, show_all, stack
from app.widgets.basic.number_format import DASH, counted, figure, short_duration, signed
from app.widgets.basic.tables import BaseTable, Column, RowsModel, TextsModel
from app.widgets.completion_detail import CompletionDetail
from app.widgets.completion_table import one_line
from app.widgets.form.value_text import float_value
from backend.runs.run_folder import all_runs

NARROW = 900
VIEWS = {"scores": "Scores", "completion": "Completion", "file": "Reward file", "cases": "Cases", "judges": "Judges"}
UNCHECKED = "Not checked yet."
NO_COMPLETIONS = "Sample or load completions first."
TOO_FEW = "It compares completions: give two of one prompt."
COUNTING = "Counting the calls…"
LINE = 24  # height of a figure's row, in pixels
MEANING = Column("Meaning", font=partial(theme.figures_font, theme.CAPTION))
AGREEMENT = (Column("Agreement", 128), Column("Value", 84, is_figure=True), MEANING)
LABEL_COLUMNS = (Column("Completion"), Column("Yours", 64, is_figure=True), Column("Judge's", 64, is_figure=True))
NO_LABELS = "To compare it with your own scores, save its rubric as a file (Train, Edit…), then label completions here."
LABELS = "Your scores, kept beside the rubric. Label answers in the view Completion; twenty tell something."


class CaseModel(RowsModel):
    """The test cases kept with a reward file, as the bench has them: {"case", "given", "failures"}."""

    columns = (Column("Result", 64), Column("Completion", font=theme.mono_font), Column("Expected", colour="muted"))

    def text(self, row: Mapping[str, Any], column: int) -> str:
        expected = ", ".join(f"{name} {figure(score)}" for name, score in row["case"]["expected"].items())
        result = "fails" if row["failures"] else "passes"
        return (result, one_line(row["case"]["completion"]), " ".join(row["failures"]) or expected)[column]

    def colour(self, row: Mapping[str, Any], column: int) -> str:
        return super().colour(row, column) if column else "bad" if row["failures"] else "good"

    def tip(self, row: Mapping[str, Any], column: int) -> str:
        return "\n".join(row["failures"]) or self.text(row, 2)


class RewardsPage(QWidget):
    enabled_actions_changed = Signal(dict)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        bench = self.bench = session.reward_bench
        self.setAcceptDrops(True)
        self._narrow: bool | None = None
        # Widgets are created in the order of Tab, with their final parent: Qt would restyle all that are moved later.
        self.views = Segments(VIEWS, "Show", self, chosen=self._show_views)
        self.again = button("Score again", bench.score, tip="Ctrl+Return", parent=self)
        self.parts = QSplitter(Qt.Orientation.Horizontal, self, childrenCollapsible=False, handleWidth=12)
        self.source, self.results = CompletionSource(bench, self), BenchResults(self.parts)
        self._beside = QWidget(self.parts)
        self._beside.setMinimumWidth(theme.scaled(320))
        detail_side, case_side = QWidget(self._beside), QWidget(self._beside)
        self.detail, self.panel = CompletionDetail(detail_side, upright=True), RewardFilePanel(session, self._beside)
        self.case_model = CaseModel(self)
        about = "Delete removes the selected case."
        self.cases = BaseTable(model=self.case_model, name="Cases", accessibleDescription=about)
        self.kept = label(role="muted", wrap=True)
        self.check = configure(JudgeCheck(bench, self), refused=session.message)
        self.judges = JudgePanel(self.check, self._beside)
        self.score = NumberEdit(name="Your score", width=64, placeholderText="0 to 1", returnPressed=self._keep_label)
        self.judge = ComboBox(name="Label for")
        tip = "Keep your score of this completion to check the judge with (Return)"
        self.keep_label = button("Keep label", self._keep_label, tip=tip)
        self.label_line = holder(row(label("Your score", role="muted"), self.score, self.judge, self.keep_label, None))
        self.about = ElidedLabel(font=theme.figures_font())
        keep_tip = "Keeps its current scores by your file's functions (Ctrl+K)"
        self.keep = button("Keep as case", self.keep_case, tip=keep_tip)
        self.drop = button("Remove", self.drop_case, tip="Remove the selected case (Delete)")
        on_remove(self.cases, self.drop_case)
        right = Qt.AlignmentFlag.AlignRight
        column((self.detail, 1), row((self.label_line, 1), self.keep), into=detail_side)
        column(self.kept, (self.cases.in_card(), 1), (self.drop, 0, right), into=case_side)
        self._sides = stack(detail_side, self.panel, case_side, self.judges, into=self._beside)
        for place, share in enumerate((3, 2)):
            self.parts.setStretchFactor(place, share)
        self.parts.setSizes([592, 476])
        title = label("Rewards", theme.title_font())
        head = row(title, theme.SPACE, (self.about, 1), self.views, theme.SPACE, self.again)
        column(head, self.source, (self.parts, 1), into=self, spacing=12, margins=theme.GUTTER)

        connect(self._show, bench.changed, theme.signals.changed)
        bench.busy_changed.connect(self._show_busy)
        bench.refused.connect(self._show_refusal)
        self.views.chosen.connect(lambda key: key == "judges" and self.check.count())
        self.check.changed.connect(self._show_label_line)
        self.results.table.chosen.connect(self._choose)
        self.results.error_requested.connect(partial(self._show_error, go=True))
        self.results.functions.weighed.connect(self._weigh)
        self.panel.opened.connect(lambda name: self.views.show_word("file", name or VIEWS["file"]))
        self.panel.opened.connect(lambda _: self._show_enabled())
        configure(session, reward_rows_requested=self._sample_rows, reward_line_requested=self._show_line)
        self.draft.changed.connect(self._on_setting)
        self.panel.open()
        self._show()

    def showEvent(self, event: QShowEvent) -> None:
        self.source.show_runs([run.path for run in all_runs() if run.completions.exists()])
        if self.bench.stale:
            self.bench.score_quietly()

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._show_views()

    def _show_views(self) -> None:
        narrow, key = self.width() < theme.scaled(NARROW), self.views.key
        if narrow != self._narrow and key in ("scores", "completion"):
            key = "scores" if narrow else "completion"
            self.views.buttons[key].setChecked(True)
        self._narrow = narrow
        self.views.set_shown("scores", narrow)
        empty = key == "completion" and not self.bench.groups
        self.results.setVisible(not narrow or key == "scores")
        self._beside.setVisible(key != "scores" if narrow else not empty)
        bench, status = self.bench, ""
        if bench.groups:
            status = f"{counted(len(bench.groups), 'prompt')}, {counted(bench.count, 'completion')}"
            if not narrow:
                status += f" {bench.origin}"
                if bench.seconds is not None and bench.functions:
                    status += f"; scored in {short_duration(bench.seconds)}"
        self.about.setText(status)
        if key != "scores":
            self._sides.setCurrentIndex(("completion", "file", "cases", "judges").index(key))

    def _show(self) -> None:
        bench = self.bench
        self.source.show_size(int(self.draft.valid_values()["group_size"]))
        self._show_views()
        names, labels = ([function[key] for function in bench.functions] for key in ("name", "label"))
        weights = [] if bench.stale else [float(function["weight"]) for function in bench.functions]
        self.detail.completion.set_rewards(names, labels, weights)
        self.results.show_bench(bench)
        errors = (function["error"] for function in bench.functions if function["error"])
        self._show_error(bench.failed or next(errors, None))
        self.case_model.set_rows(bench.cases)
        rows = [row for group in bench.groups for row in group["completions"]]
        self.judges.given = {row["text"]: row.get("rewards") or {} for row in rows}
        self._show_judges()
        failing, count = sum(bool(case["failures"]) for case in bench.cases), len(bench.cases)
        cases = f"Cases: {failing} of {count} fail" if failing else f"Cases ({count})" if count else "Cases"
        self.views.show_word("cases", cases)
        self._show_enabled()
        if (file := bench.reward_file) is None:
            text = "Cases are kept with your own reward file."
        elif count:
            text = f"Kept in {file.stem}.cases.jsonl, and scored again with everything else."
        else:
            text = f"Keep a completion as a case to check that {file.name} goes on giving it the same scores."
        self.kept.setText(text)

    # Methods, since Qt ends their connections with this page: the bench outlives it.
    def _show_busy(self) -> None:
        self._show_enabled()
        self.results.show_verdict(self.bench)

    def _show_refusal(self, sentence: str) -> None:
        self.results.show_verdict(self.bench, sentence)

    def _show_error(self, error: dict[str, Any] | None, *, go: bool = False) -> None:
        if self.panel.mark(error) and go and error is not None:
            self.views.choose("file")
            self.panel.editor.reveal(error["line"])

    def _show_line(self, file: Path, line: int, sentence: str) -> None:
        if self.panel.file is None or self.panel.file.resolve() != file.resolve():  # the form has another one by now
            open_path(file)
        self._show_error({"file": str(file.resolve()), "line": line, "sentence": sentence, "frames": []}, go=True)

    def enabled_actions(self) -> dict[str, bool]:
        bench, line = self.bench, self.results.table.current_line
        return {
            "score": bool(bench.groups),
            "cancel": bool(bench.busy),
            "keep_case": line is not None and line.completion is not None and bench.reward_file is not None,
            "drop_case": bool(bench.cases),
            "save_file": self.panel.file is not None,
        }

    def _show_enabled(self) -> None:
        enabled_actions = self.enabled_actions()
        for widget, name in ((self.again, "score"), (self.keep, "keep_case"), (self.drop, "drop_case")):
            widget.setEnabled(enabled_actions[name])
        self.enabled_actions_changed.emit(enabled_actions)

    def _choose(self, group: dict[str, Any], completion: dict[str, Any] | None) -> None:
        self.detail.show_completion(group, completion)
        self._show_enabled()

    def _on_setting(self, key: str) -> None:
        if key in ("", "reward_functions_file"):
            self.panel.open()
        if not self.bench.functions and key in ("", "reward_functions", "reward_weights"):
            self.results.show_bench(self.bench)
        if key in ("", "reward_functions"):
            self._show_judges()
        if key in ("", "group_size"):
            self.source.show_size(int(self.draft.valid_values()["group_size"]))

    def _weigh(self, weights: list[float]) -> None:
        count = len(self.draft.valid_values()["reward_functions"])  # without those of environments, which come after
        self.draft.set("reward_weights", weights[:count])

    def sample(self) -> None:
        self.source.sources.choose("model")
        self.source.sample.click()

    def _sample_rows(self, numbers: list[int]) -> None:
        self.source.how.setCurrentIndex(self.source.how.findData("numbers"))
        self.source.numbers.setText(rows_text(numbers))
        self.sample()

    def keep_case(self) -> None:
        line = self.results.table.current_line
        if line is not None and line.completion is not None:
            self.bench.keep_case(line.row, line.completion)

    def _show_judges(self) -> None:
        has_any = bool(self.check.models)
        self.views.set_shown("judges", has_any)
        self._show_label_line()
        if self.views.key == "judges":
            self.check.count() if has_any else self.views.choose("completion")

    def _show_label_line(self) -> None:
        names = [name for name in self.check.models if self.check.labels_file(name)]
        self.judge.fill({name: name for name in names}, self.judge.currentData())
        set_shown(self.judge, len(names) > 1)
        set_shown(self.label_line, bool(names))

    def _keep_label(self) -> None:
        score = float_value(self.score.text().replace(",", "."))
        if isinstance(score, str) or not 0 <= score <= 1:
            self.check.refused.emit("Your score must be a number from 0 to 1.")
            return
        line = self.results.table.current_line
        if line is not None and line.completion is not None:
            self.check.keep(self.judge.currentData(), line.row, line.completion["text"], score)
            lines, current = self.results.completions.rows, self.results.table.currentIndex().row()
            following = (i for i in range(current + 1, len(lines)) if lines[i].completion is not None)
            self.results.table.selectRow(next(following, current))
        self.score.clear()

    def drop_case(self) -> None:
        self.views.choose("cases")
        if self.cases.currentIndex().isValid():
            self.bench.remove_case(self.cases.currentIndex().row())

    def new_file(self) -> None:
        self.views.choose("file")
        self.panel.create()

    def open_file(self) -> None:
        self.views.choose("file")
        self.panel.choose()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if _dropped(event) is not None:
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        if (path := _dropped(event)) is None:
            return
        event.acceptProposedAction()
        if path.suffix == ".jsonl":
            self.bench.load_file(path)
        else:
            self.draft.use_reward_file(str(path))


def _dropped(event: QDropEvent) -> Path | None:
    path = dropped_path(event.mimeData())
    return path if path is not None and path.suffix in (".jsonl", ".py") else None


def figures(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Measure, value, explanation."""

    def share(value: float | None) -> str:
        return DASH if value is None else f"{value:.0%}"

    of_pairs, rank = f"of {counted(found['pairs'], 'pair')}", figure(found["spearman"])
    yield "With your labels", share(found["accuracy"]), f"{of_pairs}, rank correlation {rank}" if found["pairs"] else ""
    is_group = found["kind"] == "group"
    yield "With itself", share(found["itself"]), "of pairs, in another order" if is_group else "of pairs, asked again"
    yield "Length", signed((found["length"] or {}).get("points")), "for filler without content"
    if is_group:
        yield "Place", signed((found["place"] or {}).get("points")), f"for {found['which']} in the list"
    yield "Without a score", share(found["failed"]), f"in {counted(found['calls'], 'call')}"


class JudgePanel(QFrame):
    def __init__(self, check: JudgeCheck, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        configure(self, role="card")
        self.setProperty("guide", "../judges.md#trust")
        self._check = check
        self.given: Mapping[str, Mapping[str, float | None]] = {}  # completion → scores on the bench
        self.which = ComboBox(name="Judge", currentIndexChanged=self._show)
        self.dot = Dot("muted", 18)
        self.verdict = label(UNCHECKED, theme.heading_font(), wrap=True, selectable=True)
        self.model, self.labels = TextsModel(self, AGREEMENT), TextsModel(self, LABEL_COLUMNS)
        self.table = BaseTable(model=self.model, name="Agreement")
        self.table.horizontalHeader().hide()
        self.table.verticalHeader().setDefaultSectionSize(theme.scaled(LINE))
        self.about = label(role="muted", wrap=True)
        self.start = button("Check this judge", lambda: check.check(self.name), primary=True, default=False)
        self.bar = progress_bar("Progress", shown=False)
        self.cancel = button("Cancel", check.cancel, shown=False)
        self.kept = label(role="muted", wrap=True)
        self.label_table = BaseTable(model=self.labels, name="Your labels", single=True)
        self.drop = button("Remove", self._drop, tip=f"Remove the selected label ({REMOVE_KEYS})")
        on_remove(self.label_table, self._drop)
        top = Qt.AlignmentFlag.AlignTop
        verdict = row((self.dot, 0, top), (self.verdict, 1))
        checking = row(self.start, (self.about, 1), (self.bar, 1), self.cancel)
        labels = (card(role="rule"), row((self.kept, 1), (self.drop, 0, top)), (self.label_table, 1))
        column(self.which, verdict, self.table, checking, *labels, into=self, spacing=12, margins=12)
        check.changed.connect(self._show)
        check.progress.connect(lambda done, of: configure(self.bar, range=(0, of), value=done))
        self.label_table.selectionModel().currentRowChanged.connect(self._show_enabled)

    @property
    def name(self) -> str:
        return self.which.currentData() or ""

    def _show(self) -> None:
        check = self._check
        with QSignalBlocker(self.which):
            self.which.fill({name: name for name in check.models}, self.name)
        set_shown(self.which, self.which.count() > 1)
        name = self.name
        found = check.results.get(name)
        self.verdict.setText(found["verdict"] if found else UNCHECKED)
        role = "muted" if not found else "warning" if found["concerns"] else "good"
        self.dot.show_colour("muted" if found and not found["concerns"] and found["accuracy"] is None else role)
        self.model.set_rows([*figures(found)] if found else [])
        self.table.setFixedHeight(theme.scaled(LINE) * len(self.model.rows) + 2)
        set_shown(self.table, bool(found))
        show_all(check.busy, self.bar, self.cancel)
        show_all(not check.busy, self.start, self.about)
        calls = check.calls.get(name)
        nothing = (COUNTING if calls is None else TOO_FEW) if self.given else NO_COMPLETIONS
        self.about.setText(f"Asks {counted(calls, 'time')}." if calls else nothing)
        self.start.setEnabled(bool(calls))
        labels = check.labels.get(name, []) if check.labels_file(name) else []
        show_text(self.kept, LABELS if check.labels_file(name) else NO_LABELS)
        texts, given = [case["completion"] for case in labels], self.given
        yours = [figure(case["expected"].get(name)) for case in labels]
        theirs = [figure(given.get(text, {}).get(name)) for text in texts]
        self.labels.set_rows(list(zip(map(one_line, texts), yours, theirs, strict=True)))
        show_all(labels, self.label_table, self.drop)
        self._show_enabled()

    def _show_enabled(self) -> None:
        self.drop.setEnabled(bool(self.label_table.selected_rows()))

    def _drop(self) -> None:
        for place in self.label_table.selected_rows():
            self._check.edit_labels(self.name, do="drop", place=place)
