"""The glossary: the terms of docs/glossary.md, every chart and every setting, each with its plain sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.state.charts import CHARTS
from backend.config.config import SETTINGS
from backend.config.other_programs.translation import other_names
from backend.utils.places import project_root

GLOSSARY = project_root() / "docs" / "glossary.md"
CHART, SETTING = "Charts", "Settings"
_SECTION = re.compile(r"^## (?P<title>.+)$")
_ENTRY = re.compile(r"^- \*\*(?P<term>.+?)\*\*: (?P<text>.+)$")


@dataclass(frozen=True, slots=True)
class GlossaryEntry:
    """One term. `section` is the heading it stands under, `also` other words by which it is found."""

    term: str
    text: str
    section: str
    also: str = ""

    def matches(self, words: Sequence[str]) -> bool:
        """Whether every one of the lower-case words occurs in it."""
        text = f"{self.term} {self.also} {self.text}".lower()
        return all(word in text for word in words)


def glossary() -> list[GlossaryEntry]:
    """All entries, by section. Charts and settings are described where they are declared, and so are never missing here."""
    return [*_terms(), *_charts(), *_settings()]


def found_terms(entries: Sequence[GlossaryEntry], typed: str) -> list[GlossaryEntry]:
    """The entries that have all words that were typed, those with the words in their term first."""
    words = typed.lower().split()
    matching = [entry for entry in entries if entry.matches(words)]
    return (
        sorted(matching, key=lambda entry: not all(word in entry.term.lower() for word in words)) if words else matching
    )


def _terms() -> Iterator[GlossaryEntry]:
    section = ""
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        if heading := _SECTION.match(line):
            section = heading["title"]
        elif entry := _ENTRY.match(line):
            yield GlossaryEntry(entry["term"], entry["text"][:1].upper() + entry["text"][1:], section)


def _charts() -> Iterator[GlossaryEntry]:
    for chart in CHARTS:
        metrics = " ".join([*(name for curve in chart.curves for name in curve.metrics), chart.pattern])
        yield GlossaryEntry(chart.title, chart.help, CHART, metrics)


def _settings() -> Iterator[GlossaryEntry]:
    for key, about in SETTINGS.items():
        yield GlossaryEntry(about.label, about.help, SETTING, " ".join([key, *other_names(key)]))
