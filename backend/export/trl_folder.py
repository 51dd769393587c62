"""Export a run's settings as a folder that trains with TRL on CUDA, without GRPO Studio."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import Any

from jinja2 import Environment

from backend.config.config import Config
from backend.config.other_programs.into_trl import LeftOut, TrlSettings, into_trl, require_grpo, trl_yaml
from backend.config.row_settings import evaluation_sets
from backend.config.updates import OWN
from backend.data.images import IMAGES
from backend.data.rows import Found, OtherDataset, Reading, evaluation_set, names_by_split, own_splits, splits_elsewhere
from backend.export.exports import Progress, folder_bytes, safe_name, silent
from backend.export.originals import converted_from
from backend.judges.model_reward import model_entries
from backend.rewards import functions as functions  # registers them
from backend.rewards.allowed_code import code_files, read_code
from backend.rewards.catalogue import locate_reward_file, metric_name, reward_call
from backend.rewards.registry import REWARD_REGISTRY
from backend.tools.mcp_settings import OPENENV
from backend.utils.disk import whole_folder
from backend.utils.errors import UserError
from backend.utils.files import exists, read_text, resolved, user_path
from backend.utils.hub_cache import local_folder, own_file, own_files, split_revision
from backend.utils.places import project_root, resources
from backend.utils.text import quote

TRL = "1.16"  # TRL release that `backend.config.other_programs.trl` targets
SCRIPTS = ("train.py", "dataset.py", "reward_calls.py")
USER_CODE, SOURCE, COPY, SCORERS = "user_code", "source", "model", "reward_models"  # folders
MARK = "grpo_config.yaml"  # file that marks our folders; only these are replaced
DATA, TRAIN, VALIDATION = "data", "train", "validation"  # where dataset.py writes the rows, and its split names
OUTPUT = "output"  # TRL's output folder
HOW_TO_RUN = "the arguments of TRL. python train.py, or python dataset.py and trl grpo --config grpo_config.yaml."
ABOUT_REWARDS = "The reward functions of the run, in the order of their weights: `trl grpo` names them as rewards.NAME."
PACKAGES = {  # imported module → its package
    "regex": "regex",
    "math_verify": "math-verify",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "jinja2": "jinja2",
}
FILES = {  # file of the folder → description
    "train.py": "trains: TRL's GRPOTrainer with what this list says",
    "grpo_config.yaml": "TRL's arguments, as `trl grpo --config` takes them",
    "skypilot.yaml": "the same on a cloud's machine: `sky launch skypilot.yaml`",
    "settings.json": "the run's settings under their names in GRPO Studio, for the other files",
    "dataset.py": "makes the rows: `data/` for training and validation, `held_out/` for the test and further sets",
    "rewards.py": "the reward functions under the names that TRL calls them by",
    "reward_calls.py": "gives them what they expect",
    "backend/": "the modules of GRPO Studio that these need",
    "source/": "the rows of local files",
    "user_code/": "your own reward and map functions, tools and environments",
    "reward_models/": "the reward models, which have no name on Hugging Face",
    "model/": "the model, which has no name on Hugging Face",
}
OF_THIS_MACHINE = (  # settings with possible paths or keys that no exported file reads
    *("data", "valid_data", "test_data", "eval_data", "model", "adapter", "reference_model_path", "output_schema"),
    *("hosts", "mcp_servers"),
)
READ_AS_TEXT = ("backend/training/losses.py",)  # as `backend.config.settings.grpo` builds menus from them
RESOURCE = "resources/other_programs.yaml"  # what these modules read when they are imported
_SETTING = "reward_functions_file"


@dataclass(frozen=True, slots=True)
class TrlFolder:
    path: Path
    bytes: int
    left_out: list[LeftOut]
    by_files: dict[str, str]

    def sentences(self) -> list[str]:
        return [f"Not carried over: {left.line}." for left in self.left_out]

    def to_dict(self) -> dict[str, Any]:
        about = {"place": str(self.path), "path": str(self.path), "bytes": self.bytes, "sentences": self.sentences()}
        return about | {"by_files": self.by_files, "left_out": [asdict(left) for left in self.left_out]}


def export_trl(
    config: Config, name: str, parent: Path | None, *, overwrite: bool = False, tell: Progress = silent
) -> TrlFolder:
    """Write settings as a TRL folder `parent`/`name`. Raises UserError; an existing folder then stays."""
    parent = resolved((parent or Path.cwd()).expanduser())
    target = parent / safe_name(name)
    if target.exists():
        if not overwrite:
            raise UserError(
                "overwrite", f"{quote(target, 120)} is there already; choose another name, or overwrite it."
            )
        if not (target / MARK).is_file() or not (target / "settings.json").is_file():
            other = f"{quote(target, 110)} is there and no folder for TRL, so it is not replaced"
            raise UserError("overwrite", f"{other}; choose another name.")
        if (target / OUTPUT).exists():
            trained = f"{quote(target / OUTPUT, 110)} has what was trained there, and would be lost"
            raise UserError("overwrite", f"{trained}; move it away, or choose another name.")
    require_grpo(config)
    config, judges = with_models_first(config)
    model, scorers = trl_model(config), reward_models(config)
    model = replace(model, left_out=(*model.left_out, *judges))
    with whole_folder(target) as new:
        settings, left_out = _write(config, model, scorers, name, new, tell)
        size = folder_bytes(new)
    return TrlFolder(target, size, left_out, settings.by_files)


def _write(
    config: Config, model: TrlModel, scorers: Sequence[TrlModel], name: str, new: Path, tell: Progress
) -> tuple[TrlSettings, list[LeftOut]]:
    for each in (model, *scorers):
        if each.copied_from is not None:
            tell("Copying the model." if each is model else "Copying a reward model.")
            (new / each.name).parent.mkdir(exist_ok=True)
            _copy_folder(each.copied_from, new / each.name, "model" if each is model else "reward_functions")
    rows, sets = write_rows(config, new, tell)
    portable = copy_user_files(config, scorers, new)
    modules = needed_modules(config)
    for path in (*modules, RESOURCE):
        (new / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(project_root() / path, new / path)
    settings = into_trl(config)
    words = {key: value for key, value in settings.words.items() if key not in ("dataset_config", "dataset_streaming")}
    model_name, revision = split_revision(model.name)
    functions = reward_names(config).values()
    imports = "".join(f"import {module}  # registers its functions\n" for module in reward_modules(config))
    first = len(config.reward_functions) - len(functions)  # after the reward models
    assigned = "".join(f"{function} = FUNCTIONS[{place}]\n" for place, function in enumerate(functions, first))
    words |= {"model_revision": revision} if revision else {}
    words |= {"model_name_or_path": model_name, "dataset_name": DATA}
    words |= {"dataset_train_split": TRAIN, "dataset_test_split": VALIDATION}
    words |= {"reward_funcs": [f"rewards.{function}" for function in functions]}
    if scorers:
        words["reward_model_name_or_path"] = scorers[0].name
    if "load_in_4bit" not in words and "load_in_8bit" not in words:
        words |= dict.fromkeys(model.words, True)
    packages = requirements(words, [(new / path).read_text(encoding="utf-8") for path in modules])
    values = {key: value for key, value in portable.model_dump().items() if key not in OF_THIS_MACHINE}
    if config.lr_schedule == OWN:  # which train.py cannot follow
        values["lr_schedule"] = "constant"
    about = {"settings": values, "rows": rows, "evaluation_sets": sets}
    listed = "".join(f'#     "{package}",\n' for package in packages)
    # What `uv run` reads (PEP 723)
    header = f'# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n{listed}# ]\n# ///\n'
    texts = {file: script(file) for file in SCRIPTS}
    texts |= {
        "train.py": header + texts["train.py"],
        "rewards.py": f'"""{ABOUT_REWARDS}"""\n\n{imports}from reward_calls import reward_functions\n\n'
        f"FUNCTIONS = reward_functions()\n{assigned}",
        "skypilot.yaml": script("skypilot.yaml"),
        MARK: trl_yaml(words, f"{name}: {HOW_TO_RUN}"),
        "settings.json": json.dumps(about, ensure_ascii=False, indent=1) + "\n",
    }
    left_out = [*(left for each in (model, *scorers) for left in each.left_out), *settings.left_out]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    texts["README.md"] = environment.from_string(script("README.md")).render(
        name=name,
        trl=TRL,
        packages=packages,
        files={*texts, *(f"{path.name}/" for path in new.iterdir())},
        described=FILES,
        by_files=settings.by_files,
        left_out=left_out,
    )
    for file, text in texts.items():
        (new / file).write_text(text, encoding="utf-8")
    return settings, left_out


@dataclass(frozen=True, slots=True)
class TrlModel:
    """TRL's model `name`, the folder to copy, further arguments, and differences."""

    name: str
    copied_from: Path | None = None
    words: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def with_models_first(config: Config) -> tuple[Config, list[LeftOut]]:
    """(settings, reward models first as `trl grpo` has them; judges, left out). Raises UserError if none is left."""
    named, file, weights = config.reward_functions, config.reward_functions_file, config.reward_weights
    models = model_entries(named, locate_reward_file(file) if file else None)
    calls = [reward_call(entry, REWARD_REGISTRY) for entry in named]
    order = [place for place, call in enumerate(calls) if call.is_model or named[place] not in models]
    order.sort(key=lambda place: not calls[place].is_model)
    if named and not order and not config.environment:
        raise UserError("reward_functions", "TRL has no judge; choose another reward function beside it.")
    judges = [call for place, call in enumerate(calls) if place not in order]
    left = [LeftOut("reward_functions", call.name, "TRL has no judge") for call in judges]
    ordered = {"reward_functions": [named[place] for place in order]}
    ordered |= {"reward_weights": [weights[place] for place in order if weights]}
    return (config.model_copy(update=ordered) if models else config), left


