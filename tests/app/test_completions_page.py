"""The Completions page: every completion of a step with its scores; it follows the run until a step is picked."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image
from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QTextCharFormat
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QFileDialog, QProgressDialog

from app import theme
from app.pages.completions.completions_page import CompletionsPage, weights_at
from app.pages.completions.reading_pane import MEASURES, background
from app.state.correctness import largest_reward
from app.state.reward_bench import without_scores
from app.state.session import Session
from app.widgets.completion_detail import CompletionDetail, SideBySide
from app.widgets.completion_table import STOP_LABELS, CompletionModel
from app.widgets.pictures import PictureButton, PictureDialog, fitted, pictures, read_picture
from backend.rewards.bench import group_of, line_of
from backend.runs.completion_rows import Stop, images_of, prompt_key
from backend.runs.events import JsonLines
from backend.trainer.telemetry import group_row
from backend.types import Completion, Group, Problem
from tests.support import made_up_runs

ROLE = Qt.ItemDataRole


@pytest.fixture
def page(qtbot, session: Session) -> CompletionsPage:
    return qtbot.show(CompletionsPage(session), 1060, 700)


def show_run(qtbot, page: CompletionsPage, folder) -> None:
    page.session.open_run(folder.path)
    qtbot.waitUntil(lambda: page.session.run.has_caught_up and page._shown is not None)


def cell(model: CompletionModel, row: int, head: str, role: int = ROLE.DisplayRole):
    heads = [model.headerData(c, Qt.Orientation.Horizontal) for c in range(model.columnCount())]
    return model.data(model.index(row, heads.index(head)), role)


def test_the_page_follows_the_newest_step(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=5, ending=None)
    show_run(qtbot, page, folder)
    assert page.step.text() == "5" and page.about.text() == "4 prompts, 32 completions"
    rows = JsonLines(folder.completions)
    rows.append({"step": 6, "prompt": "p", "answer": "a", "completions": [{"text": "t", "reward": 1.0}]})
    page.session.run.poll()
    page._refresh()
    assert page.step.text() == "6" and page.about.text() == "1 prompt, 1 completion"
    page.pick(3)
    rows.append({"step": 7, "prompt": "p", "completions": []})
    page.session.run.poll()
    page._refresh()
    assert page.step.text() == "3" and not page.newest.isChecked(), "a step that was picked stays"
    page.newest.setChecked(True)
    assert page.step.text() == "7"


def test_a_run_without_completions_leaves_the_menu_of_runs(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    assert page.nothing.isVisible() and not page.switcher.isVisible(), "no run"
    settings = {"train_mode": "sft", "reward_functions": []}
    show_run(qtbot, page, made_up_runs.make_run(tmp_path / "demo", steps=2))
    page.session.open_run(made_up_runs.make_run(tmp_path / "sft", steps=0, **settings).path)
    assert page.nothing.title.text() == "No completions"
    assert page.switcher.isVisible() and not page.step.isVisible() and page.about.text() == ""


def test_selecting_a_completion_shows_it_in_full(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    show_run(qtbot, page, made_up_runs.make_run(tmp_path / "run", steps=2))
    completion = page.session.run.index.rows()[0]["completions"][2]
    page.table.selectRow(3)
    assert page.detail.text.toPlainText() == completion["text"]
    assert page.detail.prompt.toPlainText() == page.session.run.index.rows()[0]["prompt"]
    assert "Accuracy" in page.detail.completion.scores.text()
    assert f"{completion['tokens']} tokens" in page.detail.completion.result.text()
    formats = page.detail.text.document().firstBlock().layout().formats()
    assert formats[0].length == len("<think>") and formats[0].format.foreground().color() == theme.palette().accent


SOUND = {"text": "a\nb", "tokens": [5, 6, 7], "stop": "eos", "rewards": {"f": 0.5, "g": None}, "reward": 0.5}
CUT = {"text": "", "tokens": 9, "stop": "length", "rewards": {"f": -1.0}, "reward": -1.0, "advantage": -0.7}
COMPLETIONS = [SOUND | {"advantage": 0.7}, CUT, {"text": None, "rewards": "odd"}, "odd"]
GROUP = {"step": 1, "prompt": "What\nis it?", "answer": "4", "completions": COMPLETIONS}


def test_a_group_of_any_shape_becomes_table_rows(qtbot) -> None:
    model = CompletionModel()
    model.show_groups([GROUP, {"step": 1}], ["f", "g"], ["F", "G"])
    assert model.rowCount() == 5 and model.rowCount(model.index(0, 0)) == 0
    assert cell(model, 0, "Completion") == "What is it?   answer 4"
    assert (cell(model, 0, "Reward"), cell(model, 0, "Advantage")) == ("−0.250", ""), "the mean of the group"
    heads = ("Completion", "F", "Reward", "Tokens", "End")
    expected = [["a b", "0.500", "0.500", "3", "ended"], ["", "−1.00", "−1.00", "9", "cut off"], ["–"] * 5]
    assert [[cell(model, row, head) for head in heads] for row in (1, 2, 3)] == expected
    assert cell(model, 1, "G") == "–" and cell(model, 2, "Advantage") == "−0.700"
    assert cell(model, 4, "Completion") == "–"


def test_every_stop_reason_that_a_trainer_writes_has_a_label() -> None:
    """A completion that a stop string had ended was shown with the raw word of the file."""
    assert set(get_args(Stop)) == set(STOP_LABELS)


def completion(text: str, reward: float, **more) -> dict:
    scored = {"rewards": {"f": reward}, "reward": reward, "advantage": reward}
    return {"text": text, "tokens": 3, "stop": "eos"} | scored | more


@pytest.fixture
def run(tmp_path: Path):
    """Three steps of one prompt each; the second step's is that of the first again."""
    how = {"steps": 0, "total": 3, "reward_functions": ["f"], "reward_weights": [1.0]}
    folder = made_up_runs.make_run(tmp_path / "runs" / "three", **how)
    rows = JsonLines(folder.completions)
    data = {"text": ["so ", "it ", "is"], "logp": [-0.1, -2.0, None], "mask": [1, 1, 0]}
    learned = {"learned_logp": [-0.1, -1.5, 0.0], "ratio": [1.0, 1.65, 1.0], "clipped": [0, 1, 0]}
    texts = [
        [
            completion("<think>a b</think><answer>4</answer>", 1.0, logged={"kind": "sum"}),
            completion("four", 0.0, stop="length"),
        ],
        [completion("so it is", 0.5, token_data=data | learned), completion("so it was", 0.25)],
        [completion("last", 2.0, stop="length"), completion("last", 2.0)],
    ]
    for step, (prompt, pair) in enumerate(zip(("2 + 2?", "2 + 2?", "other"), texts, strict=True), 1):
        rows.append({"step": step, "prompt": prompt, "answer": "4", "type": None, "completions": pair})
    rows.close()
    return folder


