"""A step's updates: a batch of scored completions in, new weights out. The algorithm supplies the objective.

What every algorithm shares: forward and backward passes over micro-batches, gradient accumulation, clipping, optimizer and
learning rate. Knows no loss, no files, no rewards and no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from backend.config import own_updates
from backend.config.config import Config
from backend.config.settings.optimizer import OWN
from backend.engine.chunk_sizes import MICRO_BATCH_TOKENS, head_chunk
from backend.engine.cpu.affinity import on_one_core
from backend.engine.device import on_gpu
from backend.engine.embedding_noise import EmbeddingNoise, input_embedding
from backend.engine.forward import PrefilledPrompts
from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.lm_head import TokenScores
from backend.engine.penalties import Penalties
from backend.models.policy import Policy
from backend.training.batch import Batch
from backend.training.collectives import merged, total_gradient, total_loss
from backend.training.losses import Tally, merge
from backend.training.not_finite import NotFinite, gradient_norms, token_numbers
from backend.training.optimizers import (
    SETTINGS_DECIDE,
    LearningRate,
    OwnUpdates,
    clip_by_norm,
    optimizer,
    rate_of,
    restore,
    state_arrays,
)
from backend.training.policy_forward import MicroBatch, PolicyForward, do_nothing
from backend.training.schedules import learning_rates
from backend.training.token_records import TokenRecord
from backend.utils.errors import UserError

# What a training step needs of an algorithm. GRPO's family is `grpo.py`; a supervised warm-up or DPO is one file
# beside it.

OptimizerBatch = list[MicroBatch]
"""The micro-batches of one optimizer update; empty where no token has a gradient."""


class Algorithm(Protocol):
    """Subclass it and implement `prepare` and `objective`; the other methods do nothing unless overridden."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether `objective` differentiates the entropies too."""
        return False

    def prepare(self, batch: Batch, forward: PolicyForward) -> list[OptimizerBatch]:
        """The updates of one step, in order: an optimizer batch for each, split into micro-batches that carry all that
        stays fixed over the updates (token weights, reference log-probabilities, …). The same batch may occur several times."""
        ...

    def batch_totals(self, micro_batches: OptimizerBatch, forward: PolicyForward) -> Any:
        """Before each update: totals of the optimizer batch that a micro-batch cannot know. Passed to `objective`."""
        return None

    def objective(self, micro_batch: MicroBatch, scores: TokenScores, totals: Any) -> tuple[mx.array, Tally]:
        """This micro-batch's share of the loss, a scalar differentiable in `scores`, and of the metrics."""
        ...

    def after_backward(self, micro_batch: MicroBatch, scores: TokenScores, totals: Any) -> None:
        """After a micro-batch's backward pass, with what `objective` was given: log-probabilities and entropies [B, T]."""

    def after_update(self, update: int, metrics: dict[str, float]) -> None:
        """After update number `update` (from 1 over the run), with its merged metrics."""

    def change(self, config: Config, keys: Collection[str]) -> None:
        """Go on with the settings of `config`, between two steps; `keys` names those that differ from before."""

    def notes(self) -> list[str]:
        """Sentences for the user about what was chosen where a setting leaves the choice open."""
        return []

    def metric_names(self) -> list[str]:
        """Metrics that every step reports: NaN where nothing was measured."""
        return []

    def take_token_records(self) -> dict[int, TokenRecord]:
        """Row of the step's batch → what its last update saw of its tokens, of the last step; empty unless recorded."""
        return {}

    def held_out_metrics(
        self, batch: Batch, forward: PolicyForward, poll: Callable[[], None] = do_nothing
    ) -> dict[str, float]:
        """Metrics of completions that are not learned from, by forward passes alone. `poll` is called after each micro-batch."""
        return {}

    def step_metrics(self, optimizer_batches: list[OptimizerBatch], forward: PolicyForward) -> dict[str, float]:
        """Metrics of the step as a whole, after its last update. Every rank calls it: what each has of its own rows can be exchanged."""
        return {}

    def state(self) -> list[float | None]:
        """The algorithm's part of a checkpoint."""
        return []

    def restore(self, state: list[float | None]) -> None:
        """Put `state` back; an empty list, from older checkpoints, changes nothing."""


