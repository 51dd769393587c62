"""The updates: a batch of scored completions in, new weights out, by the clipped objective of the chosen loss.

Weights of tokens are worked out once for a whole optimizer batch, so gradients of its parts simply add: cutting it
differently changes nothing. Knows no files, no rewards and no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from backend import ranks
from backend.engine.cpu.affinity import on_one_core
from backend.engine.forward import PrefilledPrompts, SequenceRows, completion_logps, sequence_rows
from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.lm_head import TokenScores
from backend.engine.split_model import SplitModel
from backend.models.policy import Policy
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.memory.chunking import MICRO_BATCH_TOKENS, head_chunk
from backend.training.batch import Batch, importance_ratio
from backend.training.compiled_grad import BUCKET, CompiledGrad
from backend.training.entropy_bonus import EntropyBonus
from backend.training.losses import entropy_quantile, merge, policy_terms, token_weights
from backend.training.microbatch import PromptUse
from backend.training.optimizer import clip_by_norm, optimizer, restore, schedule, state_arrays
from backend.training.shared_prefix import SharedPrefix

Poll = Callable[[], None]


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch: its arrays, and how the forward pass reads them."""

    batch: Batch
    rows: SequenceRows
    groups: list[int]
    """The numbers of its prompts in the step, in the order of its rows."""

    def know(self, **arrays: mx.array | None) -> None:
        self.batch = replace(self.batch, **arrays)


