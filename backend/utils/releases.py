"""The list of releases that an update check reads: its address, what it may hold, and whether it names a newer version than this one.

No address is built in: without a file `resources/release_feed.txt`, which a build may add, or the variable below, nothing is ever asked.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, cast

from backend.utils.components import OURS
from backend.utils.errors import UserError
from backend.utils.places import resources

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
    """The latest release that a feed names: {version, page}, a package index's {info: {version, project_url}}, or a forge's {tag_name,
    html_url}. Raises UserError for anything else."""
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
