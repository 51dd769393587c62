"""GRPO and its variants (arXiv:2402.03300): the updates of one step. A step has `steps_per_generation` optimizer
batches, each used for μ = `num_iterations` updates; the first update's pass also yields the old log-probabilities."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.engine.forward import PrefilledPrompts
from backend.engine.lm_head import TokenScores
from backend.models.policy import Policy
from backend.training.batch import Batch, ints
from backend.training.collectives import Collectives, merged
from backend.training.importance_sampling import UNCLIPPED, ImportanceCorrection, logp_difference
from backend.training.learner import Algorithm, Learner, OptimizerBatch, TokenRecord
from backend.training.losses import (
    LossConfig,
    Tally,
    TokenValues,
    entropy_quantile,
    policy_terms,
    token_mean,
    token_weights,
)
from backend.training.policy_forward import MicroBatch, PolicyForward, do_nothing
from backend.training.self_distillation import distillation_terms, set_teacher_logps, teacher_weights

BONUS_STEP, BONUS_MINIMUM, BONUS_MAXIMUM = 0.005, 0.0, 1.0  # of the adaptive entropy coefficient, as in TRL

STANDARD_ERROR = "_stderr"  # suffix of a metric's standard error
DIVERGENCE = "distillation/divergence"  # from the teacher, per token
BONUS_ENTROPY = "bonus/entropy"  # of the tokens that the entropy bonus acts on; not logged


@dataclass(slots=True)
class EntropyBonus:
    """Coefficient of the entropy bonus: constant, or adapted to keep entropy (nats) at `target` (arXiv:2505.22312)."""

    value: float
    adaptive: bool = False
    target: float = 0.0
    entropy: float | None = None

    @property
    def on(self) -> bool:
        return self.adaptive or self.value > 0

    @property
    def coefficient(self) -> float:
        """Of the next update; an adaptive bonus applies only while the entropy is at or below its target."""
        is_low = self.entropy is not None and self.entropy <= self.target
        return self.value if is_low or not self.adaptive else 0.0

    def observe(self, entropy: float) -> None:
        """Adapt to an update's mean entropy."""
        self.entropy = entropy
        if self.adaptive:
            adapted = self.value + (BONUS_STEP if entropy <= self.target else -BONUS_STEP)
            self.value = min(BONUS_MAXIMUM, max(BONUS_MINIMUM, adapted))


