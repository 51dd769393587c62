"""The fused model computes what the policy does: same log-probabilities, fewer products, no lasting memory."""

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from backend.config.config import parse
from backend.engine import device, metal
from backend.models.policy import Policy, load_policy
from backend.sampling import fused_linear, fused_model
from backend.sampling.fused_model import FusedModel
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import GREEDY
from backend.types import Problem
from backend.utils.machine import TREAT_CPU_AS
from tests.support import metal_shim, random_models

BIASED = {"attention_bias": True}


def policy_of(models: Path, arch: str = "qwen3", train_type: str = "lora", **how: Any) -> Policy:
    """A policy with non-zero adapters. `bits`, `tie` and `own` are options of the model; the rest are settings."""
    making = {key: how.pop(key) for key in ("bits", "tie", "own", "dtype") if key in how}
    folder = models / "-".join(
        [arch, *(f"{key}{value}" for key, value in making.items() if key != "own"), str("own" in making)]
    )
    if not folder.exists():
        random_models.tiny_model(folder, arch, **making)
    raw = {"model": str(folder), "data": "none", "num_layers": -1, "train_type": train_type, "beta": 0} | how
    policy = load_policy(parse(raw))
    shake(policy, 1)
    policy.model.eval()
    return policy


def shake(policy: Policy, seed: int) -> None:
    mx.random.seed(seed)
    policy.model.update(tree_map(lambda x: x + 0.03 * mx.random.normal(x.shape), policy.model.trainable_parameters()))


def logps(model: Any, tokens: mx.array) -> mx.array:
    logits = model(tokens).astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def distance(policy: Policy, fused: FusedModel) -> float:
    tokens = mx.array(np.random.default_rng(3).integers(60, 320, (3, 17)))
    return mx.abs(logps(policy.model, tokens) - logps(fused.model, tokens)).max().item()  # pyright: ignore


CASES: list[tuple[dict[str, Any], bool]] = [  # (model and settings, whether merging is allowed)
    *(({"train_type": kind}, merge) for kind in ("lora", "dora") for merge in (True, False)),
    ({"train_type": "full"}, True),
    ({"train_type": "full"}, False),
    ({"train_type": "dora", "bits": 4}, False),
    ({"arch": "llama", "tie": False, "own": BIASED}, True),
    ({"arch": "llama", "bits": 4, "own": BIASED}, False),
    ({"quantization": "mxfp4"}, False),
    ({"lora_keys": ["self_attn.q_proj", "mlp.down_proj"]}, True),
    ({"lora_keys": ["self_attn.k_proj"], "train_type": "dora", "bits": 4}, False),
    ({"num_layers": 1, "bits": 4}, True),
    ({"arch": "qwen3_moe"}, True),
    ({"arch": "phi3"}, True),
]
MORE_CASES: list[dict[str, Any]] = [
    *({"arch": arch} for arch in ("mixtral", "olmo2", "smollm3")),
    *({"arch": arch, "bits": 4} for arch in ("qwen2", "qwen3_moe")),
    {"bits": 8, "tie": False},
    {"arch": "llama", "train_type": "dora", "own": BIASED},
]
NEEDS = {"phi3": {"num_key_value_heads": 2}, "smollm3": {"no_rope_layer_interval": 2}}


