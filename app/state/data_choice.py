"""Choosing a dataset: the columns that can be guessed from it and, for a form with no model of the user's, a model and settings to
begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.state.draft import Draft
from app.state.memory_parts import amount
from app.state.presets import preset
from app.state.runs.run_summary import columns_sentence, name_of_model
from backend.config.first_choices import SYSTEM_PROMPT, model_to_begin_with
from backend.data.dataset_columns import columns_of, guessed
from backend.models.suggested_models import suggested
from backend.utils import places
from backend.utils.files import user_path
from backend.utils.hub_cache import local_folder

QUICK_PRESET = "fast_try.yaml"


@dataclass(frozen=True, slots=True)
class DataChoice:
    """What choosing a dataset does to the form. `begins`: it replaces all of it, as there was only the demo, or no model.

    `called` is the dataset's name for the user, `sentence` says what was done and what Run will fetch.
    """

    called: str
    values: dict[str, Any]
    begins: bool
    sentence: str


def data_choice(draft: Draft, name: str) -> DataChoice:
    """The choice of this file, folder or Hub id. Reads the head of a file; raises UserError where the preset is broken."""
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
    """What Run will fetch first, to end a sentence; "" for a model that is on this machine."""
    if local_folder(model) is not None:
        return ""
    about = suggested(model)
    return f"; Run downloads {amount(about.download_bytes) if about is not None else 'the model'} first"
