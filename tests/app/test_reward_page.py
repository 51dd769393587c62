"""The Rewards page with a real desk: sample, score, edit, save, score again, cases, consent, giving up, every width."""

import json
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QGuiApplication, QKeyEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QLayout, QLineEdit

from app.pages.rewards import reward_file
from app.pages.rewards.bench import row_numbers
from app.pages.rewards.reward_file import CodeEditor
from app.pages.rewards.rewards_page import RewardsPage
from app.pages.train.reward_panel import LABEL, SCORES, SOURCE, USE, RewardPanel
from app.state import reward_bench
from app.state.consent import Consent
from app.state.draft import Draft
from app.state.processes import Service
from app.state.session import Session
from app.widgets.basic.dialogs import TextDialog
from app.window import Window
from backend.rewards.catalogue import DEFAULT_REWARDS
from tests.support import small_run
from tests.support.windows import drop, table_texts

MINE = '''from backend.rewards import register_reward_function

@register_reward_function("long", label="Long")
def long(completions, **kwargs):
    """Long is good."""
    return [len(text) / 10 for text in completions]
'''
ROWS = [{"prompt": "p", "completion": text, "answer": "4"} for text in ("a", "bb", "ccc", "dddd")]


@pytest.fixture(scope="module")
def service(qapp):
    client = Service()
    yield client
    client.close()


@pytest.fixture(scope="module")
def prefs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preferences of the service, which outlives a test."""
    return tmp_path_factory.mktemp("prefs")


@pytest.fixture
def page(qtbot, session: Session, service: Service, prefs: Path, monkeypatch, helper) -> RewardsPage:
    monkeypatch.setenv("GRPO_STUDIO_PREFS", str(prefs))
    monkeypatch.setattr(reward_bench, "SETTLE_MS", 20)
    session.service = service
    session.draft.update({"model": "m", "data": "d"})
    session.consent = Consent(prefs / "trusted.json")
    session.consent.ask = lambda requests: True
    return qtbot.show(RewardsPage(session), 1080, 700)


@pytest.fixture
def user_file(page: RewardsPage, tmp_path: Path) -> Path:
    """The user's own reward file, named in the settings, its function ticked."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    page.draft.update({"reward_functions_file": str(file), "reward_functions": ["long"]})
    return file


def wait_for_scores(qtbot, page: RewardsPage) -> None:
    qtbot.waitUntil(lambda: not page.bench.busy and bool(page.bench.functions or page.bench.failed))


