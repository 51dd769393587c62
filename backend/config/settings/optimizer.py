"""How gradients become updates: the optimizer and its learning rate."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.learning_rate import DEFAULT_FINAL
from backend.config.setting import setting
from backend.config.settings.headings import LEARNING
from backend.config.settings.limits import NEVER

EIGHT_BIT = ("adamw", "adam", "lion", "muon")
"""Optimizers whose state may take 8 bits. A test holds it against those that the engine builds."""
OWN = "own"
"""Of `optimizer` and `lr_schedule`: an object of the program that calls `backend.train`, which alone can train with it."""
_FALLING = (
    "cosine", "linear", "cosine_with_restarts", "polynomial", "exponential", "step", "warmup_stable_decay",
)  # fmt: skip
_WARMING = ("constant_with_warmup", *_FALLING, "inverse_sqrt")
_RISES, _FALLS = ("lr_schedule", _WARMING), ("lr_schedule", _FALLING)


class OptimizerFields(BaseModel):
    """How gradients become updates: the optimizer and its learning rate: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    learning_rate: float = setting(1e-5, "training", "Learning Rate", "Size of each update. LoRA wants roughly ten times "
                                   "what full fine-tuning wants.", gt=0, le=10, group=LEARNING)
    optimizer: str = setting(
        "adamw", "training", "Optimizer", "Turns gradients into updates.",
        choices=[("adamw", "AdamW", "Adam with weight decay apart from the gradient: the usual choice."),
                 ("adam", "Adam", ""), ("muon", "Muon", "Orthogonalised momentum for matrices."), ("sgd", "SGD", ""),
                 ("lion", "Lion", "Sign of the momentum; wants a smaller learning rate."),
                 ("adafactor", "Adafactor", "Little memory."), ("rmsprop", "RMSprop", ""), ("adagrad", "Adagrad", ""),
                 ("adadelta", "AdaDelta", ""), ("adamax", "Adamax", ""),
                 (OWN, "Of a program", "An optimizer that a program passes to backend.train.", True)], group=LEARNING,
    )
    own_optimizer: str = setting("", "training", "Optimizer of the program", "Class and numbers of the optimizer that a program passed to "
                                 "backend.train, which writes this down.", advanced=True, when=("optimizer", (OWN,)), group=LEARNING)
    optimizer_bits: str = setting(
        "32", "training", "Optimizer state", "The precision of what the optimizer remembers of every weight that learns.",
        choices=[("32", "32-bit", "Exact. AdamW remembers twice the size of the weights that learn."),
                 ("8", "8-bit", "A quarter of the memory, rounded block by block. Matters under full fine-tuning; adapters are small.")],
        advanced=True, when=("optimizer", EIGHT_BIT), group=LEARNING,
    )
    weight_decay: float = setting(0.01, "training", "Weight decay", "Pulls weights towards zero at each update, in the "
                                  "optimizers that have it.", ge=0, le=1, advanced=True,
                                  when=("optimizer", ("adamw", "muon", "sgd", "lion", "adafactor")), group=LEARNING)
    adam_beta1: float = setting(0.9, "training", "Beta 1", "Memory of the mean gradient.", ge=0, lt=1, advanced=True,
                                when=("optimizer", ("adam", "adamw", "adamax", "lion")), group=LEARNING)
    adam_beta2: float = setting(0.999, "training", "Beta 2", "Memory of the squared gradient.", ge=0, lt=1, advanced=True,
                                when=("optimizer", ("adam", "adamw", "adamax", "lion")), group=LEARNING)
    adam_epsilon: float = setting(1e-8, "training", "Adam epsilon", "Added to the root of the squared gradient before it divides: keeps "
                                  "updates of weights with hardly any gradient small. Larger is calmer.", gt=0, le=1, advanced=True,
                                  when=("optimizer", ("adam", "adamw", "adamax")), group=LEARNING)
    max_grad_norm: float = setting(1.0, "training", "Max gradient norm", "Longer gradients are shortened to this length. "
                                   "0 never shortens.", ge=0, le=1_000_000, advanced=True, group=LEARNING)
    neftune_noise_alpha: float = setting(
        0.0, "training", "NEFTune noise", "Adds uniform noise of this size, divided by the root of tokens times embedding width, to the input "
        "embeddings while learning (arXiv:2310.05914). Completions are sampled without it, and learning takes longer: prompts are read "
        "once for every completion. 5 to 15 is usual; 0 adds none.", ge=0, le=1_000, advanced=True, used_by=("duration",), group=LEARNING,
    )
    lr_schedule: str = setting(
        "constant", "training", "LR Schedule", "How the learning rate changes over the run.",
        choices=[("constant", "Constant", "The same from the first step to the last; warms up only where a warm-up ratio is given."),
                 ("constant_with_warmup", "Constant with warm-up", "Warms up, then stays."),
                 ("cosine", "Cosine decay", "Warms up, then falls along a cosine to the final rate."),
                 ("linear", "Linear", "Warms up, then falls along a line to the final rate."),
                 ("cosine_with_restarts", "Cosine with restarts", "The cosine several times over, each from the full rate."),
                 ("polynomial", "Polynomial", "As Linear, with the share that is left raised to a power."),
                 ("exponential", "Exponential", "Falls by the same factor at every update, to the final rate."),
                 ("step", "Step", "Falls to the final rate in equal factors, at equal distances."),
                 ("inverse_sqrt", "Inverse square root", "Falls as one over the root of the updates, whatever the length of the run."),
                 ("warmup_stable_decay", "Warm-up, stable, decay", "Warms up, stays, and falls along a cosine at the end of the run."),
                 (OWN, "Of a program", "A function of the update that a program passes to backend.train.", True)], group=LEARNING,
    )
    own_schedule: str = setting("", "training", "Schedule of the program", "Name and rates of the schedule that a program passed to "
                                "backend.train, which writes this down. Learning Rate has no effect then.", advanced=True,
                                when=("lr_schedule", (OWN,)), group=LEARNING)
    lr_warmup_steps: int = setting(40, "training", "Warm-up", "Updates over which the rate rises to its peak.", ge=0, le=NEVER,
                                   unit="updates", when=_RISES, group=LEARNING)
    lr_warmup_ratio: float | None = setting(None, "training", "Warm-up ratio", "Warm-up as a share of the run's updates, in place of their "
                                            "number, and under every schedule. Empty: the number counts.", ge=0, le=1, advanced=True, group=LEARNING)
    lr_warmup_init: float = setting(1e-7, "training", "Warm-up start", "The rate of the first update.", ge=0, le=10, when=_RISES, group=LEARNING)
    lr_decay_fraction: float = setting(0.8, "training", "Decay fraction", "Share of the run over which the rate falls, "
                                       "counted from the end of the warm-up (in Warm-up, stable, decay: back from the end of the run). "
                                       "Above 1 the run ends on the way down.", gt=0, le=10, when=_FALLS, group=LEARNING)
    lr_final: float | None = setting(DEFAULT_FINAL, "training", "Final rate", "The rate once it has fallen. Empty: a fifth of the learning "
                                     "rate, which also takes the default's place under a learning rate below it.", ge=0, le=10, when=_FALLS, group=LEARNING)
    lr_cycles: int = setting(1, "training", "Schedule cycles", "How often the cosine is run through, or in how many steps the rate falls.",
                             ge=1, le=1_000_000, advanced=True, when=("lr_schedule", ("cosine_with_restarts", "step")), group=LEARNING)
    lr_power: float = setting(1.0, "training", "Schedule power", "1 falls along a line; above 1 quickly at first, below 1 late.",
                              gt=0, le=100, advanced=True, when=("lr_schedule", ("polynomial",)), group=LEARNING)
    # fmt: on
