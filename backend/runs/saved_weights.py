"""The checkpoints and weights in a run folder, and adapters that a run may start from. Reads no arrays."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from backend.config.other_programs.translation import translate
from backend.runs.events import step_of_end
from backend.runs.run_folder import RunFolder, all_runs, find_run
from backend.utils.documents import parse_loose_json, read_json
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder, possible_path, read_text, resolved, user_path
from backend.utils.hub_cache import hub_cache
from backend.utils.places import runs_folder
from backend.utils.text import quote, shown_path

WEIGHT_FILES = ("adapters.safetensors", "model.safetensors")  # of adapters, or of full fine-tuning
OPTIMIZER_FILE = "optimizer.safetensors"
Part = Literal["optimizer", "reference", "pass_rates"]
"""Further arrays of a checkpoint: not with `save_only_model`; of a reference that moves; of prompts chosen by them."""


@dataclass(slots=True)
class TrainingState:
    """The state of a run between two steps besides its arrays. Saved as state.json, with these names as keys."""

    step: int = 0  # steps done
    updates: int = 0  # optimizer updates done, by the learner of the present phase
    warmup_end: int | None = None  # the last step of the supervised warm-up, once it is over
    cursor: int = 0  # rows of the prompt stream consumed, including skipped ones
    stream_first: int = 0  # the cursor at which the present stage's rows began
    ended_epoch: bool = False  # the last step took the last row of an epoch
    num_tokens: int = 0  # of prompts and completions
    began: float | None = None  # unix seconds of the run's first start; a checkpoint of another run has another
    elapsed_s: float = 0.0  # of training, without loading and pauses
    score: float | None = None  # held-out reward at the last evaluation, else mean training reward, or `best_metric`
    score_metric: str = ""  # "" for the reward
    best_is_lowest: bool = False
    score_series: int = 0  # only scores of one series are comparable; other rewards begin another
    score_sum: float = 0.0  # of training scores since the last checkpoint that was due, over `scored_steps`
    scored_steps: int = 0
    evaluated: int = -1  # the step of the last evaluation
    best_score: float | None = None
    best_step: int = 0
    gain: float | None = None  # the last score that counted as a gain for early stopping
    scores_without_gain: int = 0
    bonus: list[float | None] = field(default_factory=list)  # of the entropy
    reward_weights: list[dict[str, Any]] = field(default_factory=list)  # adaptive ones, one entry per stage
    gpu_errors_told: int = 0  # lines of gpu_errors.jsonl with a note in the event log up to `events_bytes`
    events_bytes: int = 0
    completions_bytes: int = 0
    dtype: str = ""  # what `dtype: auto` became for the memory that there was, so that a resumed run computes alike

    def forget_scores(self) -> None:
        self.score, self.best_score, self.best_step, self.gain, self.scores_without_gain = None, None, 0, None, 0
        self.score_sum, self.scored_steps = 0.0, 0


_STATE = TypeAdapter(TrainingState)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk. `sums`: checksums of its files."""

    path: Path
    state: TrainingState
    sums: Any = None

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def title(self) -> str:
        """“step 40, reward 2.31”, “step 30, held-out loss 0.45”."""
        name, score = (self.state.score_metric or "reward").replace("eval/", "held-out "), self.state.score
        return f"step {self.step:,}" + ("" if score is None else f", {name} {score:.3g}")

    @property
    def weights_file(self) -> Path:
        return next(file for name in WEIGHT_FILES if (file := self.path / name).exists())

    def has(self, part: Part) -> bool:
        return (self.path / f"{part}.safetensors").exists()


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be read or is of another model. `why`, in words that follow its name."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__("run", f"The checkpoint of step {int(path.name)} cannot be used: {why}.")
        self.path, self.why = path, why


def all_checkpoints(run: RunFolder) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first."""
    found = (saved for folder in run.checkpoints.glob("[0-9]*") if (saved := read_checkpoint(folder)) is not None)
    return sorted(found, key=lambda saved: saved.step)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None where a file is missing or state.json is not a state."""
    try:
        saved: Any = parse_loose_json(read_text(folder / "state.json", "checkpoint"))
    except (UserError, ValueError):
        return None
    if not isinstance(saved, dict) or not {"step", "updates", "cursor"} <= saved.keys():  # where the run goes on
        return None
    if not any((folder / name).exists() for name in WEIGHT_FILES):
        return None
    files = saved.get("files")  # absent in the checkpoints of earlier versions, which always wrote the optimizer
    if (not isinstance(files, dict) or OPTIMIZER_FILE in files) and not (folder / OPTIMIZER_FILE).exists():
        return None
    with suppress(ValidationError):
        return Checkpoint(folder, _STATE.validate_json(json.dumps(saved), strict=True), files)
    return None


