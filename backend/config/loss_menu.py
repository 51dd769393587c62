"""The losses, ratio levels and KL estimators, read from `backend/training/losses.py` as text: menus need no mlx."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A row of a menu: the setting's value, its label, when to choose it, and the paper."""

    key: str
    name: str
    sentence: str
    paper: str


@cache
def loss_menus() -> dict[str, list[LossEntry]]:
    """Values of `grpo_loss_type` (LOSSES), `importance_sampling_level` (LEVELS) and `kl_estimator` (KL_ESTIMATORS)."""
    tables: dict[str, list[LossEntry]] = {}
    for node in ast.parse((Path(__file__).parents[1] / "training" / "losses.py").read_text(encoding="utf-8")).body:
        match node:
            case ast.AnnAssign(
                target=ast.Name(id="LOSSES" | "LEVELS" | "KL_ESTIMATORS" as name),
                value=ast.Dict(keys=keys, values=rows),
            ):
                tables[name] = []
                for key, row in zip(keys, rows, strict=True):
                    words = [
                        each for each in cast("ast.Call", row).keywords if each.arg in ("name", "sentence", "paper")
                    ]
                    texts = {str(each.arg): ast.literal_eval(each.value) for each in words}
                    tables[name].append(LossEntry(ast.literal_eval(cast("ast.expr", key)), **texts))
    return tables