# ── learner ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Learner:
    """Policy, algorithm, optimizer and schedule. `updates` counts optimizer updates over the run; the learning rate
    (`learning_rate(update)`), dropout and a reference that follows the policy depend on it alone, so a resumed run continues
    exactly. Without a `learning_rate` the optimizer keeps its own.

    `recompute` recomputes layers' activations in the backward pass instead of keeping them; it changes no number.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: Optimizer,
        learning_rate: LearningRate | None,
        forward: PolicyForward,
        *,
        own: OwnUpdates = SETTINGS_DECIDE,
        max_grad_norm: float | None = None,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.forward = forward
        self.own = own
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.recompute = recompute
        self.updates = 0
        self.is_whole = True
        """Whether weights and moments are those after `updates` updates: not so where an update has failed half-way."""
        # Before compiling: the compiled update captures the state's arrays, which must exist by then.
        self.optimizer.init(policy.parameters())
        self._loss_and_grad = nn.value_and_grad(policy.model, self._loss)
        self._apply_gradients = self._compiled_update()

    def state_arrays(self) -> dict[str, mx.array]:
        return state_arrays(self.optimizer)

    def restore(
        self, arrays: dict[str, mx.array] | None, updates: int, algorithm_state: Sequence[float | None] = ()
    ) -> None:
        """Go on after `updates` updates, with the optimizer's state in `arrays`; without one it begins anew. Raises ValueError for a state
        that is not of this optimizer, UserError where that is a program's: its checkpoint is whole, and another optimizer was given."""
        if arrays is not None:
            self._restore_optimizer(arrays)
        self.updates = updates
        self.algorithm.restore(list(algorithm_state))

    def _restore_optimizer(self, arrays: dict[str, mx.array]) -> None:
        try:
            restore(self.optimizer, arrays)
        except ValueError as error:
            if self.own.make is None:
                raise
            raise UserError("optimizer", f"This is not the optimizer that the run was trained with. {error}") from None

    def change(self, config: Config, steps: int, keys: Collection[str]) -> None:
        """Go on with other values of the settings `keys`, between two steps of a run that is now `steps` long. Moments stay, and the
        learning rate follows the new curve from the present update on."""
        self.learning_rate = learning_rate_of(config, steps, self.own)
        self.forward.temperature = config.temperature
        self.max_grad_norm = config.max_grad_norm
        self.algorithm.change(config, keys)

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @on_one_core()
    def learn(self, batch: Batch, poll: Callable[[], None] = do_nothing) -> dict[str, float]:
        """Every update of one step. Metrics: loss, grad_norm and the algorithm's own, means over the updates;
        learning_rate of the last update; grad_clipped, the share of updates that were shortened. `poll` is called after each micro-batch.
        Raises NotFinite, before the weights change, for a loss or a gradient that is not finite."""
        forward = self.forward
        forward.poll = poll
        with self._embedding_noise():
            optimizer_batches = self.algorithm.prepare(batch, forward)
            updates = [self._update(micro_batches, forward) for micro_batches in optimizer_batches]
        names = dict.fromkeys(name for metrics in updates for name in metrics)
        means = {name: float(np.mean([metrics[name] for metrics in updates if name in metrics])) for name in names}
        blank = dict.fromkeys(self.algorithm.metric_names(), math.nan)
        last = {"learning_rate": updates[-1]["learning_rate"]}
        return blank | means | self.algorithm.step_metrics(optimizer_batches, forward) | last

    @on_one_core()
    def held_out_metrics(self, batch: Batch, poll: Callable[[], None] = do_nothing) -> dict[str, float]:
        """The algorithm's metrics of completions that are not learned from."""
        return self.algorithm.held_out_metrics(batch, self.forward, poll)

    @contextmanager
    def _embedding_noise(self) -> Iterator[None]:
        """Within it the policy's embeddings have noise, where the settings ask for it: the same in all updates of the step."""
        if (noise := self.forward.noise) is None:
            yield
            return
        noise.rollout = self.updates  # a number that only this step begins with
        try:
            yield
        finally:
            noise.rollout = None

    def _update(self, micro_batches: OptimizerBatch, forward: PolicyForward) -> dict[str, float]:
        """One optimizer update: θ ← θ − optimizer(Σ over micro-batches of ∇ loss). Over several ranks the sum is over those of all, and
        every rank makes the same update."""
        model, split_model, ranks = self.policy.model, self.policy.split_model, forward.ranks
        model.train()
        # Dropout depends on the update, not on what ran before, so a resumed run repeats it. A large prime keeps the sequences
        # of neighbouring seeds apart; ranks drop out other rows.
        mx.random.seed(self.seed * 1_000_003 + self.updates + (ranks.rank << 40))
        totals = self.algorithm.batch_totals(micro_batches, forward)
        prefix = forward.shared_prefix(split_model, micro_batches)
        prefilled = prefix.prefill(split_model) if prefix else None
        gradient, loss, tallies = None, mx.array(0.0), []
        for micro_batch in micro_batches:
            prompted = prefix.select(prefilled, micro_batch) if prefix and prefilled else None
            (part_loss, scores, tally), part_gradient, cotangents = self._backward(micro_batch, totals, prompted)
            if prefix and cotangents:  # dL/dK and dL/dV of its prompts
                prefix.accumulate(micro_batch, cotangents)
            # Summed in float32: weights that are copies in 16 bits have gradients in 16 bits.
            part_gradient = tree_map(lambda x: x.astype(mx.float32), part_gradient)
            gradient = part_gradient if gradient is None else tree_map(mx.add, gradient, part_gradient)
            loss = loss + part_loss
            tallies.append(tally)
            # Evaluate now, so that the activations of one micro-batch at a time are in memory. The sum `gradient` is all that
            # is kept; the loss is already weighted by token, so no division by the number of micro-batches follows.
            mx.eval(gradient, loss, scores, tally)
            self.algorithm.after_backward(micro_batch, scores, totals)
            forward.poll()
        if prefix:
            with gradient_checkpointing(model, self.recompute):
                gradient = prefix.backward(model, split_model, gradient)
        if gradient is None:  # no completion has a signal: the gradient is 0, but momentum and weight decay still apply
            gradient = tree_map(mx.zeros_like, self.policy.parameters())
        else:
            gradient = self.policy.gather_gradient(gradient)
        loss, tallies = total_loss(ranks, loss, tallies)
        gradient = total_gradient(ranks, gradient)
        metrics = {name: float(value) for name, value in merge(tallies).items()} if tallies else {}
        try:
            metrics |= self._apply(gradient, loss)
        except NotFinite as found:
            own = token_numbers(micro_batches, forward.logps_without_gradient(split_model, micro_batches))
            found.tokens = merged(ranks, own)
            raise
        self.algorithm.after_update(self.updates, metrics)
        return metrics

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _backward(
        self, micro_batch: MicroBatch, totals: Any, prompted: PrefilledPrompts | None
    ) -> tuple[tuple[mx.array, TokenScores, Tally], Any, PrefilledPrompts | None]:
        """The results of `_loss`, its gradient in the parameters, and that in the prefilled prompts."""
        parameters = self.policy.model.trainable_parameters()
        try:
            with gradient_checkpointing(self.policy.model, self.recompute):
                if prompted is not None:
                    return self._gradient_in_parameters_and_prompts(micro_batch, totals, prompted)
                return *self._loss_and_grad(micro_batch, totals), None
        except ValueError as error:
            if "vjp" not in str(error).casefold():
                raise
            sentence = (
                f"An operation of this model has no gradient on this device ({error}), so it cannot be trained here."
            )
            raise UserError("model", sentence) from error
        finally:
            self.policy.model.update(parameters)  # differentiation leaves its tracers in the model

    def _gradient_in_parameters_and_prompts(
        self, micro_batch: MicroBatch, totals: Any, prompted: PrefilledPrompts
    ) -> tuple[Any, Any, PrefilledPrompts]:
        model = self.policy.model

        def loss(parameters: Any, last: mx.array, keys: list[mx.array], values: list[mx.array]) -> Any:
            model.update(parameters)
            return self._loss(micro_batch, totals, PrefilledPrompts(last, keys, values))

        # mx's, not nn's: nn.value_and_grad differentiates by parameters only, and here the prompts are inputs as well.
        value_and_grad = mx.value_and_grad(loss, argnums=[0, 1, 2, 3])
        value, (gradient, *cotangents) = value_and_grad(model.trainable_parameters(), *prompted)
        return value, gradient, PrefilledPrompts(*cotangents)

    def _loss(
        self, micro_batch: MicroBatch, totals: Any, prompted: PrefilledPrompts | None = None
    ) -> tuple[mx.array, TokenScores, Tally]:
        """(this micro-batch's share of the loss, which alone is differentiated; log-probabilities and entropies [B, T]; tally)."""
        scores = self.forward.scores(
            self.policy.split_model, micro_batch,
            entropy_gradient=self.algorithm.needs_entropy_gradient, prefilled=prompted,
        )  # fmt: skip
        loss, tally = self.algorithm.objective(micro_batch, scores, totals)
        return loss, scores, tally

    # ── the optimizer ────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply(self, gradient: Any, loss: mx.array) -> dict[str, float]:
        """Clip, and update the weights. → loss, grad_norm before clipping, learning_rate, and whether it was clipped. Raises NotFinite."""
        clipped, norm_array = clip_by_norm(gradient, self.max_grad_norm)
        # One NaN or infinity anywhere makes the norm so. Checked before the update, which would destroy the weights.
        norm, loss_value = float(norm_array), float(loss)
        if not (math.isfinite(norm) and math.isfinite(loss_value)):
            raise self._not_finite(gradient, norm, loss_value)
        rate = self.learning_rate(self.updates) if self.learning_rate else math.nan
        self.is_whole = False
        self.policy.set_parameters(self._apply_gradients(clipped, self.policy.parameters(), mx.array(rate)))
        # Or the update would stay a graph that holds the old weights and the whole gradient.
        mx.eval(self.policy.arrays(), self.optimizer.state)
        self.updates += 1
        self.is_whole = True
        told = {"grad_clipped": float(norm > self.max_grad_norm)} if self.max_grad_norm else {}
        rate = rate if self.learning_rate else rate_of(self.optimizer)
        return {"loss": loss_value, "grad_norm": norm, "learning_rate": rate, **told}

    def _not_finite(self, gradient: Any, norm: float, loss: float) -> NotFinite:
        is_loss = not math.isfinite(loss)  # then the gradient is not either, as a rule: the loss is the cause
        found = NotFinite(*(("loss", f"{loss:g}") if is_loss else ("gradient", f"a norm of {norm:g}")))
        found.update, found.gradients = self.updates + 1, gradient_norms(gradient)
        return found

    def _compiled_update(self) -> Callable[[Any, Any, mx.array], Any]:
        """The optimizer's update, compiled: a dozen elementwise operations for each of hundreds of arrays become one or two.
        Shapes never change, so it is traced once."""
        optimizer, sets_rate = self.optimizer, self.learning_rate is not None

        def apply_gradients(gradient: Any, parameters: Any, rate: mx.array) -> Any:
            if sets_rate:
                optimizer.learning_rate = rate  # an array: each Python number would be the constant of a new trace
            return optimizer.apply_gradients(gradient, parameters)

        if not self.own.compiles:
            return apply_gradients
        return mx.compile(apply_gradients, inputs=[optimizer.state], outputs=[optimizer.state])


