"""Where a run's adapters start from (`adapter`): a folder in mlx-lm's format, a file of arrays, or a run at its end or a checkpoint.

Finds the files and reads adapter_config.json; opens no arrays (`backend.models.start_adapter`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.config.other_programs.translation import translate
from backend.runs.run_folder import RunFolder, find_run
from backend.runs.weight_choices import find_choice
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder, resolved, user_path
from backend.utils.hub_cache import hub_cache
from backend.utils.places import runs_folder
from backend.utils.text import quote, shown_path

SETTING = "adapter"
ARRAYS, ABOUT, PEFT = "adapters.safetensors", "adapter_config.json", "adapter_model.safetensors"
RUNS_LISTED = 30
PATH = 60
"""Characters of a path in a sentence."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Adapters to start from. `text` names them for good: a run with its step. `about`: their adapter_config.json, None where there is
    none beside a file."""

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
        raise UserError(
            SETTING,
            f"{quote(peft, PATH)} is an adapter of peft; import it first, below the field or with the verb import.",
        )
    if is_file(path):
        return AdapterSource(text, path, _about(path))
    if is_folder(path) and is_file(path / ARRAYS):
        return AdapterSource(text, path / ARRAYS, _about(path / ARRAYS))
    run, which = _run_of(text, runs_dir)
    return _of_run(run, which)


def peft_folder(text: str) -> Path | None:
    """The folder of an adapter of peft that `text` names, by itself or by its file of arrays; None where it names none."""
    try:
        path = user_path(text, SETTING)
    except UserError:
        return None
    folder = path.parent if path.name == PEFT else path
    return folder if is_file(folder / PEFT) and not is_file(folder / ARRAYS) else None


def imported_folder(folder: Path) -> Path:
    """Where an adapter of peft goes when it is imported and no other place is named: beside it. Raises UserError inside Hugging Face's cache,
    where a folder beside it would be taken for a newer revision, and for the root of a disk, which has nothing beside it."""
    folder = resolved(folder)
    if not folder.name:
        raise UserError(
            "output", f"{quote(folder, PATH)} is the root of a disk, with no place beside it; name one with --output."
        )
    if folder.is_relative_to(resolved(hub_cache())):
        sentence = f"{quote(folder, PATH)} lies in Hugging Face's cache; copy it, or name another place with --output."
        raise UserError("output", sentence)
    return folder.with_name(f"{folder.name}-mlx")


def _run_of(text: str, runs_dir: Path | None) -> tuple[RunFolder, str]:
    name, at, which = text.rpartition("@")
    for candidate, chosen in ((text, ""), *(((name, which),) if at else ())):
        try:
            return find_run(candidate, runs_dir), chosen
        except UserError:
            continue
    where = quote(runs_dir or runs_folder(), PATH)
    raise UserError(
        SETTING, f"There is no adapter {shown_path(text, 50)}: no folder with {ARRAYS}, no file, and no run in {where}."
    )


def _of_run(run: RunFolder, which: str) -> AdapterSource:
    try:
        choice = find_choice(run, which or "end")
    except UserError as mistake:
        raise UserError(SETTING, mistake.faults[0].sentence) from None
    if choice.path.name != ARRAYS:
        sentence = f"The run {quote(run.name, 40)} trained every weight, so it has no adapter;"
        raise UserError(SETTING, f"{sentence} choose its model folder as the Base model.")
    step = "" if choice.step is None else f"@{choice.step}"
    about = run.adapters / ABOUT
    return AdapterSource(f"{run.path}{step}", choice.path, about if is_file(about) else None)


def _about(weights: Path) -> Path | None:
    """adapter_config.json beside a file of arrays; of a checkpoint, that of its run."""
    places = (weights.parent / ABOUT, weights.parent.parent.parent / "adapters" / ABOUT)
    return next((file for file in places if is_file(file)), None)


# ── settings that belong to it ───────────────────────────────────────────────────────────────────────────────────────


def adapter_settings(source: AdapterSource) -> dict[str, Any]:
    """The settings that the adapters were trained with, as far as adapter_config.json tells them. Raises UserError."""
    about = source.described()
    listed: Any = about.get("lora_parameters")
    parameters = cast("dict[str, Any]", listed if isinstance(listed, dict) else {})
    told: dict[str, Any] = {
        "train_type": about.get("fine_tune_type"),
        "num_layers": about.get("num_layers"),
        "rank": parameters.get("rank"),
        "scale": parameters.get("scale"),
        "lora_keys": parameters.get("keys"),
        "modules_to_save": about.get("modules_to_save"),
        "model": about.get("model"),
    }
    return {key: value for key, value in told.items() if value is not None}


def with_adapter(raw: Mapping[str, Any], runs_dir: Path | None = None) -> dict[str, Any]:
    """Raw settings in which a run as the start is named with its step, and settings that the adapter decides stand where the file leaves
    them out. What cannot be found stays, and is reported by the check."""
    text = raw.get(SETTING)
    if not isinstance(text, str) or not text.strip():
        return dict(raw)
    try:
        source = find_adapter(text, runs_dir)
        told = adapter_settings(source)
    except UserError:
        return dict(raw)
    given = translate(raw)[0]
    if given.get("lora_alpha") is not None:  # with the rank, it is the scale
        told.pop("scale", None)
    missing = {key: value for key, value in told.items() if given.get(key) in (None, "")}
    return dict(raw) | missing | {SETTING: source.text}


def runs_with_adapters(runs_dir: Path | None = None) -> list[str]:
    """Names of the newest runs that have adapters, the newest first."""
    try:
        folders = [entry for entry in os.scandir(runs_dir or runs_folder()) if entry.is_dir()]
    except OSError:
        return []
    found = [
        (entry.stat().st_mtime, entry.name) for entry in folders if is_file(Path(entry.path) / "adapters" / ARRAYS)
    ]
    return [name for _, name in sorted(found, reverse=True)[:RUNS_LISTED]]
