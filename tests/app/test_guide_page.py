"""The Guide page: every link from a field, a chart or a finding lands on its paragraph; Back, search, themes,
keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest

from app.pages.help.guide_page import GuidePage
from app.state import guide
from app.state.charts import CHARTS
from app.state.prefs import Prefs
from app.state.session import Session
from app.widgets.basic.labels import place_about
from app.widgets.charts.plot import Plot
from app.widgets.form.field import Field
from app.window import Window
from backend.config.config import SETTINGS
from backend.trainer.health.rules import RULES
from backend.trainer.health.watch import Episode
from tests.support.windows import active_window

BETA = guide.place_of_setting("beta")
TITLES = {passage.place: passage.title for chapter in guide.chapters() for passage in chapter}


@pytest.fixture
def window(tmp_path: Path, qtbot) -> Iterator[Window]:
    with active_window(Session(Prefs(tmp_path / "prefs")), qtbot) as window:
        yield window


@pytest.fixture
def page(window: Window) -> GuidePage:
    window.show_page("guide")
    return window.pages["guide"]


def heading_at_top(page: GuidePage) -> str:
    """The first line of text that is in sight."""
    view = page.view
    lines = (view.cursorForPosition(QPoint(40, y)).block().text().strip() for y in range(1, 60, 4))
    return next((line for line in lines if line), "")


def test_links_scroll_to_paragraphs(page: GuidePage) -> None:
    places = [guide.place_of_setting(key) for key in SETTINGS]
    places += [guide.place_of_chart(chart.title) for chart in CHARTS] + [guide.place_of_rule(code) for code in RULES]
    wrong = []
    for place in places:
        page.show_place(place)
        if not heading_at_top(page).startswith(TITLES[place]):
            wrong.append((place, heading_at_top(page)))
    assert not wrong


def test_f1_in_a_field(window: Window) -> None:
    window.show_page("train")
    field: Field = window.pages["train"].form.fields["iters"]
    field.control.setFocus()
    QTest.keyClick(field.control, Qt.Key.Key_F1)
    page = window.pages["guide"]
    assert window.current_page == "guide" and page.place == guide.place_of_setting("iters")
    assert heading_at_top(page) == "Iterations (iters)" and page.view.hasFocus()
    window.menus["back"].trigger()
    assert window.current_page == "train"


def test_charts_and_findings_lead_there(window: Window) -> None:
    window.show_page("monitor")
    monitor = window.pages["monitor"]
    plots = monitor.findChildren(Plot)
    assert [place_about(plot) for plot in plots] == [guide.place_of_chart(plot.title) for plot in plots]
    next(action for action in plots[2].menu().actions() if action.text() == "About this chart").trigger()
    assert window.pages["guide"].place == guide.place_of_chart(plots[2].title)
    for code in RULES:
        cards = monitor.findings
        cards.show_episodes([Episode(code, RULES[code].title, "warning", "One.", "Two.", 3)])
        next(link for link in cards.rows()[0].links if link.text() == "Guide").click()
        assert window.pages["guide"].place == guide.place_of_rule(code)


def test_back(page: GuidePage) -> None:
    assert not page.back.isEnabled()
    page.show_place("grpo.md#dataset-format")
    page.follow("settings.md#setting-beta")
    assert page.place == BETA and page.back.isEnabled()
    page.view.verticalScrollBar().setValue(0)
    page.follow("../glossary.md")
    assert page.place == "../glossary.md" and "Advantage" in page.view.toPlainText()
    page.back.click()
    assert page.place == BETA and page.view.verticalScrollBar().value() == 0
    page.view.setFocus()
    QTest.keyClick(page.view, Qt.Key.Key_Backspace)
    assert heading_at_top(page) == "Dataset format"


def test_contents(page: GuidePage) -> None:
    tree = page.contents.tree
    page.show_place(BETA)
    assert tree.currentItem().text(0) == TITLES[BETA]
    tree.setFocus()
    QTest.keyClick(tree, Qt.Key.Key_Down)
    assert page.place == guide.place_of_setting("reference_model_path") and tree.hasFocus()
    page.find_text()
    QTest.keyClicks(page.contents.search, "entropy collapse")
    assert tree.topLevelItem(0).text(0) == "Entropy collapse"
    tree.setCurrentItem(tree.topLevelItem(0))
    assert page.place == guide.place_of_rule("entropy_collapse")
    page.contents.search.clear()
    assert tree.topLevelItemCount() == len(guide.chapters())
    assert tree.currentItem().text(0) == "Entropy collapse"
