"""Stand-ins for public repositories of the Hugging Face Hub, with rows of our own."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.support.hub_server import Repo

GSM8K, DEEPMATH, QWEN2 = "openai/gsm8k", "trl-lib/DeepMath-103K", "Qwen/Qwen2.5-1.5B-Instruct"
TRAINING, TESTING = 300, 30  # rows of the splits


def gsm8k() -> Repo:
    """Two configurations with the same rows; the answer is behind ####, and may have a comma or be negative."""
    card = _card("main", "socratic")
    files = {"README.md": card, ".gitattributes": b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"}
    for config in ("main", "socratic"):
        files[f"{config}/train-00000-of-00001.parquet"] = _parquet([_word_problem(n, config) for n in range(TRAINING)])
        files[f"{config}/test-00000-of-00001.parquet"] = _parquet([_word_problem(-n, config) for n in range(TESTING)])
    return Repo(files, {"tags": ["size_categories:1K<n<10K"], "mainSize": 2_725_633})


def deepmath() -> Repo:
    """`prompt` is a list of messages, `solution` LaTeX between dollars, or True, False, Yes or No."""
    files = {"README.md": _card("default", folders={"default": "data"})}
    files["data/train-00000-of-00001.parquet"] = _parquet([_hard_problem(n) for n in range(TRAINING)])
    files["data/test-00000-of-00001.parquet"] = _parquet(
        [_hard_problem(n) for n in range(TRAINING, TRAINING + TESTING)]
    )
    return Repo(files, {"tags": ["size_categories:100K<n<1M"]})


def model_repo(folder: Path) -> Repo:
    """The files of a model's folder as a repository."""
    tags = {"tags": ["safetensors", "text-generation"], "config": {"model_type": "qwen2"}}
    return Repo({path.name: path.read_bytes() for path in sorted(folder.iterdir())}, tags)


def _word_problem(n: int, config: str) -> dict[str, Any]:
    asked = "How many are left? ** " if config == "socratic" else ""
    question = f"A baker has {n} trays of {n + 7} buns, and sells some on day {n % 11}. How many are left?"
    return {"question": question, "answer": f"{asked}{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}.\n#### {_number(n)}"}


def _hard_problem(n: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"Evaluate the limit number {n} of the series."}]
    return {"prompt": prompt, "solution": _solution(n)}


def _number(n: int) -> str:
    return f"{1000 * n:,}" if n % 3 else str(-n)


def _solution(n: int) -> str:
    return rf"$\dfrac{{{n}}}{{{n + 1}}}$" if n % 4 else "Yes"


def _parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def _card(*configs: str, folders: dict[str, str] | None = None) -> bytes:
    lines = ["---", "configs:"]
    for config in configs:
        folder = (folders or {}).get(config, config)
        lines += [f"- config_name: {config}", "  data_files:"]
        lines += [f"  - split: {split}\n    path: {folder}/{split}-*" for split in ("train", "test")]
    return "\n".join([*lines, "---", "# Rows of a test", ""]).encode()
