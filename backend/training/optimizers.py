"""Optimizers by name, with 32-bit or 8-bit state, and gradient clipping.

8-bit state (after arXiv:2110.02861) stores blocks of 256 one-byte codes and their largest magnitude in float32:
momentum x = ± (c / 127)⁴ · largest, squares x = (c / 255)⁸ · largest. Packing rounds stochastically, keyed by the
update's number; a square above 0 is never rounded to 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
from mlx import optimizers
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map

from backend.engine.graph import evaluate_after

BLOCK = 256  # smaller arrays stay in float32
SCALE = "_scale"  # suffix of block magnitudes


@dataclass(frozen=True, slots=True)
class Code:
    """Code `zero` ± c stands for (c / `most`) squared `squarings` times, as a share of the largest."""

    most: int
    zero: int
    squarings: int

    def share(self, c: mx.array) -> mx.array:
        share = c / self.most
        for _ in range(self.squarings):
            share = mx.square(share)
        return share


SIGNED = Code(most=127, zero=128, squarings=2)
UNSIGNED = Code(most=255, zero=0, squarings=3)


def pack(x: mx.array, code: Code, draw: mx.array) -> tuple[mx.array, mx.array]:
    """Bytes shaped like `x` and each block's largest magnitude. `draw`: uniform numbers in [0, 1), one per entry."""
    blocks, draws = _blocks(x.astype(mx.float32)), _blocks(draw)
    size = mx.abs(blocks)
    largest = size.max(axis=1, keepdims=True)
    share = size / mx.where(largest > 0, largest, 1.0)
    root = share
    for _ in range(code.squarings):
        root = mx.sqrt(root)
    # The largest c whose share is not above this one and that has a successor.
    below = mx.clip(mx.floor(root * code.most), 0, code.most - 1)
    low, high = code.share(below), code.share(below + 1)
    # Up with the probability that makes the mean right in the numbers, not in the codes, whose steps are uneven.
    c = below + (draws * (high - low) < share - low)
    if code is UNSIGNED:
        c = mx.where(size > 0, mx.maximum(c, 1), c)
    signed = mx.where(blocks < 0, -c, c) + code.zero
    return signed.astype(mx.uint8).reshape(-1)[: x.size].reshape(x.shape), largest[:, 0]


def unpack(codes: mx.array, largest: mx.array, code: Code) -> mx.array:
    c = _blocks(codes.astype(mx.float32)) - code.zero
    x = mx.sign(c) * code.share(mx.abs(c)) * largest[:, None]
    return x.reshape(-1)[: codes.size].reshape(codes.shape)


def _blocks(x: mx.array) -> mx.array:
    return mx.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)