def reward_models(config: Config) -> list[TrlModel]:
    """The reward models, folders as copies under the names of their scores. Raises UserError as `trl_model`."""
    models: list[TrlModel] = []
    for entry in config.reward_functions:
        if not (call := reward_call(entry, REWARD_REGISTRY)).is_model:
            continue
        model = trl_model(config.model_copy(update={"model": call.function}))
        left = [replace(each, setting="reward_functions") for each in model.left_out]
        if models:
            left.append(LeftOut("reward_functions", call.name, "trl grpo takes one reward model; train.py takes all"))
        if "quantization" in call.arguments:
            left.append(LeftOut("quantization", entry, "TRL loads a reward model as it loads the model"))
        name = f"{SCORERS}/{call.name}" if model.copied_from else model.name
        models.append(replace(model, name=name, left_out=tuple(left)))
    return models


def trl_model(config: Config) -> TrlModel:
    """A Hub id, an MLX conversion's original, or a folder copy. Raises UserError where a card names no original."""
    folder = local_folder(config.model)
    if folder is None:
        return TrlModel(config.model)
    original, bits = converted_from(folder, config.model)
    if original is None:
        return TrlModel(COPY, folder) if user_path(config.model, "model").is_dir() else TrlModel(config.model)
    nearest = 4 if bits <= 5 else 8
    packed = f"bitsandbytes packs it into {nearest} bits" if bits else "its weights are those that MLX converted"
    left = LeftOut("model", config.model, f"PyTorch does not read MLX's files: the original, {original}; {packed}")
    words = (f"load_in_{nearest}bit",) if bits and config.train_type != "full" else ()
    return TrlModel(original, None, words, (left,))


