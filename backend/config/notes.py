"""Remarks on valid settings that are probably not meant, and on values far from the usual. They stop nothing.

The ranges are mostly an order of magnitude around TRL's and our defaults.
"""

from __future__ import annotations

from backend.config.config import SETTINGS, Config
from backend.config.updates import DEFAULT_FINAL, OWN, final_rate
from backend.utils.errors import ConfigProblem


def config_notes(config: Config) -> list[str]:
    """Messages about valid settings that probably do not do what their author expects. A run logs them at its start."""
    loss, level = config.grpo_loss_type, config.importance_sampling_level
    notes: list[str] = []
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        notes.append(
            f"Importance by sequence with the {loss} loss weighs long completions more; grpo and luspo do not."
        )
    if loss == "luspo" and level != "sequence":
        notes.append("The luspo loss was made for importance by sequence.")
    if loss == "vespo" and level != "token":
        notes.append("The vespo loss computes the completion's ratio itself and was made for importance by token.")
    if loss == "cispo" and (config.epsilon_high or config.epsilon) < 1:
        notes.append("The cispo loss takes Epsilon high as the largest ratio itself; its paper uses about 5.")
    if config.delta is not None and loss in ("cispo", "sapo", "vespo"):
        notes.append(f"Delta is set, but the {loss} loss has no clip that it could bound.")
    if config.holds_output and config.sampling_correction == "none":
        notes.append(
            "Output is constrained and Sampling correction is none: the policy learns from tokens as if it had chosen "
            "them freely. Automatic corrects for that."
        )
    if config.holds_output and config.sampling_correction.startswith("token"):
        notes.append(
            "Sampling correction by token does not correct the states that constrained output leads to; "
            "Automatic corrects whole completions."
        )
    if config.num_iterations * config.steps_per_generation == 1 and config.ratio_against == "old":
        notes.append(
            "With one update per rollout the ratio is always 1, so epsilon clips nothing and the clip charts stay at 0."
        )
    if config.optimizer == OWN:
        notes.append(f"The optimizer is {config.own_optimizer}, an object of the program that called train().")
    if config.lr_schedule == OWN:
        notes.append(
            f"The learning rate is that of {config.own_schedule}, an object of the program; the setting has no effect."
        )
    if config.lr_final == DEFAULT_FINAL > config.learning_rate and SETTINGS["lr_final"].applies(config.model_dump()):
        final = final_rate(config.learning_rate, config.lr_final)
        notes.append(
            f"The default final rate is above the learning rate, so the rate falls to a fifth of it: {final:g}."
        )
    return notes


USUAL: dict[str, tuple[float, float, str]] = {
    "iters": (1, 100_000, "100 to 5,000 steps are usual"),
    "epochs": (0, 100, "1 to 10 passes are usual"),
    "batch_size": (1, 1_024, "1 to 64 prompts are usual"),
    "gradient_accumulation_steps": (1, 1_024, "1 to 16 are usual"),
    "num_iterations": (1, 20, "1 to 4 updates are usual"),
    "group_size": (2, 256, "4 to 16 completions are usual"),
    "max_completion_length": (1, 65_536, "128 to 8,192 tokens are usual"),
    "max_seq_length": (2, 262_144, "512 to 16,384 tokens are usual"),
    "learning_rate": (1e-8, 3e-3, "1e-6 to 1e-4 is usual"),
    "rank": (1, 512, "4 to 64 is usual"),
    "scale": (0.1, 256, "1 to 32 is usual"),
    "dropout": (0, 0.5, "0 to 0.1 is usual"),
    "temperature": (0.3, 2.0, "0.7 to 1.2 is usual, as a group must differ to be compared"),
    "top_p": (0.5, 1, "0.9 to 1 is usual"),
    "beta": (0, 1, "0 to 0.1 is usual"),
    "epsilon": (0, 0.5, "up to 0.3 is usual"),
    "max_grad_norm": (0, 100, "0.1 to 1 is usual"),
}
"""Setting → (lowest, highest unremarkable value, what is usual)."""


def unusual(config: Config) -> list[ConfigProblem]:
    """A message for each setting of a valid config that has an effect and is far from the usual."""
    without_effect: set[str] = set()
    if config.epochs > 0:
        without_effect.add("iters")
    if config.lora_alpha is not None:
        without_effect.add("scale")
    if config.train_type == "full":
        without_effect |= {"rank", "scale", "dropout"}
    if config.optimizer in ("sgd", "adagrad", "adadelta", "muon"):  # the rate is no size of a step
        without_effect.add("learning_rate")
    if config.grpo_loss_type == "cispo":
        without_effect.add("epsilon")
    found: list[ConfigProblem] = []
    for key, (low, high, usual) in USUAL.items():
        value = float(getattr(config, key))
        if not low <= value <= high and key not in without_effect:
            size = "small" if value < low else "large"
            found.append(ConfigProblem(key, f"This is unusually {size}: {usual}."))
    return found
