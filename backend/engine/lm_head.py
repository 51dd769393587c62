"""Log-probabilities and entropies of the output layer, a chunk of tokens at a time: at most `chunk` rows of the
vocabulary exist at once (as Cut Cross-Entropy, arXiv:2411.09009). For z = W h / temperature and p = softmax(z):

    logp = z[target] − log Σ exp z          ∂ logp / ∂z = onehot(target) − p
    entropy = −Σ p log p                    ∂ entropy / ∂z = −p (log p + entropy)

The divergence from a teacher's softmax q is the generalised JSD of arXiv:2306.13649, m = (1 − β) p + β q:

    β = 0: KL(q ‖ p)                        ∂ / ∂z = p − q
    β = 1: KL(p ‖ q)                        ∂ / ∂z = p (log p/q − KL(p ‖ q))
    else: β KL(q ‖ m) + (1 − β) KL(p ‖ m)   ∂ / ∂z = (1 − β) p (log p/m − KL(p ‖ m))

Penalties change logits before the temperature; their slopes multiply the gradient.
Frozen head (LoRA): ∂ logp_n / ∂ h_n, [H], is computed in the forward pass, so logits are computed once. Trained head:
dW needs the cotangents, so the backward pass recomputes the logits.

Letters: N tokens, n of them a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from backend.engine.cpu import exp_nonpositive, row_sums
from backend.engine.graph import evaluate_after
from backend.engine.penalties import CompletionHistory, SeenTokens, in_unpenalised, penalised, penalised_with_autodiff

Exp = Callable[[mx.array], mx.array]
Project = Callable[[mx.array], mx.array]  # hidden states [n, H] → logits [n, V]
SMALLEST = 2.0**-126  # normal float32


class TokenScores(NamedTuple):
    """log π of each target, each distribution's entropy and divergence from a teacher's (if any), [N] float32 nats."""

    logp_N: mx.array
    entropy_N: mx.array
    divergence_N: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Those that there are."""
        return tuple(x for x in self if x is not None)


class Teacher(NamedTuple):
    """Whose distributions are matched: its hidden states of the same tokens, [N, H of the teacher], and the function
    that makes logits of them. `alone`: only the divergence is learned from, and log π has no gradient."""

    project: Project
    hidden_NH: mx.array
    beta: float
    alone: bool


def token_logps(
    project: Project,
    head: nn.Module | None,
    hidden_NH: mx.array,
    target_N: mx.array,
    *,
    temperature: float,
    chunk: int | None = None,
    with_gradient: bool = True,
    entropy_gradient: bool = False,
    history: CompletionHistory | None = None,
    teacher: Teacher | None = None,
    is_product: bool = False,
) -> TokenScores:
    """log π(target), entropy and divergence under softmax(project(hidden) / temperature), in float32. `head`:
    `project`'s module, None where hidden states are logits. `chunk`: tokens at a time (None: all). `history`: what
    precedes each position, if logits are penalised. `is_product`: logits are hidden states times the head's weight."""
    targets = _Targets(target_N, temperature, chunk or hidden_NH.shape[0], history, teacher)
    # In 16 bits W[target] − Σ p W would leave little of a gradient where p is close to one-hot.
    by_vocabulary = is_product and hidden_NH.dtype == mx.float32 and not (history or teacher or entropy_gradient)
    if head is not None and with_gradient:
        if tree_flatten(head.trainable_parameters()):
            return _trained_head(project, head, hidden_NH, targets, entropy_gradient)
        return _frozen_head(project, head if by_vocabulary else None, hidden_NH, targets, entropy_gradient)
    if by_vocabulary:
        return TokenScores(*_over_vocabulary(head, hidden_NH, targets, False)[:2])
    chunks: list[TokenScores] = []
    for span in targets.spans:
        if not with_gradient:
            chunks.append(_softmax(project, hidden_NH[span], targets, span).scores(target_N[span]))
            mx.eval(chunks[-1])  # mlx would allocate several chunks ahead of the device
            continue
        # [N, V] is in the graph already, as the model's output; autodiff needs mlx's exp, for ours has no gradient.
        logits_NV = project(hidden_NH[span]).astype(mx.float32)
        if history is not None:
            logits_NV = penalised_with_autodiff(logits_NV, history.before(span), history.penalties)
        softmax = _normalised(targets.scaled(logits_NV), mx.exp)
        scores = softmax.against(targets, span, hidden_NH).scores(target_N[span])
        chunks.append(scores if entropy_gradient else scores._replace(entropy_N=mx.stop_gradient(scores.entropy_N)))
    return TokenScores(*(mx.concatenate(list(c)) for c in zip(*(scores.arrays for scores in chunks), strict=True)))


