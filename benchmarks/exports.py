"""`python -m benchmarks exports`: what every format keeps and costs, on the demo trained with LoRA, DoRA and fully, and
the memory that exporting a model of a gigabyte takes. Writes the tables of docs/exports.md.

Every export is a process of its own, `python -m backend export`, so seconds include its start, and both
they (of processor time) and the peak of memory are the system's count.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.bench.report import TextTable
from backend.export.exports import FORMATS
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config, project_root
from benchmarks import random_model

HELD_OUT = 256  # prompts of the demo's test split: all of them
ADAPTERS = {  # with these the demo learns as much by adapters as it does by full fine-tuning
    "learning_rate": 1e-3,
    "lr_warmup_init": 1e-4,
    "lr_final": 1e-4,
    "num_layers": -1,
    "rank": 16,
    "scale": 2.0,
    "fuse": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": ADAPTERS | {"train_type": "lora"},
    "DoRA": ADAPTERS | {"train_type": "dora"},
    "Full": {},
}
BEGIN, END = "<!-- tables: python -m benchmarks exports -->", "<!-- end of tables -->"


@dataclass(frozen=True, slots=True)
class MeasuredExport:
    """One export: the verb's JSON, its seconds of processor time and its peak memory in bytes."""

    report: dict[str, Any]
    seconds: float
    peak: int


def measure_demo(folder: Path) -> TextTable:
    """Train the demo in three ways in `folder`, and export each in every format: formats down, ways across."""
    columns, rows = ["format", "size"], dict[str, list[str]]()
    for kind, settings in KINDS.items():
        run = _trained(folder, kind, settings)
        for key, row in FORMATS.items():
            # The demo's tokenizer of single characters has no name in llama.cpp, so there is no GGUF file of it.
            if row.kind in ("gguf", "adapter"):
                continue
            report = export(run, folder / "out" / kind, key, "--held-out", str(HELD_OUT)).report
            held_out = report["held_out"]
            error = f" ± {held_out['error']:.2g}" if held_out["error"] else ""
            cells = rows.setdefault(row.label, [row.label, _size(report["bytes"])])
            cells += [f"{report['nats']:.2g}", f"{held_out['difference']:+.3f}{error}"]
            if len(columns) < len(cells):
                columns += [f"{kind}: mean &#124;Δ log p&#124;, nats", f"reward, of {held_out['trained']:.3f}"]
            print(*cells, sep="  ", file=sys.stderr)
    title = f"The demo model, and the {HELD_OUT} prompts of its test split with one completion each"
    return TextTable(title, columns, list(rows.values()))


def measure_large(folder: Path) -> TextTable:
    """Export a random model of a gigabyte in the formats that differ in memory."""
    run, size = _large_run(folder / "large")
    rows: list[list[str]] = []
    for key in ("full", "8bit", "4bit", "mxfp4"):
        found = export(run, folder / "out" / "large", key)
        peak = [f"{found.peak / 1e9:.2f} GB", f"{found.peak / size:.2f}"]
        rows.append([FORMATS[key].label, _size(found.report["bytes"]), f"{found.seconds:.0f}", *peak])
        print(*rows[-1], sep="  ", file=sys.stderr)
    title = f"A random model of Qwen3's shape with {_size(size)} of bfloat16 weights, LoRA on all of its layers"
    return TextTable(title, ["format", "size", "CPU s", "peak memory", "of the model"], rows)


def export(run: Path, out: Path, format_: str, *more: str) -> MeasuredExport:
    """Run the verb. Raises CalledProcessError where it fails."""
    where = ("--to", "folder", "--folder", str(out), "--name", format_)
    arguments = [str(run), *where, "--format", format_, "--overwrite", *more, "--json"]
    command = backend_command("export", *arguments)
    process = subprocess.Popen(command, env=backend_environment(), stdout=subprocess.PIPE, text=True)
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for a process that is gone
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, output)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return MeasuredExport(json.loads(output.splitlines()[-1]), usage.ru_utime + usage.ru_stime, peak)


def write_page(tables: list[TextTable]) -> Path:
    """Put the tables into docs/exports.md, between its markers; → the page."""
    page = project_root() / "docs" / "exports.md"
    text = page.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    page.write_text(
        "\n\n".join([before + BEGIN, *(table.markdown().strip() for table in tables), after]), encoding="utf-8"
    )
    return page


def _trained(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    """The finished run of the demo, trained the first time."""
    run = folder / "runs" / f"demo-{kind.lower()}"
    if not (run / "events.jsonl").exists():
        changes = [
            part
            for key, value in settings.items()
            for part in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
        ]
        where = ("--runs-dir", str(run.parent), "--name", run.name, "--no-progress")
        command = backend_command("train", str(demo_config()), *where, *changes)
        subprocess.run(command, check=True, env=backend_environment(), stdout=sys.stderr)
    return run


def _large_run(folder: Path) -> tuple[Path, int]:
    """A run folder with random adapters on a random model of 1.1 GB, made the first time; and the bytes of the model's
    weights."""
    base, run = folder / "base", folder / "run"
    weights = base / "model.safetensors"
    if (run / "adapters" / "adapter_config.json").exists():
        return run, weights.stat().st_size
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models import qwen3
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from backend.config.config import dump, parse
    from backend.export.writer import write_safetensors, write_weights

    for folder in (base, run / "adapters"):
        folder.mkdir(parents=True)
    config = random_model.qwen3_config(
        1024, 26, 151936, heads=16, kv_heads=8, head_dim=128, rope_theta=1e6, torch_dtype="bfloat16"
    )
    lora = {"rank": 16, "scale": 2.0, "dropout": 0.0}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random_model.write_tokenizer(base, config["vocab_size"])
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model.update(
        tree_map(lambda x: (0.02 * mx.random.normal(x.shape)).astype(x.dtype) if x.ndim > 1 else x, model.parameters())
    )
    write_weights(model, base, lambda done: None)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.freeze()
    linear_to_lora_layers(model, config["num_hidden_layers"], dict(lora))
    adapters = {name: 0.02 * mx.random.normal(x.shape) for name, x in tree_flatten(model.trainable_parameters())}
    write_safetensors(run / "adapters" / "adapters.safetensors", adapters)
    about = {"fine_tune_type": "lora", "num_layers": config["num_hidden_layers"], "lora_parameters": lora}
    (run / "config.yaml").write_text(dump(parse({"model": str(base), "data": "none"})), encoding="utf-8")
    (run / "adapters" / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return run, weights.stat().st_size


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
