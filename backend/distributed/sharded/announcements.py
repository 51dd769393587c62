"""What rank 0 announces before it computes: the kind of call, and its arguments as a message's JSON and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.penalties import Penalties
from backend.sampling.grammar import Grammar
from backend.sampling.sampler import Sampling
from backend.training.batch import Batch
from backend.types import Problem

LOAD, BUILD, BEGIN, CHANGE, SAMPLE, LEARN, HELD_OUT, END = CALLS = tuple(
    f"divided: {call}" for call in ("load", "build", "begin", "change", "sample", "learn", "held out", "end")
)
"""Kinds of announcement. LOAD is the first one of a run."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class SampleCall:
    """The arguments of `Rollout.sample`, and the limits that may change between two calls."""

    prompts: list[list[int]]
    group_size: int
    sampling: Sampling
    seed: int
    first_number: int
    max_tokens: int

    def to_body(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> SampleCall:
        sampling = dict(body["sampling"])
        grammar = sampling.pop("grammar")
        penalties = Penalties(**sampling.pop("penalties"))
        sampling = Sampling(**sampling, penalties=penalties, grammar=Grammar(**grammar) if grammar else None)
        return cls(**{**body, "sampling": sampling})

    @property
    def problems(self) -> list[Problem]:
        """The prompts as problems: their texts are rank 0's alone."""
        return [Problem(0, "", [], tokens, "") for tokens in self.prompts]


def packed_batch(batch: Batch) -> tuple[dict[str, Any], Arrays]:
    """A step's batch as `pack` makes it."""
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {"pad_id": arrays.pop("pad_id")}, {name: np.array(x) for name, x in arrays.items() if x is not None}


def unpacked_batch(body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Batch:
    return Batch(pad_id=int(body["pad_id"]), **{name: mx.array(x) for name, x in arrays.items()})