class _Targets(NamedTuple):
    target_N: mx.array
    temperature: float
    size: int
    history: CompletionHistory | None
    teacher: Teacher | None

    @property
    def spans(self) -> Iterator[slice]:
        return (slice(start, start + self.size) for start in range(0, self.target_N.shape[0], self.size))

    def learned(self, entropy_gradient: bool) -> list[bool]:
        """Which of the scores have a gradient."""
        if self.teacher is None:
            return [True, entropy_gradient]
        return [not self.teacher.alone, entropy_gradient, True]

    def scaled(self, logits_NV: mx.array) -> mx.array:
        return logits_NV if self.temperature == 1 else logits_NV * (1 / self.temperature)


class _Softmax(NamedTuple):
    """A chunk's softmax: `centred` = z − max z, `exp` = exp(centred), `total` = Σ exp; p = exp / total."""

    centred_NV: mx.array
    exp_NV: mx.array
    total_N1: mx.array
    seen: SeenTokens | None = None
    slope_NL: mx.array | None = None  # of the penalties
    divergence_N: mx.array | None = None  # from a teacher's softmax
    divergence_grad_NV: mx.array | None = None  # in the scaled logits

    @property
    def logp_NV(self) -> mx.array:
        # never log(p): where exp has underflowed to 0, 0 · log p must be 0 and not NaN
        return self.centred_NV - mx.log(self.total_N1)

    def against(self, targets: _Targets, span: slice, after: mx.array) -> _Softmax:
        """With its divergence from the teacher's softmax of the same tokens, which is computed after `after`."""
        if (teacher := targets.teacher) is None:
            return self
        hidden_NH = evaluate_after(teacher.hidden_NH[span], [mx.stop_gradient(after)])
        logits_NV, width = teacher.project(hidden_NH).astype(mx.float32), self.centred_NV.shape[-1]
        if targets.history is not None:
            logits_NV, _ = penalised(logits_NV, targets.history.before(span), targets.history.penalties)
        divergence_N, grad_NV = self._divergence(_normalised(targets.scaled(logits_NV[:, :width])), teacher.beta)
        return self._replace(divergence_N=divergence_N, divergence_grad_NV=grad_NV)

    def _divergence(self, teacher: _Softmax, beta: float) -> tuple[mx.array, mx.array]:
        """(divergence [n], its gradient in the scaled logits [n, V])."""
        # Embeddings of one tokenizer may be padded to different sizes: over the ids that both have.
        width = teacher.centred_NV.shape[-1]
        padding = self.centred_NV.shape[-1] - width
        centred_NV, exp_NV = self.centred_NV[:, :width], self.exp_NV[:, :width]
        student = _Softmax(centred_NV, exp_NV, row_sums(exp_NV)) if padding else self
        p_NV, q_NV = student.exp_NV / student.total_N1, teacher.exp_NV / teacher.total_N1
        if beta == 0:
            value_N, grad_NV = _dot(q_NV, teacher.logp_NV - student.logp_NV), p_NV - q_NV
        else:
            mixture_NV = mx.log(mx.maximum((1 - beta) * p_NV + beta * q_NV, SMALLEST)) if beta < 1 else teacher.logp_NV
            gap_NV = student.logp_NV - mixture_NV
            value_N = _dot(p_NV, gap_NV)
            grad_NV = p_NV * (gap_NV - value_N[:, None])
            if beta < 1:
                value_N = beta * _dot(q_NV, teacher.logp_NV - mixture_NV) + (1 - beta) * value_N
                grad_NV = (1 - beta) * grad_NV
        return value_N, mx.pad(grad_NV, [(0, 0), (0, padding)]) if padding else grad_NV

    def scores(self, target_N: mx.array) -> TokenScores:
        log_total_N = mx.log(self.total_N1[:, 0])
        logp_N = mx.take_along_axis(self.centred_NV, target_N[:, None], axis=-1)[:, 0] - log_total_N
        # log p = centred − log total, so entropy = log total − Σ p · centred.
        entropy_N = log_total_N - _dot(self.exp_NV, self.centred_NV) / self.total_N1[:, 0]
        return TokenScores(logp_N, entropy_N, self.divergence_N)

    def logp_vjp(self, target_N: mx.array, cotangent_N: mx.array | float) -> mx.array:
        """cotangent · (onehot(target) − p): [n, V], the gradient in the scaled logits."""
        cotangent_N1 = mx.broadcast_to(cotangent_N, target_N.shape)[:, None]
        # Normalisation, sign and cotangent are one factor [n, 1], so the gradient takes a single pass over [n, V].
        minus_p_NV = self.exp_NV * (-cotangent_N1 / self.total_N1)
        # The one-hot term is added in one column instead of as a second array [n, V].
        at_target_N1 = mx.take_along_axis(minus_p_NV, target_N[:, None], axis=-1)
        return mx.put_along_axis(minus_p_NV, target_N[:, None], at_target_N1 + cotangent_N1, axis=-1)

    def entropy_vjp(self, entropy_N: mx.array, cotangent_N: mx.array | float) -> mx.array:
        """cotangent · −p (log p + entropy): [n, V]."""
        cotangent_N1 = mx.broadcast_to(cotangent_N, entropy_N.shape)[:, None]
        logp_plus_entropy_NV = self.centred_NV + (entropy_N[:, None] - mx.log(self.total_N1))
        return logp_plus_entropy_NV * self.exp_NV * (-cotangent_N1 / self.total_N1)

    def vjps(
        self, target_N: mx.array, entropy_N: mx.array, cotangents: Sequence[mx.array | float | None]
    ) -> list[mx.array]:
        """The gradient [n, V] in the scaled logits of each score that has a cotangent."""
        divergence_grad_NV: Any = self.divergence_grad_NV  # set where the divergence has a cotangent
        functions = (
            lambda cotangent_N: self.logp_vjp(target_N, cotangent_N),
            lambda cotangent_N: self.entropy_vjp(entropy_N, cotangent_N),
            lambda cotangent_N: mx.broadcast_to(cotangent_N, target_N.shape)[:, None] * divergence_grad_NV,
        )
        # without a teacher two scores
        return [vjp(c) for vjp, c in zip(functions, cotangents, strict=False) if c is not None]

    def in_logits(self, gradient_NV: mx.array) -> mx.array:
        if self.seen is None or self.slope_NL is None:
            return gradient_NV
        return in_unpenalised(gradient_NV, self.seen, self.slope_NL)


