"""The bundled demo: its files are those of the script, no held-out row is trained on, no network is needed."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from backend import demo
from backend.config.config import load
from backend.demo import NUMBERS, Sum, careful, encode, pools, rebuild
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.utils.places import demo_config, resources

DEMO = resources() / "demo"
EVERY_SUM = [Sum(a, b) for a in NUMBERS for b in NUMBERS]


def test_opening_the_model_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it looked for the network"))
    tokenizer = mlx_lm.load(str(DEMO / "model"))[1]
    assert tokenizer.get_vocab() == demo.make_tokenizer().get_vocab()


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_shipped_rows_are_those_of_the_script(split: str) -> None:
    lines = (DEMO / "data" / f"{split}.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [sum_.row() for sum_ in pools(0)[split]]


def test_no_sum_is_in_two_splits_not_even_mirrored() -> None:
    seen = [{frozenset(sum_) for sum_ in part} for part in pools(0).values()]
    assert len(seen) == 4 and len(set.union(*seen)) == sum(map(len, seen)) == 4095


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
