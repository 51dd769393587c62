"""Completions that call tools: tokens, masks and log-probabilities, whatever the tools' latency."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.sampling.conversations import Tools, tool_metrics
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling, keyed_uniforms, sample_tokens
from backend.sampling.scheduler import Scheduler
from backend.tools.host import Poll, ToolSchemas
from backend.types import Completion, Group, Problem, ToolCall, ToolResult
from tests.sampling.test_rollout import FILTERED, MANY_ENDS, full_logits, full_logps, policy_of, problems

SUFFIX, LONGEST = 7, 40


class Format:
    """Every turn calls a tool named by its ids; the results are as many tokens as the name says."""

    def parse(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return "", [] if ids[-1] % 4 == 0 else [ToolCall(str(sum(ids)), {})]

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


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.proof), "mamba"])
def test_a_conversation_is_one_sequence(samplers: Callable[[str], Sampler], arch: str) -> None:
    """Log-probabilities of the model's tokens are those of one pass over the whole conversation, and each token follows
    from the random number of its own place in it."""
    import mlx.core as mx

    sampler, prompts = with_tools(samplers(arch)), problems([70, 1])
    groups = sampler.sample(prompts, 3, FILTERED, seed=5, first_number=7)
    found = [completion for group in groups for completion in group.completions]
    assert max(len(completion.turns) for completion in found) > 2
    for p, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
            own = np.array(completion.mask or [1] * len(completion.tokens), bool)
            assert sum(turn.tokens for turn in completion.turns) == own.sum()
            assert sum(turn.result_tokens for turn in completion.turns) == (~own).sum()
            logps = full_logps(sampler.policy, group.problem.tokens, completion.tokens, 0.9)
            assert np.abs(logps - completion.logps)[own].max() < 1e-4
            logits_TV = mx.array(full_logits(sampler.policy, group.problem.tokens, completion.tokens))
            uniform_T = mx.array(keyed_uniforms(5, [(7 + p, g)], LONGEST)[0, : len(completion.tokens)])
            again = np.array(sample_tokens(logits_TV, uniform_T, FILTERED).token_B)
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


@pytest.mark.parametrize(("arch", "rows"), [("qwen3", 2), ("mamba", None)])
def test_latency_and_batch_change_no_token(samplers: Callable[[str], Sampler], arch: str, rows: int | None) -> None:
    expected = completions(with_tools(samplers(arch)), [64, 2], 2)
    other = with_tools(samplers(arch), Host(slow))
    other.rows = rows
    for one, two in zip(expected, completions(other, [64, 2], 2), strict=True):
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