class Grpo(Algorithm):
    def __init__(self, policy: Policy, config: Config) -> None:
        self.policy, self.config = policy, config
        self.loss = loss_settings(config)
        self.bonus = EntropyBonus(config.entropy_coef, config.entropy_adaptive, config.entropy_target)
        self.against_reference = config.ratio_against == "reference"  # the ratio's denominator
        self.has_dropout = config.train_type != "full" and config.dropout > 0
        mode, note = correction_mode(config, policy.split_model.dtype)
        self.notes = [note] if note else []
        self.correction = None
        if mode != "none":
            is_automatic = config.sampling_correction == "auto"
            bounds = config.sampling_correction_min, config.sampling_correction_max
            self.correction = ImportanceCorrection(mode, *bounds, ignores_filters=is_automatic)

    def learn(self, batch: Batch, learner: Learner) -> dict[str, float]:
        forward = learner.forward
        self.token_records = {}
        count = self.config.steps_per_generation
        rows = len(batch) // count
        parts = [batch.take(range(i * rows, (i + 1) * rows)) for i in range(count)] if count > 1 else [batch]
        # The same objects in all μ iterations: what the first one records (`_after_backward`), the others read.
        optimizer_batches = [self.optimizer_batch(part, forward) for part in parts]
        updates: list[dict[str, float]] = []
        every = self.config.ref_model_sync_steps if self.config.sync_ref_model and self.config.needs_reference else 0
        for micro_batches in optimizer_batches * self.config.num_iterations:
            metrics = learner.update(
                micro_batches,
                self._objective,
                totals=partial(self.batch_totals, micro_batches, forward),
                after_backward=self._after_backward,
                entropy_gradient=self.bonus.coefficient > 0,
            )
            if every and learner.updates % every == 0:
                self.policy.move_reference(self.config.ref_model_mixup_alpha)  # TR-DPO, arXiv:2404.09656
            if (entropy := metrics.pop(BONUS_ENTROPY, None)) is not None:
                self.bonus.observe(entropy)
            updates.append(metrics)
        if self.config.record_tokens and forward.ranks.size > 1:
            own = {row: astuple(record) for row, record in self.token_records.items()}
            self.token_records = {row: TokenRecord(*columns) for row, columns in merged(forward.ranks, own).items()}
        names = ["entropy", "clip_ratio_low", "clip_ratio_high", "clip_ratio_total", "sampling/logp_gap/mean"]
        names += ["kl"] if self.policy.reference is not None else []
        names += ["self_distillation/loss"] if self.config.self_distillation_weight else []
        means = dict.fromkeys(names, math.nan)  # of the updates that have them
        for name in dict.fromkeys(name for each in updates for name in each):
            means[name] = float(np.mean([each[name] for each in updates if name in each]))
        means["learning_rate"] = updates[-1]["learning_rate"]
        return means | self.sampler_metrics(optimizer_batches, forward)

    def optimizer_batch(self, batch: Batch, forward: PolicyForward) -> OptimizerBatch:
        """Micro-batches with what the updates share: token weights, reference and, if needed, old log-probabilities."""
        # Before rows are split or left out: a token's weight depends on the whole optimizer batch.
        weight_BT = token_weights(
            batch.mask_BT, loss_type=self.loss.loss_type, max_completion_length=self.loss.max_completion_length
        )
        batch = replace(batch, weight_BT=weight_BT)
        if batch.teacher_prompts:
            batch = replace(batch, teacher_weight_BT=teacher_weights(batch))
        # Without KL, entropy bonus and entropy quantile, a completion with advantage 0 adds nothing at all. Only now:
        # rows without signal count among the rows and tokens that weights divide by.
        policy_term_alone = self.policy.reference is None and not self.bonus.on and self.loss.top_entropy_quantile >= 1
        if self.config.skip_zero_signal and policy_term_alone:
            batch = batch.with_signal()
        if not len(batch):
            return []
        split_model = self.policy.split_model
        micro_batches = self.micro_batches(batch, forward)
        # Fixed for all μ iterations, so computed once and kept: [B, T] is small.
        if self.policy.reference is not None:
            logps = forward.logps_without_gradient(self.policy.reference, micro_batches)
            for micro_batch, logp_BT in zip(micro_batches, logps, strict=True):
                micro_batch.set_arrays(ref_logp_BT=logp_BT)
        if self._needs_old_pass():
            self.policy.model.eval()  # no dropout: the old policy is the one that sampled
            logps = forward.logps_without_gradient(split_model, micro_batches)
            for micro_batch, logp_BT in zip(micro_batches, logps, strict=True):
                self._set_old_policy(micro_batch, logp_BT)
        if batch.teacher_prompts:
            self.policy.model.eval()
            teacher = self.policy.reference if self.config.teacher_model_kind == "base" else split_model
            assert teacher is not None
            set_teacher_logps(micro_batches, teacher, replace(forward, noise=None))
        return micro_batches

    def micro_batches(self, batch: Batch, forward: PolicyForward) -> OptimizerBatch:
        most_rows = self.config.batch_size * self.config.group_size
        return forward.micro_batches(self.policy.split_model, batch, most_rows)

    def _needs_old_pass(self) -> bool:
        # The first update's pass yields the old log-probabilities, except after an earlier update or with dropout.
        is_other = self.config.steps_per_generation > 1 or (self.has_dropout and self.correction is not None)
        return is_other and not self.against_reference

    def _set_old_policy(self, micro_batch: MicroBatch, logp_BT: mx.array) -> None:
        weight = None if self.correction is None else self.correction.measure(micro_batch.batch, logp_BT)[0]
        micro_batch.set_arrays(old_logp_BT=logp_BT, importance_weight_BT=weight)

    def batch_totals(self, micro_batches: OptimizerBatch, forward: PolicyForward) -> dict[str, Any]:
        """Choose the most uncertain tokens of the optimizer batch; return the token count of the entropy bonus."""
        masks = [part.batch.mask_BT for part in micro_batches]
        if self.loss.top_entropy_quantile < 1:
            # One forward pass more for each update: the first micro-batch's backward pass needs a quantile over all of
            # them. Chosen here: the update's pass rounds otherwise, and the threshold may be a token's own entropy.
            model = self.policy.split_model

            def entropies_of(part: MicroBatch, prefilled: PrefilledPrompts | None) -> mx.array:
                return forward.scores(model, part, with_gradient=False, prefilled=prefilled).entropy_N

            entropies = [*forward.without_gradient(model, micro_batches, entropies_of)]
            threshold = entropy_quantile(
                *entropies_of_all(forward.ranks, entropies, masks), self.loss.top_entropy_quantile
            )
            masks = [(x >= threshold) * mask_BT for x, mask_BT in zip(entropies, masks, strict=True)]
            for part, uncertain_BT in zip(micro_batches, masks, strict=True):
                part.set_arrays(uncertain_BT=uncertain_BT)
        if self.bonus.coefficient == 0:
            return {}
        # Counted, not top · N: ties at the threshold are kept, and the bonus averages over the tokens that are.
        return {"entropy_tokens": forward.ranks.sum([sum((x.sum() for x in masks), mx.array(0.0))])[0]}

    def _objective(
        self, micro_batch: MicroBatch, scores: TokenScores, totals: dict[str, Any]
    ) -> tuple[mx.array, Tally, TokenValues]:
        batch = micro_batch.batch
        weight = batch.importance_weight_BT
        if batch.old_logp_BT is None and self.correction is not None:
            # In the first update the policy is its own old policy; `_after_backward` records it for the others.
            weight = self.correction.measure(batch, mx.stop_gradient(scores.logp_N))[0]
        share = self.config.self_distillation_weight
        loss, tally, values = policy_terms(
            scores.logp_N,
            batch.ref_logp_BT if self.against_reference else batch.old_logp_BT,
            batch.ref_logp_BT,
            batch.advantage_B * (1 - share) if share else batch.advantage_B,  # so that KL and entropy keep their weight
            batch.mask_BT,
            replace(self.loss, entropy_coef=self.bonus.coefficient),
            weights=batch.weight_BT,
            entropies=scores.entropy_N,
            uncertain=batch.uncertain_BT,
            importance_weight=weight,
            sampling_logps=batch.sampling_logp_BT,
            **totals,
        )
        if self.bonus.on:
            counted_BT = batch.mask_BT if batch.uncertain_BT is None else batch.uncertain_BT
            tally["mean"][BONUS_ENTROPY] = token_mean(scores.entropy_N, counted_BT)
        if self.bonus.on and self.bonus.coefficient == 0:  # adaptive, and the entropy is above its target
            tally["sum"]["policy_loss"], tally["mean"]["entropy_coef"] = loss, mx.array([0.0, 1.0])
        if batch.teacher_logp_BT is not None:
            distillation, tally["mean"]["self_distillation/loss"] = distillation_terms(scores.logp_N, batch)
            loss = loss + share * distillation
        return loss, tally, values

    def _after_backward(self, micro_batch: MicroBatch, scores: TokenScores, values: TokenValues) -> None:
        batch = micro_batch.batch
        if self.config.record_tokens:
            columns: Any = [x.tolist() for x in (scores.logp_N, *values)]
            rows = enumerate(zip(ints(batch.row_B), ints(batch.length_B), strict=True))
            records = {row: TokenRecord(*(column[i][:length] for column in columns)) for i, (row, length) in rows}
            self.token_records = {**self.token_records, **records}
        if batch.old_logp_BT is None:
            self._set_old_policy(micro_batch, scores.logp_N)

    def sampler_metrics(self, optimizer_batches: list[OptimizerBatch], forward: PolicyForward) -> dict[str, float]:
        """Differences between sampler and policy: means over tokens or rows, and extremes."""
        # Against the reference no pass before the updates is made, and later batches meet a policy that has moved: the
        # first alone is measured.
        once = optimizer_batches[:1] if self.against_reference else optimizer_batches
        # A pass with dropout or noise is another policy than the one that sampled: the distance would be theirs.
        has_gap = self.config.neftune_noise_alpha == 0 and (not self.has_dropout or self._needs_old_pass())
        own: list[tuple[dict[str, float], float, float]] = []
        for batch in (part.batch for micro_batches in once for part in micro_batches):
            assert batch.old_logp_BT is not None  # recorded in the first update at the latest
            metrics = (self.correction or UNCLIPPED).measure(batch, batch.old_logp_BT)[1]
            if has_gap:
                # sampling_logp is renormalised over what the filters kept; log_kept takes that back: rounding error.
                unfiltered_logp_BT = batch.sampling_logp_BT + batch.log_kept_BT
                metrics |= logp_difference(batch.old_logp_BT, unfiltered_logp_BT, batch.mask_BT, "logp_gap")
            values = {name: float(x) for name, x in metrics.items()}
            own.append((values, float(batch.mask_BT.sum()), float(len(batch))))
        of_batches = [each for of_rank in forward.ranks.gather(own) for each in of_rank]
        by_row = self.correction is not None and self.correction.mode.startswith("sequence")
        combined: dict[str, float] = {}
        for name in of_batches[0][0] if of_batches else ():
            place = 2 if by_row and "ratio" in name else 1
            counted = [(each[0][name], each[place]) for each in of_batches if each[place]]
            if not counted:
                combined[name] = math.nan
            elif name.endswith(("/min", "/max")):
                combined[name] = (min if name.endswith("/min") else max)(value for value, _ in counted)
            else:
                combined[name] = sum(value * n for value, n in counted) / sum(n for _, n in counted)
        return combined

    def held_out_metrics(
        self, batch: Batch, forward: PolicyForward, poll: Callable[[], None] = do_nothing
    ) -> dict[str, float]:
        """`entropy`, and `kl` with a reference, over the tokens of `batch`, with standard errors."""
        policy, reference = self.policy, self.policy.reference
        policy.model.eval()  # without dropout, as it sampled
        # What is measured needs neither a bonus nor the quantile of an optimizer batch.
        loss = replace(self.loss, beta=0.0, entropy_coef=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None)
        rows: list[RowSums] = []
        for part in self.micro_batches(batch, forward):
            scores = forward.scores(policy.split_model, part, with_gradient=False)
            ref_logp_BT = forward.scores(reference, part, with_gradient=False).logp_N if reference is not None else None
            rows += row_sums(part.batch, scores, ref_logp_BT, loss)
            poll()
        return means([row for of_rank in forward.ranks.gather(rows) for row in of_rank])

    def change(self, config: Config, keys: Collection[str]) -> None:
        self.config, self.loss = config, loss_settings(config)
        if "entropy_coef" in keys:  # otherwise an adaptive bonus continues from where it is
            self.bonus.value = config.entropy_coef

    def state(self) -> list[float | None]:
        return [self.bonus.value, self.bonus.entropy]

    def restore(self, state: list[float | None]) -> None:
        if state:  # older checkpoints have none
            self.bonus.value, self.bonus.entropy = state[0] or 0.0, state[1]


