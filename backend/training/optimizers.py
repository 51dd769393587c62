"""Optimizers by name, their state in 32 or 8 bits and as named arrays, and gradient clipping.

In 8 bits (after Dettmers et al., arXiv:2110.02861) moments are stored block by block: 256 codes of one byte, and the
largest magnitude of the block in float32, so that one outlier spoils the precision of its block alone. The codes are
powers of a number's share of the largest, which mlx fuses into the update; small numbers get finer steps, as in the
paper's table:

    momentum, signed        x = ± (c / 127)⁴ · largest      from 4·10⁻⁹ of the largest, steps of 3 % at the top
    squares, never negative x = (c / 255)⁸ · largest        as their roots, which divide, in the fourth power

Packing rounds up or down at random so that the mean is the number itself: with beta 2 = 0.999 an update moves a mean
square by a thousandth, less than half a step, and rounding to nearest would never move it. The draws are keyed by the
update's number, so a resumed run repeats them. A square above 0 is never rounded to 0, or its update would be divided
by epsilon alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx import optimizers
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map

from backend.engine.graph import evaluate_after

BLOCK = 256
"""Numbers that share a largest magnitude. Smaller arrays stay in float32: their state is no burden."""
SCALE = "_scale"
"""After the name of a state's codes, that of its blocks' largest magnitudes."""


@dataclass(frozen=True, slots=True)
class Code:
    """How numbers become bytes: `zero` ± c, where c / `most`, squared `squarings` times, is a number's share of the
    largest."""

    most: int
    zero: int
    squarings: int

    def share(self, c: mx.array) -> mx.array:
        """The share of the largest that c stands for, c = 0 … `most`."""
        share = c / self.most
        for _ in range(self.squarings):
            share = mx.square(share)
        return share

    def c_below(self, share: mx.array) -> mx.array:
        """The last c whose share is not above this one, and that has one after it."""
        for _ in range(self.squarings):
            share = mx.sqrt(share)
        return mx.clip(mx.floor(share * self.most), 0, self.most - 1)


SIGNED = Code(most=127, zero=128, squarings=2)
UNSIGNED = Code(most=255, zero=0, squarings=3)


def pack(x: mx.array, code: Code, draw: mx.array) -> tuple[mx.array, mx.array]:
    """(bytes in the shape of `x`, largest magnitude of each block, float32). `draw`: uniform numbers in [0, 1), as
    many as `x`."""
    blocks, draws = _blocks(x.astype(mx.float32)), _blocks(draw)
    size = mx.abs(blocks)
    largest = size.max(axis=1, keepdims=True)
    share = size / mx.where(largest > 0, largest, 1.0)
    below = code.c_below(share)
    low, high = code.share(below), code.share(below + 1)
    # Up with the probability that makes the mean right in the numbers, not in the codes, whose steps are uneven.
    c = below + (draws * (high - low) < share - low)
    if code is UNSIGNED:
        c = mx.where(size > 0, mx.maximum(c, 1), c)
    signed = mx.where(blocks < 0, -c, c) + code.zero
    return signed.astype(mx.uint8).reshape(-1)[: x.size].reshape(x.shape), largest[:, 0]


def unpack(codes: mx.array, largest: mx.array, code: Code) -> mx.array:
    """The numbers, float32, in the shape of `codes`."""
    c = _blocks(codes.astype(mx.float32)) - code.zero
    x = mx.sign(c) * code.share(mx.abs(c)) * largest[:, None]
    return x.reshape(-1)[: codes.size].reshape(codes.shape)


def _blocks(x: mx.array) -> mx.array:
    """[blocks, BLOCK], the last one filled up with zeros."""
    return mx.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)


class EightBitState(optimizers.Optimizer):
    """Keeps an optimizer's states packed between updates; to be mixed in before the optimizer's own class."""

    codes: ClassVar[Mapping[str, Code]]
    """Names of the states that are packed → how."""
    span: ClassVar[int] = 1 << 20
    """Numbers of an array that are updated together, so that little is unpacked at once; a multiple of BLOCK."""

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
            # Without the order mlx would unpack all spans at once.
            before = [parts[-1][0], *parts[-1][1].values()] if parts else []
            parts.append(self._update_span(number, evaluate_after(gradient_N[here], before), parameter_N[here], own))
        packed = {name: mx.concatenate([part[name] for _, part in parts]) for name in parts[0][1]}
        shaped = {name: x if name.endswith(SCALE) else x.reshape(parameter.shape) for name, x in packed.items()}
        return mx.concatenate([updated for updated, _ in parts]).reshape(parameter.shape), shaped

    def _update_span(
        self, number: int, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        plain = {name: unpack(state[name], state[name + SCALE], code) for name, code in self.codes.items()}
        updated = super().apply_single(gradient.astype(mx.float32), parameter, plain)
        packed: dict[str, mx.array] = {}
        for place, (name, code) in enumerate(self.codes.items()):
            # A key is two words: which numbers of which state, and the update.
            word = mx.array(number * len(self.codes) + place, mx.uint32)
            draw = mx.random.uniform(shape=gradient.shape, key=mx.stack([word, self.step.astype(mx.uint32)]))
            packed[name], packed[name + SCALE] = pack(plain[name], code, draw)
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
    """The optimizer's whole state by dotted name, step count included, as `mx.save_safetensors` takes it."""
    return dict(tree_flatten(optimizer.state))


