"""Proofs with TRL itself: its parser takes what is exported, its advantages and loss of a batch are ours, and the
exported script trains.

TRL and torch are no part of this project. TRL_PYTHON names a Python that has them:

    python -m venv somewhere && somewhere/bin/pip install "trl[peft]==1.16.*" torch math-verify regex
    TRL_PYTHON=somewhere/bin/python make proofs
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

from backend.config.config import Config, parse
from backend.data.problems import PromptFormat, messages_of, problem_of
from backend.export.trained_weights import AdapterFiles, TrainedWeights
from backend.export.trl_folder import export_trl
from backend.models.peft_import import import_adapter
from backend.rewards.inputs import TrainerState
from backend.rewards.resolve import resolve
from backend.trainer.run_inputs import read_inputs
from backend.training.advantages import advantage_values
from backend.training.grpo import loss_settings
from backend.training.losses import policy_terms
from backend.types import Completion, Group
from tests.support.random_models import tiny_tokenizer
from tests.support.random_runs import PROMPT, furthest
from tests.support.scoring import score
from tests.support.torch_process import Torch

REFERENCE = Path(__file__).parents[1] / "support" / "trl_reference.py"
ARGUMENTS = Path(__file__).parents[1] / "config" / "other_programs" / "trl_1_16.yaml"
PYTHON = os.environ.get("TRL_PYTHON", "")

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with TRL and torch"),
]


class Trl:
    """A process with TRL, started once: importing it takes seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, str(REFERENCE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=without_ours()
        )

    def call(self, *call: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def without_ours() -> dict[str, str]:
    """The environment without our modules, without a network, and without progress bars."""
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet


@pytest.fixture(scope="module")
def trl() -> Iterator[Trl]:
    process = Trl()
    yield process
    process.end()


@pytest.fixture(scope="module")
def torch() -> Iterator[Torch]:
    process = Torch(PYTHON)
    yield process
    process.end()


@pytest.fixture(scope="module")
def base(torch: Torch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 2 as transformers saves it, with a tokenizer and a chat template."""
    folder = tiny_tokenizer(tmp_path_factory.mktemp("base") / "tiny")
    torch.make("qwen2", folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "train.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(7))
    )
    return file


def test_the_documented_arguments_are_those_of_trls_parser(trl: Trl) -> None:
    assert sorted(yaml.safe_load(ARGUMENTS.read_text())) == trl.call("arguments")


GROUP, PROMPTS = 4, 2
REWARDS = {
    "reward_functions": ["length_target(target=6)", "r1_count_xml", "diversity"],
    "reward_weights": [1.0, 2.0, 0.5],
}
CASES: list[dict[str, Any]] = [
    *({"grpo_loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")),
    {"grpo_loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"grpo_loss_type": "grpo", "importance_sampling_level": "sequence"},  # GSPO
    {"grpo_loss_type": "dapo", "epsilon_high": 0.3, "delta": 1.2},
    {"grpo_loss_type": "cispo", "epsilon_high": 1.1},
    {"grpo_loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    {"grpo_loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0},
    {"beta": 0.0, "top_entropy_quantile": 0.4},
    {"beta": 0.3, "use_bias_correction_kl": False, "entropy_coef": 0.1},
    {"off_policy_mask_threshold": 0.02, "scale_rewards": "none"},
    {"scale_rewards": "batch", "temperature": 0.7},
    {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": []},
]  # fmt: skip


def a_batch(rng: random.Random) -> dict[str, Any]:
    """Completions of 3 to 11 tokens, the last of which ends them, and how far the old policy is away."""
    completions = [[*(rng.randrange(3, 320) for _ in range(rng.randrange(2, 11))), 1] for _ in range(GROUP * PROMPTS)]
    return {"completions": completions, "noise": [[rng.gauss(0, 0.2) for _ in ids] for ids in completions]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{key}={value}" for key, value in case.items())[:60])
def test_advantages_and_loss_of_a_batch_are_ours(
    trl: Trl, base: Path, rows: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    settings = {"model": str(base), "data": str(rows), "train_type": "full", "group_size": GROUP, "batch_size": PROMPTS,
                "beta": 0.1, "epsilon": 0.1, "max_completion_length": 12, "temperature": 1.0, "dtype": "float32", "steps_per_eval": 0}  # fmt: skip
    config = parse(settings | REWARDS | case)
    folder = export_trl(config, "batch", tmp_path).path
    batch = a_batch(random.Random(str(case)))
    theirs = trl.call("batch", str(folder), batch)
    assert advantages_of(config, batch) == pytest.approx(theirs["advantages"], abs=2e-5)
    assert loss_of(config, theirs) == pytest.approx(theirs["loss"], abs=2e-5)
    assert any(theirs["advantages"]) and theirs["loss"]


def advantages_of(config: Config, batch: dict[str, Any]) -> list[float]:
    """Ours, of the same completions, scored by the same functions here."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.model)
    inputs, form = read_inputs(config), PromptFormat.of(config)
    inputs.scorer.close()
    problems = [
        problem_of(i, row, messages_of(row, form, ""), [], form) for i, row in enumerate(inputs.splits.train[:PROMPTS])
    ]
    sampled = [
        Completion(ids, [], tokenizer.decode(ids[:-1], skip_special_tokens=False), "eos")
        for ids in batch["completions"]
    ]
    groups = [Group(problem, sampled[GROUP * i : GROUP * (i + 1)]) for i, problem in enumerate(problems)]
    functions = resolve(config.reward_functions)
    score(groups, functions, config.weights, 60.0, TrainerState(max_completion_length=config.max_completion_length))
    rewards = [[completion.scores[function.about.name] for function in functions] for completion in sampled]
    values, _ = advantage_values(
        rewards, GROUP, weights=config.weights, scale_rewards=config.scale_rewards,
        multi_objective_aggregation=config.multi_objective_aggregation,
    )  # fmt: skip
    return values


def loss_of(config: Config, theirs: dict[str, Any]) -> float:
    """Ours, of the same log-probabilities."""
    arrays = {
        name: None if theirs[name] is None else mx.array(theirs[name])
        for name in ("logps", "old", "ref", "mask", "entropies")
    }
    assert arrays["logps"] is not None and arrays["mask"] is not None
    loss, *_ = policy_terms(
        arrays["logps"], arrays["old"], arrays["ref"], mx.array(theirs["advantages"]), arrays["mask"], loss_settings(config),
        entropies=arrays["entropies"],
    )  # fmt: skip
    return float(loss)


@pytest.fixture(scope="module")
def trained(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose train.py has made two steps."""
    config = parse(two_steps(base, rows))
    folder = export_trl(config, "two-steps", tmp_path_factory.mktemp("trained")).path
    run = subprocess.run([PYTHON, "train.py"], cwd=folder, env=without_ours(), capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    return folder


def two_steps(base: Path, rows: Path) -> dict[str, Any]:
    return REWARDS | {
        "model": str(base), "data": str(rows), "rank": 4, "num_layers": 1, "iters": 2, "batch_size": 2, "group_size": GROUP,
        "steps_per_eval": 1, "validation_split": 0.2, "save_every": 1, "steps_per_report": 1, "lr_schedule": "exponential", "lr_warmup_steps": 1,
        "learning_rate": 0.01, "lr_final": 1e-3, "num_iterations": 2, "max_completion_length": 8, "data_seed": 5, "device": "cpu",
    }  # fmt: skip


def test_the_exported_script_trains_and_saves_its_adapter(trained: Path) -> None:
    adapter = json.loads((trained / "output" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["layers_to_transform"]) == (4, 80, [1])
    weights = mx.load(str(trained / "output" / "adapter_model.safetensors"))
    assert isinstance(weights, dict) and weights
    moved = [name for name, array in weights.items() if ".lora_B." in name and mx.abs(array).max().item() > 0]
    assert moved and all(".layers.1." in name for name in weights)


def test_the_adapter_comes_home(torch: Torch, base: Path, trained: Path, tmp_path: Path) -> None:
    """Trained by TRL, put onto the model here by `import`: the logits are those of torch and PEFT."""
    expected = torch.logits(base, trained / "output")
    assert furthest(expected, torch.logits(base)) > 0.01, "two steps have changed it"
    imported = import_adapter(trained / "output", str(base), tmp_path / "home")
    files = AdapterFiles(imported.path / "adapters.safetensors", imported.path / "adapter_config.json")
    logits: Any = TrainedWeights(base, str(base), base, files).open()(PROMPT)
    assert furthest(logits[0], expected) < 1e-4
