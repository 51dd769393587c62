"""The weights that a run folder holds, what can be chosen of them, and the adapters that another run may start from.

Reads state.json and adapter_config.json; opens no arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.config.other_programs.translation import translate
from backend.runs.events import is_number, is_step, step_of_end
from backend.runs.run_folder import RunFolder, find_run
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder, resolved, user_path
from backend.utils.hub_cache import hub_cache
from backend.utils.places import runs_folder
from backend.utils.text import quote, shown_path

WEIGHT_FILES = ("adapters.safetensors", "model.safetensors")
"""A checkpoint's trained arrays: those of adapters, or of full fine-tuning."""
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A complete checkpoint. `score`: held-out reward at that step, else mean training reward, or `best_metric`."""

    path: Path
    step: int
    score: float | None
    metric: str = ""
    """Which metric the score is; "" for the reward."""
    is_lowest_best: bool = False
    series: int = 0
    """Only scores of one series are comparable."""

    @property
    def arrays(self) -> Path:
        """The file of trained arrays."""
        return next(file for name in WEIGHT_FILES if (file := self.path / name).exists())


def saved_weights(run: RunFolder) -> list[SavedWeights]:
    """Every complete checkpoint, oldest first."""
    found = [saved for folder in run.checkpoints.glob("[0-9]*") if (saved := _read(folder)) is not None]
    return sorted(found, key=lambda saved: saved.step)


def _read(folder: Path) -> SavedWeights | None:
    try:
        state = read_json(folder / "state.json", "checkpoint")
    except UserError:
        return None
    has_arrays = any((folder / name).exists() for name in WEIGHT_FILES)
    if not has_arrays or not isinstance(state, dict):
        return None
    state = cast("dict[str, Any]", state)
    if not (folder / OPTIMIZER_FILE).exists() and has_optimizer(state):
        return None
    step, score = state.get("step", 0), state.get("score")
    if not is_step(step):
        return None
    metric, series = str(state.get("score_metric", "")), state.get("score_series", 0)
    known = float(score) if is_number(score) else None
    return SavedWeights(
        folder, step, known, metric, state.get("best_is_lowest") is True, series if is_step(series) else 0
    )


def has_optimizer(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with this state.json has the optimizer's arrays (not so with `save_only_model`)."""
    files = state.get("files")  # absent in the checkpoints of earlier versions, which always wrote them
    return not isinstance(files, dict) or OPTIMIZER_FILE in files


def best_of(checkpoints: Iterable[SavedWeights]) -> SavedWeights | None:
    """The one with the best score of the newest series; None without scores.

    The score of an evaluation is repeated until the next one: the evaluated checkpoint is the first that has it.
    """
    scored = [(saved, saved.score) for saved in checkpoints if saved.score is not None]
    newest = max((saved.series for saved, _ in scored), default=0)
    of_series = [
        (-score if saved.is_lowest_best else score, -saved.step, saved)
        for saved, score in scored
        if saved.series == newest
    ]
    return max(of_series, key=lambda entry: entry[:2])[2] if of_series else None


def find_checkpoint(run: RunFolder, which: str) -> SavedWeights:
    """The checkpoint that `which` names: "best", "last" or a step. Raises UserError, with the steps that there are."""
    checkpoints = saved_weights(run)
    if not checkpoints:
        raise UserError("checkpoint", f"The run {run.name} has no checkpoint.")
    if which == "last":
        return checkpoints[-1]
    if which == "best":
        if (best := best_of(checkpoints)) is None:
            raise UserError("checkpoint", f"No checkpoint of the run {run.name} has a score; name a step, or last.")
        return best
    found = next((saved for saved in checkpoints if str(saved.step) == (which.strip().lstrip("0") or "0")), None)
    if found is None:
        steps = ", ".join(str(saved.step) for saved in checkpoints)
        sentence = f"The run {run.name} has no checkpoint {which}; there are {steps}, best and last."
        raise UserError("checkpoint", sentence)
    return found


def has_end(run: RunFolder) -> bool:
    """Whether the run has weights to export without naming a checkpoint: adapters, or the model of full fine-tuning."""
    adapters = all((run.adapters / name).is_file() for name in ("adapters.safetensors", "adapter_config.json"))
    return adapters or (run.model / "config.json").is_file()


