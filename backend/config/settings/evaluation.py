"""When a run reports, evaluates, saves and stops."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import BEST, MEMORY, REPORTS
from backend.config.settings.limits import MOST_COMPLETIONS, NEVER
from backend.runs.metric_names import our_name
from backend.runs.stop_conditions import with_our_name


class EvaluationFields(BaseModel):
    """When a run reports, evaluates, saves and stops: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    steps_per_report: int = setting(10, "training", "Report", "How often the terminal prints a line. The charts get a point for "
                                    "every step, whatever stands here; in MLX LoRA Studio they get one for each report.", ge=1, le=NEVER, unit="steps", group=REPORTS)
    steps_per_eval: int = setting(200, "training", "Eval", "How often held-out prompts are answered and scored. 0 never "
                                  "does.", ge=0, le=NEVER, unit="steps", group=REPORTS)
    eval_delay: int = setting(0, "training", "Eval delay", "No evaluation before this step, but for the one before training, which all later ones "
                              "are compared with, and the one after the last step.", ge=0, le=NEVER, unit="steps", advanced=True, group=REPORTS)
    eval_batch_size: int | None = setting(None, "training", "Eval batch", "Held-out prompts that are answered together; Val Batches and Test "
                                          "Batches count batches of this size. Empty means as many as in a step.", ge=1, le=MOST_COMPLETIONS,
                                          unit="prompts", advanced=True, group=REPORTS)
    save_every: int = setting(100, "training", "Save", "How often a checkpoint is written.", ge=1, le=NEVER, unit="steps", group=REPORTS)
    stop_when: list[Annotated[str, AfterValidator(with_our_name)]] = setting([], "training", "Stop when", "Ends the run once one of these is met, as finished: a metric, a sign and a "
                                   "number, such as kl > 0.8 or reward >= 2.5. The mean of the last five steps is compared; with eval/ "
                                   "before it, a metric of the newest evaluation.", advanced=True, group=BEST)
    save_only_model: bool = setting(False, "training", "Save weights only", "Checkpoints without the optimizer's state: a third of the size with "
                                    "Adam, but a resumed run begins with a new optimizer, so it goes on a little differently.", advanced=True, group=REPORTS)
    best_metric: Annotated[str, AfterValidator(our_name)] = setting("", "training", "Best metric", "The metric that makes a checkpoint the best, and that Early stopping follows: eval/ "
                               "and a metric of held-out prompts, or a metric of the steps, averaged between two checkpoints. Empty means the "
                               "reward, held-out where the run evaluates.", advanced=True, group=BEST)
    best_is_lowest: bool = setting(False, "training", "Lower is better", "Of Best metric, as for a loss or a length.", advanced=True, group=BEST)
    load_best_at_end: bool = setting(False, "training", "End with the best", "What the run leaves at its end, adapters, model, fused model and test, is "
                                     "of its best checkpoint, not of its last step.", advanced=True, group=BEST)
    early_stopping_patience: int = setting(0, "training", "Early stopping", "Ends the run, as finished, once the held-out reward has not "
                                           "risen in this many evaluations; without evaluations, the training reward between checkpoints; "
                                           "with Best metric, that one. The best checkpoint is kept. 0 never does.", ge=0, le=NEVER,
                                           unit="evaluations", advanced=True, group=BEST)
    early_stopping_min_delta: float = setting(0.0, "training", "Least gain", "How much better the reward must be to count for Early stopping.",
                                              ge=0, le=1_000_000, advanced=True, group=BEST)
    keep_checkpoints: int = setting(3, "training", "Keep checkpoints", "How many of the newest stay on disk, beside the "
                                    "best one.", ge=1, le=NEVER, unit="checkpoints", advanced=True, group=REPORTS)
    val_batches: int = setting(25, "training", "Val Batches", "Batches of held-out prompts in one evaluation. −1 takes "
                               "all.", ge=-1, le=NEVER, unit="batches", group=REPORTS)
    test: bool = setting(False, "training", "Evaluate test split", "Answers the test prompts once more when training ends.", group=MEMORY)
    test_batches: int = setting(100, "training", "Test Batches", "Batches of test prompts. −1 takes all.", ge=-1, le=NEVER,
                                unit="batches", when=("test", (True,)), stays_visible=True, group=MEMORY)
    # fmt: on
