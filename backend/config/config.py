"""Every setting of a run, declared once. Form, YAML, command line, checks and help are read from this list. Code that
depends on a group of settings tags the fields (`used_by`) and asks `keys_used_by`."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from backend.config.checks import CheckedValues, cross_setting_faults, default_score
from backend.config.other_programs.translation import FOREIGN_WORDS, NAMES, read_file
from backend.config.other_programs.trl import reward_entries
from backend.config.row_settings import prompt_limit
from backend.config.setting import SECTIONS, Modes, Setting, Use, declared_settings, has_default_rewards, in_form_order
from backend.config.settings.grpo import GrpoFields
from backend.config.settings.model_and_data import DataFields, ModelFields
from backend.config.settings.training import TrainingFields
from backend.config.stages import validated_stages
from backend.rewards.catalogue import nearest, split_names, with_absolute_file
from backend.tools.mcp_settings import OPENENV, with_absolute_paths
from backend.utils.documents import read_json, read_yaml, validation_error
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import exists, read_text, user_path
from backend.utils.text import SENTENCE, quote


class Config(GrpoFields, DataFields, TrainingFields, ModelFields, Modes):  # fields of the last base come first
    """The settings of one run, validated. Build it with `load` or `parse`, which explain every problem."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @property
    def prompts_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * (1 if self.imitates else self.steps_per_generation)

    @property
    def prompts_per_evaluation_batch(self) -> int:
        return self.eval_batch_size or self.prompts_per_step

    @property
    def prompt_limit(self) -> int:
        """Tokens of the longest prompt that is sampled from."""
        return prompt_limit(self.max_seq_length, self.max_completion_length, self.max_prompt_length)

    @property
    def updates_per_step(self) -> int:
        return 1 if self.imitates else self.num_iterations * self.steps_per_generation

    @property
    def weights(self) -> list[float]:
        return self.reward_weights or [1.0] * len(self.reward_functions)

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def penalises(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)


SETTINGS: dict[str, Setting] = in_form_order(declared_settings(Config.model_fields))  # by key, in the order of the form

TEXTS = ("text", "prose", "model", "adapter", "dataset", "file", "hosts", "choice")
"""Kinds of settings whose value is text even where YAML reads a number."""

FILES = ("model", "adapter", "dataset", "file", "hosts")  # kinds of settings whose value may be a file or folder

PATHS = (*(key for key, about in SETTINGS.items() if about.kind in FILES), "output_schema")
"""Keys whose value may be a path, relative to its file."""


def keys_used_by(*uses: Use) -> tuple[str, ...]:
    """Keys of the settings with any of these uses, in the order of the form."""
    return tuple(key for key, about in SETTINGS.items() if set(uses) & set(about.used_by))


def needs_reference(raw: Mapping[str, Any]) -> bool:
    """As `Config.needs_reference`, from raw settings; what is missing or invalid counts as its default."""
    keys = ("beta", "log_kl", "ratio_against", "train_mode", "distillation_weight", "teacher_model_kind")
    values = {key: SETTINGS[key].default for key in keys}
    for key in values:
        with suppress(UserError):
            values[key] = values[key] if raw.get(key) is None else valid_value(key, raw[key])
    return CheckedValues(**values).needs_reference


def sections() -> dict[str, list[Setting]]:
    return {section: [about for about in SETTINGS.values() if about.section == section] for section in SECTIONS}


def problems(raw: Mapping[str, Any]) -> list[ConfigProblem]:
    """Every problem of raw settings, in the form's order. Reads no files."""
    return _validate(raw)[1]


def parse(raw: Mapping[str, Any]) -> Config:
    """The settings of a raw mapping. Raises UserError with every problem."""
    values, faults = _validate(raw)
    if faults:
        raise UserError(faults)
    return Config(**values)


def load(path: str | Path) -> Config:
    """The settings of a YAML file; paths in it are relative to the file. Raises UserError."""
    return parse(read(path))


def read(path: str | Path, setting: str = "config") -> dict[str, Any]:
    """Raw mapping of a YAML or JSON file; relative paths that exist become absolute. Raises UserError on `setting`."""
    path = user_path(str(path), setting)
    raw: Any = read_json(path, setting) if path.suffix.lower() == ".json" else read_yaml(path, setting)
    if not isinstance(raw, dict):
        what = {type(None): "nothing", list: "a list", str: "plain text"}.get(type(raw), "a single value")
        raise UserError(setting, f"{quote(path)} must hold settings as “key: value” lines, but it holds {what}.")
    return resolve_paths(path.parent, raw)