def load_rows(qtbot, page: RewardsPage, tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    page.bench.load_file(file)
    wait_for_scores(qtbot, page)


def edit(page: RewardsPage, before: str, after: str) -> None:
    """Change the text in the editor, and save it with Ctrl+S."""
    page.panel.editor.setPlainText(page.panel.editor.toPlainText().replace(before, after))
    QTest.keyClick(page.panel.editor, Qt.Key.Key_S, Qt.KeyboardModifier.ControlModifier)


def rewards(page: RewardsPage) -> list[float]:
    return [item["reward"] for line in page.bench.groups for item in line["completions"]]


def test_edits_of_the_file_are_lost_only_if_the_user_says_so(
    page: RewardsPage, user_file: Path, window: Window, monkeypatch
) -> None:
    (other := user_file.with_name("other.py")).write_text(MINE)
    asked: list[str] = []

    def answering(answer: str) -> None:
        monkeypatch.setattr(reward_file, "ask", lambda *what: asked.append(what[1]) or answer)

    answering("cancel")
    page.panel.editor.setPlainText(f"{MINE}# edited")
    page.panel.editor.document().setModified(True)
    window.page_stack.pages["rewards"] = page
    window.show()
    assert not window.close() and window.isVisible()
    page.draft.set("reward_functions_file", str(other))
    assert page.panel.is_edited and page.panel.file == user_file
    answering("save")
    assert window.close() and user_file.read_text() == f"{MINE}# edited"
    page.draft.changed.emit("")
    assert page.panel.file == other and asked == ["Save the changes to mine.py?"] * 3
    page.panel.editor.document().setModified(True)
    answering("discard")
    page.draft.set("reward_functions_file", str(user_file))
    assert page.panel.file == user_file and other.read_text() == MINE


def test_no_finding_is_cut(qtbot, page: RewardsPage) -> None:
    """However many there are: they scroll, and leave room for the tables."""
    verdict = page.results.verdict
    sentence = "Within each of the 4 prompts all completions score the same, so nothing would be learned from them."
    verdict.show_findings([{"level": "warning", "sentence": sentence, "advice": sentence}] * 9)
    verdict.more.click()

    def is_whole() -> bool:
        texts = [each for each in verdict.findChildren(QLabel) if each.text() == sentence]
        return len(texts) == 18 and all(each.height() >= each.heightForWidth(each.width()) for each in texts)

    for width in (1080, 860):
        page.resize(width, 600)
        qtbot.waitUntil(lambda: verdict.width() < page.width() and is_whole() and verdict.height() < page.height() / 2)
    page.layout().setSizeConstraint(QLayout.SizeConstraint.SetNoConstraint)  # as in the window, which may be lower
    page.resize(860, 500)
    board = page.results.board
    board.model().set_rows([*board.model().rows] * 5)
    qtbot.waitUntil(lambda: is_whole() and board.geometry().bottom() <= board.parentWidget().height())
    verdict.show_findings(verdict.findings[:1])
    qtbot.waitUntil(lambda: verdict.height() < 100)


def test_sample_and_score(qtbot, page: RewardsPage, tmp_path: Path) -> None:
    raw = small_run.settings_for(tmp_path, group_size=3, max_completion_length=6) | small_run.low_half(tmp_path)
    page.draft.update({key: value for key, value in raw.items() if key in page.draft.values()})
    assert page.source.group_size.text() == "3", "the run's own group size"
    page.source.rows.setText("2")
    (unscored,) = table_texts(page.results.functions)
    assert unscored[1:] == ["not scored yet", "–", "1", "–"] and page.results.board.isVisible()
    page.results.board.selectRow(0)
    QTest.keyClick(page.results.board, Qt.Key.Key_Return)
    (editor,) = page.results.board.findChildren(QLineEdit)
    editor.setText("2")
    QTest.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: page.draft.value("reward_weights") == [2.0])
    page.session.consent.ask = lambda requests: False
    page.sample()
    assert not page.bench.busy and not page.bench.groups, "the consent is asked for first"
    page.session.consent.ask = lambda requests: True
    emitted: list[tuple[int, int]] = []
    page.bench.progress.connect(lambda done, of: emitted.append((done, of)))
    page.source.sample.click()
    assert page.bench.busy and page.source.cancel.isVisible()
    wait_for_scores(qtbot, page)
    assert page.about.text().startswith("2 prompts, 6 completions sampled from the model; scored in ")
    assert emitted[-1][1] == 2 * 3 * 6 and emitted[-1][0] > 0
    assert page.results.functions.rows[0]["name"] == "low_half" and page.results.completions.rowCount() == 8
    assert page.results.verdict.findings and page.results.table.currentIndex().row() == 1
    assert page.detail.text.toPlainText() == page.bench.groups[0]["completions"][0]["text"]
    assert " = " in page.detail.completion.scores.text() and "× 2" in page.detail.completion.scores.text()
    first = [item["text"] for item in page.bench.groups[0]["completions"]]
    page.source.how.setCurrentIndex(page.source.how.findData("numbers"))
    page.source.numbers.setText("2, 5")
    page.source.sample.click()
    qtbot.waitUntil(lambda: [line["row"] for line in page.bench.groups] == [2, 5])
    wait_for_scores(qtbot, page)
    assert [item["text"] for item in page.bench.groups[0]["completions"]] != first


def test_what_keeps_rewards_from_scoring_is_told_where_they_are_tried(qtbot, page: RewardsPage, tmp_path, user_file):
    panel = RewardPanel(page.bench)
    qtbot.addWidget(panel)
    panel.show_rewards()
    load_rows(qtbot, page, tmp_path)
    (finding,) = (each["sentence"] for each in page.bench.findings[:1])
    assert panel.result.text() == finding
    page.draft.set("reward_functions", ["long", 'judge(url="http://127.0.0.1:9/v1")'])
    qtbot.waitUntil(lambda: page.bench.failed is not None and not page.bench.busy)
    said = page.results.verdict.findings[0]["sentence"]
    assert (
        said.startswith("The judge's server at http://127.0.0.1:9/v1 does not answer") and panel.result.text() == said
    )
    page.draft.set("reward_functions", ["long"])
    qtbot.waitUntil(lambda: page.bench.failed is None and panel.result.text() == finding)
    page.draft.set("model", "other")
    panel.show_rewards()
    assert panel.result.text() == "", "these are the completions of another model"


def test_row_numbers_are_parsed() -> None:
    assert row_numbers("1-4, 17,2") == [1, 2, 3, 4, 17]
    assert row_numbers("") == row_numbers("4-") == row_numbers("x") == row_numbers("1-99999") == []


def told(page: RewardsPage) -> str:
    return page.results.verdict.findings[0]["sentence"]


