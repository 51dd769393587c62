"""The verb `evaluate`: score a run before and after training, or any model, on held-out prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from backend.cli.common import STOPPED, AllowCode, ExistingRunsDir, ignore_sighup, tell, tell_json, verb
from backend.cli.completions import checkpoints, run_names
from backend.cli.consoles import new_console
from backend.config.config import Config, load
from backend.rewards.allowed_code import require_allowed
from backend.runs.run_folder import find_run
from backend.runs.steering import run_config
from backend.trainer.control import handlers_restored, on_stop_signals
from backend.trainer.evaluation.evaluation_rows import (
    Decoding,
    Evaluation,
    Figures,
    MeanWithInterval,
    SideName,
    free_name,
    write_evaluation,
)
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.documents import written_whole
from backend.utils.errors import UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.trainer.evaluation.comparison import EvaluatedModel, EvaluationChoices, EvaluationProgress


# An evaluation as a table on the terminal.

TITLES: dict[SideName, str] = {"base": "base", "tuned": "tuned", "model": "model"}


def print_evaluation(evaluation: Evaluation, console: Console | None = None) -> None:
    """Print a summary, a table per decoding, and the passing criteria."""
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
    """Three significant digits, with rounding noise as 0."""
    if value is None:
        return "–"
    if abs(value) < 5e-7:
        return "0"
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return (f"+{text}" if signed and value > 0 else text).replace("-", "−")


# ── evaluate ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Report = Callable[["EvaluationProgress"], None]


STREAM_EVERY_S = 0.25
"""Seconds between JSON progress lines."""


class _StopRequested(Exception):
    pass


@verb
@ignore_sighup
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, or a model's folder or id.", autocompletion=run_names)
    ],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="Settings for data, rewards and sampling; a run has its own."),
    ] = None,
    config_option: Annotated[Path | None, typer.Option("--config", help="The same, as an option.")] = None,
    split: Annotated[
        str,
        typer.Option(
            help="The split whose prompts are answered: test, valid, train, or the name of a set of eval_data."
        ),
    ] = "test",
    is_greedy: Annotated[
        bool | None,
        typer.Option("--greedy/--sampled", help="Only the likeliest answers, or only sampled ones (default: both)."),
    ] = None,
    completions: Annotated[
        int | None,
        typer.Option(
            "--n", min=1, help="Sampled completions of each prompt (default: those of an evaluation in training)."
        ),
    ] = None,
    ks: Annotated[str, typer.Option("--k", help="The k of pass@k, as 1,4,8 (default: 1, 2, 4 … up to --n).")] = "",
    passing: Annotated[
        str, typer.Option("--pass", help="What passes: NAME>=SCORE of a reward function, or of reward, their sum.")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of the split.")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="end, which is what the run has left, last, best, or the number of a step.", autocompletion=checkpoints
        ),
    ] = "end",
    is_base_only: Annotated[bool, typer.Option("--base-only", help="Only the model as it was before the run.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampled completions.")] = None,
    name: Annotated[str, typer.Option(help="Name of the result.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the result (default: evaluations in the run's folder; of a model, none)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    is_stream: Annotated[bool, typer.Option("--stream", help="Progress on stdout, one JSON object a line.")] = False,
    allow_code: AllowCode = False,
    runs_dir: ExistingRunsDir = None,
) -> None:
    """Score a run's model before and after training, or any model, on held-out prompts, with intervals."""
    settings = load(_one_config(config, config_option)) if config or config_option else None
    if (relevant := settings or _own_settings(model, runs_dir)) is not None:
        relax_gpu_timeout(relevant)  # before the imports below, which import mlx
    from backend.trainer.evaluation.comparison import EvaluationChoices, evaluate_model, find_evaluated
    from backend.trainer.evaluation.evaluate import EVAL_SEED

    evaluated = find_evaluated(model, settings, runs_dir, checkpoint)
    if settings is None:
        require_allowed(evaluated.config.model_dump(), allow=allow_code)
    if evaluated.run is None and is_base_only:
        raise UserError("base-only", f"{model} is a model and no run, so there is no base to evaluate alone.")
    usual = evaluated.config.num_generations_eval or evaluated.config.group_size
    choices = EvaluationChoices(
        split=split,
        decodings=("greedy", "sampled") if is_greedy is None else ("greedy",) if is_greedy else ("sampled",),
        completions=completions or usual,
        ks=_ks(ks, 1 if is_greedy else completions or usual),
        limit=limit or -1,
        base_only=is_base_only,
        seed=EVAL_SEED if seed is None else seed,
        passing=passing,
    )
    folder = out or (evaluated.run.evaluations if evaluated.run is not None else None)
    chosen_name = name or _default_name(evaluated, choices)
    with _stopping_on_signals() as check, _progress(is_stream) as report:
        try:
            evaluation, rows = evaluate_model(evaluated, choices, chosen_name, report, check)
        except _StopRequested:
            tell("Stopped; nothing was written.", file=sys.stderr)
            raise typer.Exit(STOPPED) from None
    path = None
    if folder is not None:
        evaluation = evaluation.model_copy(update={"name": free_name(folder, chosen_name)})
        path = write_evaluation(folder, evaluation, rows)
    _print(evaluation, path, as_json, is_stream)


