"""Where an export goes: LM Studio's models folder, any folder, or the folder that an upload sends. One entry of DESTINATIONS for each row
of `backend.export.exports.TARGETS`.

A destination says what stands in the way before anything is loaded, where to build, and brings the finished folder to its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backend.config.checks import cross_setting_faults
from backend.export import atomic_folder
from backend.export.exports import PUBLISHER
from backend.export.gguf.ollama import ollama_model
from backend.runs.run_folder import RunFolder
from backend.utils import places
from backend.utils.errors import UserError
from backend.utils.files import resolved


class Destination(Protocol):
    """Where one export goes."""

    @property
    def target(self) -> Path:
        """The finished folder; on a service, what it would be called here. Two exports of one target cannot run at once."""
        ...

    @property
    def workshop(self) -> Path:
        """An existing folder to build in: best on the target's disk."""
        ...

    def check(self) -> None:
        """Raise UserError for what stands in the way, before minutes of work."""
        ...

    def deliver(self, built: Path) -> str:
        """Bring the finished folder `built` to its place, completely or not at all; → where it is, for people."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """What the user chose: a name, a parent folder where the target asks for one, whether an existing model may be replaced, or is as good where
    it is equal."""

    run: RunFolder
    name: str
    folder: Path | None = None
    overwrite: bool = False
    keeps_equal: bool = False


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A folder on this machine."""

    target: Path
    workshop: Path
    overwrite: bool
    keeps_equal: bool = False

    def check(self) -> None:
        # And again by `move_into_place`: the target may have appeared since.
        if not self.keeps_equal:  # whether it is equal is known once there is something to compare with
            atomic_folder.check_target(self.target, overwrite=self.overwrite)

    def deliver(self, built: Path) -> str:
        if not (self.keeps_equal and atomic_folder.are_equal(built, self.target)):
            atomic_folder.move_into_place(built, self.target, overwrite=self.overwrite)
        return str(self.target)


def in_lm_studio(place: Place) -> Destination:
    """`grpo-studio`/name in LM Studio's models folder. Raises UserError for a name that no folder can have, or without LM Studio."""
    root = lm_studio_root()
    # Built outside LM Studio's models folder, which it watches, but on the same disk, so that the last step is a rename:
    # usually beside the models folder, else in the run. If the models have a disk of their own, neither is on it, and
    # `atomic_folder.move_into_place` copies.
    workshop = atomic_folder.staging_parent(root, (root.parent, place.run.path))
    return OnDisk(root / PUBLISHER / safe_name(place.name), workshop, place.overwrite, place.keeps_equal)


def in_folder(place: Place) -> Destination:
    """`folder`/name; without a folder the run's own fused/. Raises UserError for a name that no folder can have."""
    target = resolved(place.folder.expanduser()) / safe_name(place.name) if place.folder else place.run.fused
    return OnDisk(target, atomic_folder.nearest_existing(target.parent), place.overwrite)


def in_uploads(place: Place) -> Destination:
    """The folder in the run from which `backend.export.publish_run` uploads: what lies there can be made again."""
    return OnDisk(place.run.uploads / place.name, place.run.path, overwrite=True)


def in_ollama(place: Place) -> Destination:
    return ollama_model(place.name.strip(), place.run.path, place.overwrite)


DESTINATIONS: dict[str, Callable[[Place], Destination]] = {
    "lmstudio": in_lm_studio,
    "folder": in_folder,
    "ollama": in_ollama,
    "hub": in_uploads,
}
"""By the key of `backend.export.exports.TARGETS`."""


def safe_name(name: str) -> str:
    """`name` without surrounding spaces. Raises UserError when it is empty or cannot name a folder."""
    name = name.strip()
    if not name:
        raise UserError("lm_studio_name", "Give the exported model a name.")
    faults = cross_setting_faults({"lm_studio_name": name})
    if faults:
        raise UserError(faults)
    return name


def lm_studio_root() -> Path:
    """LM Studio's models folder. Raises UserError when LM Studio was never started, or its disk is not attached.

    Only an empty `models` folder in an existing home is ever created for it.
    """
    root, home = places.lm_studio_models(), places.lm_studio_home()
    if root.is_dir() or (root == home / "models" and home.is_dir()):
        return resolved(root)
    raise UserError(
        "lm_studio",
        f"LM Studio was not found: there is no folder {root}; start LM Studio once, attach the disk that holds its "
        "models, or export to a folder.",
    )
