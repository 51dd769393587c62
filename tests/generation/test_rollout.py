"""What is sampled is what the model says: every kept log-probability against a full forward pass, whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

from backend.generation import rollout as rollout_module
from backend.generation.outputs import Outputs
from backend.generation.rollout import DECODE_CHUNK, Rollout
from backend.generation.sampler import GREEDY, Sampling, keyed_uniforms, sample_tokens
from backend.models.policy import Policy, load_policy
from backend.spec.config import parse
from backend.spec.memory.chunking import BUCKET, capacity
from backend.types import Completion, Group, Problem
from tests.support import random_models

PLAIN, OTHER = ["qwen3", "llama", "mixtral", "qwen3_moe"], ["gemma3_text", "mamba"]
"""Architectures whose caches hold keys and values of all tokens, and others (a sliding window, a state space)."""
LENGTHS = [1, 3, 70, 9]
"""Prompts of one batch: the longest outgrows a bucket and the sliding window."""
MANY_ENDS = list(range(1, 20))
"""So many end-of-sequence ids that rows end all along the way, and are thinned out again and again."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def policy_of(models: Path, arch: str = "qwen3", eos: list[int] | None = None) -> Policy:
    """A policy with adapters that matter. `eos` takes the place of the model's own end-of-sequence ids."""
    folder = models / arch
    if not folder.exists():
        random_models.tiny_model(folder, arch)
    config = parse({"model": str(folder), "data": "none", "beta": 0, "num_layers": -1})
    policy = load_policy(config)
    shake(policy, seed=1)
    if eos is not None:
        policy.eos_ids = eos
    return policy


def shake(policy: Policy, seed: int) -> None:
    """Other adapter weights, so that no row is the base model's."""
    mx.random.seed(seed)
    noise = tree_map(lambda x: x + 0.05 * mx.random.normal(x.shape), policy.model.trainable_parameters())
    policy.model.update(noise)


def problems(lengths: list[int] = LENGTHS, seed: int = 0) -> list[Problem]:
    rng = np.random.default_rng(seed)
    return [Problem(i, "", [], rng.integers(60, 320, length).tolist(), "") for i, length in enumerate(lengths)]