def optimizer_of(config: Config, own: OwnUpdates = SETTINGS_DECIDE) -> Optimizer:
    """The program's optimizer, or that of the settings. Raises UserError for settings that are a program's, without it."""
    if own.make is not None:
        return own.make(config.learning_rate)
    if config.optimizer == OWN:
        own_updates.require_no_program(config)
    return optimizer(
        config.optimizer,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        bits=int(config.optimizer_bits),
    )


def learning_rate_of(config: Config, steps: int, own: OwnUpdates = SETTINGS_DECIDE) -> LearningRate | None:
    """The learning rate of every update of a run of `steps` steps; None where it is the optimizer's own affair."""
    if own.keeps_rate:
        return None
    if own.rate is not None:
        return own.rate
    if config.lr_schedule == OWN:
        own_updates.require_no_program(config)
    return learning_rates(config, steps)


def _noise_of(policy: Policy, config: Config) -> EmbeddingNoise | None:
    if not config.neftune_noise_alpha:
        return None
    return EmbeddingNoise(input_embedding(policy.model), config.neftune_noise_alpha, config.seed)


def build_learner(
    policy: Policy,
    algorithm: Algorithm,
    config: Config,
    steps: int,
    *,
    micro_batch_tokens: int | None = None,
    chunk: int | None = None,
    recompute: bool | None = None,
    own: OwnUpdates = SETTINGS_DECIDE,
) -> Learner:
    """A learner with the optimizer, schedule and memory settings of `config`, for a run of `steps` steps.

    `micro_batch_tokens`, `chunk` (completion tokens whose logits are held at once) and `recompute` trade memory for time and
    change no number; left out, they follow from `config` and the device. `own`: what takes the place of optimizer and schedule.
    """
    seq_step_size = config.seq_step_size if config.efficient_long_context else None
    return Learner(
        policy,
        algorithm,
        optimizer_of(config, own),
        learning_rate_of(config, steps, own),
        PolicyForward(
            config.temperature,
            chunk or seq_step_size or head_chunk(policy.split_model.vocab_size, on_gpu()),
            micro_batch_tokens or MICRO_BATCH_TOKENS[on_gpu()],
            has_dropout=config.dropout > 0,
            penalties=Penalties(*config.penalties),
            noise=_noise_of(policy, config),
            noisy_model=policy.split_model,
        ),
        own=own,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        recompute=config.grad_checkpoint if recompute is None else recompute,
    )
