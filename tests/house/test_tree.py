"""Every module has a docstring, and documents name files that exist. `make lint` runs ruff and pyright."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for program in ("app", "backend") for path in (ROOT / program).rglob("*.py"))

DOCSTRING = re.compile(r'(?:#.*\n|\s)*r?"""\s*\S')


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in SOURCES if not DOCSTRING.match(path.read_text("utf-8"))]
    assert not silent


def test_every_source_file_that_a_document_names_exists() -> None:
    paths = re.compile(r"`((?:app|backend|packaging|resources|tests)/[\w/]+(?:\.py|/))")
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {(document.name, path) for document in documents for path in paths.findall(document.read_text("utf-8"))}
    assert len(named) > 50
    assert not [place for place in sorted(named) if not (ROOT / place[1]).exists()]
