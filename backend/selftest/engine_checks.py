"""Checks of what trains: the device, the demo's model, a group sampled, a step learned, a checkpoint, an export.

Each works on what the one before has left on the workbench, as a run does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import yaml

from backend.config import config as spec_config
from backend.engine import cpu, cpu_setup
from backend.engine.device import has_metal
from backend.engine.metal import MetalKernel
from backend.export.export_run import Export, export_run
from backend.runs.checkpoints import checkpoint
from backend.runs.checkpoints.checkpoint_writer import CheckpointWriter, snapshot
from backend.selftest.check import Check, CheckFailed, Workbench
from backend.trainer.run_context import load_context
from backend.training.batch import Batch, pack
from backend.training.policy_forward import micro_batch_of
from backend.types import Group

SIDE = 32
LOGP_TOLERANCE = 0.02
"""Most nats by which sampler and learner may differ on a token, in float32: a wrong position or mask differs by far more."""

SQUARES = MetalKernel("selftest_squares", ("x",), ("y",), "uint i = thread_position_in_grid.x; y[i] = x[i] * x[i];")


def check_device(_: Workbench) -> str:
    """Small whole numbers, which float32 multiplies exactly in any order; on Metal by kernels of mlx's metallib, and one of our own."""
    left, right = _whole_numbers(3), _whole_numbers(5)
    product: Any = (mx.array(left, mx.float32) @ mx.array(right, mx.float32)).tolist()
    expected = [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*right, strict=True)] for row in left
    ]
    if product != expected:
        raise CheckFailed("A product of two small matrices of whole numbers is wrong.")
    x = mx.arange(SIDE, dtype=mx.float32)
    compiled: Any = mx.compile(lambda x: x * 2 + 1)(x).tolist()
    if compiled != [2.0 * n + 1 for n in range(SIDE)]:
        raise CheckFailed("A compiled function gives wrong numbers.")
    done = f"{mx.default_device()} multiplies matrices and runs a compiled function"
    if has_metal():
        squares: Any = SQUARES([x], [((SIDE,), mx.float32)], {}, (SIDE, 1, 1), (SIDE, 1, 1))[0].tolist()
        if squares != [float(n * n) for n in range(SIDE)]:
            raise CheckFailed("A Metal kernel of our own gives wrong numbers.")
        done += " and a Metal kernel of our own"
    return f"{done}."


def check_blas(_: Workbench) -> str:
    """Nothing can fail here that would not fail elsewhere; what is slow on this machine is said."""
    return " ".join(filter(None, (cpu_setup.load_openblas(), cpu.check_compiler())))


def load_demo(bench: Workbench) -> str:
    bench.run.path.mkdir(parents=True, exist_ok=True)
    bench.run.config.write_text(yaml.safe_dump(bench.settings()), encoding="utf-8")
    bench.parts = load_context(spec_config.load(bench.run.config), lambda sentence: None)
    count = sum(array.size for array in bench.parts.policy.trainable().values())
    return f"The bundled model is loaded: {count:,} weights, {len(bench.parts.prompt_stream.take(1))} prompt ready."


def sample_group(bench: Workbench) -> str:
    """A group, whose log-probabilities are then computed again as the learner does it."""
    parts, config = bench.loaded, _config(bench)
    problems = parts.prompt_stream.take(1)
    began = time.perf_counter()
    groups = parts.rollout.sample(problems, config.group_size, parts.sampling, config.seed, 0)
    seconds = time.perf_counter() - began
    tokens = sum(len(completion.tokens) for completion in groups[0].completions)
    if len(groups[0].completions) != config.group_size or not tokens:
        raise CheckFailed(f"{config.group_size} completions were asked for, and {len(groups[0].completions)} came.")
    parts.scoring.score(groups, 1)
    batch = _batch(bench, groups)
    difference = float(mx.max(mx.abs(_logps(bench, batch) - batch.sampling_logp_BT) * batch.mask_BT).item())  # pyright: ignore
    if not difference <= LOGP_TOLERANCE:
        raise CheckFailed(f"Sampler and learner disagree about the probability of a token, by {difference:.3g} nats.")
    bench.groups = groups
    return (
        f"{config.group_size} completions sampled and scored, {tokens} tokens in {seconds:.1f} s; sampler and learner differ by "
        f"{difference:.1g} nats at most."
    )


