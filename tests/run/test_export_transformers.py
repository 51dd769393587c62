"""A proof with torch: transformers and peft load what was exported, and compute the logits of the trained model.

torch is no part of this project, so an environment of its own is made for it (a gigabyte; TORCH_PYTHON names a ready one).
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import mlx.core as mx
import pytest

from backend.run.export.export_run import Export, export_run
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from tests.support.random_models import tiny_tokenizer
from tests.support.random_runs import furthest, write_run

REFERENCE = Path(__file__).parents[1] / "support" / "torch_reference.py"

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "smollm3"]
"""Without the first gemma, whose GELU mlx-lm computes exactly and transformers by tanh: 3e-4 in the logits."""
EXPERTS = ["mixtral", "qwen3_moe"]


@pytest.fixture(scope="session")
def torch_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with torch, transformers and peft."""
    if ready := os.environ.get("TORCH_PYTHON"):
        return ready
    folder = tmp_path_factory.mktemp("torch")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    packages = ["torch", "transformers>=5", "peft"]
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"torch cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    return python


def run_torch(python: str, *arguments: object) -> str:
    command = [python, str(REFERENCE), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


def torch_logits(python: str, folder: Path, *adapter: Path) -> mx.array:
    return mx.array(json.loads(run_torch(python, "logits", folder, *adapter)))


def exported(run: Path, format_: str) -> Path:
    return export_run(RunFolder(run), Export("folder", format_, run.parent / "out", format_)).path


@pytest.mark.parametrize("train_type", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_peft_compute_the_trained_logits(
    tmp_path: Path, torch_python: str, family: str, train_type: str
) -> None:
    base = tiny_tokenizer(tmp_path / "base")
    run_torch(torch_python, "make", family, base, "40KB")  # several files and an index
    assert len(list(base.glob("*.safetensors"))) > 1
    trained = write_run(tmp_path / "run", base, train_type, scale=1.0)
    assert furthest(torch_logits(torch_python, base), trained) > 0.01
    assert furthest(torch_logits(torch_python, base, exported(tmp_path / "run", "peft")), trained) < 1e-4
    assert furthest(torch_logits(torch_python, exported(tmp_path / "run", "original")), trained) < 1e-4


@pytest.mark.parametrize("family", EXPERTS)
def test_transformers_computes_the_trained_logits_of_experts(tmp_path: Path, torch_python: str, family: str) -> None:
    base = tiny_tokenizer(tmp_path / "base")
    run_torch(torch_python, "make", family, base)
    trained = write_run(tmp_path / "run", base, scale=1.0)
    assert furthest(torch_logits(torch_python, exported(tmp_path / "run", "original")), trained) < 1e-4
    attention = write_run(tmp_path / "attention", base, lora_keys=["self_attn.q_proj", "self_attn.o_proj"])
    assert furthest(torch_logits(torch_python, base, exported(tmp_path / "attention", "peft")), attention) < 1e-4


def test_full_fine_tuning_is_written_under_the_original_names(tmp_path: Path, torch_python: str) -> None:
    base = tiny_tokenizer(tmp_path / "base")
    run_torch(torch_python, "make", "qwen3_moe", base)
    trained = write_run(tmp_path / "run", base, "full")
    assert furthest(torch_logits(torch_python, exported(tmp_path / "run", "original")), trained) < 1e-4


def test_weights_that_mlx_lm_turns_are_refused(tmp_path: Path, torch_python: str) -> None:
    """GPT-2's are stored [in, out]."""
    base = tiny_tokenizer(tmp_path / "base")
    run_torch(torch_python, "make", "gpt2", base)
    write_run(tmp_path / "run", base)
    for format_ in ("peft", "original"):
        with pytest.raises(Mistake, match="could not be found out"):
            exported(tmp_path / "run", format_)