@pytest.mark.parametrize(
    ("case", "merge"),
    [*CASES, *(pytest.param(case, merge, marks=pytest.mark.proof) for case in MORE_CASES for merge in (True, False))],
    ids=str,
)
def test_the_fused_model_has_the_logps_of_the_policy(models: Path, case: dict[str, Any], merge: bool) -> None:
    arch = case.get("arch", "qwen3")
    policy = policy_of(models, **({"own": NEEDS[arch]} if arch in NEEDS else {}) | case)
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    fused = FusedModel(policy.model, policy.split_model, merge=merge)
    assert bool(fused.fused_linears) == (merge or case.get("train_type") != "full")
    assert fused.slow_paths == []
    for seed in (2, 3):  # before and after the policy was trained
        fused.refresh()
        # Routing to experts amplifies rounding.
        assert distance(policy, fused) < (3e-4 if "moe" in arch else 1e-4)
        tokens = mx.array([[5, 70, 200, 9]])
        split_model = fused.split_model.logits(fused.split_model.hidden(tokens))
        np.testing.assert_allclose(np.array(split_model), np.array(fused.model(tokens)), atol=1e-5)
        assert fused.slices_head == (merge and policy.split_model.is_product) == ("sliced_head" in fused.model)
        fused.release()
        assert "sliced_head" not in fused.model
        if seed == 2:
            after = dict(tree_flatten(policy.model.parameters()))
            assert all(np.array_equal(np.array(after[name]), x) for name, x in before.items())
            shake(policy, seed)


def test_a_model_that_reads_its_layers_weights_itself_is_not_fused_and_says_why(models: Path) -> None:
    policy = policy_of(models)
    attention = policy.model.layers[0].self_attn

    class Peeking(type(attention)):
        def __call__(self, x: mx.array, *rest: Any, **more: Any) -> mx.array:
            return super().__call__(x, *rest, **more) * self.o_proj.linear.weight.shape[0] / 32

    attention.__class__ = Peeking
    fused = FusedModel(policy.model, policy.split_model)
    assert fused.model is policy.model and not fused.fused_linears and fused.split_model is policy.split_model
    (sentence,) = fused.slow_paths
    assert sentence.startswith("Layers are not fused for decoding: the fused layers failed with AttributeError: ")
    assert sentence.endswith(".") and Sampler(policy, 2).slow_paths == [sentence]


