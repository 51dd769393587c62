"""Optimizers by the names of the setting, in 32 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx import optimizers
from mlx.optimizers import Optimizer

from backend.training.optimizers import eight_bit


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The settings that optimizers share."""

    learning_rate: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8


Make = Callable[[Hyperparameters], Optimizer]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an optimizer, and which of the shared settings it has; the others are ignored."""

    make: Make
    make_8bit: Make | None = None
    """With its state in 8 bits; None where that is not built."""
    has_decay: bool = False
    has_betas: bool = False
    has_epsilon: bool = False


def _adam(kind: type[optimizers.Adam] = optimizers.Adam) -> Make:
    # MLX leaves bias correction off: the first updates are then several times larger than in every other library.
    return lambda about: kind(about.learning_rate, list(about.betas), about.epsilon, bias_correction=True)


def _adamw(kind: type[optimizers.AdamW] = optimizers.AdamW) -> Make:
    return lambda about: kind(
        about.learning_rate, list(about.betas), about.epsilon, about.weight_decay, bias_correction=True
    )


def _lion(kind: type[optimizers.Lion] = optimizers.Lion) -> Make:
    return lambda about: kind(about.learning_rate, betas=list(about.betas), weight_decay=about.weight_decay)


def _muon(kind: type[optimizers.Muon] = optimizers.Muon) -> Make:
    return lambda about: kind(about.learning_rate, weight_decay=about.weight_decay)


def _adafactor(about: Hyperparameters) -> Optimizer:
    # By default Adafactor derives a step size of its own and ignores the learning rate.
    rate, decay = about.learning_rate, about.weight_decay
    return optimizers.Adafactor(rate, weight_decay=decay, relative_step=False, scale_parameter=False)


OPTIMIZERS: dict[str, Recipe] = {
    "adamw": Recipe(_adamw(), _adamw(eight_bit.AdamW8bit), has_decay=True, has_betas=True, has_epsilon=True),
    "adam": Recipe(_adam(), _adam(eight_bit.Adam8bit), has_betas=True, has_epsilon=True),
    "muon": Recipe(_muon(), _muon(eight_bit.Muon8bit), has_decay=True),
    "sgd": Recipe(lambda about: optimizers.SGD(about.learning_rate, weight_decay=about.weight_decay), has_decay=True),
    "lion": Recipe(_lion(), _lion(eight_bit.Lion8bit), has_decay=True, has_betas=True),
    "adafactor": Recipe(_adafactor, has_decay=True),
    "rmsprop": Recipe(lambda about: optimizers.RMSprop(about.learning_rate)),
    "adagrad": Recipe(lambda about: optimizers.Adagrad(about.learning_rate)),
    "adadelta": Recipe(lambda about: optimizers.AdaDelta(about.learning_rate)),
    "adamax": Recipe(
        lambda about: optimizers.Adamax(about.learning_rate, list(about.betas), about.epsilon),
        has_betas=True,
        has_epsilon=True,
    ),
}


def optimizer(
    name: str,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    bits: int = 32,
) -> Optimizer:
    """A new optimizer, its state in 32 or 8 bits. Settings that it has not are ignored (`OPTIMIZERS` says which).

    adamw is torch's: decoupled weight decay, bias correction on (Loshchilov and Hutter, arXiv:1711.05101). muon
    orthogonalises the updates of matrices; parameters of one dimension get plain momentum. Raises ValueError for a name
    that is not in `OPTIMIZERS`, and for one whose state is not built in so many bits.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, not {name!r}.")
    make = {32: OPTIMIZERS[name].make, 8: OPTIMIZERS[name].make_8bit}.get(bits)
    if make is None:
        raise ValueError(f"The state of {name} is not built in {bits} bits.")
    return make(Hyperparameters(learning_rate, weight_decay, betas, epsilon))
