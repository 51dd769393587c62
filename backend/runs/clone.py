"""A new run from a checkpoint of another, with some settings changed. Its folder appears complete or not at all,
as that of a stopped run, which `resume` continues.

*Warm*: the clone continues with the parent's weights, optimizer, place in the data, event log and completions; without
changes bit for bit as the parent would have. *Cold*: it starts at step 0 from the parent's weights. Its config.yaml has
the changes of settings that the parent had by that step.
"""

import os
import shutil
from collections.abc import Mapping, Set
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_unflatten

from backend.config.config import SETTINGS, Config, dump, keys_used_by, load, parse
from backend.config.other_programs.translation import translate
from backend.config.setting import STAGE_OWN
from backend.config.updates import OWN
from backend.export.exports import staging_folder
from backend.runs.checkpoint import arrays_of, examine, lengths_at, write_state
from backend.runs.events import EventLog, check_format
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import Parent, write_parent
from backend.runs.saved_weights import Checkpoint, TrainingState, find_checkpoint
from backend.runs.steering import own_config, read_changes
from backend.training.learner import optimizer_of
from backend.training.optimizers import state_arrays
from backend.utils.disk import cause, is_of_mlx, replace_file, sync, sync_tree
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import require_plain_files, restrict_to_user
from backend.utils.text import quote

Reference = Literal["base", "clone"]

OF_THE_WEIGHTS = (  # settings that the weights were trained for
    *("model", "train_mode", "train_type", "num_layers", "rank", "scale", "lora_alpha", "use_rslora", "lora_keys"),
    *("modules_to_save", "quantization", "dtype"),
)
OF_THE_STATE = (  # settings of the optimizer's state and the place in the data, which a warm clone keeps
    *("optimizer", "own_optimizer", "optimizer_bits"),
    *("data", "dataset_config", "train_split", "validation_split"),
)
OF_THE_PARENT: dict[str, Any] = {"run_name": "", "adapter": ""}


def clone_settings(parent: RunFolder, which: str, changes: Mapping[str, Any], *, warm: bool) -> tuple[Config, Config]:
    """The parent's settings at checkpoint `which` ("best", "last" or a step), and those of a clone with `changes`, raw
    settings of which None means the default. Raises UserError."""
    step = find_checkpoint(parent, which).step
    before = own_config(load(parent.config), read_changes(parent), step)
    translation = translate(changes)
    if translation.faults:
        raise UserError(translation.faults)
    values = translation.values
    emptied = {key: SETTINGS[key].default for key, value in changes.items() if value is None and key in SETTINGS}
    # The clone's weights are the parent's, whatever the parent started from.
    after = parse(before.model_dump() | OF_THE_PARENT | emptied | values)
    staged = {key for stage in before.stages for key in stage if key not in STAGE_OWN} if "stages" not in values else {}
    changed = _changed(before, after)
    of_stages = "{} of this run is set by its stages; change the stages instead."
    of_weights = "{} belongs to the weights that a clone starts from, and stays as it is."
    of_state = "{} cannot change where a clone goes on (warm); a cold clone starts with another."
    sentences = {key: of_stages for key in values if key in staged}
    sentences |= {key: of_weights for key in OF_THE_WEIGHTS if key in changed}
    sentences |= {key: of_state for key in OF_THE_STATE if warm and key in changed}
    problems = [ConfigProblem(key, text.format(SETTINGS[key].label)) for key, text in sentences.items()]
    if warm and not (after.epochs or after.stages or after.iters > step):
        sentence = f"A clone that goes on after step {step} needs more than {after.iters} Iterations."
        problems.append(ConfigProblem("iters", sentence))
    if problems:
        raise UserError(problems)
    return before, after