def test_a_fused_model_with_other_logits_is_not_used(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh adapter is zero: only the noise that the trial adds shows a wrong fusion."""
    fresh = policy_of(models)
    for module in fresh.model.modules():
        if "lora_b" in module:
            module.lora_b = mx.zeros_like(module.lora_b)
    right = fused_linear._adapted_weight
    monkeypatch.setattr(fused_linear, "_adapted_weight", lambda member: 2 * right(member) - member.linear.weight)
    fused = FusedModel(fresh.model, fresh.split_model)
    assert fused.model is fresh.model and not fused.fused_linears
    assert fused.slow_paths == ["Layers are not fused for decoding: the fused layers give other logits than the model."]


def active() -> int:
    gc.collect()  # what earlier tests left in cycles would be freed in between
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("bits", [4, None], ids=["4-bit", "float32"])
def test_packed_weights_are_the_only_copy(models: Path, bits: int | None) -> None:
    """The policy's arrays and its reference's become views; the adapters' packed form is all that comes on top."""
    policy = policy_of(models, bits=bits, beta=0.1)
    assert policy.reference_model is not None
    weights = sum(x.nbytes for _, x in tree_flatten(policy.reference_model.parameters()))
    mx.eval(policy.model.parameters())
    before = active()
    fused = FusedModel(policy.model, policy.split_model, merge=False, others=[policy.reference_model])
    assert fused.fused_linears
    assert active() - before < 0.03 * weights + 1024  # the trial's table of rotations
    policy_layer, reference_layer = (tree.layers[0].self_attn for tree in (policy.model, policy.reference_model))
    assert policy_layer.k_proj.linear.weight is reference_layer.k_proj.weight
    fused.refresh()
    assert 0 < active() - before < 4 * sum(x.nbytes for x in policy.trainable().values()) + 4096
    fused.release()
    assert active() - before < 0.03 * weights + 1024  # the trial's table of rotations


PROBLEMS = [Problem(i, "", [], [5 + 7 * i + j for j in range(n)], "") for i, n in enumerate((1, 30, 70))]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")


def assert_same_completions(policy: Policy, fused: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    got = fused.sample(PROBLEMS, 2, GREEDY, 0, 0)
    monkeypatch.delenv(TREAT_CPU_AS)
    monkeypatch.setattr(FusedModel, "_replace_blocks", lambda fused: "")
    expected = Sampler(policy, 12).sample(PROBLEMS, 2, GREEDY, 0, 0)
    for a, b in zip(got, expected, strict=True):
        for one, other in zip(a.completions, b.completions, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)


@pytest.mark.parametrize(("arch", "bits"), [("qwen3", 4), ("qwen3", None), ("llama", 4), ("qwen2", None)])
def test_same_completions(arch: str, bits: int | None, models: Path, gpu: None, monkeypatch: pytest.MonkeyPatch):
    """With and without norms of heads, biases, and merged weights; rows of unequal length, refilled and compacted."""
    policy = policy_of(models, arch, **({"bits": bits} if bits else {}))
    fused = Sampler(policy, 12, rows=4)
    assert fused.fused.packs_cache and fused.slow_paths == []
    assert_same_completions(policy, fused, monkeypatch)


def packed_heads(qkv: mx.array, rotation: mx.array, heads: Any, norms: Any) -> tuple[mx.array, mx.array]:
    """What `metal.rotated_heads` computes."""
    split = qkv.reshape(len(qkv), -1, 1, heads.size)
    queries, *new = metal.rotated_heads_plain(split, rotation, heads, norms)
    return queries, mx.stack(new, axis=2)


def test_our_kernels_get_what_they_compute(models: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain forms stand for the kernels: the same arguments, so a wrong one would show."""
    calls: list[str] = []

    def adapted(*arguments: Any) -> mx.array:
        calls.append("adapter")
        assert all(array.ndim == 2 for array in arguments if isinstance(array, mx.array))
        return metal_shim.adapted_plain(*arguments)

    def rotated(*arguments: Any) -> tuple[mx.array, mx.array]:
        calls.append("heads")
        return packed_heads(*arguments)

    monkeypatch.setattr(fused_linear, "adapted", adapted)
    monkeypatch.setattr(fused_model, "rotated_heads", rotated)
    policy = policy_of(models, "qwen3", bits=4)
    fused = Sampler(policy, 12, rows=4)
    assert calls == []  # no Metal here
    fused.fused.use_kernels(True)
    fused._compiled_steps.clear()  # the trial's were traced without
    assert_same_completions(policy, fused, monkeypatch)
    assert calls.count("adapter") == 4 * calls.count("heads") > 0


@pytest.mark.parametrize("arch", ["gemma3_text", "phi3", "olmo2"])
def test_other_blocks_keep_their_own_way_without_a_word(arch: str, models: Path, gpu: None) -> None:
    fused = Sampler(policy_of(models, arch), 4).fused
    assert not fused.packs_cache and fused.slow_paths == []


@pytest.mark.parametrize("part", ["the fused blocks", "kernels of our own"])
def test_parts_with_other_logits_are_not_used(models: Path, part: str, gpu: None, monkeypatch: Any) -> None:
    """Wrong kernels, as on a Mac whose compiler or chip disagrees, leave the fused blocks in plain mlx."""
    policy, right = policy_of(models, "qwen3", bits=4), fused_model.rotated_heads_plain
    if part == "the fused blocks":
        monkeypatch.setattr(fused_model, "rotated_heads_plain", lambda *given: right(*given[:3], None))
    else:
        monkeypatch.setattr(device, "has_metal", lambda: True)
        monkeypatch.setattr(fused_model, "rotated_heads", packed_heads)
        monkeypatch.setattr(fused_linear, "adapted", lambda base, *rest: 2 * metal_shim.adapted_plain(base, *rest))
    fused = Sampler(policy, 12)
    assert fused.fused.packs_cache == (part != "the fused blocks")
    assert not any(block.uses_kernels for block in fused.fused.decoding_blocks)
    says = f"Decoding steps run more kernels than they need: {part} give other logits than the model."
    assert fused.slow_paths == [says]
    assert_same_completions(policy, fused, monkeypatch)