# The rows: a dataset of Hugging Face by its name, the rows of local files as JSON lines in `source/`


def write_rows(config: Config, folder: Path, tell: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
    """(row sources by split, evaluation sets with their settings), local rows below `folder`. Raises UserError."""
    reading, rows = Reading(streamed=config.streaming), dict[str, Any]()
    if not config.data.strip() or is_local(config.data):  # without data, rows of an environment
        rows = {split: _copied(found, split, folder, tell) for split, found in own_splits(config, reading).items()}
    else:
        for split, names in names_by_split(config).items():
            is_needed = split == "train" or names == (getattr(config, f"{split}_split"),)
            rows[split] = _on_hub(config.data, config.dataset_config, names, is_needed)
    for split, other in splits_elsewhere(config).items():
        rows[split] = _rows_of(other, reading, split, folder, tell)
    sets: dict[str, Any] = {}
    for name, about in evaluation_sets(config.eval_data).items():
        found = _rows_of(evaluation_set(about), Reading(), f"set_{name}", folder, tell)
        sets[name] = {"settings": {key: value for key, value in about.items() if key != "data"}, "rows": found}
    return rows, sets


def is_local(name: str) -> bool:
    return exists(user_path(name, "data"))


def _rows_of(other: OtherDataset, reading: Reading, name: str, folder: Path, tell: Progress) -> dict[str, Any]:
    if is_local(other.name):
        return _copied(other.find(reading), name, folder, tell)
    return _on_hub(other.name, other.config_name, other.names, True)


def _on_hub(repo: str, configuration: str, names: Iterable[str], is_needed: bool) -> dict[str, Any]:
    name, revision = split_revision(repo)
    about = {"repo": name, "revision": revision, "config": configuration, "names": list(names)}
    return about | {"is_needed": is_needed, "source": repo}


def _copied(found: Found, name: str, folder: Path, tell: Progress) -> dict[str, Any]:
    source, file = Path(found.source).name, folder / SOURCE / f"{name}.jsonl"
    tell(f"Copying the rows of {source}.")
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for row in found.rows:
            if any(row.get(name) for name in IMAGES):
                raise UserError("data", f"{source} has images, and they are not carried into a folder for TRL yet.")
            out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return {"file": f"{SOURCE}/{name}.jsonl", "source": source}


# Our code: whole modules, as far as they import each other when they are imported


def script(name: str) -> str:
    return (resources() / "trl" / name).read_text(encoding="utf-8")


def needed_modules(config: Config) -> list[str]:
    """Our modules that the exported files import. Raises UserError."""
    waiting = [name for file in SCRIPTS for name in _imported(script(file), lazy=True)]
    waiting += ["backend.rewards", *reward_modules(config)]
    for path in code_files(config.model_dump()):
        try:
            waiting += _imported(read_text(path, _SETTING), lazy=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(_SETTING, f"{quote(path, 90)} is no Python: {quote(error, 60)}.") from None
    paths: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        path = _module_path(name)
        if path is None or name in paths:
            continue
        paths[name] = path
        waiting += [name.rpartition(".")[0]]
        # Reward functions import the rest of the rewards when they are called.
        source = (project_root() / path).read_text(encoding="utf-8")
        waiting += _imported(source, lazy=name.startswith("backend.rewards."))
    return sorted([*paths.values(), *READ_AS_TEXT])


def _module_path(name: str) -> str | None:
    base = name.replace(".", "/")
    if not (name == "backend" or name.startswith("backend.")):
        return None
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if (project_root() / path).is_file()), None)


