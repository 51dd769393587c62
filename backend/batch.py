"""From groups of completions to arrays: advantages, masks, padding, and the parts a step is cut into.

Cutting a batch differently changes nothing: each token's weight is fixed for the whole optimizer step before any cut
(`losses.token_weights`), parts only drop padding, and every row remembers its place. Nothing here runs a model or
knows a reward function. Arrays end in their axes: B rows (completions), K reward functions, T completion tokens,
L prompt and completion tokens; sequences are padded on the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Protocol

import mlx.core as mx

from backend.learning.cuts import PromptUse, Row, cut

SMALLEST_STD = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""


class Sampled(Protocol):
    """What is read of a completion; `backend.nouns.Completion` has it."""

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


class Prompted(Protocol):
    """What is read of a problem; `backend.nouns.Problem` has it."""

    @property
    def tokens(self) -> list[int]: ...


class Grouped(Protocol):
    """What is read of a group; `backend.nouns.Group` has it."""

    @property
    def problem(self) -> Prompted: ...
    @property
    def completions(self) -> Sequence[Sampled]: ...


# ---- advantages ------------------------------------------------------------------------------------------------


def advantages(
    rewards: Any,
    group_size: int,
    *,
    weights: Sequence[float] | None = None,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
    baseline: str = "group",
    names: Sequence[str] = (),
) -> tuple[mx.array, dict[str, float]]:
    """How much better each completion is than its group: advantages [B], float32, and the reward metrics.

    `rewards` [B, K] (lists or an array) holds NaN or None where a function had no opinion; rows i·G … i·G + G − 1 share
    a prompt. `weights`: one a function, 1 each when left out. `scale_rewards` divides by the standard deviation (n − 1)
    of the `group`, of the `batch`, or by nothing (`none`: Dr. GRPO, arXiv:2503.20783).
    `baseline="leave_one_out"` compares with the mean of the *other* completions of the group (RLOO, arXiv:2402.14740),
    which is the distance from the group's mean times n/(n − 1).
    `multi_objective_aggregation="normalize_then_sum"` normalises each function in its group first, then the sum over
    the batch (GDPO, arXiv:2601.05242), and leaves `scale_rewards` out.

    A completion that no function scored is left out of every mean and gets advantage 0. Metrics: `reward`,
    `reward_std`, `frac_reward_zero_std`, and `rewards/<name>/mean|std` for each of `names`. Worked out in double
    precision. Raises ValueError for shapes that do not fit and words that are not known.
    """
    rows = [[math.nan if x is None else float(x) for x in row] for row in _listed(rewards)]
    if group_size < 1 or not rows or len(rows) % group_size:
        raise ValueError(f"rewards has {len(rows)} rows, which are not groups of {group_size}.")
    weights = [1.0] * len(rows[0]) if weights is None else list(weights)
    if any(len(row) != len(weights) for row in rows) or (names and len(names) != len(weights)):
        raise ValueError(f"rewards has {len(rows[0])} scores a row, {len(weights)} weights, {len(names)} names.")
    totals = [_weighted_sum(row, row, weights) for row in rows]
    if multi_objective_aggregation == "sum_then_normalize":
        values, stds = _sum_then_normalize(totals, group_size, scale_rewards)
        if baseline == "leave_one_out":
            values = _leave_one_out(values, totals, group_size)
        elif baseline != "group":
            raise ValueError(f"baseline is group or leave_one_out, not {baseline!r}.")
    elif multi_objective_aggregation == "normalize_then_sum":
        values, stds = _normalize_then_sum(rows, group_size, weights)
    else:
        known = "sum_then_normalize or normalize_then_sum"
        raise ValueError(f"multi_objective_aggregation is {known}, not {multi_objective_aggregation!r}.")
    metrics = {
        "reward": _mean(totals),
        "reward_std": _std(totals),
        "frac_reward_zero_std": sum(abs(std) <= 1e-8 for std in stds) / len(stds),
    }
    for name, column in zip(names, zip(*rows, strict=True), strict=False):
        metrics |= {f"rewards/{name}/mean": _mean(column), f"rewards/{name}/std": _std(column)}
    return mx.array([0.0 if math.isnan(x) else x for x in values], mx.float32), metrics


def _listed(x: Any) -> list[Any]:
    return x.tolist() if hasattr(x, "tolist") else list(x)


def _sum_then_normalize(totals: list[float], group_size: int, scale: str) -> tuple[list[float], list[float]]:
    """(R − mean of its group) / (std + 1e-4), and the std that belongs to each row."""
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale_rewards is group, batch or none, not {scale!r}.")
    groups = _cut(totals, group_size)
    stds = [_std(totals, alone=0.0) if scale == "batch" else _group_std(group) for group in groups]
    values = [
        (total - mean) / (1.0 if scale == "none" else std + SMALLEST_STD)
        for group, mean, std in zip(groups, map(_mean, groups), stds, strict=True)
        for total in group
    ]
    return values, [std for std in stds for _ in range(group_size)]


def _leave_one_out(values: list[float], totals: list[float], group_size: int) -> list[float]:
    """Distances from the group's mean, stretched to distances from the mean of the others; a lone opinion has none."""
    counts = [sum(not math.isnan(x) for x in group) for group in _cut(totals, group_size) for _ in group]
    return [x * n / (n - 1) if n > 1 else 0.0 * x for x, n in zip(values, counts, strict=True)]


