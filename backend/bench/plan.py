"""Which tasks the bench takes on, and in which order: the most telling first, because the time may end before the list does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from backend.bench.schema import Precision, Qwen3Shape, Task
from backend.bench.switches import SWITCHES, Technique

QWEN3 = (
    Qwen3Shape(
        name="Qwen3-0.6B", hidden=1024, layers=28, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936
    ),
    Qwen3Shape(
        name="Qwen3-1.7B", hidden=2048, layers=28, intermediate=6144, heads=16, kv_heads=8, head_dim=128, vocab=151936
    ),
    Qwen3Shape(
        name="Qwen3-4B", hidden=2560, layers=36, intermediate=9728, heads=32, kv_heads=8, head_dim=128, vocab=151936
    ),
)
TINY = (
    Qwen3Shape(name="tiny", hidden=128, layers=2, intermediate=384, heads=4, kv_heads=2, head_dim=32, vocab=1024),
    Qwen3Shape(name="small", hidden=256, layers=4, intermediate=768, heads=4, kv_heads=2, head_dim=64, vocab=8192),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the workloads are. Lengths are in tokens; the first shape is the smallest, on which switches are measured."""

    name: str
    shapes: Sequence[Qwen3Shape]
    precisions: Sequence[Precision] = ("4-bit", "bf16")
    group_sizes: Sequence[int] = (4, 8, 16, 32)
    prompt: int = 80
    sampled: int = 128
    """Completion length of sampling."""
    learned: int = 256
    """Completion length of learning."""
    prefilled: tuple[int, int] = (4, 512)
    """Prompts, and the length of each."""
    switches: Sequence[Technique] = SWITCHES
    most_rounds: int = 5


ON_CPU: tuple[Precision, ...] = ("4-bit float32", "bf16")
"""bfloat16 products of packed weights are slow on a CPU, and round more than a GPU's."""

FULL = Scale("full", QWEN3)
SMALL = Scale(
    "small", TINY, (*ON_CPU, "float32"), sampled=32, learned=32, prefilled=(4, 64), most_rounds=3
)  # fmt: skip
"""For a CPU."""
QUICK = Scale(
    "quick", TINY[:1], group_sizes=(8, 32), prompt=16, sampled=32, learned=32, prefilled=(2, 64),
    switches=SWITCHES[:4], most_rounds=2,
)  # fmt: skip


def scale_for(computes_on: str, quick: bool) -> Scale:
    """The scale for a "gpu" or a "cpu"."""
    if not quick:
        return FULL if computes_on == "gpu" else SMALL
    return QUICK if computes_on == "gpu" else replace(QUICK, precisions=ON_CPU)


def tasks(scale: Scale) -> list[Task]:
    """Everything to measure: what matters most of every model, then the switches, then the rest."""
    models: list[tuple[Qwen3Shape, Precision]] = [
        (shape, precision) for precision in scale.precisions for shape in scale.shapes
    ]
    first = [task for model in models for task in _telling(scale, *model)]
    rest = [task for model in models for task in _further(scale, *model)]
    return [*first, *_switch_tasks(scale), *rest]


def _telling(scale: Scale, shape: Qwen3Shape, precision: Precision) -> Iterator[Task]:
    """Sampling with the usual group and the largest one, a learning step and the gap."""
    for group_size in _usual_and_largest(scale):
        yield _sampling(scale, shape, precision, group_size, filters=True)
    yield _learning(scale, shape, precision, kl=False)
    yield _task(scale, shape, precision, measure="gap", group_size=8, completion=scale.sampled)


def _further(scale: Scale, shape: Qwen3Shape, precision: Precision) -> Iterator[Task]:
    """Prefill, the other groups, sampling without filters, a learning step with KL."""
    prompts, length = scale.prefilled
    yield _task(scale, shape, precision, measure="prefill", prompts=prompts, group_size=1, prompt=length)
    told = _usual_and_largest(scale)
    for group_size in (*told, *(size for size in scale.group_sizes if size not in told)):
        yield _sampling(scale, shape, precision, group_size, filters=False)
        if group_size not in told:
            yield _sampling(scale, shape, precision, group_size, filters=True)
    yield _learning(scale, shape, precision, kl=True)


def _switch_tasks(scale: Scale) -> Iterator[Task]:
    """Those of 4-bit weights first, then those of floats, so that each model is made once."""
    for switch in sorted(scale.switches, key=lambda switch: switch.weights != "4-bit"):
        fitting: list[Precision] = [p for p in scale.precisions if ("4-bit" in p) == (switch.weights == "4-bit")]
        length = scale.sampled if switch.work == "sampling" else scale.learned
        yield _task(
            scale, scale.shapes[0], fitting[0], measure="switch", switch=switch.name,
            prompts=switch.prompts, group_size=switch.group_size, filters=switch.filters, completion=length,
        )  # fmt: skip


def _usual_and_largest(scale: Scale) -> tuple[int, ...]:
    usual = 8 if 8 in scale.group_sizes else min(scale.group_sizes)
    return tuple(dict.fromkeys((usual, max(scale.group_sizes))))


def _sampling(scale: Scale, shape: Qwen3Shape, precision: Precision, group_size: int, *, filters: bool) -> Task:
    return _task(
        scale, shape, precision, measure="sampling", group_size=group_size, completion=scale.sampled, filters=filters
    )


def _learning(scale: Scale, shape: Qwen3Shape, precision: Precision, *, kl: bool) -> Task:
    return _task(scale, shape, precision, measure="learning", group_size=8, completion=scale.learned, kl=kl)


def _task(scale: Scale, shape: Qwen3Shape, precision: Precision, **fields: object) -> Task:
    common = {"shape": shape, "precision": precision, "prompt": scale.prompt, "most_rounds": scale.most_rounds}
    return Task.model_validate(common | fields)