RowSums = dict[str, tuple[float, float]]  # name → (sum, token count) of one completion


def row_sums(batch: Batch, scores: TokenScores, ref_logp_BT: mx.array | None, loss: LossConfig) -> list[RowSums]:
    """Per-row sums of scores [B, T], in nats."""
    tallies: list[dict[str, mx.array]] = []
    for row in range(len(batch)):
        at = slice(row, row + 1)
        mask_1T, ref_logp_1T = batch.mask_BT[at], None if ref_logp_BT is None else ref_logp_BT[at]
        arrays = (scores.logp_N[at], None, ref_logp_1T, batch.advantage_B[at], mask_1T, loss)
        tally = policy_terms(*arrays, weights=mask_1T, entropies=scores.entropy_N[at])[1]
        tallies.append({name: tally["mean"][name] for name in ("entropy", "kl") if name in tally["mean"]})
        if scores.divergence_N is not None:
            tallies[-1][DIVERGENCE] = token_mean(scores.divergence_N[at], mask_1T)
    mx.eval(tallies)
    return [{name: (float(pair[0]), float(pair[1])) for name, pair in tally.items()} for tally in tallies]


def means(rows: Sequence[RowSums]) -> dict[str, float]:
    """Token means with standard errors from two completions up: the ratio estimator √(n / (n − 1) · Σ (s − m t)²) / Σ t
    over sums s, token counts t and mean m (Cochran, Sampling Techniques, 1977, section 2.11)."""
    found: dict[str, float] = {}
    for name in rows[0] if rows else ():
        pairs = [row[name] for row in rows]
        tokens = math.fsum(count for _, count in pairs)
        if not tokens:
            continue
        mean = found[name] = math.fsum(total for total, _ in pairs) / tokens
        if len(pairs) > 1:
            squares = math.fsum((total - mean * count) ** 2 for total, count in pairs)
            found[name + STANDARD_ERROR] = math.sqrt(squares * len(pairs) / (len(pairs) - 1)) / tokens
    return found


