"""A proof with torch: transformers and peft load what was exported, and compute the logits of the trained model.

tests/trainer/test_import_transformers.py goes the other way.
"""

from pathlib import Path

import pytest

from backend.export.export_run import Export, export_run
from backend.runs.run_folder import RunFolder
from tests.support.random_models import tiny_tokenizer
from tests.support.random_runs import furthest, write_run
from tests.support.torch_process import Torch, torch_process

pytestmark = pytest.mark.proof

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "smollm3"]
torch = pytest.fixture(scope="module")(torch_process)

TOLERANCE = {"gemma3_text": 1e-3}
"""1e-4 for the others. Before any training, mlx-lm and transformers differ by 4e-4 on a gemma3_text of ours."""
EXPERTS = ["mixtral", "qwen3_moe"]


def exported(run: Path, format_: str) -> Path:
    return export_run(RunFolder(run), Export("folder", format_, run.parent / "out", format_)).path


@pytest.mark.parametrize("train_type", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_peft_have_trained_logits(tmp_path: Path, torch: Torch, family: str, train_type: str) -> None:
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
