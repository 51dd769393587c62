"""Write the folder: settings, scripts, code, rows, model, and the account of what is not the same. Completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.config.other_programs.into_trl import LeftOut, TrlSettings, into_trl, trl_yaml
from backend.config.row_settings import evaluation_sets
from backend.config.updates import OWN
from backend.data.files import kind_of_path
from backend.data.rows import (
    found_evaluation_set,
    names_by_split,
    names_elsewhere,
    names_of_evaluation_set,
    own_splits,
    split_elsewhere,
    splits_elsewhere,
)
from backend.data.sources import Found, Reading
from backend.export.atomic_folder import move_into_place, nearest_existing, staging_folder
from backend.export.destinations import safe_name
from backend.export.original.original_files import converted_from
from backend.export.trl.code_files import (
    SCRIPTS,
    copy_folder,
    copy_user_code,
    our_code,
    reward_names,
    rewards_module,
    script,
)
from backend.utils.disk_faults import disk_errors_of
from backend.utils.errors import UserError
from backend.utils.files import resolved, user_path
from backend.utils.hub_cache import local_folder
from backend.utils.own_files import own_file
from backend.utils.text import quote

# The packages that the folder needs, for train.py's inline metadata (PEP 723) and for pip.

TRL = "1.16"
"""The release whose arguments the tables of `backend.config.other_programs.trl` have."""
_OF_CODE = {"regex": "regex", "math_verify": "math-verify"}
"""Module that our code imports → the package that has it."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """`packages` as pip takes them, the first of which is TRL."""

    packages: tuple[str, ...]
    trl: str = TRL

    @property
    def header(self) -> str:
        """The comment that `uv run` reads, and a blank line."""
        listed = "".join(f'#     "{package}",\n' for package in self.packages)
        return f'# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n{listed}# ]\n# ///\n'

    @property
    def install_line(self) -> str:
        return "pip install " + " ".join(f'"{package}"' for package in self.packages)


def requirements(words: Mapping[str, Any], code: Iterable[str]) -> Requirements:
    """For these arguments of TRL and these sources of ours."""
    extras = [name for name, is_on in (("peft", words.get("use_peft")), ("vllm", words.get("use_vllm"))) if is_on]
    text = "\n".join(code)
    packages = [f"trl[{','.join(extras)}]=={TRL}.*" if extras else f"trl=={TRL}.*"]
    if words.get("load_in_4bit") or words.get("load_in_8bit") or "8bit" in str(words.get("optim")):
        packages.append("bitsandbytes>=0.45.1")
    packages += [
        package for module, package in _OF_CODE.items() if f"import {module}" in text or f"from {module}" in text
    ]
    trackers = words.get("report_to")
    packages += [name for name in (trackers if isinstance(trackers, list) else []) if name != "none"]
    return Requirements(tuple(packages))


# ── folder ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# README.md of the folder, and what of it is told elsewhere: how to run it, what is where, what is not as it is here.

FILES = {
    "train.py": "trains: TRL's GRPOTrainer with what this list says",
    "grpo_config.yaml": "TRL's arguments, as `trl grpo --config` takes them",
    "settings.json": "the run's settings under their names in GRPO Studio, for the other files",
    "dataset.py": "makes the rows: `data/` for training and validation, `held_out/` for the test and further sets",
    "rewards.py": "the reward functions under the names that TRL calls them by",
    "reward_calls.py": "gives them what they expect",
    "backend/": "the parts of GRPO Studio's code that these need, as they are there",
    "source/": "the rows of local files",
    "user_code/": "your own reward and map functions",
    "model/": "the model, which has no name on Hugging Face",
}
"""What may lie in the folder → what it is."""


def readme(
    name: str,
    requirements: Requirements,
    files: Iterable[str],
    by_files: Mapping[str, str],
    left_out: Iterable[LeftOut],
) -> str:
    """The text. `files`: the names at the top of the folder."""
    listed = [f"| `{file}` | {about} |" for file, about in FILES.items() if file in set(files)]
    carried = [f"| `{setting}` | {how} |" for setting, how in by_files.items()]
    left = [f"| `{row.setting}: {_in_code(row.shown)}` | {row.instead} |" for row in left_out]
    parts = [
        f"# {name}, for TRL\n\nWritten by GRPO Studio. It trains on CUDA machines with TRL {requirements.trl} and needs nothing of GRPO Studio.\n",
        _RUN.format(install=requirements.install_line),
        "## What is here\n\n| | |\n|---|---|\n" + "\n".join(listed) + "\n",
        "## What TRL has no argument for, and these files do\n\nWhat train.py does, `trl grpo` alone does not.\n\n| setting | how |\n|---|---|\n"
        + "\n".join(carried) + "\n" if carried else "",
        "## What is not carried over\n\n| setting | what stands in for it |\n|---|---|\n" + "\n".join(left) + "\n"
        if left
        else "## What is not carried over\n\nNothing: every setting of this run has its counterpart.\n",
        _DIFFERENT,
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _in_code(text: str) -> str:
    """A value between grave accents in a table, which it can leave neither by one of its own nor by a column's border."""
    return text.replace("`", "'").replace("|", "\\|")