def texts_shown(page: CompletionsPage) -> list[str]:
    return [line.completion["text"] for line in page.model.rows if line.completion is not None]


def test_filter_and_next(qtbot, page: CompletionsPage, run, told) -> None:
    show_run(qtbot, page, run)
    page.pick(1)
    page.bar.show_filter("cut_off")
    assert texts_shown(page) == ["four"] and page.bar.found.text() == "1 of 2 completions of this step"
    qtbot.waitUntil(lambda: len(page.completions.facts) == 6 and page.completions.shown.is_done)
    page.bar.next.click()
    assert page._shown[1] == 3 and page.table.current_line.completion["text"] == "last"
    page.bar.next.click()
    assert told == ["There is no later completion of “cut off”."] and page._shown[1] == 3
    page.bar.previous.click()
    assert page._shown[1] == 1
    page.bar.show_filter("well_formed_wrong")
    assert page.bar.found.text() == "None of the reward functions is known to compare with the right answer."


def test_a_search_lists_what_it_finds_in_the_whole_run(qtbot, page: CompletionsPage, run, told) -> None:
    show_run(qtbot, page, run)
    page.search.take_focus()
    assert page.bar.search.hasFocus()
    qtbot.keyClicks(page.bar.search, "SO IT")
    qtbot.waitUntil(lambda: texts_shown(page) == ["so it is", "so it was"])
    assert page.bar.scope.key == "run" and cell(page.model, 0, "Step") == "2"
    assert "2 completions" in page.bar.found.text()
    page.table.selectRow(1)
    page.table.activated.emit(page.table.currentIndex())
    assert page.bar.scope.key == "step" and page._shown[1] == 2, "Return leads to the step"
    assert page.table.current_line.completion["text"] == "so it was"
    page.bar.previous.click()
    assert page._shown[1] == 2 and page.table.current_line.completion["text"] == "so it is", "the match before"
    page.table.selectRow(page.table.currentIndex().row() + 1)
    page.bar.next.click()
    assert told == ["There is no later completion of “SO IT”."] and page._shown[1] == 2
    page.bar.search.clear()
    qtbot.keyClick(page.bar.search, Qt.Key.Key_Return)
    assert page.completions.search is None


