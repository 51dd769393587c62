"""An optimizer's state as named arrays, for checkpoints."""

from __future__ import annotations

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path


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
    optimizer.state.update(tree_map_with_path(lambda name, _: arrays[name], optimizer.state))


def _described(array: mx.array | None) -> str:
    return "missing" if array is None else f"{array.dtype} {tuple(array.shape)}"