class Learner:
    """Policy, optimizer and schedule; `updates` counts optimizer updates and is all the schedule knows of time.

    `micro_batch_tokens`, `chunk` (completion tokens whose logits are held at once) and `recompute` (layers' activations in the
    backward pass) trade memory for time, `traced` compiles the gradient, and none changes a number; left out, they follow from
    constants, settings and the device.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        steps: int,
        *,
        micro_batch_tokens: int | None = None,
        chunk: int | None = None,
        recompute: bool | None = None,
        traced: bool | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.updates = 0
        betas = (config.adam_beta1, config.adam_beta2)
        self.optimizer = optimizer(
            config.optimizer, learning_rate=config.learning_rate, weight_decay=config.weight_decay, betas=betas
        )
        self.optimizer.init(policy.model.trainable_parameters())
        self.rate = schedule(
            config.lr_schedule,
            config.learning_rate,
            steps * config.updates_per_step,
            warmup_steps=config.lr_warmup_steps,
            warmup_init=config.lr_warmup_init,
            decay_fraction=config.lr_decay_fraction,
            final=config.lr_final,
        )
        self.bonus = EntropyBonus(config.entropy_coef, config.entropy_adaptive, config.entropy_target)
        self.objective = objective(config)
        asked = config.seq_step_size if config.efficient_long_context else None
        on_gpu = mx.default_device().type == mx.gpu
        self.chunk = chunk or asked or head_chunk(policy.split_model.vocab_size, on_gpu)
        self.micro_batch_tokens = micro_batch_tokens or MICRO_BATCH_TOKENS[on_gpu]
        self.recompute = config.grad_checkpoint if recompute is None else recompute
        self.traced = (on_gpu if traced is None else traced) and config.dropout == 0
        self._loss_and_grad = (CompiledGrad if self.traced else nn.value_and_grad)(policy.model, self._loss)
        self._move = self._moving()

    def state_arrays(self) -> dict[str, mx.array]:
        return state_arrays(self.optimizer)

    def restore(self, arrays: dict[str, mx.array], updates: int, bonus: Sequence[float | None] = ()) -> None:
        restore(self.optimizer, arrays)
        self.updates = updates
        self.bonus.restore(list(bonus))

    # ── one rollout ──────────────────────────────────────────────────────────────────────────────────────────────────

    @on_one_core()
    def learn(self, batch: Batch, poll: Poll = lambda: None) -> dict[str, float]:
        """`steps_per_generation` optimizer batches, μ = `num_iterations` times each. → loss, kl, entropy, clip ratios,
        grad_norm, sampling/*: means over the updates; learning_rate: the last one. What nothing was measured of is NaN.
        Raises Mistake, before the weights change, for a broken gradient."""
        cuts = [self._prepared(part, poll) for part in self._optimizer_batches(batch)]
        measured: list[dict[str, float]] = []
        for _ in range(self.config.num_iterations):
            for parts in cuts:
                measured.append(self._update(parts, poll))
        names = dict.fromkeys(name for one in measured for name in one)
        means = {name: _mean([one[name] for one in measured if name in one]) for name in names}
        sampling = self._sampling_metrics([part for parts in cuts for part in parts])
        return self._blank() | means | sampling | {"learning_rate": measured[-1]["learning_rate"]}

    def _blank(self) -> dict[str, float]:
        names = ["entropy", "clip_ratio_low", "clip_ratio_high", "clip_ratio_total"]
        return dict.fromkeys(names + (["kl"] if self.policy.reference is not None else []), math.nan)

    def _optimizer_batches(self, batch: Batch) -> list[Batch]:
        """The rollout cut into `steps_per_generation` batches, group by group."""
        count = self.config.steps_per_generation
        rows = len(batch) // count
        return [batch.take(range(i * rows, (i + 1) * rows)) for i in range(count)] if count > 1 else [batch]

    def _prepared(self, batch: Batch, poll: Poll) -> list[MicroBatch]:
        """Micro-batches of one optimizer batch, with all that does not change from update to update."""
        batch = self._weighted(batch)
        if self._only_signal_counts():
            batch = batch.with_signal()
        if not len(batch):
            return []
        parts = self._parts(batch)
        if self.policy.reference is not None:
            for part, logp_BT in zip(parts, self._looked_at(self.policy.reference, parts, poll), strict=True):
                part.know(
                    ref_logp_BT=logp_BT, old_logp_BT=logp_BT if self.config.ratio_against == "reference" else None
                )
        if self._needs_old_pass():
            self.policy.model.eval()
            for part, logp_BT in zip(parts, self._looked_at(self.policy.split_model, parts, poll), strict=True):
                part.know(old_logp_BT=logp_BT)
        for part in parts:
            self._correct(part)
        return parts

    def _looked_at(self, split_model: SplitModel, parts: list[MicroBatch], poll: Poll) -> Iterator[mx.array]:
        """Each part's log-probabilities, without gradient."""
        relay = self._relay(parts, split_model)
        read = relay.read(split_model) if relay else None
        for part in parts:
            given = relay.given(read, part) if relay and read else None
            logp_BT = self._logps(split_model, part.rows, with_gradient=False, prefilled=given).logp_N
            mx.eval(logp_BT)
            poll()
            yield logp_BT

    def _relay(self, parts: list[MicroBatch], split_model: SplitModel) -> SharedPrefix | None:
        """What reads the prompts for parts that share them; None where reading them part by part costs no more."""
        pays = self._prompts(split_model) == "apart" and SharedPrefix.pays(parts, self.micro_batch_tokens)
        return SharedPrefix(parts, self.micro_batch_tokens) if pays else None

    def _prompts(self, split_model: SplitModel) -> PromptUse:
        """How prompts may be read. Dropout would drop other inputs in the second reading than in the first."""
        if not split_model.prefix_layers:
            return "repeated"
        return "shared" if self.config.dropout else "apart"

    def _parts(self, batch: Batch) -> list[MicroBatch]:
        multiple = BUCKET if self.traced else 1
        batches = batch.parts(
            rows=self.config.batch_size * self.config.group_size, token_budget=self.micro_batch_tokens,
            prompts=self._prompts(self.policy.split_model), multiple=multiple,
        )  # fmt: skip
        return [
            MicroBatch(
                one,
                sequence_rows(
                    one.tokens_BL, one.prompt_length_B, one.group_B, one.completion_BT, one.mask_BT, multiple
                ),
                list(dict.fromkeys(one.group_B.tolist())),  # pyright: ignore
            )
            for one in batches
        ]

    def _only_signal_counts(self) -> bool:
        """Whether a completion without advantage adds nothing at all: no KL, no entropy term, and no tokens among which
        the most uncertain ones are chosen."""
        alone = self.policy.reference is None and not self.bonus.on and self.config.top_entropy_quantile >= 1
        return self.config.skip_zero_signal and alone

    def _weighted(self, batch: Batch) -> Batch:
        tokens = ranks.total(batch.mask_BT.sum())
        weight_BT = token_weights(
            batch.mask_BT,
            loss_type=self.config.grpo_loss_type,
            max_completion_length=self.config.max_completion_length,
            num_items=tokens,
            rows=ranks.total(mx.array(len(batch))),
            tokens=tokens,
        )
        return replace(batch, weight_BT=weight_BT)

    def _needs_old_pass(self) -> bool:
        """The first update of a rollout *is* the policy that sampled, so it records the old log-probabilities itself. A
        pass of its own is needed only where they are wanted before that, or the policy has moved by then."""
        wanted = self.config.steps_per_generation > 1 or self.config.sampling_correction != "none"
        return wanted and self.config.ratio_against == "old"

    def _correct(self, part: MicroBatch) -> None:
        """Give the part its importance correction for the gap between the policy and what was drawn from."""
        if self.config.sampling_correction != "none":
            part.know(is_ratio_BT=self._gap(part.batch)[0])

    def _gap(self, batch: Batch) -> tuple[mx.array, dict[str, mx.array]]:
        mode = self.config.sampling_correction
        assert batch.old_logp_BT is not None
        return importance_ratio(
            batch.old_logp_BT,
            batch.sampling_logp_BT,
            batch.mask_BT,
            mode="token_truncate" if mode == "none" else mode,
            clip_min=None if mode == "none" else self.config.sampling_correction_min,
            clip_max=None if mode == "none" else self.config.sampling_correction_max,
        )

    def _sampling_metrics(self, parts: Sequence[MicroBatch]) -> dict[str, float]:
        """How far what was drawn from lay from the policy: means over the parts, extremes over all."""
        known = [part.batch for part in parts if part.batch.old_logp_BT is not None]
        if not known or self.config.ratio_against == "reference":
            return {}
        each = [{name: float(value) for name, value in self._gap(batch)[1].items()} for batch in known]
        tokens = [float(batch.mask_BT.sum()) for batch in known]
        by_row = self.config.sampling_correction.startswith("sequence")
        counts = {name: [len(batch) for batch in known] if by_row and "ratio" in name else tokens for name in each[0]}
        return {name: _over_parts(name, [one[name] for one in each], counts[name]) for name in each[0]}

    # ── one update ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _update(self, parts: list[MicroBatch], poll: Poll) -> dict[str, float]:
        """One optimizer update from all parts; the parts are given their old log-probabilities where they lack them."""
        self.policy.model.train()
        mx.random.seed(self.config.seed * 1_000_003 + self.updates)  # dropout follows from the place in the run
        whole = self._whole(parts)
        relay = self._relay(parts, self.policy.split_model)
        read = relay.read(self.policy.split_model) if relay else None
        total, tallies, loss = None, [], mx.array(0.0)
        for part in parts:
            given = relay.given(read, part) if relay and read else None
            (part_loss, logp_BT, tally), grads, slopes = self._part_gradient(part, whole, given)
            if relay and slopes:
                relay.add(part, slopes)
            total, loss = _added(total, grads), loss + part_loss
            tallies.append(tally)
            mx.eval(total, loss, logp_BT, tally)
            if part.batch.old_logp_BT is None:
                part.know(old_logp_BT=logp_BT)
            poll()
        if relay:
            with gradient_checkpointing(self.policy.model, self.recompute):
                total = relay.pulled_back(self.policy.model, self.policy.split_model, total)
        if total is None:  # no completion had a signal: the gradient is 0, and the optimizer's momentum goes on
            total = tree_map(mx.zeros_like, self.policy.model.trainable_parameters())
        metrics = {name: float(value) for name, value in merge(tallies).items()} if tallies else {}
        metrics |= self._apply(ranks.total(total), ranks.total(loss))
        if self.bonus.on and "entropy" in metrics:
            self.bonus.observe(metrics["entropy"])
        return metrics

    def _whole(self, parts: list[MicroBatch]) -> dict[str, Any]:
        """What a part cannot know of its optimizer batch: the entropy threshold, and how many tokens the bonus counts."""
        top, wanted = self.config.top_entropy_quantile, self.bonus.coefficient > 0
        if top >= 1:
            return {"entropy_tokens": sum(part.batch.mask_BT.sum() for part in parts)} if wanted else {}
        entropies = [self._logps(self.policy.split_model, part.rows, with_gradient=False).entropy_N for part in parts]
        flat = mx.concatenate([entropy.reshape(1, -1) for entropy in entropies], axis=1)
        mask = mx.concatenate([part.batch.mask_BT.reshape(1, -1) for part in parts], axis=1)
        threshold = entropy_quantile(flat, mask, top)
        tokens = ((flat >= threshold) * mask).sum()
        mx.eval(threshold, tokens)
        return {"entropy_threshold": threshold} | ({"entropy_tokens": tokens} if wanted else {})

    def _part_gradient(
        self, part: MicroBatch, whole: dict[str, Any], given: PrefilledPrompts | None
    ) -> tuple[Any, Any, PrefilledPrompts | None]:
        """What `_loss` gives, its gradient in the weights, and in the prompts that were given."""
        things = (part.batch, part.rows, whole, self.bonus.coefficient)
        learning = self.policy.model.trainable_parameters()
        try:
            with gradient_checkpointing(self.policy.model, self.recompute):
                if given is not None:
                    return self._gradient_in_both(given, *things)
                return *self._loss_and_grad(*things), None
        except ValueError as error:
            if "vjp" not in str(error):
                raise
            sentence = (
                f"An operation of this model has no gradient on this device ({error}), so it cannot be trained here."
            )
            raise Mistake("model", sentence) from error
        finally:
            self.policy.model.update(learning)  # differentiation leaves its own arrays in the model

    def _gradient_in_both(
        self, given: PrefilledPrompts, batch: Batch, rows: SequenceRows, whole: dict[str, Any], coefficient: float
    ) -> tuple[Any, Any, PrefilledPrompts]:
        model = self.policy.model

        def loss(learning: Any, last: mx.array, keys: list[mx.array], values: list[mx.array]) -> Any:
            model.update(learning)
            return self._loss(batch, rows, whole, coefficient, PrefilledPrompts(last, keys, values))

        gradient = mx.value_and_grad(loss, argnums=[0, 1, 2, 3])
        told, (grads, *slopes) = gradient(model.trainable_parameters(), *given)
        return told, grads, PrefilledPrompts(*slopes)

    def _loss(
        self,
        batch: Batch,
        rows: SequenceRows,
        whole: dict[str, Any],
        coefficient: float,
        prefilled: PrefilledPrompts | None = None,
    ) -> tuple[mx.array, mx.array, Any]:
        """(this part's share of the loss, log-probabilities, tally)."""
        logp_BT, entropy_BT = self._logps(
            self.policy.split_model, rows, entropy_gradient=coefficient > 0, prefilled=prefilled
        )
        loss, tally = policy_terms(
            logp_BT,
            batch.old_logp_BT,
            batch.ref_logp_BT,
            batch.advantage_B,
            batch.mask_BT,
            weights=batch.weight_BT,
            entropies=entropy_BT,
            is_ratio=batch.is_ratio_BT,
            sampling_logps=batch.sampling_logp_BT,
            entropy_coef=coefficient,
            **whole,
            **self.objective,
        )
        return loss, mx.stop_gradient(logp_BT), tally

    def _logps(self, split_model: SplitModel, rows: SequenceRows, **how: Any) -> TokenScores:
        return completion_logps(split_model, rows, self.config.temperature, self.chunk, **how)

    def _apply(self, grads: Any, loss: mx.array) -> dict[str, float]:
        grads, norm = clip_by_norm(grads, self.config.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise Mistake(
                "learning_rate",
                f"The gradient of update {self.updates + 1} is not a number, so it was not applied; lower the learning "
                f"rate, or look for a broken weight in the model.",
            )
        rate = self.rate(self.updates)
        self.policy.model.update(self._move(grads, self.policy.model.trainable_parameters(), mx.array(rate)))
        mx.eval(self.policy.model.trainable_parameters(), self.optimizer.state)
        self.updates += 1
        if self.config.sync_ref_model and self.updates % self.config.ref_model_sync_steps == 0:
            self.policy.move_reference(self.config.ref_model_mixup_alpha)
        return {"loss": float(loss), "grad_norm": float(norm), "learning_rate": rate}

    def _moving(self) -> Callable[[Any, Any, mx.array], Any]:
        """The optimizer's update as one traced function: a dozen small operations for each of hundreds of arrays become one or
        two."""
        optimizer = self.optimizer

        def move(grads: Any, weights: Any, rate: mx.array) -> Any:
            optimizer.learning_rate = rate
            return optimizer.apply_gradients(grads, weights)

        return mx.compile(move, inputs=[optimizer.state], outputs=[optimizer.state])


def _added(total: Any, grads: Any) -> Any:
    return grads if total is None else tree_map(mx.add, total, grads)


def objective(config: Config) -> dict[str, Any]:
    """The settings of `backend.training.losses.policy_loss`, from the form's."""
    same = (
        "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl",
        "max_completion_length", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos",
        "vespo_k_neg", "vespo_lambda_neg", "top_entropy_quantile", "off_policy_mask_threshold",
    )  # fmt: skip
    return {"loss_type": config.grpo_loss_type} | {name: getattr(config, name) for name in same}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _over_parts(name: str, values: Sequence[float], counts: Sequence[float]) -> float:
    """One number from those of the parts, by how many tokens or rows each of them counted."""
    counted = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    if not counted:
        return math.nan
    if name.endswith(("/min", "/max")):
        return (min if name.endswith("/min") else max)(value for value, _ in counted)
    return sum(value * count for value, count in counted) / sum(count for _, count in counted)
