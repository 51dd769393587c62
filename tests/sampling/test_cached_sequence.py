"""One sequence continued over several prompts, in every kind of cache, against the whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backend.engine.model_probe import split
from backend.models.policy import load_model
from backend.sampling import cached_sequence
from backend.sampling.cached_sequence import CachedSequence
from backend.sampling.sampler import GREEDY, Sampling
from tests.support.random_models import tiny_model

PROMPT = [5, 9, 13, 40, 7, 21, 88, 3]


def sequence_of(models: Path, arch: str) -> CachedSequence:
    folder = models / arch
    if not folder.exists():
        tiny_model(folder, arch)
    model = load_model(str(folder), "model")[0]
    return CachedSequence(model, split(model))


def take(sequence: CachedSequence, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """The first `count` of up to 40 tokens."""
    steps = sequence.generate(prompt, sampling, np.linspace(0.01, 0.99, 40, dtype=np.float32))
    return [next(steps).token for _ in range(count)]


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text", "mamba"])
def test_every_turn_continues_as_a_fresh_sequence_does(models: Path, arch: str):
    """Turns that go on, go back and begin anew; a sliding window and a state are read again to go back."""
    sequence = sequence_of(models, arch)
    first = take(sequence, PROMPT, 6)
    turns = [[*PROMPT, *first, 30, 31, 32], [*PROMPT, *first[:3], 50, 51], PROMPT, [*PROMPT, *first], [77, 78]]
    for prompt in turns:
        again = take(sequence, prompt, 8)
        assert again == take(sequence_of(models, arch), prompt, 8), prompt


def test_a_long_prompt_can_be_stopped_between_its_pieces(models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cached_sequence, "PREFILL_CHUNK", 3)
    sequence, checks = sequence_of(models, "qwen3"), []

    def check() -> None:
        checks.append(len(sequence.tokens))
        if len(checks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(sequence.generate(PROMPT, GREEDY, np.zeros(4, np.float32), check))
    assert checks == [0, 3, 6]
    assert take(sequence, PROMPT, 5) == take(sequence_of(models, "qwen3"), PROMPT, 5)
