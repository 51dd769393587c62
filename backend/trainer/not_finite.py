"""A step with a number that is not finite ends the run before it, with its likely cause and the batch in files."""

import json
import math
import shutil
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.runs.run_folder import RunFolder
from backend.training.not_finite import NotFiniteError, Quantity
from backend.types import Group
from backend.utils.errors import UserError

HIGH_RATE, HIGH_ADAPTER_RATE = 1e-4, 1e-3  # of full fine-tuning and adapters: the rate is the first suspect from there
HIGH_BETA, USUAL_BETA = 1.0, 0.04
MOST_LISTED = 20  # completions and parameters that the summary names


def step_error(config: Config, run: RunFolder, step: int, found: NotFiniteError, groups: Sequence[Group]) -> UserError:
    """The error for a step, whose batch is written to the run's folder."""
    setting, advice = _likely_cause(config, found.quantity, is_first=step == 1 and found.update <= 1)
    is_what = "is too large" if found.quantity == "reward" else "is not finite"
    happened = f"Step {step} was not applied, for its {found.quantity} {is_what} ({found.where})"
    folder = run.inspection / f"step-{step:06d}"
    try:
        write_inspection(folder, f"{happened}. {advice}", found, groups)
        where = f" What it computed is in {folder.relative_to(run.path)}."
    except OSError:
        traceback.print_exc()  # in log.txt; the sentence matters more
        where = ""
    return UserError(setting, f"{happened}. {advice}{where}")


def weights_error(config: Config, step: int, names: Sequence[str]) -> UserError:
    """The error for weights or moments that a save refuses."""
    setting, advice = _likely_cause(config, "weight", is_first=False)
    which = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
    return UserError(setting, f"The weights of step {step} are not finite ({which}), so they are not saved. {advice}")


def _likely_cause(config: Config, quantity: Quantity, *, is_first: bool) -> tuple[str, str]:
    """(the setting that most likely caused it, what to change). `is_first`: no update was applied yet."""
    if quantity == "reward":
        return "reward_functions", "Scores this large cannot be computed with; scale them down, to 0 … 1 at best."
    if config.dtype == "float16":
        return "dtype", "float16 ends at 65,504; clone the run with dtype=bfloat16 or float32."
    if is_first:
        why = "Nothing is trained yet, so the model's files are damaged, or it needs dtype=float32; fetch it again."
        return "model", why
    rate, high = config.learning_rate, HIGH_RATE if config.train_type == "full" else HIGH_ADAPTER_RATE
    label, key, value, better = "learning rate", "learning_rate", rate, high / 10 if rate >= high else rate / 10
    if rate < high and config.beta >= HIGH_BETA:
        label, key, value, better = "Beta (KL weight)", "beta", config.beta, USUAL_BETA
    elif rate < high and not config.max_grad_norm:
        return "max_grad_norm", "Gradients of any length are applied; go on with max_grad_norm=1."
    advice = f"go on with {key}={better:g}, from an earlier checkpoint if it comes again."
    return key, f"The likely cause is the {label} of {value:g}; {advice}"


def write_inspection(folder: Path, sentence: str, found: NotFiniteError, groups: Sequence[Group]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of the same step, before the run was resumed
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    broken: list[tuple[int, str]] = []
    for number, group in enumerate(groups):
        for completion in group.completions:
            of_tokens = {"sampled_logp": completion.logps, **found.tokens.get(len(rows), {})}
            tokens = {name: [_json_number(x) for x in values] for name, values in of_tokens.items()}
            broken += [(len(rows), name) for name, values in tokens.items() if any(isinstance(x, str) for x in values)]
            row = {"row": len(rows), "group": number, "prompt": group.problem.prompt, "answer": group.problem.answer}
            row |= {"prompt_tokens": group.problem.tokens, "text": completion.text}
            row |= {"completion_tokens": completion.tokens, "stop": completion.stop}
            row["scores"] = {name: _json_number(score) for name, score in completion.scores.items()}
            row |= {name: _json_number(getattr(completion, name)) for name in ("reward", "advantage")}
            rows.append(row | {"tokens": tokens})
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    summary = [sentence, ""] + ([f"Optimizer update {found.update}."] if found.update else [])
    summary.append(f"{len(rows)} completions; not finite in {len({row for row, _ in broken})} of them:")
    summary += [f"  completion {row}: {name}" for row, name in broken[:MOST_LISTED]]
    if found.gradients:
        lines = ["parameter\tnorm\tlargest finite\tnot finite\tnumbers"]
        lines += [f"{g.name}\t{g.norm:g}\t{g.largest:g}\t{g.not_finite}\t{g.size}" for g in found.gradients]
        (folder / "gradients.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        odd = [g for g in found.gradients if g.not_finite]
        summary.append(f"{len(found.gradients)} gradients; not finite in {len(odd)} of them:")
        for g in odd[:MOST_LISTED]:
            summary.append(f"  {g.name}: {g.not_finite} of {g.size} numbers, largest finite {g.largest:g}")
    (folder / "summary.txt").write_text("\n".join(summary) + "\n", encoding="utf-8")


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
