"""Presets: YAML files whose first comment lines are a title and a sentence, and what each would change in a form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.state.draft import Draft, defaults, is_equivalent
from app.state.memory import amount
from app.state.run_summary import columns_sentence, name_of_model
from backend.config import config
from backend.config.changeable import DATASET_KEYS
from backend.config.config import SETTINGS, keys_used_by
from backend.config.other_programs.translation import translate
from backend.config.setting import Setting
from backend.utils import places
from backend.utils.documents import YAML_LIMIT
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path

OWN = keys_used_by("task")
"""Settings of the user's task, which a preset may not change."""
REPLACES = "Replaces: everything"
"""The third line of a preset that is a complete task of its own."""
BRINGS = "Brings: dataset and rewards"
"""The third line of a preset of a public dataset: where it is, its columns, and the rewards that fit them."""
BROUGHT = {*DATASET_KEYS, "valid_data", "test_data", "reward_functions", "reward_weights", "reward_functions_file"}
ORDER = (
    *("demo", "fast_try", "reasoning", "small_memory", "gspo", "dapo", "dr_grpo", "full_small"),
    *("as_documented", "gsm8k", "deepmath"),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """`values` are the settings it names; `replaces` whether every other one goes back to its default."""

    name: str
    title: str
    sentence: str
    values: Mapping[str, Any]
    replaces: bool
    brings: bool = False
    """True if it sets dataset and rewards, and nothing else of the user's task."""

    def applied(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All values of the form after the preset, from those before it."""
        before = defaults() if self.replaces else dict(values)
        if self.brings:  # what an earlier dataset had besides has no place beside this one
            before |= {key: value for key, value in defaults().items() if key in BROUGHT}
        return {**before, **self.values}

    def changes(self, values: Mapping[str, Any]) -> list[tuple[Setting, Any, Any]]:
        """(setting, value before, value after) of every setting that would change, in the form's order."""
        after = self.applied(values)
        return [
            (about, values[key], after[key])
            for key, about in SETTINGS.items()
            if not is_equivalent(values[key], after[key])
        ]


def presets(folder: Path | None = None) -> list[Preset]:
    """Every preset, the shipped ones first, then others by name. Raises UserError for an invalid file."""
    files = sorted((folder or places.resources() / "presets").glob("*.yaml"), key=_order)
    return [preset(file) for file in files]


def preset(file: Path) -> Preset:
    """Read one preset. Raises UserError for an invalid file."""
    title, sentence, *more = [*_comments(file), "", ""]
    if not title or not sentence:
        raise UserError("preset", f"{file.name} must begin with two comment lines: its title, and a sentence.")
    replaces, brings = REPLACES in more, BRINGS in more
    raw = config.read(file)
    values, faults = translate({key: value for key, value in raw.items() if value is not None})
    faults += [fault for fault in config.problems({"model": "a/b", "data": "a/b"} | values) if fault.setting not in OWN]
    if faults:
        raise UserError(faults)
    taken = [key for key in values if key in OWN and not (brings and key in BROUGHT)]
    if taken and not replaces:
        raise UserError("preset", f"{file.name} sets {taken[0]}, but does not say that it replaces everything.")
    # `epsilon_high: null` is a choice: None is a value of an optional setting.
    emptied = {key: None for key in raw if raw[key] is None and key in SETTINGS and SETTINGS[key].optional}
    return Preset(file.stem, title, sentence, values | emptied, replaces, brings)


def _comments(file: Path) -> list[str]:
    lines: list[str] = []
    for line in read_text(file, "preset", YAML_LIMIT).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return lines


def _order(file: Path) -> tuple[int, str]:
    return (ORDER.index(file.stem) if file.stem in ORDER else len(ORDER), file.stem)


QUICK_PRESET = "fast_try.yaml"


@dataclass(frozen=True, slots=True)
class DataChoice:
    """What choosing a dataset does to the form. `begins`: it replaces all of it: the demo, or no model.

    `called` is the dataset's name for the user, `sentence` says what was done and what Run will fetch.
    """

    called: str
    values: dict[str, Any]
    begins: bool
    sentence: str


def data_choice(draft: Draft, name: str) -> DataChoice:
    """The choice of this file, folder or Hub id."""
    from backend.config.first_choices import SYSTEM_PROMPT, model_to_begin_with
    from backend.data.dataset_columns import columns_of, guessed

    path = user_path(name, "data")
    columns, called = guessed(columns_of(path)), path.name or name
    begins = draft.is_demo or not str(draft.value("model")).strip()
    found = columns_sentence(called, columns) if columns else f"{called} is the dataset."
    if not begins:
        return DataChoice(called, {"data": name, **columns}, False, found)
    quick, model = preset(places.resources() / "presets" / QUICK_PRESET), model_to_begin_with()
    values = {**quick.values, "model": model, "system_prompt": SYSTEM_PROMPT, "data": name, **columns}
    before = "The demo" if draft.is_demo else "The form"
    began = f"{before} was replaced by {name_of_model(model)} and the preset {quick.title}{_download(model)}."
    return DataChoice(called, values, True, f"{found} {began}")


def _download(model: str) -> str:
    from backend.models.suggested_models import suggested
    from backend.utils.hub_cache import local_folder

    if local_folder(model) is not None:
        return ""
    about = suggested(model)
    return f"; Run downloads {amount(about.download_bytes) if about is not None else 'the model'} first"
