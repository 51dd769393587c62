"""Notes on a valid configuration: combinations that are allowed and probably not meant. The trainer writes them to the event log
when a run starts. Invalid combinations are faults: see `backend.config.checks`.
"""

from __future__ import annotations

from backend.config.config import SETTINGS, Config
from backend.config.learning_rate import DEFAULT_FINAL, final_rate
from backend.config.settings.optimizer import OWN


def config_notes(config: Config) -> list[str]:
    """Sentences about valid settings that probably do not do what their author expects."""
    loss, level = config.grpo_loss_type, config.importance_sampling_level
    notes: list[str] = []
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        notes.append(
            f"Importance by sequence with the {loss} loss weighs long completions more; grpo and luspo do not."
        )
    if loss == "luspo" and level != "sequence":
        notes.append("The luspo loss was made for importance by sequence.")
    if loss == "vespo" and level != "token":
        notes.append("The vespo loss works the completion's ratio out itself and was made for importance by token.")
    if loss == "cispo" and (config.epsilon_high or config.epsilon) < 1:
        notes.append("The cispo loss takes Epsilon high as the largest ratio itself; its paper uses about 5.")
    if config.delta is not None and loss in ("cispo", "sapo", "vespo"):
        notes.append(f"Delta is set, but the {loss} loss has no clip that it could bound.")
    if config.holds_output and config.sampling_correction == "none":
        notes.append(
            "Output is held to a grammar and Sampling correction is none: the policy learns from tokens as if it had chosen them freely. "
            "Automatic corrects for that."
        )
    if config.holds_output and config.sampling_correction.startswith("token"):
        notes.append(
            "Sampling correction by token leaves the states that held output leads to as they are; Automatic corrects whole completions."
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