def full_logits(policy: Policy, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """[T, V]: what predicts each token, by one pass of the whole model over one unpadded row."""
    policy.model.eval()
    logits = np.array(policy.model(mx.array([prompt + tokens]))[0])
    return logits[len(prompt) - 1 : -1] if prompt else np.roll(logits, 1, axis=0)


def full_logps(policy: Policy, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
    """log π(tokens | prompt) by the definition, in float64."""
    logits = full_logits(policy, prompt, tokens).astype(np.float64) / temperature
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return logits[np.arange(len(tokens)), tokens] - norm


def everything(groups: list[Group]) -> list[tuple[Problem, Completion]]:
    return [(group.problem, one) for group in groups for one in group.completions]


# ---- log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", PLAIN + OTHER)
def test_every_log_probability_is_that_of_a_full_forward_pass(models: Path, arch: str) -> None:
    policy = policy_of(models, arch, MANY_ENDS)
    rollout = Rollout(policy, 33)
    assert rollout.has_continuous_batching == (arch in PLAIN)
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=200)
    made = everything(rollout.sample(problems(), 4, sampling, seed=0, first_number=0))
    assert {one.stop for _, one in made} == {"eos", "length"}
    worst = max(np.abs(full_logps(policy, p.tokens, one.tokens, 0.9) - one.logps).max() for p, one in made)
    assert worst < 1e-4


def test_the_prompt_belongs_to_every_log_probability(models: Path) -> None:
    """If the prompt were left out, or a row saw another one's, the numbers would be these; they are far away."""
    policy = policy_of(models)
    made = everything(Rollout(policy, 20).sample(problems(), 2, Sampling(), seed=0, first_number=0))
    for p, one in made:
        other = next(q for q, _ in made if q is not p)
        assert np.abs(full_logps(policy, p.tokens, one.tokens, 1.0) - one.logps).max() < 1e-4
        for wrong in ([], p.tokens[:-1], other.tokens):
            assert np.abs(full_logps(policy, wrong, one.tokens, 1.0) - one.logps).mean() > 1e-2


def test_a_prompt_read_in_chunks_is_the_same_prompt(models: Path) -> None:
    policy = policy_of(models)
    whole, pieces = (
        everything(Rollout(policy, 12, prefill_chunk=chunk).sample(problems(), 2, Sampling(), 0, 0))
        for chunk in (2048, 16)
    )
    assert [one.tokens for _, one in whole] == [one.tokens for _, one in pieces]
    for (_, a), (_, b) in zip(whole, pieces, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)


def test_weights_changed_between_two_calls_are_seen(models: Path) -> None:
    """The decoding step is compiled once; its weights are inputs, not constants of the trace."""
    policy = policy_of(models)
    rollout = Rollout(policy, 10)
    first = everything(rollout.sample(problems(), 2, Sampling(), 0, 0))
    shake(policy, seed=2)
    second = everything(rollout.sample(problems(), 2, Sampling(), 0, 0))
    assert any(
        not np.allclose(a.logps[:1], b.logps[:1], atol=1e-3) for (_, a), (_, b) in zip(first, second, strict=True)
    )
    for p, one in second:
        assert np.abs(full_logps(policy, p.tokens, one.tokens, 1.0) - one.logps).max() < 1e-4


def test_dropout_is_off_while_sampling(models: Path) -> None:
    config = parse({"model": str(models / "qwen3"), "data": "none", "beta": 0, "num_layers": -1, "dropout": 0.5})
    policy_of(models)
    policy = load_policy(config)
    shake(policy, seed=1)
    policy.model.train()
    made = everything(Rollout(policy, 10).sample(problems(), 2, Sampling(), 0, 0))
    assert max(np.abs(full_logps(policy, p.tokens, one.tokens, 1.0) - one.logps).max() for p, one in made) < 1e-4


# ---- tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text", "mamba"])
def test_greedy_tokens_are_those_of_mlx_lms_own_generator(models: Path, arch: str) -> None:
    policy = policy_of(models, arch, eos=[319])
    for p, one in everything(Rollout(policy, 24).sample(problems(), 2, GREEDY, 0, 0)):
        theirs = [
            int(token) for token, _ in generate_step(mx.array(p.tokens), policy.model, max_tokens=len(one.tokens))
        ]
        assert one.tokens == theirs


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_a_completion_does_not_depend_on_the_batch_around_it(models: Path, arch: str) -> None:
    """Alone, in another batch, in a larger group, thinned out or not: the same tokens and log-probabilities."""
    policy = policy_of(models, arch, MANY_ENDS)
    rollout, sampling = Rollout(policy, 40), Sampling(temperature=0.8, top_p=0.95)
    rows = problems([5, 64, 2, 17, 9, 30])
    together = rollout.sample(rows, 4, sampling, seed=3, first_number=20)
    assert len({len(one.tokens) for _, one in everything(together)}) > 6
    for place, group in enumerate(together):
        alone = rollout.sample([group.problem], 2, sampling, seed=3, first_number=20 + place)[0]
        for one, other in zip(group.completions, alone.completions, strict=False):
            assert (one.tokens, one.text, one.stop) == (other.tokens, other.text, other.stop)
            np.testing.assert_allclose(one.logps, other.logps, atol=2e-5)
    assert [one.tokens for one in rollout.sample(rows[:1], 4, sampling, seed=4, first_number=20)[0].completions] != [
        one.tokens for one in together[0].completions
    ]


@pytest.mark.parametrize("arch", PLAIN + OTHER)
def test_every_token_is_drawn_with_a_random_number_of_its_own(models: Path, arch: str) -> None:
    """Step by step from the full model's logits: the same number for two tokens, or another row's, would show here."""
    policy, sampling = policy_of(models, arch, MANY_ENDS), Sampling(temperature=0.9, top_p=0.95)
    groups = Rollout(policy, 30).sample(problems(), 3, sampling, seed=5, first_number=7)
    for place, group in enumerate(groups, 7):
        for g, one in enumerate(group.completions):
            logits_TV = mx.array(full_logits(policy, group.problem.tokens, one.tokens))
            numbers = mx.array(keyed_uniforms(5, [(place, g)], 30)[0, : len(one.tokens)])
            again = sample_tokens(logits_TV, numbers, sampling)
            assert again.token_B.tolist() == one.tokens
            np.testing.assert_allclose(one.log_kept, np.array(again.log_kept_B), atol=1e-4)


def test_completions_of_a_group_differ_from_one_another_and_from_other_places(models: Path) -> None:
    policy = policy_of(models, eos=[319])
    same = problems([4]) * 3
    groups = Rollout(policy, 12).sample(same, 5, Sampling(), seed=0, first_number=0)
    assert len({tuple(one.tokens) for _, one in everything(groups)}) == 15


def test_the_prompt_is_read_once_for_the_whole_group(models: Path) -> None:
    policy, shapes = policy_of(models), []
    rollout = Rollout(policy, 5)
    hidden = rollout.fused.split_model.hidden
    rollout.fused.split_model.hidden = lambda tokens, cache: shapes.append(tokens.shape) or hidden(tokens, cache)
    rollout.sample(problems([40, 20, 30]), 8, Sampling(), 0, 0)
    assert shapes[0] == (3, 40)
    assert all(shape[1] == 1 for shape in shapes[1:])


# ---- ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_every_end_of_sequence_id_of_the_model_ends_a_completion(models: Path, arch: str, tmp_path: Path) -> None:
    random_models.tiny_model(tmp_path, arch)
    ends = [1, 77, 200]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    policy = load_policy(parse({"model": str(tmp_path), "data": "none", "beta": 0}))
    assert policy.eos_ids == ends
    made = everything(Rollout(policy, 300).sample(problems([3, 8]), 16, Sampling(temperature=1.5), 0, 0))
    ended = [one for _, one in made if one.stop == "eos"]
    assert {one.tokens[-1] for one in ended} == set(ends)
    for _, one in made:
        assert len(one.tokens) == len(one.logps) == len(one.log_kept)
        assert not set(one.tokens[:-1]) & set(ends), "nothing comes after an end"
        assert (one.stop == "eos") == (one.tokens[-1] in ends)
    for one in ended:  # the id is kept, its text is not
        assert one.text == policy.tokenizer.decode(one.tokens[:-1])


@pytest.mark.parametrize("max_tokens", [1, 2, DECODE_CHUNK - 1, DECODE_CHUNK, DECODE_CHUNK + 1, BUCKET - 4, BUCKET + 3])
@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_the_length_limit_is_exact(models: Path, arch: str, max_tokens: int) -> None:
    policy = policy_of(models, arch, eos=[319])
    made = everything(Rollout(policy, max_tokens).sample(problems([4, 2]), 2, Sampling(top_k=5), 0, 0))
    for p, one in made:
        assert one.stop == ("eos" if one.tokens[-1] == 319 else "length")
        assert len(one.tokens) == len(one.logps) == max_tokens or one.stop == "eos"
        assert np.abs(full_logps(policy, p.tokens, one.tokens, 1.0) - one.logps).max() < 1e-4


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_completions_of_one_token_end_at_once(models: Path, arch: str) -> None:
    policy, drawn = policy_of(models, arch, eos=list(range(320))), []
    made = everything(Rollout(policy, 50).sample(problems(), 3, Sampling(), 0, 0, drawn.append))
    assert all(len(one.tokens) == 1 and one.stop == "eos" and one.text == "" for _, one in made)
    assert drawn[-1] == len(made)


def stop_across_tokens(policy: Policy, one: Completion) -> str | None:
    """Two letters of the text, the last of one token and the first of the next, that are no tokens of this row."""
    for t in range(6, len(one.tokens) - 1):
        left, right = (policy.tokenizer.decode([token]) for token in one.tokens[t : t + 2])
        word = left[-1:] + right[:1]
        plain = word.isascii() and word.isprintable() and len(left + right) > 2
        if plain and word not in policy.tokenizer.decode(one.tokens[: t + 1]):
            return word
    return None


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_a_stop_string_is_found_in_the_text_however_its_tokens_are_cut(models: Path, arch: str) -> None:
    policy = policy_of(models, arch, eos=[319])
    mx.random.seed(0)
    free = everything(Rollout(policy, 40).sample(problems([5, 3]), 32, Sampling(), 0, 0))
    i, word = next((i, word) for i, (_, one) in enumerate(free) if (word := stop_across_tokens(policy, one)))
    held = everything(Rollout(policy, 40, stop=["never there", word]).sample(problems([5, 3]), 32, Sampling(), 0, 0))
    for (p, one), (_, whole) in zip(held, free, strict=True):
        assert one.tokens == whole.tokens[: len(one.tokens)]
        assert (one.stop == "string") == (word in whole.text)
        assert len(one.tokens) == len(one.logps) == len(one.log_kept)
        if one.stop == "string":
            assert word in one.text
            assert word not in policy.tokenizer.decode(one.tokens[:-1]), (
                "it ends with the token that completes the string"
            )
        assert np.abs(full_logps(policy, p.tokens, one.tokens, 1.0) - one.logps).max() < 1e-4
    assert held[i][1].stop == "string" and len(held[i][1].tokens) < 40


def test_a_stop_string_beats_the_end_that_comes_after_it_in_the_same_burst(models: Path) -> None:
    policy = policy_of(models, eos=MANY_ENDS)
    free = everything(Rollout(policy, 40).sample(problems([5, 3]), 32, Sampling(), 0, 0))
    ended = next(
        one for _, one in free if one.stop == "eos" and 3 <= len(one.tokens) < DECODE_CHUNK and one.text[:1].isascii()
    )
    place = next(i for i, (_, one) in enumerate(free) if one is ended)
    word = policy.tokenizer.decode(ended.tokens[:1])
    assert word.isprintable()
    held = everything(Rollout(policy, 40, stop=[word]).sample(problems([5, 3]), 32, Sampling(), 0, 0))[place][1]
    assert (held.stop, held.tokens, held.text) == ("string", ended.tokens[:1], word)


# ---- looking and stopping --------------------------------------------------------------------------------------


class Enough(Exception):
    pass


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_poll_hears_how_much_is_drawn_and_may_stop_it(models: Path, arch: str) -> None:
    policy = policy_of(models, arch, MANY_ENDS)
    rollout, drawn = Rollout(policy, 40), []
    made = everything(rollout.sample(problems(), 4, Sampling(), 0, 0, drawn.append))
    assert drawn == sorted(drawn) and len(drawn) >= 5
    assert drawn[-1] == sum(len(one.tokens) for _, one in made)

    def stop(count: int) -> None:
        if count > 30:
            raise Enough

    with pytest.raises(Enough):
        rollout.sample(problems(), 4, Sampling(), 0, 0, stop)
    again = everything(rollout.sample(problems(), 4, Sampling(), 0, 0))
    assert [one.tokens for _, one in again] == [one.tokens for _, one in made]


def watched(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(rows, columns written, capacity) of every decoding step to come."""
    seen: list[tuple[int, int, int]] = []
    real = rollout.compiled_step

    def step(sampling: Sampling) -> Any:
        inner = real(sampling)

        def one(token: mx.array, slot: mx.array, *rest: Any) -> Any:
            seen.append((token.shape[0], slot.item() + 1, rest[2].size))
            return inner(token, slot, *rest)

        return one

    monkeypatch.setattr(rollout, "compiled_step", step)
    return seen


def test_rows_that_ended_are_thinned_out(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows live long; the last steps must not be paid for all of them. Sizes are few: few traces."""
    policy = policy_of(models, eos=MANY_ENDS)
    rollout = Rollout(policy, 64)
    seen = watched(rollout, monkeypatch)
    made = everything(rollout.sample(problems([4] * 6), 8, Sampling(), 0, 0))
    sizes = [rows for rows, *_ in seen]
    lengths = [len(one.tokens) for _, one in made]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 48
    assert {size for size in sizes if size != 48} <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    for step, size in enumerate(sizes):
        read = step - step % DECODE_CHUNK  # by then the tokens before this one had been looked at
        alive = sum(length > read for length in lengths)
        assert alive > 0 and size < max(2, 2 * alive), "a third of the rows were dead at the last look, and stayed"


# ---- as many rows as there is room for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "ends", "max_tokens"),
    [(Sampling(0.8, top_p=0.95), MANY_ENDS, 40), (Sampling(), MANY_ENDS[:8], 13), (GREEDY, MANY_ENDS, 40)],
    ids=["many ends", "the limit among ends", "greedy"],
)
def test_the_number_of_rows_decoded_at_once_changes_nothing(
    models: Path, sampling: Sampling, ends: list[int], max_tokens: int
) -> None:
    """Ragged prompts: a row that waits may be longer than all that is there when its turn comes, or much shorter."""
    policy = policy_of(models, eos=ends)
    rows = problems([5, 30, 2, 90, 1, 9, 140, 3])
    whole = everything(Rollout(policy, max_tokens).sample(rows, 4, sampling, seed=3, first_number=20))
    assert {one.stop for _, one in whole} == {"eos", "length"} or max_tokens > 13
    assert len({len(one.tokens) for _, one in whole}) > 2
    for limit in (3, 8, 31):
        some = everything(Rollout(policy, max_tokens, rows=limit).sample(rows, 4, sampling, seed=3, first_number=20))
        for (_, one), (_, other) in zip(whole, some, strict=True):
            assert (one.tokens, one.text, one.stop) == (other.tokens, other.text, other.stop)
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)
            # A token at the very edge of the nucleus falls to either side of it by a rounding.
            np.testing.assert_allclose(one.log_kept, other.log_kept, atol=5e-3)


