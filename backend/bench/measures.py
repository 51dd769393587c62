"""Takes the measurements of one random model, in a process of its own: seconds, peaks, and the gap of log-probabilities."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3

from backend.bench import schema
from backend.bench.about import working_set_bytes
from backend.bench.schema import Precision, Qwen3Shape, Task
from backend.bench.switches import Technique, switch_named
from backend.bench.workload import Workload, settings
from backend.config.config import Config
from backend.engine.device import on_gpu
from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.adapters import attach_adapters
from backend.models.policy import Policy
from backend.sampling.rollout import Sampler
from backend.trainer.memory.estimate import GB, Estimate, estimate
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.memory.plan import plan_memory
from backend.utils.errors import UserError
from backend.utils.machine import machine_bytes

# A policy with random weights in the shape of a Qwen3, made on the device: no download, no file of weights, no float
# copy of them.

BITS, GROUP = 4, 64
LOGIT_STD = 3.0
LORA_B_STD = 1e-3
"""With rank 8 and scale 20 adapters then add about 3 % to a layer's output."""


def model_config(shape: Qwen3Shape, precision: Precision) -> dict[str, Any]:
    """The config.json of such a model."""
    config = {
        "model_type": "qwen3", "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True,
        "torch_dtype": "float32" if "float32" in precision else "bfloat16",
    }  # fmt: skip
    packed = {"quantization": {"bits": BITS, "group_size": GROUP, "mode": "affine"}} if "4-bit" in precision else {}
    return config | packed


def write_config(folder: Path, shape: Qwen3Shape, precision: Precision) -> None:
    """A model folder with no weights: all that the memory estimate reads."""
    (folder / "config.json").write_text(json.dumps(model_config(shape, precision)), encoding="utf-8")


def random_policy(config: Config, shape: Qwen3Shape, precision: Precision) -> Policy:
    """A policy with adapters as `config` has them, and a reference that shares its base."""
    about = model_config(shape, precision)
    model = random_model(about)
    reference = copy_sharing_arrays(model)
    reference.freeze()
    reference.eval()
    attach_adapters(model, config)
    trainable: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    noise = [(name, LORA_B_STD * mx.random.normal(b.shape)) for name, b in trainable.items() if name.endswith("lora_b")]
    model.load_weights(noise, strict=False)
    mx.eval(model.parameters())
    return Policy(model, SilentTokenizer(), about, reference)


def same_model(policy: Policy) -> Policy:
    """Another policy over the same modules: the engine looks again at what it can do with them."""
    return Policy(policy.model, policy.tokenizer, policy.model_config, policy.reference_model)


def random_model(about: dict[str, Any]) -> nn.Module:
    """The model of a config.json, with random weights in its type, or packed to 4 bits with scales of that type."""
    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(about))
    model.set_dtype(getattr(mx, about["torch_dtype"]))
    if "quantization" in about:
        nn.quantize(model, GROUP, BITS)
    # Nothing is computed so far: what the layers' constructors drew is dropped unevaluated, only its shapes are used.
    mx.random.seed(0)
    model.update(tree_map_with_path(lambda name, array: _random_like(name, array, about), model.parameters()))
    # Largest first and one at a time, so that what drawing an array takes is never on top of all the others.
    arrays: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]  # pyright: ignore
    for array in sorted(arrays, key=lambda array: -array.nbytes):
        mx.eval(array)
    return model


def _random_like(name: str, array: mx.array, about: dict[str, Any]) -> mx.array:
    """A new array of this shape and type. Norms are 1; a quantised weight's numbers 0 … 15 become symmetric around 0."""
    if array.ndim == 1:
        return mx.ones(array.shape, array.dtype)
    if array.dtype == mx.uint32:
        # Halves of 16 bits: random integers come from floats, which have 24.
        halves = mx.random.randint(0, 1 << 16, (*array.shape[:-1], 2 * array.shape[-1]), mx.uint16)
        return halves.view(mx.uint32)
    is_packed = name.endswith(("scales", "biases"))
    inputs = array.shape[1] * (GROUP if is_packed else 1)
    std = LOGIT_STD / math.sqrt(inputs) if "embed_tokens" in name else 1 / math.sqrt(inputs)
    step = std / math.sqrt((2 ** (2 * BITS) - 1) / 12)  # the standard deviation of the whole numbers 0 … 15 is 4.6
    if name.endswith("scales"):
        return mx.full(array.shape, step, array.dtype)
    if name.endswith("biases"):
        return mx.full(array.shape, -step * (2**BITS - 1) / 2, array.dtype)
    return mx.random.uniform(-math.sqrt(3) * std, math.sqrt(3) * std, array.shape, array.dtype)