def _softmax(project: Project, hidden_NH: mx.array, targets: _Targets, span: slice) -> _Softmax:
    logits_NV = project(hidden_NH).astype(mx.float32)  # 16-bit logits alone would be wrong by 0.02 nats a token
    if targets.history is None:
        return _normalised(targets.scaled(logits_NV)).against(targets, span, hidden_NH)
    seen = targets.history.before(span)
    logits_NV, slope_NL = penalised(logits_NV, seen, targets.history.penalties)
    softmax = _normalised(targets.scaled(logits_NV))._replace(seen=seen, slope_NL=slope_NL)
    return softmax.against(targets, span, hidden_NH)


def _dot(a_NV: mx.array, b_NV: mx.array) -> mx.array:
    # As a product of rows and columns the sum needs no second array [n, V].
    return (a_NV[:, None, :] @ b_NV[:, :, None])[:, 0, 0]


def _normalised(scaled_NV: mx.array, exp: Exp = exp_nonpositive) -> _Softmax:
    # exp of a centred logit is at most 1, and total at least 1, so neither exp nor log overflows. The softmax does not
    # change with the shift, so the gradient through the maximum is exactly 0 and need not be computed.
    centred_NV = scaled_NV - mx.stop_gradient(scaled_NV.max(axis=-1, keepdims=True))
    # The expensive pass. Softmax, log-probability, entropy and both gradients come from this one array.
    exp_NV = exp(centred_NV)
    return _Softmax(centred_NV, exp_NV, row_sums(exp_NV))


