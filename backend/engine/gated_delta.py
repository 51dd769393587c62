"""The gated delta rule in chunks (Gated DeltaNet, arXiv:2412.06464; with a decay per channel Kimi Linear,
arXiv:2510.26692). Exact; the backward pass recomputes spans of chunks instead of keeping the states of all tokens.

    S_t = S_{t−1} Diag(g_t) + u_t k_tᵀ      u_t = β_t (v_t − S_{t−1} Diag(g_t) k_t)      o_t = S_t q_t

The corrections U [C, e] of a chunk solve a unit lower triangular system (WY representation, arXiv:2406.06484, section
3.2). Γ_ij = g_{j+1} ⋯ g_i is the decay between two tokens, Γ_i that from the chunk's start:

    (I + A) U = β ∘ (V − (Γ ∘ K) Sᵀ)        A_ij = β_i (Γ_ij ∘ k_i)ᵀ k_j   for j < i
    O = (Γ ∘ Q) Sᵀ + P U                    P_ij = (Γ_ij ∘ q_i)ᵀ k_j       for j ≤ i
    S' = S Diag(Γ_C) + Uᵀ (Γ_Cj ∘ K)

(I + A)⁻¹ and P are built by halves: with L₁ and L₂ the halves' own blocks and X the block between them, the inverse of
[L₁ 0; X L₂] is [L₁⁻¹ 0; −L₂⁻¹ X L₁⁻¹ L₂⁻¹]. So decays are products of two factors ≤ 1 (Γ_i / Γ_j would overflow), and
no power series of A cancels.

Letters: B rows, T tokens, H value heads, J key heads (each serves R = H / J), d and e sizes of keys and values; N
chunks of C tokens. Decays: [B, T, H, 1], or [B, T, H, d] by key channel.
"""

from typing import Any

import mlx.core as mx

from backend.engine.chunk_sizes import gated_delta_span
from backend.engine.cpu import exp_nonpositive
from backend.engine.device import on_gpu
from backend.engine.graph import evaluate_after

CHUNK = 64  # tokens; work inside a chunk grows with it, sequential steps fall


