"""A trial finds which fast paths a model's code allows; the others are skipped and reported with their reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cohere, gemma2, qwen3
from mlx_lm.utils import load_model

from backend.engine.caches import new_prompt_cache
from backend.engine.model_probe import split
from tests.support import random_models
from tests.support.architectures.tiny_configs import tiny_config
from tests.support.forward_cases import Case, assert_same_gradients, gradients, model_of

UNSPLIT = "The vocabulary is computed for every token, prompts included, instead of for completions alone: "
UNSHARED = "Prompts are read once per completion instead of once per group: "

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "rms_norm_eps": 1e-6}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


def capped(cap: float, **own: Any) -> nn.Module:
    sizes = SIZES | {"model_type": "gemma2", "final_logit_softcapping": cap} | own
    return gemma2.Model(gemma2.ModelArgs.from_dict(sizes))


def scaled() -> nn.Module:
    return cohere.Model(cohere.ModelArgs.from_dict(SIZES | {"model_type": "cohere", "logit_scale": 0.0625}))


@pytest.mark.parametrize(
    "build", [lambda: capped(30.0), lambda: capped(1000.0), scaled], ids=["cap", "mild cap", "scale"]
)
def test_what_a_model_does_with_its_logits_behind_the_head_is_part_of_it(build: Callable[[], nn.Module]) -> None:
    """A soft cap of 1000 changes logits of this size by a millionth; it is still part of the model."""
    mx.random.seed(0)
    model, case = build(), Case()
    model.eval()
    split_model = split(model)
    assert split_model.head is not None and split_model.hidden(case.tokens_BL).shape[-1] == 32
    assert not [sentence for sentence in split_model.slow_paths if sentence.startswith(UNSPLIT)]
    np.testing.assert_allclose(np.array(case.logps(split_model)[0]), np.array(case.plain(model, 1.0)[0]), atol=1e-5)
    _, actual = gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])
    _, plain = gradients(model, lambda: case.plain(model, 0.7)[0])
    assert_same_gradients(actual, plain)


def test_layers_that_find_each_others_keys_in_the_caches_get_caches_in_learning(models: Path) -> None:
    """Without a cache Gemma 3n computes keys that it otherwise shares: another model than is sampled from."""
    folder = random_models.tiny_model(models / "gemma3n", "gemma3n", own=tiny_config("gemma3n"), noise=0.05)
    model, tokens = load_model(folder)[0], mx.array([[5, 6, 70, 8, 33, 100, 5, 6, 250, 11, 12, 13]])
    decoded = mx.concatenate(
        [model(tokens[:, t : t + 1], cache) for cache in [new_prompt_cache(model)] for t in range(12)], 1
    )
    split_model = split(model)
    np.testing.assert_allclose(np.array(split_model.hidden(tokens)), np.array(decoded), atol=1e-4)
    assert not mx.allclose(model(tokens), decoded, atol=0.1)


def test_a_model_wrong_with_a_shared_prompt_reads_whole_rows(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not take its positions from the cache's offset raises nothing; only its numbers are wrong."""
    plain = qwen3.Attention.__call__

    def from_the_start(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            cache.offset = 0
        return plain(layer, x, mask, cache)

    monkeypatch.setattr(qwen3.Attention, "__call__", from_the_start)
    split_model = split(model_of(models))
    assert split_model.prefix_layers == 0
    assert split_model.slow_paths == [UNSHARED + "with a shared prompt the model gives other numbers."]
