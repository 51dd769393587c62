"""Completions that call tools: tokens, masks and log-probabilities, whatever the tools' latency."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import parse
from backend.sampling.conversations import Tools, tool_metrics
from backend.sampling.outputs import CompletionBuffer
from backend.sampling.rollout import Sampler
from backend.sampling.row_costs import DRAFTED, ON_CPU
from backend.sampling.sampler import GREEDY, Sampling, keyed_uniforms, sample_tokens
from backend.sampling.scheduler import Scheduler
from backend.sampling.speculation import PASSES, PROBE, TRIAL, DraftModel, NGrams, Speculation, speculation_of
from backend.tools.host import Poll, ToolSchemas
from backend.types import Completion, Group, Problem, ToolCall, ToolResult
from backend.utils.errors import UserError
from tests.sampling.test_rollout import FILTERED, MANY_ENDS, full_logits, full_logps, logps_of, policy_of, problems
from tests.support import random_models

SUFFIX, LONGEST = 7, 40


class Format:
    """Every turn calls a tool named by its ids; the results are as many tokens as the name says."""

    def parse(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return "", [] if ids[-1] % 4 == 0 else [ToolCall(str(sum(ids)), {})]

    def exceeds(self, results: Sequence[ToolResult], most: int) -> bool:
        return False

    def suffix(self, results: Sequence[ToolResult]) -> list[int]:
        count = 1 + int(results[0].content) % SUFFIX
        return [60 + (int(results[0].content) + i) % 250 for i in range(count)]


class Host:
    """Answers a call at the `latency`-th look after it, those of some completions later."""

    schemas = ToolSchemas()

    def __init__(self, latency: Callable[[int], int] = lambda conversation: 0) -> None:
        self.latency, self.running, self.begun = latency, dict[int, tuple[int, list[ToolCall]]](), 0
        self.texts: Sequence[str | None] = ()

    def begin(self, rows: Sequence[Mapping[str, Any]], poll: Poll) -> list[tuple[int, str | None]]:
        self.begun += 1000
        return [(self.begun + i, self.texts[i] if self.texts else None) for i in range(len(rows))]

    def submit(self, conversation: int, calls: Sequence[ToolCall], poll: Poll) -> None:
        self.running[conversation] = self.latency(conversation % 1000), list(calls)

    def finished(self, wait_s: float, poll: Poll) -> list[tuple[int, list[ToolResult]]]:
        found = [number for number, (looks, _) in self.running.items() if looks <= 0]
        results = [
            (number, [ToolResult(call.name, call.name) for call in self.running.pop(number)[1]]) for number in found
        ]
        self.running = {number: (looks - 1, calls) for number, (looks, calls) in self.running.items()}
        return results

    def new_notes(self) -> list[str]:
        return []

    def close(self) -> None: ...


def with_tools(sampler: Sampler, host: Host | None = None, most_turns: int = 3) -> Sampler:
    configured = copy.copy(sampler)
    opened = lambda problem, text: Problem(0, text, [], [*problem.tokens, *map(ord, text)], "")  # noqa: E731
    configured.tools = Tools(host or Host(), Format(), most_turns, lambda problem: [{}], opened)  # pyright: ignore
    return configured


@pytest.fixture(scope="module")
def samplers(models: Path) -> Callable[[str], Sampler]:
    cache: dict[str, Sampler] = {}

    def sampler(arch: str) -> Sampler:
        if arch not in cache:
            cache[arch] = Sampler(policy_of(models, arch, MANY_ENDS), LONGEST)
        return cache[arch]

    return sampler


def completions(sampler: Sampler, lengths: list[int], G: int, sampling: Sampling = FILTERED) -> list[Completion]:
    groups = sampler.sample(problems(lengths), G, sampling, seed=5, first_number=7)
    return [completion for group in groups for completion in group.completions]


@pytest.mark.parametrize(
    ("arch", "longest"), [("qwen3", 70), pytest.param("gemma3_text", 70, marks=pytest.mark.proof), ("mamba", 5)]
)
def test_a_conversation_is_one_sequence(samplers: Callable[[str], Sampler], arch: str, longest: int) -> None:
    """Log-probabilities of the model's tokens are those of one pass over the whole conversation, and each token follows
    from the random number of its own place in it."""
    sampler, prompts = with_tools(samplers(arch)), problems([longest, 1])
    groups = sampler.sample(prompts, 3, FILTERED, seed=5, first_number=7)
    found = [completion for group in groups for completion in group.completions]
    assert max(len(completion.turns) for completion in found) > 2
    for p, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
            own = np.array(completion.mask or [1] * len(completion.tokens), bool)
            assert sum(turn.tokens for turn in completion.turns) == own.sum()
            assert sum(turn.result_tokens for turn in completion.turns) == (~own).sum()
            logits_TV = full_logits(sampler.policy, group.problem.tokens, completion.tokens)
            assert np.abs(logps_of(logits_TV, completion.tokens, 0.9) - completion.logps)[own].max() < 1e-4
            uniform_T = mx.array(keyed_uniforms(5, [(7 + p, g)], LONGEST)[0, : len(completion.tokens)])
            again = np.array(sample_tokens(mx.array(logits_TV), uniform_T, FILTERED).token_B)
            assert (again == completion.tokens)[own].all()
            start = 0
            for turn in completion.turns:  # the results follow the turn's own tokens
                ids = completion.tokens[start : start + turn.tokens]
                start += turn.tokens + turn.result_tokens
                if turn.result_tokens:
                    assert completion.tokens[start - turn.result_tokens : start] == Format().suffix(turn.results)
                    assert turn.results[0].content == str(sum(ids))


def slow(conversation: int) -> int:
    return (conversation * 7) % 5


@pytest.mark.parametrize(("arch", "rows", "lengths"), [("qwen3", 2, [64, 2]), ("mamba", None, [5, 2])])
def test_latency_and_batch_change_no_token(
    samplers: Callable[[str], Sampler], arch: str, rows: int | None, lengths: list[int]
) -> None:
    expected = completions(with_tools(samplers(arch)), lengths, 2)
    other = with_tools(samplers(arch), Host(slow))
    other.rows = rows
    for one, two in zip(expected, completions(other, lengths, 2), strict=True):
        assert (one.tokens, one.mask, one.stop) == (two.tokens, two.mask, two.stop)
        np.testing.assert_allclose(one.logps, two.logps, atol=1e-4)


def test_penalties_count_the_whole_conversation(samplers: Callable[[str], Sampler]) -> None:
    from backend.engine.penalties import Penalties

    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=200, penalties=Penalties(1.3, 0.5, 0.1))
    together = completions(with_tools(samplers("qwen3")), [5], 4, sampling)
    assert any(completion.mask for completion in together)
    alone = with_tools(samplers("qwen3"), Host(slow))
    alone.rows = 2
    assert [each.tokens for each in completions(alone, [5], 4, sampling)] == [each.tokens for each in together]


def test_results_that_do_not_fit_end_the_completion(samplers: Callable[[str], Sampler]) -> None:
    sampler = with_tools(samplers("qwen3"), most_turns=99)
    found = completions(sampler, [5, 3], 8)
    dropped = [each for each in found if each.turns[-1].results]
    assert dropped
    for completion in dropped:
        last = completion.turns[-1]
        assert last.result_tokens == 0
        assert len(completion.tokens) + len(Format().suffix(last.results)) >= LONGEST
        assert completion.turns[-1].messages()[1:] == []
    metrics = tool_metrics([Group(problems([1])[0], found)])
    assert metrics["tools/dropped_frequency"] == len(dropped) / len(found)
    assert metrics["tools/call_frequency"] == sum(len(t.results) for each in found for t in each.turns) / len(found)


def test_of_results_that_certainly_do_not_fit_the_beginning_is_recorded(
    samplers: Callable[[str], Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not tokenised."""
    tool = ToolResult("find", "ab" * 2000)
    monkeypatch.setattr(
        Host, "finished", lambda host, *_: [(n, [tool]) for n in [*host.running] if host.running.pop(n)]
    )
    monkeypatch.setattr(Format, "exceeds", lambda _, results, most: len(results[0].content) > most)
    monkeypatch.setattr(Format, "suffix", lambda *_: pytest.fail("tokenised"))
    found = completions(with_tools(samplers("qwen3")), [5, 3], 4)
    (result,) = next(each.turns[-1].results for each in found if each.turns[-1].results)
    assert result.content == "ab" * 500 + "… (4,000 characters)"


