"""The Rewards page: completions from the model, a run, a file or the clipboard, scored by every reward function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QFont, QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QSplitter, QWidget

from app import theme
from app.pages.rewards.bench import BenchResults, CompletionSource
from app.pages.rewards.judge_check import JudgePanel, LabelLine
from app.pages.rewards.reward_file import RewardFilePanel
from app.state.judges import JudgeCheck
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel, Segments, dropped_path
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import column, connect, row, stack
from app.widgets.basic.number_format import counted, figure, short_duration
from app.widgets.basic.tables import BaseTable, Column, RowsModel
from app.widgets.completion_detail import CompletionDetail
from app.widgets.completion_table import one_line
from backend.runs.run_folder import all_runs

NARROW = 900
VIEWS = {"scores": "Scores", "completion": "Completion", "file": "Reward file", "cases": "Cases", "judges": "Judges"}


class CaseModel(RowsModel):
    """The test cases kept with a reward file, as the bench has them: {"case", "given", "failures"}."""

    columns = (Column("Result", 64), Column("Completion"), Column("Expected"))

    def text(self, row: Mapping[str, Any], column: int) -> str:
        expected = ", ".join(f"{name} {figure(score)}" for name, score in row["case"]["expected"].items())
        result = "fails" if row["failures"] else "passes"
        return (result, one_line(row["case"]["completion"]), " ".join(row["failures"]) or expected)[column]

    def colour(self, row: Mapping[str, Any], column: int) -> Any:
        colours = theme.palette()
        return (colours.bad if row["failures"] else colours.good, colours.text, colours.muted)[column]

    def font(self, row: Mapping[str, Any], column: int) -> QFont:
        return theme.mono_font() if column == 1 else theme.figures_font()

    def tip(self, row: Mapping[str, Any], column: int) -> str:
        return "\n".join(row["failures"]) or self.text(row, 2)


class CaseTable(BaseTable):
    drop_requested = Signal(int)  # index of a case

    def __init__(self, model: CaseModel) -> None:
        super().__init__(model=model, name="Cases", accessibleDescription="Delete removes the selected case.")

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
            self.drop()
        else:
            super().keyPressEvent(event)

    def drop(self) -> None:
        if self.currentIndex().isValid():
            self.drop_requested.emit(self.currentIndex().row())


class RewardsPage(QWidget):
    enabled_actions_changed = Signal(dict)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        bench = self.bench = session.reward_bench
        self.setAcceptDrops(True)
        self._narrow: bool | None = None
        self._line: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        # Widgets are created in the order of Tab, with their final parent: Qt would restyle all that are moved later.
        self.views = Segments(VIEWS, "Show", self)
        self.again = button("Score again", bench.score, tip="Ctrl+Return", parent=self)
        self.parts = QSplitter(Qt.Orientation.Horizontal, self, childrenCollapsible=False, handleWidth=12)
        self.source, self.results = CompletionSource(bench, self), BenchResults(self.parts)
        self._beside = QWidget(self.parts)
        self._beside.setMinimumWidth(theme.scaled(320))
        detail_side, case_side = QWidget(self._beside), QWidget(self._beside)
        self.detail, self.panel = CompletionDetail(detail_side, upright=True), RewardFilePanel(session, self._beside)
        self.case_model = CaseModel(self)
        self.cases = CaseTable(self.case_model)
        self.kept = label(role="muted", wrap=True)
        self.check = JudgeCheck(bench, self)
        self.judges, self.label_line = JudgePanel(self.check, self._beside), LabelLine(self.check)
        self.about = ElidedLabel(font=theme.figures_font())
        keep_tip = "Keeps its current scores by your file's functions (Ctrl+K)"
        self.keep = button("Keep as case", self.keep_case, tip=keep_tip)
        self.drop = button("Remove", self.drop_case, tip="Remove the selected case (Delete)")
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
        bench.busy_changed.connect(self._show_enabled)
        self.source.refused.connect(session.message)
        self.views.chosen.connect(self._show_views)
        self.views.chosen.connect(lambda key: key == "judges" and self.check.count())
        self.check.refused.connect(session.message)
        self.label_line.kept.connect(self._keep_label)
        self.results.table.chosen.connect(self._choose)
        self.results.board.error_requested.connect(lambda function: self._show_error(function["error"], go=True))
        self.results.functions.weighed.connect(self._weigh)
        self.cases.drop_requested.connect(bench.remove_case)
        self.panel.opened.connect(self._name_file)
        session.reward_rows_requested.connect(self._sample_rows)
        session.reward_line_requested.connect(self._show_line)
        self.draft.changed.connect(self._on_setting)
        self.panel.open()
        self._show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.source.show_runs([run.path for run in all_runs() if run.completions.exists()])
        if self.bench.stale:
            self.bench.score_quietly()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.results.fit(self.height())
        self._show_views()

    def _weigh(self, weights: list[float]) -> None:
        count = len(self.draft.valid_values()["reward_functions"])  # those of environments come after
        self.draft.set("reward_weights", weights[:count])

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
            self.kept.setText("Cases are kept with your own reward file.")
        elif count:
            self.kept.setText(f"Kept in {file.stem}.cases.jsonl, and scored again with everything else.")
        else:
            self.kept.setText(
                f"Keep a completion as a case to check that {file.name} goes on giving it the same scores."
            )

    def _show_error(self, error: dict[str, Any] | None, *, go: bool = False) -> None:
        if self.panel.mark(error) and go and error is not None:
            self.views.choose("file")
            self.panel.editor.reveal(error["line"])

    def _show_line(self, file: Path, line: int, sentence: str) -> None:
        if self.panel.file is None or self.panel.file.resolve() != file.resolve():  # the form has another one by now
            open_path(file)
        self._show_error({"file": str(file.resolve()), "line": line, "sentence": sentence, "frames": []}, go=True)

    def _name_file(self, name: str) -> None:
        self.views.show_word("file", name or VIEWS["file"])
        self._show_enabled()

    def enabled_actions(self) -> dict[str, bool]:
        """Action of the Rewards menu → is enabled."""
        bench, completion = self.bench, self._line[1] if self._line else None
        return {
            "score": bool(bench.groups),
            "cancel": bool(bench.busy),
            "keep_case": completion is not None and bench.reward_file is not None,
            "drop_case": bool(bench.cases),
            "save_file": self.panel.file is not None,
        }

    def _show_enabled(self) -> None:
        enabled_actions = self.enabled_actions()
        for widget, name in ((self.again, "score"), (self.keep, "keep_case"), (self.drop, "drop_case")):
            widget.setEnabled(enabled_actions[name])
        self.enabled_actions_changed.emit(enabled_actions)

    def _choose(self, group: dict[str, Any], completion: dict[str, Any] | None) -> None:
        self._line = (group, completion)
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

    def sample(self) -> None:
        self.source.sources.choose("model")
        self.source.sample.click()

    def _sample_rows(self, numbers: list[int]) -> None:
        self.source.choose_rows(numbers)
        self.sample()

    def keep_case(self) -> None:
        if self._line is not None and self._line[1] is not None:
            self.bench.keep_case(self._line[0], self._line[1])

    def _show_judges(self) -> None:
        has_any = bool(self.check.models)
        self.views.set_shown("judges", has_any)
        self.label_line.show_judges()
        if self.views.key == "judges":
            self.check.count() if has_any else self.views.choose("completion")

    def _keep_label(self, name: str, score: float) -> None:
        if self._line is not None and self._line[1] is not None:
            self.check.keep(name, self._line[0], self._line[1]["text"], score)
            lines, current = self.results.completions.rows, self.results.table.currentIndex().row()
            following = (i for i in range(current + 1, len(lines)) if lines[i].completion is not None)
            self.results.table.selectRow(next(following, current))

    def drop_case(self) -> None:
        self.views.choose("cases")
        self.cases.drop()

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
        path = _dropped(event)
        if path is None:
            return
        event.acceptProposedAction()
        if path.suffix == ".jsonl":
            self.bench.load_file(path)
        else:
            self.draft.use_reward_file(str(path))


def _dropped(event: QDropEvent) -> Path | None:
    path = dropped_path(event.mimeData())
    return path if path is not None and path.suffix in (".jsonl", ".py") else None