def test_one_prompt_is_followed_through_the_run(qtbot, page: CompletionsPage, run) -> None:
    show_run(qtbot, page, run)
    page.pick(1)
    page.follow_prompt.click()
    qtbot.waitUntil(lambda: page.model.rowCount() == 4)
    assert [cell(page.model, row, "Step") for row in range(4)] == ["1", "1", "2", "2"]
    page.bar.prompt.click()
    qtbot.waitUntil(lambda: page.model.rowCount() == 6)


def test_sort_by_header(qtbot, page: CompletionsPage, run) -> None:
    show_run(qtbot, page, run)
    page.pick(2)

    def click_on_reward() -> list[str]:
        at = next(at for at, column in enumerate(page.model.columns) if column.sort_key == "reward")
        page.table.horizontalHeader().sectionClicked.emit(at)
        return texts_shown(page)

    orders = [click_on_reward() for _ in range(3)]
    assert orders == [["so it is", "so it was"], ["so it was", "so it is"], ["so it is", "so it was"]]
    page.bar.scope.choose("run")
    qtbot.waitUntil(lambda: page.model.rowCount() == 6)
    assert click_on_reward()[::5] == ["last", "four"]


def test_two_selected_completions_show_what_differs(qtbot, page: CompletionsPage, run) -> None:
    show_run(qtbot, page, run)
    page.pick(2)
    page.table.selectAll()
    page.table.clearSelection()
    page.table.selectRow(1)
    qtbot.keyClick(page.table, Qt.Key.Key_Down, Qt.KeyboardModifier.ShiftModifier)
    assert page.pane.text.toPlainText() == "so it iswas"
    assert page.pane.title.text() == "From step 2, number 1 to step 2, number 2"
    marks = marks_of(page)
    assert set(marks) == {"is", "was"} and marks["is"].fontStrikeOut() and not marks["was"].fontStrikeOut()
    page.table.selectRow(1)
    assert page.pane.text.toPlainText() == "so it is" and not page.pane.text.extraSelections()


def marks_of(page: CompletionsPage) -> dict[str, QTextCharFormat]:
    """Marked text → its format; copied, as Qt's own goes with the list."""
    return {mark.cursor.selectedText(): QTextCharFormat(mark.format) for mark in page.pane.text.extraSelections()}


def choose_colour(page: CompletionsPage, key: str) -> None:
    page.pane.measure.setCurrentIndex(page.pane.measure.findData(key))


