"""Checks the names of models and datasets (a folder, file or Hugging Face id) and the tools file, without requests."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from backend.config.config import Config
from backend.rewards.catalogue import parse_reward_file
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import exists, is_file, is_folder, reason, user_path
from backend.utils.hub_cache import split_revision
from backend.utils.text import quote, shown_path

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # of datasets, in the order in which a folder is searched
_ID = re.compile(r"(?:[A-Za-z0-9_](?:[\w.-]*\w)?/)?[A-Za-z0-9_](?:[\w.-]{0,94}\w)?", re.ASCII)


def model_source(name: str, setting: str) -> str:
    """`name` as mlx-lm takes it: a folder, or an id on Hugging Face. Raises UserError for a missing folder."""
    path = user_path(name, setting)
    if is_folder(path):
        if not is_file(path / "config.json"):
            raise UserError(setting, f"The folder {quote(path)} holds no model: config.json is missing.")
        return str(path)
    if exists(path) or name.startswith((".", "/", "~")) or split_revision(name)[0].count("/") != 1:
        raise UserError(
            setting,
            f"There is no model {shown_path(name, 110)}: it is neither a folder nor an owner/name id on Hugging Face.",
        )
    _check_id(name, setting)
    return name


def check_weights(source: str, setting: str) -> None:
    """Raises UserError if `source` is a folder without weights."""
    folder = Path(source)
    if is_folder(folder) and not any(folder.glob("model*.safetensors")):
        raise UserError(setting, f"The folder {quote(folder)} holds no weights: model*.safetensors is missing.")


def check_reference(name: str, setting: str = "reference_model_path") -> None:
    """Check a reference: another model, or a folder with an adapter of the base model. Raises UserError."""
    folder = user_path(name, setting)
    if not is_file(folder / "adapter_config.json"):
        check_weights(model_source(name, setting), setting)
    elif not is_file(folder / "adapters.safetensors"):
        raise UserError(setting, f"The adapter {quote(folder)} has no adapters.safetensors.")


def check_data(name: str, setting: str = "data") -> None:
    """Raises UserError if `name` is neither a file of a known type, nor a folder, nor a possible id."""
    path = user_path(name, setting)
    try:
        os.stat(f"{path}/.")  # the dot asks for the right to look into a folder
    except PermissionError as error:
        raise UserError(setting, f"{quote(path)} cannot be read: {reason(error)}.") from None
    except OSError:
        pass
    if is_folder(path):
        return
    if is_file(path):
        if path.suffix.lower() not in DATA_SUFFIXES:
            known = f"{', '.join(DATA_SUFFIXES[:-1])} or {DATA_SUFFIXES[-1]}"
            raise UserError(setting, f"{quote(path)} must end in {known}.")
    elif exists(path):
        raise UserError(setting, f"{quote(path)} is neither a file nor a folder.")
    elif name.startswith((".", "/", "~")) or split_revision(name)[0].count("/") > 1 or name.endswith(DATA_SUFFIXES):
        raise UserError(setting, f"There is no file or folder {shown_path(name)}.")
    else:
        _check_id(name, setting)


def _check_id(name: str, setting: str) -> None:
    """Parts of letters, digits, ., - and _, as huggingface_hub checks them too; perhaps with @revision."""
    repo = split_revision(name)[0]
    if not _ID.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith(".git"):
        raise UserError(setting, f"There is no file or folder {quote(name)}, and no id on Hugging Face is written so.")


def source_faults(config: Config) -> list[ConfigProblem]:
    """Faults in names of model, dataset, teacher and reference policy, and in the tools file, if needed and given."""
    models = ["model"] + (["teacher_model"] if config.train_mode == "distill" else [])
    checks: dict[str, Callable[[str], object]] = {
        **{key: lambda name, key=key: check_weights(model_source(name, key), key) for key in models},
        "data": check_data,
        "tools_file": lambda name: parse_reward_file(user_path(name, "tools_file", Path.cwd()), "tools_file"),
    }
    if config.needs_reference:
        checks["reference_model_path"] = check_reference
    faults: list[ConfigProblem] = []
    for key, check in checks.items():
        name = str(getattr(config, key)).strip()
        try:
            if name:
                check(name)
        except UserError as error:
            faults += error.faults
    return faults
