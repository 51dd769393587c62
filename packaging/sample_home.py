"""A home folder with sample models and datasets for screenshots of the pickers.

Names, configs and sizes are those of real repositories; weights are sparse files, so the folder takes no space.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DAY_S = 86_400
MODELS = (
    # id, kind, bits (0 for bf16), size in MB, days ago
    ("mlx-community/Qwen3-0.6B-4bit", "qwen3", 4, 351, 0.1),
    ("mlx-community/Qwen3-4B-Instruct-2507-4bit", "qwen3", 4, 2280, 2),
    ("mlx-community/gemma-3-1b-it-bf16", "gemma3_text", 0, 2010, 5),
    ("mlx-community/Llama-3.2-3B-Instruct-8bit", "llama", 8, 3420, 12),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 0, 269, 40),
)
DATASETS = (
    # id, files, size in MB of each, days ago
    ("openai/gsm8k", ("train-00000.parquet", "test-00000.parquet"), 2.3, 0.2),
    ("HuggingFaceH4/MATH-500", ("test.jsonl",), 0.45, 3),
    ("open-r1/DAPO-Math-17k-Processed", ("train-00000.parquet",), 4.9, 9),
    ("Jiayi-Pan/Countdown-Tasks-3to4", ("train-00000.parquet",), 5.2, 30),
)
FAVOURITE = {"model": MODELS[1][0], "dataset": DATASETS[0][0]}
RECENT = {"model": MODELS[0][0], "dataset": DATASETS[2][0]}


def fill(home: Path) -> None:
    """Fill the Hugging Face cache and LM Studio's models folder of `home` with the samples."""
    hub = home / ".cache" / "huggingface" / "hub"
    for id_, kind, bits, size, days in MODELS:
        _model(_snapshot(hub, "models", id_), kind, bits, size, days)
    for id_, names, size, days in DATASETS:
        folder = _snapshot(hub, "datasets", id_)
        for name in names:
            _file(folder / name, size, days)
    _model(home / ".lmstudio" / "models" / "lmstudio-community" / "Phi-4-mini-MLX-4bit", "phi3", 4, 2160, 20)
    gguf = home / ".lmstudio" / "models" / "lmstudio-community" / "Qwen3-8B-GGUF"
    gguf.mkdir(parents=True)
    _file(gguf / "Qwen3-8B-Q4_K_M.gguf", 5030, 33)
    begun = hub / "models--mlx-community--Qwen3-14B-4bit" / "blobs"
    begun.mkdir(parents=True)
    _file(begun / "weights.incomplete", 3170, 1)


def _snapshot(hub: Path, sort: str, id_: str) -> Path:
    repo = hub / f"{sort}--{id_.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return repo / "snapshots" / COMMIT


def _model(folder: Path, kind: str, bits: int, size: float, days: float) -> None:
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"model_type": kind, "torch_dtype": "bfloat16"}
    if bits:
        config["quantization"] = {"bits": bits, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    for name, millions in (("model.safetensors", size), ("tokenizer.json", 11)):
        _file(folder / name, millions, days)
    for file in folder.iterdir():
        os.utime(file, (time.time() - days * DAY_S,) * 2)


def _file(path: Path, millions: float, days: float) -> None:
    """A sparse file of `millions` MB, `days` old: it occupies no blocks on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(int(millions * 1e6))
    os.utime(path, (time.time() - days * DAY_S,) * 2)
