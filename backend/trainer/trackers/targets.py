"""The trackers that a run can report to: what each writes, and which package it needs. Imports none of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from backend.utils.command import is_bundled
from backend.utils.errors import ConfigProblem
from backend.utils.text import quote

NONE, ALL = "none", "all"  # words for no tracker, and for every one that is installed
DEFAULT_PROJECT = "grpo-studio"
_PROJECT = re.compile(r"[\w .-]{1,128}")  # no separators: no path, and no account of somebody else's (OWNER/PROJECT)


@dataclass(frozen=True, slots=True)
class TrackerKind:
    place: str  # where it writes, after “is in”
    package: str = ""  # what it imports; the extra of its name installs it

    @property
    def is_installed(self) -> bool:
        return not self.package or find_spec(self.package) is not None


TRACKERS = {
    "csv": TrackerKind("metrics.csv and completions.csv of the run's folder"),
    "tensorboard": TrackerKind("trackers/tensorboard of the run's folder", "tensorboardX"),
    "trackio": TrackerKind("trackio's database on this machine (trackio show)", "trackio"),
    "wandb": TrackerKind(
        "the folder wandb among the preferences (wandb sync sends it), unless WANDB_MODE is online", "wandb"
    ),
}


def chosen(report_to: Sequence[str]) -> tuple[str, ...]:
    if ALL in report_to:
        return tuple(name for name, kind in TRACKERS.items() if kind.is_installed)
    return tuple(dict.fromkeys(name for name in report_to if name in TRACKERS))


def report_to_fault(report_to: Sequence[str]) -> str:
    """What is wrong with a value of `report_to`, as a sentence; "" for nothing."""
    unknown = next((name for name in report_to if name not in (*TRACKERS, NONE, ALL)), None)
    if unknown is not None:
        return f"There is no tracker {quote(unknown, 40)}; there are {', '.join(TRACKERS)}, {NONE} and {ALL}."
    if len(report_to) > 1 and (alone := next((name for name in report_to if name in (NONE, ALL)), None)):
        return f"{alone} stands alone: take it out of Report to, or the other trackers."
    return ""


def project_fault(project: str) -> str:
    """What is wrong with a value of `tracker_project`, as a sentence; "" for nothing."""
    if not project or (_PROJECT.fullmatch(project) and project.strip(" .")):
        return ""
    return f"Tracker project is a name of letters, digits, spaces, dots and dashes, not {quote(project, 40)}."


def missing_fault(name: str) -> ConfigProblem | None:
    if TRACKERS[name].is_installed:
        return None
    what = f"needs a package that is not installed: pip install 'grpo-studio[{name}]'."
    if is_bundled():
        what = f"is not part of this app; csv is. With the package, pip install 'grpo-studio[{name}]'."
    return ConfigProblem("report_to", f"{name} {what}")