def _frozen_head(
    project: Project, product: nn.Module | None, hidden_NH: mx.array, targets: _Targets, entropy_gradient: bool
) -> TokenScores:
    learned = targets.learned(entropy_gradient)
    count = len(learned)

    @mx.custom_function
    def score(hidden_NH: mx.array) -> tuple[mx.array, ...]:
        if product is not None:
            return _over_vocabulary(product, hidden_NH, targets, True)
        outputs: list[tuple[mx.array, ...]] = []
        for span in targets.spans:
            x = evaluate_after(hidden_NH[span], list(outputs[-1]) if outputs else [])  # one chunk's [n, V] at a time
            softmax = _softmax(project, x, targets, span)
            scores = softmax.scores(targets.target_N[span])
            factors = [1 / targets.temperature if learns else None for learns in learned]
            grads_NV = map(softmax.in_logits, softmax.vjps(targets.target_N[span], scores.entropy_N, factors))
            outputs.append((*scores.arrays, *(_head_vjp(project, [x], grad_NV)[0] for grad_NV in grads_NV)))
        return tuple(mx.concatenate(list(column)) for column in zip(*outputs, strict=True))

    @score.vjp
    def score_vjp(_primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        # outputs: the scores, then ∂ score / ∂ h of those that are learned from. The cotangents of those gradients are
        # not read, because nothing differentiates twice; nor are cotangents of scores without a gradient.
        learning = compress(cotangents, learned)
        scaled = [cotangent_N[:, None] * grad for cotangent_N, grad in zip(learning, outputs[count:], strict=True)]
        return sum(scaled[1:], scaled[0]).astype(hidden_NH.dtype)

    outputs: Any = score(hidden_NH)
    return TokenScores(*outputs[:count])


def _over_vocabulary(head: Any, hidden_NH: mx.array, targets: _Targets, differentiate: bool) -> tuple[mx.array, ...]:
    """log π, entropy, and to `differentiate` ∂ log π / ∂h = (W[target] − Σ p W) / temperature, for logits W h: a slice
    of the vocabulary at a time, as attention with keys and values W (arXiv:2112.05682). A BLAS packs W once."""
    weight_VH, N = head.weight, len(hidden_NH)
    size = max(1, targets.size * len(weight_VH) // N)  # as many logits as in `targets.size` tokens
    x_NH = targets.scaled(hidden_NH)
    at_target_NH = weight_VH[targets.target_N]
    peak_N1, total_N1, dot_N1, sum_NH = (
        mx.full((N, 1), -mx.inf),
        *(mx.zeros((N, n)) for n in (1, 1, hidden_NH.shape[-1])),
    )
    for start in range(0, len(weight_VH), size):
        weight_vH = weight_VH[start : start + size]
        logits_Nv = evaluate_after(x_NH, [total_N1, dot_N1, sum_NH]) @ weight_vH.T
        highest_N1 = mx.maximum(peak_N1, logits_Nv.max(axis=-1, keepdims=True))
        exp_Nv, rescale_N1 = exp_nonpositive(logits_Nv - highest_N1), mx.exp(peak_N1 - highest_N1)
        total_N1 = total_N1 * rescale_N1 + row_sums(exp_Nv)
        dot_N1 = dot_N1 * rescale_N1 + _dot(exp_Nv, logits_Nv)[:, None]
        if differentiate:
            sum_NH = mx.addmm(sum_NH * rescale_N1, exp_Nv, weight_vH)
        peak_N1 = highest_N1
    log_total_N, peak_N = mx.log(total_N1)[:, 0], peak_N1[:, 0]
    logp_N = _dot(x_NH, at_target_NH) - peak_N - log_total_N
    entropy_N = log_total_N - ((dot_N1 / total_N1)[:, 0] - peak_N)
    return logp_N, entropy_N, targets.scaled(at_target_NH - sum_NH / total_N1)


def _trained_head(
    project: Project, head: nn.Module, hidden_NH: mx.array, targets: _Targets, entropy_gradient: bool
) -> TokenScores:
    names, weights = zip(*tree_flatten(head.trainable_parameters()), strict=True)

    def project_with(x: mx.array, *weights: mx.array) -> mx.array:
        # A custom function gives no gradient to what it closes over: the weights must be its arguments.
        own = head.trainable_parameters()
        head.update(tree_unflatten(list(zip(names, weights, strict=True))))
        try:
            return project(x)
        finally:
            head.update(own)

    @mx.custom_function
    def score(hidden_NH: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        outputs: list[tuple[mx.array, ...]] = []
        for span in targets.spans:
            x = evaluate_after(hidden_NH[span], list(outputs[-1]) if outputs else [])
            softmax = _softmax(lambda x: project_with(x, *weights), x, targets, span)
            outputs.append(softmax.scores(targets.target_N[span]).arrays)
        return tuple(mx.concatenate(list(column)) for column in zip(*outputs, strict=True))

    @score.vjp
    def score_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        hidden_NH, *weights = primals
        d_hidden: list[mx.array] = []
        d_weights: list[mx.array] = []
        for span in targets.spans:
            x = evaluate_after(hidden_NH[span], d_hidden[-1:] + d_weights)
            # Recomputed: keeping it from the forward pass would keep [N, V] float32.
            softmax = _softmax(lambda x: project_with(x, *weights), x, targets, span)
            # d scaled logits / d logits = 1 / temperature, applied to the cotangents: [n] instead of [n, V].
            learning = zip(cotangents, targets.learned(entropy_gradient), strict=True)
            factors = [cotangent[span] / targets.temperature if learns else None for cotangent, learns in learning]
            first, *others = softmax.vjps(targets.target_N[span], outputs[1][span], factors)
            grad_NV = sum(others, first)
            dx, *dw = _head_vjp(project_with, [x, *weights], softmax.in_logits(grad_NV))
            d_hidden.append(dx)
            d_weights = [a + b for a, b in zip(d_weights, dw, strict=True)] if d_weights else dw
        return (mx.concatenate(d_hidden), *d_weights)

    return TokenScores(*score(hidden_NH, *weights))  # pyright: ignore[reportGeneralTypeIssues]


def _head_vjp(project: Callable[..., mx.array], inputs: list[mx.array], grad_NV: mx.array) -> list[mx.array]:
    dtype = project(*inputs).dtype  # costs nothing: arrays are lazy, and this one is never evaluated
    # mx.vjp builds the forward pass once more, but the gradients of a product need its factors only, so these logits
    # are not evaluated either.
    return mx.vjp(project, inputs, [grad_NV.astype(dtype)])[1]
