"""One machine's share of a model whose layers are divided among several."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from backend.spec.config import Config
from backend.spec.distributed.hosts_file import read_hosts
from backend.spec.faults import Mistake
from backend.spec.memory.model_shape import Linear, ModelShape

ROWS = ("o_proj", "down_proj", "out_proj", "w2", "fc2")
"""Ends of the names of matrices whose inputs are divided; of all others it is the outputs."""
WHOLE = ("kv_a_proj_with_mqa", "q_a_proj", "gate", "router", "norm")
"""Ends of the names of matrices that every machine has."""


def machines_of(config: Config) -> int:
    """How many machines the model of a run is divided among; 1 where it is not, or where its hosts file cannot be read."""
    if config.parallelism == "tensor" and config.hosts:
        with suppress(Mistake):  # whoever starts the run says so
            return max(1, len(read_hosts(config.hosts).hosts))
    return 1


def share_of(shape: ModelShape, machines: int) -> ModelShape:
    """What one of so many machines has: its part of every layer, and embedding and output layer whole."""
    if machines == 1:
        return shape
    layers = tuple(tuple(_part(linear, machines) for linear in layer) for layer in shape.layers)
    saved = sum(linear.bytes for layer in shape.layers for linear in layer)
    saved -= sum(linear.bytes for layer in layers for linear in layer)
    return replace(
        shape,
        heads=-(-shape.heads // machines),
        kv_heads=-(-shape.kv_heads // machines),
        layers=layers,
        weights=shape.weights - saved,
    )


def _part(linear: Linear, machines: int) -> Linear:
    if linear.name.endswith(WHOLE):
        return linear
    along = "inputs" if linear.name.endswith(ROWS) else "outputs"
    part = {along: -(-getattr(linear, along) // machines), "bytes": -(-linear.bytes // machines)}
    return replace(linear, **part)
