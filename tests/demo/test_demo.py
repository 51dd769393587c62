"""The bundled demo: its files are those of the script, no held-out row is trained on, no network is needed."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from backend import demo
from backend.config.config import load
from backend.demo import NUMBERS, Sum, careful, encode, pools, rebuild, sloppy
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.rewards.functions import r1
from backend.utils.places import demo_config, resources

DEMO = resources() / "demo"
EVERY_SUM = [Sum(a, b) for a in NUMBERS for b in NUMBERS]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """As mlx-lm loads it, with all network access blocked."""

    def shut(*_: object) -> None:
        raise AssertionError("opening the demo's model looked for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", shut)
        return mlx_lm.load(str(DEMO / "model"))[1]


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "data" / f"{split}.jsonl").read_text("utf-8").splitlines()]


def test_no_sum_is_in_two_splits_not_even_mirrored() -> None:
    seen = [{frozenset(sum_) for sum_ in part} for part in pools(0).values()]
    assert len(seen) == 4 and len(set.union(*seen)) == sum(map(len, seen)) == 4095


def test_careful_answers_get_the_highest_rewards_and_sloppy_ones_forget_every_carry() -> None:
    texts, answers = [careful(sum_) for sum_ in EVERY_SUM], [sum_.answer for sum_ in EVERY_SUM]
    for name, most in zip(DEFAULT_REWARDS, (2.0, 0.5, 0.5, 0.5, 0.5), strict=True):
        assert set(getattr(r1, name)(answers, texts, answers, None)) == {most}, name
    assert careful(Sum(47, 68)) == "<think>7+8+0=15,4+6+1=11</think><answer>115</answer>"
    assert sloppy(Sum(47, 68)) == "<think></think><answer>05</answer>"
    right = [r1.extract_answer(sloppy(sum_)) == sum_.answer for sum_ in EVERY_SUM]
    assert 0.2 < sum(right) / len(right) < 0.3


def test_the_preset_trains_the_demo_and_the_longest_careful_answer_fits() -> None:
    config, tokenizer = load(demo_config()), demo.make_tokenizer()
    assert (Path(config.model), Path(config.data)) == (DEMO / "model", DEMO / "data")
    assert config.beta > 0 and config.num_iterations == 2 and tuple(config.reward_functions) == DEFAULT_REWARDS
    lengths = [tuple(map(len, encode(tokenizer, sum_, careful(sum_)))) for sum_ in [*EVERY_SUM[::7], Sum(99, 99)]]
    assert max(answer for _, answer in lengths) <= config.max_completion_length
    assert max(prompt for prompt, _ in lengths) + config.max_completion_length <= config.max_seq_length


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROWS", 4)
    messages: list[str] = []
    rebuild(tmp_path / "once", steps=2, progress=messages.append)
    mx.random.normal((3,))  # earlier random numbers must not matter
    rebuild(tmp_path / "again", steps=2)
    rebuild(tmp_path / "other", seed=1, steps=2)
    once, again, other = (digests(tmp_path / name) for name in ("once", "again", "other"))
    assert once == again and set(once) == set(digests(DEMO))
    changed = {name for name in once if once[name] != other[name]}
    assert changed == {"model/model.safetensors", *(f"data/{split}.jsonl" for split in ("train", "valid", "test"))}
    assert messages[0].startswith("Warm-up step 2 of 2")


@pytest.mark.slow
def test_the_shipped_model_has_something_to_learn() -> None:
    assert 0.10 <= demo.test_accuracy(load(demo_config()), None) <= 0.50
