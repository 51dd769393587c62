"""Proofs with TRL itself: the exported script trains, and its adapter comes home. tests/golden holds TRL's losses and
advantages.

TRL and torch are no part of this project. TRL_PYTHON names a Python that has them:

    python -m venv somewhere && somewhere/bin/pip install "trl[peft]==1.16.*" torch math-verify regex
    TRL_PYTHON=somewhere/bin/python make proofs
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

from backend.config.config import parse
from backend.export.peft_files import import_adapter
from backend.export.trained_weights import AdapterFiles, TrainedWeights
from backend.export.trl_folder import export_trl
from backend.utils.places import resources
from tests.support.random_models import tiny_tokenizer
from tests.support.random_runs import PROMPT, furthest
from tests.support.tool_tokenizers import tool_model
from tests.support.torch_process import Torch

ARGUMENTS = Path(__file__).parents[1] / "config" / "other_programs" / "trl_1_16.yaml"
PYTHON = os.environ.get("TRL_PYTHON", "")

pytestmark = [pytest.mark.proof, pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with TRL and torch")]


def without_ours() -> dict[str, str]:
    """The environment without our modules, without a network, and without progress bars."""
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet


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
    file.write_text("".join(json.dumps({"prompt": f"{n} + {n} = ?", "answer": str(2 * n)}) + "\n" for n in range(7)))
    return file


def test_the_documented_arguments_are_those_of_trls_parser() -> None:
    listed = "from trl.scripts.grpo import make_parser; print(*(action.dest for action in make_parser()._actions))"
    run = subprocess.run([PYTHON, "-c", listed], env=without_ours(), capture_output=True, text=True, check=True)
    assert set(yaml.safe_load(ARGUMENTS.read_text())) == set(run.stdout.splitlines()[-1].split()) - {"help"}


@pytest.fixture(scope="module")
def trained(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose train.py has made two steps."""
    rewards = {"reward_functions": ["length_target(target=6)", "r1_count_xml", "diversity"]}
    small = {"rank": 4, "num_layers": 1, "iters": 2, "batch_size": 2, "group_size": 4, "max_completion_length": 8}
    often = {"steps_per_eval": 1, "validation_split": 0.2, "save_every": 1, "steps_per_report": 1, "num_iterations": 2}
    rates = {"learning_rate": 0.01, "lr_final": 1e-3, "lr_schedule": "exponential", "lr_warmup_steps": 1}
    where = {"model": str(base), "data": str(rows), "data_seed": 5, "device": "cpu", "reward_weights": [1.0, 2.0, 0.5]}
    config = parse(rewards | small | often | rates | where)
    folder = export_trl(config, "two-steps", tmp_path_factory.mktemp("trained")).path
    run = subprocess.run([PYTHON, "train.py"], cwd=folder, env=without_ours(), capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    return folder


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
    files = AdapterFiles.within(imported.path)
    logits: Any = TrainedWeights(base, str(base), base, files).open()(PROMPT)
    assert furthest(logits[0], expected) < 1e-4


ENVIRONMENT = '''
class Counter:
    def reset(self, start, **row):
        assert set(row) == {"prompt"}
        self.n = start
        return f" Count on from {start}."
    def add(self, by: int) -> str:
        """Add.

        Args:
            by: How much.
        """
        self.n += by
        return str(self.n)
    def get_reward(self):
        return float(self.n)
    def close(self):
        pass
def seen(completions, environments, **kwargs):
    return [len(messages) + float(isinstance(each, Counter)) for messages, each in zip(completions, environments)]
'''


def test_the_exported_script_trains_with_tools_and_environments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ENVIRONMENT)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Go.", "start": 5, "game": "count"}\n' * 2)
    model = tool_model(tmp_path / "model")
    about = json.loads((model / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(about))
    where = {"model": str(model), "data": str(tmp_path / "rows.jsonl"), "device": "cpu", "environment_column": "game"}
    tools = {
        "tools_file": str(resources() / "examples" / "calculator.py"),
        "environment": {"count": f"{tmp_path / 'own.py'}::Counter"},
    }
    small = {"iters": 1, "group_size": 2, "max_completion_length": 8, "max_seq_length": 2048, "steps_per_report": 1}
    rewards = {"reward_functions": [f"{tmp_path / 'own.py'}::seen"]}
    folder = export_trl(parse(where | tools | small | rewards), "tools", tmp_path / "out").path
    run = subprocess.run([PYTHON, "train.py"], cwd=folder, env=without_ours(), capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    (state,) = (folder / "output").rglob("trainer_state.json")
    logged = json.loads(state.read_text())["log_history"][0]
    assert (logged["rewards/seen/mean"], logged["rewards/Counter/mean"], logged["tools/call_frequency"]) == (
        2.0,
        5.0,
        0.0,
    )
