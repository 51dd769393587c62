"""The guide's text: a paragraph for all that exists and for nothing else, links that lead somewhere, settings that are
valid."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from app.pages import PAGES
from app.state import guide
from app.state.charts import CHARTS
from backend.config.config import SETTINGS, parse
from backend.trainer.health.rules import RULES
from backend.utils.documents import parse_yaml

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
        ("chart", [guide.chart_anchor(chart.title) for chart in CHARTS]),
        ("health", list(RULES)),
    ],
)
def test_everything_has_one_paragraph_and_nothing_else_has(kind: str, all_of_them: list[str]) -> None:
    assert explained(kind) == Counter(all_of_them)
    assert set(ANCHORS.values()) == {1} and len(ANCHORS) == len({place.partition("#")[2] for place in ANCHORS})


def test_paragraphs_have_the_names_that_the_window_shows() -> None:
    for key, about in SETTINGS.items():
        place = guide.place_of_setting(key)
        assert passage_at(place).title == about.label
        file, _, anchor = place.partition("#")
        heading = f'<a id="{anchor}"></a>{about.label} (`{key}`)\n'
        assert heading in (guide.folder() / file).read_text(encoding="utf-8")
    for chart in CHARTS:
        assert passage_at(guide.place_of_chart(chart.title)).title == chart.title
    for code, rule in RULES.items():
        assert passage_at(guide.place_of_rule(code)).title == rule.title


def test_every_file_of_the_guide_is_a_chapter() -> None:
    assert sorted(FILES) == sorted(file.name for file in guide.folder().iterdir())


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name: str) -> None:
    text = (guide.folder() / name).read_text(encoding="utf-8")
    places = [guide.resolved(link, name) for link in re.findall(r"\]\(([^)]+)\)", text)]
    pages = {f"{guide.PAGE}{page.key}" for page in PAGES}
    wrong = [place for place in places if not (place in pages or place.startswith("https://") or _is_a_place(place))]
    assert places and not wrong


def _is_a_place(place: str) -> bool:
    file, _, anchor = place.partition("#")
    return (guide.folder() / file).is_file() and (not anchor or place in ANCHORS)


def blocks(language: str) -> list[str]:
    texts = [(guide.folder() / name).read_text(encoding="utf-8") for name in FILES]
    return [block for text in texts for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def test_settings_in_recipes_are_valid() -> None:
    assert len(blocks("yaml")) >= 4
    for block in blocks("yaml"):
        settings = {"model": "m", "data": "d.jsonl"} | parse_yaml(block, "the recipe", "")
        assert set(settings) <= set(SETTINGS)
        parse(settings)
