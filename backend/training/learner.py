"""Updates of one step: forward and backward passes over micro-batches, accumulation, clipping, optimizer, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from backend.config import updates as own_updates
from backend.config.config import Config
from backend.config.updates import OWN
from backend.engine.forward import PrefilledPrompts
from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.graph import compiled_in_gradients
from backend.engine.lm_head import TokenScores
from backend.models.policy import Policy
from backend.training import optimizers
from backend.training.batch import Batch
from backend.training.collectives import merged, total_gradient, total_loss
from backend.training.losses import merge
from backend.training.not_finite import NotFiniteError, gradient_norms, token_numbers
from backend.training.optimizers import SETTINGS_DECIDE, LearningRate, OwnUpdates
from backend.training.policy_forward import MicroBatch, PolicyForward, do_nothing
from backend.training.schedules import learning_rates
from backend.utils.errors import UserError

OptimizerBatch = list[MicroBatch]  # the micro-batches of one update; may be empty

# (micro-batch, scores [B, T], totals of the optimizer batch) → its share of the loss, tally, arrays for after_backward
Objective = Callable[[MicroBatch, TokenScores, Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A completion in its last update; lists are per token."""

    learned_logp: list[float]  # log π_θ in nats before that update; 0 where masked
    ratio: list[float]
    clipped: list[bool]
    advantage: list[float]  # as `TokenValues.advantage_BT`


class Algorithm:
    """A learning algorithm. Subclasses implement `learn`."""

    notes: Sequence[str] = ()  # about choices made for settings left on auto
    of_sampler = True  # log-probabilities have the sampler's temperature and penalties; a group has one prompt
    token_records: Mapping[int, TokenRecord] = MappingProxyType({})  # row of the last batch → record of its last update

    def learn(self, batch: Batch, learner: Learner) -> dict[str, float]:
        """Make all updates of one step via `learner.update`; return the step's metrics."""
        raise NotImplementedError

    def held_out_metrics(
        self, batch: Batch, forward: PolicyForward, poll: Callable[[], None] = do_nothing
    ) -> dict[str, float]:
        """Metrics of held-out completions, by forward passes only."""
        return {}

    def change(self, config: Config, keys: Collection[str]) -> None:
        """Apply the changed settings `keys` between two steps."""

    def state(self) -> list[float | None]:
        return []

    def restore(self, state: list[float | None]) -> None:
        """Restore `state`; older checkpoints have an empty list."""