def resolve_paths(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Raw settings with relative paths that exist in `folder` made absolute."""

    def of_path(value: Any) -> Any:
        only: Any = value[0] if isinstance(value, list) and len(value) == 1 else value
        is_path = isinstance(only, str) and only and not Path(only).is_absolute() and exists(folder / only)
        return os.path.realpath(folder / only) if is_path else value

    def of_code(entry: Any) -> Any:
        if isinstance(entry, str) and entry.startswith(OPENENV):
            place = folder / entry.removeprefix(OPENENV)
            return OPENENV + os.path.realpath(place) if place.is_dir() else entry
        return with_absolute_file(entry, folder) if isinstance(entry, str) else entry

    def of_rewards(listed: Any) -> Any:
        listed = split_names(listed) if isinstance(listed, str) and ("::" in listed or "/" in listed) else listed
        return [of_code(one) for one in listed] if isinstance(listed, list) else listed

    def of_each(value: Any, of_one: Callable[[Any], Any]) -> Any:
        return {name: of_one(one) for name, one in value.items()} if isinstance(value, dict) else value

    def of_settings(about: Any) -> Any:
        return resolve_paths(folder, about) if isinstance(about, dict) else about

    of_key: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys((*PATHS, *(word for word in raw if NAMES.get(word) in PATHS)), of_path),
        **dict.fromkeys(("reward_functions", "reward_model_name_or_path"), of_rewards),
        "reward_funcs": lambda listed: of_rewards(reward_entries(listed)),  # TRL's, where a function has an import path
        "eval_data": lambda sets: of_each(sets, lambda one: of_settings(of_path(one))),
        "mcp_servers": lambda servers: of_each(servers, lambda one: with_absolute_paths(one, folder)),
        "environment": lambda named: of_each(named, of_code) if isinstance(named, dict) else of_code(named),
        "stages": lambda stages: [of_settings(one) for one in stages] if isinstance(stages, list) else stages,
    }
    return {key: of_key[key](value) if key in of_key and value is not None else value for key, value in raw.items()}


def origin_of(path: Path) -> str:
    """The sentence of `dump` on where the settings of a YAML file are from; "" without."""
    first = read_text(path, "config").partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# From ") else ""


def dump(config: Config | Mapping[str, Any], origin: str = "") -> str:
    """All settings as YAML text, by section. `origin`: a line that begins with “From ”, as a comment at the top."""
    values = config.model_dump() if isinstance(config, Config) else dict(config)
    if values.get("epochs"):
        values.pop("iters", None)
    parts = [f"# {origin}\n"] if origin else []
    for section, members in sections().items():
        # Empty text for an optional setting that was emptied: null would mean that the file leaves it out.
        chosen = {
            about.key: "" if values[about.key] is None and about.default is not None else values[about.key]
            for about in members
            if about.key in values
        }
        if chosen:
            text = yaml.dump(chosen, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
            parts.append(f"# {SECTIONS[section]}\n{text}")
    return "\n".join(parts)


class _Dumper(yaml.SafeDumper):
    """Quotes text with a "next line" character, which PyYAML would read back as a newline."""


_Dumper.add_representer(
    str, lambda to, text: to.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)
)


def _validate(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """(valid values by key, problems)."""
    faults: list[ConfigProblem] = []
    usable: dict[str, Any] = {}
    for key, value in raw.items():
        if validation_error(key):
            faults.append(ConfigProblem(quote(key), f"There is no setting {quote(key, 40)}."))
        elif why := validation_error(value):
            faults.append(ConfigProblem(key, f"{SETTINGS[key].label if key in SETTINGS else quote(key, 40)} {why}."))
        else:
            usable[key] = value
    translation = read_file(usable)
    translated = translation.values
    faults += translation.faults
    untranslated = {fault.setting for fault in faults}
    for key in [key for key in translated if key not in SETTINGS]:
        near = nearest(key, [*SETTINGS, *FOREIGN_WORDS])
        sentence = f"There is no setting {quote(key, 40)}." + (f" Did you mean {near}?" if near else "")
        faults.append(ConfigProblem(key.strip() or "config", sentence if key.strip() else "A setting has no name."))
    values: dict[str, Any] = {}
    for key, about in SETTINGS.items():
        if key not in untranslated:
            try:
                values[key] = valid_value(key, translated[key]) if key in translated else about.default
            except UserError as error:
                faults += error.faults
    if not has_default_rewards(values) and not translated.get("reward_functions"):
        values["reward_functions"] = []
    if not values.get("best_metric") and default_score(values) != "reward":
        values["best_is_lowest"] = True
    if values.get("stages"):
        values["stages"], of_stages = validated_stages(values, valid_value)
        faults += of_stages
    faults += cross_setting_faults(values)
    order = list(SETTINGS)
    return values, sorted(faults, key=lambda fault: order.index(fault.setting) if fault.setting in order else -1)


def valid_value(key: str, value: Any) -> Any:
    """The validated value of one setting, whatever the others are. Raises UserError."""
    about = SETTINGS[key]
    if value == "" and about.optional:
        return None
    if value in ("", []) and about.empty_is_default:
        return about.default
    if about.kind in TEXTS and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    sentence = validation_error(value)
    if isinstance(value, bool) and about.kind in ("int", "float"):
        sentence = f"must be a number, not {str(value).lower()}"
    if not sentence:
        try:
            value = _adapter(key).validate_python(value)
        except ValidationError as invalid:
            error: Any = invalid.errors()[0]
            expected = _EXPECTED.get(about.kind, "text")
            if error["type"] in _LIMITS:
                word, limit = _LIMITS[error["type"]]
                number = error["ctx"][limit]
                expected = f"{word} {int(number) if number == int(number) else f'{number:g}'}"
            sentence = f"must be {expected}, not {str(value).lower() if isinstance(value, bool) else _quoted(value)}"
    if sentence:
        raise UserError(key, f"{about.label} {sentence}.")
    if about.kind in FILES or (about.kind == "text" and key.endswith("_split")):
        user_path(str(value), key)
    if about.choices and value not in [choice.value for choice in about.choices]:
        known = [choice.value for choice in about.choices if not choice.is_hidden]
        near = nearest(str(value), known)
        begin = f"{about.label} cannot be {_quoted(value)}; it is one of "
        end = f". Did you mean {near}?" if near else "."
        raise UserError(key, f"{begin}{quote(', '.join(known), SENTENCE - len(begin) - len(end))}{end}")
    return value


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    field = Config.model_fields[key]
    return TypeAdapter[Any](Annotated[field.annotation, field])  # pyright: ignore


_LIMITS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list of texts",
    "rewards": "a list of names",
    "numbers": "a list of numbers",
    "mapping": "a mapping",
    "stages": "a list of stages",
}


def _quoted(value: Any) -> str:
    return f"'{quote(value, 60)}'" if isinstance(value, str) else quote(value, 60)
