"""What was measured, kept beside the document that shows it: docs/performance.json, and the tables of docs/performance.md.

The document's prose is written by hand; everything between `<!-- measured: NAME -->` and `<!-- end -->` is written here
from the JSON alone, so no number in it can differ from what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import re
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from backend.bench import peers, report
from backend.spec.places import project_root

MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def document() -> Path:
    return project_root() / "docs" / "performance.md"


def data() -> Path:
    return document().with_suffix(".json")


def read() -> dict[str, Any]:
    return json.loads(data().read_text("utf-8")) if data().exists() else {}


def keep(section: str, results: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Put a section's results into the JSON, in place of those it had, and write the document's tables anew."""
    held = read() | {section: {"about": about, "results": results}}
    data().write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    document().write_text(rendered(document().read_text("utf-8"), held), encoding="utf-8")


def rendered(text: str, held: dict[str, Any]) -> str:
    """The document with its marked places filled from what is held."""

    def fill(found: re.Match[str]) -> str:
        before, name, after = found.groups()
        return f"{before}\n{_filling(name, held)}\n{after}"

    return MARKED.sub(fill, text)


def _filling(name: str, held: dict[str, Any]) -> str:
    if name == "differs":
        return report.differs()
    if name not in held:
        return "Not measured yet.\n"
    section = held[name]
    tables = "\n".join(table.markdown() for table in report.SECTIONS[name](section["results"]))
    return f"{tables}\n{_told(section['about'])}\n"


def _told(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    rounds = f"medians of {about['rounds']} after {about['warm_up']} to warm up"
    return f"*{about['date']}: {about['machine']}; {rounds}; {versions}. {about['blas']}*"


def about(rounds: int, warm_up: int) -> dict[str, Any]:
    """When, where and with what."""
    from backend.engine.cpu import blas

    ours = {name: version(name) for name in ("mlx", "mlx-lm")}
    theirs = {name: number for name, number in peers.versions().items() if name in peers.PEERS}
    return {
        "date": date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "rounds": rounds,
        "warm_up": warm_up,
        "versions": {"Python": platform.python_version()} | ours | theirs,
        "blas": blas.prepare(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