@dataclass(eq=False, repr=False)
class Learner:
    """Policy, algorithm, optimizer and schedule. Rate, dropout and reference depend on `updates` alone, so a resumed
    run continues exactly. Without `learning_rate` the optimizer keeps its own. `recompute`: gradient checkpointing."""

    policy: Policy
    algorithm: Algorithm
    optimizer: Optimizer
    learning_rate: LearningRate | None
    forward: PolicyForward
    own: OwnUpdates = SETTINGS_DECIDE
    max_grad_norm: float | None = None
    seed: int = 0
    recompute: bool = False
    updates: int = 0
    is_whole: bool = True  # false if an update failed half-way

    def __post_init__(self) -> None:
        # Before compiling: the compiled update captures the state's arrays, which must exist by then.
        optimizer, own = self.optimizer, self.own
        optimizer.init(self.policy.parameters())
        sets_rate = self.learning_rate is not None

        def apply_gradients(gradient: Any, parameters: Any, rate: mx.array) -> Any:
            if sets_rate:
                optimizer.learning_rate = rate  # an array: each Python number would be the constant of a new trace
            return optimizer.apply_gradients(gradient, parameters)

        state = [optimizer.state]
        compiled = mx.compile(apply_gradients, inputs=state, outputs=state) if own.compiles else apply_gradients
        self._apply_gradients: Callable[[Any, Any, mx.array], Any] = compiled

    def state_arrays(self) -> dict[str, mx.array]:
        return optimizers.state_arrays(self.optimizer)

    def restore(
        self, arrays: dict[str, mx.array] | None, updates: int, algorithm_state: Sequence[float | None] = ()
    ) -> None:
        """Continue after `updates` updates with the optimizer state `arrays`; None keeps a new state. Raises ValueError
        for the state of another optimizer; UserError if the program gave another one."""
        if arrays is not None:
            try:
                optimizers.restore(self.optimizer, arrays)
            except ValueError as error:
                if self.own.make is None:
                    raise
                sentence = f"This is not the optimizer that the run was trained with. {error}"
                raise UserError("optimizer", sentence) from None
        self.updates = updates
        self.algorithm.restore(list(algorithm_state))

    def change(self, config: Config, steps: int, keys: Collection[str]) -> None:
        """Apply the changed settings `keys`; the run is now `steps` long."""
        self.learning_rate = learning_rate_of(config, steps, self.own)
        if self.algorithm.of_sampler:
            self.forward.temperature = config.temperature
        self.max_grad_norm = config.max_grad_norm
        self.algorithm.change(config, keys)

    @compiled_in_gradients()
    def learn(self, batch: Batch, poll: Callable[[], None] = do_nothing) -> dict[str, float]:
        """Make all updates of one step; return their mean metrics. `poll` is called after each micro-batch. Raises
        NotFiniteError before the weights change."""
        self.forward.poll = poll
        noise = self.forward.noise
        if noise is not None:  # the same for all updates of the step
            noise.rollout = self.updates
        try:
            return self.algorithm.learn(batch, self)
        finally:
            if noise is not None:
                noise.rollout = None

    def held_out_metrics(self, batch: Batch, poll: Callable[[], None] = do_nothing) -> dict[str, float]:
        return self.algorithm.held_out_metrics(batch, self.forward, poll)

    def update(
        self,
        micro_batches: OptimizerBatch,
        objective: Objective,
        *,
        totals: Callable[[], Any] = do_nothing,
        after_backward: Callable[..., None] = lambda micro_batch, scores: None,
        entropy_gradient: bool = False,
    ) -> dict[str, float]:
        """One optimizer update: θ ← θ − optimizer(Σ over micro-batches and ranks of ∇ objective). `totals` computes
        values of the whole optimizer batch; `after_backward` gets micro-batch, scores and the objective's arrays.
        Returns loss, grad_norm, learning_rate, grad_clipped and the objective's metrics."""
        forward, model, split_model = self.forward, self.policy.model, self.policy.split_model
        ranks = forward.ranks
        model.train()
        # Dropout depends on the update, not on what ran before, so a resumed run repeats it. A large prime keeps the
        # sequences of neighbouring seeds apart; ranks drop out other rows.
        mx.random.seed(self.seed * 1_000_003 + self.updates + (ranks.rank << 40))
        of_batch = totals()
        prefix = forward.shared_prefix(split_model, micro_batches)
        prefilled = prefix.prefill(split_model) if prefix else None
        gradient, loss, tallies = None, mx.array(0.0), []
        for micro_batch in micro_batches:
            prompted = prefix.select(prefilled, micro_batch) if prefix and prefilled else None

            def part_of_loss(
                prompted: PrefilledPrompts | None, micro_batch: MicroBatch = micro_batch
            ) -> tuple[Any, ...]:
                scores = forward.scores(split_model, micro_batch, entropy_gradient=entropy_gradient, prefilled=prompted)
                part_loss, tally, *arrays = objective(micro_batch, scores, of_batch)
                return part_loss, scores, tally, arrays

            (part_loss, scores, tally, arrays), part_gradient, cotangents = self._backward(part_of_loss, prompted)
            if prefix and cotangents:  # dL/dK and dL/dV of its prompts
                prefix.accumulate(micro_batch, cotangents)
            # Summed in float32: weights that are copies in 16 bits have gradients in 16 bits.
            part_gradient = tree_map(lambda x: x.astype(mx.float32), part_gradient)
            gradient = part_gradient if gradient is None else tree_map(mx.add, gradient, part_gradient)
            loss = loss + part_loss
            tallies.append(tally)
            # Evaluate now, so that the activations of one micro-batch at a time are in memory. Only the sum `gradient`
            # is kept; the loss is already weighted by token, so no division by the number of micro-batches follows.
            mx.eval(gradient, loss, scores, tally)
            after_backward(micro_batch, scores, *arrays)
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
            return metrics | self._apply(gradient, loss)
        except NotFiniteError as found:
            own = token_numbers(micro_batches, forward.logps_without_gradient(split_model, micro_batches))
            found.tokens = merged(ranks, own)
            raise

    def _backward(
        self, part_of_loss: Callable[[PrefilledPrompts | None], tuple[Any, ...]], prompted: PrefilledPrompts | None
    ) -> tuple[Any, Any, PrefilledPrompts | None]:
        model = self.policy.model
        parameters = model.trainable_parameters()

        def of_arrays(parameters: Any, keys: list[mx.array], values: list[mx.array]) -> Any:
            model.update(parameters)
            return part_of_loss(PrefilledPrompts(keys, values))

        try:
            with gradient_checkpointing(model, self.recompute):
                if prompted is None:
                    return *nn.value_and_grad(model, part_of_loss)(None), None
                # mx's, not nn's: nn.value_and_grad differentiates by parameters only; here the prompts are inputs too.
                value_and_grad = mx.value_and_grad(of_arrays, argnums=[0, 1, 2])
                value, (gradient, *cotangents) = value_and_grad(parameters, *prompted)
                return value, gradient, PrefilledPrompts(*cotangents)
        except ValueError as error:
            if "vjp" not in str(error).casefold():
                raise
            what = f"An operation of this model has no gradient on this device ({error})"
            raise UserError("model", f"{what}, so it cannot be trained here.") from error
        finally:
            model.update(parameters)  # differentiation leaves its tracers in the model

    def _apply(self, gradient: Any, loss: mx.array) -> dict[str, float]:
        clipped, norm_array = optimizers.clip_by_norm(gradient, self.max_grad_norm)
        # One NaN or infinity anywhere makes the norm so. Checked before the update, which would destroy the weights.
        norm, loss_value = float(norm_array), float(loss)
        if not (math.isfinite(norm) and math.isfinite(loss_value)):
            is_loss = not math.isfinite(loss_value)  # then the gradient is not either, as a rule: the loss is the cause
            found = NotFiniteError(*(("loss", f"{loss_value:g}") if is_loss else ("gradient", f"a norm of {norm:g}")))
            found.update, found.gradients = self.updates + 1, gradient_norms(gradient)
            raise found
        rate = self.learning_rate(self.updates) if self.learning_rate else math.nan
        self.is_whole = False
        self.policy.set_parameters(self._apply_gradients(clipped, self.policy.parameters(), mx.array(rate)))
        # Or the update would stay a graph that holds the old weights and the whole gradient.
        mx.eval(self.policy.arrays(), self.optimizer.state)
        self.updates += 1
        self.is_whole = True
        rate = rate if self.learning_rate else optimizers.rate_of(self.optimizer)
        was_clipped = {"grad_clipped": float(norm > self.max_grad_norm)} if self.max_grad_norm else {}
        return {"loss": loss_value, "grad_norm": norm, "learning_rate": rate, **was_clipped}


def optimizer_of(config: Config, own: OwnUpdates = SETTINGS_DECIDE) -> Optimizer:
    """The program's optimizer, or the settings' one. Raises UserError if the program's is missing."""
    if own.make is not None:
        return own.make(config.learning_rate)
    if config.optimizer == OWN:
        own_updates.require_no_program(config)
    return optimizers.optimizer(
        config.optimizer,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        bits=int(config.optimizer_bits),
    )


def learning_rate_of(config: Config, steps: int, own: OwnUpdates = SETTINGS_DECIDE) -> LearningRate | None:
    """Learning rate of every update of `steps` steps; None if the optimizer sets it."""
    if own.keeps_rate:
        return None
    if own.rate is not None:
        return own.rate
    if config.lr_schedule == OWN:
        own_updates.require_no_program(config)
    return learning_rates(config, steps)
