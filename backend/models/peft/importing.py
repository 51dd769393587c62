"""An adapter of peft as a folder of mlx-lm's, which a run starts from and mlx-lm's own programs load: carried, written, compared by logits."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from backend.models.adapters import adaptable_names
from backend.models.export.build import Progress, silent
from backend.models.export.original.original_files import Fetch
from backend.models.export.trained_weights import AdapterFiles, TrainedWeights, open_model, open_tokenizer
from backend.models.export.verify import SAMPLES, TOLERANCE, Verification, compare, make_reference
from backend.models.peft.carrying import CarriedAdapter, carried_adapter, wider
from backend.models.peft.origin import Origin, origin_of
from backend.models.peft.reading import PeftAdapter, merged_model, read_peft_adapter
from backend.models.peft.settings import SETTING, PeftSettings
from backend.models.saved_modules import array_names, whole_modules
from backend.models.saving import save_arrays
from backend.spec.disk_faults import disk_errors_of
from backend.spec.faults import Mistake
from backend.spec.hub_cache import local_folder
from backend.spec.user_input.files import is_file
from backend.spec.user_input.text import shown, shown_path
from backend.spec.whole_file import whole_folder

ARRAYS, CONFIG = "adapters.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ImportedAdapter:
    """The new folder, and how the model with it differs from the one that peft merges; None where the original weights are not here."""

    path: Path
    layers: int
    verification: Verification | None
    notes: tuple[str, ...]

    def sentences(self) -> tuple[str, ...]:
        """What was imported and what is to be said of it, for people."""
        compared = (
            ""
            if self.verification is None
            else f"; the model's logits differ from those of what peft merges by {self.verification.max_error:.1g} at most"
        )
        return f"{self.layers} layers have adapters{compared}.", *self.notes


def import_adapter(
    folder: Path,
    model_name: str,
    to: Path,
    *,
    overwrite: bool = False,
    fetch: Fetch | None = None,
    progress: Progress = silent,
) -> ImportedAdapter:
    """Carry the adapter of peft in `folder` onto the model `model_name` ("" for the one that the adapter names), into the folder `to`.

    Raises Mistake, naming the layer, for what mlx-lm has no place for; nothing is left behind then. RuntimeError where the written adapter
    does not make the model that peft makes.
    """
    _check_target(to, overwrite)
    adapter = read_peft_adapter(folder)
    name = model_name or adapter.settings.base
    base = local_folder(name) if name else None
    if base is None:
        raise Mistake(
            "model",
            f"The model {shown_path(name, 60) or 'of the adapter'} is not on this disk; name one that is with --model.",
        )
    model, config = open_model(base)
    origin = origin_of(base, name, model, config, adapter.layers, fetch)
    progress("Carrying the adapter onto the model.")
    carried = carried_adapter(adapter, origin, model)
    about = adapter_config(name, carried, adapter.settings, model)
    with disk_errors_of(to), whole_folder(to) as draft:
        save_arrays(draft / ARRAYS, _arrays(carried))
        (draft / CONFIG).write_text(json.dumps(about, indent=2), encoding="utf-8")
        progress("Loading it back and comparing.")
        verification = _verified(adapter, origin, base, AdapterFiles(draft / ARRAYS, draft / CONFIG))
    return ImportedAdapter(to, len(carried.layers), verification, tuple(_notes(adapter, carried, origin, name)))


def _check_target(to: Path, overwrite: bool) -> None:
    if not to.exists():
        return
    if not overwrite:
        raise Mistake("output", f"{shown(to)} is there already; take another name, or --overwrite.")
    if not is_file(to / ARRAYS):
        raise Mistake("output", f"{shown(to)} is no folder of an adapter, so it is not replaced.")


def _verified(adapter: PeftAdapter, origin: Origin, base: Path, files: AdapterFiles) -> Verification | None:
    """Compare with the weights that peft would merge. The adapter is loaded onto the model itself in any case."""
    TrainedWeights(base, str(base), base, files).open()
    if origin.files is None:
        return None
    original = origin.files
    trained = TrainedWeights(original.folder, original.name, base, files, untrained=original.folder)
    with tempfile.TemporaryDirectory() as logits:
        reference = make_reference(
            trained, open_tokenizer(base), SAMPLES, TOLERANCE["float32"], Path(logits) / "reference"
        )
        return compare(files.arrays.parent, reference, lambda: merged_model(adapter, original))


def _notes(adapter: PeftAdapter, carried: CarriedAdapter, origin: Origin, name: str) -> Iterator[str]:
    settings = adapter.settings
    if settings.base and settings.base != name:
        yield f"The adapter was trained on {shown(settings.base, 60)}; it is now for {shown(name, 60)}."
    if len(ranks := {layer.rank for layer in carried.layers.values()}) > 1:
        yield f"mlx-lm has one rank for all layers: ranks of {min(ranks)} to {max(ranks)} are now {max(ranks)}, filled up with what changes nothing."
    if len(scales := {layer.scale for layer in adapter.layers.values()}) > 1:
        yield f"mlx-lm has one scale for all layers: {len(scales)} scales are now {carried.scale:g}, the rest of them in the arrays."
    if carried.whole:
        yield "It holds whole modules beside the adapters, which runs and exports of GRPO Studio have and mlx-lm's own programs refuse."
    if origin.files is None:
        yield f"The original weights of {shown(name, 60)} are not on this disk: the adapter's names were taken for those of the model's layers, and no logits compared; --fetch does both."


# ── mlx-lm's files ───────────────────────────────────────────────────────────────────────────────────────────────────


def _arrays(carried: CarriedAdapter) -> dict[str, mx.array]:
    """By mlx-lm's names: A as [in, r] and B as [r, out], for experts [E, r, in] and [E, out, r]."""
    rank = _rank(carried)
    arrays: dict[str, mx.array] = dict(carried.whole)
    for name, layer in carried.layers.items():
        a, b = wider(layer.a, layer.b, rank)
        arrays[f"{name}.lora_a"] = a if layer.is_experts else a[0].T
        arrays[f"{name}.lora_b"] = b if layer.is_experts else b[0].T
        if layer.magnitude is not None:
            arrays[f"{name}.m"] = layer.magnitude
    return {name: mx.contiguous(array) for name, array in arrays.items()}


