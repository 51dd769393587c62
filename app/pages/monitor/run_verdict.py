"""The words and figures of the card that sums a run up: what it took, what it changed, where and why it ended."""

from __future__ import annotations

from app.state.run import Run
from app.state.run_notices import reward_before_and_after
from app.widgets.basic.number_format import duration
from app.widgets.result_card import BeforeAfter
from backend.runs.archive import averaging_window


def changes(run: Run) -> list[BeforeAfter]:
    """Reward before → after: in training, on held-out prompts, on the test split."""
    found = [BeforeAfter("Reward in training", *reward_before_and_after(run))]
    held_out = run.eval_series("reward")[1]
    if len(held_out) > 1:
        found.append(BeforeAfter("Held-out reward", float(held_out[0]), float(held_out[-1])))
    test_reward = run.test_metrics.get("reward")
    if isinstance(test_reward, int | float):
        found.append(BeforeAfter("Test reward", None, float(test_reward)))
    return [change for change in found if change.after is not None]


def effort(run: Run) -> str:
    """“32 steps in 43 s”; for a run that ended early, “12 of 32 steps in 16 s”."""
    of = f" of {run.iterations:,}" if run.iterations and run.iterations != run.step else ""
    return f"{run.step:,}{of} step{'s' if of or run.step != 1 else ''} in {duration(run.elapsed_s)}"


def averaged(run: Run) -> str:
    """Over which steps the figures of the result were averaged."""
    count = averaging_window(len(run.series("reward")[0]))
    steps = f"{count} steps" if count > 1 else "step"
    text = f"Training: means of the first and last {steps}."
    evaluated = run.eval_series("reward")[0]
    if len(evaluated) > 1:
        began = f"after step {evaluated[0]:,}" if evaluated[0] else "before training"
        text += f" Held-out: {began}, after step {evaluated[-1]:,}."
    return text


def early_end(run: Run) -> str:
    """Why a run has finished before its last step, as planned; otherwise empty."""
    ending = run.ending or {}
    return str(ending.get("sentence") or "") if ending.get("reason") in ("stop_when", "early_stopping") else ""


def where_it_ended(run: Run) -> str:
    return f" after step {run.step:,}" if run.step else " before the first step"