class SilentTokenizer:
    """What a policy needs of a tokenizer, for tokens that mean nothing."""

    eos_token_ids = (1,)
    pad_token_id = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""


# ── measures ─────────────────────────────────────────────────────────────────────────────────────────────────────────

T = TypeVar("T")


def rounds(
    run: Callable[[], T], allowance_s: float, most: int, clock: Callable[[], float] = time.perf_counter
) -> list[T]:
    """What `run` returns, `most` times or as often as the allowance lasts, but once at least; a run to warm up comes first."""
    deadline = clock() + allowance_s
    run()
    results: list[T] = []
    while len(results) < most:
        began = clock()
        results.append(run())
        ended = clock()
        if ended + (ended - began) > deadline:  # another one, as long as this
            break
    return results


def now() -> float:
    """Seconds of the clock that measures: wall time on a GPU; on a CPU the time of all threads, which other programs do not change."""
    return time.perf_counter() if on_gpu() else time.process_time()


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of `run`, until the device has finished."""
    mx.synchronize()
    began = now()
    run()
    mx.synchronize()
    return now() - began


def peak_gb() -> float:
    """mlx's peak since this was last called, weights included."""
    peak = mx.get_peak_memory() / GB
    mx.reset_peak_memory()
    return peak


@dataclass(slots=True)
class ModelBench:
    """The model of this process, made for its first task, and the last rollout, which keeps its compiled steps.

    `folder` gets the model's config.json, which the memory estimate reads.
    """

    folder: Path
    policy: Policy | None = None
    kept: tuple[dict[str, Any], Sampler] | None = None
    """(limits of the rollout, the rollout)."""

    def take(self, task: Task, allowance_s: float) -> schema.Numbers:
        """Raises UserError where the task does not fit this machine's memory, and whatever the engine raises."""
        write_config(self.folder, task.shape, task.precision)
        config = settings(task, self.folder)
        needs = self._estimate(config, task)
        if not needs.fits:
            raise UserError("memory_limit", needs.sentence)
        if self.policy is None:
            self.policy = random_policy(config, task.shape, task.precision)
        plan = plan_memory(config, self.policy, [task.prompt], lambda sentence: None)
        assert plan is not None  # the sizes of a Qwen3 are known
        workload = Workload(task, config, plan, self.policy)
        # Models and compiled steps of the task before hold one another in circles, and would count in this one's peak.
        gc.collect()
        mx.clear_cache()
        peak_gb()
        match task.measure:
            case "prefill":
                return prefill(workload, self._rollout(workload), allowance_s)
            case "sampling":
                return sampling(workload, self._rollout(workload), needs, allowance_s)
            case "learning":
                return learning(workload, needs, allowance_s)
            case "gap":
                return gap(workload, self._rollout(workload))
            case "launches":
                raise AssertionError("files of earlier versions have these; nothing counts them any more")
            case "switch":
                return in_turns(workload, switch_named(task.switch), allowance_s)

    def _estimate(self, config: Config, task: Task) -> Estimate:
        shape = shape_of(self.folder)
        assert shape is not None
        return estimate(
            config, shape, machine_bytes(mx.get_active_memory(), working_set_bytes()), task.prompt, gpu=on_gpu()
        )

    def _rollout(self, workload: Workload) -> Sampler:
        limits = workload.rollout_limits
        if self.kept is None or self.kept[0] != limits:
            self.kept = None  # before the next is built, so that one at a time holds packed weights
            self.kept = (limits, workload.rollout())
        return self.kept[1]


# ── one measurement each ─────────────────────────────────────────────────────────────────────────────────────────────


