"""Sums of two two-digit numbers: the problems, who may see which, and two ways of answering. Text only, no arrays.

A pair and its mirror (47+38, 38+47) always stand in the same pool, so that nothing held out is known by another name.
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
    """Every sum of two numbers from 10 to 99 belongs to one pool at most. `warmup` is never part of the dataset."""

    warmup: list[Sum]
    train: list[Sum]
    valid: list[Sum]
    test: list[Sum]


def pools(seed: int) -> Pools:
    """Deal the 4095 unordered pairs out; valid and test take each pair in one order, the others in both."""
    rng = random.Random(f"pools {seed}")
    pairs = [Sum(*rng.sample((a, b), 2)) for a in NUMBERS for b in NUMBERS if a <= b]
    rng.shuffle(pairs)
    test, pairs = pairs[:TEST_ROWS], pairs[TEST_ROWS:]
    valid, pairs = pairs[:VALID_ROWS], pairs[VALID_ROWS:]
    train, warmup = (_both_orders(part, rng) for part in (pairs[:TRAIN_PAIRS], pairs[TRAIN_PAIRS:]))
    return Pools(warmup, train, valid, test)


def careful(problem: Sum) -> str:
    """A right answer, worked out digit by digit from the right: digit + digit + carry = sum."""
    first, second = (str(number)[::-1] for number in (problem.first, problem.second))
    lines, carry = [], 0
    for a, b in zip(first, second, strict=True):
        total = int(a) + int(b) + carry
        lines.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    return _tagged(",".join(lines), problem.answer)


def sloppy(problem: Sum) -> str:
    """A guess without any thought, each column added by itself and every carry forgotten: right for one sum in four."""
    columns = zip(str(problem.first), str(problem.second), strict=True)
    return _tagged("", "".join(str((int(a) + int(b)) % 10) for a, b in columns))


def _tagged(thoughts: str, answer: str) -> str:
    return f"<think>{thoughts}</think><answer>{answer}</answer>"


def _both_orders(pairs: list[Sum], rng: random.Random) -> list[Sum]:
    rows = sorted({order for pair in pairs for order in (pair, pair.mirrored)}, key=lambda one: (one.first, one.second))
    rng.shuffle(rows)
    return rows
