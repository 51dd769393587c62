"""Destinations of an export: LM Studio's models folder, any folder, Ollama, or an upload folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from backend.config.checks import cross_setting_faults
from backend.export import atomic_folder
from backend.export.exports import PUBLISHER
from backend.export.modelfile import MODELFILE
from backend.runs.run_folder import RunFolder
from backend.utils import places
from backend.utils.errors import UserError
from backend.utils.files import resolved


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder, built in `workshop`."""

    target: Path
    workshop: Path
    overwrite: bool = False

    def check(self) -> None:
        """Raise UserError for anything that would make the export fail."""
        atomic_folder.check_target(self.target, overwrite=self.overwrite)

    def deliver(self, built: Path) -> str:
        """Move the finished folder into place; returns the location to show."""
        atomic_folder.move_into_place(built, self.target, overwrite=self.overwrite)
        return str(self.target)


def destination_of(run: RunFolder, to: str, name: str, folder: Path | None, overwrite: bool) -> Destination:
    """The destination for a key of `backend.export.exports.TARGETS`. Raises UserError."""
    if to == "hub":
        return Destination(run.uploads / name, run.path, overwrite=True)
    if to == "ollama":
        target = run.path / f"ollama-{name.strip().replace(':', '-')}"
        return OllamaModel(target, run.path, overwrite, name.strip())
    if to == "lmstudio":
        root = lm_studio_root()
        # Built outside LM Studio's models folder, which it watches, but on the same disk, so that the last step is a
        # rename: usually beside the models folder, else in the run. If the models have their own disk,
        # `move_into_place` copies.
        workshop = atomic_folder.staging_parent(root, (root.parent, run.path))
        return Destination(root / PUBLISHER / safe_name(name), workshop, overwrite)
    target = resolved(folder.expanduser()) / safe_name(name) if folder else run.fused
    return Destination(target, atomic_folder.nearest_existing(target.parent), overwrite)


def safe_name(name: str) -> str:
    """Strip a name. Raises UserError if it cannot name a folder."""
    name = name.strip()
    if not name:
        raise UserError("lm_studio_name", "Give the exported model a name.")
    if faults := cross_setting_faults({"lm_studio_name": name}):
        raise UserError(faults)
    return name


def lm_studio_root() -> Path:
    """LM Studio's models folder. Raises UserError if it does not exist."""
    root, home = places.lm_studio_models(), places.lm_studio_home()
    # Only an empty `models` folder in an existing home is ever created for it.
    if root.is_dir() or (root == home / "models" and home.is_dir()):
        return resolved(root)
    advice = "start LM Studio once, attach the disk that holds its models, or export to a folder"
    raise UserError("lm_studio", f"LM Studio was not found: there is no folder {root}; {advice}.")


# Ollama

OLLAMA_PLACES = ("/usr/local/bin", "/opt/homebrew/bin", "/Applications/Ollama.app/Contents/Resources", "~/.local/bin")
"""Usual locations: the PATH of a macOS app lacks them."""
OLLAMA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}(:[A-Za-z0-9._-]{1,80})?")
OLLAMA_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class OllamaModel(Destination):
    """A model in Ollama's store; `target` exists only during the build."""

    name: str = ""

    def check(self) -> None:
        """Raise UserError for a bad or existing name, or if Ollama is not running."""
        if not OLLAMA_NAME.fullmatch(self.name):
            takes = "Ollama takes letters, digits, dots, dashes and underlines as a name"
            raise UserError("name", f"{takes}, not {self.name!r}.")
        listed = _ollama("list").splitlines()[1:]
        names = {line.split()[0].removesuffix(":latest").lower() for line in listed if line.strip()}
        if self.name.removesuffix(":latest").lower() in names and not self.overwrite:
            there = f"Ollama has a model {self.name} already"
            raise UserError("overwrite", f"{there}; choose another name, or overwrite it.")

    def deliver(self, built: Path) -> str:
        """Create the model. Raises UserError with Ollama's message if it fails."""
        _ollama("create", self.name, "-f", str(built / MODELFILE))
        return f"Ollama, as {self.name}"


def _ollama(*arguments: str) -> str:
    places = [os.environ.get("PATH", ""), *(str(Path(place).expanduser()) for place in OLLAMA_PLACES)]
    program = shutil.which("ollama", path=os.pathsep.join(places))
    if program is None:
        advice = "install it from https://ollama.com, or export to a folder and run `ollama create` there"
        raise UserError("to", f"Ollama was not found; {advice}.")
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=OLLAMA_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError("to", f"`ollama {arguments[0]}` did not end: {error}.") from None
    if done.returncode:
        # It draws its progress over itself; the last line is the reason.
        lines = [line.strip() for line in re.split(r"[\r\n]", done.stderr) if line.strip()]
        reason = lines[-1].rstrip(".") if lines else "it gave no reason"
        raise UserError("to", f"`ollama {arguments[0]}` failed: {reason}.")
    return done.stdout
