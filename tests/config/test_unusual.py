"""What is remarked upon as unusual, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from backend.config.config import SETTINGS, parse
from backend.config.notes import USUAL, unusual

TRL = {
    "group_size": 8, "max_completion_length": 512, "num_iterations": 1, "temperature": 1.0, "top_p": 1.0, "beta": 0.04,
    "epsilon": 0.2, "learning_rate": 1e-6, "max_grad_norm": 1.0,
}  # fmt: skip
"""Defaults of its GRPOTrainer; of the KL weight the older one, as 0 is ours."""


def remarks(**settings: Any) -> dict[str, str]:
    return {fault.setting: fault.sentence for fault in unusual(parse({"model": "a/b", "data": "c/d", **settings}))}


def test_defaults_are_usual() -> None:
    assert remarks() == {} and remarks(**TRL) == {}
    assert all(SETTINGS[key].kind in ("int", "float") for key in USUAL), "a range is of a number"


@pytest.mark.parametrize("key", [key for key in USUAL if key not in ("epochs", "max_seq_length")])
def test_beyond_a_range_is_remarked_upon(key: str) -> None:
    _, high, usual = USUAL[key]
    above = high * 2 if SETTINGS[key].kind == "float" else int(high) * 2
    if key in ("top_p", "dropout", "epsilon"):  # valid up to 1
        above = {"top_p": 0.4, "dropout": 0.9, "epsilon": 0.9}[key]
    room = {"max_seq_length": 1 << 20} if key == "max_completion_length" else {}
    assert usual in remarks(**{key: above}, **room)[key]


def test_what_has_no_effect_is_not_remarked_upon() -> None:
    assert remarks(iters=10**6, epochs=3) == {}
    assert remarks(rank=4096, train_type="full") == {}
    assert remarks(learning_rate=0.1, optimizer="sgd") == {}, "its rate is no size of a step"
    assert remarks(epsilon=0.9, grpo_loss_type="cispo") == {}
