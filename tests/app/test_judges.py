"""Judges and reward models in the window: their rows, the rubric editor, labels, the check, keys and other hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QComboBox, QInputDialog, QLineEdit

from app.pages.rewards.rewards_page import RewardsPage
from app.pages.train.reward_panel import LABEL, SCORES, SOURCE, USE, RewardPanel
from app.state.consent import Consent
from app.state.draft import Draft
from app.state.prefs import Prefs
from app.state.reward_bench import RewardBench
from app.state.session import Session
from app.widgets.consent_dialog import ServersDialog
from app.widgets.rubric_editor import CHOICES, NAME, WEIGHT, RubricEditor
from backend.judges.rubric import Criterion, Rubric, read_rubric
from backend.rewards.catalogue import DEFAULT_REWARDS, find_call
from backend.utils.errors import ConfigProblem
from tests.app.test_consent import dialog_text
from tests.app.test_reward_page import click_cell
from tests.support.windows import ServiceByHand

URL = "https://api.example.com/v1"
GROUP = {"prompt": "6 × 7?", "answer": "42", "completions": [{"text": text} for text in ("42", "41", "?", "-", "+")]}
FOUND: dict[str, Any] = {"name": "judge", "kind": "group", "calls": 6, "failed": 0.0, "spread": 0.2, "pairs": 30}
FOUND |= {"accuracy": 0.9, "spearman": 0.8, "itself": 0.95, "places": [], "which": "the first place", "concerns": []}
FOUND |= {"place": {"points": 0.0, "z": 0.0}, "length": {"points": 0.01, "z": 0.4}, "verdict": "Agrees on 90%."}


@pytest.fixture
def panel(qtbot, qapp, tmp_path: Path) -> RewardPanel:
    """The panel with the draft behind it, as the Train page joins them."""
    draft = Draft()
    bench = RewardBench(draft, ServiceByHand(), Consent(tmp_path / "trusted.json"))  # pyright: ignore
    panel = RewardPanel(bench)

    def show(_key: str = "") -> None:
        panel.show_rewards(draft.rewards(), draft.value("reward_functions"), draft.value("reward_weights"))

    panel.picked.connect(lambda names, weights: draft.update({"reward_functions": names, "reward_weights": weights}))
    draft.changed.connect(show)
    show()
    return qtbot.show(panel, 900, 700)


def added(panel: RewardPanel) -> list[Any]:
    return panel._bench.draft.value("reward_functions")[len(DEFAULT_REWARDS) :]


def service_of(panel: RewardPanel) -> Any:
    return panel._bench.service


def row_of(panel: RewardPanel, name: str) -> int:
    return next(place for place, row in enumerate(panel.model.rows) if row.entry.name.startswith(name))


def test_rows_of_models(panel: RewardPanel) -> None:
    panel.servers.found = [{"name": "Ollama", "url": "http://127.0.0.1:11434/v1", "models": ["a", "b"]}]
    panel.add_judge()
    panel.add_judge()
    panel.add("org/model")
    first, second, model = (find_call(entry) for entry in added(panel))
    assert first and second and model and (first.name, second.name, model.name) == ("judge", "judge_2", "model")
    assert first.arguments["url"].endswith(":11434/v1"), "the server that answers"
    texts: list[Any] = [panel.model.index(row_of(panel, "judge("), column).data() for column in (LABEL, SCORES, SOURCE)]
    assert texts == ["Judge", ANY, "judge"]
    assert panel.model.index(row_of(panel, "org/"), SOURCE).data() == "reward model"
    click_cell(panel, row_of(panel, "judge("), USE)
    assert len(added(panel)) == 2 and row_of(panel, "judge("), "an unticked row keeps its arguments"
    panel.table.setCurrentIndex(panel.model.index(row_of(panel, "judge("), LABEL))
    QTest.keyClick(panel.table, Qt.Key.Key_Delete)
    assert [row.entry.label for row in panel.model.rows][5:] == ["judge_2", "model"]
    panel.table.setCurrentIndex(panel.model.index(0, LABEL))
    QTest.keyClick(panel.table, Qt.Key.Key_Delete)
    assert panel.model.rows[0].entry.name == DEFAULT_REWARDS[0], "what the program has cannot be removed"


def test_arguments_of_a_judge(panel: RewardPanel) -> None:
    panel.add_judge()
    fields = panel.arguments.fields
    mode, url = fields["mode"], fields["url"]
    assert isinstance(mode, QComboBox) and isinstance(url, QLineEdit)
    mode.setCurrentIndex(1)
    mode.activated.emit(1)
    url.setText(URL)
    url.editingFinished.emit()
    call = find_call(added(panel)[0])
    assert call and call.arguments == {"rubric": "helpful_answer", "mode": "single", "url": URL}
    assert "api.example.com" in panel.judge_fields.note.text() and panel.judge_fields.key.isVisible()
    mode.setCurrentIndex(0)
    mode.activated.emit(0)
    assert "mode" not in added(panel)[0], "the default"
    taken: list[str] = []
    panel.model_wanted.connect(lambda kind, take: taken.append(kind))
    url.setText("local")
    url.editingFinished.emit()
    model = fields["model"]
    model.open_menu()  # pyright: ignore
    model.menu.actions()[0].trigger()  # pyright: ignore
    assert taken == ["model"] and not panel.judge_fields.key.isVisible()


def test_key_goes_to_the_service_only(panel: RewardPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    panel.add(f'judge(url="{URL}")')
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("secret", True))
    panel.judge_fields.key.click()
    asked = service_of(panel).last("judge_key")
    assert asked.arguments == {"url": URL, "key": "secret"} and "secret" not in str(panel._bench.draft.values())
    asked.refuse([ConfigProblem("url", "There is no keychain.")])
    assert panel.judge_fields.note.text() == "There is no keychain."


def test_host_of_a_judge_is_asked_about_once(qtbot, panel: RewardPanel) -> None:
    bench, settings = panel._bench, {"reward_functions": [f'judge(url="{URL}")']}
    bench.groups = [GROUP]
    bench.draft.update(settings)
    bench.score_quietly()
    assert bench.stale and not any(asked.name == "score" for asked in service_of(panel).asked), "nothing is sent"
    dialogs: list[ServersDialog] = []
    bench.consent.ask_servers = lambda servers: bool(dialogs.append(ServersDialog(servers)) or True)
    assert bench.consent.obtain(settings) and bench.consent.obtain(settings) and len(dialogs) == 1
    qtbot.addWidget(dialogs[0])
    text = dialog_text(dialogs[0])
    assert "api.example.com" in text and "prompts and completions of the run are sent" in text
    assert "starts" not in text.lower(), "no program is started"


@pytest.fixture
def editor(panel: RewardPanel, tmp_path: Path) -> RubricEditor:
    rubric = Rubric(title="Mine", criteria=(Criterion(name="a"), Criterion(name="b", choices=("bad", "so", "good"))))
    rubric.save(tmp_path / "mine.toml")
    panel._bench.groups = [GROUP]
    panel.add_judge()
    editor = RubricEditor(panel._bench, added(panel)[0], str(tmp_path / "mine.toml"), panel)
    editor.show()
    return editor


def test_rubric_editor(editor: RubricEditor, tmp_path: Path) -> None:
    saved: list[Path] = []
    editor.saved.connect(saved.append)
    model = editor.model
    for column, bad, says in ((WEIGHT, "much", "weight"), (CHOICES, "one", "choices"), (NAME, "", "a name")):
        index = model.index(1, column)
        good = index.data()
        model.setData(index, bad)
        editor.save.click()
        assert says in editor.problem.text() and editor.problem.text().startswith("Row 2 ")
        model.setData(index, good)
    editor.table.selectRow(1)
    editor.buttons["Up"].click()
    editor.buttons["Add"].click()
    model.setData(model.index(2, NAME), "c")
    editor.save.click()
    rubric = read_rubric(str(saved[0]))
    assert saved == [tmp_path / "mine.toml"] and [each.name for each in rubric.criteria] == ["b", "a", "c"]
    assert rubric.criteria[0].choices == ("bad", "so", "good")


def test_rubric_is_tried_before_it_is_saved(editor: RubricEditor) -> None:
    assert editor.try_button.text() == "Try on 4 completions"
    editor.model.setData(editor.model.index(0, NAME), "renamed")
    editor.try_button.click()
    asked: Any = editor._bench.service.last("score")  # pyright: ignore
    call = find_call(asked.arguments["settings"]["reward_functions"][0])
    assert call and read_rubric(str(call.arguments["rubric"])).criteria[0].name == "renamed"
    scored = [{"rewards": {"judge": 0.25}, "logged": {"judge/explanation": "a: no. So."}}] * 4
    asked.answer({"functions": [{"error": None}], "scored": [scored]})
    assert editor.tried_model.rows[0] == ("42", "0.250", "a: no. So.")
    editor.try_button.click()
    asked.refuse([ConfigProblem("reward_functions", "Nothing answers.")])
    assert editor.problem.text() == "Nothing answers." and editor.try_button.isEnabled()


def test_labels_and_check(qtbot, qapp, tmp_path: Path) -> None:
    session = Session(Prefs(tmp_path / "prefs"))
    service = session.service = ServiceByHand()  # pyright: ignore
    rubric = tmp_path / "mine.toml"
    Rubric(title="Mine", text="Say what is good.").save(rubric)
    session.draft.update({"reward_functions": [f'judge(rubric="{rubric}")']})
    page = RewardsPage(session)
    page.keep_alive = session
    qtbot.show(page, 1080, 700)
    session.reward_bench.groups = [GROUP]
    session.reward_bench.changed.emit()
    page.results.table.selectRow(1)
    said: list[str] = []
    page.check.refused.connect(said.append)
    for typed in ("2", ""):
        page.label_line.score.setText(typed)
        page.label_line.keep.click()
    page.label_line.score.setText("0.8")
    QTest.keyClick(page.label_line.score, Qt.Key.Key_Return)
    assert said == ["Your score must be a number from 0 to 1."] * 2
    asked = service.last("reward_cases")
    assert asked.arguments["file"] == str(rubric) and asked.arguments["expected"] == {"judge": 0.8}
    assert page.results.table.currentIndex().row() == 2 and page.label_line.score.text() == ""
    asked.answer({"cases": [{"completion": "42", "expected": {"judge": 0.8}}]})
    page.views.choose("judges")
    assert page.judges.labels.rows == [("42", "0.800", "–")] and not page.judges.start.isEnabled()
    service.last("judge_agreement").answer({"calls": {"judge": 6}, "judges": []})
    assert page.judges.about.text() == "Asks 6 times." and page.judges.start.isEnabled()
    page.judges.start.click()
    assert "only_calls" not in service.last("judge_agreement").arguments and page.judges.cancel.isVisible()
    page.judges.cancel.click()
    assert service.cancelled and page.judges.start.isVisible()
    page.judges.start.click()
    service.last("judge_agreement").answer({"calls": {"judge": 6}, "judges": [FOUND]})
    assert page.judges.verdict.text() == "Agrees on 90%." and page.judges.dot.colour == "good"
    assert ("With your labels", "90%", "of 30 pairs, rank correlation 0.800") in page.judges.model.rows
    session.draft.set("reward_functions", ["r1_int_reward_func"])
    assert page.judges.isHidden() and page.label_line.isHidden(), "without a judge"
