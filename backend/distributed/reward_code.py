"""The files with a run's reward functions, as text: from the leader, where the settings name them, to folders of the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.rewards.catalogue.catalog import locate_reward_file
from backend.rewards.catalogue.entry import read_call
from backend.rewards.scorer import reward_source
from backend.utils.files import read_bytes


def code_of(config: Config) -> dict[str, str]:
    """Path, as `located` has it → text of every file that the run executes. Raises UserError for one that cannot be read."""
    source = reward_source(config)
    files = {*source.files, *([source.file.resolve()] if source.file else [])}
    return {str(path): read_bytes(path, "reward_functions_file").decode(errors="surrogateescape") for path in files}


def located(name: str) -> str:
    """The path of a file that the settings name."""
    return str(locate_reward_file(name).resolve())


def named_files(config: Config) -> dict[str, str]:
    """Name in the settings → path, of every file with reward functions; the working directory is the leader's alone."""
    entries = [
        *config.reward_functions,
        *(entry for stage in config.stages for entry in stage.get("reward_functions") or []),
    ]
    names = {read_call(entry).file for entry in entries} | {config.reward_functions_file}
    return {name: located(name) for name in names if name}


def write_code(code: dict[str, str], folder: Path) -> dict[str, Path]:
    """Write each file into a folder of its own inside `folder`, under its own name. → where each is, by the path that it has on the leader."""
    written: dict[str, Path] = {}
    for number, (path, text) in enumerate(code.items()):
        written[path] = folder / str(number) / Path(path).name
        written[path].parent.mkdir(parents=True, exist_ok=True)
        written[path].write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    return written


def with_code(config: Config, files: dict[str, Path]) -> Config:
    """The settings with other paths for the files that they name. `files`: name in the settings → path."""
    values: dict[str, Any] = {"reward_functions": [_moved(entry, files) for entry in config.reward_functions]}
    if config.reward_functions_file:
        values["reward_functions_file"] = str(files[config.reward_functions_file])
    values["stages"] = [
        stage | {"reward_functions": [_moved(entry, files) for entry in stage["reward_functions"]]}
        if stage.get("reward_functions")
        else stage
        for stage in config.stages
    ]
    return config.model_copy(update=values)


def _moved(entry: str, files: dict[str, Path]) -> str:
    name = read_call(entry).file
    return f"{files[name]}{entry[entry.index('::') :]}" if name else entry
