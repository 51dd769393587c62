"""The suggested models and dataset as entries of the picker, with what they are good for and whether training the models fits in this machine."""

from __future__ import annotations

from app.model.memory import memory_parts_of_shape
from app.model.memory_parts import amount
from app.model.presets import preset
from app.widgets.picker.picker_rows import PickerEntry
from backend.spec import config, first_choices, places
from backend.spec.config import Config
from backend.spec.suggested_models import SUGGESTED_MODELS, SuggestedModel

FITS = {"fits": "Fits", "tight": "May not fit", "over": "Too large"}
"""Verdict on the memory → words for the column “Where”."""
QUICK = "fast_try.yaml"
"""The preset with which the memory of a suggestion is estimated: what the form holds may be meant for another model."""


def suggested_entries() -> list[PickerEntry]:
    """An entry for each suggested model, the smallest first."""
    quick = preset(places.resources() / "presets" / QUICK)
    base = config.parse({**quick.values, "model": SUGGESTED_MODELS[0].id, "data": "-"})
    return [_entry(model, base, quick.title) for model in SUGGESTED_MODELS]


def suggested_dataset() -> PickerEntry:
    """The entry of the dataset to begin with."""
    name = first_choices.DATASET
    return PickerEntry(
        id=name, name=name, where="hub", kind="2,000 rows", remarks=(first_choices.DATASET_ABOUT.capitalize() + ".",)
    )


def _entry(model: SuggestedModel, base: Config, title: str) -> PickerEntry:
    memory = memory_parts_of_shape(base.model_copy(update={"model": model.id}), model.shape)
    need = f"Training with the preset {title} needs about {amount(memory.total)} of {amount(memory.limit)}."
    return PickerEntry(
        id=model.id,
        name=model.id,
        where="hub",
        size=round(model.download_bytes),
        kind=model.shape.kind,
        precision="4-bit",
        remarks=(model.good_for, need),
        fits=FITS[memory.verdict],
    )