def test_a_parked_row_keeps_its_place_in_memory(
    samplers: Callable[[str], Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, most = with_tools(samplers("qwen3"), Host(lambda conversation: 4)), 0
    sampler.rows = 3
    decode = Scheduler.decode_chunk

    def counted(scheduler: Scheduler) -> None:
        nonlocal most
        alive = sum(scheduler.outputs.stop[scheduler.rows.index] == -1)
        most = max(most, alive + len(scheduler.parked))
        decode(scheduler)

    monkeypatch.setattr(Scheduler, "decode_chunk", counted)
    completions(sampler, [5, 2], 3)
    assert most == 3


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.proof)])
def test_an_environments_text_opens_the_prompt(samplers: Callable[[str], Sampler], arch: str) -> None:
    """What differs within a group is the masked beginning of each completion."""
    host = Host()
    host.texts = ["GO", "GO"]
    (group,) = with_tools(samplers(arch), host).sample(problems([4]), 2, FILTERED, seed=5, first_number=7)
    assert group.problem.tokens == [*problems([4])[0].tokens, *b"GO"]
    host.texts = ["GO", "GET SET", "G"]
    (group,) = with_tools(samplers(arch), host).sample(problems([4]), 3, FILTERED, seed=5, first_number=7)
    assert group.problem.tokens == [*problems([4])[0].tokens, ord("G")]
    for completion, text in zip(group.completions, ["O", "ET SET", ""], strict=True):
        opening = [*text.encode()]
        assert completion.tokens[: len(opening)] == opening
        own = np.array(completion.mask or [1] * len(completion.tokens), bool)
        assert not own[: len(opening)].any() and own[len(opening)]
        assert own.sum() == sum(turn.tokens for turn in completion.turns)
        logps = full_logps(samplers(arch).policy, group.problem.tokens, completion.tokens, 0.9)
        assert np.abs(logps - completion.logps)[own].max() < 1e-4