def _imported(source: str, *, lazy: bool) -> Iterator[str]:
    tree = ast.parse(source)
    yield from re.findall(r"""["'](backend[\w.]*)["']""", source)  # a module that is imported by its name
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def reward_modules(config: Config) -> list[str]:
    """Our modules of reward functions: those in use, or all beside a user's code, which may call any."""
    calls = (reward_call(entry, REWARD_REGISTRY) for entry in config.reward_functions)
    names = REWARD_REGISTRY if code_files(config.model_dump()) else (c.function for c in calls if not c.is_model)
    return sorted({REWARD_REGISTRY[name].__module__ for name in names})


def reward_names(config: Config) -> dict[str, str]:
    """Name of a function's scores → its identifier in rewards.py. Reward models have none."""
    names: dict[str, str] = {}
    for entry in config.reward_functions:
        if reward_call(entry, REWARD_REGISTRY).is_model:
            continue
        plain = re.sub(r"\W", "_", metric_name(entry), flags=re.ASCII)
        if plain == "FUNCTIONS" or iskeyword(plain) or not plain.isidentifier():
            plain = f"reward_{plain}"
        names[metric_name(entry)] = plain + "_" * sum(name.rstrip("_") == plain for name in names.values())
    return names


def copy_user_files(config: Config, scorers: Sequence[TrlModel], folder: Path) -> Config:
    """Copy the user's code and tokenizer; returns settings with new paths, and `scorers`."""
    homes: dict[Path, str] = {}
    for path in code_files(config.model_dump()):
        home = homes.setdefault(path.parent, USER_CODE + (f"_{len(homes) + 1}" if homes else ""))
        (folder / home).mkdir(exist_ok=True)
        _copy_code(path, folder / home)
    changes: dict[str, Any] = {}
    tokenizer = user_path(config.tokenizer, "tokenizer") if config.tokenizer else None
    if tokenizer is not None and tokenizer.is_dir():
        (folder / "tokenizer").mkdir()
        for file in tokenizer.iterdir():
            if file.is_file() and not file.name.endswith(".safetensors"):
                shutil.copyfile(own_file(file, tokenizer, "tokenizer"), folder / "tokenizer" / file.name)
        changes["tokenizer"] = "tokenizer"

    def portable(name: str) -> str:
        path = locate_reward_file(name).resolve()
        return f"{homes[path.parent]}/{path.name}"

    calls = [(entry, reward_call(entry, ())) for entry in config.reward_functions if homes or scorers]
    if calls:
        functions = [
            replace(call, file=portable(call.file)).text if call.file else entry
            for entry, call in calls
            if not call.is_model
        ]
        changes["reward_functions"] = [*(scorer.name for scorer in scorers), *functions]
    for key in ("reward_functions_file", "tools_file"):
        if name := getattr(config, key):
            changes[key] = portable(name)

    named, environments = config.environment, dict[str, str]()
    for name, entry in (named if isinstance(named, dict) else {"": named}).items():
        file, _, kind = entry.rpartition("::")
        if file and not entry.startswith(OPENENV):
            environments[name] = f"{portable(file.strip())}::{kind}"
    changes["environment"] = environments if isinstance(named, dict) else environments.get("", "")
    return config.model_copy(update=changes)


