"""Where an export goes: LM Studio's models folder, any folder, Ollama, or an upload folder.

A folder is built in a hidden staging folder and renamed to its target, so it is never seen half written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backend.config.checks import cross_setting_faults
from backend.export.exports import PUBLISHER
from backend.runs.run_folder import RunFolder
from backend.utils import file_lock, places
from backend.utils.disk import LONGEST_PLACE, gigabytes, sync, sync_tree
from backend.utils.errors import UserError
from backend.utils.files import resolved
from backend.utils.text import quote


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder, built in `workshop`."""

    target: Path
    workshop: Path
    overwrite: bool = False

    def check(self) -> None:
        """Raise UserError if `target` exists, unless it is a model and may be overwritten."""
        if not os.path.lexists(self.target):
            return
        if not self.overwrite:
            there = f"There is a model at {self.target} already"
            raise UserError("overwrite", f"{there}; choose another name, or overwrite it.")
        if not any((self.target / name).is_file() for name in ("config.json", "adapter_config.json", "model.gguf")):
            other = f"{self.target} is there and holds no model, so it is not replaced"
            raise UserError("overwrite", f"{other}; choose another name.")

    def deliver(self, built: Path) -> str:
        """Move the finished folder into place; returns the location to show. Raises as `check`."""
        self.check()
        move_into_place(built, self.target)
        return str(self.target)


def destination_of(run: RunFolder, to: str, name: str, folder: Path | None, overwrite: bool) -> Destination:
    """The destination for a key of `backend.export.exports.TARGETS`. Raises UserError."""
    if to == "hub":
        return Destination(run.uploads / name, run.path, overwrite=True)
    if to == "ollama":
        target = run.path / f"ollama-{name.strip().replace(':', '-')}"
        return OllamaModel(target, run.path, overwrite, name.strip())
    if to == "lmstudio":
        root, home = places.lm_studio_models(), places.lm_studio_home()
        # Only an empty `models` folder in an existing home is ever created for it.
        if not (root.is_dir() or (root == home / "models" and home.is_dir())):
            advice = "start LM Studio once, attach the disk that holds its models, or export to a folder"
            raise UserError("lm_studio", f"LM Studio was not found: there is no folder {root}; {advice}.")
        # Built outside LM Studio's models folder, which it watches, but on the same disk, so that the last step is a
        # rename: usually beside the models folder, else in the run. If the models have their own disk,
        # `move_into_place` copies.
        root = resolved(root)
        can_build_beside = os.access(root.parent, os.W_OK) and device_of(root.parent) == device_of(root)
        workshop = root.parent if can_build_beside else run.path
        return Destination(root / PUBLISHER / safe_name(name), workshop, overwrite)
    target = resolved(folder.expanduser()) / safe_name(name) if folder else run.fused
    return Destination(target, nearest_existing(target.parent), overwrite)


def safe_name(name: str) -> str:
    """Strip a name. Raises UserError if it cannot name a folder."""
    name = name.strip()
    if not name:
        raise UserError("lm_studio_name", "Give the exported model a name.")
    if faults := cross_setting_faults({"lm_studio_name": name}):
        raise UserError(faults)
    return name


OLLAMA_PLACES = ("/usr/local/bin", "/opt/homebrew/bin", "/Applications/Ollama.app/Contents/Resources", "~/.local/bin")
"""Usual locations: the PATH of a macOS app lacks them."""
OLLAMA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}(:[A-Za-z0-9._-]{1,80})?")
OLLAMA_TIMEOUT_S = 3600
MODELFILE = "Modelfile"


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


@contextlib.contextmanager
def staging_folder(parent: Path, target: Path, made_by: str = "export") -> Iterator[Path]:
    """Yield an empty hidden folder in `parent`; a lock keeps two exports of one `target` apart. Clears what a killed
    export left. Raises UserError if the target is being exported or `parent` is not writable."""
    folder = parent / f".grpo-studio-{target.name}"
    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)  # flock works on a folder too
    except FileNotFoundError:
        raise UserError(made_by, f"The folder {parent} is not there any more.") from None
    except OSError as error:
        raise UserError(made_by, f"The folder {parent} cannot be written: {error.strerror}.") from None
    try:
        # Without waiting: an export takes minutes, so a message is more use than a silent wait.
        if not file_lock.take(lock):
            raise UserError(made_by, f"{target} is being written by another process; wait for that one.")
        _clear_staging(folder, target)
        try:
            yield folder
        finally:
            # The next export deletes what cannot be deleted now. If the folder itself was moved to its place, one of
            # this name is another process's.
            with contextlib.suppress(OSError):
                if file_lock.leads_to(folder, lock):
                    _clear_staging(folder, target)
                    folder.rmdir()
    finally:
        os.close(lock)


def _clear_staging(folder: Path, target: Path) -> None:
    if os.path.lexists(folder / "previous") and not os.path.lexists(target):
        (folder / "previous").rename(target)
    for child in folder.iterdir():
        # rmtree refuses a symlink; unlink removes the link and not the folder that it points to.
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def move_into_place(new: Path, target: Path) -> None:
    """Move a folder out of its staging folder to `target`, which it replaces. Raises UserError without space for it."""
    parent = nearest_existing(target.parent)
    if device_of(new) != device_of(parent):
        check_free_space(parent, folder_bytes(new))
        with staging_folder(parent, target) as staging:
            # copyfile drops extended attributes, which some disks turn into ._ files.
            shutil.copytree(new, staging / "new", copy_function=shutil.copyfile)
            return move_into_place(staging / "new", target)
    drop_hidden_files(new)
    sync_tree(new)  # a power cut must not leave a model of empty files, least of all in place of an old one
    target.parent.mkdir(parents=True, exist_ok=True)
    # rename(2) replaces an empty folder only, so the old one moves aside; if the process dies before the next line,
    # `_clear_staging` restores it. lexists, because a dangling symlink is in the way too.
    if os.path.lexists(target):
        target.rename(new.parent / "previous")
    new.rename(target)
    sync(target.parent)


def drop_hidden_files(folder: Path) -> None:
    """Delete the ._ files and .DS_Store that macOS adds."""
    for hidden in folder.glob(".*"):
        hidden.unlink()


def check_free_space(folder: Path, needed: int) -> None:
    """Raise UserError unless the disk of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(nearest_existing(folder)).free
    if needed > free:
        disk = f"the disk of {quote(folder, LONGEST_PLACE)} has {gigabytes(free)} free"
        raise UserError("export", f"The model needs {gigabytes(needed)} and {disk}.")


def nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def device_of(folder: Path) -> int:
    return nearest_existing(folder).stat().st_dev


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