def restore(optimizer: Optimizer, arrays: dict[str, mx.array]) -> None:
    """Put `state_arrays` back, exactly, into an optimizer initialised with the same parameters.

    The state stays the same object, so the compiled update that captured it sees the change. Raises ValueError
    naming the first array that is missing, unknown or of another shape or type: half a state would go on training
    silently.
    """
    expected = state_arrays(optimizer)
    for name in sorted(expected.keys() | arrays.keys()):
        ours, theirs = (_described(state.get(name)) for state in (expected, arrays))
        if ours != theirs:
            raise ValueError(f"The optimizer's state {name!r} is {theirs} in the checkpoint and {ours} here.")
    _fill(optimizer.state, "", arrays)


def _fill(state: Any, path: str, arrays: dict[str, mx.array]) -> None:
    """Put arrays into a state's own dicts and lists: the state of an optimizer made of several is another dict at
    every look."""
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        name = f"{path}{key}"
        if isinstance(value, dict | list):
            _fill(value, f"{name}.", arrays)
        elif name in arrays:
            state[key] = arrays[name]


def _described(array: mx.array | None) -> str:
    return "missing" if array is None else f"{array.dtype} {tuple(array.shape)}"


def clip_by_norm(grads: Any, max_norm: float | None) -> tuple[Any, mx.array]:
    """The gradients scaled down to a global norm of at most `max_norm`, and their norm before that, a scalar.

    `max_norm` 0 or None never clips. Squares are summed in float32, because 300² overflows float16; each gradient keeps
    its dtype. A norm that is not finite makes the gradients so too: check it before updating.
    """
    squares = [mx.square(g.astype(mx.float32)).sum() for _, g in tree_flatten(grads)]
    norm = mx.sqrt(sum(squares, mx.array(0.0)))
    if not max_norm:
        return grads, norm
    scale = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    return tree_map(lambda g: (g * scale).astype(g.dtype), grads), norm


LearningRate = Callable[[int], float]
"""The number of an update, from 0 → its learning rate."""


@dataclass(frozen=True, slots=True)
class OwnUpdates:
    """What a program has given for its run; None for what the settings decide."""

    make: Callable[[float], Optimizer] | None = None
    """Learning rate of the settings → a new optimizer."""
    rate: LearningRate | None = None
    keeps_rate: bool = False
    """True if the learning rate is the optimizer's own affair: it has several, none, or a schedule inside."""
    compiles: bool = True
    """True if `mx.compile` may trace its update: code of somebody else may look at its numbers, or count in Python."""


SETTINGS_DECIDE = OwnUpdates()


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate that an optimizer says it has; NaN for one that has none."""
    try:
        return float(optimizer.learning_rate)
    except (KeyError, AttributeError, TypeError, ValueError):
        return float("nan")


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
    "adamw": Recipe(_adamw(), _adamw(AdamW8bit), has_decay=True, has_betas=True, has_epsilon=True),
    "adam": Recipe(_adam(), _adam(Adam8bit), has_betas=True, has_epsilon=True),
    "muon": Recipe(_muon(), _muon(Muon8bit), has_decay=True),
    "sgd": Recipe(lambda about: optimizers.SGD(about.learning_rate, weight_decay=about.weight_decay), has_decay=True),
    "lion": Recipe(_lion(), _lion(Lion8bit), has_decay=True, has_betas=True),
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
