"""Write the folder: settings, scripts, code, rows, model, and the account of what is not the same. Completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.models.export.atomic_folder import move_into_place, nearest_existing, staging_folder
from backend.models.export.destinations import safe_name
from backend.run.export.trl.base_model import COPY, TrlModel, trl_model
from backend.run.export.trl.code_files import (
    SCRIPTS,
    copy_folder,
    copy_user_code,
    our_code,
    reward_names,
    rewards_module,
    script,
)
from backend.run.export.trl.readme import readme
from backend.run.export.trl.requirements import requirements
from backend.run.export.trl.source_rows import write_rows
from backend.spec.config import Config
from backend.spec.disk_faults import disk_errors_of
from backend.spec.faults import Mistake
from backend.spec.other_programs.into_trl.exported import TrlSettings, into_trl, trl_yaml
from backend.spec.other_programs.into_trl.writing import LeftOut
from backend.spec.settings.optimizer import OWN
from backend.spec.user_input.own_files import own_file
from backend.spec.user_input.paths import resolved, user_path
from backend.spec.user_input.text import shown

MARK = "grpo_config.yaml"
"""The file by which a folder of ours is known: only such a one is replaced."""
DATA, TRAIN, VALIDATION = "data", "train", "validation"
"""Where dataset.py puts the rows, and what its splits are called there."""
OUTPUT = "output"
"""Where TRL leaves what it trains."""
HOW_TO_RUN = "the arguments of TRL. python train.py, or python dataset.py and trl grpo --config grpo_config.yaml."
_OF_THIS_MACHINE = (
    "data",
    "valid_data",
    "test_data",
    "eval_data",
    "model",
    "adapter",
    "reference_model_path",
    "output_schema",
    "hosts",
)
"""Settings that no file of the folder reads and that may be paths."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrlFolder:
    """A folder that is in its place."""

    path: Path
    bytes: int
    left_out: list[LeftOut]
    by_files: dict[str, str]

    def sentences(self) -> list[str]:
        """What is not carried over, a line each."""
        return [f"Not carried over: {left.line}." for left in self.left_out]

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": str(self.path), "path": str(self.path), "bytes": self.bytes, "sentences": self.sentences(), "by_files": self.by_files,
            "left_out": [{"setting": left.setting, "value": left.value, "instead": left.instead} for left in self.left_out],
        }  # fmt: skip


def export_trl(
    config: Config, name: str, parent: Path | None, *, overwrite: bool = False, tell: Tell = lambda _: None
) -> TrlFolder:
    """Write these settings as a folder for TRL, `parent`/`name`. Raises Mistake for what the user can mend; nothing is left behind then,
    and a folder that was there stays."""
    parent = resolved((parent or Path.cwd()).expanduser())
    target = parent / safe_name(name)
    _check(target, overwrite)
    model = trl_model(config)
    with disk_errors_of(target), staging_folder(nearest_existing(parent), target) as staging:
        new = staging / "new"
        new.mkdir()
        settings = _write(config, model, name, new, tell)
        size = sum(file.stat().st_size for file in new.rglob("*") if file.is_file())
        if overwrite and target.exists():
            shutil.move(target, staging / "previous")
        move_into_place(new, target, overwrite=False)
    return TrlFolder(target, size, [*model.left_out, *settings.left_out], settings.by_files)


def _check(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not overwrite:
        raise Mistake("overwrite", f"{shown(target, 120)} is there already; choose another name, or overwrite it.")
    if not (target / MARK).is_file() or not (target / "settings.json").is_file():
        raise Mistake(
            "overwrite",
            f"{shown(target, 110)} is there and no folder for TRL, so it is not replaced; choose another name.",
        )
    if (target / OUTPUT).exists():
        raise Mistake(
            "overwrite",
            f"{shown(target / OUTPUT, 110)} has what was trained there, and would be lost; move it away, or choose another name.",
        )


def _write(config: Config, model: TrlModel, name: str, new: Path, tell: Tell) -> TrlSettings:
    if model.copied_from is not None:
        tell("Copying the model.")
        copy_folder(model.copied_from, new / COPY, "model")
    rows, sets = write_rows(config, new, tell)
    portable = _with_tokenizer(copy_user_code(config, new), new)
    code = our_code(config)
    for path, source in code.items():
        (new / path).parent.mkdir(parents=True, exist_ok=True)
        (new / path).write_text(source, encoding="utf-8")
    settings = into_trl(config)
    words = folder_words(settings, config, model)
    needs = requirements(words, code.values())
    for file in SCRIPTS:
        (new / file).write_text((needs.header if file == "train.py" else "") + script(file), encoding="utf-8")
    (new / "rewards.py").write_text(rewards_module(config), encoding="utf-8")
    (new / MARK).write_text(trl_yaml(words, f"{name}: {HOW_TO_RUN}"), encoding="utf-8")
    (new / "settings.json").write_text(_settings_text(portable, rows, sets), encoding="utf-8")
    there = [f"{path.name}/" if path.is_dir() else path.name for path in new.iterdir()]
    left = [*model.left_out, *settings.left_out]
    (new / "README.md").write_text(readme(name, needs, there, settings.by_files, left), encoding="utf-8")
    return settings


def _with_tokenizer(config: Config, new: Path) -> Config:
    """The settings with the tokenizer of its own, if it is a folder here, copied into the export."""
    folder = user_path(config.tokenizer, "tokenizer") if config.tokenizer else None
    if folder is None or not folder.is_dir():
        return config
    kept = [file for file in folder.iterdir() if file.is_file() and not file.name.endswith(".safetensors")]
    (new / "tokenizer").mkdir()
    for file in kept:
        shutil.copyfile(own_file(file, folder, "tokenizer"), new / "tokenizer" / file.name)
    return config.model_copy(update={"tokenizer": "tokenizer"})


def folder_words(settings: TrlSettings, config: Config, model: TrlModel) -> dict[str, Any]:
    """The arguments for this folder: its own rows, reward functions and model."""
    own: dict[str, Any] = {
        "model_name_or_path": model.name, "dataset_name": DATA, "dataset_train_split": TRAIN, "dataset_test_split": VALIDATION,
        "reward_funcs": [f"rewards.{name}" for name in reward_names(config).values()],
    }  # fmt: skip
    gone = ("dataset_config", "dataset_streaming")
    words = {word: value for word, value in settings.words.items() if word not in gone} | own
    is_packed = "load_in_4bit" in words or "load_in_8bit" in words
    return words if is_packed else words | dict.fromkeys(model.words, True)


def _settings_text(config: Config, rows: dict[str, Any], sets: dict[str, Any]) -> str:
    """settings.json: every setting but those that are paths of this machine, and where the rows are."""
    values = {key: value for key, value in config.model_dump().items() if key not in _OF_THIS_MACHINE}
    if config.lr_schedule == OWN:  # which train.py cannot follow
        values["lr_schedule"] = "constant"
    return json.dumps({"settings": values, "rows": rows, "evaluation_sets": sets}, ensure_ascii=False, indent=1) + "\n"