def entropies_of_all(
    ranks: Collectives, entropies: Sequence[mx.array], masks: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    """Entropies of all tokens over all ranks, and their mask, [1, N]."""
    if ranks.size == 1:
        own, counts = (mx.concatenate([x.reshape(1, -1) for x in parts], axis=1) for parts in (entropies, masks))
        return own, counts
    # Only tokens that count travel. One more that does not, so that there is a column where no rank has any.
    counted = [np.array(x)[np.array(mask) > 0] for x, mask in zip(entropies, masks, strict=True)]
    of_all = ranks.concatenate(mx.array(np.concatenate([*counted, np.zeros(0, np.float32)])))
    return mx.pad(of_all, (0, 1))[None], mx.pad(mx.ones_like(of_all), (0, 1))[None]


def loss_settings(config: Config) -> LossConfig:
    names = {field.name for field in fields(LossConfig)} - {"loss_type"}
    return LossConfig(loss_type=config.grpo_loss_type, **{name: getattr(config, name) for name in names})


def correction_mode(config: Config, dtype: mx.Dtype) -> tuple[str, str]:
    """The correction mode, and a note where "auto" chose one: rounding of 16-bit models by token, constrained output by
    the product of the mass that the grammar kept, which is at most 1; filters never (`docs/algorithms.md`)."""
    if config.sampling_correction != "auto":
        return config.sampling_correction, ""
    if config.holds_output:
        return "sequence_truncate", (
            "Output is held to a grammar: each completion's term is multiplied by the policy's own probability "
            "of keeping to it (Sampling correction: Automatic)."
        )
    bits, kind = config.rollout_quantization, str(dtype).removeprefix("mlx.core.")
    if bits != "none":
        why = f"Completions are sampled in {bits} bits, and learned in {kind}"
    elif dtype == mx.float32 or config.ratio_against == "reference":
        return "none", ""
    else:
        why = f"The model computes in {kind}, where sampler and learner round differently"
    return "token_truncate", (
        f"{why}: each token's term is multiplied by the ratio of their probabilities before filters, within the limits "
        "(Sampling correction: Automatic)."
    )
