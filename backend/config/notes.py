"""Remarks on valid settings that are probably not meant, and on values far from the usual. They stop nothing."""

from collections.abc import Iterator

from backend.config.config import SETTINGS, Config
from backend.config.updates import DEFAULT_FINAL, OWN, final_rate
from backend.utils.errors import ConfigProblem


def config_notes(config: Config) -> Iterator[str]:
    loss, level, correction = config.grpo_loss_type, config.importance_sampling_level, config.sampling_correction
    final = final_rate(config.learning_rate, config.lr_final)
    falls = SETTINGS["lr_final"].applies(config.model_dump())
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        yield f"Importance by sequence with the {loss} loss weighs long completions more; grpo and luspo do not."
    if loss == "luspo" and level != "sequence":
        yield "The luspo loss was made for importance by sequence."
    if loss == "vespo" and level != "token":
        yield "The vespo loss computes the completion's ratio itself and was made for importance by token."
    if loss == "cispo" and (config.epsilon_high or config.epsilon) < 1:
        yield "The cispo loss takes Epsilon high as the largest ratio itself; its paper uses about 5."
    if config.delta is not None and loss in ("cispo", "sapo", "vespo"):
        yield f"Delta is set, but the {loss} loss has no clip that it could bound."
    if config.holds_output and correction == "none":
        what = "Output is constrained and Sampling correction is none"
        yield f"{what}: the policy learns from tokens as if it had chosen them freely. Automatic corrects for that."
    if config.holds_output and correction.startswith("token"):
        what = "Sampling correction by token does not correct the states that constrained output leads to"
        yield f"{what}; Automatic corrects whole completions."
    if config.self_distillation_weight > 0 and config.beta == 0 and config.teacher_model_kind == "live":
        what = "Self-distillation has no anchor: Beta is 0 and the teacher moves with the policy, so both may drift"
        yield f"{what}. Set Beta above 0, or Teacher to Reference."
    if config.optimizer == OWN:
        yield f"The optimizer is {config.own_optimizer}, an object of the program that called train()."
    if config.lr_schedule == OWN:
        what = f"The learning rate is that of {config.own_schedule}, an object of the program"
        yield f"{what}; the setting has no effect."
    if falls and config.lr_final == DEFAULT_FINAL > config.learning_rate:
        yield f"The default final rate is above the learning rate, so the rate falls to a fifth of it: {final:g}."


USUAL: dict[str, tuple[float, float, str]] = {  # setting → (lowest, highest unremarkable value, what is usual)
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


def unusual(config: Config) -> list[ConfigProblem]:
    """A message for each setting of a valid config that has an effect and is far from the usual."""
    is_full = config.train_type == "full"
    without_effect = {
        "iters": config.epochs > 0,
        "scale": is_full or config.lora_alpha is not None,
        "rank": is_full,
        "dropout": is_full,
        "learning_rate": config.optimizer in ("sgd", "adagrad", "adadelta", "muon"),  # the rate is no size of a step
        "epsilon": config.grpo_loss_type == "cispo",
    }
    return [
        ConfigProblem(key, f"This is unusually {'small' if value < low else 'large'}: {usual}.")
        for key, (low, high, usual) in USUAL.items()
        if not low <= (value := float(getattr(config, key))) <= high and not without_effect.get(key)
    ]