def _copy_code(path: Path, home: Path) -> None:
    if (home / path.name).exists():
        return
    shutil.copyfile(own_file(path, path.parent, _SETTING), home / path.name)
    for name in read_code(path).beside:
        module, package = path.parent / f"{name}.py", path.parent / name
        if module.is_file():
            _copy_code(module, home)
        elif not (home / name).exists() and _module_path(name) is None:
            _copy_folder(package, home / name, _SETTING)


def _copy_folder(source: Path, target: Path, setting: str) -> None:
    target.mkdir()
    for path in own_files(source, setting):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def requirements(words: Mapping[str, Any], code: Iterable[str]) -> list[str]:
    """Pip requirements of these TRL arguments and sources, TRL first."""
    extras = [name for name, is_on in (("peft", words.get("use_peft")), ("vllm", words.get("use_vllm"))) if is_on]
    text = "\n".join(code)
    packages = [f"trl[{','.join(extras)}]=={TRL}.*" if extras else f"trl=={TRL}.*"]
    if words.get("load_in_4bit") or words.get("load_in_8bit") or "8bit" in str(words.get("optim")):
        packages.append("bitsandbytes>=0.45.1")
    packages += [
        package for module, package in PACKAGES.items() if re.search(rf"^\s*(import|from) {module}\b", text, re.M)
    ]
    trackers = words.get("report_to")
    packages += [name for name in (trackers if isinstance(trackers, list) else []) if name != "none"]
    return packages
