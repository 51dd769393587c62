"""Device files as sentences and tables: a line for each outcome, the tables of a file, and the Markdown of several. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backend.bench.schema import (
    DeviceFile,
    GapNumbers,
    LaunchNumbers,
    LearningNumbers,
    Numbers,
    Outcome,
    PrefillNumbers,
    SamplingNumbers,
    SwitchNumbers,
)
from backend.bench.switches import SWITCHES
from backend.bench.tables import TextTable, number

Measured = list[tuple[Outcome, Numbers]]


def line(outcome: Outcome) -> str:
    """One outcome in one line."""
    name = f"{outcome.task.model_name}: {outcome.task.title}"
    return f"{name}  {in_words(outcome.numbers) if outcome.numbers else outcome.error}"


def in_words(numbers: Numbers) -> str:
    match numbers:
        case PrefillNumbers():
            return f"{number(numbers.tokens_per_s)} tokens/s"
        case SamplingNumbers():
            return (
                f"{number(numbers.tokens_per_s)} tokens/s, {number(numbers.step_ms)} ms a step, "
                f"{number(numbers.peak_gb)} GB (estimated {number(numbers.estimate_gb)})"
            )
        case LearningNumbers():
            return (
                f"{number(numbers.step_s)} s a step, {number(numbers.tokens_per_s)} tokens/s, "
                f"{number(numbers.peak_gb)} GB (estimated {number(numbers.estimate_gb)})"
            )
        case GapNumbers():
            return f"mean {number(numbers.mean_nats)} nats, p99 {number(numbers.p99_nats)}"
        case LaunchNumbers():
            return ", ".join(f"{count} ({blocks})" for blocks, count in numbers.launches.items())
        case SwitchNumbers():
            gaps = (numbers.on_gap_nats, numbers.off_gap_nats)
            return (
                f"on {number(numbers.on_s)} s, off {number(numbers.off_s)} s: off takes "
                f"{number(numbers.off_s / numbers.on_s)} times as long"
                + ("" if None in gaps else f"; gap on {number(gaps[0])} nats, off {number(gaps[1])}")
            )


# ── tables of a file ─────────────────────────────────────────────────────────────────────────────────────────────────


def tables(file: DeviceFile) -> list[TextTable]:
    """Those that have rows."""
    measured = [(outcome, outcome.numbers) for outcome in file.outcomes if outcome.numbers is not None]
    made = (_sampling(measured), _learning(measured), _memory(measured), _fidelity(measured), _switches(measured))
    return [table for table in (*made, _not_measured(file)) if table.rows]


def _models(measured: Measured) -> list[str]:
    return list(dict.fromkeys(outcome.task.model_name for outcome, _ in measured))


def _by_model(rows: list[list[str]], measured: Measured) -> list[list[str]]:
    """Rows whose first cell is the model, in the order of the models."""
    models = _models(measured)
    return sorted(rows, key=lambda row: models.index(row[0]))


def _sampling(measured: Measured) -> TextTable:
    """Tokens a second by group size, with and without filters, and of prefill."""
    rates = {
        (outcome.task.model_name, outcome.task.filters, outcome.task.group_size): numbers.tokens_per_s
        for outcome, numbers in measured
        if isinstance(numbers, SamplingNumbers)
    }
    prefill = {
        outcome.task.model_name: numbers.tokens_per_s
        for outcome, numbers in measured
        if isinstance(numbers, PrefillNumbers)
    }
    sizes = sorted({size for _, _, size in rates})
    rows = [
        [
            model,
            "default" if filters else "none",
            *(number(rates.get((model, filters, size))) for size in sizes),
            number(prefill.get(model) if filters else None),
        ]
        for model in _models(measured)
        for filters in (True, False)
        if any((model, filters, size) in rates for size in sizes)
    ]
    columns = ("model", "filters", *(f"G {size}" for size in sizes), "prefill")
    return TextTable("Sampling, tokens/s", columns, rows, words=2)


def _learning(measured: Measured) -> TextTable:
    rows = [
        [
            outcome.task.model_name,
            f"{outcome.task.group_size} × {outcome.task.completion}",
            "on" if outcome.task.kl else "off",
            number(numbers.step_s),
            number(numbers.tokens_per_s),
        ]
        for outcome, numbers in measured
        if isinstance(numbers, LearningNumbers)
    ]
    columns = ("model", "completions", "KL", "step, s", "tokens/s")
    return TextTable("Learning", columns, _by_model(rows, measured), words=3)


def _memory(measured: Measured) -> TextTable:
    largest = max((o.task.group_size for o, numbers in measured if isinstance(numbers, SamplingNumbers)), default=0)
    rows = [
        [
            outcome.task.model_name,
            outcome.task.title,
            number(numbers.peak_gb),
            number(numbers.estimate_gb),
            number(numbers.peak_gb / numbers.estimate_gb),
            ", ".join(numbers.reductions) or "–",
        ]
        for outcome, numbers in measured
        if isinstance(numbers, LearningNumbers)
        or (isinstance(numbers, SamplingNumbers) and outcome.task.filters and outcome.task.group_size == largest)
    ]
    columns = ("model", "phase", "peak, GB", "estimate, GB", "peak / estimate", "held down by")
    return TextTable("Memory", columns, _by_model(rows, measured), words=2)


def _fidelity(measured: Measured) -> TextTable:
    """The gap between sampler and learner, and the launches of a decoding step."""
    gaps = {o.task.model_name: numbers for o, numbers in measured if isinstance(numbers, GapNumbers)}
    launches = {o.task.model_name: numbers.launches for o, numbers in measured if isinstance(numbers, LaunchNumbers)}
    rows = [
        [
            model,
            *(number(x) for x in ((gap.mean_nats, gap.p99_nats, gap.max_nats) if gap else (None,) * 3)),
            " / ".join(map(str, launches[model].values())) if model in launches else "–",
        ]
        for model in _models(measured)
        if (gap := gaps.get(model)) or model in launches
    ]
    columns = ("model", "mean gap, nats", "p99", "largest", "launches: own blocks / fused / kernels")
    return TextTable("Sampler against learner, and launches", columns, rows)


def _switches(measured: Measured) -> TextTable:
    rows = [
        [
            outcome.task.switch,
            outcome.task.model_name,
            *(number(x) for x in (numbers.on_s, numbers.off_s, numbers.off_s / numbers.on_s)),
            number(1000 * (numbers.off_peak_gb - numbers.on_peak_gb)),
            *(number(x) for x in (numbers.on_gap_nats, numbers.off_gap_nats)),
            str(numbers.rounds),
        ]
        for outcome, numbers in measured
        if isinstance(numbers, SwitchNumbers)
    ]
    columns = (
        "switch",
        "model",
        "on, s",
        "off, s",
        "off / on",
        "off − on, MB",
        "gap on, nats",
        "gap off, nats",
        "turns",
    )
    return TextTable("Switches", columns, rows, words=2)


def _not_measured(file: DeviceFile) -> TextTable:
    failed = [
        [f"{outcome.task.model_name}: {outcome.task.title}", outcome.error]
        for outcome in file.outcomes
        if outcome.error
    ]
    return TextTable("Not measured", ("task", "why"), failed, words=2)


def switches_in_words() -> str:
    """What each switch turns off, as a list in Markdown."""
    return "\n".join(f"- **{switch.name}**, off: {switch.meaning}" for switch in SWITCHES) + "\n"


# ── several files ────────────────────────────────────────────────────────────────────────────────────────────────────


def markdown(files: Sequence[DeviceFile]) -> str:
    """A section for each file, GPUs first."""
    ordered = sorted(files, key=lambda file: (file.machine.computes_on == "cpu", file.machine.chip, file.date))
    return "\n".join("\n".join(_section(file)) for file in ordered) or "No device has been measured yet.\n"


def _section(file: DeviceFile) -> Iterator[str]:
    yield f"### {file.machine.chip}{', CPU only' if file.machine.computes_on == 'cpu' else ''}\n"
    yield from (table.markdown() for table in tables(file))
    yield f"*{provenance(file)}*\n"


def provenance(file: DeviceFile) -> str:
    """Date, machine, versions, and how far the bench came."""
    machine = file.machine
    working_set = f" (working set {number(machine.working_set_gb)} GB)" if machine.working_set_gb else ""
    parts = (
        f"{file.date}: {machine.cores} cores, {number(machine.memory_gb)} GB{working_set}, {machine.system}",
        f"{file.settings.scale} scale, {file.settings.sampling}, {file.settings.clock} seconds",
        ", ".join(f"{name} {version}" for name, version in file.versions.items()),
        f"{file.ended} after {number(file.took_s / 60)} minutes, {len(file.unmeasured)} tasks left",
    )
    return "; ".join(parts) + "."
