"""Tables of the files that `bench device` writes, for a terminal or as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.utils.documents import read_json
from backend.utils.errors import UserError

DeviceFile = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TextTable:
    """The first `words` columns are aligned left; the others hold numbers, aligned right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def show(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="left" if i < self.words else "right", min_width=12 if i < self.words else 6)
        for row in self.rows:
            table.add_row(*row)
        narrow = Console()
        (narrow if narrow.is_terminal else Console(width=160)).print(table)

    def markdown(self) -> str:
        rule = ["---" if i < self.words else "---:" for i in range(len(self.columns))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n"


def number(x: float | None) -> str:
    return "–" if x is None else f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def read(path: Path) -> DeviceFile:
    """Raises UserError, also for a file that `bench device` did not write."""
    file = read_json(path, "files")
    if not isinstance(file, dict) or file.get("format") != 1 or not isinstance(file.get("outcomes"), list):
        raise UserError("files", f"{path} was not written by bench device.")
    return file


def line(outcome: dict[str, Any]) -> str:
    task, numbers = outcome["task"], outcome["numbers"]
    if numbers is None:
        return f"{_model(task)}: {_title(task)}  {outcome['error']}"
    units = {"tokens_per_s": "tokens/s", "step_ms": "ms/step", "step_s": "s/step", "peak_gb": "GB peak"}
    units |= {"estimate_gb": "GB estimated", "mean_nats": "nats on average", "p99_nats": "nats at the 99th percentile"}
    shown = ", ".join(f"{number(numbers[key])} {unit}" for key, unit in units.items() if key in numbers)
    return f"{_model(task)}: {_title(task)}  {shown}"


def tables(file: DeviceFile) -> list[TextTable]:
    measured = [(_model(outcome["task"]), outcome["task"], outcome["numbers"]) for outcome in file["outcomes"]]
    measured = [each for each in measured if each[2]]
    models = list(dict.fromkeys(model for model, _, _ in measured))
    sizes = sorted({task["group_size"] for _, task, _ in measured if task["measure"] == "sampling"})
    rates: dict[tuple[str, bool], dict[int, float]] = {}
    prefill: dict[str, float] = {}
    learning, memory, gaps = list[list[str]](), list[list[str]](), list[list[str]]()
    for model, task, numbers in sorted(measured, key=lambda each: (models.index(each[0]), each[1]["measure"])):
        measure = task["measure"]
        if measure == "sampling":
            rates.setdefault((model, task["filters"]), {})[task["group_size"]] = numbers["tokens_per_s"]
        elif measure == "prefill":
            prefill[model] = numbers["tokens_per_s"]
        elif measure == "learning":
            completions, kl = f"{task['group_size']} × {task['completion']}", "on" if task["kl"] else "off"
            learning.append([model, completions, kl, number(numbers["step_s"]), number(numbers["tokens_per_s"])])
        elif measure == "gap":
            gaps.append([model, *(number(numbers[key]) for key in ("mean_nats", "p99_nats", "max_nats"))])
        if measure == "learning" or (measure == "sampling" and task["filters"] and task["group_size"] == sizes[-1]):
            peak, estimate = numbers["peak_gb"], numbers["estimate_gb"]
            shares = map(number, (peak, estimate, peak / estimate))
            memory.append([model, _title(task), *shares, ", ".join(numbers["reductions"]) or "–"])
    sampling: list[list[str]] = []
    for model in models:
        for filters, name, filled in ((True, "default", prefill.get(model)), (False, "none", None)):
            if by_size := rates.get((model, filters)):
                sampling.append([model, name, *(number(by_size.get(size)) for size in sizes), number(filled)])
    failed = [
        [f"{_model(outcome['task'])}: {_title(outcome['task'])}", outcome["error"]]
        for outcome in file["outcomes"]
        if outcome["error"]
    ]
    sampling_columns = ("model", "filters", *(f"G {size}" for size in sizes), "prefill")
    memory_columns = ("model", "phase", "peak, GB", "estimate, GB", "peak / estimate", "reduced")
    made = (
        TextTable("Sampling, tokens/s", sampling_columns, sampling, words=2),
        TextTable("Learning", ("model", "completions", "KL", "step, s", "tokens/s"), learning, words=3),
        TextTable("Memory", memory_columns, memory, words=2),
        TextTable("Sampler against learner", ("model", "mean gap, nats", "p99", "largest"), gaps),
        TextTable("Not measured", ("task", "why"), failed, words=2),
    )
    return [table for table in made if table.rows]


def _model(task: dict[str, Any]) -> str:
    return f"{task['shape']['name']}, {task['precision']}"


def _title(task: dict[str, Any]) -> str:
    if task["measure"] == "sampling":
        return f"sampling, G {task['group_size']}, {'default' if task['filters'] else 'no'} filters"
    if task["measure"] == "learning":
        return f"learning, {'with' if task['kl'] else 'without'} KL"
    return task["measure"]


def markdown(files: Sequence[DeviceFile]) -> str:
    """A section for each file, GPUs first; of a CPU only the sampling speeds."""
    if not files:
        return "No device has been measured yet.\n"
    sections = []
    for file in sorted(files, key=lambda file: (file["machine"]["computes_on"] == "cpu", file["machine"]["chip"])):
        is_cpu = file["machine"]["computes_on"] == "cpu"
        heading = f"### {file['machine']['chip']}{', CPU only' if is_cpu else ''}\n"
        shown = [table.markdown() for table in tables(file)[: 1 if is_cpu else None]]
        sections.append("\n".join([heading, *shown, f"*{provenance(file)}*\n"]))
    return "\n".join(sections)


def provenance(file: DeviceFile) -> str:
    machine, settings = file["machine"], file["settings"]
    working_set = f" (working set {number(machine['working_set_gb'])} GB)" if machine["working_set_gb"] else ""
    parts = (
        f"{file['date']}: {machine['cores']} cores, {number(machine['memory_gb'])} GB{working_set}, "
        f"{machine['system']}",
        f"{settings['scale']} scale, {settings['sampling']}, {settings['clock']} seconds",
        ", ".join(f"{name} {version}" for name, version in file["versions"].items()),
        f"{file['ended']} after {number(file['took_s'] / 60)} minutes, {len(file['unmeasured'])} tasks left",
    )
    return "; ".join(parts) + "."
