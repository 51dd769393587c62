"""One sequence of tokens with its model's own caches, kept from one turn of a conversation to the next, so only what is
new is prefilled. Samples the same tokens as a rollout from the same uniforms, but for rounding."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from backend.engine.caches import new_prompt_cache
from backend.engine.images import PromptImages, padded_images, positioned, read_prompt
from backend.engine.output_layer import SplitModel
from backend.sampling.grammar import GrammarState
from backend.sampling.sampler import Sampling, SamplingState

PREFILL_CHUNK = 512  # prompt tokens between two chances to stop


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, its log-probability in nats before any filter, and the logs of the mass that filters and grammar kept,
    and the grammar alone. `likeliest`: ids with their log-probabilities, if asked for."""

    token: int
    logp: float
    log_kept: float
    log_held: float | None = None
    likeliest: Sequence[tuple[int, float]] = field(default=(), kw_only=True)


class CachedSequence:
    """Continues one sequence at a time. `tokens` are in the cache; `prefilled` tokens of the last prompt were not."""

    def __init__(self, model: nn.Module, split_model: SplitModel) -> None:
        self._model, self._split_model = model, split_model
        self.tokens: list[int] = []
        self.prefilled = 0
        self._cache: list[Any] = []
        self._has_images = False
        self.clear()

    def clear(self) -> None:
        self.tokens, self._cache = [], new_prompt_cache(self._model)

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        uniform_T: np.ndarray,
        check: Callable[[], None] = lambda: None,
        held: GrammarState | None = None,
        images: PromptImages | None = None,
        top: int = 0,
    ) -> Generator[SampledToken]:
        """Up to as many tokens after `prompt` as there are uniforms, end-of-sequence ids included. `check` is called
        between pieces of the prompt, and may raise. `held`: the state of a grammar, as completion 0. `images`: of the
        prompt, which is then read whole. `top`: how many of the likeliest tokens to report with each."""
        if images is not None:
            sampling = replace(sampling, without=images.placeholders)
        try:
            logits_1V = self._prefill(prompt, check, images)
            T, first = len(uniform_T), np.zeros(1, np.int64)
            uniforms = [mx.array([number]) for number in uniform_T.tolist()]
            drawing = SamplingState(sampling, [list(prompt)], 1, T, held)
            ahead = drawing.first(first, logits_1V, uniforms[0]) if T else None
            for t in range(T):
                current, logits_of_current_1V = ahead, logits_1V
                assert current is not None
                if t + 1 < T:  # a last token is never fed
                    cache = positioned(self._cache, shift=images.shift) if images and images.shift else self._cache
                    hidden_11H = self._split_model.hidden(current.token_B[:, None], cache)
                    logits_1V = self._split_model.logits(hidden_11H[:, -1])
                    if held is not None:
                        mx.async_eval(logits_1V)  # computed while the grammar reads the token
                    ahead = drawing.next(first, current.token_B, logits_1V, uniforms[t + 1])
                token, *logs = (float(field.item()) for field in current)  # pyright: ignore[reportArgumentType]
                if t + 1 < T:
                    self.tokens.append(int(token))
                sampled = SampledToken(int(token), *logs)
                if top:
                    likeliest = _likeliest(logits_of_current_1V[0], top, sampling.temperature or 1.0)
                    sampled = replace(sampled, likeliest=likeliest)
                yield sampled
        except GeneratorExit:  # the caller has enough; the cache is sound
            raise
        except BaseException:
            self.clear()  # an error may have come between a token's keys and its number
            raise

    def _prefill(self, prompt: Sequence[int], check: Callable[[], None], images: PromptImages | None) -> mx.array:
        if images is not None or self._has_images:  # equal tokens may stand for other pictures
            self.clear()
        self._has_images = images is not None
        # The last token is read in any case: its logits have to be computed.
        pairs = enumerate(zip(self.tokens, prompt[:-1], strict=False))
        common = next((i for i, (x, y) in pairs if x != y), min(len(self.tokens), len(prompt) - 1))
        surplus = len(self.tokens) - common
        if surplus and not (can_trim_prompt_cache(self._cache) and trim_prompt_cache(self._cache, surplus) == surplus):
            self.clear()  # a state that has read on cannot go back
        self.tokens = self.tokens[:common]
        self._model.eval()
        rest = list(prompt[len(self.tokens) :])
        self.prefilled = len(rest)
        padded = padded_images([images], len(rest)) if images is not None else None
        hidden_1LH = None
        for start in range(0, len(rest), PREFILL_CHUNK):
            check()
            end = start + PREFILL_CHUNK
            hidden_1LH = read_prompt(self._split_model, mx.array([rest]), self._cache, (start, end), padded)
            mx.eval(hidden_1LH)
            self.tokens += rest[start:end]
        assert hidden_1LH is not None
        return self._split_model.logits(hidden_1LH[:, -1])


def _likeliest(logits_V: mx.array, count: int, temperature: float) -> list[tuple[int, float]]:
    logp_V = nn.log_softmax(logits_V.astype(mx.float32) / temperature)
    best_K = mx.argpartition(-logp_V, count - 1)[:count]
    pairs = zip(best_K.tolist(), logp_V[best_K].tolist(), strict=True)  # pyright: ignore[reportArgumentType]
    return sorted(pairs, key=lambda pair: -pair[1])  # pyright: ignore[reportReturnType]
