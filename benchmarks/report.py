"""Tables from results, one function per section of docs/performance.md. Runs nothing."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from backend.bench.report import TextTable, number
from benchmarks.peer_contenders import DIFFERS
from benchmarks.side_by_side import Result
from benchmarks.workloads import BEST, MATCHES, PEERS, SWEEPS, Bar, Match

MEASURES = {
    "step_s": "step",
    "token_s": "a token of a step",
    "rollout_s": "sampling",
    "train_s": "learning",
    "decode_s": "a decoding step",
    "peak": "peak memory",
    "peak_train": "peak memory in learning",
}
NUMBERS = (
    "tokens",
    "sampling, tok/s",
    "sampling, s",
    "learning, s",
    "step, s",
    "step, wall s",
    "MB sampling",
    "MB learning",
)


def numbers(result: Result) -> list[str]:
    """The cells under NUMBERS. Seconds are CPU seconds unless the column says wall."""
    medians = result.medians
    speed = medians["tokens"] / medians["rollout_s"] if "rollout_s" in medians else None
    names = ("rollout_s", "train_s", "step_s", "step_wall", "peak_rollout", "peak_train")
    return [number(medians["tokens"]), number(speed), *(number(medians.get(name)) for name in names)]


def bars(results: Sequence[Result]) -> TextTable:
    """Every bar with ours, theirs, the ratio and the verdict. A match that was not run has no row."""
    medians = {(result.case.name, result.contender): result.medians for result in results}
    rows = []
    for match in MATCHES:
        of = {name: medians[match.case.name, name] for name in match.contenders if (match.case.name, name) in medians}
        rows += [_bar(match, bar, of) for bar in match.bars if len(of) == len(match.contenders)]
    return TextTable("Bars", ("case", "against", "what", "ours", "theirs", "share", "at most", ""), rows, words=3)


def _bar(match: Match, bar: Bar, medians: dict[str, dict[str, float]]) -> list[str]:
    against = min(PEERS, key=lambda peer: medians[peer][bar.measure]) if bar.against == BEST else bar.against
    ours, theirs = medians["ours"][bar.measure], medians[against][bar.measure]
    unit = " MB" if bar.measure.startswith("peak") else " s"
    limit = number(bar.at_most) + ("*" if bar.stretch else "")
    verdict = "met" if ours / theirs <= bar.at_most else "missed"
    values = (number(ours) + unit, number(theirs) + unit, number(ours / theirs), limit, verdict)
    return [match.case.name, against, MEASURES[bar.measure], *values]


def against(results: Sequence[Result]) -> list[TextTable]:
    """The bars, and the cases of whole steps with all trainers."""
    return [bars(results), *(_side_by_side(results, title, value) for title, value in SIDE_BY_SIDE.items())]


SIDE_BY_SIDE: dict[str, Callable[[dict[str, float]], float | None]] = {
    "A step, CPU ms per completion token": lambda medians: 1000 * medians["token_s"],
    "Peak memory in learning, MB": lambda medians: medians.get("peak_train"),
}
"""Title of a table → its number of a trainer's medians. Per token, as natural ends make lengths differ."""


def _side_by_side(results: Sequence[Result], title: str, value: Callable[..., float | None]) -> TextTable:
    """Cases of whole steps down, trainers across."""
    of_case: dict[str, dict[str, str]] = {}
    for result in results:
        if result.case.work == "step":
            of_case.setdefault(result.case.name, {})[result.contender] = number(value(result.medians))
    who = ("ours", *PEERS)
    rows = [[case, *(found.get(name, "–") for name in who)] for case, found in of_case.items()]
    return TextTable(title, ("case", *who), rows)


def ours(results: Sequence[Result]) -> list[TextTable]:
    return [TextTable("Ours", ("case", *NUMBERS), [[result.case.name, *numbers(result)] for result in results])]


def samples(results: Sequence[Result]) -> list[TextTable]:
    rows = [
        [
            str(result.case.rows),
            number(1000 * result.medians["rollout_s"] / result.case.rows),
            number(1000 * result.medians["rollout_wall"] / result.case.rows),
            number(result.medians["tokens"] / result.medians["rollout_s"]),
            number(result.medians["peak_rollout"]),
        ]
        for result in results
    ]
    columns = ("rows together", "a sample, ms", "a sample, wall ms", "tok/s", "MB")
    return [TextTable("The cost of a sample", columns, rows)]


def ablation(results: Sequence[Result]) -> list[TextTable]:
    """Each technique off by itself, relative to everything on: two columns for each case."""
    columns, rows, titles = ["switched off"], dict[str, list[str]](), list[str]()
    for case, group in groupby(results, lambda result: result.case.name):
        all_on, *without = list(group)
        titles.append(f"{chr(65 + len(titles))}: {case}, {number(all_on.medians['step_s'])} s with everything on")
        columns += [f"{titles[-1][0]}: step ×", "MB learning ×"]
        for result in without:
            technique = result.contender.removeprefix("ours, without ")
            rows.setdefault(technique, [technique]).extend(
                number(result.medians[key] / all_on.medians[key]) for key in ("step_s", "peak_train")
            )
    return [TextTable("; ".join(titles), columns, list(rows.values()))]


def sweep(results: Sequence[Result]) -> list[TextTable]:
    """One table per axis."""
    axis_of = {case.name: axis for axis, cases in SWEEPS.items() for case in cases}
    tables = []
    for axis, group in groupby(results, lambda result: axis_of[result.case.name]):
        rows = [[result.case.name, result.contender, *numbers(result)] for result in group]
        tables.append(TextTable(axis.capitalize(), ("case", "who", *NUMBERS), rows, words=2))
    return tables


def start(rows: Sequence[dict[str, Any]]) -> list[TextTable]:
    cells = [[row["until"], number(row["wall"]), number(row["cpu"])] for row in rows]
    return [TextTable("From nothing", ("until", "wall s", "CPU s"), cells)]


def differs() -> str:
    """The differences of the peers' computations, as a list in Markdown."""
    return "\n".join(f"- **{name}**: {text}" for name, text in DIFFERS.items()) + "\n"


def _results(table: Callable[[list[Result]], list[TextTable]]) -> Callable[[list[dict[str, Any]]], list[TextTable]]:
    return lambda raw: table([Result.of(result) for result in raw])


SECTIONS: dict[str, Callable[[list[dict[str, Any]]], list[TextTable]]] = {
    "ours": _results(ours),
    "against": _results(against),
    "samples": _results(samples),
    "ablation": _results(ablation),
    "sweep": _results(sweep),
    "start": start,
}
"""Section → its tables from the measurements in their JSON form."""

DOCUMENTED = ("against", "ablation", "start")  # the sections of docs/performance.md
