"""Sampling groups: one prefill a problem, then every completion of the step decoded together.

The exact ids that were drawn are kept, with the log-probability of each under the policy. Nothing here knows rewards,
settings or files; the policy comes in as an object with `model`, `hidden`, `logits`, `tokenizer`, `eos_ids`, `pad_id`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from backend.nouns import Completion, Group, Problem, Stop
from backend.sampler import GREEDY, Drawn, Sampling, draw, uniforms

BUCKET = 64
"""Tokens by which the cache grows; the decoding step is traced once for each size."""

BURST = 8
"""Tokens between two looks at what has been drawn; the device works on while Python looks."""


class SlotCache:
    """A layer's keys and values in arrays of fixed capacity [B, heads, capacity, head_dim], written one slot a step.

    Position and mask are arrays, so a compiled step serves every position of its capacity. It speaks mlx-lm's cache
    protocol: `offset` is each row's own position (its left padding taken off), for the rotary embedding.
    """

    def __init__(self, keys: mx.array, values: mx.array, slot: mx.array, mask: mx.array, offset_B: mx.array) -> None:
        self.keys, self.values, self.slot, self.mask, self.offset = keys, values, slot, mask, offset_B

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self.slot, axes=(2,))
        self.values = mx.slice_update(self.values, values, self.slot, axes=(2,))
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.mask


@dataclass(slots=True)
class Draft:
    """A completion being drawn: what was drawn so far, as in Completion, and why it ended (None: not yet)."""

    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    log_kept: list[float] = field(default_factory=list)
    stop: Stop | None = None


class Rollout:
    """Samples completions from a policy. Keeps its compiled steps from one call to the next.

    `stop` strings end a completion as soon as its text contains one; the text keeps it. `poll` is called after each
    burst with the number of tokens drawn so far, and may raise to stop.
    """

    def __init__(self, policy: Any, max_tokens: int, *, stop: Sequence[str] = (), prefill_chunk: int = 2048) -> None:
        self.policy = policy
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.prefill_chunk = prefill_chunk
        self.eos = mx.array(policy.eos_ids)
        self._steps: dict[Sampling, Callable[..., Any]] = {}
        plain = all(type(cache) is KVCache for cache in make_prompt_cache(policy.model))
        self.together = plain and self._decodes_together()
        """Whether all rows are decoded together: every layer's cache is keys and values of all tokens, and the model
        takes rows of unequal length. Others are decoded a group at a time."""

    def sample(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: Sampling,
        seed: int,
        place: int,
        poll: Callable[[int], None] = lambda drawn: None,
    ) -> list[Group]:
        """One group for each problem. `place` is the first problem's number in the run: it and `seed` fix the draws."""
        names = [(place + p, g) for p in range(len(problems)) for g in range(group_size)]
        uniform_BT = uniforms(seed, names, self.max_tokens)
        self.policy.model.eval()
        decode = self._decode_together if self.together else self._decode_by_group
        drafts = decode([problem.tokens for problem in problems], group_size, sampling, uniform_BT, poll)
        made = [self._completion(draft) for draft in drafts]
        mx.clear_cache()
        return [Group(problem, made[i * group_size : (i + 1) * group_size]) for i, problem in enumerate(problems)]

    # ── plain caches: everything together ────────────────────────────────────────────────────────────────────────────

    def _decode_together(
        self, prompts: list[list[int]], G: int, sampling: Sampling, uniform_BT: np.ndarray, poll: Callable[[int], None]
    ) -> list[Draft]:
        logits, keys, values, pad_P = self._prefill(prompts)
        rows = _Rows(
            np.arange(len(prompts) * G), mx.repeat(mx.array(pad_P), G), mx.array(uniform_BT.T),
            [mx.repeat(k, G, axis=0) for k in keys], [mx.repeat(v, G, axis=0) for v in values],
        )  # fmt: skip
        length = max(map(len, prompts))
        drawn = draw(mx.repeat(logits, G, axis=0), rows.uniform_TB[0], sampling)
        return self._bursts(rows, drawn, length, self._step(sampling), poll)

    def _decodes_together(self) -> bool:
        """Tried on three short prompts. Some models want one position or one mask for all rows, or look at their own
        numbers, which a compiled step forbids: they raise. The numbers are compared too, should one only be wrong."""
        self.policy.model.eval()
        pad, end = self.policy.pad_id, self.policy.eos_ids[0]
        prompts = [[pad], [pad, end], [end, pad, end]]
        places = [(module, name) for module in self.policy.model.modules() for name in module]
        before = [module[name] for module, name in places]
        try:
            logits, keys, values, pad_P = self._prefill(prompts)
            first = draw(logits, mx.zeros(3), GREEDY)
            rows = _Rows(np.arange(3), mx.array(pad_P), mx.zeros((1, 3)), keys, values)
            rows.grow(4)
            parts, *_ = self._step(GREEDY)(
                first.token_B, mx.zeros(3, mx.bool_), mx.array(3), rows.pad_B, mx.zeros(3), rows.keys, rows.values
            )
            mx.eval(first, parts)
        except Exception:
            for (module, name), value in zip(places, before, strict=True):
                module[name] = value  # a trace that breaks off leaves its placeholders where the weights were
            return False
        found = np.array(mx.concatenate([first.logp_B, Drawn(*parts).logp_B]))
        longer = [[*prompt, token] for prompt, token in zip(prompts, np.array(first.token_B).tolist(), strict=True)]
        wanted = [self._greedy_logp(prompt) for prompt in prompts + longer]
        return np.allclose(found, wanted, atol=1e-3 if logits.dtype == mx.float32 else 0.3)

    def _greedy_logp(self, tokens: list[int]) -> float:
        """The log-probability of the likeliest token after these, by the model as a whole."""
        logits = self.policy.logits(self.policy.hidden(mx.array([tokens])))[:, -1]
        return float(draw(logits, mx.zeros(1), GREEDY).logp_B)

    def _prefill(self, prompts: list[list[int]]) -> tuple[mx.array, list[mx.array], list[mx.array], list[int]]:
        """Each prompt read once, padded on the left. → last logits [P, V], keys and values by layer, padding [P]."""
        policy, length = self.policy, max(map(len, prompts))
        pad_P = [length - len(prompt) for prompt in prompts]
        tokens = mx.array([[policy.pad_id] * pad + prompt for pad, prompt in zip(pad_P, prompts, strict=True)])
        cache = [BatchKVCache(pad_P) for _ in make_prompt_cache(policy.model)]
        hidden = None
        for start in range(0, length, self.prefill_chunk):
            hidden = policy.hidden(tokens[:, start : start + self.prefill_chunk], cache)
            mx.eval(hidden, [(layer.keys, layer.values) for layer in cache])
        assert hidden is not None
        keys, values = zip(*(layer.keys_and_values() for layer in cache), strict=True)
        return policy.logits(hidden[:, -1]), list(keys), list(values), pad_P

    def _bursts(
        self,
        rows: _Rows,
        drawn: Drawn,
        length: int,
        step: Callable[..., Any],
        poll: Callable[[int], None],
    ) -> list[Draft]:
        """Decode until every row has ended; look at the drawn tokens every few steps and drop rows that are done."""
        drafts = [Draft() for _ in rows.index]
        fresh, token = [drawn], drawn.token_B
        done = self._ended(token)
        for t in range(1, self.max_tokens + 1):
            last = t == self.max_tokens
            if t % BURST == 0 or last or t == 1:
                self._read(fresh, rows.index, drafts)
                fresh = []
                poll(sum(len(draft.tokens) for draft in drafts))
                alive = [i for i, row in enumerate(rows.index) if drafts[row].stop is None]
                if last or not alive:
                    break
                done, token = self._thin(rows, alive, done, token, drafts)
            rows.grow(length + t)
            parts, done, rows.keys, rows.values = step(
                token, done, mx.array(length + t - 1), rows.pad_B, rows.uniform_TB[t], rows.keys, rows.values
            )
            drawn = Drawn(*parts)
            fresh.append(drawn)
            token = drawn.token_B
            mx.async_eval(parts, done, rows.keys, rows.values)
        return drafts

    def _step(self, sampling: Sampling) -> Callable[..., Any]:
        """One compiled decoding step for this kind of sampling; weights are inputs, so updates are seen."""
        if sampling not in self._steps:
            policy = self.policy

            def step(token, done, slot, pad_B, uniform_B, keys, values):
                place = mx.arange(keys[0].shape[2])[None]
                mask = ((place <= slot) & (place >= pad_B[:, None]))[:, None, None]
                cache = [SlotCache(k, v, slot, mask, slot - pad_B) for k, v in zip(keys, values, strict=True)]
                logits = policy.logits(policy.hidden(token[:, None], cache)[:, -1])
                drawn = draw(logits, uniform_B, sampling)
                drawn = drawn._replace(token_B=mx.where(done, policy.pad_id, drawn.token_B))
                return (
                    tuple(drawn),
                    done | self._ended(drawn.token_B),
                    [c.keys for c in cache],
                    [c.values for c in cache],
                )

            self._steps[sampling] = mx.compile(step, inputs=[policy.model.state])
        return self._steps[sampling]

    def _ended(self, token_B: mx.array) -> mx.array:
        return (token_B[:, None] == self.eos[None]).any(axis=-1)

    def _thin(
        self, rows: _Rows, alive: list[int], done: mx.array, token: mx.array, drafts: list[Draft]
    ) -> tuple[mx.array, mx.array]:
        """Rows that ended by a stop string are marked done; when half are done, only a power of two of them stay."""
        if self.stop:
            done = mx.array([drafts[row].stop is not None for row in rows.index])
        target = 1 << (len(alive) - 1).bit_length()  # few sizes, few traces
        if target > len(rows.index) // 2:
            return done, token
        ended = [i for i, row in enumerate(rows.index) if drafts[row].stop is not None]
        keep = alive + ended[: target - len(alive)]
        rows.keep(keep)
        return done[mx.array(keep)], token[mx.array(keep)]

    # ── other caches: a group at a time ──────────────────────────────────────────────────────────────────────────────

    def _decode_by_group(
        self, prompts: list[list[int]], G: int, sampling: Sampling, uniform_BT: np.ndarray, poll: Callable[[int], None]
    ) -> list[Draft]:
        """For sliding windows, state spaces and the like: rows of one prompt are equally long and need no padding."""
        drafts: list[Draft] = []
        for p, prompt in enumerate(prompts):
            before = sum(len(draft.tokens) for draft in drafts)
            uniform_TB = mx.array(uniform_BT[p * G : (p + 1) * G].T)
            tokens = self._group_tokens(prompt, G, sampling, uniform_TB)
            drafts += self._read_stream(tokens, G, lambda drawn, before=before: poll(before + drawn))
        return drafts

    def _group_tokens(self, prompt: list[int], G: int, sampling: Sampling, uniform_TB: mx.array) -> Iterator[Drawn]:
        """What each step draws, for G rows."""
        policy = self.policy
        cache = make_prompt_cache(policy.model)
        logits = policy.logits(policy.hidden(mx.array([prompt]), cache)[:, -1])
        for layer in cache:
            layer.state = tree_map(lambda part: _repeated(part, G), layer.state)
        logits = mx.repeat(logits, G, axis=0)
        for t in range(self.max_tokens):
            drawn = draw(logits, uniform_TB[t], sampling)
            mx.async_eval(*drawn)
            yield drawn
            logits = policy.logits(policy.hidden(drawn.token_B[:, None], cache)[:, -1])

    def _read_stream(self, stream: Iterator[Drawn], G: int, poll: Callable[[int], None]) -> list[Draft]:
        drafts, index, fresh = [Draft() for _ in range(G)], range(G), []
        for t, pair in enumerate(stream, 1):
            fresh.append(pair)
            if t % BURST == 0 or t == self.max_tokens:
                self._read(fresh, index, drafts)
                fresh = []
                poll(sum(len(draft.tokens) for draft in drafts))
                if all(draft.stop for draft in drafts):
                    break
        return drafts

    # ── what was drawn ───────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, fresh: list[Drawn], index: Iterable[int], drafts: list[Draft]) -> None:
        """Append freshly drawn tokens to the drafts that are still open, up to where each one ends."""
        tokens, logps, kept = (np.array(mx.stack(list(part), axis=1)) for part in zip(*fresh, strict=True))
        for i, row in enumerate(index):
            draft = drafts[row]
            if draft.stop is None:
                self._extend(draft, tokens[i].tolist(), logps[i].tolist(), kept[i].tolist())

    def _extend(self, draft: Draft, tokens: list[int], logps: list[float], kept: list[float]) -> None:
        start = len(draft.tokens)
        for token, logp, log_kept in zip(tokens, logps, kept, strict=True):
            draft.tokens.append(token)
            draft.logps.append(logp)
            draft.log_kept.append(log_kept)
            if token in self.policy.eos_ids:
                draft.stop = "eos"
                break
        if self.stop and (cut := self._stop_string_end(draft, start)) is not None:
            del draft.tokens[cut:], draft.logps[cut:], draft.log_kept[cut:]
            draft.stop = "string"
        elif draft.stop is None and len(draft.tokens) >= self.max_tokens:
            draft.stop = "length"

    def _stop_string_end(self, draft: Draft, start: int) -> int | None:
        """The number of tokens after which the text first contains a stop string. Text, not ids, is compared: the same
        words may be merged into other tokens."""
        text = self._text(draft)
        if not any(word in text for word in self.stop):
            return None
        for end in range(start + 1, len(draft.tokens) + 1):
            if any(word in self._decoded(draft.tokens[:end]) for word in self.stop):
                return end
        return None

    def _completion(self, draft: Draft) -> Completion:
        assert draft.stop is not None
        return Completion(draft.tokens, draft.logps, self._text(draft), draft.stop, draft.log_kept)

    def _text(self, draft: Draft) -> str:
        return self._decoded(draft.tokens[:-1] if draft.stop == "eos" else draft.tokens)

    def _decoded(self, tokens: list[int]) -> str:
        return self.policy.tokenizer.decode(tokens, skip_special_tokens=False)