def _changed(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    keys = [key for key in SETTINGS if key not in OF_THE_PARENT and getattr(before, key) != getattr(after, key)]
    return {key: (getattr(before, key), getattr(after, key)) for key in keys}


def clone(
    parent: RunFolder,
    which: str = "last",
    changes: Mapping[str, Any] | None = None,
    *,
    warm: bool = True,
    name: str = "",
    runs_dir: Path | None = None,
    reference: Reference = "base",
) -> RunFolder:
    """Make a clone's folder in `runs_dir`, by default beside the parent. `reference`: what a cold one stays near."""
    check_format(parent)
    require_plain_files(parent.path)  # a copy would take what they lead to
    before, after = clone_settings(parent, which, changes or {}, warm=warm)
    if reference == "clone" and (warm or after.train_type == "full"):
        raise UserError("reference", "Only a cold clone of LoRA or DoRA can stay near the weights that it starts from.")
    saved, runs_dir = find_checkpoint(parent, which), runs_dir or parent.path.parent
    if why := examine(parent, saved.path):
        raise UserError("checkpoint", f"The checkpoint of step {saved.step} cannot be used: {why}.")
    wanted = name or f"{parent.name}-from-{saved.state.step}"
    path, numbers = runs_dir / wanted, count(2)
    while os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        if name:
            raise UserError("run_name", f"There is a run {name} already; choose another name for the clone.")
        path = runs_dir / f"{wanted}-{next(numbers)}"
    folder = RunFolder(path)
    after = parse(after.model_dump() | {"run_name": name})
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        # Of one name for one clone: the next one clears what a killed one has left.
        with staging_folder(folder.path.parent, folder.path, "clone") as staging:
            draft = RunFolder(staging)  # itself, so that nothing is left of it once it has its name
            restrict_to_user(draft.path)
            if reference == "clone":
                (draft.path / "reference").mkdir()
                shutil.copy2(saved.weights_file, draft.path / "reference")
                shutil.copy2(parent.adapters / "adapter_config.json", draft.path / "reference")
                after = parse(after.model_dump() | {"reference_model_path": str(folder.path / "reference")})
            changed = _changed(before, after)
            state, target = TrainingState(), draft.checkpoints / (saved.path.name if warm else "000000")
            target.mkdir(parents=True)
            if warm:
                state = _copy_warm(parent, saved, changed.keys(), draft)
            else:
                shutil.copy2(saved.weights_file, target)
                if after.optimizer != OWN:
                    fresh = optimizer_of(after)
                    parameters: Any = tree_unflatten(list(arrays_of(saved, "weights").items()))
                    fresh.init(parameters)
                    mx.save_safetensors(str(target / "optimizer.safetensors"), state_arrays(fresh))
            event_log = EventLog(draft.events)
            if warm and changed:
                event_log.write("change", step=state.step + 1, settings=changed)
            write_state(target, replace(state, events_bytes=event_log.size))
            how = f"{'from' if warm else 'with the weights of'} {parent.name} after step {saved.state.step}"
            # A run that waits to be resumed, which cuts this line off.
            sentence = f"Cloned {how}, and not begun yet."
            event_log.write("stopped", step=state.step, reason="cloned", sentence=sentence)
            event_log.close()
            about = parent.adapters / "adapter_config.json"
            if saved.weights_file.name == "adapters.safetensors" and about.is_file():  # for chat before it has begun
                draft.adapters.mkdir()
                shutil.copy2(saved.weights_file, draft.adapters)
                shutil.copy2(about, draft.adapters)
            write_parent(draft, Parent(parent.name, parent.path, saved.state.step, warm, changed))
            replace_file(draft.config, dump(after))
            sync_tree(draft.path)
            draft.path.rename(folder.path)
            sync(folder.path.parent)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_of_mlx(error):
            raise
        sentence = f"The run {quote(parent.name, 40)} cannot be cloned to {quote(folder.path)}: {cause(error)}."
        raise UserError("run", sentence) from None
    return folder


def _copy_warm(parent: RunFolder, saved: Checkpoint, changed: Set[str], draft: RunFolder) -> TrainingState:
    """Copy what the parent has up to a checkpoint. → its state, without what belongs to `changed` settings."""
    for file in saved.path.iterdir():
        shutil.copy2(file, draft.checkpoints / saved.path.name)
    events_bytes, completions_bytes = lengths_at(parent, saved)
    _copy_head(parent.events, draft.events, events_bytes)
    _copy_head(parent.completions, draft.completions, completions_bytes)
    state = replace(saved.state, completions_bytes=completions_bytes)
    if state.gpu_errors_told:  # they have left smaller micro-batches, which round differently
        lines = parent.gpu_errors.read_bytes().splitlines(keepends=True)
        draft.gpu_errors.write_bytes(b"".join(lines[: state.gpu_errors_told]))
    if changed & {"entropy_coef", "entropy_adaptive"}:
        state = replace(state, bonus=[])
    if changed & {"reward_functions", "reward_functions_file", "reward_weight_schedule"}:
        state = replace(state, reward_weights=[])
    if changed & {*keys_used_by("rewards", "scoring"), "stages", "best_metric", "best_is_lowest"}:
        state.forget_scores()
    return state


def _copy_head(source: Path, target: Path, size: int) -> None:
    if not source.exists():
        return
    with source.open("rb") as file:  # which may still be growing
        target.write_bytes(file.read(size))
