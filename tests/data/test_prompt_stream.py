"""Every problem once an epoch, in a seeded order that resumes from its cursor."""

from __future__ import annotations

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from backend.data.prompts import PromptStream
from backend.types import Problem


def problems(count: int) -> list[Problem]:
    return [Problem(n, str(n), [], [], "") for n in range(count)]


def indices(prompt_stream: PromptStream, *takes: int) -> list[int]:
    return [problem.index for take in takes for problem in prompt_stream.take(take)]


@hypothesis.settings(deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), takes=st.lists(st.integers(0, 17), max_size=12))
def test_every_problem_comes_once_an_epoch_whatever_the_step_sizes(count: int, seed: int, takes: list[int]) -> None:
    prompt_stream = PromptStream(problems(count), seed)
    taken = indices(prompt_stream, *takes)
    assert prompt_stream.cursor == len(taken) and prompt_stream.epoch == len(taken) / count
    for start in range(0, len(taken), count):
        epoch = taken[start : start + count]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < count or sorted(epoch) == list(range(count))


@hypothesis.settings(deadline=None)
@given(count=st.integers(1, 30), at=st.integers(0, 100))
def test_the_cursor_alone_resumes_the_order(count: int, at: int) -> None:
    uninterrupted = indices(PromptStream(problems(count), 3), 150)
    assert indices(PromptStream(problems(count), 3, cursor=at), 150 - at) == uninterrupted[at:]
    prompt_stream = PromptStream(problems(count), 3)
    prompt_stream.take(120)
    prompt_stream.cursor = at  # a step that was stopped puts its problems back
    assert indices(prompt_stream, 150 - at) == uninterrupted[at:]