def gated_delta_rule(
    q_BTJd: mx.array,
    k_BTJd: mx.array,
    v_BTHe: mx.array,
    log_decay: mx.array,
    beta_BTH: mx.array,
    state_BHed: mx.array | None = None,
    mask_BT: mx.array | None = None,
    *,
    chunk: int = CHUNK,
    span: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Outputs [B, T, H, e] in the queries' type, and the final state [B, H, e, d] in float32. `log_decay`: log g ≤ 0,
    [B, T, H] or [B, T, H, d]. A token with false `mask_BT` leaves the state alone. Differentiable in all arrays but the
    mask. `chunk`: a power of two; `span`: tokens recomputed together (None: by `gated_delta_span`)."""
    (B, T, H, e), d = v_BTHe.shape, k_BTJd.shape[-1]
    log_decay = log_decay.astype(mx.float32).reshape(B, T, H, -1)
    if mask_BT is not None:
        # No decay and no correction: the token's step is the identity.
        log_decay = mx.where(mask_BT[..., None, None], log_decay, 0.0)
        beta_BTH = mx.where(mask_BT[..., None], beta_BTH, 0.0)
    state = mx.zeros((B, H, e, d)) if state_BHed is None else state_BHed.astype(mx.float32)
    C = min(chunk, 1 << (T - 1).bit_length())
    length = span or gated_delta_span(B * H, d + e, C, gpu=on_gpu())
    spans = [slice(start, min(start + length, T)) for start in range(0, T, length)]

    @mx.custom_function
    def rule(*inputs: mx.array) -> tuple[mx.array, ...]:
        *tokens, state = inputs
        outs, borders = [], []
        for part in spans:
            borders.append(state)
            # mlx is lazy: without an order between spans, it would prepare the chunks of all of them at once.
            arrays = [evaluate_after(x[:, part], [state]) for x in tokens]
            out, state = _span(C, *arrays, state)
            outs.append(out)
        return mx.concatenate(outs, axis=1), state, *borders

    @rule.vjp
    def rule_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        *tokens, _ = primals
        # The border states are results for this function alone: no caller sees them, and they have no cotangents.
        d_out, d_state, borders = cotangents[0], cotangents[1], outputs[2:]
        grads: list[list[mx.array]] = []
        for part, border in zip(reversed(spans), reversed(borders), strict=True):
            arrays = [evaluate_after(x[:, part], [d_state, *(grads[-1] if grads else [])]) for x in tokens]
            *d_tokens, d_state = mx.vjp(lambda *x: _span(C, *x), [*arrays, border], [d_out[:, part], d_state])[1]
            grads.append(d_tokens)
        return *(mx.concatenate(list(column[::-1]), axis=1) for column in zip(*grads, strict=True)), d_state

    out, state, *_ = rule(q_BTJd, k_BTJd, v_BTHe, log_decay, beta_BTH[..., None], state)  # pyright: ignore
    return out, state


def _span(
    C: int, q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state_BHed: mx.array
) -> tuple[mx.array, mx.array]:
    (B, T, H, e), J, out_type = v.shape, k.shape[2], q.dtype
    q, k, v, log_decay, beta = (_chunked(x, C, J) for x in (q, k, v, log_decay, beta))
    inverse, scores = _by_halves(beta * k, q, k, log_decay)
    from_start, to_end = _decay_through(log_decay), _decay_after(log_decay)
    # U = (I + A)⁻¹ βV − (I + A)⁻¹ βΓK Sᵀ: both products for all chunks, before any state is known.
    own, by_state = mx.split(inverse @ mx.concatenate([beta * v, beta * from_start * k], axis=-1), [e], axis=-1)
    state = state_BHed.reshape(1, B, J, H // J, e, -1)
    states: list[mx.array] = []
    corrections: list[mx.array] = []
    # mx.split, here and below: its gradient is one concatenation; indexing would scatter into zeros for each chunk.
    chunks = (mx.split(x, len(k), axis=0) for x in (own, by_state, to_end * k, from_start[..., -1:, :]))
    for own_n, by_state_n, k_to_end_n, total_n in zip(*chunks, strict=True):
        states.append(state)
        corrections.append(own_n - by_state_n @ state.swapaxes(-1, -2))
        state = state * total_n + corrections[-1].swapaxes(-1, -2) @ k_to_end_n
    out = (from_start * q) @ mx.concatenate(states).swapaxes(-1, -2) + scores @ mx.concatenate(corrections)
    out_BTHe = out.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, H, e)[:, :T]
    return out_BTHe.astype(out_type), state.reshape(B, H, e, -1)


def _chunked(x: mx.array, C: int, J: int) -> mx.array:
    B, T, heads, size = x.shape
    x = mx.pad(x.astype(mx.float32), [(0, 0), (0, -T % C), (0, 0), (0, 0)])
    return x.reshape(B, -1, C, J, heads // J, size).transpose(1, 0, 3, 4, 2, 5)


def _by_halves(beta_k: mx.array, q: mx.array, k: mx.array, log_decay: mx.array) -> tuple[mx.array, mx.array]:
    C, shape = k.shape[-2], beta_k.shape
    rows = mx.stack([beta_k, mx.broadcast_to(q, shape)])
    # A block of one token: the diagonals of I + A and of P.
    diagonal = mx.stack([mx.ones(shape[:-1]), mx.broadcast_to((q * k).sum(axis=-1), shape[:-1])])
    blocks, size = diagonal[..., None, None], 1
    while size < C:
        later, earlier_k = _halves(rows, size)[1], _halves(k, size)[0]
        earlier_decay, later_decay = _halves(log_decay, size)
        # The token's own decay counts in the later half, and not in the earlier: Γ_ij = g_{j+1} ⋯ g_i.
        from_middle, to_middle = _decay_through(later_decay), _decay_after(earlier_decay)
        of_k, of_q = mx.split(_decayed_products(later, earlier_k, from_middle, to_middle), 2)
        upper, lower = _pairs(blocks)
        across = mx.concatenate([-(lower[:1] @ of_k @ upper[:1]), of_q])
        top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        blocks = mx.concatenate([top, mx.concatenate([across, lower], axis=-1)], axis=-2)
        size *= 2
    inverse, scores = mx.split(blocks.squeeze(-3), 2)
    return inverse.squeeze(0), scores.squeeze(0)


def _decayed_products(rows: mx.array, k: mx.array, row_decay: mx.array, k_decay: mx.array) -> mx.array:
    if row_decay.shape[-1] == 1:
        # One decay for all channels comes out of the product: size numbers a token to scale instead of d.
        return (rows @ k.swapaxes(-1, -2)) * (row_decay * k_decay.swapaxes(-1, -2))
    return (rows * row_decay) @ (k * k_decay).swapaxes(-1, -2)


def _decay_through(log_decay: mx.array) -> mx.array:
    return _exp(mx.cumsum(log_decay, axis=-2))  # pyright: ignore[reportReturnType]


def _decay_after(log_decay: mx.array) -> mx.array:
    return _exp(mx.cumsum(log_decay, axis=-2, reverse=True, inclusive=False))  # pyright: ignore[reportReturnType]


def _halves(x: mx.array, size: int) -> tuple[mx.array, mx.array]:
    return _pairs(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]))


def _pairs(blocks: mx.array) -> tuple[mx.array, mx.array]:
    first, second = mx.split(blocks.reshape(*blocks.shape[:-3], -1, 2, *blocks.shape[-2:]), 2, axis=-3)
    return first.squeeze(-3), second.squeeze(-3)


@mx.custom_function
def _exp(x: mx.array) -> mx.array:
    return exp_nonpositive(x)


@_exp.vjp
def _exp_vjp(_x: mx.array, d_out: mx.array, out: mx.array) -> mx.array:
    return d_out * out
