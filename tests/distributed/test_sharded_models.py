"""What a sharded model refuses, and what one machine's share of it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import parse, problems
from backend.trainer.memory.estimate import GB, estimate_run, share_of
from backend.trainer.memory.model_shape import shape_from

QWEN3_32B = (
    {"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
)


def test_what_cannot_be_trained_divided_is_refused() -> None:
    refused: dict[str, Any] = {"parallelism": "pipeline", "dropout": 0.1, "modules_to_save": ["norm"]}
    refused |= {"reference_model_path": "another", "sync_ref_model": True, "use_speculative_decoding": True}
    for setting, value in (*refused.items(), ("train_type", "dora"), ("train_type", "full")):
        raw = {"model": "m", "data": "d", "hosts": "hosts.json", "parallelism": "tensor", "beta": 0.1, setting: value}
        (fault,) = [fault for fault in problems(raw) if fault.setting == setting]
        assert len(fault.sentence) <= 200
        assert not [fault for fault in problems(raw | {"hosts": ""}) if fault.setting == setting], "one machine can"


def test_the_estimate_is_that_of_one_machine(tmp_path: Path) -> None:
    shape = shape_from(QWEN3_32B)
    assert shape is not None
    embeddings = 2 * 151936 * 5120 * 2
    for machines in (2, 4):
        share = share_of(shape, machines)
        assert share.weights == pytest.approx((shape.weights - embeddings) / machines + embeddings, rel=0.01)
        assert (share.heads, share.kv_heads) == (64 // machines, 8 // machines)
        assert share.cached_numbers(1000) == shape.cached_numbers(1000) // machines
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    raw = {"model": "m", "data": "d", "hosts": str(tmp_path / "hosts.json")}
    whole, half = (
        estimate_run(parse(raw | {"parallelism": kind}), shape, 64 * GB, gpu=True).training.total
        for kind in ("data", "tensor")
    )
    assert 0.4 * whole < half < 0.7 * whole
