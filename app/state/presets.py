"""Presets, and what a dropped dataset does to the form."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from app.state.draft import Draft, defaults, is_equivalent
from app.state.memory import amount
from app.state.run_summary import name_of_model
from backend.config import config
from backend.config.config import SETTINGS
from backend.config.other_programs.translation import translate
from backend.config.setting import DATASET_KEYS, Setting
from backend.utils import places
from backend.utils.files import user_path

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
    """Every preset, those in ORDER first."""
    rank = {name: number for number, name in enumerate(ORDER)}
    names = (file.stem for file in (places.resources() / "presets").glob("*.yaml"))
    return [preset(name) for name in sorted(names, key=lambda name: (rank.get(name, len(ORDER)), name))]


def preset(name: str) -> Preset:
    file = places.resources() / "presets" / f"{name}.yaml"
    lines = file.read_text(encoding="utf-8").splitlines()
    title, sentence, *more = [line.lstrip("# ").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    raw = config.read(file)
    values = translate(raw).values
    # `epsilon_high: null` is a choice: None is a value of an optional setting.
    emptied = {key: None for key in raw if raw[key] is None and key in SETTINGS and SETTINGS[key].optional}
    return Preset(name, title, sentence, values | emptied, REPLACES in more, BRINGS in more)


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
    quick, model = preset("fast_try"), model_to_begin_with()
    before, download = "The demo" if draft.is_demo else "The form", ""
    if local_folder(model) is None:
        about = suggested(model)
        download = f"; Run downloads {amount(about.download_bytes) if about is not None else 'the model'} first"
    values = {**quick.values, "model": model, "system_prompt": SYSTEM_PROMPT, "data": name, **columns}
    draft.start_from(values, f"Data {called}")
    return f"{found} {before} was replaced by {name_of_model(model)} and the preset {quick.title}{download}."
