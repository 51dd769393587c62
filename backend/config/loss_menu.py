"""The losses, ratio levels and KL estimators there are, read from the tables in `backend/training/losses.py` as text, so that menus need no mlx."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "training" / "losses.py"


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A row of a menu: the setting's value, its label, when to take it, and the paper."""

    key: str
    name: str
    sentence: str
    paper: str


def losses() -> list[LossEntry]:
    """Every value of `grpo_loss_type`."""
    return _table("LOSSES")


def levels() -> list[LossEntry]:
    """Every value of `importance_sampling_level`."""
    return _table("LEVELS")


def kl_estimators() -> list[LossEntry]:
    """Every value of `kl_estimator`."""
    return _table("KL_ESTIMATORS")


@cache
def _tables() -> dict[str, ast.Dict]:
    tree = ast.parse(_SOURCE.read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: node.value for node in assigned if isinstance(node.value, ast.Dict)}  # pyright: ignore


def _table(name: str) -> list[LossEntry]:
    table = _tables()[name]
    return [_entry(key, row) for key, row in zip(table.keys, table.values, strict=True)]


def _entry(key: ast.expr | None, row: ast.expr) -> LossEntry:
    assert isinstance(key, ast.Constant) and isinstance(row, ast.Call)
    texts = {
        keyword.arg: ast.literal_eval(keyword.value)
        for keyword in row.keywords
        if keyword.arg in ("name", "sentence", "paper")
    }
    return LossEntry(str(key.value), **texts)
