"""The losses, ratio levels and KL estimators, read from `backend/training/losses.py` as text, so that menus need no
mlx."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "training" / "losses.py"


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A row of a menu: the setting's value, its label, when to choose it, and the paper."""

    key: str
    name: str
    sentence: str
    paper: str


def losses() -> list[LossEntry]:
    """Values of `grpo_loss_type`."""
    return _tables()["LOSSES"]


def levels() -> list[LossEntry]:
    """Values of `importance_sampling_level`."""
    return _tables()["LEVELS"]


def kl_estimators() -> list[LossEntry]:
    """Values of `kl_estimator`."""
    return _tables()["KL_ESTIMATORS"]


@cache
def _tables() -> dict[str, list[LossEntry]]:
    tables: dict[str, list[LossEntry]] = {}
    for node in ast.parse(_SOURCE.read_text(encoding="utf-8")).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id in ("LOSSES", "LEVELS", "KL_ESTIMATORS") and isinstance(node.value, ast.Dict):
            rows = zip(node.value.keys, node.value.values, strict=True)
            tables[node.target.id] = [_entry(key, row) for key, row in rows]
    return tables


def _entry(key: ast.expr | None, row: ast.expr) -> LossEntry:
    assert isinstance(key, ast.Constant) and isinstance(row, ast.Call)
    texts = {
        keyword.arg: ast.literal_eval(keyword.value)
        for keyword in row.keywords
        if keyword.arg in ("name", "sentence", "paper")
    }
    return LossEntry(str(key.value), **texts)
