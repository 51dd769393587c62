"""What GRPO Studio consists of: every package that it needs and ships with, its version, its licence, and the licence's text.

Read from the packages' own metadata where the program runs, so that it is true of this installation: a checkout, a wheel or a frozen app.
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

OURS = "grpo-studio"
LONGEST_LICENCE = 60
"""Characters of the metadata's field License that can be a name; longer ones are the text itself."""
_REQUIREMENT = re.compile(r"[\w.-]+(\[[^\]]*\])?")
"""The name of a requirement, with the extras that it asks for: mlx[cpu]."""
_LICENCE_FILE = re.compile(r"(^|/)(licen[cs]e|copying|notice|authors|copyright)[^/]*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Component:
    """`licence` is its name, as SPDX has it where the package says so; `text` is all of the licence's files, "" where it ships none."""

    name: str
    version: str
    licence: str
    text: str


@cache
def components() -> tuple[Component, ...]:
    """GRPO Studio, then everything it needs here, by name, then Python."""
    ours, *others = (component(name) for name in needed())
    python = Component("Python", platform.python_version(), "PSF-2.0", sys.copyright)
    return (ours, *sorted(others, key=lambda part: part.name.lower()), python)


def needed(name: str = OURS) -> list[str]:
    """A distribution and all that it requires on this machine and is installed; of extras only those that a requirement asks for."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        wanted, *extras = (_plain(part) for part in re.split(r"[\[\],]", waiting.pop()) if part.strip())
        try:
            requirements = metadata.requires(wanted) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        lines = [line for line in requirements if _is_wanted(line, extras)]
        if wanted not in found or extras:
            waiting += [
                match.group() for line in lines if (match := _REQUIREMENT.match(line)) and match.group() not in seen
            ]
            seen.update(waiting)
        found[wanted] = None
    return list(found)


def _is_wanted(requirement: str, extras: list[str]) -> bool:
    """Whether a line of Requires-Dist counts: it belongs to no extra, or to one of these."""
    named = re.search(r"""extra\s*==\s*["']([^"']+)["']""", requirement)
    return named is None or _plain(named.group(1)) in extras


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def component(name: str) -> Component:
    """One installed distribution. Raises PackageNotFoundError."""
    distribution = metadata.distribution(name)
    return Component(
        distribution.metadata["Name"], distribution.version, _licence(distribution), "\n\n".join(_texts(distribution))
    )


def _licence(distribution: metadata.Distribution) -> str:
    named = _field(distribution, "License-Expression") or _field(distribution, "License")
    if named and len(named) <= LONGEST_LICENCE and "\n" not in named:
        return named
    classified = [line.rpartition(" :: ")[2] for line in _classifiers(distribution) if line.startswith("License ::")]
    return ", ".join(classified) or "see its text"


def _field(distribution: metadata.Distribution, name: str) -> str:
    values: list[str] = distribution.metadata.get_all(name) or []
    return values[0] if values else ""


def _classifiers(distribution: metadata.Distribution) -> list[str]:
    return distribution.metadata.get_all("Classifier") or []


def _texts(distribution: metadata.Distribution) -> list[str]:
    """The licence files of a package, and the field License where that is a text; nothing twice."""
    texts: list[str] = [text for file in distribution.files or () if (text := _read(distribution, str(file)))]
    field = _field(distribution, "License")
    if not texts and len(field) > LONGEST_LICENCE:
        texts = [field.strip()]
    return list(dict.fromkeys(texts))


def _read(distribution: metadata.Distribution, file: str) -> str:
    # Only files of the metadata's own folder: a package's code may have files of such names that are not its licence.
    if ".dist-info/" not in file or not _LICENCE_FILE.search(file):
        return ""
    try:
        return Path(str(distribution.locate_file(file))).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def system() -> str:
    """Name, release and processor of the system: "macOS 15.1, arm64"."""
    macos = platform.mac_ver()[0]
    name = f"macOS {macos}" if macos else f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{name}, {platform.machine()}"


@cache
def versions() -> dict[str, str]:
    """What a report about a problem has to name: our version, those of the packages that compute and draw, Python's and the system's."""
    found: dict[str, str] = {}
    for name in (OURS, "mlx", "mlx-lm", "transformers", "PySide6-Essentials"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"Python": platform.python_version(), "System": system()}
