"""How long a run is, and how many prompts and completions a step has."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import MEMORY, STEPS
from backend.config.settings.limits import MOST_COMPLETIONS, MOST_STEPS, MOST_TOKENS


class BatchFields(BaseModel):
    """How long a run is, and how many prompts and completions a step has: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    iters: int = setting(1000, "training", "Iterations", "Training steps. Each samples a group for every prompt of the "
                         "batch and learns from it.", ge=1, le=MOST_STEPS, unit="steps", group=STEPS)
    epochs: int = setting(0, "training", "Epochs", "Passes over the dataset. Above 0 it decides how long the run is, and "
                          "Iterations is not used.", ge=0, le=1_000_000, unit="passes", group=STEPS)
    batch_size: int = setting(1, "training", "Batch", "Prompts in one step (before gradient accumulation).", ge=1, le=MOST_COMPLETIONS, unit="prompts", group=STEPS)
    gradient_accumulation_steps: int = setting(
        1, "training", "Gradient accumulation", "Multiplies the prompts of a step; their gradients are summed piece by "
        "piece, so memory stays the same.", ge=1, le=MOST_COMPLETIONS, unit="batches", group=MEMORY)
    num_iterations: int = setting(
        1, "training", "Updates per rollout", "How often the weights are updated from the same completions (μ). At 1 the "
        "ratio is always 1: Epsilon and Importance do nothing, and the clip chart stays at 0.", ge=1, le=10_000, unit="updates", used_by=("duration",), group=STEPS)
    steps_per_generation: int = setting(
        1, "training", "Batches per rollout", "How many optimizer batches are sampled at once. Above 1, the later ones learn from "
        "completions that a slightly older policy wrote.", ge=1, le=10_000, unit="batches", advanced=True, group=STEPS)
    max_seq_length: int = setting(2048, "training", "Max Seq", "Prompt and completion together. Rows whose prompt leaves no "
                                  "room for the completion are left out, and counted.", ge=2, le=MOST_TOKENS, unit="tokens",
                                  # Scoring reads Completion, which must be below it.
                                  used_by=("prompt_limit", "scoring"), group=STEPS)
    seed: int = setting(0, "training", "Seed", "The same seed on the same machine gives the same run.", ge=0, le=2**32 - 1,
                        used_by=("rows",), group=STEPS)
    data_seed: int | None = setting(None, "training", "Data seed", "Seed of the order in which prompts are taken and of the rows held out. Empty "
                                    "takes Seed; another one tries the same run on the same data in another order.", ge=0, le=2**32 - 1,
                                    advanced=True, used_by=("rows",), group=STEPS)
    # fmt: on
