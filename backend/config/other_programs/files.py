"""Files of settings: any of another program as one of ours, ours as one for mlx-lm-lora, the problems of a file that
is opened: its lines, and which keys were probably meant."""

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from backend.config.config import SETTINGS, Config, dump, problems, resolve_paths, valid_value
from backend.config.other_programs.keys import OtherProgram, Translated
from backend.config.other_programs.mlx_lm import MLX_LM_LORA, QUANTIZATION_FLAGS
from backend.config.other_programs.translation import DEFAULTS, FOREIGN_WORDS, program_of, read_file, settings_of
from backend.config.setting import NEVER
from backend.config.updates import final_rate, warmup_updates
from backend.models.architectures import ALL_LINEAR, adapter_scale
from backend.rewards.catalogue import nearest
from backend.runs.saved_weights import find_adapter
from backend.utils.documents import YAML_LIMIT, read_json, read_yaml
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import read_text, user_path
from backend.utils.hub_cache import split_revision
from backend.utils.text import one_line, quote

_GIVEN_LATER = ("model", "data", "reward_functions", "reward_functions_file")
"""Settings that a Python script, and not its file of arguments, would name: they may be missing."""


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """`program`: whose file it was. `missing`: what is still needed before it can be trained."""

    text: str
    program: OtherProgram
    missing: list[ConfigProblem]


def import_file(path: Path, *, their_defaults: bool = True) -> ImportedFile:
    """Translate a YAML or JSON file. `their_defaults`: write the program's defaults for keys that the file leaves out.
    Raises UserError for a file of no other program, and for every key that cannot be translated."""
    path = user_path(str(path), "file")
    raw: Any = read_json(path, "file") if path.suffix.lower() == ".json" else read_yaml(path, "file")
    if not isinstance(raw, dict):
        raise UserError("file", f"{quote(path)} must hold settings as “key: value” lines.")
    raw = resolve_paths(path.parent, {str(key): value for key, value in raw.items()})
    translation = read_file(raw, {} if their_defaults else {DEFAULTS: "ours"})
    program, values = translation.program, translation.values
    if program is None:
        advice = "check it as it is, with check"
        raise UserError("file", f"{quote(path)} has no word of TRL, mlx-lm-lora or mlx-grpo alone; {advice}.")
    faults = problems(values)
    if wrong := [fault for fault in [*translation.faults, *faults] if fault.setting not in _GIVEN_LATER]:
        raise UserError(list(dict.fromkeys(wrong)))
    missing = [fault for fault in faults if fault.setting in _GIVEN_LATER]
    if program.key == "trl" and "reward_functions" not in values:
        sentence = "The file names none; without any, GRPO Studio's five defaults score completions."
        missing.append(ConfigProblem("reward_functions", sentence))
    valid = {key: valid_value(key, value) for key, value in values.items() if key in SETTINGS}
    words = [(word.fate, word.word, word.sentence) for word in translation.words]
    comments = {
        f"Not in the file; what {program.name} takes:": [
            f"{key}: {quote(valid[key], 60)}" for key in valid if key in translation.defaults
        ],
        "Read as:": [f"{word} → {sentence}" for fate, word, sentence in words if fate == "translated"],
        "Not carried over:": [f"{word}: {sentence}" for fate, word, sentence in words if fate == "without effect"],
    }
    origin = f"# From {one_line(path.name, 80)}, a file for {program.name}, by python -m backend import.\n"
    wrapper = textwrap.TextWrapper(100, initial_indent="#   ", subsequent_indent="#     ")
    parts = [origin, dump(valid)]
    for title, lines in comments.items():
        if lines:
            wrapped = [part for line in lines for part in wrapper.wrap(one_line(line))]
            parts.append("\n".join([f"# {title}", *wrapped, ""]))
    return ImportedFile("\n".join(filter(None, parts)), program, missing)


_REGROUPED = (
    "rank scale lora_alpha use_rslora dropout lora_keys quantization weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "lr_schedule lr_warmup_steps lr_warmup_ratio lr_warmup_init lr_decay_fraction lr_final reward_functions "
    "reward_weights"
)
"""Settings that `mlx_lm_lora_yaml` writes in mlx-lm-lora's own way."""
_SHARED = [
    key
    for key, fate in MLX_LM_LORA.words.items()
    if isinstance(fate, Translated) and fate.settings == (key,) and key not in f"{_REGROUPED} report_to delta".split()
]
"""Keys that mean the same in both programs."""


