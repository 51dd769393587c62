"""The guide: a paragraph for all that exists, links that lead somewhere, and the page that shows it."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest

from app.pages import PAGES
from app.pages.help.guide_page import GuidePage
from app.state import guide
from app.state.charts import CHARTS
from app.state.prefs import Prefs
from app.state.session import Session
from app.widgets.basic.labels import place_about
from app.widgets.charts.plot import Plot
from app.widgets.form.fields import Field
from app.window import Window
from backend.config.config import SETTINGS, parse
from backend.trainer.health.rules import RULES
from backend.trainer.health.watch import Episode
from backend.utils.documents import parse_yaml
from tests.support.windows import active_window

PASSAGES = [passage for chapter in guide.chapters() for passage in chapter]
FILES = [chapter[0].place for chapter in guide.chapters()]
ANCHORS = Counter(
    f"{name}#{anchor}"
    for name in FILES
    for anchor in re.findall(r'<a id="([^"]+)">', (guide.folder() / name).read_text(encoding="utf-8"))
)


def explained(kind: str) -> Counter[str]:
    """What paragraphs of a kind are about."""
    return Counter(place.partition(f"#{kind}-")[2] for place in ANCHORS if f"#{kind}-" in place)


def passage_at(place: str) -> guide.Passage:
    return next(passage for passage in PASSAGES if passage.place == place)


@pytest.mark.parametrize(
    ("kind", "all_of_them"),
    [
        ("setting", list(SETTINGS)),
        ("chart", [guide.place_of("chart", chart.title).partition("#chart-")[2] for chart in CHARTS]),
        ("health", list(RULES)),
    ],
)
def test_everything_has_one_paragraph_and_nothing_else_has(kind: str, all_of_them: list[str]) -> None:
    assert explained(kind) == Counter(all_of_them)
    assert set(ANCHORS.values()) == {1} and len(ANCHORS) == len({place.partition("#")[2] for place in ANCHORS})


def test_paragraphs_have_the_names_that_the_window_shows() -> None:
    for key, about in SETTINGS.items():
        place = guide.place_of("setting", key)
        assert passage_at(place).title == about.label
        file, _, anchor = place.partition("#")
        heading = f'<a id="{anchor}"></a>{about.label} (`{key}`)\n'
        assert heading in (guide.folder() / file).read_text(encoding="utf-8")
    for chart in CHARTS:
        assert passage_at(guide.place_of("chart", chart.title)).title == chart.title
    for code, rule in RULES.items():
        assert passage_at(guide.place_of("health", code)).title == rule.title


def test_every_file_of_the_guide_is_a_chapter() -> None:
    assert sorted(FILES) == sorted(["../judges.md", guide.GLOSSARY, *(file.name for file in guide.folder().iterdir())])


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name: str) -> None:
    text = (guide.folder() / name).read_text(encoding="utf-8")
    places = [guide.resolved(link, name) for link in re.findall(r"\]\(([^)]+)\)", text)]
    pages = {f"{guide.PAGE}{page.key}" for page in PAGES}
    wrong = [place for place in places if not (place in pages or place.startswith("https://") or _is_a_place(place))]
    assert places and not wrong
    assert "<img" not in guide.chapter_html(name), "pictures do not ship with the app"


def _is_a_place(place: str) -> bool:
    file, _, anchor = place.partition("#")
    return (guide.folder() / file).is_file() and (not anchor or place in ANCHORS or file not in FILES)


def blocks(language: str) -> list[str]:
    texts = [(guide.folder() / name).read_text(encoding="utf-8") for name in FILES]
    return [block for text in texts for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def test_settings_in_recipes_are_valid() -> None:
    assert len(blocks("yaml")) >= 3
    for block in blocks("yaml"):
        settings = {"model": "m", "data": "d.jsonl"} | parse_yaml(block, "the recipe", "")
        assert set(settings) <= set(SETTINGS)
        parse(settings)


BETA = guide.place_of("setting", "beta")
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
    places = [guide.place_of("setting", key) for key in SETTINGS]
    places += [guide.place_of("chart", chart.title) for chart in CHARTS] + [
        guide.place_of("health", code) for code in RULES
    ]
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
    assert window.current_page == "guide" and page.place == guide.place_of("setting", "iters")
    assert heading_at_top(page) == "Iterations (iters)" and page.view.hasFocus()
    window.menus["back"].trigger()
    assert window.current_page == "train"


def test_charts_and_findings_lead_there(window: Window) -> None:
    window.show_page("monitor")
    monitor = window.pages["monitor"]
    plots = monitor.findChildren(Plot)
    assert [place_about(plot) for plot in plots] == [guide.place_of("chart", plot.title) for plot in plots]
    next(action for action in plots[2].menu().actions() if action.text() == "About this chart").trigger()
    assert window.pages["guide"].place == guide.place_of("chart", plots[2].title)
    for code in RULES:
        cards = monitor.findings
        cards.show_episodes([Episode(code, "One.", "Two.", title=RULES[code].title, since=3)])
        next(link for link in cards._rows[0].links if link.text() == "Guide").click()
        assert window.pages["guide"].place == guide.place_of("health", code)


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
    assert page.place == guide.place_of("setting", "reference_model_path") and tree.hasFocus()
    page.search.take_focus()
    QTest.keyClicks(page.contents.search, "entropy collapse")
    assert tree.topLevelItem(0).text(0) == "Entropy collapse"
    QTest.keyClick(page.contents.search, Qt.Key.Key_Return)
    assert page.place == guide.place_of("health", "entropy_collapse") and page.contents.search.hasFocus()
    page.contents.search.clear()
    assert tree.topLevelItemCount() == len(guide.chapters())
    assert tree.currentItem().text(0) == "Entropy collapse"
