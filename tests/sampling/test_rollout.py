"""Rollouts against the whole model: tokens, log-probabilities, ends, and independence of the batch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

from backend.config.config import parse
from backend.engine.chunk_sizes import BUCKET
from backend.models.policy import Policy, load_policy
from backend.sampling import scheduler as scheduler_module
from backend.sampling.rollout import DECODE_CHUNK, Sampler
from backend.sampling.sampler import GREEDY, SampledTokens, Sampling, keyed_uniforms, sample_tokens
from backend.sampling.scheduler import Scheduler
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.types import Completion, Group, Problem
from tests.support import random_models
from tests.support.reference_forward import TEMPERATURE

BATCHED, BY_GROUP = ["qwen3", "qwen3_moe", "gemma3_text"], ["mamba"]
"""Architectures that are decoded by continuous batching, a sliding window among them, and others (a state space)."""
FILTERED = Sampling(temperature=0.9, top_p=0.95, top_k=200)
"""Sampling with filters, the same for all tests: mlx compiles constants into its CPU kernels, a g++ run for each."""
LENGTHS = [1, 3, 70, 9]  # prompt lengths of one batch: the longest exceeds a capacity bucket and the sliding window
MANY_ENDS = list(range(1, 20))  # many end-of-sequence ids: rows end at every step, so the batch is compacted often


def policy_of(models: Path, arch: str = "qwen3", eos: list[int] | None = None, **settings: Any) -> Policy:
    """A policy with random adapters. `eos` replaces the model's own end-of-sequence ids."""
    folder = models / arch
    if not folder.exists():
        random_models.tiny_model(folder, arch)
    policy = load_policy(parse({"model": str(folder), "data": "none", "beta": 0, "num_layers": -1} | settings))
    shake(policy, seed=1)
    if eos is not None:
        policy.eos_ids = eos
    return policy


@pytest.fixture(scope="module")
def rollouts(models: Path) -> Callable[..., Sampler]:
    """Makes rollouts that share a policy and its compiled steps: tracing them is most of a short rollout's time."""
    cache: dict[str, Sampler] = {}

    def rollout(arch: str, max_tokens: int, eos: list[int] | None = None, **settings: Any) -> Sampler:
        if arch not in cache:
            cache[arch] = Sampler(policy_of(models, arch), 1)
        configured = copy.copy(cache[arch])
        configured.policy = copy.copy(configured.policy)
        configured.policy.eos_ids = eos or configured.policy.eos_ids
        configured.max_tokens = max_tokens
        for name, value in settings.items():
            setattr(configured, name, value)
        return configured

    return rollout


def shake(policy: Policy, seed: int) -> None:
    """Add noise to the adapters: fresh ones change nothing."""
    mx.random.seed(seed)
    noise = tree_map(lambda x: x + 0.05 * mx.random.normal(x.shape), policy.model.trainable_parameters())
    policy.model.update(noise)


def problems(lengths: list[int] = LENGTHS, seed: int = 0) -> list[Problem]:
    rng = np.random.default_rng(seed)
    return [Problem(i, "", [], rng.integers(60, 320, length).tolist(), "") for i, length in enumerate(lengths)]


