"""Export formats and targets for command line and window, the choice of weights, and where an export goes: LM Studio's
models folder, any folder, Ollama, or an upload folder. Loads no model.

A folder is built in a hidden staging folder and renamed to its target, so it is never seen half written.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.config.checks import name_fault
from backend.config.config import Config, load
from backend.runs.archive import raw_settings
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints, best_of, find_checkpoint, has_end
from backend.runs.steering import run_config
from backend.trainer.memory.model_shape import packed_width, shape_of
from backend.trainer.memory.phases import QUANTIZED
from backend.utils import file_lock
from backend.utils.disk import cause, whole_folder
from backend.utils.documents import read_resource
from backend.utils.errors import UserError
from backend.utils.files import remove_tree, resolved
from backend.utils.hub_cache import local_folder
from backend.utils.places import lm_studio_home, lm_studio_models

Kind = Literal["adapter", "model", "gguf"]  # adapter files, a complete model folder, or a single file


Progress = Callable[..., None]  # receives a message per stage, and the fraction done if known


def silent(sentence: str, done: float | None = None) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    key: str
    label: str
    sentence: str
    kind: Kind = "model"
    dtype: str = ""  # "bfloat16" or "float16"; "" keeps the base's type
    quantization: dict[str, Any] = field(default_factory=dict[str, Any])  # arguments of mlx's `quantize`; {} for floats
    keeps_bits: bool = False  # keep quantised layers of the base quantised
    names: Literal["mlx", "original"] = "mlx"  # weight names: mlx-lm's or those of the original Hugging Face files
    gguf_type: str = ""  # matrix type in a GGUF file: q8_0, f16 or bf16
    matrix_bits: float = 0  # bits per weight if neither base nor `quantization` defines them


_TABLES = read_resource("exports.yaml")
FORMATS: dict[str, ExportFormat] = {key: ExportFormat(key, **about) for key, about in _TABLES["formats"].items()}
"""By value of `--format`, in menu order; the first is the default."""
DEFAULT_FORMAT = next(iter(FORMATS))


@dataclass(frozen=True, slots=True)
class ExportTarget:
    key: str
    label: str
    asks_for_folder: bool = False
    kinds: tuple[Kind, ...] = ("model", "adapter", "gguf")  # supported kinds of formats
    refusal: str = ""  # message for an unsupported kind
    store: str = ""  # where a program stores the model; "" for a visible folder
    takes_settings: bool = False  # true if it exports settings for training elsewhere, not weights


PUBLISHER = "grpo-studio"  # our folder under LM Studio's models, laid out as <publisher>/<model>
TARGETS: dict[str, ExportTarget] = {key: ExportTarget(key, **about) for key, about in _TABLES["targets"].items()}
"""By value of `--to`."""


@dataclass(frozen=True, slots=True)
class Export:
    """An export request; keys as on the command line."""

    to: str
    name: str
    folder: Path | None = None
    format: str = DEFAULT_FORMAT
    checkpoint: str = ""  # "best", "last", a step, or "" for the end of the run
    held_out: int = 0  # held-out prompts for comparing rewards; 0 skips the comparison
    overwrite: bool = False
    fetch: bool = False  # download missing original weights


def format_named(key: str) -> ExportFormat:
    """Raises UserError for an unknown format."""
    if key not in FORMATS:
        raise UserError("format", f"There is no format {key}; there are {', '.join(FORMATS)}.")
    return FORMATS[key]


def exported_bytes(base: Path, format_: ExportFormat, quantization: str = "none") -> int | None:
    """Bytes of a complete model, None if the sizes of `base` are unknown. `quantization`: the run's setting."""
    shape = shape_of(base)
    if shape is None or not shape.exact:
        return None
    own = format_.quantization
    packing = (own["bits"], own["group_size"], own["mode"]) if own else QUANTIZED.get(quantization)
    size = shape.weights + (shape.tower.bytes if shape.tower and format_.kind == "model" else 0)
    for matrix in shape.matrices:
        size -= matrix.bytes
        if format_.matrix_bits:
            size += matrix.numbers * format_.matrix_bits / 8
        elif packing and (own or format_.keeps_bits) and matrix.inputs % packing[1] == 0:
            size += matrix.numbers * packed_width(*packing, shape.width)
        elif format_.keeps_bits:
            size += matrix.bytes
        else:
            size += matrix.numbers * (2 if format_.dtype else shape.width)
    return round(size)


