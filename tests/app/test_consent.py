"""Consent to the user's reward code: asked before it first runs and again after a change; a refusal runs nothing."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QComboBox, QInputDialog, QLabel, QLineEdit, QPushButton

from app.pages.rewards.rewards_page import RewardsPage
from app.pages.train.reward_panel import LABEL, SCORES, SOURCE, USE, RewardPanel
from app.pages.train.rubric_editor import CHOICES, NAME, WEIGHT, RubricEditor
from app.state.consent import Consent
from app.state.session import Session
from app.widgets.consent_dialog import AllowDialog, consent_dialog, hosts_dialog, servers_dialog
from app.window import Window
from backend.config.config import read
from backend.distributed.hosts_file import AllowedHosts, HostsToAllow
from backend.judges.rubric import Criterion, Rubric, read_rubric
from backend.rewards.allowed_code import CodeToAllow, read_code
from backend.rewards.catalogue import DEFAULT_REWARDS, find_call
from backend.runs.run_folder import RunFolder
from backend.tools.mcp_settings import named_servers
from backend.utils.errors import ConfigProblem
from backend.utils.places import demo_config
from tests.app.test_reward_page import click_cell
from tests.support import small_run
from tests.support.windows import ServiceByHand

CODE = """import json
import subprocess
from os import path
@register_reward_function('mine')
def mine(completions):
    return []
async def other(x): ...
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


class FakeDialog:
    """The `ask` callback: returns `answer` and records the requests."""

    def __init__(self, answer: bool) -> None:
        self.answer, self.requests = answer, list[CodeToAllow]()

    def __call__(self, requests: Any) -> bool:
        self.requests += requests
        return self.answer


def test_consent_is_asked_once(reward_file: Path, tmp_path: Path) -> None:
    dialog, settings = FakeDialog(True), {"reward_functions_file": str(reward_file)}
    consent = Consent(tmp_path / "trusted.json")
    consent.ask = dialog
    assert consent.obtain(settings) and [request.changed for request in dialog.requests] == [False]
    assert consent.obtain(settings) and Consent(tmp_path / "trusted.json").obtain(settings), "remembered"
    assert len(dialog.requests) == 1
    reward_file.write_text(CODE + "\n")
    assert consent.is_missing(settings)
    assert consent.obtain(settings) and [request.changed for request in dialog.requests] == [False, True]
    assert not consent.is_missing(settings)
    for ours in ({"reward_functions": ["r1_int"]}, read(demo_config("calculator"))):
        assert consent.obtain(ours) and len(dialog.requests) == 2, "what ships needs no consent"


def test_run_starts_nothing_without_consent(session: Session, tmp_path: Path, started, told) -> None:
    session.draft.update(small_run.settings_for(tmp_path) | small_run.low_half(tmp_path))
    assert session.draft.problems() == []
    session.consent.ask = dialog = FakeDialog(False)
    session.starter.start()
    assert started == [] and len(dialog.requests) == 1
    assert told[-1] == "The code was not allowed to run, so nothing was started."
    run = RunFolder(tmp_path / "run")
    small_run.write_config(
        run.config, {"model": "m", "data": "d", "reward_functions_file": str(tmp_path / "low_half.py")}
    )
    session.starter.resume(run)
    assert started == [] and len(dialog.requests) == 2
    dialog.answer = True
    session.starter.start()
    assert len(started) == 1


HOSTS = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "mac-b", "ips": ["10.0.0.2"], "program": "~/bin/python"}]


@pytest.fixture
def hosts_file(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps({"hosts": HOSTS, "envs": ["MLX_METAL_FAST_SYNCH=1"]}))
    return file


def test_machines_need_consent(session: Session, tmp_path: Path, hosts_file: Path, started, told) -> None:
    asked: list[HostsToAllow] = []
    session.consent.ask_hosts = lambda request: bool(asked.append(request)) or len(asked) == 4
    session.draft.update(small_run.settings_for(tmp_path, hosts=str(hosts_file)))
    assert session.draft.problems() == []
    session.starter.start()
    session.starter.queue()
    assert started == [] and len(asked) == 2 and not session.queue.waiting
    assert told[-1] == "The machines of the hosts file may not be contacted, so nothing was started."
    run = RunFolder(tmp_path / "run")
    small_run.write_config(run.config, {"model": "m", "data": "d", "hosts": "../hosts.json"})
    session.starter.queue_existing(run)
    assert len(asked) == 3 and not session.queue.waiting
    session.starter.resume(run)  # now the answer is yes
    session.close_run()
    session.starter.start()
    assert [request.path for request in asked] == 4 * [hosts_file] and len(started) == 2, "asked once"
    session.close_run()
    session.starter.resume(run, "--hosts", "none")
    hosts_file.write_text(json.dumps(HOSTS))
    assert session.consent.hosts.missing("") is None and not session.consent.obtain_hosts(str(hosts_file))
    assert asked[-1].changed


def test_machines_question(qtbot, tmp_path: Path, hosts_file: Path) -> None:
    asked = AllowedHosts(tmp_path / "trusted.json").missing(str(hosts_file))
    assert asked is not None
    parts = ("Connect to the machines in hosts.json?", "mac-b at 10.0.0.2", "mac-b: ~/bin/python", str(hosts_file))
    check_question(qtbot, hosts_dialog(asked), *parts, "MLX_METAL_FAST_SYNCH=1")