class _Rows:
    """The rows that are still being decoded, and their arrays. `index` maps each to its completion."""

    def __init__(
        self, index: np.ndarray, pad_B: mx.array, uniform_TB: mx.array, keys: list[mx.array], values: list[mx.array]
    ) -> None:
        self.index, self.pad_B, self.uniform_TB, self.keys, self.values = index, pad_B, uniform_TB, keys, values

    def grow(self, length: int) -> None:
        """Make room for `length` tokens, a bucket at a time."""
        short = -(-length // BUCKET) * BUCKET - self.keys[0].shape[2]
        if short > 0:
            pad = [(0, 0), (0, 0), (0, short), (0, 0)]
            self.keys = [mx.pad(k, pad) for k in self.keys]
            self.values = [mx.pad(v, pad) for v in self.values]

    def keep(self, places: list[int]) -> None:
        chosen = mx.array(places)
        self.index = self.index[places]
        self.pad_B, self.uniform_TB = self.pad_B[chosen], self.uniform_TB[:, chosen]
        self.keys, self.values = [k[chosen] for k in self.keys], [v[chosen] for v in self.values]


def _repeated(part: Any, G: int) -> Any:
    """A cache's array for one row, for G rows; counters and other plain values stay."""
    is_row = isinstance(part, mx.array) and part.ndim > 0 and part.shape[0] == 1
    return mx.repeat(part, G, axis=0) if is_row else part
