"""A step's completions as padded arrays, with masks, and their split into micro-batches; length metrics.

How a batch is split changes no number: each token's weight is fixed for the whole optimizer batch before any split
(`losses.token_weights`), micro-batches only drop padding, and every row remembers its index. Arrays end in their axes:
B rows (completions), T completion tokens, L prompt and completion tokens; sequences are padded on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import mlx.core as mx

from backend.training.microbatch import PromptMode, RowLengths, plan_micro_batches
from backend.types import Completion, Group


@dataclass(frozen=True, slots=True)
class Batch:
    """The completions of a step, or some of them, as arrays. The last letters of a name are its axes.

    Token t of a completion is predicted from position prompt_length + t − 1 of `tokens_BL`. `row_B` is each row's
    index in the batch that `pack` made, `group_B` the index of its group there. The last four arrays are None until
    an algorithm computes them.
    """

    pad_id: int
    tokens_BL: mx.array
    """Prompt and completion, then padding."""
    prompt_length_B: mx.array
    length_B: mx.array
    """Tokens of the completion, masked ones included."""
    completion_BT: mx.array
    mask_BT: mx.array
    """1.0 where a token is trained on, 0.0 at padding, tool results and truncated completions that are masked."""
    sampling_logp_BT: mx.array
    """The log-probability each token was sampled with, after top-p, top-k and min-p; in nats."""
    log_kept_BT: mx.array
    """The log of the share of the policy's mass that those filters kept: 0 where none is on."""
    advantage_B: mx.array
    group_B: mx.array
    row_B: mx.array
    log_held_BT: mx.array | None = None
    """The part of `log_kept_BT` that a grammar took, where output is held to one; else None."""
    weight_BT: mx.array | None = None
    """Each token's weight in the loss of the whole optimizer batch."""
    old_logp_BT: mx.array | None = None
    """log π of the policy before the first update of this rollout: the denominator of the importance ratio."""
    ref_logp_BT: mx.array | None = None
    importance_weight_BT: mx.array | None = None
    """Importance correction: [B, T], or [B, 1] where a completion has one ratio as a whole. Set on micro-batches
    only."""

    def __len__(self) -> int:
        return self.mask_BT.shape[0]

    def take(self, rows: Sequence[int]) -> Batch:
        """The rows at these indices, in this order, as wide as before."""
        index = mx.array(list(rows), mx.int32)  # typed, because an empty list would be float32, which cannot index
        return self._map_arrays(lambda name, x: x[index])

    def trimmed(self) -> Batch:
        """Without the columns that are padding in every row."""
        # Padding is on the right, so the widest row decides. An array's last axis is the last letter of its name.
        widths = {
            "T": _width(_ints(self.length_B)),
            "L": _width(_ints(self.prompt_length_B + self.length_B)),
        }
        return self._map_arrays(lambda name, x: x[:, : widths[name[-1]]] if x.ndim == 2 else x)

    def micro_batches(
        self, *, rows: int | None = None, token_budget: int | None = None, prompts: PromptMode = "per_row"
    ) -> Iterator[Batch]:
        """Split by `plan_micro_batches`: at most `rows` rows and `token_budget` tokens each, padding included, so that
        little of it is padding; the largest first."""
        plan = plan_micro_batches(self.row_lengths(), most_rows=rows, token_budget=token_budget, prompts=prompts)
        for indices in plan:
            yield self.take(indices).trimmed()

    def row_lengths(self) -> list[RowLengths]:
        """The lengths of every row, by which rows are split."""
        # Planned on the host with Python integers: three small reads, and no array is allocated before the plan is
        # known.
        lengths = zip(*map(_ints, (self.group_B, self.prompt_length_B, self.length_B)), strict=True)
        return [RowLengths(index, *row) for index, row in enumerate(lengths)]

    def with_signal(self) -> Batch:
        """Without the rows whose policy gradient is zero: advantage 0, or no token trained on.

        Valid only when `beta` and `entropy_coef` are 0, because those terms need no advantage. Weights stay those of
        the whole optimizer batch; raises ValueError where `weight_BT` is not computed yet.
        """
        if self.weight_BT is None:
            raise ValueError("weight_BT is worked out over the whole step before rows are left out.")
        # Exact zero: equal rewards give exactly 0 (`advantages`), and a tiny advantage is still a signal.
        signal_B = (self.advantage_B != 0) & (self.mask_BT.sum(axis=1) > 0)
        return self.take([row for row, has_signal in enumerate(_ints(signal_B)) if has_signal])

    def _map_arrays(self, change: Callable[[str, mx.array], mx.array]) -> Batch:
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(name, x) for name, x in arrays.items() if isinstance(x, mx.array)})


