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

from backend.utils.places import project_root, resources

OURS = "grpo-studio"
LONGEST_LICENCE = 60
"""Characters of the metadata's field License that can be a name; longer ones are the text itself."""
_REQUIREMENT = re.compile(r"[\w.-]+(\[[^\]]*\])?")
"""The name of a requirement, with the extras that it asks for: mlx[cpu]."""
_LICENCE_FILE = re.compile(r"(^|/)(licen[cs]e|copying|notice|authors|copyright)[^/]*$", re.IGNORECASE)

GENERAL_TEXTS = {
    "Apache": ("Apache-2.0.txt",),
    "LGPL-3": ("LGPL-3.0.txt", "GPL-3.0.txt"),  # the first adds to the second
}
"""What a licence's name contains → its text in resources/licences/, for packages that bring none."""


@dataclass(frozen=True, slots=True)
class Component:
    """`licence` is its name, as SPDX has it where the package says so; `text` is all of the licence's files, "" where it ships none."""

    name: str
    version: str
    licence: str
    text: str


@cache
def components() -> tuple[Component, ...]:
    """GRPO Studio, then everything it needs here, by name, then what a frozen app brings besides, then Python."""
    ours, *others = (component(name) for name in needed())
    system = _parts_of_system()
    python = system.pop("Python", None) or Component("Python", platform.python_version(), "PSF-2.0", sys.copyright)
    return (ours, *sorted(others, key=lambda part: part.name.lower()), *system.values(), python)


def _parts_of_system() -> dict[str, Component]:
    """By name, what a frozen app has from the system that built it (`packaging/system_licences.py`); from source nothing."""
    found: dict[str, Component] = {}
    for file in sorted((project_root() / "system_licences").glob("*.txt")):
        name, _, version = file.stem.partition("_")
        licence = "PSF-2.0" if name == "Python" else "see its text"
        found[name] = Component(name, version, licence, file.read_text(encoding="utf-8", errors="replace").strip())
    return found


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
    """The licence files of a package, and the field License where that is a text; nothing twice. Where it ships neither, the general
    text of its licence, if we have it."""
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in _licence_files(distribution)]
    field = _field(distribution, "License")
    if not any(texts) and len(field) > LONGEST_LICENCE:
        texts = [field.strip()]
    if not any(texts):
        named = _licence(distribution)
        texts = [_general_text(file) for mark, files in GENERAL_TEXTS.items() if mark in named for file in files]
    return list(dict.fromkeys(text for text in texts if text))


def _licence_files(distribution: metadata.Distribution) -> list[Path]:
    # The folder is listed, and not RECORD read, which the frozen app has not. A package's code may have files of such names that are not
    # its licence.
    wanted = _plain(distribution.metadata["Name"])
    return [
        path
        for folder in sorted(Path(str(distribution.locate_file(""))).glob("*.dist-info"))
        if _plain(folder.name.partition("-")[0]) == wanted
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _LICENCE_FILE.search(path.relative_to(folder).as_posix())
    ]


def _general_text(file: str) -> str:
    return (resources() / "licences" / file).read_text(encoding="utf-8").strip()


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
