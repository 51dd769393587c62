"""Every problem a person can mend before a run: settings first, then what is on disk. Loads no weights, trains nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backend.data.rows import check_columns, check_prompts, read_splits
from backend.models.hub_search import config_file
from backend.models.support import architectures, module_of
from backend.run.scoring_stages import stages
from backend.spec.config import Config, parse, problems
from backend.spec.faults import Fault, Mistake
from backend.spec.memory.estimate import estimate, machine_bytes
from backend.spec.memory.model_shape import shape_of
from backend.spec.model_and_data_names import check_reference, check_weights, model_source


def check(raw: Mapping[str, Any]) -> list[Fault]:
    """All faults of raw settings and of what they point to. What is on disk is looked at once the settings are sound."""
    faults = problems(raw)
    return faults or check_disk(parse(raw))


def check_disk(config: Config) -> list[Fault]:
    """Faults of model, reference, dataset, columns, prompts and rewards; each part is looked at whatever the others say.

    A reward file is run to see what it registers: naming it on the command line is consent.
    """
    faults: list[Fault] = []
    folder = _caught(faults, lambda: check_model(config.model, "model"))
    if folder is not None:
        _caught(faults, lambda: _check_quantised(folder, config))
        faults += _too_large(folder, config)
    if config.reference_model_path and config.needs_reference:
        _caught(faults, lambda: _check_reference(config.reference_model_path))
    _caught(faults, lambda: _check_data(config, folder))
    _caught(faults, lambda: stages(config, config.iters))
    return faults


def _too_large(folder: Path, config: Config) -> list[Fault]:
    """What cannot be trained on this machine even with the shortest prompts."""
    shape = shape_of(folder)
    found = estimate(config, shape, machine_bytes(), prompt=1) if shape is not None and shape.is_transformer else None
    return [found.fault] if found is not None and found.fault is not None else []


def _check_reference(name: str) -> None:
    """Another model, or a folder with an adapter of the base."""
    check_reference(name)
    if not (Path(name).expanduser() / "adapter_config.json").is_file():
        check_model(name, "reference_model_path")


def _caught(faults: list[Fault], look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Mistake as mistake:
        faults += mistake.faults
        return None


def check_model(name: str, setting: str) -> Path:
    """The folder with the model's config.json (from the Hub's cache or the Hub itself for an id). Raises Mistake for a
    model that is not there, or that mlx-lm has no code for."""
    source = Path(model_source(name, setting))
    file = source / "config.json" if source.is_dir() else config_file(name, setting)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise Mistake(setting, f"{file} is not a model's configuration.")
    if module_of(config) not in architectures():
        raise Mistake(
            setting,
            f"The model {name} is of the kind {config.get('model_type')}, which this version of mlx-lm cannot load.",
        )
    check_weights(str(source), setting)
    return file.parent


def _check_quantised(folder: Path, config: Config) -> None:
    """A quantised model cannot be quantised again, and none of its packed weights can learn."""
    if "quantization" not in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return
    if config.quantization != "none":
        raise Mistake("quantization", f"{config.model} is quantised already; choose None to train it as it comes.")
    if config.train_type == "full":
        raise Mistake(
            "train_type", f"{config.model} is quantised, and packed weights cannot learn; choose LoRA or DoRA."
        )


def _check_data(config: Config, model_folder: Path | None) -> None:
    """Rows, columns, and, where the model is there, whether the prompts fit."""
    splits = read_splits(config)
    for split in ("train", "valid", "test"):
        rows = getattr(splits, split)
        if rows and (faults := check_columns(rows, config, splits.source.get(split, config.data))):
            raise Mistake(faults)
    if config.test and not splits.test:
        raise Mistake("test", f"Evaluate test split is on, and {config.data} has no split {config.test_split}.")
    if model_folder is not None and (model_folder / "tokenizer_config.json").exists():
        check_prompts(splits.train, _tokenizer(model_folder), config, splits.source["train"])


def _tokenizer(folder: Path) -> Any:
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(folder)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Mistake("model", f"The tokenizer in {folder} cannot be loaded: {reason}.") from error