def pack(groups: Sequence[Group], *, pad_id: int, mask_truncated_completions: bool = False) -> Batch:
    """The completions of all groups as one Batch, in their order, padded to the longest.

    With `mask_truncated_completions` a completion that ran into the length limit is not trained on; its reward has
    counted in its group all the same (DAPO's overlong filtering, arXiv:2503.14476). Raises ValueError where a
    completion's log-probabilities or mask entries are not as many as its tokens.
    """
    rows = [(i, group.problem, completion) for i, group in enumerate(groups) for completion in group.completions]
    for index, _, c in rows:
        if len(c.tokens) != len(c.logps):
            raise ValueError(f"A completion of group {index} has {len(c.tokens)} tokens, {len(c.logps)} logps.")
        if c.mask and len(c.tokens) != len(c.mask):
            raise ValueError(f"A completion of group {index} has {len(c.tokens)} tokens, {len(c.mask)} mask entries.")
    # A completion may be empty and a truncated one all masked: both stay as rows, because weights divide by rows.
    lengths = [len(c.tokens) for _, _, c in rows]
    masks = [token_mask(c, mask_truncated_completions) for _, _, c in rows]
    longest = _width(lengths)
    # Whole rows as well, for models that cannot share a prompt. Padded on the right, where causal attention hides it,
    # so a token's column is its position.
    sequences = [problem.tokens + c.tokens for _, problem, c in rows]
    return Batch(
        pad_id=pad_id,
        tokens_BL=_padded(sequences, _width([len(ids) for ids in sequences]), pad_id, mx.int32),
        prompt_length_B=mx.array([len(problem.tokens) for _, problem, _ in rows], mx.int32),
        length_B=mx.array(lengths, mx.int32),
        completion_BT=_padded([c.tokens for _, _, c in rows], longest, pad_id, mx.int32),
        mask_BT=_padded(masks, longest, 0, mx.float32),
        sampling_logp_BT=_padded([_sampling_logps(c) for _, _, c in rows], longest, 0, mx.float32),
        log_kept_BT=_padded([c.log_kept or [0.0] * len(c.tokens) for _, _, c in rows], longest, 0, mx.float32),
        advantage_B=mx.array([c.advantage for _, _, c in rows], mx.float32),
        group_B=mx.array([index for index, _, _ in rows], mx.int32),
        row_B=mx.arange(len(rows), dtype=mx.int32),
        log_held_BT=_padded([c.log_held for _, _, c in rows], longest, 0, mx.float32)
        if any(c.log_held for _, _, c in rows)
        else None,
    )


def token_mask(completion: Completion, mask_truncated: bool) -> list[float]:
    """1.0 for each token that is trained on, else 0.0."""
    if mask_truncated and completion.stop == "length":
        return [0.0] * len(completion.tokens)
    return [float(x) for x in completion.mask] if completion.mask else [1.0] * len(completion.tokens)


def _sampling_logps(completion: Completion) -> list[float]:
    # log(p / kept) = log p − log kept: the distribution that the token was in fact sampled from.
    if not completion.log_kept:
        return completion.logps
    return [logp - kept for logp, kept in zip(completion.logps, completion.log_kept, strict=True)]


def _ints(x_B: mx.array) -> list[int]:
    return x_B.tolist()  # pyright: ignore[reportReturnType]: one axis, so a list


def _width(lengths: Sequence[int]) -> int:
    return max([1, *lengths])


def _padded(rows: Sequence[Sequence[float]], width: int, padding: float, dtype: mx.Dtype) -> mx.array:
    # reshape: without rows mx.array([]) has one axis.
    return mx.array([[*row, *[padding] * (width - len(row))] for row in rows], dtype).reshape(len(rows), width)


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`length_metrics` of the completions of all groups. Tokens that the policy did not produce do not count."""
    completions = [(group.problem, completion) for group in groups for completion in group.completions]
    return length_metrics(
        lengths=[completion.trained_tokens for _, completion in completions],
        finished=[completion.stop != "length" for _, completion in completions],
        prompt_lengths=[len(problem.tokens) for problem, _ in completions],
    )


def length_metrics(lengths: Sequence[int], finished: Sequence[bool], prompt_lengths: Sequence[int]) -> dict[str, float]:
    """Lengths in tokens over the rows, and over those that ended by themselves (0 if none did).

    `hit_max_tokens_ratio` (TRL: `completions/clipped_ratio`) is the share that ran into the length limit. `num_tokens`
    is this batch's, a prompt counted once for each of its completions; the trainer keeps the running total.
    """
    terminated = [length for length, done in zip(lengths, finished, strict=True) if done] or [0]
    truncated_share = 1 - sum(finished) / len(finished)
    return {
        **_mean_min_max("completions/{}_length", lengths),
        **_mean_min_max("completions/{}_terminated_length", terminated),
        "completions/clipped_ratio": truncated_share,
        "hit_max_tokens_ratio": truncated_share,
        "num_tokens": float(sum(prompt_lengths) + sum(lengths)),
    }


def _mean_min_max(name: str, values: Sequence[int]) -> dict[str, float]:
    numbers = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    return {name.format(key): float(value) for key, value in numbers.items()}