def check_question(qtbot, dialog: AllowDialog, *parts: str) -> None:
    qtbot.addWidget(dialog)
    assert all(part in dialog_text(dialog) for part in parts)
    dialog.show()
    QTest.keyClick(dialog, Qt.Key.Key_Return)
    assert dialog.result() == AllowDialog.DialogCode.Rejected


def test_mcp_server_question(qtbot) -> None:
    about = {"command": "npx", "args": ["-y", "a b"], "env": {"KEY": "1"}, "cwd": "/srv"}
    dialog = servers_dialog(named_servers({"mcp_servers": {"files": about}}))
    check_question(qtbot, dialog, "Use the MCP server files?", "KEY=1 npx -y 'a b' in /srv", "your rights")
    assert not any("File" in button.text() and not button.isHidden() for button in dialog.findChildren(QPushButton))


def test_dropped_file_is_not_run(window: Window, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(small_run.LOW_HALF + "from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\n")
    window.show_page("rewards")
    dialog = window.session.consent.ask = FakeDialog(False)
    window.open_dropped("reward_functions_file", file)
    settings = small_run.settings_for(tmp_path, reward_functions=["low_half"], reward_weights=[])
    window.session.draft.update(settings)
    assert window.session.draft.value("reward_functions_file") == str(file) and not window.session.draft.problems()
    assert [each.code.path for each in window.session.consent.code.missing(window.session.draft.values())] == [file]
    assert not dialog.requests, "a drop asks nothing, for nothing runs"
    window.session.starter.start()
    assert len(dialog.requests) == 1 and not (tmp_path / "it-ran").exists()


def dialog_text(dialog: AllowDialog) -> str:
    return "\n".join(label.text() for label in dialog.findChildren(QLabel))


def test_code_question(qtbot, reward_file: Path) -> None:
    parts = ("mine, other", "json, subprocess, os", "subprocess, os, for files", "Run the code in mine.py?")
    check_question(qtbot, consent_dialog([CodeToAllow(read_code(reward_file), False)]), str(reward_file), *parts)
    changed = consent_dialog([CodeToAllow(read_code(reward_file), True)])
    qtbot.addWidget(changed)
    assert "mine.py has changed since you allowed it to run." in dialog_text(changed)
    changed.allow.click()
    assert changed.result() == AllowDialog.DialogCode.Accepted


URL = "https://api.example.com/v1"
GROUP = {"prompt": "6 × 7?", "answer": "42", "completions": [{"text": text} for text in ("42", "41", "?", "-", "+")]}
FOUND: dict[str, Any] = {"name": "judge", "kind": "group", "calls": 6, "failed": 0.0, "spread": 0.2, "pairs": 30}
FOUND |= {"accuracy": 0.9, "spearman": 0.8, "itself": 0.95, "places": [], "which": "the first place", "concerns": []}
FOUND |= {"place": {"points": 0.0, "z": 0.0}, "length": {"points": 0.01, "z": 0.4}, "verdict": "Agrees on 90%."}


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
    assert "api.example.com" in panel.arguments.note.text() and panel.arguments.key.isVisible()
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
    assert taken == ["model"] and not panel.arguments.key.isVisible()


def test_key_goes_to_the_service_only(panel: RewardPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    panel.add(f'judge(url="{URL}")')
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("secret", True))
    panel.arguments.key.click()
    asked = service_of(panel).last("judge_key")
    assert asked.arguments == {"url": URL, "key": "secret"} and "secret" not in str(panel._bench.draft.values())
    asked.refuse([ConfigProblem("url", "There is no keychain.")])
    assert panel.arguments.note.text() == "There is no keychain."


def test_host_of_a_judge_is_asked_about_once(qtbot, panel: RewardPanel) -> None:
    bench, settings = panel._bench, {"reward_functions": [f'judge(url="{URL}")']}
    bench.groups = [GROUP]
    bench.draft.update(settings)
    bench.score_quietly()
    assert bench.stale and not any(asked.name == "score" for asked in service_of(panel).asked), "nothing is sent"
    dialogs: list[AllowDialog] = []
    bench.consent.ask_servers = lambda servers: bool(dialogs.append(servers_dialog(servers)) or True)
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


def test_labels_and_check(qtbot, session: Session, tmp_path: Path) -> None:
    service = session.service = ServiceByHand()  # pyright: ignore
    rubric = tmp_path / "mine.toml"
    Rubric(title="Mine", text="Say what is good.").save(rubric)
    session.draft.update({"reward_functions": [f'judge(rubric="{rubric}")']})
    page = RewardsPage(session)
    qtbot.show(page, 1080, 700)
    session.reward_bench.groups = [GROUP]
    session.reward_bench.changed.emit()
    page.results.table.selectRow(1)
    said: list[str] = []
    page.check.refused.connect(said.append)
    for typed in ("2", ""):
        page.score.setText(typed)
        page.keep_label.click()
    page.score.setText("0.8")
    QTest.keyClick(page.score, Qt.Key.Key_Return)
    assert said == ["Your score must be a number from 0 to 1."] * 2
    asked = service.last("reward_cases")
    assert asked.arguments["file"] == str(rubric) and asked.arguments["expected"] == {"judge": 0.8}
    assert page.results.table.currentIndex().row() == 2 and page.score.text() == ""
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
