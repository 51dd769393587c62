"""Speculative decoding (arXiv:2211.17192) of the last few rows of a rollout: drafts of DRAFTED tokens, which one pass
verifies. A draft counts where it equals what the policy draws there with the row's own random number, so tokens are the
same as without.

Drafts are n-grams: what followed the same last tokens in the prompt, in the group's other completions, or in those that
the same prompt had before; or a smaller model's. It is used while it is faster: what a pass of either kind takes, and
how many drafts would have been accepted, is measured in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from backend.config.config import Config
from backend.engine.caches import SlotCache, StepContext, new_prompt_cache
from backend.engine.chunk_sizes import PREFILL_TOKENS, capacity
from backend.engine.graph import compiled_by_shape
from backend.engine.model_probe import split
from backend.engine.output_layer import SplitModel
from backend.models.policy import load_other
from backend.sampling.outputs import CompletionBuffer
from backend.sampling.row_costs import DRAFTED, RowCosts
from backend.sampling.sampler import Sampling, sample_tokens
from backend.utils.errors import UserError
from backend.utils.text import quote

GRAMS = 3, 2  # last tokens that have to occur before a draft, the most first

REMEMBERED_TOKENS = 1 << 24  # of earlier completions, 4 bytes each

MARGIN = 1.1  # by which speculation has to be faster before it begins

WINDOW = 64  # drafts over which the accepted tokens are averaged

PASSES, TRIAL, PROBE = 8, 4, 2  # passes between two decisions whether it pays; and where its time is not known, or
# whether a draft model's drafts are good

STALE = 8  # rollouts after which a step without drafts is measured again


class Speculation:
    """Decides when drafts are verified, by what was measured: seconds of a step and of a pass over drafts, by rows, and
    the accepted tokens of a draft. `counts`: steps of both kinds, passes over drafts, drafts, and accepted tokens."""

    def __init__(self, drafts: Drafts, costs: RowCosts) -> None:
        self.drafts = drafts
        self.most_rows = costs.drafted_rows
        self.counts = np.zeros(4, np.int64)
        self._seconds: dict[tuple[int, bool], float] = {}  # of a step, or a pass over drafts, of that many rows
        self._traced: set[tuple[int, ...]] = set()
        self._rollout = 0
        self._measured_at: dict[int, int] = {}  # the rollout in which a step of that many rows was last measured
        # by rows, 0 for probes: how many there were, and the rollout of the next
        self._trials: dict[int, tuple[int, int]] = {}
        self._accepted, self._averaged = 0.0, 0.0  # mean accepted tokens, of as many drafts

    def begin(self, prompts: Sequence[list[int]], G: int, sampling: Sampling, outputs: CompletionBuffer) -> None:
        self._rollout += 1
        self.drafts.begin(prompts, G, sampling, outputs)

    def passes(self, rows: int, is_ragged: bool) -> int:
        """Passes over drafts before the next decision; 0: decode without."""
        step, verified = self._seconds.get((rows, False)), self._seconds.get((rows, True))
        if rows > self.most_rows or step is None:
            return 0
        if not is_ragged and self._rollout - self._measured_at[rows] >= STALE:
            return 0
        margin = 1.0 if is_ragged else MARGIN
        if verified is not None and 1 + self._accepted > margin * verified / step:
            self._trials[rows] = 0, self._rollout + 1
            return PASSES
        costs = [  # of a pass, in steps
            self._seconds[n, True] / t
            for (n, drafted), t in self._seconds.items()
            if not drafted and (n, True) in self._seconds
        ]
        is_slow = 1 + self._accepted < min(costs, default=0.0)  # a pass takes more steps than it saves
        is_good = 1 + self._accepted >= MARGIN and not is_slow  # else no number of rows pays
        trials, next_rollout = self._trials.get(rows if is_good else 0, (0, 0))
        if is_ragged or self._rollout < next_rollout or (self.drafts.is_free and not is_good):
            return 0
        # Drafts whose time is known took too long, and will again.
        distance = min(trials + (3 if is_slow or (is_good and verified is not None) else 0), 6)
        self._trials[rows if is_good else 0] = trials + 1, self._rollout + (1 << distance)
        return TRIAL if is_good else PROBE

    def decoded(self, index: np.ndarray, shape: tuple[int, int], steps: int, seconds: float) -> None:
        """Called after `steps` steps of rows and columns `shape`, `seconds` each, of the open completions `index`."""
        self.counts[0] += steps
        rows = shape[0]
        if rows <= self.most_rows:
            self._measure((rows, False), shape, seconds)
            self._measured_at[rows] = self._rollout
        self._average(*self.drafts.would_accept(index if rows <= self.most_rows else index[:0], steps))

    def verified(self, accepted_B: np.ndarray, shape: tuple[int, int], drafted: int, seconds: float) -> None:
        """Called after a pass over drafts of `drafted` tokens (0: there were none)."""
        self.counts += [1, drafted > 0, len(accepted_B) * (drafted > 0), accepted_B.sum()]
        self._measure((shape[0], True), (*shape, drafted), seconds)
        self._average(len(accepted_B), int(accepted_B.sum()))

    def _measure(self, kind: tuple[int, bool], shape: tuple[int, ...], seconds: float) -> None:
        if shape in self._traced:
            known = self._seconds.get(kind, seconds)
            self._seconds[kind] = known + (min(seconds, 2 * known) - known) / 8
        self._traced.add(shape)  # the first of a shape is compiled

    def _average(self, count: int, accepted: int) -> None:
        if count:
            self._averaged = min(self._averaged + count, WINDOW + count)
            self._accepted += (accepted - count * self._accepted) / self._averaged

    def metrics(self, since: np.ndarray) -> dict[str, float]:
        """Of the steps after `counts` were `since`."""
        steps, passes, drafts, accepted = (self.counts - since).tolist()
        return {"speculation/accepted": accepted / max(drafts, 1), "speculation/share": passes / max(steps, 1)}


def speculation_of(config: Config, policy: Any, sampler: Any, note: Callable[[str], None]) -> Speculation | None:
    """A run's speculation; None if off or impossible: `note` gets the reason. Raises UserError for the draft model."""
    if not config.use_speculative_decoding:
        return None
    reasons = {
        "completions wait for tools": sampler.tools is not None,
        "penalties depend on every token before": config.penalises,
        "output is constrained": config.holds_output,
        "this model's completions are decoded one group at a time": not sampler.has_continuous_batching,
    }
    for reason, holds in reasons.items():
        if holds:
            note(f"Speculative decoding is off: {reason}.")
            return None
    name, setting = config.draft_model_path, "draft_model_path"
    if not name:
        return Speculation(NGrams(), sampler.row_costs)
    model = load_other(name, setting, policy.tokenizer, config)
    if any(type(cache) is not KVCache for cache in new_prompt_cache(model)):
        raise UserError(setting, f"The draft model {quote(name, 60)} cannot take back what it has read; use another.")
    return Speculation(DraftModel(model, split(model)), sampler.row_costs)


