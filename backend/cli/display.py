"""Output of verbs through rich: consoles that show user text literally, and the progress of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from backend.runs.events import Event
from backend.runs.metric_names import MEASURES, measure_of
from backend.utils.text import visible


class _Console(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def new_console(**options: Any) -> Console:
    """A console without markup and emoji codes that escapes control characters; passes `options` to rich."""
    return _Console(**{"markup": False, "emoji": False, **options})


def new_table(*headers: str, right: slice = slice(0), **options: Any) -> Table:
    """A table without lines that cuts no cell; `right` selects the columns of numbers; passes `options` to rich."""
    table = Table(*headers, box=None, **options)
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[right]:
        column.justify = "right"
    return table


def print_line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def format_number(value: float | None, *, signed: bool = False) -> str:
    """Three significant digits, with rounding noise as 0; a dash for None."""
    if value is None:
        return "–"
    if abs(value) < 1e-12:
        return "0"
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"+{text}" if signed and value > 0 else text


METRICS = {  # metric → its label before the number, and its unit after it
    "reward": ("reward", ""),
    "loss": ("loss", ""),
    "warmup/loss": ("warm-up loss", ""),
    "reward_std": ("± std", ""),
    "kl": ("KL", ""),
    "clip_ratio_total": ("clipped", ""),
    "completions/mean_length": ("length", ""),
    "rollout_tokens_per_second": ("", " tokens/s"),
    "train_tokens_per_second": ("", " tokens/s"),
    "time/step": ("", " s/step"),
    "peak_memory_gb": ("", " GB"),
}


def shown_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """Keys of METRICS to show beside these: the loss of runs without rewards and of a warm-up, the reward of others."""
    score = next((key for key in ("reward", "loss", "warmup/loss") if key in metrics), "reward")
    others = {"reward", "loss", "warmup/loss"} - {score}
    others |= set() if score == "reward" else {"reward_std", "kl", "clip_ratio_total"}
    others.add(f"{'train' if 'rollout_tokens_per_second' in metrics else 'rollout'}_tokens_per_second")
    return [key for key in METRICS if key not in others]


def show_line(console: Console, every: int, event: Event) -> None:
    """Print a line every `every` steps, and for each note, warning and evaluation."""
    if sentence := sentence_of(event):
        print_line(console, sentence)
    elif event["kind"] == "step" and event["step"] % every == 0:
        values = {key: format_number(event["metrics"].get(key)) for key in shown_metrics(event["metrics"])}
        numbers = "  ".join(f"{METRICS[key][0]} {value}{METRICS[key][1]}".strip() for key, value in values.items())
        print_line(console, f"step {event['step']}  {numbers}")


class LiveDisplay(Progress):
    """A progress bar under a table of the latest metrics and those of the first step."""

    def __init__(self, console: Console) -> None:
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        text = TextColumn("{task.description}", markup=False)
        super().__init__(text, *columns, console=console, refresh_per_second=4)
        self.task = self.add_task("loading", total=None)

    def show(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "started":
            done = event.get("resumed_from") or 0
            self.update(self.task, total=event["iterations"], completed=done, description="training")
        elif kind == "phase":
            self.update(self.task, description=event["phase"])
        elif kind == "step":
            self.last = event["metrics"]
            self.first = self.first or self.last
            self.update(self.task, completed=event["step"])
        if sentence := sentence_of(event):
            print_line(self.console, sentence)

    def get_renderables(self) -> Iterator[RenderableType]:
        table = new_table("", "now", "at first", pad_edge=False)
        for key in shown_metrics(self.last):
            label, unit = METRICS[key]
            table.add_row(label or unit.strip(), *(format_number(of.get(key)) for of in (self.last, self.first)))
        yield table
        yield from super().get_renderables()


def sentence_of(event: Event) -> str:
    """The message of an event worth printing once; "" for others."""
    match event["kind"]:
        case "note":
            return event["sentence"]
        case "health":
            return f"{event['sentence']} {event.get('advice', '')}".strip()
        case "eval":
            metrics, score = event["metrics"], measure_of(event["metrics"])
            found = {event.get("split", "valid"): metrics.get(score)}
            found |= {name.removesuffix(f"/{score}"): metrics[name] for name in metrics if name.endswith(f"/{score}")}
            values = ", ".join(f"{format_number(value)} ({name})" for name, value in found.items())
            return f"step {event['step']}  held-out {MEASURES[score]} {values}"
        case "command":
            return f"asked to {event['word']}"
    return ""
