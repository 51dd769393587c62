"""An optimizer's state as named arrays, for checkpoints."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten


def state_arrays(optimizer: Optimizer) -> dict[str, mx.array]:
    """The optimizer's whole state by dotted name, step count included, as `mx.save_safetensors` takes it."""
    return dict(tree_flatten(optimizer.state))


def restore(optimizer: Optimizer, arrays: dict[str, mx.array]) -> None:
    """Put `state_arrays` back, exactly, into an optimizer initialised with the same parameters.

    The state stays the same object, so the compiled update that captured it sees the change. Raises ValueError naming the
    first array that is missing, unknown or of another shape or type: half a state would go on training silently.
    """
    expected = state_arrays(optimizer)
    for name in sorted(expected.keys() | arrays.keys()):
        ours, theirs = (_described(state.get(name)) for state in (expected, arrays))
        if ours != theirs:
            raise ValueError(f"The optimizer's state {name!r} is {theirs} in the checkpoint and {ours} here.")
    _fill(optimizer.state, "", arrays)


def _fill(state: Any, path: str, arrays: dict[str, mx.array]) -> None:
    """Put arrays into a state's own dicts and lists: the state of an optimizer made of several is another dict at every look."""
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        name = f"{path}{key}"
        if isinstance(value, dict | list):
            _fill(value, f"{name}.", arrays)
        elif name in arrays:
            state[key] = arrays[name]


def _described(array: mx.array | None) -> str:
    return "missing" if array is None else f"{array.dtype} {tuple(array.shape)}"