def test_tokens_are_coloured_by_what_was_recorded(qtbot, page: CompletionsPage, run) -> None:
    show_run(qtbot, page, run)
    page.pick(2)
    choose_colour(page, "ratio")
    marks = marks_of(page)
    assert marks["it "].background().color() == background(MEASURES[2], 1.0)
    assert marks["is"].underlineStyle() == QTextCharFormat.UnderlineStyle.DotLine, "not trained on"
    assert page.pane.legend.isVisible() and page.pane.tokens.ends == ("1.00", "1.65 π new / π old")
    assert page.pane.tokens.tip(1) == "token 2, “it ”: Ratio 1.65 π new / π old"
    choose_colour(page, "logp")
    assert page.pane.tokens.tip(2) == "token 3, “is”: Log-probability when sampled – nats; not trained on"
    page.table.selectRow(2)
    assert page.pane.explanation.text().startswith("This run did not record") and not page.pane.text.extraSelections()
    asked = []
    page.session.field_requested.connect(asked.append)
    page.pane.setting.click()
    assert asked == ["record_tokens"]


def test_weights_beside_totals(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    names = {"reward_functions": ["f", "g"], "reward_weights": [1.0, 0.1]}
    folder = made_up_runs.make_run(tmp_path / "run", steps=0, total=2, **names)
    rows = JsonLines(folder.completions)
    for step, reward in ((1, 2.05), (2, 9.0)):
        scored = {"text": "t", "rewards": {"f": 2.0, "g": 0.5}, "reward": reward}
        rows.append({"step": step, "prompt": "p", "completions": [scored]})
    show_run(qtbot, page, folder)
    page.pick(1)
    assert [page.model.headerData(c, Qt.Orientation.Horizontal) for c in (1, 2)] == ["F\n× 1", "G\n× 0.1"]
    shown = re.sub(r"<[^>]+>|&nbsp;", "", page.detail.completion.scores.text())
    assert shown == "2.05 = ● F 2.00 × 1 + ● G 0.500 × 0.1"
    page.pick(2)
    assert page.model.headerData(1, Qt.Orientation.Horizontal) == "F" and "×" not in page.pane.scores.text()


@pytest.fixture
def logged_run(tmp_path: Path):
    """Functions logged a number, a text, and a name that is a column of ours; nothing in step 3."""
    folder = made_up_runs.make_run(tmp_path / "runs" / "logged", steps=0, total=3, reward_functions=["f"])
    rows = JsonLines(folder.completions)
    values = [
        {"digits": n, "kind": f"k<{n}>", "Reward": 7 - n, "f/explanation": f"Wrong <b>{n}</b>"} for n in (2, 3, 1)
    ]
    both = [completion(f"text {at}", at / 10, logged=each) for at, each in enumerate(values)]
    for step, listed in ((1, both), (2, both), (3, [completion("plain", 0.0)])):
        rows.append({"step": step, "prompt": "p", "answer": "4", "type": None, "completions": listed})
    rows.close()
    return folder


def test_logged_values(qtbot, page: CompletionsPage, logged_run: Path) -> None:
    show_run(qtbot, page, logged_run)
    page.pick(1)
    headers = [page.model.headerData(c, Qt.Orientation.Horizontal) for c in range(page.model.columnCount())]
    assert headers[-5:] == ["digits", "kind", "Reward", "Tokens", "End"] and headers.count("Reward") == 2
    digits = len(headers) - 5
    assert [page.model.columns[digits + n].sort_key for n in range(3)] == ["logged:digits", "", "logged:Reward"]
    assert [page.model.data(page.model.index(1, digits + n)) for n in range(3)] == ["2", "k<2>", "5"]
    assert page.model.data(page.model.index(1, 1), ROLE.ToolTipRole) == "<p>Wrong &lt;b&gt;2&lt;/b&gt;</p>", (
        "an explanation is no column"
    )
    assert page.model.data(page.model.index(0, digits + 2)) == "", "the mean of a prompt's rewards is in its own column"
    page.sort("logged:digits", True)
    assert texts_shown(page) == ["text 1", "text 0", "text 2"]
    page.sort("", True)
    assert "digits: 2" in page.pane.scores.text() and "kind: k&lt;2&gt;" in page.pane.scores.text()
    assert "F 0</span>: Wrong &lt;b&gt;2&lt;/b&gt;<br>digits: 2" in page.pane.scores.text()

    page.bar.show_filter("score")
    page.bar.measure.setCurrentIndex(page.bar.measure.findData("logged:digits"))
    page.bar.limit.setText("1")
    page.bar.limit.editingFinished.emit()
    assert texts_shown(page) == ["text 0", "text 1"] and page.bar.measure.findData("logged:kind") < 0
    page.pick(3)
    assert page.bar.query.measure == "logged:digits", "the condition stays where a step has nothing of it"
    page.bar.reset()

    page.bar.searched.emit("K<1>")
    qtbot.waitUntil(lambda: texts_shown(page) == ["text 2", "text 2"])
    assert page.model.logged == {"digits": True, "kind": False, "Reward": True, "f/explanation": False}


def test_another_page_can_ask_for_a_step_and_a_filter(qtbot, page: CompletionsPage, run) -> None:
    show_run(qtbot, page, run)
    page.show_requested(1, "cut_off")
    assert page._shown[1] == 1 and texts_shown(page) == ["four"] and not page.newest.isChecked()
    page.show_requested(1, None)
    assert len(texts_shown(page)) > 1, "the step on screen, without the filter it had"
    page.show_requested(2, None)
    assert texts_shown(page) == ["so it is", "so it was"]
    page.show_requested(3, "no such filter")
    assert texts_shown(page) == ["last", "last"]


def test_rewards_of_environments_are_explained_too() -> None:
    config = {"reward_functions": ["r1_int"], "reward_weights": [0.5]}
    parts = {"config": config, "data": SimpleNamespace(marks=[]), "series": lambda _: (np.empty(0), np.empty(0))}
    run: Any = SimpleNamespace(reward_names=["r1_int", "Wordle"], **parts)
    row = {"completions": [{"rewards": {"r1_int": 0.5, "Wordle": 1.0}, "reward": 1.25}]}
    assert weights_at(run, 1, [row]) == [0.5, 1.0]
    assert largest_reward(run) is None, "what Wordle gives at most is unknown"
    run.reward_names.pop()
    assert largest_reward(run) == 0.25


def test_what_is_shown_is_saved(qtbot, page: CompletionsPage, run, tmp_path: Path, monkeypatch, told) -> None:
    show_run(qtbot, page, run)
    page.bar.scope.choose("run")
    qtbot.waitUntil(lambda: page.model.rowCount() == 6)
    page.bar.show_filter("cut_off")
    target = tmp_path / "out.jsonl"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_args: (str(target), ""))
    page.save_rows(range(page.model.rowCount()))
    assert told[-1] == "Saved 2 completions in out.jsonl."
    assert [json.loads(line)["text"] for line in target.read_text().splitlines()] == ["four", "last"]
    monkeypatch.setattr(QProgressDialog, "wasCanceled", lambda _: True)
    page.save_rows([0])
    assert told[-1] == "out.jsonl was not saved." and len(target.read_text().splitlines()) == 2


