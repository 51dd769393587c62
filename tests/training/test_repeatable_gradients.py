"""No sum of a learning step depends on the order in which a GPU adds: its graphs have no scatter-add whose indices may
repeat.

Metal's scatter-adds are atomic, so a sum of several terms rounds differently from run to run, and a resumed run would
end with other weights. Linux cannot run them, but has the same graph: a CPU that makes a GPU's choices, every evaluated
graph of a step walked.
"""

import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from backend.config.config import parse
from backend.engine import patches
from backend.models.policy import load_policy
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.types import Completion, Group, Problem
from backend.utils.machine import TREAT_CPU_AS
from tests.support.random_models import tiny_model

RESHAPING = {  # operations that keep different indices different
    "AsType",
    "Copy",
    "Contiguous",
    "Reshape",
    "Flatten",
    "Unflatten",
    "Squeeze",
    "ExpandDims",
    "StopGradient",
    "Slice",
}
DISTINCT = {"Arange", "ArgPartition", "ArgSort"}  # operations whose results differ from one another, along an axis


class GraphNode(NamedTuple):
    name: str
    inputs: list[str]


def operations(*arrays: mx.array) -> dict[str, GraphNode]:
    """array → the operation that computes it, from mlx's own drawing of the graph."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    names: dict[str, str] = dict(re.findall(r'{ (\d+) \[label ?="([^"]*)"', dot.getvalue()))
    inputs: dict[str, list[str]] = {node: [] for node in names}
    outputs: dict[str, str] = {}
    for line in dot.getvalue().splitlines():
        if found := re.fullmatch(r'"(\w+)" -> (\d+)', line):
            inputs[found[2]].append(found[1])
        elif found := re.fullmatch(r'(\d+) -> "(\w+)"', line):
            outputs[found[2]] = found[1]
    return {array: GraphNode(names[node], inputs[node]) for array, node in outputs.items()}


def origin(array: str, graph: dict[str, GraphNode], passed: set[str]) -> str:
    """The name of the operation that an array comes from, through operations of the kinds `passed`."""
    while array in graph and graph[array].name in passed:
        array = graph[array].inputs[0]
    return graph[array].name if array in graph else ""


def may_repeat(graph: dict[str, GraphNode]) -> list[str]:
    """The scatter-adds that may add several terms to one number in any order."""
    offences: list[str] = []
    for operation in graph.values():
        if operation.name not in ("Scatter Sum", "ScatterAxis Sum"):
            continue
        index, updates = operation.inputs[1], operation.inputs[-1]
        counts = updates in graph and graph[updates].name == "Broadcast"  # of ones: a sum of whole numbers is exact
        if origin(index, graph, RESHAPING) not in DISTINCT and not counts:
            offences.append(f"{operation.name} at {origin(index, graph, RESHAPING) or 'an input'}")
    return offences


def group_of(rng: np.random.Generator, prompt: int, lengths: list[int]) -> Group:
    completions = [
        Completion(rng.integers(2, 300, n).tolist(), [-1.0] * n, "", "length", advantage=1.0 - 2 * (i % 2))
        for i, n in enumerate(lengths)
    ]
    return Group(Problem(0, "", [], rng.integers(2, 300, prompt).tolist(), ""), completions)


def offences_of_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arch: str, prompts: tuple[int, ...], budget: int, **settings: Any
) -> set[str]:
    """The scatter-adds of one learning step that may repeat; ragged completions and prompts of these lengths."""
    tiny_model(folder, arch, layers=2 if arch == "gemma3_text" else 1)  # every second has a window
    usual = {"model": str(folder), "data": "none", "num_layers": -1, "beta": 0.1, "max_completion_length": 40}
    config = parse(usual | {"batch_size": len(prompts), "group_size": 4} | settings)
    learner = build_learner(load_policy(config), config, 10, micro_batch_tokens=budget)
    rng, found = np.random.default_rng(0), set[str]()
    batch = pack([group_of(rng, prompt, [33, 40, 36, 40]) for prompt in prompts], pad_id=0)
    evaluate = mx.eval

    def walked(*trees: Any) -> None:
        arrays = [array for _, array in tree_flatten(list(trees)) if isinstance(array, mx.array)]
        found.update(may_repeat(operations(*arrays)))
        evaluate(*trees)

    monkeypatch.setattr(mx, "eval", walked)
    learner.learn(batch)
    return found


CASES = {
    "LoRA": {},
    "LoRA, in pieces": {"budget": 100},
    "LoRA of embeddings": {"lora_keys": ["model.embed_tokens", "self_attn.q_proj"]},
    "dropout": {"dropout": 0.1, "budget": 150},
    "full": {"train_type": "full", "grad_checkpoint": True},
    "a sliding window": {"arch": "gemma3_text", "train_type": "full"},
    "experts": {"arch": "qwen3_moe"},
    "experts, full": {"arch": "qwen3_moe", "train_type": "full"},
}


@pytest.fixture(autouse=True)
def _unpatched() -> Any:
    patches.uninstall()
    yield
    patches.uninstall()


@pytest.mark.parametrize("name", CASES)
def test_no_scatter_add_of_a_learning_step_repeats_an_index(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    case: dict[str, Any] = {"arch": "qwen3", "prompts": (34, 39), "budget": 4096} | CASES[name]
    assert offences_of_a_step(tmp_path / "model", monkeypatch, **case) == set()
