"""The first-time user: from a CSV of questions and answers to a running job, with a limited number of clicks.

docs/guide/grpo.md describes the path; a longer one must change both.
"""

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from app.state.prefs import Prefs
from app.state.session import Session
from app.window import Window
from backend.runs.events import parse_line
from backend.utils import places
from tests.support.windows import drop

ONE_SHORT_STEP = {"iters": 1, "max_completion_length": 16, "steps_per_eval": 0}
DOCUMENT = Path(__file__).parents[2] / "docs" / "guide" / "grpo.md"


@pytest.fixture
def cached_model(tmp_path: Path, monkeypatch) -> str:
    """The bundled model as if it had been fetched from the Hub: this test has no network."""
    home = tmp_path / "huggingface"
    snapshot = home / "hub" / "models--somebody--small" / "snapshots" / "0123"
    shutil.copytree(places.resources() / "demo" / "model", snapshot)
    about = json.loads((snapshot / "config.json").read_text())
    about.setdefault("architectures", ["Qwen3ForCausalLM"])
    (snapshot / "config.json").write_text(json.dumps(about))
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    for name, value in {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return "somebody/small"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "my questions.csv"
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["Question", "Answer"])
        rows.writerows([f"{a} + {b} = ?", a + b] for a in range(10, 18) for b in range(10, 15))
    return file


@pytest.fixture
def window(qtbot, cached_model: str, monkeypatch, helper) -> Iterator[Window]:
    monkeypatch.setattr(Window, "ask_about_training", lambda window: "stop")
    session = Session(Prefs())
    window = Window(session)
    session.restore()
    window.show_page("train")
    qtbot.show(window, 1280, 800)
    yield window
    session.stop_training()
    qtbot.waitUntil(lambda: not session.is_training)
    session.service.close()


def kinds(run) -> list[str]:
    lines = run.folder.events.read_bytes().splitlines() if run.folder.has_event_log else []
    return [event["kind"] for line in lines if (event := parse_line(line)) is not None]


@pytest.mark.slow
def test_from_a_csv_to_a_running_job_in_two_actions(window: Window, questions: Path, cached_model: str, qtbot):
    draft = window.session.draft
    run_button = window.toolbar.widgetForAction(window.menus["run"])
    unlike = questions.with_name("other.csv")
    unlike.write_text("left,right\n1 + 1,2\n3 + 4,7\n")
    draft.update({"data": str(unlike), "prompt_feature": "prompt"})
    qtbot.waitUntil(lambda: window.session.dataset.problems() != [])
    run_button.click()
    field = window.pages["train"].form.fields["prompt_feature"]
    assert QApplication.focusWidget() is field.control, "Run goes to what the form calls a problem, and makes no run"
    assert "no column prompt" in window.strip.sentence.text() and not places.runs_folder().exists()
    window.undo()
    drop(window.childAt(window.rect().center()), questions)
    qtbot.waitUntil(lambda: draft.value("data") == str(questions))
    assert draft.value("model") == cached_model, "the model that is here already is offered"
    assert (draft.value("prompt_feature"), draft.value("answer_feature")) == ("Question", "Answer")
    draft.update(ONE_SHORT_STEP)  # the way to a running job is the same, and waiting for it is not the test
    qtbot.waitUntil(lambda: run_button.isEnabled() and run_button.property("role") == "primary")
    QTest.mouseClick(run_button, Qt.MouseButton.LeftButton)
    run = window.session.run
    assert run is not None, window.strip.sentence.text()
    qtbot.waitUntil(lambda: "step" in kinds(run) or "failed" in kinds(run), timeout=120_000)
    assert "step" in kinds(run), run.folder.log.read_text()
    assert window.current_page == "monitor"
    section = DOCUMENT.read_text().partition("\n## ")[2].partition("\n## ")[0]
    steps = [line for line in section.splitlines() if line[:2].rstrip(".").isdigit()]
    assert len(steps) == 2, "docs/guide/grpo.md tells the same steps: the drop and the click"
