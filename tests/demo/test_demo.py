"""The bundled demo: its files are those of the script, no held-out row is in the training data, and it needs no
network."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from backend.config.config import Config, load
from backend.demo import build
from backend.demo.build import NUMBERS, Sum, careful, encode, pools, rebuild, sloppy
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.rewards.functions import r1
from backend.utils.places import demo_config, resources

DEMO = resources() / "demo"
EVERY_SUM = [Sum(a, b) for a in NUMBERS for b in NUMBERS]
SHIPPED_SEED = 0


@pytest.fixture(scope="module")
def shipped() -> Any:
    """(model, tokenizer) as mlx-lm loads them, with all network access blocked."""

    def shut(*_: object) -> None:
        raise AssertionError("opening the demo's model looked for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", shut)
        return mlx_lm.load(str(DEMO / "model"))


@pytest.fixture(scope="module")
def tokenizer(shipped: Any) -> Any:
    return shipped[1]


@pytest.fixture(scope="module")
def config() -> Config:
    return load(demo_config())


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "data" / f"{split}.jsonl").read_text("utf-8").splitlines()]


def unordered(prompt: str) -> frozenset[str]:
    return frozenset(prompt.rstrip("=").split("+"))


# ---- data ------------------------------------------------------------------------------------------------------


def test_no_sum_is_in_two_splits_not_even_mirrored():
    warmup = {unordered(sum_.prompt) for sum_ in pools(SHIPPED_SEED).warmup}
    seen = [warmup, *({unordered(row["prompt"]) for row in rows(split)} for split in ("train", "valid", "test"))]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 4095


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_shipped_rows_are_those_of_the_script(split: str):
    assert rows(split) == [sum_.row() for sum_ in getattr(pools(SHIPPED_SEED), split)]


def test_every_answer_is_the_sum():
    for row in rows("train") + rows("valid") + rows("test"):
        first, second = row["prompt"].rstrip("=").split("+")
        assert row == {"prompt": f"{first}+{second}=", "answer": str(int(first) + int(second)), "type": "addition"}


# ---- the two ways of answering ---------------------------------------------------------------------------------


def test_a_careful_answer_gets_the_highest_rewards():
    texts, answers = [careful(sum_) for sum_ in EVERY_SUM], [sum_.answer for sum_ in EVERY_SUM]
    for name, most in zip(DEFAULT_REWARDS, (2.0, 0.5, 0.5, 0.5, 0.5), strict=True):
        assert set(getattr(r1, name)(answers, texts, answers, None)) == {most}, name


def test_a_careful_answer_writes_down_every_carry():
    assert careful(Sum(47, 68)) == "<think>7+8+0=15,4+6+1=11</think><answer>115</answer>"


def test_a_sloppy_answer_forgets_every_carry():
    assert sloppy(Sum(47, 68)) == "<think></think><answer>05</answer>"
    assert sloppy(Sum(41, 28)) == "<think></think><answer>69</answer>"


def test_sloppy_answers_are_correct_for_a_quarter_of_all_sums():
    right = [r1.extract_answer(sloppy(sum_)) == sum_.answer for sum_ in EVERY_SUM]
    assert 0.2 < sum(right) / len(right) < 0.3


# ---- tokenizer -------------------------------------------------------------------------------------------------


def test_encoding_and_decoding_round_trips(tokenizer: Any):
    for sum_ in EVERY_SUM[::97]:
        for text in (sum_.prompt, careful(sum_), sloppy(sum_), sum_.answer):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_gives_the_prompts_of_the_warm_up(tokenizer: Any):
    messages = [{"role": "user", "content": "47+38="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    start, end = "<|im_start|>", "<|im_end|>"
    expected = [start, "user", "\n", *"47+38=", end, "\n", start, "assistant", "\n"]
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    prompt, answer = encode(build.make_tokenizer(), Sum(47, 38), sloppy(Sum(47, 38)))
    assert ids == prompt
    assert tokenizer.convert_ids_to_tokens(answer)[-1] == end


def test_the_shipped_tokenizer_is_that_of_the_script(tokenizer: Any, tmp_path: Path):
    generated = build.make_tokenizer()
    assert tokenizer.get_vocab() == generated.get_vocab() == {t: i for i, t in enumerate(build.VOCABULARY)}
    build.save_tokenizer(generated, tmp_path)
    shipped_text, generated_text = (
        [json.loads((folder / name).read_text("utf-8")) for name in ("tokenizer_config.json", "tokenizer.json")]
        for folder in (DEMO / "model", tmp_path)
    )
    assert shipped_text[0] == generated_text[0]
    # Not the whole file: how the rest is written down changes with the version of tokenizers.
    assert [shipped_text[1][part] for part in ("added_tokens", "decoder")] == [
        generated_text[1][part] for part in ("added_tokens", "decoder")
    ]


# ---- model -----------------------------------------------------------------------------------------------------


def test_the_model_has_about_a_million_float32_parameters(shipped: Any):
    weights = build.parameters(shipped[0])
    assert 800_000 < sum(weight.size for weight in weights.values()) < 1_200_000
    assert {weight.dtype for weight in weights.values()} == {mx.float32}


def test_model_and_tokenizer_agree_on_eos_and_pad(tokenizer: Any):
    config = json.loads((DEMO / "model" / "config.json").read_text("utf-8"))
    assert config == build.CONFIG
    assert {config["eos_token_id"]} == set(tokenizer.eos_token_ids) == {tokenizer.eos_token_id}
    assert config["pad_token_id"] == tokenizer.pad_token_id


# ---- preset ----------------------------------------------------------------------------------------------------


def test_the_preset_uses_the_demo_with_kl_and_clipping(config: Config):
    assert (Path(config.model), Path(config.data)) == (DEMO / "model", DEMO / "data")
    assert config.beta > 0
    assert config.num_iterations == 2
    assert tuple(config.reward_functions) == DEFAULT_REWARDS


def test_the_longest_careful_answer_fits_the_completion_limit(config: Config):
    tokenizer = build.make_tokenizer()
    lengths = [tuple(map(len, encode(tokenizer, sum_, careful(sum_)))) for sum_ in [*EVERY_SUM[::7], Sum(99, 99)]]
    assert max(answer for _, answer in lengths) <= config.max_completion_length
    assert max(prompt for prompt, _ in lengths) + config.max_completion_length <= config.max_seq_length


# ---- rebuild -------------------------------------------------------------------------------------------


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "ROWS", 4)
    messages: list[str] = []
    rebuild(tmp_path / "once", steps=2, progress=messages.append)
    mx.random.normal((3,))  # earlier random numbers must not matter
    rebuild(tmp_path / "again", steps=2)
    rebuild(tmp_path / "other", seed=1, steps=2)
    once, again, other = (digests(tmp_path / name) for name in ("once", "again", "other"))
    assert once == again
    assert set(once) == set(digests(DEMO))
    changed = {name for name in once if once[name] != other[name]}
    assert changed == {"model/model.safetensors", *(f"data/{split}.jsonl" for split in ("train", "valid", "test"))}
    assert messages[0].startswith("Warm-up step 2 of 2")


@pytest.mark.slow
def test_the_shipped_model_has_something_to_learn(config: Config):
    from backend.demo.accuracy import test_accuracy as accuracy

    assert 0.10 <= accuracy(config, None) <= 0.50