@pytest.mark.parametrize("limit", [2, 3])
def test_a_limit_holds_for_groups_decoded_alone_too(models: Path, limit: int) -> None:
    policy = policy_of(models, "mamba", MANY_ENDS)
    whole = everything(Rollout(policy, 20).sample(problems([5, 3]), 5, Sampling(), 1, 0))
    some = everything(Rollout(policy, 20, rows=limit).sample(problems([5, 3]), 5, Sampling(), 1, 0))
    assert [one.tokens for _, one in some] == [one.tokens for _, one in whole]


def test_places_that_become_free_are_filled(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(models, eos=MANY_ENDS)
    rollout = Rollout(policy, 60, rows=16)
    seen = watched(rollout, monkeypatch)
    made = everything(rollout.sample(problems([4, 9] * 12), 8, Sampling(), 0, 0))
    tokens, places = sum(len(one.tokens) for _, one in made), sum(rows for rows, *_ in seen)
    assert max(rows for rows, *_ in seen) == 16
    assert tokens > 0.65 * places, "a third of the work went into rows that had ended"
    assert tokens / len(seen) > 10, "places stood empty while others waited"


def test_prompts_are_read_when_their_turn_comes_and_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, read = policy_of(models, eos=MANY_ENDS), []
    rollout = Rollout(policy, 40, rows=8)
    prefill = rollout._prefill
    monkeypatch.setattr(rollout, "_prefill", lambda prompts: read.append(len(prompts)) or prefill(prompts))
    rollout.sample(problems([4] * 12), 5, Sampling(), 0, 0)
    assert sum(read) == 12 and read[0] == 2 and max(read) <= 2


def test_columns_are_bounded_by_the_longest_living_row(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go; what the gone ones left on the left is dropped, or the arrays would grow with every refill."""
    policy = policy_of(models, eos=MANY_ENDS)
    rollout = Rollout(policy, 100, rows=8)
    seen = watched(rollout, monkeypatch)
    made = everything(rollout.sample(problems([4] * 40), 4, Sampling(), 0, 0))
    longest = 4 + max(len(one.tokens) for _, one in made)
    assert len(seen) > 2 * longest
    assert max(columns for *_, columns in seen) <= capacity(longest + DECODE_CHUNK)
    assert all(written <= columns for _, written, columns in seen)


def test_the_longest_row_takes_its_columns_with_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few have ended to thin out the rest, and nobody waits; still the others must not drag its columns along."""
    policy, prompts = policy_of(models, eos=[319]), problems([270, 3, 4, 5, 6, 7, 8, 9])
    free = [one.tokens for _, one in everything(Rollout(policy, 30).sample(prompts, 1, Sampling(), 0, 0))]
    end = next(token for token in free[0] if not any(token in tokens for tokens in free[1:]))
    rollout = Rollout(policy_of(models, eos=[end]), 30)
    seen = watched(rollout, monkeypatch)
    made = everything(rollout.sample(prompts, 1, Sampling(), 0, 0))
    assert [one.stop for _, one in made] == ["eos", *["length"] * 7]
    assert seen[0][2] > 270 and seen[-1] == (8, 9 + 29, BUCKET)


def test_capacities_are_few_and_fit() -> None:
    for columns in range(1, 20_000, 7):
        room = capacity(columns)
        assert columns <= room <= max(columns * 1.125, columns + BUCKET)
    assert len({capacity(columns) for columns in range(1, 8192)}) < 42
    assert {capacity(columns) for columns in range(1, 513)} == set(range(64, 513, 64))


def test_long_prompts_are_read_in_pieces_that_count_every_row(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, shapes = policy_of(models), []
    rollout = Rollout(policy, 2)
    hidden = rollout.fused.split_model.hidden
    rollout.fused.split_model.hidden = lambda tokens, cache: shapes.append(tokens.shape) or hidden(tokens, cache)
    monkeypatch.setattr(rollout_module, "PREFILL_TOKENS", 100)
    rollout.sample(problems([40, 20, 30, 7]), 1, Sampling(), 0, 0)
    assert shapes[:2] == [(4, 25), (4, 15)]


def test_a_stop_string_far_behind_is_not_found_again(models: Path) -> None:
    """Only the neighbourhood of new tokens is looked at first, and a string across two bursts must be found there."""
    tokenizer = policy_of(models).tokenizer
    ids = tokenizer.encode("0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 30 40", add_special_tokens=False)
    for word in ("13 14", "9 10 11", "30"):
        outputs = Outputs(1, 100, tokenizer, [1], [word])
        for start in range(0, len(ids), 3):
            part = np.array(ids[start : start + 3])[:, None]
            outputs.append(np.array([0]), part, np.zeros(part.shape), np.zeros(part.shape))
        one = outputs.completion(0)
        assert one.stop == "string" and one.text.endswith(word) and len(one.tokens) == len(one.logps)