def mlx_lm_lora_yaml(config: Config) -> tuple[str, dict[str, Any]]:
    """(YAML text, settings away from their defaults without a counterpart → values, which the text lists too)."""
    missing = {
        key
        for key, about in SETTINGS.items()
        if key not in (*_SHARED, *_REGROUPED.split()) and getattr(config, key) != about.default
    }
    values: dict[str, Any] = {
        key: getattr(config, key) for key in _SHARED if getattr(config, key) not in (None, "")
    } | {"train": True}
    if config.train_type != "full":
        parameters: dict[str, Any] = {"rank": config.rank, "scale": adapter_scale(config), "dropout": config.dropout}
        # mlx-lm has whole names only, and none for all linear layers, which it adapts without names.
        keys = [key for key in config.lora_keys if key != ALL_LINEAR]
        values["lora_parameters"] = parameters | ({"keys": keys} if keys else {})
    if config.adapter:
        with suppress(UserError):  # where it cannot be found, it is listed
            values["resume_adapter_file"] = str(find_adapter(config.adapter).weights)
            missing -= {"adapter"}
    values |= {key: True for key, kind in QUANTIZATION_FLAGS.items() if kind == config.quantization}
    if config.lr_schedule in ("cosine", "linear") and not config.epochs:  # it counts the decay in steps
        peak, final = config.learning_rate, final_rate(config.learning_rate, config.lr_final)
        steps = round(config.lr_decay_fraction * config.iters)
        curve = {"name": "linear_schedule", "arguments": [peak, final, steps]}
        if config.lr_schedule == "cosine":
            curve = {"name": "cosine_decay", "arguments": [peak, steps, final]}
        warmup = {"warmup": warmup_updates(config, config.iters), "warmup_init": config.lr_warmup_init}
        values["lr_schedule"] = curve | warmup
    elif config.lr_schedule != "constant":
        missing.add("lr_schedule")
    if config.lr_schedule == "constant" and config.lr_warmup_ratio:
        missing.add("lr_warmup_ratio")
    if config.optimizer in ("adam", "adamw", "muon"):
        own: dict[str, Any] = {"weight_decay": config.weight_decay} if config.optimizer != "adam" else {}
        if config.optimizer != "muon":
            own |= {"betas": [config.adam_beta1, config.adam_beta2]}
            own |= {"eps": config.adam_epsilon} if config.adam_epsilon != SETTINGS["adam_epsilon"].default else {}
        values["optimizer_config"] = {config.optimizer: own}
    else:
        missing.add("optimizer")
    if config.grpo_loss_type not in ("grpo", "bnpo", "dr_grpo"):
        missing.add("grpo_loss_type")
    # Names as comma-separated text and weights as text in brackets, as its command line reads them.
    values["reward_functions"] = ",".join(config.reward_functions)
    if config.reward_weights:
        values["reward_weights"] = str(list(config.reward_weights))
    # It counts iterations, each of which is one batch: a step of ours is as many as it accumulates.
    for key in ("iters", "steps_per_report", "steps_per_eval", "save_every"):
        values[key] = min(getattr(config, key) * config.gradient_accumulation_steps, NEVER)
    missing |= {key for key in ("model", "data") if split_revision(getattr(config, key))[1]}
    missing |= {key for key in ("steps_per_eval", "save_every") if getattr(config, key) < 0}
    if config.epochs:
        del values["iters"]
    values = {key: value for key, value in values.items() if key not in missing}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    left_out = {key: getattr(config, key) for key in SETTINGS if key in missing}
    lines = [f"#   {key}: {value}\n".replace("\n", " ").rstrip() for key, value in left_out.items()]
    note = "\n".join(["", "# Left out, because mlx-lm-lora has no such setting:", *lines, ""]) if lines else ""
    return text + note, left_out


@dataclass(frozen=True, slots=True)
class UnreadKey:
    key: str
    sentence: str
    meant: str = ""


@dataclass(frozen=True, slots=True)
class FileProblems:
    """What of a file was not read into the form. `raw`: its keys and values. `lines`: key, or the setting of ours that
    it names → its line in the file, from 1. `refusal`: why nothing of the file was read, or ""."""

    path: Path
    raw: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[UnreadKey] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""


def file_problems(
    path: Path, raw: Mapping[str, Any], faults: Sequence[ConfigProblem], lines: Mapping[str, int]
) -> FileProblems:
    """`faults`: of reading `raw`. A correction is offered where one unknown key is meant, and the file lacks it."""
    known = [*SETTINGS, *FOREIGN_WORDS]
    unknown = [fault.setting for fault in faults if fault.setting in raw and fault.setting not in known]
    meant = {key: near for key in unknown if (near := nearest(key, known)) is not None}
    clear = {key: near for key, near in meant.items() if near not in raw and list(meant.values()).count(near) == 1}
    unread = [UnreadKey(fault.setting, fault.sentence, clear.get(fault.setting, "")) for fault in faults]
    return FileProblems(path, raw, sorted(unread, key=lambda each: lines.get(each.key, 0)), lines)


def key_lines(path: Path, raw: Mapping[str, Any]) -> dict[str, int]:
    lines, program, read = dict[str, int](), program_of(raw), set[int]()
    nodes: list[Any] = [yaml.compose(read_text(path, "config", YAML_LIMIT), Loader=yaml.SafeLoader)]
    for node in nodes:  # those within a mapping come after it
        if isinstance(node, yaml.MappingNode) and id(node) not in read:  # an alias may stand within its own node
            read.add(id(node))
            for key, value in node.value:
                for name in (str(key.value), *settings_of(str(key.value), program)):
                    lines.setdefault(name, key.start_mark.line + 1)
                nodes.append(value)
    return lines
