"""The tables of docs/scale.md, in Markdown: measured sums beside the model's, and what a step sends and loses by model, link and machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.bench.network.fit import SMALLEST, FittedSums, Point, errors, fitted, is_for_fitting, off, split, told
from backend.spec.config import Config, load, parse
from backend.spec.distributed.network_cost import ETHERNET_SHARE, NetworkLink, StepTraffic, network_cost, step_traffic
from backend.spec.memory.model_shape import ModelShape, shape_from, shape_of
from backend.spec.places import demo_config, demo_folder

ROOT = Path(__file__).resolve().parents[3]
FIGURES, PAGE = ROOT / "docs" / "scale.json", ROOT / "docs" / "scale.md"
MACHINES = (2, 4, 8)

QWEN = {
    "model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    "max_position_embeddings": 40_960,
}  # fmt: skip
MODELS = {
    "Qwen3-0.6B": QWEN | {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
    "Qwen3-4B": QWEN | {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32, "tie_word_embeddings": True},
    "Qwen3-8B": QWEN | {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288, "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip
"""The sizes in their config.json."""


@dataclass(frozen=True, slots=True)
class NamedLink:
    """A kind of connection with the numbers that are taken for it."""

    name: str
    link: NetworkLink


LINKS = (
    NamedLink("1 GbE", NetworkLink(300e-6, ETHERNET_SHARE * 125e6)),
    NamedLink("10 GbE", NetworkLink(300e-6, ETHERNET_SHARE * 1250e6)),
    NamedLink("Thunderbolt 5, JACCL", NetworkLink(10e-6, 3.5e9)),
    NamedLink("InfiniBand NDR, NCCL", NetworkLink(5e-6, 44e9)),
)
COMPLETION = 400
"""Mean tokens of a completion in the tables."""
SETTINGS = {
    "model": "any",
    "data": "any.jsonl",
    "batch_size": 16,
    "group_size": 8,
    "num_layers": -1,
    "rank": 8,
    "max_completion_length": 1024,
}
STEP_S = (10.0, 30.0, 100.0)
"""Seconds of a step on one machine."""


def traffic(model: str, train_type: str, ranks: int) -> StepTraffic:
    config: Config = parse(SETTINGS | {"train_type": train_type})
    shape: ModelShape | None = shape_from(MODELS[model])
    assert shape is not None
    return step_traffic(config, shape, ranks, COMPLETION)


# ── computed ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def computed() -> str:
    """What a step sends, and loses on each link."""
    rows: list[list[str]] = []
    for model, train_type in ((model, kind) for model in MODELS for kind in ("lora", "full")):
        of_ranks = {ranks: traffic(model, train_type, ranks) for ranks in MACHINES}
        gradient = of_ranks[2].gradient
        row = [model, {"lora": "LoRA, rank 8", "full": "full"}[train_type], _bytes(gradient)]
        for named in LINKS:
            row.append(" · ".join(_seconds(network_cost(of_ranks[ranks], named.link).total_s) for ranks in MACHINES))
        rows.append(row)
    head = ["model", "trained", "gradient", *(f"{named.name}: 2 · 4 · 8" for named in LINKS)]
    return _table(head, rows)


def speed_ups() -> str:
    """How many times as many steps N machines make, for a step of so many seconds on one, with nothing but the network in the way."""
    rows: list[list[str]] = []
    for model, train_type in (
        ("Qwen3-0.6B", "lora"),
        ("Qwen3-8B", "lora"),
        ("Qwen3-0.6B", "full"),
        ("Qwen3-8B", "full"),
    ):
        for named in LINKS:
            row = [f"{model}, {'LoRA' if train_type == 'lora' else 'full'}", named.name]
            for step in STEP_S:
                lost = {
                    ranks: network_cost(traffic(model, train_type, ranks), named.link).total_s for ranks in MACHINES
                }
                row.append(" · ".join(f"{step / (step / ranks + lost[ranks]):.2g}" for ranks in MACHINES))
            rows.append(row)
    return _table(["model", "link", *(f"{step:g} s: 2 · 4 · 8" for step in STEP_S)], rows)


# ── measured ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_figures() -> dict[str, Any]:
    """docs/scale.json: "about" the machine, "points" and "waiting"."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def write_figures(changed: dict[str, Any]) -> None:
    """Put new figures in the place of those of the same kind, one a line."""
    figures = (read_figures() if FIGURES.exists() else {}) | changed
    parts = [
        f'"{name}": {json.dumps(of)}'
        if isinstance(of, dict)
        else f'"{name}": [\n' + ",\n".join(map(json.dumps, of)) + "\n]"
        for name, of in figures.items()
    ]
    FIGURES.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def models(points: Sequence[Point]) -> dict[str, FittedSums]:
    """A model of each backend."""
    names = sorted({point["backend"] for point in points}, reverse=True)
    return {name: fitted(split([point for point in points if point["backend"] == name])[0]) for name in names}


