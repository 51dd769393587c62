"""The verb `evaluate`: score a run before and after training, or any model, on held-out prompts."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backend.cli.common import AllowCode, RunsDir, ignore_sighup, stoppable, tell, tell_error, tell_json, verb
from backend.cli.completions import RunOrModel, checkpoints
from backend.cli.display import format_number, new_console, new_table, print_line
from backend.config.config import load
from backend.rewards.allowed_code import require_allowed
from backend.runs.run_folder import find_run
from backend.runs.steering import run_config
from backend.trainer.evaluation.evaluation_rows import (
    Evaluation,
    Figures,
    MeanWithInterval,
    free_name,
    write_evaluation,
)
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.documents import written_whole
from backend.utils.errors import UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.trainer.evaluation.comparison import Report

STREAM_EVERY_S = 0.25  # between two JSON progress lines


@verb
@ignore_sighup
def evaluate(
    model: RunOrModel,
    config: Annotated[
        Path | None, typer.Argument(help="Settings for data, rewards and sampling (default: a run's own).")
    ] = None,
    config_option: Annotated[Path | None, typer.Option("--config", help="The same, as an option.")] = None,
    split: Annotated[
        str, typer.Option(help="test, valid, train, or a set of eval_data (default: the first of these with rows).")
    ] = "",
    data: Annotated[str, typer.Option(help="A file, folder or dataset of prompts, in place of a split.")] = "",
    is_greedy: Annotated[bool | None, typer.Option("--greedy/--sampled", help="Only one of the two.")] = None,
    completions: Annotated[int | None, typer.Option("--n", min=1, help="Sampled completions of each prompt.")] = None,
    ks: Annotated[str, typer.Option("--k", help="The k of pass@k, as 1,4,8 (default: 1, 2, 4 … up to --n).")] = "",
    passing: Annotated[str, typer.Option("--pass", help="What passes: NAME>=SCORE of a reward, or of reward.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of the split.")] = None,
    checkpoint: Annotated[str, typer.Option(help="end, last, best, or a step.", autocompletion=checkpoints)] = "end",
    is_base_only: Annotated[bool, typer.Option("--base-only", help="Only the model as it was before the run.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampled completions.")] = None,
    name: Annotated[str, typer.Option(help="Name of the result.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder of the result (default: the run's evaluations).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    is_stream: Annotated[bool, typer.Option("--stream", help="Progress on stdout, one JSON object a line.")] = False,
    allow_code: AllowCode = False,
    runs_dir: RunsDir = None,
) -> None:
    """Score a run's model before and after training, or any model, on held-out prompts, with intervals."""
    if config is not None and config_option is not None:
        raise UserError("config", "The settings are given twice; leave --config out, or the second argument.")
    file = config or config_option
    settings = load(file) if file is not None else None
    if settings is not None:
        relax_gpu_timeout(settings)  # before the imports below, which import mlx
    else:
        with suppress(UserError):  # reported by `find_evaluated`
            relax_gpu_timeout(run_config(find_run(model, runs_dir)))
    from backend.trainer.evaluation.comparison import EvaluationChoices, evaluate_model, find_evaluated
    from backend.trainer.evaluation.evaluate import EVAL_SEED

    evaluated = find_evaluated(model, settings, runs_dir, checkpoint)
    if settings is None:
        require_allowed(evaluated.config.model_dump(), allow=allow_code)
    if data and split:
        raise UserError("data", "Give --split or --data, not both.")
    if evaluated.run is None and is_base_only:
        raise UserError("base-only", f"{model} is a model and no run, so there is no base to evaluate alone.")
    most = completions or evaluated.config.num_generations_eval or evaluated.config.group_size
    parts = {part.strip(): written_whole(part.strip()) or 0 for part in ks.split(",") if part.strip()}
    most_k = 1 if is_greedy else most
    if wrong := [part for part, number in parts.items() if not 1 <= number <= most_k]:
        fits = f"there {'is one completion' if most_k == 1 else f'are {most_k} completions'} of each prompt (--n)"
        raise UserError("k", f"--k {quote(wrong[0], 40)} does not fit: {fits}, so k is 1 to {most_k}.")
    choices = EvaluationChoices(
        split=split,
        data=data,
        decodings=("greedy", "sampled") if is_greedy is None else ("greedy",) if is_greedy else ("sampled",),
        completions=most,
        ks=tuple(parts.values()),
        limit=limit or -1,
        base_only=is_base_only,
        seed=EVAL_SEED if seed is None else seed,
        passing=passing,
    )
    folder = out or (evaluated.run.evaluations if evaluated.run is not None else None)
    there = next((each for each in (folder, *folder.parents) if each.exists()), None) if folder is not None else None
    if there is not None and not os.access(there, os.W_OK):
        raise UserError("out", f"The folder {there} cannot be written, and the result goes there.")
    at = "-base" if is_base_only else f"-step-{saved.state.step}" if (saved := evaluated.checkpoint) is not None else ""
    with stoppable("Stopped; nothing was written."):
        evaluation, rows = evaluate_model(evaluated, choices, name, _reporter(is_stream))
    name = name or f"{Path(evaluation.data.split).stem}{at}"
    evaluation = evaluation.model_copy(update={"name": free_name(folder, name) if folder is not None else name})
    path = None if folder is None else write_evaluation(folder, evaluation, rows)
    if as_json or is_stream:
        last = list(evaluation.headline.sides.values())[-1].figures
        # The means of the evaluated model once more on top, for scripts that want no more than these.
        means = {"reward": last.reward.value, "rewards": {name: mean.value for name, mean in last.rewards.items()}}
        tell_json(means | evaluation.model_dump(mode="json") | {"path": str(path) if path is not None else None})
        return
    print_evaluation(evaluation)
    if path is not None:
        tell(path)