def test_step_beyond_the_end(qtbot, page: CompletionsPage, run, told) -> None:
    show_run(qtbot, page, run)
    page.step.setText("9999")
    page.step.setModified(True)
    page.step.editingFinished.emit()
    assert told == ["Step 9,999 has no completions. The nearest is step 3."] and page.step.text() == "3"
    JsonLines(run.completions).append({"step": 4, "prompt": "p", "completions": []})
    page.session.run.poll()
    page._refresh()
    assert page._shown[1] == 3 and not page.newest.isChecked()


def painted(folder: Path, name: str, size: tuple[int, int], **options: Any) -> str:
    Image.new("RGB", size, (200, 30, 30)).save(folder / name, **options)
    return str(folder / name)


def test_a_large_picture_is_read_scaled_down_and_a_turned_one_upright(qapp, tmp_path: Path):
    wide = read_picture(painted(tmp_path, "wide.jpg", (3000, 1500)), 96)
    assert (wide.image.size(), wide.size) == (QSize(192, 96), QSize(3000, 1500))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = read_picture(painted(tmp_path, "turned.jpg", (400, 200), exif=exif), 50)
    assert (turned.image.size(), turned.size) == (QSize(50, 100), QSize(200, 400))
    small = read_picture(painted(tmp_path, "small.png", (8, 4)), 96)
    assert (small.image.size(), fitted(small.size, QSize(96, 96))) == (QSize(8, 4), QSize(96, 48))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no\\x00.png is missing."), (b"text", "no.png cannot be shown: unsupported image format.")],
)
def test_a_picture_that_cannot_be_shown_says_why(qapp, tmp_path: Path, content: bytes | None, said: str):
    path = tmp_path / ("no.png" if content else "no\0.png")
    if content:
        path.write_bytes(content)
    assert read_picture(str(path), 96).about == said