def learn_step(bench: Workbench) -> str:
    """One update towards the first completion, whatever its reward was. Towards one alone: what makes all of them likelier together depends
    on how the loss weights tokens, and rewards of a group may all be equal."""
    for number, completion in enumerate(bench.groups[0].completions):
        completion.advantage = 0.0 if number else 1.0
    batch = _batch(bench, bench.groups)
    before = _preference(bench, batch)
    metrics = bench.loaded.learner.learn(batch)
    after = _preference(bench, batch)
    if not all(math.isfinite(number) for number in (metrics["loss"], metrics["grad_norm"], before, after)):
        raise CheckFailed("Loss, gradient or log-probabilities are no finite numbers.")
    if not metrics["grad_norm"] > 0:
        raise CheckFailed("The gradient is zero.")
    if not after > before:
        raise CheckFailed("After the step, what was rewarded is no likelier than before.")
    return f"One step learned: what was rewarded is likelier than before, by {after - before:.2g} nats a token."


def write_checkpoint(bench: Workbench) -> str:
    """Weights and optimizer, written, read back and compared bit by bit."""
    parts, config = bench.loaded, _config(bench)
    taken = snapshot(checkpoint.TrainingState(step=1, updates=1), parts.policy, parts.learner, config)
    writer = CheckpointWriter(bench.run, config.keep_checkpoints)
    try:
        writer.begin(taken, ())
        writer.wait()
    finally:
        writer.close()
    saved = checkpoint.newest(bench.run)
    if saved is None:
        raise CheckFailed("The checkpoint that was written is not found again.")
    optimizer = taken.optimizer or {}  # None where a run saves only its model
    different = [*_different(saved.weights(), taken.weights), *_different(saved.optimizer(), optimizer)]
    if different:
        raise CheckFailed(f"Read back, {len(different)} arrays of the checkpoint differ, {different[0]} first.")
    arrays = len(taken.weights) + len(optimizer)
    return f"A checkpoint of {arrays} arrays, written and read back, is equal in every bit."


def export_model(bench: Workbench) -> str:
    """The checkpoint as a model folder, which export itself loads back and compares with what was trained."""
    request = Export("folder", "exported", bench.folder / "exports", checkpoint="last", overwrite=True)
    exported = export_run(bench.run, request)
    if not list(exported.path.glob("*.safetensors")):
        raise CheckFailed("The exported folder holds no weights.")
    return f"Exported, {exported.bytes / 1e6:.1f} MB. {' '.join(exported.sentences())}"


ENGINE_CHECKS = (
    Check("device", check_device),
    Check("BLAS and compiler", check_blas),
    Check("demo model", load_demo, ("device",)),
    Check("sampling", sample_group, ("demo model",)),
    Check("learning", learn_step, ("sampling",)),
    Check("checkpoint", write_checkpoint, ("demo model",)),
    Check("export", export_model, ("checkpoint",)),
)


def _whole_numbers(seed: int) -> list[list[int]]:
    return [[(seed * row + 7 * column) % 8 for column in range(SIDE)] for row in range(SIDE)]


def _config(bench: Workbench) -> spec_config.Config:
    return spec_config.load(bench.run.config)


def _batch(bench: Workbench, groups: Sequence[Group]) -> Batch:
    return pack(list(groups), pad_id=bench.loaded.policy.pad_id, mask_truncated_completions=False)


def _logps(bench: Workbench, batch: Batch) -> mx.array:
    """[B, T] log-probabilities of the completions' tokens in nats, by the learner's forward pass."""
    forward, policy = bench.loaded.learner.forward, bench.loaded.policy
    policy.model.eval()
    micro_batch = micro_batch_of(batch)
    return next(iter(forward.logps_without_gradient(policy.split_model, [micro_batch])))


def _preference(bench: Workbench, batch: Batch) -> float:
    """Mean log-probability of the tokens of the completions with an advantage, in nats: what a step is to increase."""
    weight_BT = batch.advantage_B[:, None] * batch.mask_BT
    return float((mx.sum(_logps(bench, batch) * weight_BT) / mx.sum(weight_BT)).item())  # pyright: ignore[reportArgumentType]


def _different(read: dict[str, mx.array], written: Mapping[str, Any]) -> list[str]:
    """Names of arrays that are missing, or differ in shape, type or any value."""
    names = sorted(read.keys() | written.keys())
    return [name for name in names if name not in read or name not in written or not _equal(read[name], written[name])]


def _equal(one: mx.array, other: Any) -> bool:
    return one.dtype == other.dtype and bool(mx.array_equal(one, other).item())