LENGTH, GROUP = 30, 2


def equal(groups: list[Group], others: list[Group]) -> bool:
    pairs = zip(completions_of(groups), completions_of(others), strict=True)
    return all(
        (x.tokens, x.stop) == (y.tokens, y.stop)
        and np.allclose(x.logps, y.logps, atol=2e-5)
        and np.allclose(x.log_kept, y.log_kept, atol=2e-5)
        for x, y in pairs
    )


def completions_of(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


class HalfRight(NGrams):
    """Drafts of known completions, of which half have a wrong token, and one in five is missing."""

    def __init__(self, known: list[Completion]) -> None:
        super().__init__()
        self.known, self.rng = known, np.random.default_rng(0)

    def drafts(self, index: np.ndarray, latest_B: np.ndarray, uniform_BN: np.ndarray) -> np.ndarray | None:
        drafts = np.zeros((len(index), DRAFTED), np.int32)
        for draft, row in zip(drafts, index.tolist(), strict=True):
            follows = self.known[row].tokens[self._outputs.length[row] + 1 :][:DRAFTED]
            draft[: len(follows)] = follows
            if self.rng.random() < 0.5:
                draft[self.rng.integers(DRAFTED)] += 1
        return None if self.rng.random() < 0.2 else drafts


@pytest.mark.parametrize(
    ("arch", "sampling", "eos", "rows"),
    [
        pytest.param("qwen3", FILTERED, MANY_ENDS, None, id="ends"),
        pytest.param("qwen3", GREEDY, None, 3, id="few rows"),
        pytest.param("qwen3_moe", FILTERED, MANY_ENDS, None, id="experts", marks=pytest.mark.proof),
    ],
)
def test_tokens_are_those_without_drafts(
    models: Path, arch: str, sampling: Sampling, eos: list[int] | None, rows: int | None
) -> None:
    sampler = Sampler(policy_of(models, arch, eos), LENGTH, rows=rows)
    plain = sampler.sample(problems(), GROUP, sampling, 0, 0)
    sampler.speculation = speculation = Speculation(HalfRight(completions_of(plain)), ON_CPU)
    rng = np.random.default_rng(0)
    speculation.passes = lambda rows, is_ragged: int(rng.choice([0, 3, 8]))  # steps and passes in turn
    assert equal(sampler.sample(problems(), GROUP, sampling, 0, 0), plain)
    metrics = speculation.metrics(np.zeros(4, np.int64))
    assert 0.8 < metrics["speculation/accepted"] < DRAFTED and 0.1 < metrics["speculation/share"] <= 1


def test_a_draft_model_draws_what_the_policy_draws(models: Path) -> None:
    policy = policy_of(models, eos=MANY_ENDS)
    sampler = Sampler(policy, LENGTH)
    plain = sampler.sample(problems(), GROUP, FILTERED, 0, 0)
    sampler.speculation = speculation = Speculation(DraftModel(policy.model, policy.split_model), ON_CPU)
    rng = np.random.default_rng(0)
    speculation.passes = lambda rows, is_ragged: int(rng.choice([0, 3]))
    assert equal(sampler.sample(problems(), GROUP, FILTERED, 0, 0), plain)
    # The policy as its own draft model: every draft is accepted up to the end of its row.
    assert speculation.metrics(np.zeros(4, np.int64))["speculation/accepted"] > 2.9


def test_n_grams_find_what_followed_in_the_prompt_the_group_and_an_earlier_epoch() -> None:
    prompt, known = [1, 2, 3, 4, 5, 6], NGrams()
    for sibling, follows in (([7, 8, 9, 10], [8, 9, 10]), ([7, 20, 21], [20, 21, 0])):
        outputs = CompletionBuffer(2, 9, None, [-1], ())
        for row, tokens in enumerate((sibling, [6])):
            outputs.insert(row, tokens)
        known.begin([prompt], 2, GREEDY, outputs)
        row, uniforms = np.array([1]), np.zeros((1, 4))
        assert known.drafts(row, np.array([9]), uniforms) is None  # after 5 6 6
        outputs.insert(1, [2])
        drafted = known.drafts(row, np.array([3]), uniforms)
        assert drafted is not None and drafted.tolist() == [[4, 5, 6]]  # of the prompt
        outputs.insert(1, [5, 6])
        drafted = known.drafts(row, np.array([7]), uniforms)
        assert drafted is not None and drafted.tolist() == [follows]  # of the other completion
        known.end()
    known.begin([prompt], 2, GREEDY, CompletionBuffer(2, 9, None, [-1], ()))
    drafted = known.drafts(np.array([0]), np.array([20]), uniforms)
    assert drafted is None  # nothing was followed by 5 6 20
    assert known.would_accept(np.array([0]), 3) == (0, 0)


@pytest.mark.parametrize(
    ("verified_s", "accepted", "passes"), [(1.5, 2, PASSES), (1.5, 0, 0), (4.0, 2, 0)], ids=["pays", "guesses", "costs"]
)
def test_drafts_are_verified_while_that_is_faster(verified_s: float, accepted: int, passes: int) -> None:
    class Guesses(NGrams):
        def would_accept(self, index: np.ndarray, count: int) -> tuple[int, int]:
            return len(index) * count, len(index) * count * accepted

    speculation, row = Speculation(Guesses(), ON_CPU), np.array([0])
    speculation.begin([[1]], 1, GREEDY, CompletionBuffer(1, 9, None, [-1], ()))
    assert speculation.passes(1, False) == 0  # until a step has been measured
    for _ in range(2):
        speculation.decoded(row, (1, 64), 8, 1.0)
    assert speculation.passes(99, False) == 0
    assert speculation.passes(1, False) == (TRIAL if accepted else 0)
    for _ in range(TRIAL):
        speculation.verified(np.array([accepted]), (1, 64), DRAFTED, verified_s)
    assert speculation.passes(1, True) == passes
    for _ in range(64):  # nothing is accepted any more
        speculation.verified(np.array([0]), (1, 64), DRAFTED, verified_s)
    assert speculation.passes(1, True) == 0 == speculation.passes(1, False)


@pytest.mark.parametrize(("accepted", "pass_s"), [(0, 1.5), (DRAFTED, 12.0)], ids=["useless", "slow"])
def test_a_draft_model_that_does_not_pay_is_tried_seldom(accepted: int, pass_s: float) -> None:
    class Given(NGrams):
        is_free = False

        def would_accept(self, index: np.ndarray, count: int) -> tuple[int, int]:
            return 0, 0

    speculation, passes = Speculation(Given(), ON_CPU), list[int]()
    for _ in range(32):
        speculation.begin([[1]], 4, GREEDY, CompletionBuffer(4, 9, None, [-1], ()))
        for rows in (4, 2, 1):
            for _ in range(2):
                speculation.decoded(np.arange(rows), (rows, 64), 8, 1.0)
            passes.append(speculation.passes(rows, False))
            for _ in range(passes[-1]):
                speculation.verified(np.full(rows, accepted), (rows, 64), DRAFTED, pass_s)
    assert passes[0] == PROBE and sum(passes) == 3 * PROBE  # in rollouts 1, 2 and, once their time is known, 18
    for _ in range(64):
        speculation.verified(np.full(1, 3), (1, 64), DRAFTED, 1.5)
    speculation.begin([[1]], 4, GREEDY, CompletionBuffer(4, 9, None, [-1], ()))
    assert speculation.passes(2, False) == TRIAL  # they pay after all


def test_why_a_run_has_no_drafts(models: Path, tmp_path: Path) -> None:
    policy, settings = policy_of(models), {"model": "m", "data": "d", "use_speculative_decoding": True}
    sampler = Sampler(policy, 1)

    def notes(**more: Any) -> list[str]:
        told: list[str] = []
        made = speculation_of(parse(settings | more), policy, sampler, told.append)
        assert (made is None) == bool(told)
        return told

    assert notes() == []
    assert notes(presence_penalty=1.0) == ["Speculative decoding is off: penalties depend on every token before."]
    assert notes(output_regex="a+") == ["Speculative decoding is off: output is constrained."]
    sampler.has_continuous_batching = False
    assert "one group at a time" in notes()[0]
    sampler.has_continuous_batching = True
    random_models.tiny_model(tmp_path / "mamba", "mamba")
    with pytest.raises(UserError, match="cannot take back what it has read"):
        notes(draft_model_path=str(tmp_path / "mamba"))
    tokenizer = policy.tokenizer
    policy.tokenizer = dataclasses.make_dataclass("Other", [])()
    policy.tokenizer.get_vocab = dict
    with pytest.raises(UserError, match="has other tokens than"):
        notes(draft_model_path=str(models / "qwen3"))
    policy.tokenizer = tokenizer
    assert notes(draft_model_path=str(models / "qwen3")) == []