def _one_config(argument: Path | None, option: Path | None) -> Path:
    if argument is not None and option is not None:
        raise UserError("config", "The settings are given twice; leave --config out, or the second argument.")
    path = argument or option
    assert path is not None
    return path


def _own_settings(name: str, runs_dir: Path | None) -> Config | None:
    try:
        return run_config(find_run(name, runs_dir))
    except UserError:
        return None  # whatever is wrong is said by `find_evaluated`


def _ks(text: str, most: int) -> tuple[int, ...]:
    """Parse `--k`. Raises UserError for invalid numbers or more than the completions."""
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        number = written_whole(part)
        if number is None or not 1 <= number <= most:
            are = "is one completion" if most == 1 else f"are {most} completions"
            raise UserError(
                "k", f"--k {quote(part, 40)} does not fit: there {are} of each prompt (--n), so k is 1 to {most}."
            )
        numbers.append(number)
    return tuple(numbers)


def _default_name(evaluated: EvaluatedModel, choices: EvaluationChoices) -> str:
    if choices.base_only or evaluated.checkpoint is None:
        return f"{choices.split}-base" if choices.base_only else choices.split
    return f"{choices.split}-step-{evaluated.checkpoint.state.step}"


@contextmanager
def _stopping_on_signals() -> Iterator[Callable[[], None]]:
    """Yield a function that raises after a stop signal; call it between decoding chunks."""
    received: list[int] = []

    def check() -> None:
        if received:
            raise _StopRequested

    with handlers_restored():
        on_stop_signals(lambda number, _: received.append(number))
        yield check


class _JsonProgress:
    """Prints progress as JSON lines: every phase, and periodic counts."""

    def __init__(self) -> None:
        self._phase, self._printed = "", 0.0

    def report(self, progress: EvaluationProgress) -> None:
        now = time.monotonic()
        if progress.phase != self._phase or now - self._printed >= STREAM_EVERY_S:
            self._phase, self._printed = progress.phase, now
            tell_json(asdict(progress))


@contextmanager
def _progress(is_stream: bool) -> Iterator[Report]:
    """Yield a progress callback: JSON lines on stdout, a bar on a terminal, else one stderr line per phase."""
    from backend.cli.consoles import new_console

    console = new_console(stderr=True)
    if is_stream:
        yield _JsonProgress().report
    elif console.is_terminal:
        with _bar(console) as report:
            yield report
    else:
        phases: set[str] = set()

        def print_phase(progress: EvaluationProgress) -> None:
            if progress.phase not in phases:
                phases.add(progress.phase)
                tell(f"{progress.phase}…", file=sys.stderr, flush=True)

        yield print_phase


@contextmanager
def _bar(console: Any) -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(progress: EvaluationProgress) -> None:
            total = None if progress.done is None else 1.0
            bar.update(task, description=progress.phase, total=total, completed=progress.done or 0.0)

        yield report


def _print(evaluation: Evaluation, path: Path | None, as_json: bool, is_stream: bool) -> None:
    if as_json or is_stream:
        last = list(evaluation.headline.sides.values())[-1].figures
        # The means of the evaluated model once more on top, for scripts that want no more than these.
        means = {"reward": last.reward.value, "rewards": {name: mean.value for name, mean in last.rewards.items()}}
        line = means | evaluation.model_dump(mode="json") | {"path": str(path) if path is not None else None}
        tell_json(line)
        return
    print_evaluation(evaluation)
    if path is not None:
        tell(path)
