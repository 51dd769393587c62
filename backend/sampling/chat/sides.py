"""Base and tuned model side by side, so that turning from one to the other loads nothing.

Adapters: two module trees over the same arrays, one with the adapters and one without (`Policy.reference_model`), so both together take
the memory of the tuned model. Full fine-tuning: two models, the second loaded only where the memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from backend.engine.model_probe import split
from backend.engine.output_layer import SplitModel
from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.policy import cast, load_model, load_policy
from backend.models.tokenizers import run_tokenizer
from backend.sampling.chat.source import ChatSource
from backend.trainer.memory.estimate import format_bytes
from backend.utils.errors import UserError
from backend.utils.machine import machine_bytes

SideName = Literal["base", "tuned"]
SIDES: tuple[SideName, ...] = get_args(SideName)
Note = Callable[[str], None]

AS_TRAINED = {"beta": 1.0, "reference_model_path": "", "sync_ref_model": False}
"""Settings under which `load_policy` keeps the model without adapters as the reference, over the same arrays."""


@dataclass(frozen=True, slots=True)
class SideModel:
    """A model that answers."""

    name: SideName
    model: nn.Module
    split_model: SplitModel


@dataclass(frozen=True, slots=True)
class Sides:
    """The models of a chat and the tokenizer that they share; `sides` holds one or both of base and tuned."""

    sides: dict[SideName, SideModel]
    tokenizer: Any
    eos_ids: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Memory of the weights, arrays that both have counted once."""
        arrays: list[mx.array] = [array for side in self.sides.values() for array in _arrays(side.model).values()]
        distinct = {id(array): array for array in arrays}
        return sum(array.nbytes for array in distinct.values())


def load_sides(source: ChatSource, wanted: Sequence[SideName] = SIDES, note: Note = lambda sentence: None) -> Sides:
    """Load what `wanted` names; a plain model has a base alone. `note` takes sentences for the user. Raises UserError."""
    if source.run is None:
        if "base" not in wanted:
            raise UserError("model", f"{source.name} is a model and no run, so there is nothing tuned beside it.")
        wanted = ("base",)
    if source.run is None or source.has_two_models:
        loaded = _whole_models(source, wanted, note)
    else:
        loaded = _with_adapters(source, note)
    return replace(loaded, sides={name: side for name, side in loaded.sides.items() if name in wanted})


def _with_adapters(source: ChatSource, note: Note) -> Sides:
    assert source.weights is not None
    policy = load_policy(source.config.model_copy(update=AS_TRAINED), note)
    try:
        policy.assign(_read(source.weights.path))
    except ValueError:
        raise _misfit(source) from None
    mx.eval(policy.model.parameters())
    assert policy.reference_model is not None and policy.reference is not None
    base = SideModel("base", policy.reference_model, policy.reference)
    tuned = SideModel("tuned", policy.model, policy.split_model)
    return Sides({"base": base, "tuned": tuned}, policy.tokenizer, tuple(policy.eos_ids))


def _whole_models(source: ChatSource, wanted: Sequence[SideName], note: Note) -> Sides:
    """Models that share nothing: the base, and what full fine-tuning made of it, in the precision that the base came with."""
    base, tokenizer, _ = load_model(source.config.model, "model")
    tokenizer = run_tokenizer(source.config.tokenizer, tokenizer, base)
    # A plain model comes as it is, and Config's default leaves its type as it is too.
    cast(base, source.config.dtype)
    models: dict[SideName, nn.Module] = {"base": base}
    if "tuned" in wanted:
        if "base" in wanted and not _second_model_fits(base, note):
            wanted = ("tuned",)
        models["tuned"] = _fully_tuned(base, source, keep_base="base" in wanted)
    if "base" not in wanted:
        del models["base"]
    for model in models.values():
        model.freeze()
        model.eval()
        mx.eval(model.parameters())
    sides: dict[SideName, SideModel] = {name: SideModel(name, model, split(model)) for name, model in models.items()}
    return Sides(sides, tokenizer, tuple(sorted(int(token) for token in tokenizer.eos_token_ids)))


def _second_model_fits(base: nn.Module, note: Note) -> bool:
    """Whether memory allows a second model of this size; `note` says where it does not."""
    size = sum(array.nbytes for array in _arrays(base).values())
    held = mx.get_active_memory()
    free = machine_bytes(held) - held
    if size <= free:
        return True
    note(
        f"Base and tuned share no weights after full fine-tuning, and there is no memory for both: another "
        f"{format_bytes(size)} is needed and {format_bytes(max(0, free))} is free. Only the tuned model is loaded."
    )
    return False


def _fully_tuned(base: nn.Module, source: ChatSource, *, keep_base: bool) -> nn.Module:
    """The base with the run's weights in place of its own; a copy of it with `keep_base`."""
    assert source.weights is not None
    if source.weights.path.is_dir():
        return load_model(str(source.weights.path), "model")[0]
    model = copy_sharing_arrays(base) if keep_base else base
    own, trained = _arrays(model), _read(source.weights.path)
    if own.keys() != trained.keys() or any(own[name].shape != trained[name].shape for name in own):
        raise _misfit(source)
    # Training keeps 32 bits; the model that comes out of it, and answers here, has the precision it came with.
    model.load_weights([(name, array.astype(own[name].dtype)) for name, array in trained.items()])
    return model


def _arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _read(file: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    return arrays


def _misfit(source: ChatSource) -> UserError:
    return UserError(
        "model",
        f"The weights of the run {source.name} do not fit the model {source.config.model}: it has changed since.",
    )