def best_of(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """The first with the best score of the newest series; a score is repeated until the next evaluation."""
    scored = [saved for saved in checkpoints if saved.state.score is not None]
    newest = max((saved.state.score_series for saved in scored), default=0)

    def rank(saved: Checkpoint) -> tuple[float, int]:
        score = saved.state.score or 0.0
        return -score if saved.state.best_is_lowest else score, -saved.step

    return max((saved for saved in scored if saved.state.score_series == newest), key=rank, default=None)


def spare_checkpoints(run: RunFolder, keep: int = 1) -> list[Checkpoint]:
    """Complete checkpoints that are neither the best nor among the newest `keep`, oldest first."""
    checkpoints = all_checkpoints(run)
    best = best_of(checkpoints)
    return [saved for saved in checkpoints[:-keep] if saved != best]


def find_checkpoint(run: RunFolder, which: str) -> Checkpoint:
    """The checkpoint `which`: "best", "last" or a step. Raises UserError, with the existing steps."""
    checkpoints = all_checkpoints(run)
    named = {str(saved.step): saved for saved in checkpoints}
    if (best := best_of(checkpoints)) is not None:
        named["best"] = best
    if checkpoints:
        named["last"] = checkpoints[-1]
    if (found := named.get(which.strip().lstrip("0") or "0")) is None:
        there = f" {which}; there are {' and '.join(', '.join(named).rsplit(', ', 1))}" if named else ""
        raise UserError("checkpoint", f"The run {run.name} has no checkpoint{there}.")
    return found


def has_end(run: RunFolder) -> bool:
    """True for a run with adapters or a model to export without naming a checkpoint."""
    adapters = all((run.adapters / name).is_file() for name in ("adapters.safetensors", "adapter_config.json"))
    return adapters or (run.model / "config.json").is_file()


END, BEST = "end", "best"


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Weights of one step. `key`: end, best, or the step. `path`: a file of arrays, or a whole model's folder."""

    key: str
    path: Path
    step: int | None = None

    @property
    def label(self) -> str:
        """“End, step 32”, “Best, step 24”, “Step 16”."""
        named = {END: "End", BEST: "Best"}.get(self.key)
        if self.step is None:
            return named or self.key
        return f"{named}, step {self.step}" if named else f"Step {self.step}"

    @property
    def bytes(self) -> int:
        files = self.path.glob("model*.safetensors") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.exists())


def choices(run: RunFolder) -> list[WeightChoice]:
    """The end of the run, the best checkpoint, then every checkpoint, newest first."""
    saved, found = all_checkpoints(run), list[WeightChoice]()
    left, adapters = step_of_end(run), run.adapters / WEIGHT_FILES[0]
    if at_end := [each for each in saved if left in (None, each.step)]:
        found.append(WeightChoice(END, at_end[-1].weights_file, at_end[-1].step))
    elif adapters.is_file() or (run.model / "config.json").is_file():  # the checkpoint of the end was deleted
        found.append(WeightChoice(END, adapters if adapters.is_file() else run.model))
    if (best := best_of(saved)) is not None:
        found.append(WeightChoice(BEST, best.weights_file, best.step))
    return found + [WeightChoice(str(each.step), each.weights_file, each.step) for each in reversed(saved)]


def find_choice(run: RunFolder, key: str = END) -> WeightChoice:
    """The weights of `key`: end (also last), best, or a step. Raises UserError naming the choices."""
    offered = choices(run)
    if not offered:
        raise UserError("run", f"The run {run.name} has no trained weights yet.")
    wanted = {"last": END}.get(key.strip().lower(), key.strip().lower().lstrip("0") or "0")
    found = next((choice for choice in offered if choice.key == wanted), None)
    if found is None:
        keys = ", ".join(choice.key for choice in offered)
        raise UserError("checkpoint", f"The run {run.name} has no checkpoint {key}; choose one of {keys}.")
    return found


