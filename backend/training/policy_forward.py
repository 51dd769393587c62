"""Micro-batches and forward passes over them, prompts prefilled once for all if that saves work (`shared_prefix`)."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import mlx.core as mx

from backend.engine.embedding_noise import EmbeddingNoise
from backend.engine.forward import PrefilledPrompts, SequenceRows, completion_logps, sequence_rows
from backend.engine.lm_head import Teacher, TokenScores
from backend.engine.output_layer import SplitModel
from backend.engine.penalties import NO_PENALTIES, Penalties
from backend.training.batch import Batch, ints
from backend.training.collectives import ALONE, Collectives
from backend.training.microbatch import PromptMode, RowLengths
from backend.training.shared_prefix import SharedPrefix

# Rows of an optimizer batch that each rank learns from: contiguous shares of the tokens, as large as ranks are fast.

SNAP = 0.05  # of all tokens, by which a rank's border may move to fall between groups


def rows_of_ranks(rows: Sequence[RowLengths], speeds: Sequence[float]) -> list[list[int]]:
    """Row indices of each rank: contiguous shares of the tokens in proportion to `speeds`, group by group; may be
    empty. Raises ValueError for speeds ≤ 0."""
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"the speeds of the ranks are above 0, not {list(speeds)}")
    ordered = sorted(rows, key=lambda row: (row.group, row.index))
    # before[i]: tokens ahead of row i. A prompt counts once for its group, with the first of its rows.
    costs = [
        row.length + (row.prompt if i == 0 or ordered[i - 1].group != row.group else 0) for i, row in enumerate(ordered)
    ]
    before = [0, *accumulate(costs)]
    between_groups = [
        i for i in range(len(ordered) + 1) if i in (0, len(ordered)) or ordered[i - 1].group != ordered[i].group
    ]
    total, goal, borders = before[-1], 0.0, [0]
    for speed in speeds[:-1]:
        goal += total * speed / sum(speeds)
        border = _nearest(range(len(ordered) + 1), before, goal)
        group_border = _nearest(between_groups, before, goal)
        if abs(before[group_border] - goal) <= SNAP * total:
            border = group_border
        borders.append(max(border, borders[-1]))
    borders.append(len(ordered))
    return [[row.index for row in ordered[start:end]] for start, end in pairwise(borders)]


def _nearest(places: Sequence[int], before: Sequence[int], goal: float) -> int:
    return min(places, key=lambda i: (abs(before[i] - goal), i))


def do_nothing() -> None: ...


@dataclass(slots=True)
class MicroBatch:
    batch: Batch
    rows: SequenceRows
    groups: list[int]  # prompt indices in the step, in row order
    teacher: Teacher | None = None  # of the policy's scores

    @classmethod
    def of(cls, batch: Batch) -> "MicroBatch":
        """Reads lengths and mask on the host."""
        groups = list(dict.fromkeys(ints(batch.group_B)))
        arrays = batch.tokens_BL, batch.prompt_length_B, batch.group_B, batch.completion_BT, batch.mask_BT
        images = [batch.images[group] for group in groups] if batch.images else []
        return cls(batch, sequence_rows(*arrays, images=images if any(images) else []), groups)

    def set_arrays(self, **arrays: mx.array | None) -> None:
        self.batch = replace(self.batch, **arrays)


@dataclass(slots=True)
class PolicyForward:
    """Settings of the forward pass."""

    temperature: float
    chunk: int  # completion tokens whose logits are in memory at once
    micro_batch_tokens: int
    has_dropout: bool = False
    noise: EmbeddingNoise | None = None  # on the policy's embeddings, in training
    noisy_model: SplitModel | None = None  # the policy, if it has noise
    largest_micro_batch: int = 0  # tokens
    poll: Callable[[], None] = do_nothing  # called after every micro-batch
    penalties: Penalties = NO_PENALTIES  # of sampling, part of the policy
    ranks: Collectives = ALONE
    speeds: Sequence[float] = ()  # tokens per second of each rank; empty: equal shares
    own_tokens: int = 0  # that this rank has processed
    whole_rows: bool = False  # prompts have one completion each, so nothing is shared

    def micro_batches(self, split_model: SplitModel, batch: Batch, most_rows: int | None = None) -> list[MicroBatch]:
        """Split this rank's rows within `most_rows` and `micro_batch_tokens`."""
        mode = self.prompt_mode(split_model)
        if self.ranks.size > 1:
            lengths = batch.row_lengths()
            own = rows_of_ranks(lengths, self.speeds or [1.0] * self.ranks.size)[self.ranks.rank]
            self.own_tokens += sum(lengths[row].length for row in own)
            batch = batch.take(own)
        parts = batch.micro_batches(rows=most_rows, token_budget=self.micro_batch_tokens, prompts=mode)
        micro_batches = [MicroBatch.of(part) for part in parts]
        for rows in (micro_batch.rows for micro_batch in micro_batches):
            shared = rows.completion_BT.size + (rows.prompt_PK.size if mode == "per_micro_batch" else 0)
            tokens = rows.tokens_BL.size if mode == "per_row" else shared
            self.largest_micro_batch = max(self.largest_micro_batch, tokens)
        return micro_batches

    def scores(
        self,
        split_model: SplitModel,
        micro_batch: MicroBatch,
        *,
        with_gradient: bool = True,
        entropy_gradient: bool = False,
        prefilled: PrefilledPrompts | None = None,
    ) -> TokenScores:
        """Log-probabilities and entropies [B, T] in nats at the sampling temperature, 0 where masked."""
        noise, whole_rows = contextlib.nullcontext(), self.whole_rows
        if self.noise is not None and self.noise.rollout is not None and split_model is self.noisy_model:
            whole_rows = True  # a prompt has other noise for each of its completions
            batch = micro_batch.batch
            noise = self.noise.on(ints(batch.row_B), ints(batch.prompt_length_B + batch.length_B))
        if whole_rows:
            split_model, prefilled = replace(split_model, prefix_layers=0), None
        with noise:
            return completion_logps(
                split_model,
                micro_batch.rows,
                self.temperature,
                self.chunk,
                with_gradient=with_gradient,
                entropy_gradient=entropy_gradient,
                prefilled=prefilled,
                penalties=self.penalties,
                teacher=micro_batch.teacher,
            )

    def logps_without_gradient(self, split_model: SplitModel, micro_batches: list[MicroBatch]) -> Iterator[mx.array]:
        """log π [B, T] of each micro-batch, evaluated."""
        return self.without_gradient(
            split_model,
            micro_batches,
            lambda part, prefilled: self.scores(split_model, part, with_gradient=False, prefilled=prefilled).logp_N,
        )

    def without_gradient(
        self,
        split_model: SplitModel,
        micro_batches: list[MicroBatch],
        compute: Callable[[MicroBatch, PrefilledPrompts | None], mx.array],
    ) -> Iterator[mx.array]:
        """What `compute` gives for each micro-batch and its prefilled prompts, evaluated."""
        prefix = self.shared_prefix(split_model, micro_batches)
        prefilled = prefix.prefill(split_model) if prefix else None
        for micro_batch in micro_batches:
            x = compute(micro_batch, prefix.select(prefilled, micro_batch) if prefix and prefilled else None)
            mx.eval(x)  # one micro-batch's activations at a time
            self.poll()
            yield x

    def shared_prefix(self, split_model: SplitModel, micro_batches: list[MicroBatch]) -> SharedPrefix | None:
        """The prompts to prefill once for all micro-batches; None where that saves nothing."""
        pays = self.prompt_mode(split_model) == "prefilled" and SharedPrefix.pays(
            micro_batches, self.micro_batch_tokens
        )
        return SharedPrefix(micro_batches, self.micro_batch_tokens) if pays else None

    def prompt_mode(self, split_model: SplitModel) -> PromptMode:
        """How often each prompt is read. Not once for all with dropout: a second pass would drop other activations."""
        if not split_model.prefix_layers or self.noise is not None or self.whole_rows:
            return "per_row"
        return "per_micro_batch" if self.has_dropout else "prefilled"