def _reporter(is_stream: bool) -> Report:
    told, printed = "", 0.0

    def report(phase: str, done: float | None, left_s: float | None) -> None:
        nonlocal told, printed
        now = time.monotonic()
        if phase == told and not (is_stream and now - printed >= STREAM_EVERY_S):
            return
        told, printed = phase, now
        if is_stream:
            tell_json({"phase": phase, "done": done, "left_s": left_s})
        else:
            tell_error(f"{phase}…")

    return report


def print_evaluation(evaluation: Evaluation) -> None:
    console = new_console()
    print_line(console, evaluation.sentence())
    for decoding in evaluation.decodings:
        title = f"Sampled: {decoding.completions} completions of each prompt at temperature {decoding.temperature:g}"
        console.print()
        print_line(console, "Greedy: the likeliest token at every step" if decoding.name == "greedy" else title)
        headers = ["difference"] * (decoding.difference is not None) + [f"{evaluation.confidence * 100:g} % interval"]
        table = new_table("", *decoding.sides, *headers, right=slice(1, None), pad_edge=False, header_style="bold")
        columns = [_figures(side.figures) for side in decoding.sides.values()]
        differences = _figures(decoding.difference) if decoding.difference is not None else None
        for name, mean in columns[0].items():
            cells = [number(column[name].value) for column in columns]
            if differences is None:
                cells += [_interval(mean)]
            else:
                cells += [number(differences[name].value, signed=True), _interval(differences[name], signed=True)]
            table.add_row(name, *cells, style="bold" if name == "reward" else None)
        console.print(table)
        if decoding.difference is not None:
            counts = f"{decoding.better} prompts better, {decoding.worse} worse, {decoding.unchanged} unchanged"
            print_line(console, counts)
    console.print()
    notes = [evaluation.pass_rule.sentence()] if evaluation.pass_rule is not None else []
    for sentence in [*notes, *evaluation.notes]:
        print_line(console, sentence)


def _figures(figures: Figures) -> dict[str, MeanWithInterval]:
    found = {"reward": figures.reward, **figures.rewards}
    found |= {f"pass@{k}": mean for k, mean in figures.pass_at.items()}
    found |= {"tokens": figures.tokens, "cut off": figures.cut_off}
    if figures.spread is not None and figures.different is not None:
        found |= {"spread of a prompt": figures.spread, "different texts": figures.different}
    return found


def _interval(mean: MeanWithInterval, *, signed: bool = False) -> str:
    if mean.low is None or mean.high is None:
        return "–"
    return f"{number(mean.low, signed=signed)} … {number(mean.high, signed=signed)}"


def number(value: float | None, *, signed: bool = False) -> str:
    return format_number(value, signed=signed).replace("-", "−")
