"""The shape of the tree: few entries at the top, one name for one thing, files short enough to read."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for program in ("app", "backend") for path in (ROOT / program).rglob("*.py"))

LONGEST = 400
TABLES = {"backend/training/losses.py"}
"""Longer than LONGEST on purpose: one table of losses."""


CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
DOCSTRING = re.compile(r'(?:#.*\n|\s)*r?"""\s*\S')
"""Patterns, and not a parsed tree: to parse every module takes a second, and one that a text of a program matches too is only stricter."""


@pytest.mark.parametrize("program", ["app", "backend"])
def test_at_most_19_entries_at_the_top(program: str) -> None:
    entries = [path for path in (ROOT / program).iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 19, sorted(path.name for path in entries)


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for name in CLASS.findall(path.read_text("utf-8")):
            places[name].append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_files_are_short_enough_to_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert not {file: lines for file, lines in lengths.items() if lines > LONGEST and file not in TABLES}


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in SOURCES if not DOCSTRING.match(path.read_text("utf-8"))]
    assert not silent


def test_every_package_has_an_init_file() -> None:
    """setuptools packs only folders that have one."""
    folders = {path.parent for path in SOURCES}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def tree_of_readme() -> list[Path]:
    """The files and folders that the first column of README's tree names; two spaces of indent are one folder deeper."""
    block = (ROOT / "README.md").read_text("utf-8").split("## The tree")[1].split("```")[1]
    above: list[Path] = []
    named: list[Path] = []
    for column in (line[:24].rstrip() for line in block.splitlines()):
        if names := column.replace(",", " ").split():
            above = above[: (len(column) - len(column.lstrip())) // 2]
            home = above[-1] if above else ROOT
            named += [home / name for name in names]
            above.append(named[-1])
    return named


def test_readmes_tree_names_what_there_is() -> None:
    named = tree_of_readme()
    assert len(named) > 50
    assert not [str(path) for path in named if not path.exists() and not path.with_suffix(".py").exists()]


def test_every_source_file_that_a_document_names_exists() -> None:
    paths = re.compile(r"`((?:app|backend|packaging|resources|tests)/[\w/]+(?:\.py|/))")
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {(document.name, path) for document in documents for path in paths.findall(document.read_text("utf-8"))}
    assert len(named) > 50
    assert not [place for place in sorted(named) if not (ROOT / place[1]).exists()]
