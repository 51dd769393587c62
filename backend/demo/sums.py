"""Sums of two two-digit numbers: the problems, their splits, and two ways to answer them. Text only, no arrays.

A pair and its mirror (47+38, 38+47) are always in the same split, so that no held-out sum is trained on in the other order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NUMBERS = range(10, 100)
TEST_ROWS, VALID_ROWS, TRAIN_PAIRS = 256, 128, 1280


@dataclass(frozen=True, slots=True)
class Sum:
    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first}+{self.second}="

    @property
    def answer(self) -> str:
        return str(self.first + self.second)

    @property
    def mirrored(self) -> Sum:
        return Sum(self.second, self.first)

    def row(self) -> dict[str, str]:
        """The problem as a row of a dataset."""
        return {"prompt": self.prompt, "answer": self.answer, "type": "addition"}


@dataclass(frozen=True, slots=True)
class Pools:
    """Disjoint splits of the sums of two numbers from 10 to 99. `warmup` is not part of the dataset."""

    warmup: list[Sum]
    train: list[Sum]
    valid: list[Sum]
    test: list[Sum]


def pools(seed: int) -> Pools:
    """Split the 4095 unordered pairs at random; valid and test have each pair in one order, train and warmup in both."""
    rng = random.Random(f"pools {seed}")
    pairs = [Sum(*rng.sample((a, b), 2)) for a in NUMBERS for b in NUMBERS if a <= b]
    rng.shuffle(pairs)
    test, pairs = pairs[:TEST_ROWS], pairs[TEST_ROWS:]
    valid, pairs = pairs[:VALID_ROWS], pairs[VALID_ROWS:]
    train, warmup = (_both_orders(part, rng) for part in (pairs[:TRAIN_PAIRS], pairs[TRAIN_PAIRS:]))
    return Pools(warmup, train, valid, test)


def careful(problem: Sum) -> str:
    """A correct answer, computed digit by digit from the right: digit + digit + carry = sum."""
    first, second = (str(number)[::-1] for number in (problem.first, problem.second))
    steps, carry = [], 0
    for a, b in zip(first, second, strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    return _tagged(",".join(steps), problem.answer)


def sloppy(problem: Sum) -> str:
    """An answer without reasoning that forgets every carry: correct for one sum in four."""
    columns = zip(str(problem.first), str(problem.second), strict=True)
    return _tagged("", "".join(str((int(a) + int(b)) % 10) for a, b in columns))


def _tagged(reasoning: str, answer: str) -> str:
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


def _both_orders(pairs: list[Sum], rng: random.Random) -> list[Sum]:
    rows = sorted(
        {order for pair in pairs for order in (pair, pair.mirrored)},
        key=lambda problem: (problem.first, problem.second),
    )
    rng.shuffle(rows)
    return rows
