"""Optimizers whose moments take 8 bits a weight in place of 32 (after Dettmers et al., arXiv:2110.02861).

Numbers are stored block by block: 256 codes of one byte, and the largest magnitude of the block in float32, so that one outlier spoils the
precision of its block alone. An update unpacks the moments of an array, computes in float32 and packs them again.

The codes are a power of the stored number's share of the largest, where the paper has a table: small numbers get finer steps as there, in
a closed form that mlx fuses into the update.

    momentum, signed        x = ± (c / 127)⁴ · largest      from 4·10⁻⁹ of the largest, steps of 3 % at the top
    squares, never negative x = (c / 255)⁸ · largest        as their roots, which are what divides, in the fourth power

Packing rounds up or down at random so that the mean is the number itself: with beta 2 = 0.999 an update moves a mean square by a thousandth,
less than half a step, and rounding to nearest would never move it. The draws are keyed by the update's number, so a resumed run repeats
them. A square above 0 is never rounded to 0, or its update would be divided by epsilon alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx import optimizers

from backend.engine.evaluation_order import evaluate_after

BLOCK = 256
"""Numbers that share a largest magnitude. Smaller arrays stay in float32: their state is no burden."""
SCALE = "_scale"
"""After the name of a state's codes, that of its blocks' largest magnitudes."""


@dataclass(frozen=True, slots=True)
class Code:
    """How numbers become bytes: `zero` ± c, where c / `most`, squared `squarings` times, is a number's share of the largest."""

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
    """(bytes in the shape of `x`, largest magnitude of each block, float32). `draw`: uniform numbers in [0, 1), as many as `x`."""
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
        """(updated parameter, packed states) of the span with this number."""
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
