"""What the program says about itself: versions, licences, newer releases, and a problem report without private text."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from backend.config.config import SETTINGS
from backend.utils.errors import UserError
from backend.utils.places import project_root, resources

HIDDEN = "…"
"""What stands for a secret."""
_SECRETS = (
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"),  # Hugging Face
    re.compile(r"\b(?:ghp|gho|ghs|github_pat)_\w{16,}"),  # GitHub
    re.compile(r"\bsk-[\w-]{16,}"),  # OpenAI and others
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user:password of an address
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"(?i)((?<=token[=:])|(?<=token[=:] )|(?<=password[=:])|(?<=password[=:] ))[^\s,;'\"]+"),
)
_OTHER_HOMES = re.compile(r"(?<![\w/])/(?:home|Users)/[^/\s'\":]+")
SHORTEST_NAME = 3
"""Shorter user names are left in place outside paths: they would be found in the middle of ordinary words."""
_ORDINARY = {"root", "user", "admin", "runner", "ubuntu"}
"""User names that tell nobody who somebody is, and that ordinary sentences contain."""


def without_private(text: str, folders: Iterable[str] = ()) -> str:
    """`text` with the home folder as ~, each of `folders` (such as a temporary one) as its last part, homes of others
    as /home/…, and without the user's name, access tokens and passwords."""
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        text = text.replace(folder, Path(folder).name)
    home = str(Path.home())
    if len(home) > 1:  # "/" is the home folder of some services
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = _OTHER_HOMES.sub(f"/home/{HIDDEN}", text)
    for secret in _SECRETS:
        text = secret.sub(HIDDEN, text)
    name = user_name()
    if len(name) >= SHORTEST_NAME and name.lower() not in _ORDINARY:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text)
    return text


def user_name() -> str:
    """The name of the user's account; "" where the system has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        return ""


LOG_LINES = 60
"""Last lines of a log that are in a report."""
TITLE = "GRPO Studio problem report"
EMPTY = "Write here what you did, what happened, and what you expected."


@dataclass(frozen=True, slots=True)
class ProblemFacts:
    """What went wrong: a sentence, the traceback ("" where there is none), the end of the log and the settings that
    were in use."""

    sentence: str = EMPTY
    traceback: str = ""
    log: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def report(problem: ProblemFacts) -> str:
    """The report as plain text."""
    parts = {
        "Versions": "\n".join(f"{name}: {value}" for name, value in versions().items()),
        "Traceback": problem.traceback.strip(),
        "Last lines of the log": "\n".join(problem.log[-LOG_LINES:]).strip(),
        "Settings": "\n".join(f"{key}: {value}" for key, value in _public(problem.settings).items()),
    }
    sections = [f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts.items() if text]
    return without_private("\n\n".join([TITLE, problem.sentence, *sections])) + "\n"


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from their defaults; of paths the last name, of texts and lists of texts their
    length."""
    shown: dict[str, Any] = {}
    for key, value in settings.items():
        setting = SETTINGS.get(key)
        if setting is None or value == setting.default:
            continue
        if setting.kind in ("file", "hosts", "model", "adapter", "dataset") or (
            isinstance(value, str) and os.sep in value and "~" in value[:1]
        ):
            shown[key] = _name(str(value))
        elif setting.kind == "stages":  # with paths and texts inside
            shown[key] = f"({len(value)} stages)"
        elif setting.kind in ("prose", "mapping") or (setting.kind == "list" and value):
            shown[key] = f"({len(str(value))} characters)"
        else:
            shown[key] = value
    return shown


def _name(value: str) -> str:
    """A Hub id as it is, of a path the last name."""
    is_path = value.startswith((os.sep, "~", ".")) or value.count("/") > 1
    return f"…/{Path(value).name}" if is_path else value


FEED_VARIABLE = "GRPO_STUDIO_RELEASE_FEED"
NO_FEED = (
    "This build names no list of releases, so there is nothing to ask. Whatever installed it knows of newer versions."
)


@dataclass(frozen=True, slots=True)
class Release:
    """A published version, and the page of it for people; "" where the list names none."""

    version: str
    page: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def feed() -> str:
    """The address of the list of releases; "" for none."""
    named = os.environ.get(FEED_VARIABLE)
    if named is not None:
        return named.strip()
    try:
        return (resources() / "release_feed.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def release_in(content: Any) -> Release:
    """The latest release that a feed names: {version, page}, a package index's {info: {version, project_url}}, or a
    forge's {tag_name, html_url}. Raises UserError for anything else."""
    fields = _mapping(content)
    fields = _mapping(fields.get("info")) or fields
    version = fields.get("version") or fields.get("tag_name")
    page = fields.get("page") or fields.get("html_url") or fields.get("project_url") or ""
    if not isinstance(version, str) or not _numbers(version):
        raise UserError("updates", "The list of releases names no version.")
    # Shown to a person, who may open it: nothing but an ordinary address.
    is_address = isinstance(page, str) and re.fullmatch(r"https?://[^\s\"'<>]+", page)
    return Release(version.removeprefix("v"), str(page) if is_address else "")


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def our_version() -> str:
    """The version of this program."""
    return metadata.version(OURS)


def is_newer(version: str, than: str) -> bool:
    """Whether a released version comes after another. One that is no release, such as 1.0rc1, never does."""
    return re.fullmatch(r"v?[\d.]+", version) is not None and _numbers(version) > _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    """1.2.0 → (1, 2): zeros at the end mean nothing."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in match.group(1).split(".")] if match else []
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


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
    """`licence` is its name, as SPDX has it where the package says so; `text` is all of the licence's files, "" where
    it ships none."""

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
    """By name, what a frozen app has from the system that built it (`packaging/system_licences.py`); from source
    nothing."""
    found: dict[str, Component] = {}
    for file in sorted((project_root() / "system_licences").glob("*.txt")):
        name, _, version = file.stem.partition("_")
        licence = "PSF-2.0" if name == "Python" else "see its text"
        found[name] = Component(name, version, licence, file.read_text(encoding="utf-8", errors="replace").strip())
    return found


def needed(name: str = OURS) -> list[str]:
    """A distribution and all that it requires on this machine and is installed; of extras only those that a requirement
    asks for."""
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
    """The licence files of a package, and the field License where that is a text; nothing twice. Where it ships
    neither, the general text of its licence, if we have it."""
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in _licence_files(distribution)]
    field = _field(distribution, "License")
    if not any(texts) and len(field) > LONGEST_LICENCE:
        texts = [field.strip()]
    if not any(texts):
        named = _licence(distribution)
        texts = [_general_text(file) for mark, files in GENERAL_TEXTS.items() if mark in named for file in files]
    return list(dict.fromkeys(text for text in texts if text))


def _licence_files(distribution: metadata.Distribution) -> list[Path]:
    # The folder is listed, and not RECORD read, which the frozen app has not. A package's code may have files of such
    # names that are not
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
    """What a report about a problem has to name: our version, those of the packages that compute and draw, Python's and
    the system's."""
    found: dict[str, str] = {}
    for name in (OURS, "mlx", "mlx-lm", "transformers", "PySide6-Essentials"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"Python": platform.python_version(), "System": system()}