_RUN = """\
## Run it

One GPU; [uv](https://docs.astral.sh/uv/) installs what the first lines of train.py name:

    uv run train.py

Several GPUs, here four, where the packages are installed. train.py divides an update among them, so that it has as many completions as
on one:

    {install}
    accelerate launch --num_processes 4 train.py

Hugging Face Jobs, from this folder. The folder is copied into a bucket, and `output/` is written there; what the job prints says how to
fetch it:

    hf jobs uv run --flavor a100-large --timeout 12h --secrets HF_TOKEN -v .:/run:rw train.py --folder /run

TRL's own script, which knows the arguments alone (below is what it leaves out):

    python dataset.py
    trl grpo --config grpo_config.yaml

Any argument of `trl grpo` may follow train.py and overrides the file: `--max_steps 2 --report_to none`. Without CUDA, train.py trains
on the CPU and samples with transformers. Reward functions run in the trainer's own process: code that a model wrote is executed
there, so use a machine or container that may be lost.

`output/` has the adapter in PEFT's files, or the whole model. An adapter comes home to GRPO Studio, onto the model there, with its logits
compared:

    python -m backend import output --model MODEL
"""

_DIFFERENT = """\
## What is different all the same

Sampling draws other random numbers, and vLLM or transformers computes in other kernels: the run is the same experiment, not the same
numbers. Loss and advantages of one batch are the same to five digits (GRPO Studio's tests compare them with TRL's).
"""


# ── source rows ──────────────────────────────────────────────────────────────────────────────────────────────────────

# The rows of a run for its export: a dataset of Hugging Face by its name, the rows of local files as JSON lines in
# `source/`.

SOURCE = "source"
Told = Callable[[str], None]


def write_rows(config: Config, folder: Path, tell: Told) -> tuple[dict[str, Any], dict[str, Any]]:
    """(where dataset.py finds the rows of each split, and those of each evaluation set with its settings). Local rows are written below
    `folder`. Raises UserError for rows that cannot be read."""
    return _splits(config, folder, tell), {
        name: {"settings": _portable(about), "rows": _set(name, about, folder, tell)}
        for name, about in evaluation_sets(config.eval_data).items()
    }