def test_drop_and_paste(qtbot, page: RewardsPage, tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    drop(page, file)
    wait_for_scores(qtbot, page)
    assert page.bench.count == 4 and len(page.bench.groups) == 1, "one prompt is one group"
    page.source.sources.choose("file")
    QGuiApplication.clipboard().clear()
    page.source.paste.click()
    assert told(page) == "There is no text on the clipboard." and page.results.verdict.isVisible()
    QGuiApplication.clipboard().setText('{"prompt": 1')
    page.source.paste.click()
    qtbot.waitUntil(lambda: told(page).startswith("Line 1 of what was pasted is not JSON"))
    QGuiApplication.clipboard().setText("<answer>4</answer>")
    page.source.paste.click()
    assert "JSON" not in str(page.results.verdict.findings)
    qtbot.waitUntil(lambda: page.bench.count == 1 and not page.bench.busy)
    assert page.bench.origin == "pasted" and "token" not in page.detail.completion.result.text()
    (tmp_path / "mine.py").write_text(MINE)
    drop(page, tmp_path / "mine.py")
    assert page.panel.editor.toPlainText() == MINE


def test_save_marks_the_error(qtbot, page: RewardsPage, user_file: Path, tmp_path: Path) -> None:
    load_rows(qtbot, page, tmp_path)
    assert rewards(page) == [0.1, 0.2, 0.3, 0.4] and page.views.buttons["file"].text() == "mine.py"
    page.panel.opened.emit("q&a.py")
    assert page.views.buttons["file"].text() == "q&&a.py", "one & marks a key, and is not shown"
    page.views.choose("file")
    edit(page, "/ 10", "/ 5")
    qtbot.waitUntil(lambda: rewards(page) == [0.2, 0.4, 0.6, 0.8])
    assert user_file.read_text() == MINE.replace("/ 10", "/ 5") and not page.panel.is_edited
    edit(page, "/ 5", "/ 0")
    qtbot.waitUntil(lambda: page.panel.trouble.isVisible())
    assert "raised ZeroDivisionError: division by zero (mine.py, line 6)" in page.panel.trouble.text()
    assert [mark.cursor.blockNumber() for mark in page.panel.editor.extraSelections()][-1] == 5
    assert "line 6, in long" in page.panel.frames.text()
    page.panel.details.click()
    dialog = page.window().findChild(TextDialog)
    assert "Traceback" in dialog.text.toPlainText() and "ZeroDivisionError" in dialog.text.toPlainText()
    dialog.close()
    assert "failed on line 6" in page.results.functions.index(0, 1).data()
    assert page.results.verdict.findings[0]["sentence"] == page.panel.trouble.text()
    page.views.choose("completion")
    page.results.board.clicked.emit(page.results.functions.index(0, 0))
    assert page.views.key == "file" and page.panel.editor.textCursor().blockNumber() == 5, "a click leads there"
    edit(page, "return [", "return [[")
    qtbot.waitUntil(lambda: "syntax error on line 6" in page.panel.trouble.text())
    edit(page, "return [[len(text) / 0", "return [len(text)")
    qtbot.waitUntil(lambda: rewards(page) == [1.0, 2.0, 3.0, 4.0])
    assert not page.panel.trouble.isVisible()


def test_consent_to_edited_code(qtbot, page: RewardsPage, user_file: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    page.session.consent.ask = lambda requests: not asked.extend(item.code.path.name for item in requests)
    load_rows(qtbot, page, tmp_path)
    assert asked == ["mine.py"]
    edit(page, "/ 10", "/ 5")
    qtbot.waitUntil(lambda: rewards(page)[0] == 0.2)
    assert asked == ["mine.py"]
    user_file.write_text(MINE.replace("/ 10", "/ 2"))
    qtbot.waitUntil(lambda: "/ 2" in page.panel.editor.toPlainText())
    assert page.bench.stale and asked == ["mine.py"] and rewards(page)[0] == 0.2, "shown, and not run unasked"
    assert page.results.verdict.findings[0]["sentence"] == "Settings or files have changed since these scores."
    page.again.click()
    qtbot.waitUntil(lambda: rewards(page)[0] == 0.5)
    assert asked == ["mine.py", "mine.py"]


def test_changes_elsewhere_are_kept(qtbot, page: RewardsPage, user_file: Path) -> None:
    page.panel.editor.setPlainText(MINE + "# mine\n")
    page.panel.editor.document().setModified(True)
    user_file.write_text(MINE + "# theirs\n")
    page.panel.save_file()
    assert user_file.read_text().endswith("# theirs\n") and page.panel.reload.isVisibleTo(page.panel)
    page.panel.save_file()
    assert user_file.read_text().endswith("# mine\n"), "the second time it is meant"


def test_new_reward_file(qtbot, page: RewardsPage, tmp_path: Path, monkeypatch) -> None:
    page.session.consent.ask = lambda requests: pytest.fail("it was asked about what we wrote")
    monkeypatch.setattr(reward_file, "save_file", lambda *_: tmp_path / "fresh.py")
    page.panel.new.click()
    assert [entry.name for entry in page.draft.rewards()[:2]] == ["concise", "mentions_answer"]
    page.draft.set("reward_functions", ["concise", "mentions_answer"])
    load_rows(qtbot, page, tmp_path)
    assert page.bench.failed is None and not any(item["error"] for item in page.bench.functions)


def test_kept_case(qtbot, page: RewardsPage, user_file: Path, tmp_path: Path) -> None:
    load_rows(qtbot, page, tmp_path)
    page.results.table.selectRow(3)
    page.keep.click()
    qtbot.waitUntil(lambda: page.views.buttons["cases"].text() == "Cases (1)")
    kept = json.loads((tmp_path / "mine.cases.jsonl").read_text())
    assert (kept["completion"], kept["expected"]) == ("ccc", {"long": 0.3})
    edit(page, "/ 10", "/ 5")
    qtbot.waitUntil(lambda: page.views.buttons["cases"].text() == "Cases: 1 of 1 fail")
    assert page.case_model.index(0, 0).data() == "fails"
    assert page.case_model.index(0, 2).data() == "long gave 0.6; 0.3 is expected."
    page.views.choose("cases")
    page.cases.selectRow(0)
    page.cases.setFocus()
    page.activateWindow()
    QTest.keyClick(page.cases, Qt.Key.Key_Delete)
    qtbot.waitUntil(lambda: page.views.buttons["cases"].text() == "Cases")
    assert not (tmp_path / "mine.cases.jsonl").exists()


KEY, CONTROL = Qt.Key, Qt.KeyboardModifier.ControlModifier


@pytest.fixture
def editor(qtbot, qapp) -> CodeEditor:
    widget = qtbot.show(CodeEditor(), 500, 300)
    return widget


def set_text(editor: CodeEditor, text: str, at: int | None = None) -> None:
    editor.setPlainText(text)
    cursor = editor.textCursor()
    cursor.setPosition(len(text) if at is None else at)
    editor.setTextCursor(cursor)


def test_ctrl_s_saves_the_file(editor: CodeEditor, qtbot) -> None:
    event = QKeyEvent(QEvent.Type.ShortcutOverride, KEY.Key_S, CONTROL)
    event.ignore()
    editor.event(event)
    assert event.isAccepted()
    with qtbot.waitSignal(editor.save_requested):
        QTest.keyClick(editor, KEY.Key_S, CONTROL)
    with qtbot.waitSignal(editor.run_requested):
        QTest.keyClick(editor, KEY.Key_Return, CONTROL)
    with qtbot.waitSignal(editor.left):
        QTest.keyClick(editor, KEY.Key_Escape)


A, B, C, D, E = DEFAULT_REWARDS


def click_cell(panel: RewardPanel, row: int, column: int) -> None:
    table = panel.table
    pos = table.visualRect(panel.model.index(row, column)).center()
    QTest.mouseClick(table.viewport(), Qt.MouseButton.LeftButton, pos=pos)


def test_entry_with_arguments(panel: RewardPanel, draft: Draft, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def brevity(completions, limit=9):\n    """Short is good."""\n')
    entry = f"{tmp_path / 'mine.py'}::brevity(limit=20)"
    draft.set("reward_functions", ["length_target(target=80)", entry, "nothing(x=1)"])
    rows = {row.entry.name: place for place, row in enumerate(panel.model.rows)}
    told = panel.model.index(rows[entry], SCORES).data()
    assert told == "Short is good." and panel.model.index(rows[entry], SOURCE).data() == "mine.py"
    assert panel.model.index(rows["length_target(target=80)"], LABEL).data() == "Length Target"
    assert [row.known for row in panel.model.ticked] == [True, True, False]
    assert any("nothing" in fault.sentence for fault in draft.problems() if fault.setting == "reward_functions")


def test_tick_restores_the_weight(panel: RewardPanel, draft: Draft) -> None:
    draft.set("reward_weights", [1.0, 2.0, 3.0, 4.0, 5.0])
    click_cell(panel, 1, USE)
    assert draft.value("reward_weights") == [1.0, 3.0, 4.0, 5.0]
    click_cell(panel, 1, USE)
    assert draft.value("reward_weights") == [1.0, 2.0, 3.0, 4.0, 5.0]
