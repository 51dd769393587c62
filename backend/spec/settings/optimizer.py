"""How gradients become updates: the optimizer and its learning rate."""

from __future__ import annotations

from pydantic import BaseModel

from backend.spec.setting import setting
from backend.spec.settings.limits import NEVER

_DECAYING = ("lr_schedule", ("cosine", "linear"))


class OptimizerFields(BaseModel):
    """How gradients become updates: the optimizer and its learning rate: the fields of `backend.spec.config.Config` about it."""

    # fmt: off
    learning_rate: float = setting(1e-5, "training", "Learning Rate", "Size of each update. LoRA wants roughly ten times "
                                   "what full fine-tuning wants.", gt=0, le=10)
    optimizer: str = setting(
        "adamw", "training", "Optimizer", "Turns gradients into updates.",
        choices=[("adamw", "AdamW", "Adam with weight decay apart from the gradient: the usual choice."),
                 ("adam", "Adam", ""), ("muon", "Muon", "Orthogonalised momentum for matrices."), ("sgd", "SGD", ""),
                 ("lion", "Lion", "Sign of the momentum; wants a smaller learning rate."),
                 ("adafactor", "Adafactor", "Little memory."), ("rmsprop", "RMSprop", ""), ("adagrad", "Adagrad", ""),
                 ("adadelta", "AdaDelta", ""), ("adamax", "Adamax", "")],
    )
    weight_decay: float = setting(0.01, "training", "Weight decay", "Pulls weights towards zero at each update, in the "
                                  "optimizers that have it.", ge=0, le=1, advanced=True,
                                  when=("optimizer", ("adamw", "muon", "sgd", "lion", "adafactor")))
    adam_beta1: float = setting(0.9, "training", "Beta 1", "Memory of the mean gradient.", ge=0, lt=1, advanced=True,
                                when=("optimizer", ("adam", "adamw", "adamax", "lion")))
    adam_beta2: float = setting(0.999, "training", "Beta 2", "Memory of the squared gradient.", ge=0, lt=1, advanced=True,
                                when=("optimizer", ("adam", "adamw", "adamax", "lion")))
    max_grad_norm: float = setting(1.0, "training", "Max gradient norm", "Longer gradients are shortened to this length. "
                                   "0 never shortens.", ge=0, le=1_000_000, advanced=True)
    lr_schedule: str = setting(
        "constant", "training", "LR Schedule", "How the learning rate changes over the run.",
        choices=[("constant", "Constant", "The same from the first step to the last, without warm-up."),
                 ("cosine", "Cosine decay", "Warms up, then falls along a cosine to the final rate."),
                 ("linear", "Linear", "Warms up, then falls along a line to the final rate.")],
    )
    lr_warmup_steps: int = setting(40, "training", "Warm-up", "Updates over which the rate rises to its peak.", ge=0, le=NEVER,
                                   unit="updates", when=_DECAYING)
    lr_warmup_init: float = setting(1e-7, "training", "Warm-up start", "The rate of the first update.", ge=0, le=10, when=_DECAYING)
    lr_decay_fraction: float = setting(0.8, "training", "Decay fraction", "Share of the run over which the rate falls, "
                                       "counted from the end of the warm-up. Above 1 the run ends on the way down.",
                                       gt=0, le=10, when=_DECAYING)
    lr_final: float = setting(2e-6, "training", "Final rate", "The rate once it has fallen.", ge=0, le=10, when=_DECAYING)
    # fmt: on