def _portable(about: dict[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation set without its path on this machine."""
    return {key: value for key, value in about.items() if key != "data"}


def _splits(config: Config, folder: Path, tell: Told) -> dict[str, Any]:
    reading, elsewhere = Reading(streamed=config.streaming), splits_elsewhere(config)
    if is_local(config.data):
        rows = {split: _copied(found, split, folder, tell) for split, found in own_splits(config, reading).items()}
    else:
        rows = {
            split: _on_hub(
                config.data, config.dataset_config, names, split == "train" or names == (_name_of(config, split),)
            )
            for split, names in names_by_split(config).items()
        }
    for split, name in elsewhere.items():
        if is_local(name):
            rows[split] = _copied(split_elsewhere(config, split, reading), split, folder, tell)
        else:
            of_same = config.dataset_config if name == config.data else ""
            rows[split] = _on_hub(name, of_same, names_elsewhere(config, split), True)
    return rows


def _name_of(config: Config, split: str) -> str:
    return getattr(config, f"{split}_split")


def _set(name: str, about: dict[str, Any], folder: Path, tell: Told) -> dict[str, Any]:
    if is_local(str(about["data"])):
        return _copied(found_evaluation_set(about, Reading()), f"set_{name}", folder, tell)
    return _on_hub(about["data"], about.get("dataset_config", ""), names_of_evaluation_set(about), True)


def is_local(name: str) -> bool:
    """Whether a dataset is a file or a folder here, and no id."""
    return kind_of_path(user_path(name, "data")) != ""


def _on_hub(repo: str, configuration: str, names: Iterable[str], is_needed: bool) -> dict[str, Any]:
    return {"repo": repo, "config": configuration, "names": list(names), "is_needed": is_needed, "source": repo}


def _copied(found: Found, name: str, folder: Path, tell: Told) -> dict[str, Any]:
    """Write the rows as JSON lines. What JSON has not becomes text, as in everything that leaves the process of a user's code."""
    file = folder / SOURCE / f"{name}.jsonl"
    tell(f"Copying the rows of {Path(found.source).name}.")
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for row in found.rows:
            out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return {"file": f"{SOURCE}/{name}.jsonl", "source": Path(found.source).name}


# ── base model ───────────────────────────────────────────────────────────────────────────────────────────────────────

# Which model TRL loads: the id on Hugging Face, the original of one that MLX converted, or a copy of a folder.

COPY = "model"
"""The folder in the export that a local model is copied into."""
_WEIGHTS = {4: "load_in_4bit", 8: "load_in_8bit"}


@dataclass(frozen=True, slots=True)
class TrlModel:
    """`name` for TRL. `copied_from`: the folder whose files go into COPY. `words`: further arguments. `left_out`: what is not the same."""

    name: str
    copied_from: Path | None = None
    words: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def trl_model(config: Config) -> TrlModel:
    """The model of a run as TRL finds it. Raises UserError for one that MLX packed and whose card does not name its original."""
    folder = local_folder(config.model)
    if folder is None:
        return TrlModel(config.model)
    original, bits = converted_from(folder, config.model)
    if original is None:
        is_path = user_path(config.model, "model").is_dir()
        return TrlModel(COPY, folder) if is_path else TrlModel(config.model)
    packed = (
        f"bitsandbytes packs it into {_nearest(bits)} bits of its own"
        if bits
        else "its weights are those that MLX converted"
    )
    left = LeftOut("model", config.model, f"PyTorch does not read MLX's files: the original, {original}; {packed}")
    words = (_WEIGHTS[_nearest(bits)],) if bits and config.train_type != "full" else ()
    return TrlModel(original, None, words, (left,))


def _nearest(bits: int) -> int:
    return 4 if bits <= 5 else 8


# ── folder ───────────────────────────────────────────────────────────────────────────────────────────────────────────

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
    """Write these settings as a folder for TRL, `parent`/`name`. Raises UserError for what the user can mend; nothing is left behind then,
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
        raise UserError("overwrite", f"{quote(target, 120)} is there already; choose another name, or overwrite it.")
    if not (target / MARK).is_file() or not (target / "settings.json").is_file():
        raise UserError(
            "overwrite",
            f"{quote(target, 110)} is there and no folder for TRL, so it is not replaced; choose another name.",
        )
    if (target / OUTPUT).exists():
        raise UserError(
            "overwrite",
            f"{quote(target / OUTPUT, 110)} has what was trained there, and would be lost; move it away, or choose another name.",
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
