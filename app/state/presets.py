"""Presets, and what a dropped dataset does to the form."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from app.state.draft import Draft, defaults, is_equivalent
from app.state.memory import amount
from app.state.run_summary import name_of_model
from backend.config import config
from backend.config.config import SETTINGS, keys_used_by
from backend.config.other_programs.translation import translate
from backend.config.setting import DATASET_KEYS, Setting
from backend.utils import places
from backend.utils.documents import YAML_LIMIT
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path

OWN = keys_used_by("task")  # settings of the user's task, which a preset may not change
REPLACES = "Replaces: everything"  # third line of a preset that is a complete task
BRINGS = "Brings: dataset and rewards"  # third line of a preset of a public dataset
BROUGHT = {*DATASET_KEYS, "valid_data", "test_data", "reward_functions", "reward_weights", "reward_functions_file"}
ORDER = (
    *("demo", "calculator", "shapes", "fast_try", "reasoning", "small_memory", "gspo", "dapo", "dr_grpo"),
    *("full_small", "as_documented", "gsm8k", "deepmath"),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings by name. `replaces`: every other one goes back to its default; `brings`: dataset and rewards too."""

    name: str
    title: str
    sentence: str
    values: Mapping[str, Any]
    replaces: bool
    brings: bool = False

    def applied(self, values: Mapping[str, Any]) -> dict[str, Any]:
        before = defaults() if self.replaces else dict(values)
        if self.brings:  # what an earlier dataset had besides has no place beside this one
            before |= {key: value for key, value in defaults().items() if key in BROUGHT}
        return {**before, **self.values}

    def changes(self, values: Mapping[str, Any]) -> list[tuple[Setting, Any, Any]]:
        """(setting, value before, value after) of every setting that would change."""
        after = self.applied(values)
        return [
            (about, values[key], after[key])
            for key, about in SETTINGS.items()
            if not is_equivalent(values[key], after[key])
        ]


def presets() -> list[Preset]:
    """Every preset, the shipped ones first. Raises UserError for an invalid file."""
    places_of = {name: place for place, name in enumerate(ORDER)}
    files = (places.resources() / "presets").glob("*.yaml")
    return [preset(file) for file in sorted(files, key=lambda file: (places_of.get(file.stem, len(ORDER)), file.stem))]


def preset(file: Path) -> Preset:
    lines = read_text(file, "preset", YAML_LIMIT).splitlines()
    comments = [line.lstrip("# ").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    title, sentence, *more = [*comments, "", ""]
    if not title or not sentence:
        raise UserError("preset", f"{file.name} must begin with two comment lines: its title, and a sentence.")
    replaces, brings = REPLACES in more, BRINGS in more
    raw = config.read(file)
    read = translate(raw)
    values, found = read.values, config.problems({"model": "a/b", "data": "a/b"} | read.values)
    if faults := read.faults + [fault for fault in found if fault.setting not in OWN]:
        raise UserError(faults)
    taken = [key for key in values if key in OWN and not (brings and key in BROUGHT)]
    if taken and not replaces:
        raise UserError("preset", f"{file.name} sets {taken[0]}, but does not say that it replaces everything.")
    # `epsilon_high: null` is a choice: None is a value of an optional setting.
    emptied = {key: None for key in raw if raw[key] is None and key in SETTINGS and SETTINGS[key].optional}
    return Preset(file.stem, title, sentence, values | emptied, replaces, brings)


def use_data(draft: Draft, name: str) -> str:
    """Set dataset and likely columns; a demo or a form without a model becomes a quick preset. → what was done."""
    from backend.config.first_choices import SYSTEM_PROMPT, model_to_begin_with
    from backend.data.dataset_columns import columns_of, guessed
    from backend.models.suggested_models import suggested
    from backend.utils.hub_cache import local_folder

    path = user_path(name, "data")
    columns, called = guessed(columns_of(path)), path.name or name
    parts = ", ".join(f"{key.removesuffix('_feature')}s from {column}" for key, column in columns.items())
    found = f"{called}: {parts}." if columns else f"{called} is the dataset."
    if not draft.is_demo and str(draft.value("model")).strip():
        draft.update({"data": name, **columns}, f"Data {called}")
        return found
    quick, model = preset(places.resources() / "presets" / "fast_try.yaml"), model_to_begin_with()
    before, download = "The demo" if draft.is_demo else "The form", ""
    if local_folder(model) is None:
        about = suggested(model)
        download = f"; Run downloads {amount(about.download_bytes) if about is not None else 'the model'} first"
    values = {**quick.values, "model": model, "system_prompt": SYSTEM_PROMPT, "data": name, **columns}
    draft.start_from(values, f"Data {called}")
    return f"{found} {before} was replaced by {name_of_model(model)} and the preset {quick.title}{download}."