def _rank(carried: CarriedAdapter) -> int:
    return max((layer.rank for layer in carried.layers.values()), default=1)


def adapter_config(name: str, carried: CarriedAdapter, settings: PeftSettings, model: nn.Module) -> dict[str, Any]:
    """The content of mlx-lm's adapter_config.json, as `backend.models.saving.adapter_config` writes it of a run."""
    count, keys = _layers_and_keys(model, set(carried.layers))
    parameters = {"rank": _rank(carried), "scale": carried.scale, "dropout": settings.dropout}
    about: dict[str, Any] = {
        "fine_tune_type": "dora" if settings.uses_dora else "lora",
        "model": name,
        "num_layers": count,
        "lora_parameters": parameters | ({"keys": keys} if keys else {}),
    }
    if settings.uses_rslora:
        about["use_rslora"] = True
    if whole := _whole_modules(model, carried.whole):
        about["modules_to_save"] = whole
    return about


def _whole_modules(model: nn.Module, arrays: Mapping[str, mx.array]) -> list[str]:
    """The full names of the modules with these arrays. Raises Mistake for a module that cannot be trained as a whole, or of which an array
    is missing."""
    names = list(dict.fromkeys(name.rpartition(".")[0] for name in arrays))
    modules = whole_modules(model, names)
    if lost := sorted(array_names(model, modules) - arrays.keys()):
        raise Mistake(SETTING, f"{shown(lost[0], 90)} is missing, and the rest of its module was trained as a whole.")
    return list(modules)


def _layers_and_keys(model: nn.Module, adapted: set[str]) -> tuple[int, list[str]]:
    """mlx-lm's `num_layers` and `keys` that mean these layers and no others; keys are [] where they are all that take adapters. Where the
    last layers are not alike in what is adapted, the keys are full names."""
    layers: list[nn.Module] = model.layers  # pyright: ignore
    prefixes = _prefixes(model, layers)
    within = [{name.removeprefix(prefix) for name in adapted if name.startswith(prefix)} for prefix in prefixes]
    outside = sorted(name for name in adapted if not name.startswith(tuple(prefixes)))
    keys = set[str]().union(*within)
    count = next((len(layers) - at for at, names in enumerate(within) if names), len(layers))
    last = [(names, adaptable_names(layer)) for names, layer in zip(within, layers, strict=True)][len(layers) - count :]
    if any(names != keys & adaptable for names, adaptable in last):
        return len(layers), sorted(adapted)
    if not outside and all(names == adaptable for names, adaptable in last):
        return count, []
    return count, [*sorted(keys), *outside]


def _prefixes(model: nn.Module, layers: list[nn.Module]) -> list[str]:
    """What the full names of the modules in each layer begin with."""
    names = {id(module): f"{name}." for name, module in model.named_modules()}
    return [names[id(layer)] for layer in layers]