END, BEST = "end", "best"


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Weights of one step.

    Attributes:
        key – selects them: end, best, or the step's number.
        path – a file of trained arrays, or the folder of a whole model.
        step – None where only what a run leaves beside its checkpoints is there.
    """

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
        """Size of the weights on disk; 0 where they are gone."""
        files = self.path.glob("model*.safetensors") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.exists())


def choices(run: RunFolder) -> list[WeightChoice]:
    """Everything that can be chosen: the end, the best checkpoint, then every checkpoint, newest first."""
    saved = saved_weights(run)
    of_steps = [WeightChoice(str(each.step), each.arrays, each.step) for each in reversed(saved)]
    best = best_of(saved)
    found = [WeightChoice(BEST, best.arrays, best.step)] if best is not None else []
    end = _end(run, saved)
    return [*([end] if end else []), *found, *of_steps]


def find_choice(run: RunFolder, key: str = END) -> WeightChoice:
    """The weights that `key` selects: end (also last), best, or a step. Raises UserError naming what there is."""
    offered = choices(run)
    if not offered:
        raise UserError("run", f"The run {run.name} has no trained weights yet.")
    wanted = {"last": END}.get(key.strip().lower(), key.strip().lower().lstrip("0") or "0")
    found = next((choice for choice in offered if choice.key == wanted), None)
    if found is None:
        keys = ", ".join(choice.key for choice in offered)
        raise UserError("checkpoint", f"The run {run.name} has no checkpoint {key}; choose one of {keys}.")
    return found


def _end(run: RunFolder, saved: list[SavedWeights]) -> WeightChoice | None:
    """The checkpoint of the run's end, usually the newest; if it was deleted, what the run has left beside them."""
    left = step_of_end(run)
    if found := [each for each in saved if left in (None, each.step)]:
        return WeightChoice(END, found[-1].arrays, found[-1].step)
    adapters = run.adapters / WEIGHT_FILES[0]
    if adapters.is_file():
        return WeightChoice(END, adapters)
    return WeightChoice(END, run.model) if (run.model / "config.json").is_file() else None


SETTING = "adapter"
ARRAYS, ABOUT, PEFT = "adapters.safetensors", "adapter_config.json", "adapter_model.safetensors"
RUNS_LISTED = 30
PATH = 60
"""Characters of a path in a message."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Adapters to start from. `text` names them for good: a run with its step. `about`: their adapter_config.json."""

    text: str
    weights: Path
    about: Path | None

    def described(self) -> dict[str, Any]:
        """The content of adapter_config.json, {} without one. Raises UserError."""
        content: Any = read_json(self.about, SETTING) if self.about is not None else {}
        if not isinstance(content, dict):
            raise UserError(SETTING, f"{quote(self.about, PATH)} must hold a JSON object.")
        return cast("dict[str, Any]", content)


def find_adapter(text: str, runs_dir: Path | None = None) -> AdapterSource:
    """The adapters that `text` names: a folder, a file, `RUN`, `RUN@best` or `RUN@step`. Raises UserError."""
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
    """The folder of a peft adapter that `text` names, by itself or by its file of arrays."""
    try:
        path = user_path(text, SETTING)
    except UserError:
        return None
    folder = path.parent if path.name == PEFT else path
    return folder if is_file(folder / PEFT) and not is_file(folder / ARRAYS) else None


def imported_folder(folder: Path) -> Path:
    """Where an imported peft adapter goes by default: beside it.

    Raises UserError inside Hugging Face's cache, where a folder would be taken for a revision, and for the root of a
    disk.
    """
    folder = resolved(folder)
    if not folder.name:
        sentence = f"{quote(folder, PATH)} is the root of a disk, with no place beside it; name one with --output."
        raise UserError("output", sentence)
    if folder.is_relative_to(resolved(hub_cache())):
        sentence = f"{quote(folder, PATH)} lies in Hugging Face's cache; copy it, or name another place with --output."
        raise UserError("output", sentence)
    return folder.with_name(f"{folder.name}-mlx")


def adapter_settings(source: AdapterSource) -> dict[str, Any]:
    """The settings that the adapters were trained with, by adapter_config.json. Raises UserError."""
    about = source.described()
    listed: Any = about.get("lora_parameters")
    parameters = cast("dict[str, Any]", listed if isinstance(listed, dict) else {})
    found: dict[str, Any] = {
        "train_type": about.get("fine_tune_type"),
        "num_layers": about.get("num_layers"),
        "rank": parameters.get("rank"),
        "scale": parameters.get("scale"),
        "lora_keys": parameters.get("keys"),
        "modules_to_save": about.get("modules_to_save"),
        "model": about.get("model"),
    }
    return {key: value for key, value in found.items() if value is not None}


def with_adapter(raw: Mapping[str, Any], runs_dir: Path | None = None) -> dict[str, Any]:
    """Raw settings with the step of a run as the start, and what the adapter decides where the file leaves it out.

    An adapter that cannot be found stays, and is reported by the check.
    """
    text = raw.get(SETTING)
    if not isinstance(text, str) or not text.strip():
        return dict(raw)
    try:
        source = find_adapter(text, runs_dir)
        decided = adapter_settings(source)
    except UserError:
        return dict(raw)
    given = translate(raw)[0]
    if given.get("lora_alpha") is not None:  # with the rank, it is the scale
        decided.pop("scale", None)
    missing = {key: value for key, value in decided.items() if given.get(key) in (None, "")}
    return dict(raw) | missing | {SETTING: source.text}


def runs_with_adapters(runs_dir: Path | None = None) -> list[str]:
    """Names of the newest runs that have adapters, the newest first."""
    try:
        folders = [entry for entry in os.scandir(runs_dir or runs_folder()) if entry.is_dir()]
    except OSError:
        return []
    having = [entry for entry in folders if is_file(Path(entry.path) / "adapters" / ARRAYS)]
    return [entry.name for entry in sorted(having, key=lambda entry: -entry.stat().st_mtime)[:RUNS_LISTED]]