def fits(points: Sequence[Point]) -> str:
    """The unknowns of each backend, and how far the model is off on points that it was fitted to and on others."""
    rows: list[list[str]] = []
    for name, model in models(points).items():
        used, others = split([point for point in points if point["backend"] == name])
        slow = [point for point in others if point["bits_per_second"] <= 1e8]
        rows.append([
            name, f"{model.message_s * 1e6:.0f} µs", f"{model.work_s * 1e9:.1f} ns",
            *(f"{told(found)} ({len(found)})" for found in (errors(model, of) for of in (used, others, slow))),
        ])  # fmt: skip
    head = [
        "backend",
        "a message",
        "work a byte",
        "off where fitted (points)",
        "off elsewhere",
        "of these up to 100 Mb/s",
    ]
    return _table(head, rows)


def measured(points: Sequence[Point]) -> str:
    """Every point."""
    of = models(points)
    rows: list[list[str]] = []
    for point in points:
        model = of[point["backend"]]
        rows.append([
            point["backend"], str(point["ranks"]), _rate(point["bits_per_second"]),
            f"{1000 * point['latency_s']:g} ms" if point["latency_s"] else "–", _bytes(point["bytes"]),
            f"{point['sent'] / point['bytes']:.2f}" if point["bytes"] >= SMALLEST else "–", _seconds(point["seconds"]), _seconds(point["low"]),
            _seconds(model.seconds(point)), f"{off(model, point):+.0%}", f"{point['load']:.0f}", "fitted" if is_for_fitting(point) else "",
        ])  # fmt: skip
    head = [
        "backend",
        "ranks",
        "link",
        "added latency",
        "vector",
        "sent / vector",
        "median",
        "quartile",
        "model",
        "off",
        "load",
        "",
    ]
    return _table(head, rows)


def steps(rows: Sequence[dict[str, Any]], points: Sequence[Point]) -> str:
    """What the diary of the demo says of a step on two machines, beside the model of the ring."""
    ring = models(points)["ring"]
    config = load(demo_config())
    shape = shape_of(demo_folder("model"))
    assert shape is not None
    of = step_traffic(config, shape, 2)
    cells: list[list[str]] = []
    for row in rows:
        point = {"ranks": 2, "latency_s": 0.0, "bytes": of.gradient, "bits_per_second": row["bits_per_second"]}
        computed_s = of.updates * ring.seconds(point)
        cells.append([
            _rate(row["bits_per_second"]), _seconds(row["time/gradient_sum"]), _seconds(row["least/gradient_sum"]), _seconds(computed_s),
            f"{computed_s / row['least/gradient_sum'] - 1:+.0%}", _seconds(row["time/step"]), f"{row['waiting_share']:.0%}",
        ])  # fmt: skip
    head = ["link", "sums, median", "least", "model", "off", "whole step", "waiting share"]
    return _table(head, cells)


def waiting(rows: Sequence[dict[str, Any]]) -> str:
    """The shares of `backend.bench.network.waiting.simulated`, a row for each kind of machines and a column for each step."""
    columns = list(dict.fromkeys((row["prompts"], row["sigma"]) for row in rows))
    shares = {
        (row["machines"], row["prompts"], row["sigma"]): f"{row['handed_out']:.0%} / {row['equal']:.0%}" for row in rows
    }
    head = ["machines", *(f"{prompts} prompts, σ = {sigma:g}" for prompts, sigma in columns)]
    return _table(
        head,
        [
            [name, *(shares[name, *column] for column in columns)]
            for name in dict.fromkeys(row["machines"] for row in rows)
        ],
    )


def tables() -> dict[str, str]:
    """Every table of the page by the name of its marks."""
    figures = read_figures()
    points: list[Point] = figures["points"]
    return {
        "computed": computed(), "speed-ups": speed_ups(), "fits": fits(points), "measured": measured(points),
        "steps": steps(figures["steps"], points), "waiting": waiting(figures["waiting"]),
    }  # fmt: skip


def with_tables(page: str) -> str:
    """The page with its tables anew, each between <!-- NAME --> and <!-- end of NAME -->."""
    for name, table in tables().items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        assert mark and end, f"docs/scale.md has no place for {name}"
        page = f"{before}{mark}\n{table}\n{end}{after}"
    return page


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _seconds(value: float) -> str:
    if value >= 9.5:
        return f"{value:,.0f} s"
    return f"{value:.2g} s" if value >= 0.0995 else f"{1000 * value:.2g} ms"


def _bytes(size: int) -> str:
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    name, scale = next(((name, scale) for name, scale in units if size >= 0.9995 * scale), ("B", 1.0))
    return f"{size / scale:.3g} {name}"


def _rate(bits: float) -> str:
    return f"{bits / 1e9:g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:g} Mb/s"
