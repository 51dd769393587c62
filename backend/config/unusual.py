"""Values that are allowed and so far from what is usual that a slip is likelier than a purpose: 10 where 1.0 was meant, a lost exponent.
Unlike faults, they stop nothing.

The ranges are our judgement, not a rule of the field and not a survey of published runs. Each surrounds the default of TRL's
GRPOTrainer where it has one (8 completions, 512 tokens, one update per rollout, temperature 1, top-p 1, KL weight 0 and in older
versions 0.04, epsilon 0.2) and our own default, mostly by an order of magnitude to either side. Where a range is narrower there is a reason:
below a temperature of 0.3 the completions of a group hardly differ, and above 2 they are noise; a top-p below 0.5 samples from another
distribution than the one that is trained; an epsilon above 0.5 clips next to nothing, except in CISPO, where it bounds the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backend.config.config import Config
from backend.utils.errors import ConfigProblem


@dataclass(frozen=True, slots=True)
class UsualRange:
    """What is not remarkable for a setting. `usual` says what people choose, and `applies` for which configs that holds."""

    low: float
    high: float
    usual: str
    applies: Callable[[Config], bool] = lambda _config: True


def _scales_by_gradient(config: Config) -> bool:
    """Whether the optimizer divides by the size of the gradient, so that the rate is the size of a step."""
    return config.optimizer not in ("sgd", "adagrad", "adadelta", "muon")


USUAL: dict[str, UsualRange] = {
    "iters": UsualRange(1, 100_000, "100 to 5,000 steps are usual"),
    "epochs": UsualRange(0, 100, "1 to 10 passes are usual"),
    "batch_size": UsualRange(1, 1_024, "1 to 64 prompts are usual"),
    "gradient_accumulation_steps": UsualRange(1, 1_024, "1 to 16 are usual"),
    "num_iterations": UsualRange(1, 20, "1 to 4 updates are usual"),
    "group_size": UsualRange(2, 256, "4 to 16 completions are usual"),
    "max_completion_length": UsualRange(1, 65_536, "128 to 8,192 tokens are usual"),
    "max_seq_length": UsualRange(2, 262_144, "512 to 16,384 tokens are usual"),
    "learning_rate": UsualRange(1e-8, 3e-3, "1e-6 to 1e-4 is usual", _scales_by_gradient),
    "rank": UsualRange(1, 512, "4 to 64 is usual"),
    "scale": UsualRange(0.1, 256, "1 to 32 is usual"),
    "dropout": UsualRange(0, 0.5, "0 to 0.1 is usual"),
    "temperature": UsualRange(0.3, 2.0, "0.7 to 1.2 is usual, as a group must differ to be compared"),
    "top_p": UsualRange(0.5, 1, "0.9 to 1 is usual"),
    "beta": UsualRange(0, 1, "0 to 0.1 is usual"),
    "epsilon": UsualRange(0, 0.5, "up to 0.3 is usual", lambda config: config.grpo_loss_type != "cispo"),
    "max_grad_norm": UsualRange(0, 100, "0.1 to 1 is usual"),
}
"""Setting → its range."""


def unusual(config: Config) -> list[ConfigProblem]:
    """A sentence for each setting of a valid config that applies and is far from the usual."""
    return list(_unusual(config))


def _unusual(config: Config) -> Iterator[ConfigProblem]:
    values = config.model_dump()
    for key, usual in USUAL.items():
        value = float(values[key])
        if not usual.low <= value <= usual.high and usual.applies(config) and not _is_overruled(key, config):
            size = "small" if value < usual.low else "large"
            yield ConfigProblem(key, f"This is unusually {size}: {usual.usual}.")


def _is_overruled(key: str, config: Config) -> bool:
    """Whether the setting has no effect: iterations beside epochs, the adapter's where all weights are trained."""
    if key == "iters":
        return config.epochs > 0
    if key == "scale" and config.lora_alpha is not None:
        return True
    return key in ("rank", "scale", "dropout") and config.train_type == "full"