@pytest.mark.parametrize(("tokens", "shown"), [([7], "1 token, ended"), ([7, 8], "2 tokens, ended")])
def test_tokens_are_counted(qtbot, tokens: list[int], shown: str) -> None:
    detail = CompletionDetail()
    qtbot.addWidget(detail)
    detail.show_completion({}, {"text": "", "tokens": tokens, "stop": "eos", "reward": 1.0})
    assert shown in detail.completion.result.text().replace("\u00a0", " ")


@pytest.mark.parametrize("made", [CompletionDetail, SideBySide])
def test_pictures_beside_a_prompt(qtbot, tmp_path: Path, made: Callable[[], CompletionDetail | SideBySide]):
    paths = [painted(tmp_path, "red.png", (64, 32)), str(tmp_path / "gone.png")]
    detail = made()
    qtbot.addWidget(detail)
    detail.show()
    show = detail.show_completion if isinstance(detail, CompletionDetail) else detail.show_row
    show({"prompt": "Which colour?", "images": paths}, {})
    strip = detail.pictures
    buttons = strip.findChildren(PictureButton)
    names = ["Picture 1 of 2: red.png, 64 × 32 pixels", "Picture 2 of 2: gone.png is missing."]
    qtbot.waitUntil(lambda: [each.accessibleName() for each in buttons] == names)
    assert strip.isVisible()
    QTest.keyClick(buttons[0], Qt.Key.Key_Space)
    (dialog,) = strip.window().findChildren(PictureDialog)
    qtbot.waitUntil(lambda: dialog.windowTitle() == "1 of 2: red.png, 64 × 32 pixels")
    dialog.activateWindow()
    qtbot.waitUntil(dialog.isActiveWindow)
    QTest.keyClick(dialog, Qt.Key.Key_Right)
    qtbot.waitUntil(lambda: dialog.windowTitle() == "2 of 2: gone.png is missing.")
    QTest.keyClick(dialog, Qt.Key.Key_Escape)
    qtbot.waitUntil(lambda: not strip.window().findChildren(PictureDialog))
    show({"prompt": "Without"}, {})
    assert not strip.isVisible()


def test_a_missing_picture_that_comes_back_is_read_again(qtbot, tmp_path: Path):
    path = str(tmp_path / "late.png")
    pictures().picture(path, 50)
    qtbot.waitUntil(lambda: pictures().picture(path, 50).about == "late.png is missing.")
    painted(tmp_path, "late.png", (10, 10))
    qtbot.waitUntil(lambda: not pictures().picture(path, 50).image.isNull())


def test_pictures_of_a_prompt_are_logged_and_come_back_on_the_bench():
    parts = [{"type": "image", "image": "/a.png"}, {"type": "text", "text": "How many?"}]
    shown = Problem(0, "How many?", [{"role": "user", "content": parts}], [1], "2")
    row = group_row(3, Group(shown, [Completion([1], [-1.0], "2", "eos")]))
    line = line_of(group_of(row, 0, "a row"))
    assert images_of(row) == images_of(line) == ["/a.png"] and line["messages"] == shown.messages
    assert prompt_key(row) == ("How many?", "/a.png") != prompt_key(dict(row) | {"images": ["/b.png"]})
    assert without_scores(line)["images"] == ["/a.png"]
    assert images_of({}) == images_of({"images": "a.png"}) == []
    assert images_of({"images": ["a.png", None, 3]}) == ["a.png"]
