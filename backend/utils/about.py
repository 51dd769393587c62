"""What the program says about itself: versions, licences, and a problem report without private text."""

import getpass
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from backend.config.config import SETTINGS
from backend.utils.places import project_root, resources

HIDDEN = "…"
_SECRETS = (
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"),  # Hugging Face
    re.compile(r"\b(?:ghp|gho|ghs|github_pat)_\w{16,}"),  # GitHub
    re.compile(r"\bsk-[\w-]{16,}"),  # OpenAI and others
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user:password of an address
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"(?i)((?<=token[=:])|(?<=token[=:] )|(?<=password[=:])|(?<=password[=:] ))[^\s,;'\"]+"),
)
_OTHER_HOMES = re.compile(r"(?<![\w/])/(?:home|Users)/[^/\s'\":]+")
SHORTEST_NAME = 3  # shorter user names are left in place outside paths: ordinary words contain them
_ORDINARY = {"root", "user", "admin", "runner", "ubuntu"}  # user names that identify nobody


def without_private(text: str, folders: Iterable[str] = ()) -> str:
    """`text` without names, tokens and passwords. The home folder becomes ~, each of `folders` its last part."""
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        text = text.replace(folder, Path(folder).name)
    home = str(Path.home())
    if len(home) > 1:  # "/" is the home folder of some services
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = _OTHER_HOMES.sub(f"/home/{HIDDEN}", text)
    for secret in _SECRETS:
        text = secret.sub(HIDDEN, text)
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        name = ""
    if len(name) >= SHORTEST_NAME and name.lower() not in _ORDINARY:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text)
    return text


LOG_LINES = 60
TITLE = "GRPO Studio problem report"
EMPTY = "Write here what you did, what happened, and what you expected."


@dataclass(frozen=True, slots=True)
class ProblemFacts:
    """What went wrong: a sentence, the traceback or "", the end of the log and the settings in use."""

    sentence: str = EMPTY
    traceback: str = ""
    log: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def report(problem: ProblemFacts) -> str:
    """The report as plain text. Of changed settings it has no texts and lists, and of paths the last name."""
    settings: list[str] = []
    for key, value in problem.settings.items():
        setting = SETTINGS.get(key)
        if setting is None or value == setting.default:
            continue
        is_path = isinstance(value, str) and os.sep in value and value.startswith("~")
        if is_path or setting.kind in ("file", "hosts", "model", "adapter", "dataset"):
            value = str(value)
            if value.startswith((os.sep, "~", ".")) or value.count("/") > 1:  # no Hub id
                value = f"…/{Path(value).name}"
        elif setting.kind == "stages":  # with paths and texts inside
            value = f"({len(value)} stages)"
        elif setting.kind in ("prose", "mapping") or (setting.kind == "list" and value):
            value = f"({len(str(value))} characters)"
        settings.append(f"{key}: {value}")
    parts = {
        "Versions": "\n".join(f"{name}: {value}" for name, value in versions().items()),
        "Traceback": problem.traceback.strip(),
        "Last lines of the log": "\n".join(problem.log[-LOG_LINES:]).strip(),
        "Settings": "\n".join(settings),
    }
    sections = [f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts.items() if text]
    return without_private("\n\n".join([TITLE, problem.sentence, *sections])) + "\n"


OURS = "grpo-studio"
LONGEST_LICENCE = 60  # characters of the metadata's field License that can be a name; longer ones are the text itself
_LICENCE_FILE = re.compile(r"(^|/)(licen[cs]e|copying|notice|authors|copyright)[^/]*$", re.IGNORECASE)
GENERAL_TEXTS = {
    "Apache": ("Apache-2.0.txt",),
    "LGPL-3": ("LGPL-3.0.txt", "GPL-3.0.txt"),  # the first adds to the second
}  # part of a licence's name → its text in resources/licences/, for packages that bring none


@dataclass(frozen=True, slots=True)
class Component:
    """`licence` is its name, by SPDX where the package says so; `text` is all of the licence's files, or ""."""

    name: str
    version: str
    licence: str
    text: str


@cache
def components() -> tuple[Component, ...]:
    """GRPO Studio, then everything it needs here, by name, then what a frozen app brings besides, then Python."""
    ours, *others = (component(name) for name in needed())
    system: dict[str, Component] = {}
    # A frozen app's parts of the system that built it (`packaging/system_licences.py`).
    for file in sorted((project_root() / "system_licences").glob("*.txt")):
        name, _, version = file.stem.partition("_")
        licence = "PSF-2.0" if name == "Python" else "see its text"
        system[name] = Component(name, version, licence, file.read_text(encoding="utf-8", errors="replace").strip())
    python = system.pop("Python", None) or Component("Python", platform.python_version(), "PSF-2.0", sys.copyright)
    return (ours, *sorted(others, key=lambda part: part.name.lower()), *system.values(), python)


def needed() -> list[str]:
    """GRPO Studio and all that it requires and is installed here; of extras those that a requirement asks for."""
    found, seen, waiting = dict[str, None](), set[str](), [Requirement(OURS)]
    while waiting:
        wanted = waiting.pop()
        try:
            lines = _metadata(wanted.name).get_all("Requires-Dist") or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found[canonicalize_name(wanted.name)] = None
        for each in map(Requirement, lines):
            is_asked = each.marker is None or any(each.marker.evaluate({"extra": e}) for e in ("", *wanted.extras))
            if is_asked and (key := f"{canonicalize_name(each.name)} {sorted(each.extras)}") not in seen:
                seen.add(key)
                waiting.append(each)
    return list(found)


_metadata = cache(metadata.metadata)  # parsing one takes a millisecond or two


def component(name: str) -> Component:
    """One installed distribution. Raises PackageNotFoundError."""
    about = _metadata(name)
    field = (about.get_all("License") or [""])[0]
    licence = (about.get_all("License-Expression") or [field])[0]
    if not licence or len(licence) > LONGEST_LICENCE or "\n" in licence:
        classifiers = [line for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
        licence = ", ".join(line.rpartition(" :: ")[2] for line in classifiers) or "see its text"
    # The folder is listed, and not RECORD read, which the frozen app has not. A package's code may have files of such
    # names that are not its licence.
    folder: Path = metadata.distribution(name)._path  # pyright: ignore
    paths = [path for path in sorted(folder.rglob("*")) if _LICENCE_FILE.search(path.relative_to(folder).as_posix())]
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in paths if path.is_file()]
    if not any(texts) and len(field) > LONGEST_LICENCE:
        texts = [field.strip()]
    if not any(texts):
        files = [file for mark, files in GENERAL_TEXTS.items() if mark in licence for file in files]
        texts = [(resources() / "licences" / file).read_text(encoding="utf-8").strip() for file in files]
    return Component(about["Name"], about["Version"], licence, "\n\n".join(dict.fromkeys(filter(None, texts))))


@cache
def versions() -> dict[str, str]:
    """Versions for a problem report: ours, those of the packages that compute and draw, Python's and the system's."""
    found: dict[str, str] = {}
    for name in (OURS, "mlx", "mlx-lm", "transformers", "PySide6-Essentials"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    macos = platform.mac_ver()[0]
    system = f"macOS {macos}" if macos else f"{platform.system()} {platform.release().partition('-')[0]}"
    return found | {"Python": platform.python_version(), "System": f"{system}, {platform.machine()}"}
