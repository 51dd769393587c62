"""The self-test's report: what a person can send when something does not work. Nothing in it names the user, a path of
theirs, or a file."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.bench.device import this_machine
from backend.selftest.checks import CheckResult
from backend.trainer.telemetry import versions
from backend.utils.about import without_private
from backend.utils.command import is_bundled
from backend.utils.places import project_root
from backend.utils.whole_file import save_as

WIDTH = 110
SIGNS = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """`about` is what is known of machine and programs, by name; `results` are the checks, in the order they ran."""

    about: dict[str, Any]
    results: Sequence[CheckResult]

    @property
    def passed(self) -> bool:
        return not any(result.state == "failed" for result in self.results)

    @property
    def summary(self) -> str:
        failed = [result.name for result in self.results if result.state == "failed"]
        skipped = sum(result.state == "skipped" for result in self.results)
        seconds = sum(result.seconds for result in self.results)
        left_out = f", {skipped} skipped" if skipped else ""
        if failed:
            return f"{len(failed)} of {len(self.results)} checks failed{left_out}: {', '.join(failed)}."
        return f"Everything works: {len(self.results) - skipped} checks in {seconds:.0f} s{left_out}."

    def to_dict(self) -> dict[str, Any]:
        results = [result.to_dict() for result in self.results]
        return {"about": self.about, "passed": self.passed, "summary": self.summary, "checks": results}

    def text(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        checks = [line(result) for result in self.results]
        traces = [f"{result.name}\n{result.traceback}" for result in self.results if result.traceback]
        return "\n\n".join(["GRPO Studio self-test", "\n".join(lines), "\n".join(checks), self.summary, *traces]) + "\n"


def line(result: CheckResult) -> str:
    """One check as the terminal and the report show it."""
    head = f"{SIGNS[result.state]:8}{result.name:20}{result.seconds:6.1f} s  "
    return textwrap.fill(result.sentence, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def about() -> dict[str, Any]:
    """Versions, device, memory and system."""
    machine = this_machine()
    known = {name: number for name, number in versions().items() if name != "platform"}
    installed = "frozen app" if is_bundled() else "wheel" if (project_root() / "__init__.py").exists() else "checkout"
    known |= {"installed as": installed, "platform": platform.platform(), **machine}
    return {name: without_private(value) if isinstance(value, str) else value for name, value in known.items()}


def write(report: SelfTestReport, path: Path) -> Path:
    """Write the report as JSON to `path` and as text beside it; returns the text's path. Raises DiskError."""
    text = path.with_suffix(".txt")
    save_as(path, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    save_as(text, report.text())
    return text
