"""The committed icon is what packaging/icon.py draws, in every size that macOS and Linux ask for."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from PySide6.QtGui import QImage

from app.widgets.basic.icons import app_icon

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "resources" / "icons" / "app"
SIZES = (16, 32, 48, 64, 128, 256, 512, 1024)
ICNS_SIDES = {
    b"ic07": 128,
    b"ic08": 256,
    b"ic09": 512,
    b"ic10": 1024,
    b"ic11": 32,
    b"ic12": 64,
    b"ic13": 256,
    b"ic14": 512,
}
"""Type of an entry in an .icns file → its side in pixels. ic11 to ic14 and ic10 are the doubled sizes of a Retina display."""


@pytest.fixture
def icon(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("icon")


def test_the_source_is_that_of_the_script(icon: ModuleType) -> None:
    assert (FOLDER / "app.svg").read_text("utf-8") == icon.svg(1024)
    assert icon.SIZES == SIZES


@pytest.mark.parametrize("size", SIZES)
def test_every_picture_has_its_size_clear_corners_and_all_four_colours(icon: ModuleType, size: int) -> None:
    picture = QImage(str(FOLDER / f"{size}.png"))
    assert (picture.width(), picture.height()) == (size, size)
    assert picture.pixelColor(0, 0).alpha() < 128
    seen = {picture.pixelColor(x, y).name() for x in range(size) for y in range(size)} if size <= 128 else None
    assert seen is None or {icon.INDIGO, icon.WHITE, icon.BLUE, icon.ORANGE} <= seen


def test_points_stay_on_the_body_and_off_the_curve(icon: ModuleType) -> None:
    for size in SIZES:
        how = icon.drawing(size)
        for x, y, radius in re.findall(r'cx="(\d+)" cy="(\d+)" r="(\d+)"', icon.svg(size)):
            low, high = how.margin + int(radius), icon.SIDE - how.margin - int(radius)
            assert low <= int(x) <= high and low <= int(y) <= high, size
            gap = min(((int(x) - cx) ** 2 + (int(y) - cy) ** 2) ** 0.5 for cx, cy in map(icon.on_curve, (t / 99 for t in range(100))))  # fmt: skip
            assert gap > int(radius) + how.line / 2 + 1, size


def test_the_icns_file_holds_every_size_as_png() -> None:
    content = (FOLDER / "app.icns").read_bytes()
    assert content[:4] == b"icns" and struct.unpack(">I", content[4:8]) == (len(content),)
    sides, at = {}, 8
    while at < len(content):
        kind, length = struct.unpack(">4sI", content[at : at + 8])
        if kind != b"TOC ":
            sides[kind] = QImage.fromData(content[at + 8 : at + length]).width()
        at += length
    assert sides == ICNS_SIDES


def test_the_window_has_it(qapp) -> None:
    assert {size.width() for size in app_icon().availableSizes()} == set(SIZES)
