"""From groups of completions to arrays: advantages, masks, padding, and the parts a step is cut into.

Cutting a batch differently changes nothing: each token's weight is fixed for the whole optimizer step before any cut
(`losses.token_weights`), parts only drop padding, and every row remembers its place. Nothing here runs a model or
knows a reward function. Arrays end in their axes: B rows (completions), K reward functions, T completion tokens,
L prompt and completion tokens; sequences are padded on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import mlx.core as mx

from backend.training.microbatch import PromptUse, RowLengths, plan_micro_batches


class CompletionLike(Protocol):
    """What is read of a completion; `backend.types.Completion` has it."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def logps(self) -> list[float]: ...
    @property
    def log_kept(self) -> list[float]: ...
    @property
    def stop(self) -> str: ...
    @property
    def advantage(self) -> float: ...


class ProblemLike(Protocol):
    """What is read of a problem; `backend.types.Problem` has it."""

    @property
    def tokens(self) -> list[int]: ...


class GroupLike(Protocol):
    """What is read of a group; `backend.types.Group` has it."""

    @property
    def problem(self) -> ProblemLike: ...
    @property
    def completions(self) -> Sequence[CompletionLike]: ...


# ---- arrays ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """The completions of a step, or some of them, as arrays. The last letters of a name are its axes.

    Token t of a completion is predicted from position prompt_length + t − 1 of `tokens_BL`. `row_B` is each row's
    place in the batch that was packed, `group_B` the number of its group there. The last four arrays are None until
    somebody has worked them out.
    """

    pad_id: int
    tokens_BL: mx.array
    """Prompt and completion, then padding."""
    prompt_length_B: mx.array
    length_B: mx.array
    """Tokens of the completion, masked ones included."""
    completion_BT: mx.array
    mask_BT: mx.array
    """1.0 where a token is trained on."""
    sampling_logp_BT: mx.array
    advantage_B: mx.array
    group_B: mx.array
    row_B: mx.array
    weight_BT: mx.array | None = None
    old_logp_BT: mx.array | None = None
    ref_logp_BT: mx.array | None = None
    is_ratio_BT: mx.array | None = None
    """[B, T], or [B, 1] where a completion has one correction as a whole; worked out for parts, which stay as they are."""

    def __len__(self) -> int:
        return self.mask_BT.shape[0]

    def take(self, rows: Sequence[int]) -> Batch:
        """The rows at these places, in this order, as wide as before."""
        index = mx.array(list(rows), mx.int32)
        return self._changed(lambda name, x: x[index])

    def trimmed(self, multiple: int = 1) -> Batch:
        """As wide as the longest row needs, rounded up to a multiple."""
        widths = {"T": _width(_listed(self.length_B), multiple), "L": _width(self._sizes(), multiple)}
        return self._changed(lambda name, x: _fitted(x, widths[name[-1]], self._filling(name)) if x.ndim == 2 else x)

    def parts(
        self,
        *,
        rows: int | None = None,
        token_budget: int | None = None,
        prompts: PromptUse = "repeated",
        multiple: int = 1,
    ) -> Iterator[Batch]:
        """Cut into micro-batches of at most `rows` rows and `token_budget` tokens, padding counted, so that little of it
        is padding; the one that needs most memory first. `prompts`: how often the model reads them.
        `multiple`: widths are rounded up to it, for few shapes."""
        known = zip(*map(_listed, (self.group_B, self.prompt_length_B, self.length_B)), strict=True)
        places = plan_micro_batches(
            [RowLengths(place, *one) for place, one in enumerate(known)],
            most_rows=rows, token_budget=token_budget, prompts=prompts,
        )  # fmt: skip
        for part in places:
            yield self.take(part).trimmed(multiple)

    def with_signal(self) -> Batch:
        """Without the rows that cannot move the policy: advantage 0, or no token trained on.

        Only when `beta` and `entropy_coef` are 0: those terms need no advantage. The weights stay those of the whole
        step, so they must be there already; ValueError otherwise.
        """
        if self.weight_BT is None:
            raise ValueError("weight_BT is worked out over the whole step before rows are left out.")
        signal_B = (self.advantage_B != 0) & (self.mask_BT.sum(axis=1) > 0)
        return self.take([row for row, kept in enumerate(_listed(signal_B)) if kept])

    def scattered(self, parts: Iterable[Batch], values_BT: Iterable[mx.array]) -> mx.array:
        """What was worked out for parts of this batch, one [b, t] array each, back in its rows: [B, T], else 0."""
        places = {row: place for place, row in enumerate(_listed(self.row_B))}
        whole_BT = mx.zeros(self.mask_BT.shape, mx.float32)
        for part, x_bt in zip(parts, values_BT, strict=True):
            width = min(x_bt.shape[1], whole_BT.shape[1])
            whole_BT[mx.array([places[row] for row in _listed(part.row_B)]), :width] = x_bt[:, :width]
        return whole_BT

    def _sizes(self) -> list[int]:
        return _listed(self.prompt_length_B + self.length_B)

    def _filling(self, name: str) -> int:
        return self.pad_id if name in ("tokens_BL", "completion_BT") else 0

    def _changed(self, change: Callable[[str, mx.array], mx.array]) -> Batch:
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(name, x) for name, x in arrays.items() if isinstance(x, mx.array)})


def pack(groups: Sequence[GroupLike], *, pad_id: int, mask_truncated_completions: bool = False) -> Batch:
    """The completions of all groups as one Batch, in their order, padded to the longest.

    With `mask_truncated_completions` a completion that ran into the length limit is not trained on; its reward has
    counted in its group all the same (DAPO, arXiv:2503.14476). Raises ValueError where a completion's log-probabilities
    are not as many as its tokens.
    """
    rows = [(number, group.problem, one) for number, group in enumerate(groups) for one in group.completions]
    for number, _, one in rows:
        if len(one.tokens) != len(one.logps):
            raise ValueError(f"A completion of group {number} has {len(one.tokens)} tokens, {len(one.logps)} logps.")
    lengths = [len(one.tokens) for _, _, one in rows]
    hidden = [mask_truncated_completions and one.stop == "length" for _, _, one in rows]
    longest = _width(lengths)
    sequences = [problem.tokens + one.tokens for _, problem, one in rows]
    return Batch(
        pad_id=pad_id,
        tokens_BL=_padded(sequences, _width([len(ids) for ids in sequences]), pad_id, mx.int32),
        prompt_length_B=mx.array([len(problem.tokens) for _, problem, _ in rows], mx.int32),
        length_B=mx.array(lengths, mx.int32),
        completion_BT=_padded([one.tokens for _, _, one in rows], longest, pad_id, mx.int32),
        mask_BT=_padded([[float(not h)] * n for n, h in zip(lengths, hidden, strict=True)], longest, 0, mx.float32),
        sampling_logp_BT=_padded([_drawn_with(one) for _, _, one in rows], longest, 0, mx.float32),
        advantage_B=mx.array([one.advantage for _, _, one in rows], mx.float32),
        group_B=mx.array([number for number, _, _ in rows], mx.int32),
        row_B=mx.arange(len(rows), dtype=mx.int32),
    )


def _drawn_with(one: CompletionLike) -> list[float]:
    """What each token was really drawn with: the policy's log-probability over the share that the filters left."""
    if not one.log_kept:
        return one.logps
    return [logp - kept for logp, kept in zip(one.logps, one.log_kept, strict=True)]


