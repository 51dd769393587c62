"""A sum's seconds in two unknowns, fitted to some of the measured points and held against the others.

    seconds = 2 (N − 1) (added latency + message) + wire + work · wire bytes · max(1, N / cores)

`wire bytes` are 2 (N − 1) / N of the vector, and `wire` is their time at the nominal rate less the frames' share, which nothing is fitted
to. `message` is the software's part of a latency; `work` what copying and adding a byte costs where all ranks have this machine's cores, so
that from three ranks on they wait for each other.

Points are the lower quartile of a point's sums: other work went on on the machine, and the median is what that made of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.spec.distributed.network_cost import ETHERNET_SHARE

Point = dict[str, Any]
"""A row of docs/scale.json: backend, ranks, bits_per_second, latency_s, bytes, low, seconds, high, sums, sent, load."""
CORES = 2
SMALLEST = 250_000
"""Bytes of vectors that errors are told of. A sum of one number takes what the scheduler of a shared machine gives it, and a small vector
goes through the token bucket in a burst."""


@dataclass(frozen=True, slots=True)
class FittedSums:
    """The unknowns of one backend."""

    message_s: float
    work_s: float

    def seconds(self, point: Point) -> float:
        return float(np.dot(_columns(point), (self.message_s, self.work_s))) + _known(point)


def _wire_bytes(point: Point) -> float:
    return 2 * (point["ranks"] - 1) / point["ranks"] * point["bytes"]


def _known(point: Point) -> float:
    payload = ETHERNET_SHARE * point["bits_per_second"] / 8
    return 2 * (point["ranks"] - 1) * point["latency_s"] + _wire_bytes(point) / payload


def _columns(point: Point) -> tuple[float, float]:
    return 2.0 * (point["ranks"] - 1), _wire_bytes(point) * max(1.0, point["ranks"] / CORES)


def fitted(points: Sequence[Point]) -> FittedSums:
    """By least squares of the relative error, so that a small sum counts as much as a large one; no unknown is below zero."""
    rows = np.array([_columns(point) for point in points])
    rest = np.array([point["low"] - _known(point) for point in points])
    weights = np.array([1 / point["low"] for point in points])
    solution, *_ = np.linalg.lstsq(rows * weights[:, None], rest * weights, rcond=None)
    return FittedSums(*np.maximum(solution, 0).tolist())


def errors(model: FittedSums, points: Sequence[Point]) -> list[float]:
    """|predicted − measured| / measured of each point that is large enough."""
    return [abs(off(model, point)) for point in points if point["bytes"] >= SMALLEST]


def off(model: FittedSums, point: Point) -> float:
    return model.seconds(point) / point["low"] - 1


def told(values: Sequence[float]) -> str:
    """“7 % at the median, 19 % in nine of ten, 30 % at most”; of a handful the last alone."""
    if len(values) < 5:
        return f"{max(values):.0%} at most"
    ninth = sorted(values)[int(0.9 * (len(values) - 1))]
    return f"{statistics.median(values):.0%} at the median, {ninth:.0%} in nine of ten, {max(values):.0%} at most"


def is_for_fitting(point: Point) -> bool:
    """Two ranks, links of 100 Mb/s and 1 Gb/s without added latency: one number, and the largest vectors, which show the work."""
    usual = point["ranks"] == 2 and not point["latency_s"] and point["bits_per_second"] in (1e8, 1e9)
    return usual and (point["bytes"] == 4 or point["bytes"] > 10_000_000)


def split(points: Sequence[Point], chosen: Callable[[Point], bool] = is_for_fitting) -> tuple[list[Point], list[Point]]:
    """(those to fit, those to check)."""
    return [point for point in points if chosen(point)], [point for point in points if not chosen(point)]
