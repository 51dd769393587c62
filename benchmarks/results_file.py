"""docs/performance.json, the measurements, and the tables of docs/performance.md that are rendered from it.

The document's prose is written by hand; everything between `<!-- measured: NAME -->` and `<!-- end -->` is rendered
from the JSON alone, so no number in it can differ from what was measured.
"""

import json
import os
import platform
import re
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from backend.bench import report as device_report
from backend.utils.machine import processor
from backend.utils.places import project_root
from benchmarks import peers, report

MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def document() -> Path:
    return project_root() / "docs" / "performance.md"


def data() -> Path:
    return document().with_suffix(".json")


def read() -> dict[str, Any]:
    return json.loads(data().read_text("utf-8")) if data().exists() else {}


def store(section: str, results: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Replace a section's results in the JSON and render the document's tables again."""
    sections = read() | {section: {"about": about, "results": results}}
    data().write_text(json.dumps(sections, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    document().write_text(rendered(document().read_text("utf-8"), sections), encoding="utf-8")


def rendered(text: str, sections: dict[str, Any]) -> str:
    """The document's text with every marked block filled from the sections."""

    def fill(block: re.Match[str]) -> str:
        before, name, after = block.groups()
        return f"{before}\n{_content(name, sections)}\n{after}"

    return MARKED.sub(fill, text)


def _content(name: str, sections: dict[str, Any]) -> str:
    if name == "differs":
        return report.differs()
    if name == "devices":
        # What `python -m backend bench device` wrote on several machines.
        files = sorted((document().parent / "devices").glob("*.json"))
        return device_report.markdown([device_report.read(path) for path in files])
    if name not in sections:
        return "Not measured yet.\n"
    section = sections[name]
    tables = "\n".join(table.markdown() for table in report.SECTIONS[name](section["results"]))
    about = section["about"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    rounds = f"medians of {about['rounds']} after {about['warm_up']} to warm up"
    return f"{tables}\n*{about['date']}: {about['machine']}; {rounds}; {versions}. {about['blas']}*\n"


def about(rounds: int, warm_up: int) -> dict[str, Any]:
    """Date, machine, rounds, versions and BLAS of a measurement."""
    from backend.engine import cpu_setup

    ours = {name: version(name) for name in ("mlx", "mlx-lm")}
    theirs = {name: number for name, number in peers.versions().items() if name in peers.PEERS}
    return {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "rounds": rounds,
        "warm_up": warm_up,
        "versions": {"Python": platform.python_version()} | ours | theirs,
        "blas": cpu_setup.load_openblas(),
    }
