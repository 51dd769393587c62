"""In a model of 16 bits the residual stream is float32, where the model allows it."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3
from mlx_lm.utils import load

from backend.engine import residual_stream
from backend.engine.model_probe import split
from tests.support.random_models import tiny_model

pytestmark = pytest.mark.usefixtures("as_on_a_cpu")

TOKENS = mx.array([[5, 70, 200, 9]])


def model_of(folder: Path, arch: str = "qwen3", dtype: str = "bfloat16", **settings: Any) -> nn.Module:
    return load(str(tiny_model(folder / f"{arch}-{dtype}", arch, dtype=dtype, noise=0.1, **settings)))[0]


def inputs_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[mx.Dtype]]:
    """What each kind of module reads in a pass."""
    seen: dict[str, set[mx.Dtype]] = {}
    for kind in (nn.Linear, nn.QuantizedLinear, qwen3.TransformerBlock):

        def call(self: Any, x: mx.array, *rest: Any, own: Any = kind.__call__, name: str = kind.__name__) -> Any:
            seen.setdefault(name, set()).add(x.dtype)
            return own(self, x, *rest)

        monkeypatch.setattr(kind, "__call__", call)
    model(TOKENS)
    return seen


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_stream_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bits: int | None) -> None:
    model: Any = model_of(tmp_path, dtype=dtype, layers=3, bits=bits)
    split_model = split(model)
    assert split_model.dtype == getattr(mx, dtype) and split_model.slow_paths == []
    seen = inputs_of(model, monkeypatch)
    products = "QuantizedLinear" if bits else "Linear"
    assert seen[products] == {getattr(mx, dtype)}
    assert mx.float32 in seen["TransformerBlock"]
    assert all(residual_stream.is_float32(layer.post_attention_layernorm) for layer in model.layers)
    residual_stream.unmark(model)
    assert inputs_of(model, monkeypatch)["TransformerBlock"] == {getattr(mx, dtype)}


@pytest.mark.parametrize(("arch", "bits"), [("llama", None), ("gemma3_text", None), ("mixtral", 4)])
def test_other_families_have_it(tmp_path: Path, arch: str, bits: int | None) -> None:
    model: Any = model_of(tmp_path, arch, bits=bits)
    split_model = split(model)
    assert any(residual_stream.is_float32(module) for module in model.modules()) and split_model.dtype == mx.bfloat16


def test_a_model_of_float32_is_not_touched(tmp_path: Path) -> None:
    model = model_of(tmp_path, dtype="float32")
    before = model(TOKENS)
    split(model)
    assert not any(residual_stream.is_float32(module) for module in model.modules())
    assert mx.array_equal(model(TOKENS), before)


class RoundingBlock(qwen3.TransformerBlock):
    """Casts the stream itself."""

    def __call__(self, x: mx.array, *rest: Any) -> mx.array:
        return super().__call__(x, *rest).astype(mx.bfloat16)


class UnnormedBlock(qwen3.TransformerBlock):
    """Has a product that reads the stream without a norm."""

    def __call__(self, x: mx.array, *rest: Any) -> mx.array:
        return super().__call__(x, *rest) + self.mlp.gate_proj(x).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("block", [RoundingBlock, UnnormedBlock])
def test_a_model_that_does_more_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: type) -> None:
    monkeypatch.setattr(qwen3, "TransformerBlock", block)
    model = model_of(tmp_path)
    before = model(TOKENS)
    split_model = split(model)
    assert not any(residual_stream.is_float32(module) for module in model.modules())
    assert split_model.slow_paths == [] and mx.array_equal(model(TOKENS), before)