def _listed(x: Any) -> list[Any]:
    return x.tolist() if hasattr(x, "tolist") else list(x)


def _width(lengths: Sequence[int], multiple: int = 1) -> int:
    """At least 1, so that a batch of empty completions still has a width."""
    return -(-max([1, *lengths]) // multiple) * multiple


def _padded(rows: Sequence[Sequence[float]], width: int, filling: float, dtype: mx.Dtype) -> mx.array:
    return mx.array([[*row, *[filling] * (width - len(row))] for row in rows], dtype).reshape(len(rows), width)


def _fitted(x_BT: mx.array, width: int, filling: int) -> mx.array:
    missing = max(0, width - x_BT.shape[1])
    return mx.pad(x_BT[:, :width], [(0, 0), (0, missing)], constant_values=filling)


# ---- what the sampling looked like -----------------------------------------------------------------------------


def completion_metrics(groups: Sequence[GroupLike]) -> dict[str, float]:
    """`length_metrics` of the completions of all groups."""
    completions = [(group.problem, one) for group in groups for one in group.completions]
    return length_metrics(
        lengths=[len(one.tokens) for _, one in completions],
        finished=[one.stop != "length" for _, one in completions],
        prompt_lengths=[len(problem.tokens) for problem, _ in completions],
    )


def length_metrics(lengths: Sequence[int], finished: Sequence[bool], prompt_lengths: Sequence[int]) -> dict[str, float]:
    """Lengths in tokens over the rows, and over those that ended by themselves (0 if none did).

    `hit_max_tokens_ratio` (TRL: `completions/clipped_ratio`) is the share that ran into the length limit. `num_tokens`
    is this batch's, a prompt counted once for each of its completions; the trainer keeps the running total.
    """
    ended = [length for length, done in zip(lengths, finished, strict=True) if done] or [0]
    cut_off = 1 - sum(finished) / len(finished)
    return {
        **_three("completions/{}_length", lengths),
        **_three("completions/{}_terminated_length", ended),
        "completions/clipped_ratio": cut_off,
        "hit_max_tokens_ratio": cut_off,
        "num_tokens": float(sum(prompt_lengths) + sum(lengths)),
    }


def _three(name: str, values: Sequence[int]) -> dict[str, float]:
    numbers = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    return {name.format(key): float(value) for key, value in numbers.items()}


def importance_ratio(
    old_logp_BT: mx.array,
    sampling_logp_BT: mx.array,
    mask_BT: mx.array,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> tuple[mx.array, dict[str, mx.array]]:
    """π_old / π_sampler, which corrects for a sampler that is not quite the policy (quantised, bf16): `is_ratio`.

    `mode` is `token_` ([B, T]) or `sequence_` ([B, 1], the product over a row) and then `truncate` (held between
    `clip_min` and `clip_max`: TIS) or `mask` (0 outside of them: MIS). A token that the sampler could not score (NaN)
    counts as 1. Metrics: `sampling/sampling_logp_difference/*` in nats, `sampling/importance_sampling_ratio/*`.
    """
    if mode not in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        raise ValueError(f"mode is token_ or sequence_, then truncate or mask, not {mode!r}.")
    scored_BT = (mask_BT > 0) & ~mx.isnan(sampling_logp_BT)
    difference_BT = mx.where(scored_BT, old_logp_BT - sampling_logp_BT, 0.0)
    by_row = mode.startswith("sequence")
    ratio = mx.exp(difference_BT.sum(axis=1, keepdims=True) if by_row else difference_BT)
    low = -mx.inf if clip_min is None else clip_min
    high = mx.inf if clip_max is None else clip_max
    held = mx.clip(ratio, low, high)
    ratio = held if mode.endswith("truncate") else mx.where(ratio == held, ratio, 0.0)
    counted = mx.ones_like(ratio) > 0 if by_row else mask_BT > 0
    apart = _extent("sampling/sampling_logp_difference", mx.abs(difference_BT), scored_BT)
    apart.pop("sampling/sampling_logp_difference/min")
    return ratio, apart | _extent("sampling/importance_sampling_ratio", ratio, counted)


def _extent(name: str, x: mx.array, counted: mx.array) -> dict[str, mx.array]:
    """Min, mean and max of what is counted; 0 when nothing is."""
    count = counted.sum()
    low = mx.where(counted, x, mx.inf).min()
    high = mx.where(counted, x, -mx.inf).max()
    mean = mx.where(counted, x, 0.0).sum() / mx.maximum(count, 1)
    three = {"min": low, "mean": mean, "max": high}
    return {f"{name}/{key}": mx.where(count > 0, value, 0.0) for key, value in three.items()}
