"""The Dataset page, driven through its widgets: mapping menus, rows requested when visible, the rendered prompt,
counts, faults; and the line that summarises the dataset on Train."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PySide6.QtCore import QItemSelection, QItemSelectionModel, Qt
from PySide6.QtGui import QGuiApplication, QTextCursor
from PySide6.QtWidgets import QComboBox

from app import theme
from app.pages.dataset import dataset_page
from app.pages.dataset.dataset_page import ABSENT, EMPTY, DatasetPage
from app.pages.dataset.rows import CHUNK, PICTURES_ROLE, PLACEHOLDER
from app.pages.train import train_page
from app.pages.train.train_page import DatasetLine
from app.state import dataset as datasets
from app.state.session import Session
from backend.rewards.allowed_code import Rights
from backend.utils.errors import ConfigProblem
from tests.support.random_models import tiny_tokenizer
from tests.support.windows import ServiceHere

MAPPED = {"prompt_feature": "question", "answer_feature": "solution"}


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Timers that wait until typing rests wait a millisecond."""
    monkeypatch.setattr(datasets, "SETTLE_MS", 1)
    monkeypatch.setattr(dataset_page, "MOVED_MS", 1)
    monkeypatch.setattr(train_page, "WAIT_MS", 1)


@pytest.fixture
def session(session: Session) -> Session:
    session.service = ServiceHere()  # type: ignore[assignment]
    return session


@pytest.fixture
def page(qtbot, session: Session) -> DatasetPage:
    shown = DatasetPage(session)
    qtbot.addWidget(shown)
    shown.resize(1060, 700)
    return shown


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (folder := tiny_tokenizer(tmp_path / "model")).joinpath("config.json").write_text("{}")
    return folder


