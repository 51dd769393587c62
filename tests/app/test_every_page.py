"""Every page of the window: that each setting is a stop of Tab, what the menus have of it, and how long showing it
blocks the event loop.

The walk through all of it by keyboard is in test_by_keyboard.py."""

import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QApplication, QLabel, QWidget

from app import page_drawing, theme
from app.menus import MENUS
from app.page_drawing import draw_page
from app.pages import PAGES, PageEntry
from app.state.prefs import Prefs
from app.state.session import Session
from app.window import Window
from tests.support.diaries import recording
from tests.support.windows import ServiceByHand, active_window

PAGE_KEYS = [page.key for page in PAGES]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory, qapp: QApplication) -> Iterator[Window]:
    """One window for all: making its pages is most of what these tests take."""
    session = Session(Prefs(tmp_path_factory.mktemp("pages") / "prefs"))
    session.service = ServiceByHand()  # pyright: ignore
    window = Window(session)
    session.restore()
    window.resize(1280, 800)
    window.show()
    yield window
    session.close_run()
    window.deleteLater()


@pytest.fixture
def new_window(session: Session, qtbot) -> Iterator[Window]:
    with active_window(session, qtbot, restored=True) as window:
        yield window


def test_every_menu_entry_names_an_existing_slot(window: Window):
    for entry in (entry for menu in MENUS.values() for entry in menu if entry):
        if entry.page:
            window.show_page(entry.page)
        owner = window.pages[entry.page] if entry.page else window
        assert not entry.slot or callable(attrgetter(entry.slot)(owner)), entry.name


def test_no_plain_label_shows_markup(window: Window):
    for key in PAGE_KEYS:
        window.show_page(key)
    plain = [label for label in window.findChildren(QLabel) if label.textFormat() == Qt.TextFormat.PlainText]
    assert "Trains every weight" in window.pages["train"].launch.details.text()
    assert [label.text() for label in plain if re.search(r"</?(p|b|br|a|span)\b|&nbsp;", label.text())] == []


def test_opening_makes_only_the_page(new_window: Window, apart: Path, qtbot):
    window = new_window
    window.session.open_run(recording("healthy-grpo").unpack(apart / "runs" / "healthy").path)
    window.show_page("monitor")
    plots, run = window.pages["monitor"].grid.plots, window.session.run
    assert not any(plot.is_built for plot in plots)
    qtbot.waitUntil(lambda: run is not None and run.read_share is None and run.step > 0)
    # What scrolls into view has its title at once.
    qtbot.waitUntil(lambda: all(plot.is_built for plot in plots if not plot.isHidden()))
    in_grid = [plot for plot in plots if not plot.isHidden()]
    assert 0 < sum(plot.view is not None for plot in plots) < len(in_grid) // 2, "curves are drawn in view alone"


def broken(entry: PageEntry) -> None:
    raise ImportError("no such module")


def test_faults_of_a_page(new_window: Window, monkeypatch) -> None:
    window = new_window
    window.resize(*page_drawing.SIZE)
    assert draw_page(window, "monitor", "Monitor")["fault"] == ""
    monkeypatch.setattr(PageEntry, "load", lambda entry: lambda session, parent: QWidget(parent))
    assert "picture is empty" in draw_page(window, "runs", "Runs")["fault"]
    monkeypatch.setattr(PageEntry, "load", broken)
    assert draw_page(window, "sweeps", "Sweeps")["fault"] == "ImportError: no such module"


GROUNDS = ("window", "card", "field")  # what is behind the content of a page: the page itself, a card, an editor
ALL_GROUNDS = (*GROUNDS, "sidebar", "hover", "selection")
TEXTS = ("text", "muted", "accent", "good", "warning", "bad", "kl", "advantage_above", "advantage_below")
USES: dict[float, dict[str, tuple[str, ...]]] = {
    4.5: dict.fromkeys(TEXTS, ALL_GROUNDS)
    | {"clip": GROUNDS, "length": GROUNDS, "placeholder": ("card", "field"), "accent_text": ("accent", "accent_hover")},
    # Edges of fields, stars that are not lit, icons, curves
    3.0: {"outline": GROUNDS} | dict.fromkeys(("placeholder", "clip", "length"), (*ALL_GROUNDS, "plot_background")),
}
"""The least contrast of texts and of parts: role → the backgrounds it stands on."""


def contrast(first: QColor, second: QColor) -> float:
    """WCAG 2.1's ratio, 1 to 21."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: QColor) -> float:
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.getRgbF()[:3]]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("colours", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_contrast(colours: theme.Palette) -> None:
    uses = [(least, role, ground) for least, of_roles in USES.items() for role in of_roles for ground in of_roles[role]]
    ratios = {use: contrast(getattr(colours, use[1]), getattr(colours, use[2])) for use in uses}
    assert {use: ratio for use, ratio in ratios.items() if ratio < use[0]} == {}


FORBIDDEN = ("mlx", "mlx_lm", "transformers", "datasets", "torch", "pyqtgraph", "numpy", "huggingface_hub")

SCRIPT = """
import sys, time
begin = time.process_time()
from PySide6.QtWidgets import QApplication
from app import theme
from app.state.session import Session
from app.window import Window

app = QApplication([])
theme.apply(app, "light")
session = Session()
session.restore()
window = Window(session)
window.show_page("train")
window.show()
app.processEvents()
window.grab()
print("seconds", time.process_time() - begin)
print("loaded", *sorted({name.split(".")[0] for name in sys.modules}))

import gc
from PySide6.QtCore import QObject
from app.pages import read_ahead

read_ahead().join()
print("ahead", *sorted({name.split(".")[0] for name in sys.modules}))
found = [each for each in gc.get_objects() if isinstance(each, QObject) and each.thread() is not app.thread()]
print("astray", *(type(each).__name__ for each in found))

# An interpreter that ends with a window alive takes Qt apart in any order, and may crash over it.
import shiboken6
del found
window.close()
shiboken6.delete(window)
shiboken6.delete(session)
"""


def test_the_window_opens_without_the_engine_and_reads_ahead():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = dict((line + " ").split(" ", 1) for line in done.stdout.splitlines())
    assert not set(FORBIDDEN) & set(lines["loaded"].split())
    assert "pydantic" in lines["loaded"].split(), "the list of loaded modules is not one"
    # Two seconds are promised. Processor seconds, which other programs double at most.
    assert float(lines["seconds"]) < 4, lines["seconds"]
    assert "pyqtgraph" in lines["ahead"].split(), "the first click on Monitor would wait for it"
    assert not {"mlx", "transformers"} & set(lines["ahead"].split())
    assert lines["astray"].split() == [], "Qt's objects belong to the thread that makes them"
