"""Completions whose turns are given: the model computes log-probabilities, and the text is the script's."""

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.sampling import rollout as rollout_module
from backend.sampling.conversations import Rollout
from backend.sampling.outputs import CompletionBuffer
from backend.sampling.sampler import Sampled, SamplingState

WIDEST = 1 << 12  # columns of a row's places, in a float32


def script_turns(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, turns: Sequence[Sequence[str]]) -> None:
    """From now on completion i of a rollout says turns[i % len(turns)], each turn ended by the tokenizer's end."""
    end = tokenizer.eos_token_id
    ids = [[[*tokenizer.encode(text, add_special_tokens=False), end] for text in row] for row in turns]
    here = threading.local()  # `began`: row → the turn that it is in, and the place where that began

    def places(seed: int, keys: Sequence[tuple[int, ...]], count: int) -> np.ndarray:
        here.began = {}
        return (np.arange(len(keys))[:, None] * WIDEST + np.arange(count)[None]).astype(np.float32)

    def scripted(sampled: Sampled, index: np.ndarray, uniform_B: mx.array) -> Sampled:
        if not hasattr(here, "began"):  # the sampler's own trial
            return sampled
        tokens: list[int] = []
        for row, place in zip(index.tolist(), np.array(uniform_B).astype(int) % WIDEST, strict=True):
            turn, start = here.began.get(row, (0, 0))
            told = ids[row % len(ids)]
            said = told[turn] if turn < len(told) else [end]
            tokens.append(said[min(place - start, len(said) - 1)])
        # The log-probabilities are of the tokens that were drawn, not of these.
        return sampled._replace(token_B=mx.array(tokens, sampled.token_B.dtype), logp_B=0 * sampled.logp_B)

    first, results, heard = SamplingState.first, SamplingState.results, Rollout.results

    def hear(self: Rollout, outputs: CompletionBuffer, *rest: Any) -> tuple[list[int], list[int]]:
        going_on, ending = heard(self, outputs, *rest)
        for row in going_on:
            here.began[row] = here.began.get(row, (0, 0))[0] + 1, int(outputs.length[row])
        return going_on, ending

    monkeypatch.setattr(rollout_module, "keyed_uniforms", places)
    monkeypatch.setattr(Rollout, "results", hear)
    monkeypatch.setattr(
        SamplingState, "first", lambda self, i, logits, u, *w: scripted(first(self, i, logits, u, *w), i, u)
    )
    monkeypatch.setattr(SamplingState, "results", lambda self, r, i, t, u: scripted(results(self, r, i, t, u), i, u))
