"""Terminal output of a run: a live display, or a line every few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Event = dict[str, Any]

METRICS = {
    "reward": "reward",
    "reward_std": "± std",
    "kl": "KL",
    "clip_ratio_total": "clipped",
    "completions/mean_length": "length",
    "rollout_tokens_per_second": "tokens/s",
    "time/step": "s a step",
    "peak_memory_gb": "GB",
}


def format_number(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


class LineDisplay:
    """Prints a line every `every` steps, and for each note, warning and evaluation."""

    def __init__(self, console: Console, every: int) -> None:
        self.console, self.every = console, every

    def __enter__(self) -> Callable[[Event], None]:
        return self.show

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        sentence = sentence_of(event)
        if sentence:
            self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        elif event["kind"] == "step" and event["step"] % self.every == 0:
            metrics = event["metrics"]
            numbers = "  ".join(f"{label} {format_number(metrics.get(key))}" for key, label in METRICS.items())
            self.console.print(f"step {event['step']}  {numbers}", highlight=False, markup=False, soft_wrap=True)


class LiveDisplay:
    """A progress bar over a table of the latest metrics and those of the first step."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("loading", total=None)
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.live = Live(self._rendered(), console=console, refresh_per_second=4)

    def __enter__(self) -> Callable[[Event], None]:
        self.live.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        self.live.update(self._rendered())
        self.live.stop()

    def show(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "started":
            self.bar.update(
                self.task, total=event["iterations"], completed=event.get("resumed_from") or 0, description="training"
            )
        elif kind == "phase":
            self.bar.update(self.task, description=event["phase"])
        elif kind == "step":
            self.last = event["metrics"]
            self.first = self.first or self.last
            self.bar.update(self.task, completed=event["step"])
        if sentence := sentence_of(event):
            self.live.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        self.live.update(self._rendered())

    def _rendered(self) -> Group:
        table = Table("", "now", "at first", box=None, pad_edge=False)
        for key, label in METRICS.items():
            table.add_row(label, format_number(self.last.get(key)), format_number(self.first.get(key)))
        return Group(table, self.bar)


def sentence_of(event: Event) -> str:
    """The message of an event worth printing once; "" for others."""
    kind = event["kind"]
    if kind == "note":
        return event["sentence"]
    if kind == "health":
        return f"{event['sentence']} {event.get('advice', '')}".strip()
    if kind == "eval":
        reward = format_number(event["metrics"].get("reward"))
        return f"step {event['step']}  held-out reward {reward} ({event.get('split', 'valid')})"
    if kind == "command":
        return f"asked to {event['word']}"
    return ""
