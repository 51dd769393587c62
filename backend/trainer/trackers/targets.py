"""The trackers that a run can report to: what each writes, which package it needs, and which of them a setting chooses.
Imports none of the packages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from backend.utils.command import is_bundled
from backend.utils.errors import ConfigProblem
from backend.utils.text import quote

NONE, ALL = "none", "all"  # words for no tracker, and for every one that is installed
DEFAULT_PROJECT = "grpo-studio"
_PROJECT = re.compile(r"[\w .-]{1,128}")
"""A name without separators: it can be no path, and no account of somebody else's (OWNER/PROJECT)."""


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """`package` is what it imports, and `extra` what installs that; both empty where nothing is needed."""

    name: str
    place: str  # where it writes, after “is in”
    package: str = ""
    extra: str = ""

    @property
    def is_installed(self) -> bool:
        return not self.package or find_spec(self.package) is not None


TRACKERS: dict[str, TrackerKind] = {
    kind.name: kind
    for kind in (
        TrackerKind("csv", "metrics.csv and completions.csv of the run's folder"),
        TrackerKind("tensorboard", "trackers/tensorboard of the run's folder", "tensorboardX", "tensorboard"),
        TrackerKind("trackio", "trackio's database on this machine (trackio show)", "trackio", "trackio"),
        TrackerKind(
            "wandb",
            "the folder wandb among the preferences (wandb sync sends it), unless WANDB_MODE is online",
            "wandb",
            "wandb",
        ),
    )
}


def chosen(report_to: Sequence[str]) -> tuple[str, ...]:
    """Names of the trackers that a value of `report_to` chooses, each once; names that are none of ours are left
    out."""
    if ALL in report_to:
        return tuple(name for name, kind in TRACKERS.items() if kind.is_installed)
    return tuple(dict.fromkeys(name for name in report_to if name in TRACKERS))


def report_to_fault(report_to: Sequence[str]) -> ConfigProblem | None:
    """What is wrong with a value of `report_to`."""
    unknown = next((name for name in report_to if name not in (*TRACKERS, NONE, ALL)), None)
    if unknown is not None:
        return ConfigProblem(
            "report_to", f"There is no tracker {quote(unknown, 40)}; there are {', '.join(TRACKERS)}, {NONE} and {ALL}."
        )
    if len(report_to) > 1 and (alone := next((name for name in report_to if name in (NONE, ALL)), None)):
        return ConfigProblem("report_to", f"{alone} stands alone: take it out of Report to, or the other trackers.")
    return None


def project_fault(project: str) -> ConfigProblem | None:
    """What is wrong with a value of `tracker_project`."""
    if not project or (_PROJECT.fullmatch(project) and project.strip(" .")):
        return None
    sentence = f"Tracker project is a name of letters, digits, spaces, dots and dashes, not {quote(project, 40)}."
    return ConfigProblem("tracker_project", sentence)


def missing_fault(name: str) -> ConfigProblem | None:
    """Why this tracker cannot run here; None where it can."""
    kind = TRACKERS[name]
    if kind.is_installed:
        return None
    if is_bundled():
        return ConfigProblem(
            "report_to", f"{name} is not part of this app; csv is. With the package, pip install 'grpo-studio[{name}]'."
        )
    return ConfigProblem(
        "report_to", f"{name} needs a package that is not installed: pip install 'grpo-studio[{kind.extra}]'."
    )
