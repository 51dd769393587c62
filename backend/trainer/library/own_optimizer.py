"""An optimizer that is an object of the program: its words in the settings, and whether it can be saved and go on exactly.

A run keeps an optimizer's `state`, arrays by name, and nothing else of it. What an update depends on beside the state, the gradient and
the constants of the object would be lost by a checkpoint, so each optimizer is tried out on a few small arrays before the run begins.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from backend.rewards.runner.error_text import class_name, describe_error
from backend.training.optimizers import rate_of, restore, state_arrays
from backend.utils.errors import UserError
from backend.utils.text import quote

SETTING = "optimizer"
LONGEST = 200
"""Characters of the words for an optimizer."""
_ERROR = 100
_PLAIN = (bool, int, float, str, type(None))

GivenOptimizer = Optimizer | Callable[[float], Optimizer]


class ProgramOptimizer(Optimizer):
    """A program's optimizer as the learner uses it: what its update raises becomes a UserError with its name."""

    def __init__(self, optimizer: Optimizer) -> None:  # no state of its own: mlx's __init__ would make one
        self.optimizer = optimizer

    def init(self, parameters: Any) -> None:
        self._named("its init", lambda: self.optimizer.init(parameters))

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        return self._named("an update", lambda: self.optimizer.apply_gradients(gradients, parameters))

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def learning_rate(self) -> Any:
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.optimizer.learning_rate = learning_rate

    def _named(self, where: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            what = describe_error(error, None, _ERROR)
            raise UserError(
                SETTING, f"{where[0].upper()}{where[1:]} of {class_name(self.optimizer)} raised {what}."
            ) from error


# ── what was given ───────────────────────────────────────────────────────────────────────────────────────────────────


def maker(given: GivenOptimizer) -> Callable[[float], Optimizer]:
    """Learning rate → a new optimizer: a copy of an object, whose own learning rate it has, or what a callable returns for the rate.
    Raises UserError for what is neither, and for an object that is in use already; what is returned raises UserError too."""
    if isinstance(given, Optimizer):
        _require_unused(given)
        return lambda rate: copy.deepcopy(given)
    if not callable(given):
        sentence = f"An optimizer is one of mlx.optimizers, or gives one when called with a learning rate; {class_name(given)} is neither."
        raise UserError(SETTING, sentence)
    return functools.partial(_made, given)


def _made(make: Callable[[float], Any], rate: float) -> Optimizer:
    try:
        made = make(rate)
    except Exception as error:
        what = describe_error(error, None, _ERROR)
        raise UserError(SETTING, f"Called with the learning rate {rate:g}, it raised {what}.") from error
    if not isinstance(made, Optimizer):
        raise UserError(
            SETTING, f"Called with a learning rate, it gave {class_name(made)} and no optimizer of mlx.optimizers."
        )
    return made


def _require_unused(optimizer: Optimizer) -> None:
    if any(
        each.state.keys() - {"step", "learning_rate"} or int(each.state.get("step", 0)) for each in _leaves(optimizer)
    ):
        sentence = f"This {class_name(optimizer)} has a state from elsewhere; a run begins with a new optimizer."
        raise UserError(SETTING, sentence)


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that one is made of, as a MultiOptimizer is; [] for most."""
    inside: Any = getattr(optimizer, "optimizers", None)
    parts = cast("list[Any]", inside) if isinstance(inside, list) else []
    return parts if all(isinstance(part, Optimizer) for part in parts) else []


def _leaves(optimizer: Optimizer) -> list[Any]:
    return [leaf for part in _parts(optimizer) for leaf in _leaves(part)] or [optimizer]


def keeps_rate(optimizer: Optimizer) -> bool:
    """Whether a rate cannot be set from outside: there are several, there is none, or a schedule inside sets it."""
    schedules: Mapping[str, Any] = vars(optimizer).get("_schedulers", {})
    return bool(_parts(optimizer)) or "learning_rate" in schedules or rate_of(optimizer) != rate_of(optimizer)


def is_of_mlx(optimizer: Optimizer) -> bool:
    """Whether all of its code is mlx's."""
    return all(type(each).__module__.startswith("mlx.") for each in (optimizer, *_leaves(optimizer)))


def described(optimizer: Optimizer) -> str:
    """Its class and constants, as in “Lion(betas=[0.9, 0.99], weight_decay=0.0)”."""
    parts = [described(part) for part in _parts(optimizer)]
    constants = [f"{name}={value!r}" for name, value in vars(optimizer).items() if name[0] != "_" and _is_plain(value)]
    return quote(f"{class_name(optimizer)}({', '.join([*parts, *constants])})", LONGEST)


def _is_plain(value: Any) -> bool:
    values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, _PLAIN) for each in values)