def full_logits(policy: Policy, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Logits [T, V] that predict each token, by one pass of the unsplit model over one unpadded row."""
    policy.model.eval()
    logits = np.array(policy.model(mx.array([prompt + tokens]))[0])
    return logits[len(prompt) - 1 : -1] if prompt else np.roll(logits, 1, axis=0)


def full_logps(policy: Policy, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
    return logps_of(full_logits(policy, prompt, tokens), tokens, temperature)


def logps_of(logits_TV: np.ndarray, tokens: list[int], temperature: float) -> np.ndarray:
    """log π of the tokens by the definition, in float64."""
    logits = logits_TV.astype(np.float64) / temperature
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return logits[np.arange(len(tokens)), tokens] - norm


def with_problems(groups: list[Group]) -> list[tuple[Problem, Completion]]:
    return [(group.problem, completion) for group in groups for completion in group.completions]


@pytest.mark.parametrize(
    "arch", [*BATCHED, *BY_GROUP, *(pytest.param(arch, marks=pytest.mark.proof) for arch in ("llama", "mixtral"))]
)
def test_tokens_and_logps_follow_from_a_full_pass(rollouts: Callable[..., Sampler], arch: str) -> None:
    """Every log-probability is the unpadded model's, and every token follows from its logits and its own random number:
    the number of another token or row would give another token."""
    sampling = FILTERED
    rollout = rollouts(arch, 33, MANY_ENDS)
    assert rollout.has_continuous_batching == (arch not in BY_GROUP)
    lengths = [1, 3, 9, 4] if arch in BY_GROUP else LENGTHS  # a state reads its prompt token by token
    groups = rollout.sample(problems(lengths), 2, sampling, seed=5, first_number=7)
    assert {completion.stop for _, completion in with_problems(groups)} == {"eos", "length"}
    for number, group in enumerate(groups, 7):
        for g, completion in enumerate(group.completions):
            tokens = group.problem.tokens
            assert not {*completion.tokens[:-1]} & {*MANY_ENDS}, "the first end is the last token"
            logits_TV = full_logits(rollout.policy, tokens, completion.tokens)
            assert np.abs(logps_of(logits_TV, completion.tokens, 0.9) - completion.logps).max() < 1e-4
            uniform_T = mx.array(keyed_uniforms(5, [(number, g)], 33)[0, : len(completion.tokens)])
            again = sample_tokens(mx.array(logits_TV), uniform_T, sampling)
            assert again.token_B.tolist() == completion.tokens
            np.testing.assert_allclose(completion.log_kept, np.array(again.log_kept_B), atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_greedy_tokens_are_those_of_mlx_lms_own_generator(rollouts: Callable[..., Sampler], arch: str) -> None:
    rollout = rollouts(arch, 16, [319])
    for p, completion in with_problems(rollout.sample(problems(), 1, GREEDY, 0, 0)):
        steps = generate_step(mx.array(p.tokens), rollout.policy.model, max_tokens=len(completion.tokens))
        assert completion.tokens == [int(token) for token, _ in steps]


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_a_completion_does_not_depend_on_the_batch_around_it(rollouts: Callable[..., Sampler], arch: str) -> None:
    """Alone, in another batch, in a larger group, in compacted rows: the same tokens and log-probabilities."""
    rollout, sampling = rollouts(arch, 24, MANY_ENDS), FILTERED
    rows = problems([5, 64, 2, 17])
    together = rollout.sample(rows, 4, sampling, seed=3, first_number=20)
    assert len({len(completion.tokens) for _, completion in with_problems(together)}) > 4
    for p, group in enumerate(together):
        alone = rollout.sample([group.problem], 2, sampling, seed=3, first_number=20 + p)[0]
        for completion, other in zip(group.completions, alone.completions, strict=False):
            assert (completion.tokens, completion.text, completion.stop) == (other.tokens, other.text, other.stop)
            np.testing.assert_allclose(completion.logps, other.logps, atol=2e-5)
    assert [
        completion.tokens
        for completion in rollout.sample(rows[:1], 4, sampling, seed=4, first_number=20)[0].completions
    ] != [completion.tokens for completion in together[0].completions]


def test_a_prompt_is_prefilled_once_for_its_whole_group(models: Path) -> None:
    policy, shapes = policy_of(models), []
    rollout = Sampler(policy, 5)
    hidden = rollout.fused.split_model.hidden
    rollout.fused.split_model.hidden = lambda tokens, cache: shapes.append(tokens.shape) or hidden(tokens, cache)
    rollout.sample(problems([40, 20, 30]), 8, Sampling(), 0, 0)
    assert shapes[0] == (3, 40)
    assert all(shape[1] == 1 for shape in shapes[1:])


@pytest.mark.usefixtures("compiled")
def test_decoding_steps_are_not_run_from_python(models: Path) -> None:
    """The model's body is called for the prefill, and for a trace of each number of rows."""
    rollout, calls = Sampler(policy_of(models), 16), []
    hidden = rollout.fused.split_model.hidden
    rollout.fused.split_model.hidden = lambda tokens, cache: calls.append(tokens.shape) or hidden(tokens, cache)
    rollout.sample(problems([4, 2]), 2, FILTERED, 0, 0)
    assert len(calls) < 6


CHUNK_EDGES = (1, DECODE_CHUNK, DECODE_CHUNK + 1)
LIMITS = [("mamba", n) for n in CHUNK_EDGES]
LIMITS += [("qwen3", n) for n in (*CHUNK_EDGES, 2, DECODE_CHUNK - 1, BUCKET - 4, BUCKET + 3)]


@pytest.mark.parametrize(("arch", "max_tokens"), LIMITS)
def test_the_length_limit_is_exact(rollouts: Callable[..., Sampler], arch: str, max_tokens: int) -> None:
    rollout = rollouts(arch, max_tokens, [319])
    policy = rollout.policy
    sampled = with_problems(rollout.sample(problems([4, 2]), 2, Sampling(), 0, 0))
    for p, completion in sampled:
        assert completion.stop == ("eos" if completion.tokens[-1] == 319 else "length")
        assert len(completion.tokens) == len(completion.logps) == max_tokens or completion.stop == "eos"
        assert np.abs(full_logps(policy, p.tokens, completion.tokens, 1.0) - completion.logps).max() < 1e-4


class Enough(Exception):
    pass


@pytest.mark.parametrize("arch", ["qwen3", "mamba"])
def test_poll_receives_the_token_count_and_may_raise_to_stop(rollouts: Callable[..., Sampler], arch: str) -> None:
    rollout, counts, finished = rollouts(arch, 40, MANY_ENDS), [], dict[int, Group]()

    def finish(group: Group) -> None:
        assert len(finished) == len({*finished, group.problem.index}) - 1, "each group once"
        finished[group.problem.index] = group

    groups = rollout.sample(problems(), 2, Sampling(), 0, 0, counts.append, finish)
    assert [finished[group.problem.index] for group in groups] == groups
    sampled = with_problems(groups)
    assert counts == sorted(counts) and len(counts) >= 5
    assert counts[-1] == sum(len(completion.tokens) for _, completion in sampled)

    def stop(count: int) -> None:
        if count > 30:
            raise Enough

    with pytest.raises(Enough):
        rollout.sample(problems(), 2, Sampling(), 0, 0, stop)
    again = with_problems(rollout.sample(problems(), 2, Sampling(), 0, 0))
    assert [completion.tokens for _, completion in again] == [completion.tokens for _, completion in sampled]


def recorded_steps(rollout: Sampler, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Record (rows, columns written, capacity) of every decoding step from now on."""
    seen: list[tuple[int, int, int]] = []
    real = rollout.compiled_step

    def step(sampling: Sampling) -> Any:
        inner = real(sampling)

        def decode(token: mx.array, slot: mx.array, *rest: Any) -> Any:
            seen.append((token.shape[0], slot.item() + 1, rest[2].size))
            return inner(token, slot, *rest)

        return decode

    monkeypatch.setattr(rollout, "compiled_step", step)
    return seen


def test_the_batch_is_compacted_as_rows_end(rollouts: Callable[..., Sampler], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last steps must not be computed for all rows; few distinct row counts mean few traces."""
    rollout = rollouts("qwen3", 64, MANY_ENDS)
    seen = recorded_steps(rollout, monkeypatch)
    sampled = with_problems(rollout.sample(problems([4] * 6), 8, Sampling(), 0, 0))
    sizes = [rows for rows, *_ in seen]
    lengths = [len(completion.tokens) for _, completion in sampled]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 48
    assert {size for size in sizes if size != 48} <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    for step, size in enumerate(sizes):
        read = step - step % DECODE_CHUNK  # the tokens before this one had been read by then
        alive = sum(length > read for length in lengths)
        assert alive > 0 and size < max(2, 2 * alive), "a third of the rows had ended at the last read, and stayed"


@pytest.mark.parametrize(("sampling", "limits"), [(FILTERED, (3, 8)), (Sampling(), (8,))], ids=["filtered", "plain"])
def test_the_number_of_rows_decoded_at_once_changes_nothing(
    rollouts: Callable[..., Sampler], sampling: Sampling, limits: tuple[int, ...]
) -> None:
    """When it is admitted, a waiting row may be longer than all rows of the batch, or much shorter."""
    rows, ends = problems([5, 30, 2, 90, 1, 140]), MANY_ENDS if sampling.has_filters else MANY_ENDS[:8]
    max_tokens = 40 if sampling.has_filters else 13
    all_at_once = with_problems(rollouts("qwen3", max_tokens, ends).sample(rows, 3, sampling, seed=3, first_number=20))
    assert {completion.stop for _, completion in all_at_once} == {"eos", "length"} or max_tokens > 13
    assert len({len(completion.tokens) for _, completion in all_at_once}) >= 2, "rows end at different times"
    for limit in limits:
        rollout = rollouts("qwen3", max_tokens, ends, rows=limit)
        some = with_problems(rollout.sample(rows, 3, sampling, seed=3, first_number=20))
        for (_, completion), (_, other) in zip(all_at_once, some, strict=True):
            assert (completion.tokens, completion.text, completion.stop) == (other.tokens, other.text, other.stop)
            np.testing.assert_allclose(completion.logps, other.logps, atol=1e-4)
            # A token at the edge of the nucleus may be kept or not by rounding.
            np.testing.assert_allclose(completion.log_kept, other.log_kept, atol=5e-3)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a GPU, which queues steps ahead; the list receives every wait for the device inside of `_decode`."""
    monkeypatch.setattr(scheduler_module, "on_cpu", lambda: False)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: 1 << 40)
    seen: list[str] = []
    decode = Scheduler._decode

    def watched(self: Scheduler, steps: int) -> list[SampledTokens]:
        with monkeypatch.context() as inside:
            for name in ("eval", "synchronize"):
                inside.setattr(mx, name, lambda *_, name=name: seen.append(name))
            for owner, name in ((np, "array"), (np, "asarray")):
                real = getattr(owner, name)
                inside.setattr(owner, name, lambda x, *rest, r=real, n=name: _noted(x, n, seen) or r(x, *rest))
            return decode(self, steps)

    monkeypatch.setattr(Scheduler, "_decode", watched)
    return seen


def _noted(x: Any, name: str, seen: list[str]) -> None:
    if isinstance(x, mx.array):
        seen.append(name)


def test_a_gpu_never_waits(rollouts: Callable[..., Sampler], waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the caches are: a token is read a chunk after it was sampled."""
    queued = with_problems(rollouts("qwen3", 40, MANY_ENDS).sample(problems(), 4, FILTERED, seed=3, first_number=20))
    assert waits == []
    monkeypatch.setattr(scheduler_module, "on_cpu", lambda: True)
    waited = with_problems(rollouts("qwen3", 40, MANY_ENDS).sample(problems(), 4, FILTERED, seed=3, first_number=20))
    assert waits.count("eval") >= 20, "the test would not notice a wait"
    for (_, completion), (_, other) in zip(queued, waited, strict=True):
        assert (completion.tokens, completion.logps) == (other.tokens, other.logps)


def test_a_model_that_takes_one_position_for_all_rows_is_decoded_by_group_and_says_why(models: Path) -> None:
    policy = policy_of(models)
    attention = policy.model.layers[0].self_attn

    class OnePosition(type(attention)):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            if cache is not None and isinstance(cache.offset, mx.array):
                raise ValueError("one position, please.\nA second line.")
            return super().__call__(x, mask, cache)

    attention.__class__ = OnePosition
    rollout = Sampler(policy, 9)
    assert rollout.slow_paths == [
        "Completions are decoded one group at a time: a trial with prompts of unequal length failed with ValueError: "
        "one position, please."
    ]
    for p, completion in with_problems(rollout.sample(problems(), 2, Sampling(), 0, 0)):
        assert np.abs(full_logps(policy, p.tokens, completion.tokens, 1.0) - completion.logps).max() < 1e-4


def test_the_importance_ratio_is_the_mass_that_was_kept(models: Path) -> None:
    """The kept share was once read at the last token of the vocabulary, and NaN where that was filtered."""
    filters = {"temperature": TEMPERATURE, "top_p": 0.8, "top_k": 60, "min_p": 0.1}
    about = {"batch_size": 3, "group_size": 3, "skip_zero_signal": False} | filters
    policy = policy_of(models, **about)
    config = parse({"model": str(models / "qwen3"), "data": "none", "beta": 0, "num_layers": -1} | about)
    groups = Sampler(policy, 8).sample(problems([1, 4, 9]), 3, Sampling(**filters), seed=0, first_number=0)
    for group in groups:
        for completion, advantage in zip(group.completions, (1.0, -1.0, 0.0), strict=True):
            completion.advantage = advantage
    metrics = build_learner(policy, config, 1).learn(pack(groups, pad_id=0))
    kept = [x for _, completion in with_problems(groups) for x in completion.log_kept]
    assert min(kept) < -0.1, "nothing was filtered, so this shows nothing"
    for name, share in (("mean", np.exp(kept).mean()), ("min", np.exp(min(kept))), ("max", np.exp(max(kept)))):
        assert metrics[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(share, abs=1e-4)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(-np.mean(kept), abs=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(-min(kept), abs=1e-4)
