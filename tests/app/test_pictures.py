"""Pictures of a prompt: read scaled and turned, named for a screen reader, reached by keyboard, missing ones said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PySide6.QtCore import QSize, Qt
from PySide6.QtTest import QTest

from app.state.reward_bench import without_scores
from app.widgets.completion_detail import CompletionDetail
from app.widgets.pictures import PictureButton, PictureDialog, fitted, pictures, read_picture
from app.widgets.side_by_side import SideBySide
from backend.rewards.bench import group_of, line_of
from backend.runs.completion_rows import images_of, prompt_key
from backend.trainer.telemetry import group_row
from backend.types import Completion, Group, Problem


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


def test_images_of_a_row_from_elsewhere():
    assert images_of({}) == images_of({"images": "a.png"}) == []
    assert images_of({"images": ["a.png", None, 3]}) == ["a.png"]
