"""Sampling groups: one prefill a problem, then the completions of a step decoded together, as many rows as there is room for.

The exact ids that were drawn are kept, with the log-probability of each under the policy. Nothing here knows rewards,
settings or files; the policy comes in as an object with `model`, `split_model`, `tokenizer`, `eos_ids`, `pad_id`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from backend.engine.cpu.affinity import on_one_core
from backend.engine.slot_cache import SlotCache
from backend.generation.fused_model import FusedModel
from backend.generation.kv_rows import Prefilled, WaitingQueue
from backend.generation.outputs import OPEN, Outputs
from backend.generation.sampler import GREEDY, Drawn, Sampling, draw, uniforms
from backend.generation.scheduler import BURST, Scheduler, on_host
from backend.spec.memory.chunking import PREFILL_TOKENS
from backend.types import Group, Problem

Poll = Callable[[int], None]


class Rollout:
    """Samples completions from a policy. Keeps its compiled steps from one call to the next.

    `stop` strings end a completion as soon as its text contains one; the text keeps it. `rows`: most completions decoded at
    once (None: all); the others wait for their places, and nothing but rounding depends on it. `merge`: whether decoding may
    hold a second copy of the weights that adapters change. `poll` is called after each burst with the number of tokens
    drawn so far, and may raise to stop.
    """

    def __init__(
        self,
        policy: Any,
        max_tokens: int,
        *,
        stop: Sequence[str] = (),
        prefill_chunk: int = 2048,
        rows: int | None = None,
        merge: bool = True,
    ) -> None:
        self.policy = policy
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.prefill_chunk = prefill_chunk
        self.rows = rows
        self.slow_paths: list[str] = []
        others = [tree for tree in [getattr(policy, "reference_model", None)] if tree is not None]
        self.fused = FusedModel(policy.model, policy.split_model, merge=merge, others=others)
        self._steps: dict[Sampling, Callable[..., Any]] = {}
        plain = all(type(cache) is KVCache for cache in make_prompt_cache(policy.model))
        self.together = plain and self._decodes_together()
        """Whether rows of unequal length are decoded together: every layer's cache is keys and values of all tokens, and
        the model takes such rows. Others are decoded a group at a time."""
        if not self.together:
            reason = (
                "the model does not take rows of unequal length" if plain else "its cache is not keys and values alone"
            )
            self.slow_paths.append(f"Completions are decoded one group at a time: {reason}.")

    @on_one_core()
    def sample(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: Sampling,
        seed: int,
        place: int,
        poll: Poll = lambda drawn: None,
    ) -> list[Group]:
        """One group for each problem. `place` is the first problem's number in the run: it and `seed` fix the draws."""
        names = [(place + p, g) for p in range(len(problems)) for g in range(group_size)]
        numbers_NT = uniforms(seed, names, self.max_tokens)
        outputs = Outputs(len(names), self.max_tokens, self.policy.tokenizer, self.policy.eos_ids, self.stop)
        decode = self._decode_together if self.together else self._decode_by_group
        self.policy.model.eval()
        self.fused.refresh()
        try:
            decode([problem.tokens for problem in problems], group_size, sampling, numbers_NT, outputs, poll)
        finally:
            self.fused.release()
        made = [outputs.completion(row) for row in range(len(names))]
        mx.clear_cache()
        return [Group(problem, made[i * group_size : (i + 1) * group_size]) for i, problem in enumerate(problems)]

    # ── plain caches: everything together ────────────────────────────────────────────────────────────────────────────

    def _decode_together(
        self, prompts: list[list[int]], G: int, sampling: Sampling, numbers_NT: np.ndarray, outputs: Outputs, poll: Poll
    ) -> None:
        line = WaitingQueue(prompts, G, self._prefill)
        scheduler = Scheduler(line, outputs, numbers_NT, sampling, self.step(sampling), self.rows or line.waiting)
        while scheduler.arrange():
            scheduler.burst()
            poll(outputs.drawn)

    def _prefill(self, prompts: list[list[int]]) -> Prefilled:
        """Each prompt read once, padded on the left, a chunk of columns at a time."""
        split_model, length = self.fused.split_model, max(map(len, prompts))
        pad_P = [length - len(prompt) for prompt in prompts]
        tokens = mx.array([[self.policy.pad_id] * pad + prompt for pad, prompt in zip(pad_P, prompts, strict=True)])
        cache = [BatchKVCache(pad_P) for _ in make_prompt_cache(self.policy.model)]
        chunk = min(self.prefill_chunk, max(1, PREFILL_TOKENS // len(prompts)))
        hidden = None
        for start in range(0, length, chunk):
            hidden = split_model.hidden(tokens[:, start : start + chunk], cache)
            mx.eval(hidden, [(layer.keys, layer.values) for layer in cache])
        assert hidden is not None
        keys, values = zip(*(layer.keys_and_values() for layer in cache), strict=True)
        return Prefilled(split_model.logits(hidden[:, -1]), list(keys), list(values), np.array(pad_P))

    def step(self, sampling: Sampling) -> Callable[..., Any]:
        """One compiled decoding step for this kind of sampling; weights are inputs, so updates are seen."""
        if sampling not in self._steps:
            split_model = self.fused.split_model

            def decode(token_B, slot, pad_B, uniform_B, place_C, keys, values):
                mask = ((place_C <= slot) & (place_C >= pad_B[:, None]))[:, None, None]
                offset_B = slot - pad_B
                cache = [SlotCache(k, v, slot, mask, offset_B) for k, v in zip(keys, values, strict=True)]
                logits = split_model.logits(split_model.hidden(token_B[:, None], cache)[:, -1])
                drawn = draw(logits, uniform_B, sampling)
                return tuple(drawn), [c.keys for c in cache], [c.values for c in cache]

            self._steps[sampling] = mx.compile(decode, inputs=[self.fused.model.state])
        return self._steps[sampling]

    def _decodes_together(self) -> bool:
        """Tried on three short prompts. Some models want one position or one mask for all rows, or look at their own
        numbers, which a compiled step forbids: they raise. The numbers are compared too, should one only be wrong."""
        self.policy.model.eval()
        self.fused.refresh()
        pad, end = self.policy.pad_id, self.policy.eos_ids[0]
        prompts = [[pad], [pad, end], [end, pad, end]]
        places = [(module, name) for module in self.fused.modules for name in module]
        before = [module[name] for module, name in places]
        outputs = Outputs(3, 2, self.policy.tokenizer, [-1], ())
        try:
            numbers_NT = np.zeros((3, 2), np.float32)
            scheduler = Scheduler(
                WaitingQueue(prompts, 1, self._prefill), outputs, numbers_NT, GREEDY, self.step(GREEDY), 3
            )
            while scheduler.arrange():
                scheduler.burst()
        except Exception:
            for (module, name), value in zip(places, before, strict=True):
                module[name] = value  # a trace that breaks off leaves its placeholders where the weights were
            return False
        finally:
            self.fused.release()
        made = [outputs.parts(row) for row in range(3)]
        found = [logps[t] for t in range(2) for _, logps, _ in made]
        shown = [prompt + tokens[:t] for t in range(2) for prompt, (tokens, _, _) in zip(prompts, made, strict=True)]
        wanted = [self._greedy_logp(tokens) for tokens in shown]
        precise = self.policy.logits(self.policy.hidden(mx.array([[pad]]))).dtype == mx.float32
        return np.allclose(found, wanted, atol=1e-3 if precise else 0.3)

    def _greedy_logp(self, tokens: list[int]) -> float:
        """The log-probability of the likeliest token after these, by the model as a whole."""
        logits = self.policy.logits(self.policy.hidden(mx.array([tokens])))[:, -1]
        return float(draw(logits, mx.zeros(1), GREEDY).logp_B)

    # ── other caches: a group at a time ──────────────────────────────────────────────────────────────────────────────

    def _decode_by_group(
        self, prompts: list[list[int]], G: int, sampling: Sampling, numbers_NT: np.ndarray, outputs: Outputs, poll: Poll
    ) -> None:
        """For sliding windows, state spaces and the like: rows of one prompt are equally long and need no padding."""
        for p, prompt in enumerate(prompts):
            for first in range(p * G, (p + 1) * G, self.rows or G):
                index = np.arange(first, min(first + (self.rows or G), (p + 1) * G))
                stream = self._group_tokens(prompt, len(index), sampling, mx.array(numbers_NT[index].T))
                self._read_stream(stream, index, outputs, poll)

    def _group_tokens(self, prompt: list[int], G: int, sampling: Sampling, uniform_TB: mx.array) -> Iterator[Drawn]:
        """What each step draws, for G rows."""
        split_model = self.fused.split_model
        cache = make_prompt_cache(self.policy.model)
        logits = split_model.logits(split_model.hidden(mx.array([prompt]), cache)[:, -1])
        for layer in cache:
            layer.state = tree_map(lambda part: _repeated(part, G), layer.state)
        logits = mx.repeat(logits, G, axis=0)
        for t in range(self.max_tokens):
            drawn = draw(logits, uniform_TB[t], sampling)
            mx.async_eval(*drawn)
            yield drawn
            logits = split_model.logits(split_model.hidden(drawn.token_B[:, None], cache)[:, -1])

    def _read_stream(self, stream: Iterator[Drawn], index: np.ndarray, outputs: Outputs, poll: Poll) -> None:
        fresh: list[Drawn] = []
        for t, drawn in enumerate(stream, 1):
            fresh.append(drawn)
            if t % BURST == 0 or t == self.max_tokens:
                outputs.read(index, *on_host(fresh))
                fresh = []
                poll(outputs.drawn)
                if not (outputs.stop[index] == OPEN).any():
                    break


def _repeated(part: Any, G: int) -> Any:
    """A cache's array for one row, for G rows; counters and other plain values stay."""
    is_row = isinstance(part, mx.array) and part.ndim > 0 and part.shape[0] == 1
    return mx.repeat(part, G, axis=0) if is_row else part