def write_rows(folder: Path, count: int = 12, name: str = "rows.jsonl", **more: Any) -> str:
    rows = [{"question": f"What is {n} plus {n}?", "solution": str(2 * n), "id": n} | more for n in range(count)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def show_dataset(qtbot, page: DatasetPage, state: str = "ready", **settings: Any) -> None:
    page.session.draft.update(settings)
    page.show()
    qtbot.waitUntil(lambda: page.dataset.state == state and "preview" not in page.dataset._pending)


def test_variety_of_the_prompts(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    data = write_rows(tmp_path, 40, question="What is 3 plus 3?")
    show_dataset(qtbot, page, data=data, **MAPPED)
    qtbot.waitUntil(lambda: bool(page.dataset.variety))
    said = page.mapping.verdict
    assert said.text().startswith("98% of the prompts repeat another") and said.property("role") == "problem"
    assert said.isVisible() and not page.counts.variety.isVisible()
    page.counts.other.click()
    assert page.counts.variety.isVisible() and page.counts.other.text() == "Lengths"
    assert page.counts.about.text() == "of 40 rows"
    shown = [value.text() for name, value in page.counts.variety.cells if name.text() in ("Near repeats", "Wordings")]
    assert shown == ["0", "1"]
    page.counts.other.click()
    assert page.counts.histogram.isVisible() and page.counts.other.text() == "Variety"
    page.session.draft.set("prompt_feature", "id")
    qtbot.waitUntil(lambda: page.dataset.variety.get("rows") == 0)
    assert not said.isVisible(), "a column of numbers is no prompt"


def test_map_function_is_allowed(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    code = "@register_map_function\ndef f(row):\n    return row | {'solution': 'new'}\n"
    (tmp_path / "mine.py").write_text("from backend.rewards import register_map_function\n" + code)
    answers, asked = [False, True], []
    page.session.consent.ask = lambda requests: asked.append(requests) or answers.pop(0)
    mapped = {"map_function": "f", "reward_functions_file": str(tmp_path / "mine.py"), "reward_isolation": "thread"}
    show_dataset(qtbot, page, data=write_rows(tmp_path), **MAPPED | mapped)
    assert page.allow_button.isVisible() and [fault.setting for fault in page.dataset.faults] == ["map_function"]
    page.allow_button.click()
    assert page.allow_button.isVisible() and len(asked) == 1
    page.allow_button.click()
    qtbot.waitUntil(lambda: not page.allow_button.isVisible() and not page.dataset.faults)
    assert asked[1][0].rights == Rights(), "the preview runs it in a process of its own"


def choose(menu: QComboBox, text: str) -> None:
    """As if the user had opened the menu and chosen the entry."""
    menu.setCurrentIndex(menu.findText(text))
    menu.activated.emit(menu.currentIndex())


def menu_texts(menu: QComboBox) -> list[str]:
    return [menu.itemText(index) for index in range(menu.count())]


def test_empty_page(qtbot, page: DatasetPage, tmp_path: Path, monkeypatch) -> None:
    page.show()
    assert page.nothing.isVisible() and not page.table.isVisible() and EMPTY[0]
    monkeypatch.setattr(page.path, "choose_file", lambda: page.path.take(write_rows(tmp_path)))
    page.nothing.button_clicked.emit()
    qtbot.waitUntil(lambda: page.dataset.state == "ready")
    assert page.table.isVisible() and page.session.draft.value("data").endswith("rows.jsonl")


def test_hub_dataset_is_downloaded(qtbot, page: DatasetPage) -> None:
    service = page.session.service
    service.canned["preview"] = {"absent": True}
    show_dataset(qtbot, page, "absent", data="owner/sums")
    assert page.absent.isVisible() and service.of("download") == [] and ABSENT[0]
    service.held["download"] = []
    page.absent.button_clicked.emit()
    assert service.of("download") == [{"id": "owner/sums", "repo_type": "dataset"}]
    page.dataset.download_progress = (1_500_000, 4_000_000)
    page.dataset.changed.emit()
    assert page.instead.text() == "Fetching owner/sums from Hugging Face: 1.50\u202fMB of 4.00\u202fMB"
    service.canned["download"] = {"place": "somewhere"}
    service.held["download"][0]()
    qtbot.waitUntil(lambda: service.of("preview")[-1]["fetch"] is True)


def test_suggested_columns(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    show_dataset(qtbot, page, data=write_rows(tmp_path))
    draft = page.session.draft
    assert page.mapping.offer.isVisible()
    assert page.mapping.offered.text() == "question looks like the prompt, solution like the answer."
    problem, column = page.mapping.problem, page.mapping.columns["prompt_feature"].control
    assert problem.text().startswith("Prompt: ") and "There is no column prompt" in problem.text()
    assert column.property("problem")
    assert page.session.service.of("preview_counts") == [], "there are no prompts to count"
    page.mapping.use.click()
    assert {key: draft.value(key) for key in MAPPED} == MAPPED and "prompt_feature: question" in draft.as_yaml()
    qtbot.waitUntil(lambda: not page.dataset.faults and not page.mapping.offer.isVisible())
    assert not problem.isVisible() and not column.property("problem")


def test_a_missing_column_is_told_once(session: Session) -> None:
    """Chats without a column prompt had two problems: no such column, and row 1 has none."""
    dataset = session.dataset
    dataset._count_faults = [ConfigProblem("prompt_feature", "The column prompt of row 1 is missing or empty.")]
    assert dataset.faults == dataset._count_faults
    of_columns = ConfigProblem("prompt_feature", "There is no column prompt.")
    dataset.preview = {"faults": [of_columns.to_dict()]}
    assert dataset.faults == [of_columns]


def test_column_menus(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    show_dataset(qtbot, page, data=write_rows(tmp_path), **MAPPED)
    menus = {key: widget.control for key, widget in page.mapping.columns.items()}
    assert menu_texts(menus["prompt_feature"]) == ["question", "solution", "id"]
    assert menu_texts(menus["system_feature"]) == ["None", "question", "solution", "id"]
    assert menus["answer_feature"].currentText() == "solution" and menus["type_feature"].currentText() == "None"
    choose(menus["type_feature"], "id")
    assert page.session.draft.value("type_feature") == "id"
    choose(menus["type_feature"], "None")
    assert page.session.draft.value("type_feature") == "type"
    qtbot.waitUntil(lambda: page.model.columnCount() == 5)
    heads = [page.model.headerData(index, Qt.Orientation.Horizontal) for index in range(5)]
    assert heads == ["Row", "Tokens", "question → prompt", "solution → answer", "id"]


def test_rows_of_a_single_file_are_held_out_by_a_click(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    show_dataset(qtbot, page, data=write_rows(tmp_path, 20), **MAPPED)
    assert not any(field.isVisible() for field in (page.mapping.config, *page.mapping.splits.values()))
    assert page.mapping.columns["prompt_feature"].isVisible() and page.nothing_held_out.isVisible()
    page.hold_out.click()
    qtbot.waitUntil(lambda: "valid" in page.dataset.splits)
    assert page.dataset.splits["valid"]["rows"] == 2 and not page.nothing_held_out.isVisible()


def test_splits_are_those_of_the_folder(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    for name, count in (("train", 9), ("validation", 2), ("exam", 4)):
        write_rows(tmp_path, count, f"{name}.jsonl")
    show_dataset(qtbot, page, data=str(tmp_path), **MAPPED)
    valid, test = page.mapping.splits["valid_split"].control, page.mapping.splits["test_split"].control
    assert valid.currentText() == "validation" and valid.currentData() == "valid", "found under its other name"
    assert test.currentText() == "None" and menu_texts(test) == ["None", "exam", "train", "validation"]
    choose(test, "exam")
    qtbot.waitUntil(lambda: "test" in page.dataset.splits)
    assert page.session.draft.value("test_split") == "exam" and test.currentText() == "exam"
    assert menu_texts(test) == ["Default", "exam", "train", "validation"]
    assert menu_texts(page.which) == ["Train · 9", "Valid · 2", "Test · 4"]
    choose(page.which, "Test · 4")
    assert page.model.rowCount() == 4 and page.counts.numbers["rows"].text() == "4"


def test_broken_file(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": \n')
    show_dataset(qtbot, page, "failed", data=str(file))
    problem = page.path._problem.text()  # a long path is cut in its middle
    assert problem.startswith("The JSON in line 2 of /") and "rows.jsonl is broken: " in problem
    assert page.instead.isVisible() and page.path.control.isEnabled() and "above" in page.instead.text()
    write_rows(tmp_path)
    page.dataset.refresh(again=True)
    qtbot.waitUntil(lambda: page.dataset.state == "ready")
    assert not page.path._problem.isVisible() and page.model.rowCount() == 12


def test_row_detail(qtbot, page: DatasetPage, tmp_path: Path, model: Path) -> None:
    show_dataset(qtbot, page, data=write_rows(tmp_path), model=str(model), **MAPPED)
    page.table.selectRow(3)
    qtbot.waitUntil(lambda: page.detail.title.text() == "Row 4")
    text = "<|im_start|>user\nWhat is 3 plus 3?<|im_end|>\n<|im_start|>assistant\n"
    assert page.detail.pane.toPlainText() == text
    cursor = QTextCursor(page.detail.pane.document())
    shades = {}
    for index in (1, len("<|im_start|>") + 2):
        cursor.setPosition(index)
        shades[index] = cursor.charFormat().background().color()
    assert shades[1] == theme.palette().selection != shades[len("<|im_start|>") + 2], "a special token is a chip"
    assert page.detail.about.text().endswith("Answer: 6") and " of 1,536" in page.detail.about.text()
    page.detail.views.buttons["ids"].click()
    ids = page.detail.pane.toPlainText().split()
    assert ids[0] == "2" and f"{len(ids)} tokens of" in page.detail.about.text()
    page.detail.views.buttons["columns"].click()
    assert page.detail.pane.toPlainText() == "question\nWhat is 3 plus 3?\n\nsolution\n6\n\nid\n3"


def test_pictures_of_rows(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    Image.new("RGB", (8, 4)).save(tmp_path / "red.png")
    file = Path(write_rows(tmp_path, 3))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["images"] = ["red.png", "red.png"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show_dataset(qtbot, page, data=str(file), **MAPPED)
    qtbot.waitUntil(lambda: page.model.columnCount() == 7 and page.model.rowCount() == 3)
    paths = [str(tmp_path / "red.png")] * 2
    assert [page.model.index(row, 2).data(PICTURES_ROLE) for row in range(3)] == [[], paths, []]
    assert page.model.index(1, 2).data(Qt.ItemDataRole.AccessibleTextRole) == "red.png, red.png"
    assert page.table.selected_ranges() == [range(1)], "the whole row, the new column too"
    page.table.selectRow(1)
    qtbot.waitUntil(lambda: page.detail.pictures.paths == paths)
    picture = {"text": "<|image|> × 6", "ids": [7] * 6, "special": True, "learnt": True}
    read = {"tokens": 12, "pieces": [picture, picture | {"text": "Add", "ids": [5], "special": False}]}
    read["images"] = [{"path": path, "tokens": 3} for path in paths]
    page.detail.show_row(1, {**(page.detail._preview or {}), **read, "faults": []})
    assert (
        page.detail.about.text().startswith("12 tokens of ") and "   2 pictures: 6 tokens" in page.detail.about.text()
    )
    assert page.detail.pane.toPlainText().startswith("<|image|> × 6Add")
    page.table.selectRow(2)
    qtbot.waitUntil(lambda: not page.detail.pictures.paths)


def test_rows_are_requested_when_visible(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    show_dataset(qtbot, page, data=write_rows(tmp_path, 3000), **MAPPED)
    asked = page.session.service
    qtbot.waitUntil(lambda: page.model.index(0, 2).data() == "What is 0 plus 0?")
    assert {with_["numbers"][0] for with_ in asked.of("preview_rows")} == {0}
    assert page.model.index(2999, 2).data() == PLACEHOLDER
    page.table.scrollToBottom()
    qtbot.waitUntil(lambda: page.model.index(2999, 2).data() == "What is 2999 plus 2999?")
    assert {with_["numbers"][0] for with_ in asked.of("preview_rows")} == {0, 2900}
    assert all(len(with_["numbers"]) == CHUNK for with_ in asked.of("preview_rows"))


def test_rows_that_were_never_in_view_are_copied_whole(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    show_dataset(qtbot, page, data=write_rows(tmp_path, 6050), **MAPPED)
    qtbot.waitUntil(lambda: page.model.index(0, 2).data() == "What is 0 plus 0?")
    said = list[str]()
    page.session.message.connect(said.append)
    QGuiApplication.clipboard().clear()
    page.table.selectAll()
    page.table.copy()
    assert said == ["At most 6,000 rows can be copied at once."] and not QGuiApplication.clipboard().text()
    page.table.selectRow(250)
    page.table.selectionModel().select(
        QItemSelection(page.model.index(250, 0), page.model.index(449, 4)), QItemSelectionModel.SelectionFlag.Select
    )
    qtbot.keyClick(page.table, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    page.table.selectRow(0)  # too late for the copy
    qtbot.waitUntil(lambda: bool(QGuiApplication.clipboard().text()))
    head, *lines = QGuiApplication.clipboard().text().splitlines()
    assert head.split("\t")[0] == "Row" and len(lines) == 200 and PLACEHOLDER not in "".join(lines)
    assert lines[-1].split("\t")[:3] == ["450", "", "What is 449 plus 449?"]


def test_prompts_by_how_often_a_run_solved_them(
    qtbot, page: DatasetPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    data, run = write_rows(tmp_path, 5), tmp_path / "runs/first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"data: {data}\nsuccess_reward_threshold: 2\n")
    groups = [(3, [2, 0]), (1, [2, 2]), (4, [1, 0]), (0, [2, 2]), (0, [0, 0]), (3, [0, 2.5]), (4, [None, 1])]
    lines = [
        {"step": step, "prompt": f"What is {n} plus {n}?", "completions": [{"reward": reward} for reward in rewards]}
        for step, (n, rewards) in enumerate(groups, 1)
    ]
    (run / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    show_dataset(qtbot, page, data=data, **MAPPED)
    qtbot.waitUntil(page.difficulty.isVisible)
    texts = [page.difficulty.itemText(i) for i in range(page.difficulty.count())]
    kinds = ["Never solved · 1", "Sometimes · 1", "Always · 1", "Noisy · 1"]
    assert texts == ["File order", "Hardest first · 4", *kinds] and "first" in page.difficulty.toolTip()
    qtbot.waitUntil(lambda: page.model.index(2, 3).data() == "What is 2 plus 2?")
    assert page.model.index(2, 2).data() == "", "not sampled"
    page.difficulty.setCurrentIndex(1)
    page.difficulty.activated.emit(1)
    qtbot.waitUntil(lambda: page.model.index(3, 3).data() == "What is 1 plus 1?")
    shown = [[page.model.index(row, column).data() for column in (0, 2)] for row in range(4)]
    assert shown == [["5", "0 of 3"], ["1", "2 of 4"], ["4", "2 of 4"], ["2", "2 of 2"]]
    page.table.selectRow(1)
    assert page.try_button.text() == "Try rewards on row 1"
    qtbot.waitUntil(lambda: page.detail.title.text() == "Row 1")


def test_nothing_is_told_of_a_dataset_while_another_is_read(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    show_dataset(qtbot, page, data=write_rows(tmp_path), **MAPPED)
    lines = list[str]()
    page.dataset.changed.connect(lambda: lines.append(page.dataset.summary_line()[0]))
    page.session.draft.set("data", write_rows(tmp_path, 1, "more.jsonl"))
    qtbot.waitUntil(lambda: page.dataset.state == "ready" and lines[-1:] != lines[:1])
    assert lines[0] == "Reading the dataset…" and lines[-1].startswith("1 row ·")


def test_line_on_train(qtbot, session: Session, tmp_path: Path, model: Path) -> None:
    session.draft.update({"data": write_rows(tmp_path), "model": str(model), "max_seq_length": 530, **MAPPED})
    line = qtbot.show(DatasetLine(session.dataset))
    assert line.text() == "" and session.service.asked == [], "not at once: the window may still be opening"
    qtbot.waitUntil(lambda: "too long" in line.text())
    assert line.text() == "12 rows · question → prompt, solution → answer · 12 too long"
    assert session.service.of("preview_counts")[0]["most"] == datasets.SAMPLE_SIZE
    with qtbot.waitSignal(line.clicked):
        line.click()
    session.draft.update({"prompt_feature": "prompt"})
    qtbot.waitUntil(lambda: line.text().startswith("There is no column prompt"))
    line.hide()
    before = len(session.service.asked)
    session.draft.update(MAPPED)
    qtbot.wait(30)
    assert len(session.service.asked) == before


def test_try_rewards(qtbot, page: DatasetPage, tmp_path: Path) -> None:
    write_rows(tmp_path, 12, "train.jsonl")
    write_rows(tmp_path, 5, "valid.jsonl")
    show_dataset(qtbot, page, data=str(tmp_path), **MAPPED)
    assert page.try_button.text() == "Try rewards on row 1" and page.enabled_actions() == {"try_rows": True}
    pages: list[str] = []
    requested: list[list[int]] = []
    page.session.page_requested.connect(pages.append)
    page.session.reward_rows_requested.connect(requested.append)
    flags = QItemSelectionModel.SelectionFlag.Select | QItemSelectionModel.SelectionFlag.Rows
    for row in (3, 4, 8):
        page.table.selectionModel().select(page.model.index(row, 0), flags)
    assert page.try_button.text() == "Try rewards on 4 rows"
    page.try_button.click()
    assert pages == ["rewards"] and requested == [[1, 4, 5, 9]]
    page.table.selectAll()
    assert page.table.selected_ranges() == [range(12)]
    page.dataset.set_split("valid")
    assert not page.try_button.isEnabled() and "training split" in page.try_button.toolTip()
    show_dataset(qtbot, page, "failed", data=str(tmp_path / "nothing.jsonl"))
    assert page.try_button.isHidden() and page.enabled_actions() == {"try_rows": False}