def prefill(workload: Workload, rollout: Sampler, allowance_s: float) -> schema.PrefillNumbers:
    """Prompts read together, up to the first token of each."""
    task = workload.task
    took = rounds(lambda: seconds(lambda: workload.sample(rollout)), allowance_s, task.most_rounds)
    return schema.PrefillNumbers(rounds=len(took), tokens_per_s=task.prompts * task.prompt / statistics.median(took))


def sampling(workload: Workload, rollout: Sampler, needs: Estimate, allowance_s: float) -> schema.SamplingNumbers:
    """Completion tokens a second between the first chunk of decoding steps and the last."""
    rates = rounds(lambda: _decoding_rate(workload, rollout), allowance_s, workload.task.most_rounds)
    rate = statistics.median(rates)
    return schema.SamplingNumbers(
        rounds=len(rates), tokens_per_s=rate, step_ms=1000 * workload.task.rows / rate,
        peak_gb=peak_gb(), estimate_gb=needs.rollout.total / GB, reductions=list(needs.reductions),
    )  # fmt: skip


def _decoding_rate(workload: Workload, rollout: Sampler) -> float:
    marks: list[tuple[float, int]] = []
    workload.sample(rollout, lambda tokens: marks.append((now(), tokens)))
    (began, before), (ended, after) = marks[0], marks[-1]
    return (after - before) / (ended - began)


def learning(workload: Workload, needs: Estimate, allowance_s: float) -> schema.LearningNumbers:
    """A whole learning step: forward and backward passes over all completions, and the update."""
    learner, batch = workload.learner(), workload.random_batch()
    took = rounds(lambda: seconds(lambda: workload.learn(learner, batch)), allowance_s, workload.task.most_rounds)
    step_s = statistics.median(took)
    return schema.LearningNumbers(
        rounds=len(took), step_s=step_s, tokens_per_s=workload.task.rows * workload.task.completion / step_s,
        peak_gb=peak_gb(), estimate_gb=needs.training.total / GB, reductions=list(needs.reductions),
    )  # fmt: skip


def gap(workload: Workload, rollout: Sampler) -> schema.GapNumbers:
    gap_N = workload.gaps(rollout, workload.learner())
    return schema.GapNumbers(
        tokens=len(gap_N), mean_nats=float(gap_N.mean()), p99_nats=float(np.quantile(gap_N, 0.99)),
        max_nats=float(gap_N.max()),
    )  # fmt: skip


# ── switches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Side:
    """The work with a technique on, or off: what was built inside `context`, and is run inside it."""

    context: Callable[[], contextlib.AbstractContextManager[Any]]
    run: Callable[[], Any]
    gaps: Callable[[], np.ndarray]

    def turn(self) -> tuple[float, float]:
        """(seconds, peak in GB). The peak counts what the other side holds too: only the difference tells."""
        peak_gb()
        with self.context():
            return seconds(self.run), peak_gb()

    def mean_gap(self) -> float:
        with self.context():
            return float(self.gaps().mean())


def in_turns(workload: Workload, technique: Technique, allowance_s: float) -> schema.SwitchNumbers:
    """The technique on, off, on, off, …, so that whatever else the machine does falls on both alike."""
    on, off = (_side(workload, technique, context) for context in (contextlib.nullcontext, technique.off))
    turns = rounds(lambda: (on.turn(), off.turn()), allowance_s, workload.task.most_rounds)
    (on_s, on_gb), (off_s, off_gb) = (
        (statistics.median(took for took, _ in side), max(peak for _, peak in side))
        for side in zip(*turns, strict=True)
    )
    return schema.SwitchNumbers(
        rounds=len(turns), on_s=on_s, off_s=off_s, on_peak_gb=on_gb, off_peak_gb=off_gb,
        on_gap_nats=on.mean_gap() if technique.has_gap else None, off_gap_nats=off.mean_gap() if technique.has_gap else None,
    )  # fmt: skip


def _side(
    workload: Workload, technique: Technique, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Side:
    with context():
        mine = replace(workload, policy=same_model(workload.policy))
        rollout = mine.rollout() if technique.work != "learning" else None
        learner = mine.learner() if technique.work != "sampling" else None
        batch = mine.random_batch()

    def run() -> None:
        if rollout:
            mine.sample(rollout)
        if learner:
            mine.learn(learner, batch)

    return Side(context, run, lambda: mine.gaps(rollout or mine.rollout(), learner or mine.learner()))