SETTING = "adapter"
ARRAYS, ABOUT, PEFT = "adapters.safetensors", "adapter_config.json", "adapter_model.safetensors"
RUNS_LISTED = 30
PATH = 60  # characters in a message


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Adapters to start from. `text` names them, of a run with its step. `about`: their adapter_config.json."""

    text: str
    weights: Path
    about: Path | None


def find_adapter(text: str, runs_dir: Path | None = None) -> AdapterSource:
    """The adapters of `text`: a folder, a file, `RUN`, `RUN@best` or `RUN@step`. Raises UserError."""
    path = user_path(text, SETTING)
    if (peft := peft_folder(text)) is not None:
        advice = "import it first, below the field or with the verb import"
        raise UserError(SETTING, f"{quote(peft, PATH)} is an adapter of peft; {advice}.")
    if is_folder(path) and is_file(path / ARRAYS):
        path = path / ARRAYS
    if is_file(path):
        # adapter_config.json beside a file of arrays; of a checkpoint, that of its run.
        places = (path.parent / ABOUT, path.parent.parent.parent / "adapters" / ABOUT)
        return AdapterSource(text, path, next((file for file in places if is_file(file)), None))
    name, at, which = text.rpartition("@")
    for candidate, key in ((text, END), *(((name, which or END),) if at else ())):
        try:
            run = find_run(candidate, runs_dir)
        except UserError:
            continue
        try:
            choice = find_choice(run, key)
        except UserError as error:
            raise UserError(SETTING, error.faults[0].sentence) from None
        if choice.path.name != ARRAYS:
            sentence = f"The run {quote(run.name, 40)} trained every weight, so it has no adapter;"
            raise UserError(SETTING, f"{sentence} choose its model folder as the Base model.")
        step = "" if choice.step is None else f"@{choice.step}"
        about = run.adapters / ABOUT
        return AdapterSource(f"{run.path}{step}", choice.path, about if is_file(about) else None)
    where = f"no folder with {ARRAYS}, no file, and no run in {quote(runs_dir or runs_folder(), PATH)}"
    raise UserError(SETTING, f"There is no adapter {shown_path(text, 50)}: {where}.")


def peft_folder(text: str) -> Path | None:
    """The folder of a PEFT adapter, named by itself or by its file of arrays; None for anything else."""
    if (path := possible_path(text)) is None:
        return None
    folder = path.parent if path.name == PEFT else path
    return folder if is_file(folder / PEFT) and not is_file(folder / ARRAYS) else None


def imported_folder(folder: Path) -> Path:
    """The default place of an imported PEFT adapter: beside it. Raises UserError where none may be."""
    folder = resolved(folder)
    if folder.is_relative_to(resolved(hub_cache())):
        sentence = f"{quote(folder, PATH)} lies in Hugging Face's cache; copy it, or name another place with --output."
        raise UserError("output", sentence)
    return folder.with_name(f"{folder.name}-mlx")


def adapter_settings(source: AdapterSource) -> dict[str, Any]:
    """The settings that the adapters were trained with, by adapter_config.json. Raises UserError."""
    about: Any = read_json(source.about, SETTING) if source.about is not None else {}
    if not isinstance(about, dict):
        raise UserError(SETTING, f"{quote(source.about, PATH)} must hold a JSON object.")
    parameters = listed if isinstance(listed := about.get("lora_parameters"), dict) else {}
    found: dict[str, Any] = {"train_type": about.get("fine_tune_type"), "lora_keys": parameters.get("keys")}
    found |= {key: parameters.get(key) for key in ("rank", "scale")}
    found |= {key: about.get(key) for key in ("num_layers", "modules_to_save", "model")}
    return {key: value for key, value in found.items() if value is not None}


def with_adapter(raw: Mapping[str, Any], runs_dir: Path | None = None) -> dict[str, Any]:
    """Raw settings with the adapter's where they are missing. One that cannot be found is left for the check."""
    text = raw.get(SETTING)
    if not isinstance(text, str) or not text.strip():
        return dict(raw)
    try:
        source = find_adapter(text, runs_dir)
        decided = adapter_settings(source)
    except UserError:
        return dict(raw)
    given = translate(raw).values
    if given.get("lora_alpha") is not None:  # with the rank, it is the scale
        decided.pop("scale", None)
    missing = {key: value for key, value in decided.items() if given.get(key) in (None, "")}
    return dict(raw) | missing | {SETTING: source.text}


def runs_with_adapters() -> list[str]:
    return list(islice((run.name for run in all_runs() if is_file(run.adapters / ARRAYS)), RUNS_LISTED))
