"""A proof with torch: transformers and peft load what was exported, and compute the logits of the trained model.

torch is no part of this project, so an environment of its own is made for it (a gigabyte; TORCH_PYTHON names a ready one).
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.run.export.export_run import Export, export_run
from backend.spec.places import RunFolder
from tests.support.random_models import tiny_tokenizer
from tests.support.random_runs import furthest, write_run

REFERENCE = Path(__file__).parents[1] / "support" / "torch_reference.py"

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "smollm3"]
TOLERANCE = {"gemma3_text": 1e-3}
"""1e-4 for the others. Before any training, mlx-lm and transformers differ by 4e-4 on a gemma3_text of ours."""
EXPERTS = ["mixtral", "qwen3_moe"]


class Torch:
    """A process with torch, transformers and peft, started once: importing them takes seconds."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(REFERENCE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def make(self, family: str, folder: Path, shard: str = "5GB") -> None:
        self._call("make", family, str(folder), shard)

    def logits(self, folder: Path, *adapter: Path) -> mx.array:
        return mx.array(self._call("logits", str(folder), *map(str, adapter)))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _call(self, *call: str) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torch]:
    python = os.environ.get("TORCH_PYTHON") or _with_torch(tmp_path_factory.mktemp("torch"))
    process = Torch(python)
    yield process
    process.end()


def _with_torch(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    packages = ["torch", "transformers>=5", "peft"]
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"torch cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    return python


def exported(run: Path, format_: str) -> Path:
    return export_run(RunFolder(run), Export("folder", format_, run.parent / "out", format_)).path


@pytest.mark.parametrize("train_type", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_peft_compute_the_trained_logits(
    tmp_path: Path, torch: Torch, family: str, train_type: str
) -> None:
    base = tiny_tokenizer(tmp_path / "base")
    torch.make(family, base, "40KB")  # several files and an index
    assert len(list(base.glob("*.safetensors"))) > 1
    trained, tolerance = write_run(tmp_path / "run", base, train_type, scale=1.0), TOLERANCE.get(family, 1e-4)
    assert furthest(torch.logits(base), trained) > 0.01
    assert furthest(torch.logits(base, exported(tmp_path / "run", "peft")), trained) < tolerance
    assert furthest(torch.logits(exported(tmp_path / "run", "original")), trained) < tolerance


@pytest.mark.parametrize("family", EXPERTS)
def test_transformers_computes_the_trained_logits_of_experts(tmp_path: Path, torch: Torch, family: str) -> None:
    base = tiny_tokenizer(tmp_path / "base")
    torch.make(family, base)
    trained = write_run(tmp_path / "run", base, scale=1.0)
    assert furthest(torch.logits(exported(tmp_path / "run", "original")), trained) < 1e-4
    attention = write_run(tmp_path / "attention", base, lora_keys=["self_attn.q_proj", "self_attn.o_proj"])
    assert furthest(torch.logits(base, exported(tmp_path / "attention", "peft")), attention) < 1e-4


def test_full_fine_tuning_is_written_under_the_original_names(tmp_path: Path, torch: Torch) -> None:
    base = tiny_tokenizer(tmp_path / "base")
    torch.make("qwen3_moe", base)
    trained = write_run(tmp_path / "run", base, "full")
    assert furthest(torch.logits(exported(tmp_path / "run", "original")), trained) < 1e-4