# ── whether it can go on from a checkpoint ───────────────────────────────────────────────────────────────────────────


def try_out(make: Callable[[float], Optimizer]) -> None:
    """Two updates, the state into another object of its kind, and a third update with both. Raises UserError where they differ, and where
    a state would not survive a file."""
    optimizer = ProgramOptimizer(make(1e-3))
    parameters = _arrays(0)
    optimizer.init(parameters)
    for number in (1, 2):
        before = _constants(optimizer.optimizer)
        parameters = optimizer.apply_gradients(_arrays(number), parameters)
        mx.eval(parameters, optimizer.state)
        _require_same_constants(optimizer.optimizer, before)
    _require_arrays(optimizer)
    other = ProgramOptimizer(make(1e-3))
    other.init(_arrays(0))
    try:
        restore(other, state_arrays(optimizer))
    except ValueError:
        sentence = f"The state of {class_name(optimizer.optimizer)} after an update has other arrays than init makes; make them all there."
        raise UserError(SETTING, sentence) from None
    outcomes = [(each.apply_gradients(_arrays(3), parameters), each.state) for each in (optimizer, other)]
    pairs = zip(*(tree_flatten(outcome) for outcome in outcomes), strict=True)
    if not all(bool(mx.array_equal(one, two, equal_nan=True)) for (_, one), (_, two) in pairs):
        sentence = f"An update of {class_name(optimizer.optimizer)} depends on more than its state, which is all that a checkpoint keeps of it."
        raise UserError(SETTING, sentence)


def _arrays(number: int) -> Any:
    """Arrays in the shapes that a LoRA layer, a vector and a matrix have, by the names of a model."""
    draw = functools.partial(mx.random.normal, key=mx.random.key(number))
    lora = {"lora_a": draw((16, 4)), "lora_b": draw((4, 16))}
    return {
        "layers": [{"self_attn": {"q_proj": lora}, "norm": {"weight": draw((16,))}}],
        "head": {"weight": draw((8, 16))},
    }


def _constants(optimizer: Optimizer) -> dict[str, str]:
    """What an optimizer has beside its state, in words that change where it does."""
    return {
        f"{type(each).__name__}.{name}": repr(value)
        for each in (optimizer, *_leaves(optimizer))
        for name, value in vars(each).items()
        if name not in ("_state", "_initialized")
    }


def _require_same_constants(optimizer: Optimizer, before: Mapping[str, str]) -> None:
    after = _constants(optimizer)
    changed = next((name for name in {**before, **after} if before.get(name) != after.get(name)), None)
    if changed is not None:
        sentence = f"An update changes {quote(changed, 60)}, which a checkpoint does not keep; hold it in the optimizer's state, as an array."
        raise UserError(SETTING, sentence)


def _require_arrays(optimizer: ProgramOptimizer) -> None:
    for name, value in tree_flatten(optimizer.state):
        if not isinstance(value, mx.array):
            sentence = f"The state of {class_name(optimizer.optimizer)} has {quote(name, 40)}, which is {class_name(value)}: a checkpoint keeps arrays."
            raise UserError(SETTING, sentence)
