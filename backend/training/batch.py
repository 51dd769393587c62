"""Pads a step's completions into arrays with masks, and splits them into micro-batches, which changes no result. Axes:
B completions, T completion tokens, L prompt and completion tokens; padding on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx

from backend.training.microbatch import PromptMode, RowLengths, plan_micro_batches
from backend.types import Completion, Group


@dataclass(frozen=True, slots=True)
class Batch:
    """Some or all completions of a step. Position prompt_length + t − 1 of `tokens_BL` predicts token t. `row_B` and
    `group_B` are indices in the batch that `pack` made. The last arrays are None until an algorithm computes them."""

    pad_id: int
    tokens_BL: mx.array
    prompt_length_B: mx.array
    length_B: mx.array  # of completions, masked tokens included
    completion_BT: mx.array
    mask_BT: mx.array  # 1.0 where a token is trained on
    sampling_logp_BT: mx.array  # at sampling, after filters; in nats
    log_kept_BT: mx.array  # log of the mass that the sampling filters kept
    advantage_B: mx.array
    group_B: mx.array
    row_B: mx.array
    log_held_BT: mx.array | None = None  # the grammar's part of it
    weight_BT: mx.array | None = None
    old_logp_BT: mx.array | None = None  # log π before this rollout's first update
    ref_logp_BT: mx.array | None = None
    importance_weight_BT: mx.array | None = None  # or [B, 1]; set on micro-batches only
    uncertain_BT: mx.array | None = None  # 1.0 for the tokens of `top_entropy_quantile`; set on micro-batches only
    teacher_prompts: Sequence[list[int]] = ()  # by `row_B`, of self-distillation: ids, empty where a row has no teacher
    teacher_weight_BT: mx.array | None = None  # in the distillation loss; 0 without a teacher
    teacher_logp_BT: mx.array | None = None  # before this rollout's first update
    images: Sequence[Any] = ()  # `PromptImages` or None by `group_B`; empty where no prompt has a picture

    def __len__(self) -> int:
        return self.mask_BT.shape[0]

    def take(self, rows: Sequence[int]) -> Batch:
        """Select rows by index; the width stays."""
        index = mx.array(list(rows), mx.int32)  # typed, because an empty list would be float32, which cannot index
        return self._map_arrays(lambda name, x: x[index])

    def trimmed(self) -> Batch:
        """Drop the columns that are padding in every row."""
        # Padding is on the right, so the widest row decides. An array's last axis is the last letter of its name.
        widths = {"T": _width(ints(self.length_B)), "L": _width(ints(self.prompt_length_B + self.length_B))}
        return self._map_arrays(lambda name, x: x[:, : widths[name[-1]]] if x.ndim == 2 else x)

    def micro_batches(
        self, *, rows: int | None = None, token_budget: int | None = None, prompts: PromptMode = "per_row"
    ) -> Iterator[Batch]:
        """Split into micro-batches of at most `rows` rows and `token_budget` tokens with padding, largest first."""
        plan = plan_micro_batches(self.row_lengths(), most_rows=rows, token_budget=token_budget, prompts=prompts)
        for indices in plan:
            yield self.take(indices).trimmed()

    def row_lengths(self) -> list[RowLengths]:
        # Planned on the host with Python integers: three small reads, no array allocated before the plan is known.
        lengths = zip(*map(ints, (self.group_B, self.prompt_length_B, self.length_B)), strict=True)
        return [RowLengths(index, *row) for index, row in enumerate(lengths)]

    def with_signal(self) -> Batch:
        """Drop rows whose gradient is zero. Valid only if `beta` and `entropy_coef` are 0 and `weight_BT` is set."""
        if self.weight_BT is None:
            raise ValueError("weight_BT is worked out over the whole step before rows are left out.")
        # Exact zero: equal rewards give exactly 0 (`advantages`), and a tiny advantage is still a signal.
        signal_B = (self.advantage_B != 0) & (self.mask_BT.sum(axis=1) > 0)
        if self.teacher_weight_BT is not None:
            signal_B = signal_B | (self.teacher_weight_BT.sum(axis=1) > 0)
        return self.take([row for row, has_signal in enumerate(ints(signal_B)) if has_signal])

    def _map_arrays(self, change: Callable[[str, mx.array], mx.array]) -> Batch:
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(name, x) for name, x in arrays.items() if isinstance(x, mx.array)})


def pack(groups: Sequence[Group], *, pad_id: int, mask_truncated_completions: bool = False) -> Batch:
    """Pack the completions of all groups into one Batch. `mask_truncated_completions` excludes truncated ones from
    training, not from group rewards (arXiv:2503.14476). Raises ValueError if logps or masks do not match the tokens."""
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
    log_kept = [c.log_kept or [0.0] * len(c.tokens) for _, _, c in rows]
    # log(p / kept) = log p − log kept: the distribution that the token was in fact sampled from.
    logps = [
        [logp - kept for logp, kept in zip(c.logps, own, strict=True)]
        for (_, _, c), own in zip(rows, log_kept, strict=True)
    ]
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
        sampling_logp_BT=_padded(logps, longest, 0, mx.float32),
        log_kept_BT=_padded(log_kept, longest, 0, mx.float32),
        advantage_B=mx.array([c.advantage for _, _, c in rows], mx.float32),
        group_B=mx.array([index for index, _, _ in rows], mx.int32),
        row_B=mx.arange(len(rows), dtype=mx.int32),
        log_held_BT=_padded([c.log_held for _, _, c in rows], longest, 0, mx.float32)
        if any(c.log_held for _, _, c in rows)
        else None,
        teacher_prompts=[c.teacher_prompt for *_, c in rows] if any(c.teacher_prompt for *_, c in rows) else (),
        images=[group.images for group in groups] if any(group.images for group in groups) else (),
    )


def token_mask(completion: Completion, mask_truncated: bool) -> list[float]:
    if mask_truncated and completion.stop == "length":
        return [0.0] * len(completion.tokens)
    return [float(x) for x in completion.mask] if completion.mask else [1.0] * len(completion.tokens)


def ints(x_B: mx.array) -> list[int]:
    return x_B.tolist()  # pyright: ignore[reportReturnType]: one axis, so a list


def _width(lengths: Sequence[int]) -> int:
    return max([1, *lengths])


def _padded(rows: Sequence[Sequence[float]], width: int, padding: float, dtype: mx.Dtype) -> mx.array:
    # reshape: without rows mx.array([]) has one axis.
    return mx.array([[*row, *[padding] * (width - len(row))] for row in rows], dtype).reshape(len(rows), width)


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths in sampled tokens, over all completions and over those that ended with EOS (0 if none).
    `hit_max_tokens_ratio` is TRL's `completions/clipped_ratio`. `num_tokens` counts a prompt once per completion."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.trained_tokens for completion in completions]
    terminated = [completion.trained_tokens for completion in completions if completion.stop != "length"]
    metrics: dict[str, float] = {}
    for name, values in (("length", lengths), ("terminated_length", terminated or [0])):
        numbers = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
        metrics |= {f"completions/{key}_{name}": float(value) for key, value in numbers.items()}
    share = 1 - len(terminated) / len(completions)
    metrics |= {"completions/clipped_ratio": share, "hit_max_tokens_ratio": share}
    prompts = sum(len(group.problem.tokens) * len(group.completions) for group in groups)
    return metrics | {"num_tokens": float(prompts + sum(lengths))}