class EightBitState(optimizers.Optimizer):
    """Mixin that keeps an optimizer's state packed between updates."""

    codes: ClassVar[Mapping[str, Code]]  # packed states → format
    span: ClassVar[int] = 1 << 20  # entries updated together; a multiple of BLOCK
    earlier: Sequence[mx.array] = ()  # results of the span before

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        updated = super().apply_gradients(gradients, parameters)
        self.earlier = ()
        return updated

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        super().init_single(parameter, state)
        if parameter.size >= BLOCK:
            for name, code in self.codes.items():
                state[name], state[name + SCALE] = pack(state[name], code, mx.zeros(parameter.shape))

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        if gradient.size < BLOCK:
            return super().apply_single(gradient, parameter, state)
        if gradient.size <= self.span:
            updated, packed = self._update_span(0, gradient, parameter, state)
        else:
            updated, packed = self._update_in_spans(gradient.reshape(-1), parameter, state)
        state.update(packed)
        return updated.astype(parameter.dtype)

    def _update_in_spans(
        self, gradient_N: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        parts: list[tuple[mx.array, dict[str, mx.array]]] = []
        parameter_N = parameter.reshape(-1)
        for number, start in enumerate(range(0, gradient_N.size, self.span)):
            here, blocks = slice(start, start + self.span), slice(start // BLOCK, (start + self.span) // BLOCK)
            own = {name: state[name].reshape(-1)[here] for name in self.codes}
            own |= {name + SCALE: state[name + SCALE][blocks] for name in self.codes}
            parts.append(self._update_span(number, gradient_N[here], parameter_N[here], own))
        packed = {name: mx.concatenate([part[name] for _, part in parts]) for name in parts[0][1]}
        shaped = {name: x if name.endswith(SCALE) else x.reshape(parameter.shape) for name, x in packed.items()}
        return mx.concatenate([updated for updated, _ in parts]).reshape(parameter.shape), shaped

    def _update_span(
        self, number: int, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        # Without the order mlx would unpack the state of all spans and parameters at once.
        gradient = evaluate_after(gradient, self.earlier).astype(mx.float32)
        plain = {name: unpack(state[name], state[name + SCALE], code) for name, code in self.codes.items()}
        updated = super().apply_single(gradient, parameter, plain)
        packed: dict[str, mx.array] = {}
        for place, (name, code) in enumerate(self.codes.items()):
            # A key is two words: which numbers of which state, and the update.
            word = mx.array(number * len(self.codes) + place, mx.uint32)
            draw = mx.random.uniform(shape=gradient.shape, key=mx.stack([word, self.step.astype(mx.uint32)]))
            packed[name], packed[name + SCALE] = pack(plain[name], code, draw)
        self.earlier = [updated, *packed.values()]
        return updated, packed


class AdamW8bit(EightBitState, optimizers.AdamW):
    codes: ClassVar = {"m": SIGNED, "v": UNSIGNED}


class Adam8bit(EightBitState, optimizers.Adam):
    codes: ClassVar = {"m": SIGNED, "v": UNSIGNED}


class Lion8bit(EightBitState, optimizers.Lion):
    codes: ClassVar = {"m": SIGNED}


class Muon8bit(EightBitState, optimizers.Muon):
    codes: ClassVar = {"v": SIGNED}  # mlx's name for Muon's momentum
    span: ClassVar = 1 << 40  # it needs the whole matrix


def state_arrays(optimizer: Optimizer) -> dict[str, mx.array]:
    """The optimizer's whole state by dotted name."""
    return dict(tree_flatten(optimizer.state))


def restore(optimizer: Optimizer, arrays: dict[str, mx.array]) -> None:
    """Restore `state_arrays` exactly, into the state object that the compiled update captured. Raises ValueError for an
    array that is missing, unknown or of another shape or type."""
    expected = state_arrays(optimizer)
    for name in sorted(expected.keys() | arrays.keys()):
        ours, theirs = (_described(state.get(name)) for state in (expected, arrays))
        if ours != theirs:
            raise ValueError(f"The optimizer's state {name!r} is {theirs} in the checkpoint and {ours} here.")
    _fill(optimizer.state, "", arrays)


def _fill(state: Any, path: str, arrays: dict[str, mx.array]) -> None:
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        name = f"{path}{key}"
        if isinstance(value, dict | list):
            _fill(value, f"{name}.", arrays)
        elif name in arrays:
            state[key] = arrays[name]


def _described(array: mx.array | None) -> str:
    return "missing" if array is None else f"{array.dtype} {tuple(array.shape)}"


def clip_by_norm(grads: Any, max_norm: float | None) -> tuple[Any, mx.array]:
    """Scale gradients to a global norm of at most `max_norm` (0, None: never); return them and the norm before, a
    scalar. A non-finite norm makes the gradients non-finite."""
    squares = [mx.square(g.astype(mx.float32)).sum() for _, g in tree_flatten(grads)]
    norm = mx.sqrt(sum(squares, mx.array(0.0)))
    if not max_norm:
        return grads, norm
    scale = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    return tree_map(lambda g: (g * scale).astype(g.dtype), grads), norm


LearningRate = Callable[[int], float]  # update number, from 0 → learning rate


@dataclass(frozen=True, slots=True)
class OwnUpdates:
    """Optimizer and schedule given by the calling program; None: the settings decide."""

    make: Callable[[float], Optimizer] | None = None  # learning rate of the settings → optimizer
    rate: LearningRate | None = None
    keeps_rate: bool = False  # the rate cannot be set from outside
    compiles: bool = True  # with `mx.compile`


SETTINGS_DECIDE = OwnUpdates()


def rate_of(optimizer: Optimizer) -> float:
    """The optimizer's learning rate; NaN without one."""
    try:
        return float(optimizer.learning_rate)
    except (KeyError, AttributeError, TypeError, ValueError):
        return float("nan")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Classes with 32-bit and, if any, 8-bit state; the settings that they take, and arguments that are fixed."""

    kind: type[Optimizer]
    kind_8bit: type[Optimizer] | None
    takes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])


# MLX leaves bias correction off: the first updates are then several times larger than in every other library. By
# default its Adafactor ignores the learning rate and derives its step size.
CORRECTED = {"bias_correction": True}
OPTIMIZERS: dict[str, Recipe] = {
    "adamw": Recipe(optimizers.AdamW, AdamW8bit, ("betas", "eps", "weight_decay"), CORRECTED),
    "adam": Recipe(optimizers.Adam, Adam8bit, ("betas", "eps"), CORRECTED),
    "muon": Recipe(optimizers.Muon, Muon8bit, ("weight_decay",)),
    "sgd": Recipe(optimizers.SGD, None, ("weight_decay",)),
    "lion": Recipe(optimizers.Lion, Lion8bit, ("betas", "weight_decay")),
    "adafactor": Recipe(
        optimizers.Adafactor, None, ("weight_decay",), {"relative_step": False, "scale_parameter": False}
    ),
    "rmsprop": Recipe(optimizers.RMSprop, None),
    "adagrad": Recipe(optimizers.Adagrad, None),
    "adadelta": Recipe(optimizers.AdaDelta, None),
    "adamax": Recipe(optimizers.Adamax, None, ("betas", "eps")),
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
    """Create an optimizer; unsupported settings are ignored. adamw is torch's: decoupled decay, bias correction
    (arXiv:1711.05101). muon orthogonalises updates of matrices. Raises ValueError for an unknown name or precision."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, not {name!r}.")
    recipe = OPTIMIZERS[name]
    kind = {32: recipe.kind, 8: recipe.kind_8bit}.get(bits)
    if kind is None:
        raise ValueError(f"The state of {name} is not built in {bits} bits.")
    settings = {"weight_decay": weight_decay, "betas": list(betas), "eps": epsilon}
    return kind(learning_rate, **{key: settings[key] for key in recipe.takes}, **recipe.fixed)  # pyright: ignore
