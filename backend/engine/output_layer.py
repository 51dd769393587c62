"""Splits a model into body (tokens [B, L] → hidden states [B, L, H]) and output layer (hidden states → logits) without
naming an architecture: logits of given states come from the model itself, called with something in the body's place
that returns them, so soft caps, scales and biases are included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# A causal language model as two functions, body and output layer, so that logits are computed only where needed.


@dataclass(slots=True)
class SplitModel:
    """`hidden(tokens_BL, cache)` → [B, L, H], the states after the last norm; `logits(hidden)` → [..., V]. A model that
    cannot be split is kept whole: its hidden states are its logits."""

    hidden: Callable[..., mx.array]
    logits: Callable[[mx.array], mx.array]
    head: nn.Module | None = None  # the module whose weights `logits` uses; None where the model is kept whole
    is_product: bool = False  # logits are hidden states times the head's weight
    prefix_layers: int = 0  # the number of layers, where all can share a prompt; else 0
    vocab_size: int = 0
    dtype: mx.Dtype = mx.float32  # of the hidden states
    body: Any = None  # the module that `hidden` calls; None where the model has other names
    slow_paths: list[str] = field(default_factory=list)  # sentences for the user
    cut: Callable[[nn.Module], SplitModel] = field(kw_only=True)  # cuts another tree of the same code in the same place

    def of_tree(self, model: nn.Module) -> SplitModel:
        """The split of another tree of the same code, without new trials."""
        other = self.cut(model)
        return replace(self, hidden=other.hidden, logits=other.logits, head=other.head, body=other.body)


NO_TOKENS = mx.zeros((1, 1), mx.int32)
PROBE = mx.array([[1, 2, 3]])


class NoOutputLayer(Exception):
    """The model cannot be cut in two; the message is the reason, as part of a sentence."""


def cut_before_output_layer(model: nn.Module) -> tuple[SplitModel, mx.array]:
    """The model as body and output layer, and the states of PROBE. Raises NoOutputLayer."""
    try:
        whole = model(PROBE)
        for depth, (owner, name) in enumerate(_possible_bodies(model)):
            states = _body(owner, name)(PROBE)
            if states.shape[-1] != whole.shape[-1]:  # else it is a wrapper that returns logits: look inside
                split_model, parts = _cut_at(model, depth, states)
                break
        else:
            raise NoOutputLayer("the model's code has no body apart from its output layer")
        equal = parts.shape == whole.shape and mx.allclose(parts, whole, rtol=1e-5, atol=1e-6).item()
    except (TypeError, ValueError, AttributeError) as error:
        line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise NoOutputLayer(
            f"the model's body cannot be run without its output layer ({type(error).__name__}: {line})"
        ) from error
    if not equal:
        raise NoOutputLayer("the model's output layer depends on more than its last hidden states")
    return split_model, states


def _cut_at(model: nn.Module, depth: int, states: mx.array) -> tuple[SplitModel, mx.array]:
    owner, name = next(islice(_possible_bodies(model), depth, None))
    used: dict[str, nn.Module] = {}
    logits = _rest_of(model, owner, name, used)
    parts = logits(states)
    head = _head(owner, name, used)
    return SplitModel(_body(owner, name), logits, head, cut=lambda tree: _cut_at(tree, depth, states)[0]), parts


def _possible_bodies(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    first, owner = model.layers[0], model  # pyright: ignore
    while True:
        children = (
            (name, child) for name, child in owner.items() if isinstance(child, nn.Module) and child is not first
        )
        inside = (name for name, child in children if any(part is first for part in child.modules()))
        name = next(inside, None)
        if name is None:
            return
        yield owner, name
        owner = owner[name]


def _body(owner: nn.Module, name: str) -> Callable[..., mx.array]:
    # Some models' bodies have no default for the cache.
    return lambda tokens, cache=None: owner[name](tokens, cache=cache)


class _GivenStates:
    """In the body's place: returns given states. All else is the body's; `used` collects the modules asked for."""

    def __init__(self, body: nn.Module, states: mx.array, used: dict[str, nn.Module]) -> None:
        self._body, self._states, self._used = body, states, used

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._states

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._body, name)
        if isinstance(value, nn.Module):
            self._used[name] = value
        return value


def _rest_of(
    model: nn.Module, owner: nn.Module, name: str, used: dict[str, nn.Module]
) -> Callable[[mx.array], mx.array]:
    def logits(hidden: mx.array) -> mx.array:
        body = owner[name]
        states_BLH = hidden.reshape(-1, 1, hidden.shape[-1]) if hidden.ndim != 3 else hidden
        dict.__setitem__(owner, name, _GivenStates(body, states_BLH, used))
        try:
            logits_BLV = model(NO_TOKENS)
        finally:
            dict.__setitem__(owner, name, body)
        return logits_BLV.reshape(*hidden.shape[:-1], -1)

    return logits


def _head(owner: nn.Module, name: str, tied: dict[str, nn.Module]) -> nn.Module:
    head, others = nn.Module(), {key: part for key, part in owner.items() if key != name}
    if any(isinstance(part, mx.array) for part in others.values()):
        raise NoOutputLayer("the weights of the model's output layer are not in a separate module")
    for key, part in {**others, **tied}.items():
        if isinstance(part, nn.Module):
            setattr(head, key, part)
    return head
