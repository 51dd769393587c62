"""Samples for screenshots: a home folder for the pickers, two Macs, and short runs of the bundled demo.

Names, configs and sizes of models and datasets are those of real repositories; weights are sparse files, so the folder
takes no space. No machine is contacted. Runs differ in what they are told, and each is trained by the command line, so
what a page shows of it is what a user would see; only its notes are made up.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from backend.config import config
from backend.distributed.hosts_file import Host, HostsFile, write_hosts
from backend.distributed.machine_check import CheckedMachine, MachineFacts, MachineReport, findings_of
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import change_notes
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config

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
    about: dict[str, Any] = {"model_type": kind, "torch_dtype": "bfloat16"}
    if bits:
        about["quantization"] = {"bits": bits, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(about))
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


HERE, THERE = "127.0.0.1", "studio.local"
MODEL = "mlx-community/Qwen3-0.6B-4bit"


def hosts_file() -> str:
    """The path of a hosts file in the home folder of the pictures. Raises DiskError."""
    write_hosts(Path.home() / "two-macs.json", HostsFile((Host(HERE, ("10.0.0.1",)), Host(THERE, ("10.0.0.2",)))))
    return "~/two-macs.json"


def machine_report() -> MachineReport:
    """Two unlike Macs on a Thunderbolt cable, of which the second has no copy of the model."""
    first = _facts("anna-mbp.local", "Apple M4 Max", 68.7e9, 44.1e9, "d")
    second = _facts("studio.local", "Apple M2 Ultra", 137.4e9, 118e9, "")
    machines = [
        CheckedMachine(0, HERE, "this machine", is_here=True, facts=first),
        CheckedMachine(1, THERE, THERE, facts=second),
    ]
    found = MachineReport("ring", machines)
    found.findings = findings_of(found, MODEL)
    return found


def _facts(name: str, chip: str, memory: float, free: float, model: str) -> MachineFacts:
    return MachineFacts(
        machine=name,
        system="macOS 26.2",
        chip=chip,
        device="gpu",
        memory=int(memory),
        memory_free=int(free),
        memory_usable=int(0.7 * memory),
        disk_free=512 * 10**9,
        python="3.12.4",
        grpo_studio="0.1.0",
        mlx="0.32.4",
        mlx_lm="0.32.2",
        model=model,
        model_bytes=335_000_000 if model else 0,
    )


STEPS = 16  # of each run beside the first: enough for a curve that is its own
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name → settings that differ from the demo's, and notes
    "demo-slow": (
        {"learning_rate": 1e-5, "seed": 3},
        {"title": "Tenth of the learning rate", "tags": ("lr",), "note": "Learns, but needs four times the steps."},
    ),
    "demo-hot": (
        {"temperature": 1.3, "beta": 0.0, "seed": 5},
        {"title": "Warmer, without KL", "tags": ("sampling", "no-kl"), "favourite": True},
    ),
    "demo-small-groups": ({"group_size": 4, "seed": 7}, {"title": "Groups of four", "tags": ("groups",)}),
}
SWEEP = {
    "name": "learning-rate",
    "over": {"learning_rate": [2e-5, 1e-4]},
    "seeds": [0, 1],
    "halving": {"first_rung": 4, "keep": 0.5},
}
SWEEP_STEPS = 8


def train_demo(folder: Path, name: str, **settings: Any) -> Path:
    """A finished run of the bundled demo in the runs folder `folder`. Raises CalledProcessError when training fails."""
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    _run("train", str(demo_config()), "--runs-dir", str(folder), "--name", name, *changes)
    return folder / name


def train_variants(folder: Path) -> None:
    """Train VARIANTS in `folder` and note what VARIANTS says. Raises CalledProcessError."""
    for name, (settings, notes) in VARIANTS.items():
        change_notes(RunFolder(train_demo(folder, name, iters=STEPS, steps_per_eval=4, **settings)), **notes)


def train_sweep(folder: Path) -> None:
    """Train SWEEP over the demo in `folder`. Raises CalledProcessError."""
    base = config.read(demo_config()) | {"iters": SWEEP_STEPS, "steps_per_eval": 4}
    file = folder.parent / "sweep.yaml"
    file.write_text(yaml.safe_dump(SWEEP | {"base": base}), encoding="utf-8")
    _run("sweep", str(file), "--runs-dir", str(folder))


def _run(*arguments: str) -> None:
    subprocess.run(backend_command(*arguments), check=True, env=backend_environment(), stdout=sys.stderr)
