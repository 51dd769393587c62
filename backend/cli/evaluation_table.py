"""An evaluation as a table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from backend.cli.consoles import new_console
from backend.spec.evaluation import Decoding, Evaluation, Figures, MeanWithInterval, SideName

TITLES: dict[SideName, str] = {"base": "base", "tuned": "tuned", "model": "model"}


def print_evaluation(evaluation: Evaluation, console: Console | None = None) -> None:
    """The result in a sentence, a table for each decoding, and what passes."""
    console = console or new_console()
    console.print(evaluation.sentence(), highlight=False, markup=False, soft_wrap=True)
    for decoding in evaluation.decodings:
        console.print()
        console.print(_title(decoding), highlight=False, markup=False)
        console.print(_table(decoding, evaluation.confidence))
        if decoding.difference is not None:
            counts = f"{decoding.better} prompts better, {decoding.worse} worse, {decoding.unchanged} unchanged"
            console.print(counts, highlight=False)
    console.print()
    notes = [evaluation.pass_rule.sentence()] if evaluation.pass_rule is not None else []
    for sentence in [*notes, *evaluation.notes]:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _title(decoding: Decoding) -> str:
    if decoding.name == "greedy":
        return "Greedy: the likeliest token at every step"
    return f"Sampled: {decoding.completions} completions of each prompt at temperature {decoding.temperature:g}"


def _table(decoding: Decoding, confidence: float) -> Table:
    sides = list(decoding.sides)
    interval = f"{confidence * 100:g} % interval"
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for side in sides:
        table.add_column(TITLES[side], justify="right")
    table.add_column("difference" if decoding.difference is not None else interval, justify="right")
    if decoding.difference is not None:
        table.add_column(interval, justify="right")
    columns = [_figures(decoding.sides[side].figures) for side in sides]
    differences = _figures(decoding.difference) if decoding.difference is not None else None
    for name, mean in columns[0]:
        others = [next(of_side)[1] for of_side in columns[1:]]
        cells = [number(each.value) for each in (mean, *others)]
        if differences is None:
            cells += [_interval(mean)]
        else:
            difference = next(differences)[1]
            cells += [number(difference.value, signed=True), _interval(difference, signed=True)]
        style = "bold" if name == "reward" else None
        table.add_row(name, *cells, style=style)
    return table


def _figures(figures: Figures) -> Iterator[tuple[str, MeanWithInterval]]:
    yield "reward", figures.reward
    yield from figures.rewards.items()
    yield from ((f"pass@{k}", mean) for k, mean in figures.pass_at.items())
    yield "tokens", figures.tokens
    yield "cut off", figures.cut_off
    if figures.spread is not None and figures.different is not None:
        yield "spread of a prompt", figures.spread
        yield "different texts", figures.different


def _interval(mean: MeanWithInterval, *, signed: bool = False) -> str:
    if mean.low is None or mean.high is None:
        return "–"
    return f"{number(mean.low, signed=signed)} … {number(mean.high, signed=signed)}"


def number(value: float | None, *, signed: bool = False) -> str:
    """Three significant digits, small rounding noise as 0."""
    if value is None:
        return "–"
    if abs(value) < 5e-7:
        return "0"
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return (f"+{text}" if signed and value > 0 else text).replace("-", "−")
