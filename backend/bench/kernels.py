"""Counts the kernels of one decoding step in the graph that mlx would run; launches decide its speed on a GPU at these sizes.

A count, not a measurement: it is the same on every machine, whatever the sizes.

On a GPU a norm, a rotary embedding and an attention are one kernel each; on a CPU mlx builds them from many primitives, so each
is replaced by a single primitive while counting. Reshaping, slicing and transposing launch nothing by themselves; a kernel that
needs contiguous input may still copy a slice first, which a graph does not show.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.tuner.utils import linear_to_lora_layers

from backend.engine import device
from backend.engine.model_probe import split
from backend.generation import rollout as backend_rollout
from backend.generation import sampler
from backend.generation.rollout import Rollout
from backend.generation.sampler import GREEDY, Sampling
from backend.spec.memory.chunking import capacity

VIEWS = {
    *("Reshape", "Transpose", "Broadcast", "BroadcastAxes", "ExpandDims", "Squeeze", "Split", "Flatten", "Unflatten"),
    *("StopGradient", "Slice", "Copy", "AsStrided", "Depends"),
}
"""Primitives that launch nothing by themselves."""

LAYERS = 28


def qwen3_policy(*, bits: int | None, dora: bool = False, layers: int = LAYERS, dtype: mx.Dtype = mx.bfloat16) -> Any:
    """A Qwen3 of tiny width with LoRA of rank 8 on every projection, as an object with what a rollout reads of a policy."""
    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=64, num_hidden_layers=layers, intermediate_size=128, num_attention_heads=2,
        rms_norm_eps=1e-6, vocab_size=1024, num_key_value_heads=1, max_position_embeddings=4096, rope_theta=1e6,
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    mx.random.seed(0)
    model = qwen3.Model(args)
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, 64, bits)
    model.freeze()
    linear_to_lora_layers(model, layers, {"rank": 8, "scale": 20.0, "dropout": 0.0}, use_dora=dora)
    model.eval()
    mx.eval(model.parameters())
    split_model = split(model)
    return SimpleNamespace(
        model=model,
        split_model=split_model,
        hidden=split_model.hidden,
        logits=split_model.logits,
        tokenizer=None,
        eos_ids=[1],
        pad_id=0,
    )


def kernels(rollout: Rollout, sampling: Sampling | None, *, rows: int = 4, columns: int = 128) -> Counter[str]:
    """Launches of one compiled step, by primitive; fused kernels all count as Compiled. `sampling` None: up to the logits."""
    rollout = copy.copy(rollout)
    rollout._compiled_steps = {}  # empty, so that the step is traced again, with the patches
    rollout.fused.refresh()
    shapes = [_kv_shape(rollout)] * len(rollout.policy.model.layers)
    columns = capacity(columns)
    dtype = rollout.policy.hidden(mx.array([[1]])).dtype
    keys, values = ([mx.zeros((rows, heads, columns, size), dtype) for heads, size in shapes] for _ in range(2))
    inputs = (
        mx.zeros(rows, mx.int32),
        mx.array(columns - 2),
        mx.zeros(rows, mx.int32),
        mx.zeros(rows),
        mx.arange(columns),
    )
    mx.eval(inputs, keys, values)
    with _as_on_a_gpu(sampling is None):
        out = rollout.compiled_step(sampling or GREEDY)(*inputs, keys, values)
    counted = _counted([array for _, array in tree_flatten(out)])  # pyright: ignore
    rollout.fused.release()
    return counted


def _kv_shape(rollout: Rollout) -> tuple[int, int]:
    args = rollout.policy.model.args
    return args.num_key_value_heads, args.head_dim


def _counted(outputs: list[mx.array]) -> Counter[str]:
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    names = re.findall(r'\{ \d+ \[label ="([^"]+)"', graph.getvalue())
    names = ["Compiled" if name.startswith("Compiled") else name.split("::")[-1] for name in names]
    return Counter(name for name in names if name not in VIEWS)


@contextlib.contextmanager
def _as_on_a_gpu(without_sampling: bool) -> Iterator[None]:
    def attention(q: mx.array, k: mx.array, v: mx.array, **rest: Any) -> mx.array:
        others = [k, v, *(x for x in rest.values() if isinstance(x, mx.array))]
        return mx.depends(mx.cumsum(q, axis=-1), others)  # pyright: ignore

    with contextlib.ExitStack() as held:
        held.enter_context(mock.patch.object(mx.fast, "rms_norm", lambda x, *a, **k: mx.cumsum(x, axis=-1)))
        held.enter_context(mock.patch.object(mx.fast, "rope", lambda x, *a, **k: mx.cumprod(x, axis=-1)))
        held.enter_context(mock.patch.object(mx.fast, "scaled_dot_product_attention", attention))
        held.enter_context(mock.patch.object(device, "on_gpu", lambda: True))
        held.enter_context(mock.patch.object(sampler, "on_cpu", lambda: False))
        if without_sampling:
            held.enter_context(mock.patch.object(backend_rollout, "draw", lambda logits, *rest: (logits,)))
        yield


def main() -> None:
    for name, bits, dora in (("4-bit, LoRA", 4, False), ("bf16, LoRA", None, False), ("bf16, DoRA", None, True)):
        rollout = Rollout(qwen3_policy(bits=bits, dora=dora), 8)
        for how, sampling in (("logits", None), ("draw", Sampling()), ("draw, top-p 0.95", Sampling(top_p=0.95))):
            counted = kernels(rollout, sampling)
            print(f"{name:12} {how:16} {counted.total():5}  {dict(counted.most_common(8))}")


if __name__ == "__main__":
    main()