def weights_choices(run: RunFolder) -> dict[str, str]:
    """Value of `--checkpoint` → label: end of the run, best checkpoint, then all checkpoints, newest first."""
    checkpoints = all_checkpoints(run)
    best = best_of(checkpoints)
    choices = {"": "End of the run"} if has_end(run) else {}
    choices |= {"best": f"Best checkpoint: {best.title}"} if best else {}
    return choices | {str(saved.step): f"Checkpoint of {saved.title}" for saved in checkpoints[::-1]}


def export_size(run: RunFolder, format_: ExportFormat, checkpoint: str) -> int | None:
    """Estimate the bytes of an export; None if unknown."""
    settings = raw_settings(run)
    is_full = settings.get("train_type") == "full"
    if format_.kind == "adapter":
        file = run.adapters / "adapters.safetensors"
        if checkpoint:
            try:
                file = find_checkpoint(run, checkpoint).weights_file
            except UserError:  # deleted since it was listed
                return None
        return file.stat().st_size if file.is_file() and not is_full else None
    base = run.model if is_full and not checkpoint else local_folder(str(settings.get("model", "")))
    return exported_bytes(base, format_, str(settings.get("quantization", "none"))) if base else None


def settings_of(run: RunFolder) -> Config:
    """The settings for TRL; of a staged run, those outside its stages. Raises UserError."""
    begun = load(run.config)
    return begun if begun.stages else run_config(run)


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
        """Move the finished folder into place; returns the location to show. Raises as `check`, and DiskError."""
        self.check()
        with whole_folder(self.target) as draft:
            draft.rmdir()
            # Copied to another disk. copyfile drops extended attributes, which some disks turn into ._ files.
            shutil.move(built, draft, copy_function=shutil.copyfile)
        return str(self.target)


def destination_of(run: RunFolder, export: Export, format_: ExportFormat) -> Destination:
    """Raises UserError for an unknown target, or if it does not take the format."""
    to, name = export.to, export.name
    if to not in TARGETS:
        raise UserError("to", f"There is no target {to}; there are {', '.join(TARGETS)}.")
    if format_.kind not in TARGETS[to].kinds:
        raise UserError("format", TARGETS[to].refusal)
    if to == "hub":
        return Destination(run.uploads / name, run.path, overwrite=True)
    if to == "ollama":
        target = run.path / f"ollama-{name.strip().replace(':', '-')}"
        return OllamaModel(target, run.path, export.overwrite, name.strip())
    if to == "lmstudio":
        root, home = lm_studio_models(), lm_studio_home()
        # Only an empty `models` folder in an existing home is ever created for it.
        if not (root.is_dir() or (root == home / "models" and home.is_dir())):
            advice = "start LM Studio once, attach the disk that holds its models, or export to a folder"
            raise UserError("lm_studio", f"LM Studio was not found: there is no folder {root}; {advice}.")
        # Built outside the models folder LM Studio watches: beside it, where the last step is a rename, or in the run.
        root = resolved(root)
        workshop = root.parent if os.access(root.parent, os.W_OK) else run.path
        return Destination(root / PUBLISHER / safe_name(name), workshop, export.overwrite)
    target = resolved(export.folder.expanduser()) / safe_name(name) if export.folder else run.fused
    workshop = next(path for path in target.parents if path.exists())
    return Destination(target, workshop, export.overwrite)


def safe_name(name: str) -> str:
    """Strip a name. Raises UserError if it cannot name a folder."""
    name = name.strip()
    if not name:
        raise UserError("name", "Give the exported model a name.")
    if found := name_fault(name):
        raise UserError("name", f"The name of an export {found}.")
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
    except OSError as error:
        raise UserError(made_by, f"The folder {parent} cannot be written: {cause(error)}.") from None
    try:
        # Without waiting: an export takes minutes, so a message is more use than a silent wait.
        if not file_lock.take(lock):
            raise UserError(made_by, f"{target} is being written by another process; wait for that one.")
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield folder
        finally:
            # If the folder itself was moved to its place, one of this name is another process's.
            if file_lock.leads_to(folder, lock):
                remove_tree(folder)
    finally:
        os.close(lock)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