class Drafts(Protocol):
    """Proposes tokens. `is_free`: `would_accept` says how good drafts would be."""

    is_free: bool

    def begin(self, prompts: Sequence[list[int]], G: int, sampling: Sampling, outputs: CompletionBuffer) -> None:
        """Called before a rollout."""
        ...

    def end(self) -> None:
        """Called after it."""
        ...

    def would_accept(self, index: np.ndarray, count: int) -> tuple[int, int]:
        """The last `count` tokens were decoded without drafts: of the completions `index`, how many drafts could have
        been made before one of them, and how many tokens of those would have been accepted in all."""
        ...

    def drafts(self, index: np.ndarray, latest_B: np.ndarray, uniform_BN: np.ndarray) -> np.ndarray | None:
        """[B, DRAFTED]: what may follow the completions `index` and the token `latest`, which `outputs` lacks still;
        None where nothing is known. `uniform_BN`: the random numbers of the next tokens."""
        ...


class NGrams:
    """Drafts from what followed the same tokens before."""

    is_free = True

    def __init__(self) -> None:
        self._earlier: dict[tuple[int, ...], list[np.ndarray]] = {}  # completions by prompt, the oldest prompt first
        self._remembered = 0

    def begin(self, prompts: Sequence[list[int]], G: int, sampling: Sampling, outputs: CompletionBuffer) -> None:
        self._prompts, self._G, self._outputs = prompts, G, outputs
        self._texts: dict[int, _Text] = {}  # of prompts whose completions were asked for

    def end(self) -> None:
        for p, prompt in enumerate(self._prompts):
            key = tuple(prompt)
            self._remembered -= sum(map(len, self._earlier.pop(key, [])))
            rows = range(p * self._G, (p + 1) * self._G)
            self._earlier[key] = [np.array(self._outputs.tokens(row), np.int32) for row in rows]
            self._remembered += sum(map(len, self._earlier[key]))
        while self._remembered > REMEMBERED_TOKENS and len(self._earlier) > 1:
            self._remembered -= sum(map(len, self._earlier.pop(next(iter(self._earlier)))))
        self._texts = {}

    def drafts(self, index: np.ndarray, latest_B: np.ndarray, uniform_BN: np.ndarray) -> np.ndarray | None:
        found = [self._draft(row, token) for row, token in zip(index.tolist(), latest_B.tolist(), strict=True)]
        if not any(found):
            return None
        # What fills a short draft up is compared like the rest, and nearly never equal.
        return np.array([(draft + [0] * DRAFTED)[:DRAFTED] for draft in found], np.int32)

    def _draft(self, row: int, latest: int) -> list[int]:
        text = self._text(row // self._G)
        text.read(row, self._outputs.tokens(row, text.length(row)))
        return text.after([*text.last(row), latest])

    def would_accept(self, index: np.ndarray, count: int) -> tuple[int, int]:
        drafts = accepted = 0
        for row in index.tolist():
            text, tokens = self._text(row // self._G), self._outputs.tokens(row)
            start = max(text.length(row), len(tokens) - count)
            text.read(row, tokens[text.length(row) : start])
            drafts += len(tokens) - start
            for place in range(start, len(tokens)):
                draft = text.after(text.last(row))
                pairs = enumerate(zip(draft, tokens[place:], strict=False))
                accepted += next((i for i, (x, y) in pairs if x != y), min(len(draft), len(tokens) - place))
                text.read(row, [tokens[place]])
        return drafts, accepted

    def _text(self, p: int) -> _Text:
        if p not in self._texts:
            rows = range(p * self._G, (p + 1) * self._G)
            earlier = [tokens.tolist() for tokens in self._earlier.get(tuple(self._prompts[p]), ())]
            self._texts[p] = _Text(self._prompts[p], earlier, {row: self._outputs.tokens(row) for row in rows})
        return self._texts[p]


class _Text:
    """The completions of a prompt, each after the prompt's last tokens, and where each n-gram last occurred."""

    def __init__(self, prompt: list[int], earlier: list[list[int]], completions: dict[int, list[int]]) -> None:
        self._lead = prompt[-GRAMS[0] :]
        self._places: list[dict[tuple[int, ...], tuple[list[int], int]]] = [{} for _ in GRAMS]
        self._of_row: dict[int, list[int]] = {}
        self._add([], prompt)
        for tokens in earlier:
            self._add(list(self._lead), tokens)
        for row, tokens in completions.items():
            self._of_row[row] = list(self._lead)
            self._add(self._of_row[row], tokens)

    def length(self, row: int) -> int:
        return len(self._of_row[row]) - len(self._lead)

    def last(self, row: int) -> list[int]:
        return self._of_row[row][-GRAMS[0] :]

    def read(self, row: int, tokens: list[int]) -> None:
        self._add(self._of_row[row], tokens)

    def after(self, tokens: list[int]) -> list[int]:
        for n, places in zip(GRAMS, self._places, strict=True):
            if (found := places.get(tuple(tokens[-n:]))) is not None:
                sequence, place = found
                return sequence[place : place + DRAFTED]
        return []

    def _add(self, sequence: list[int], tokens: list[int]) -> None:
        first = len(sequence)
        sequence += tokens
        for n, places in zip(GRAMS, self._places, strict=True):
            for place in range(max(first, n), len(sequence)):
                places[tuple(sequence[place - n : place])] = sequence, place


class DraftModel:
    """Drafts from a smaller model with the same tokens, which draws them with the rows' own random numbers too, so they
    are often equal. Row b is in the columns 0 … of its cache, as many as it has tokens."""

    is_free = False

    def __init__(self, model: nn.Module, split_model: SplitModel) -> None:
        self._model, self._split_model = model, split_model
        self._steps: dict[Sampling, Callable[..., Any]] = {}

    def begin(self, prompts: Sequence[list[int]], G: int, sampling: Sampling, outputs: CompletionBuffer) -> None:
        self._prompts, self._G, self._outputs = prompts, G, outputs
        if sampling not in self._steps:
            self._steps = {sampling: compiled_by_shape(partial(self._step, sampling), [self._model.state])}
        self._draw = self._steps[sampling]
        self.end()

    def end(self) -> None:
        self._index, self._keys, self._values = np.zeros(0, np.int64), [], []

    def would_accept(self, index: np.ndarray, count: int) -> tuple[int, int]:
        self.end()  # the caches lack these tokens
        return 0, 0

    def drafts(self, index: np.ndarray, latest_B: np.ndarray, uniform_BN: np.ndarray) -> np.ndarray | None:
        texts = [self._prompts[row // self._G] + self._outputs.tokens(row) for row in index.tolist()]
        # The latest token's column. The one before it is read again: of a draft accepted as a whole it is not there.
        end_B = np.array([len(text) for text in texts], np.int32)
        columns = capacity(int(end_B.max()) + DRAFTED)
        places = np.flatnonzero(np.isin(self._index, index))  # rows stay in order
        if len(places) < len(index):
            self._read(texts, columns)
        elif len(places) < len(self._index) or columns > self._keys[0].shape[2]:
            more = [(0, 0), (0, 0), (0, max(columns - self._keys[0].shape[2], 0)), (0, 0)]
            for arrays in (self._keys, self._values):
                arrays[:] = [mx.pad(array[mx.array(places)], more) for array in arrays]
        self._index = index
        column_C = mx.arange(self._keys[0].shape[2])
        token_BN = mx.array([[text[-1], latest] for text, latest in zip(texts, latest_B.tolist(), strict=True)])
        drafted: list[mx.array] = []
        for i in range(DRAFTED):
            slot_B = mx.array(end_B + i - (token_BN.shape[1] - 1))
            token_B, self._keys, self._values = self._draw(
                token_BN, slot_B, mx.array(uniform_BN[:, i]), column_C, self._keys, self._values
            )
            drafted.append(token_B)
            token_BN = token_B[:, None]
        mx.eval(drafted, self._keys, self._values)
        return np.stack([np.array(token_B) for token_B in drafted], axis=1)

    def _step(self, sampling, token_BN, slot_B, uniform_B, column_C, keys, values):
        step = StepContext(slot_B, mx.zeros_like(slot_B), column_C, token_BN.shape[1])
        cache = [SlotCache(k, v, step) for k, v in zip(keys, values, strict=True)]
        logits = self._split_model.logits(self._split_model.hidden(token_BN, cache)[:, -1])
        keys, values = ([layer.arrays[i] for layer in cache] for i in (0, 1))
        return sample_tokens(logits, uniform_B, sampling).token_B, keys, values

    def _read(self, texts: list[list[int]], columns: int) -> None:
        longest = max(map(len, texts))
        tokens = mx.array([text + [0] * (longest - len(text)) for text in texts])
        cache = new_prompt_cache(self._model)
        chunk = max(1, PREFILL_TOKENS // len(texts))
        for start in range(0, longest, chunk):
            self._split_model.hidden(tokens[:, start : start + chunk], cache)
            mx.eval([(layer.keys, layer.values) for layer in cache])
        keys, values = ([getattr(layer, name)[..., :longest, :] for layer in cache] for name in ("keys", "values"))
        more = [(0, 0), (0, 0), (0, columns - longest), (0, 0)]
        self._keys, self._values = ([mx.pad(array, more) for array in arrays] for arrays in (keys, values))