def _normalize_then_sum(
    rows: list[list[float]], group_size: int, weights: list[float]
) -> tuple[list[float], list[float]]:
    """GDPO: each function's z-score in its group, summed with the weights, normalised once more over the batch."""
    columns = [chain.from_iterable(map(_z_scores, _cut(column, group_size))) for column in zip(*rows, strict=True)]
    sums = [_weighted_sum(z, row, weights) for z, row in zip(zip(*columns, strict=True), rows, strict=True)]
    mean, std = _mean(sums), _std(sums, alone=0.0)
    return [(x - mean) / (std + SMALLEST_STD) for x in sums], [std] * len(rows)


def _z_scores(group: Sequence[float]) -> list[float]:
    mean, std = _mean(group), _group_std(group)
    return [(x - mean) / (std + SMALLEST_STD) for x in group]


def _weighted_sum(values: Sequence[float], row: Sequence[float], weights: Sequence[float]) -> float:
    """Σ w·x over the opinions there are; NaN when `row` holds none at all."""
    if all(map(math.isnan, row)):
        return math.nan
    return math.fsum(w * x for w, x in zip(weights, values, strict=True) if not math.isnan(x))


def _cut(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _mean(values: Sequence[float]) -> float:
    """The mean of what is not NaN. Equal values have exactly their value as mean, so their advantage is exactly 0."""
    present = [x for x in values if not math.isnan(x)]
    if not present:
        return math.nan
    return present[0] if min(present) == max(present) else math.fsum(present) / len(present)


def _std(values: Sequence[float], alone: float = math.nan) -> float:
    """The standard deviation with n − 1 of what is not NaN: NaN below two values, but `alone` for a list of one."""
    if len(values) == 1:
        return alone
    mean = _mean(values)
    squares = [(x - mean) ** 2 for x in values if not math.isnan(x)]
    return math.sqrt(math.fsum(squares) / (len(squares) - 1)) if len(squares) > 1 else math.nan


def _group_std(group: Sequence[float]) -> float:
    """0 in a group of one (evaluation): there is nobody to differ from."""
    return _std(group, alone=0.0)


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
        places = cut(
            [Row(place, *one) for place, one in enumerate(known)],
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


def pack(groups: Sequence[Grouped], *, pad_id: int, mask_truncated_completions: bool = False) -> Batch:
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


def _drawn_with(one: Sampled) -> list[float]:
    """What each token was really drawn with: the policy's log-probability over the share that the filters left."""
    if not one.log_kept:
        return one.logps
    return [logp - kept for logp, kept in zip(one.logps, one.log_kept, strict=True)]


def _width(lengths: Sequence[int], multiple: int = 1) -> int:
    """At least 1, so that a batch of empty completions still has a width."""
    return -(-max([1, *lengths]) // multiple) * multiple


def _padded(rows: Sequence[Sequence[float]], width: int, filling: float, dtype: mx.Dtype) -> mx.array:
    return mx.array([[*row, *[filling] * (width - len(row))] for row in rows], dtype).reshape(len(rows), width)


def _fitted(x_BT: mx.array, width: int, filling: int) -> mx.array:
    missing = max(0, width - x_BT.shape[1])
    return mx.pad(x_BT[:, :width], [(0, 0), (0, missing)], constant_values=filling)


# ---- what the sampling looked like -----------------------------------------------------------------------------


def completion_metrics(groups: Sequence[Grouped]) -> dict[str, float]:
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
