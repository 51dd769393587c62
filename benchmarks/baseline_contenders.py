"""Baselines: mlx-lm's batched generation, the loss as the paper writes it, and a decoding step's matrix products
alone."""

from pathlib import Path
from typing import Any

from benchmarks.contender import RANK, RATE, SCALE, Contender, prompt_ids
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Case


def load_with_lora(folder: Path, layers: int) -> tuple[Any, Any]:
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, tokenizer = load(str(folder))[:2]
    model.freeze()
    linear_to_lora_layers(model, layers, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    model.eval()
    return model, tokenizer


def batch_generate(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """mlx-lm's `batch_generate` with every row in one batch, adapters on."""
    from mlx_lm import batch_generate as generate
    from mlx_lm.sample_utils import make_sampler

    model, tokenizer = load_with_lora(folder, case.layers)
    sampler = make_sampler(temp=case.temperature, top_p=case.top_p)
    for number in stopwatch.steps():
        prompts = [ids for ids in prompt_ids(case, number) for _ in range(case.group_size)]
        response = generate(
            model,
            tokenizer,
            prompts,
            max_tokens=case.completion,
            sampler=sampler,
            return_token_ids=True,
            completion_batch_size=case.rows,
            prefill_batch_size=case.rows,
        )
        stopwatch.lap("rollout")
        ids = response.token_ids
        assert ids is not None
        stopwatch.done(sum(min(len(row) + 1, case.completion) for row in ids))  # mlx-lm leaves out the end token


def log_softmax(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """One GRPO update by autodiff of the log-softmax at all positions over the whole vocabulary."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

    from benchmarks.our_contenders import random_groups

    model, _ = load_with_lora(folder, case.layers)
    optimizer = optim.Adam(learning_rate=RATE)

    def loss(tokens_BL: mx.array, advantage_B: mx.array) -> mx.array:
        logp_BLV = nn.log_softmax(model(tokens_BL[:, :-1]) / case.temperature, axis=-1)
        logp_BL = mx.take_along_axis(logp_BLV, tokens_BL[:, 1:, None], axis=-1)[..., 0]
        logp_BT = logp_BL[:, case.prompt - 1 :]
        ratio_BT = mx.exp(logp_BT - mx.stop_gradient(logp_BT))
        return -(ratio_BT * advantage_B[:, None]).mean(axis=1).mean()

    gradient = nn.value_and_grad(model, loss)
    for number in stopwatch.steps():
        groups = random_groups(case, number)
        stopwatch.restart()
        rows = [
            (group.problem.tokens + completion.tokens, completion.advantage)
            for group in groups
            for completion in group.completions
        ]
        _, grads = gradient(mx.array([ids for ids, _ in rows]), mx.array([value for _, value in rows]))
        optimizer.update(model, grads)
        del grads
        mx.eval(model.trainable_parameters(), optimizer.state)
        stopwatch.lap("train")
        stopwatch.done(case.rows * case.completion)


def products(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """The matrix products of decoding without adapters, attention, norms and sampling: a lower bound."""
    import mlx.core as mx
    from mlx_lm import load

    model = load(str(folder))[0]
    block = model.layers[0]  # pyright: ignore
    layers = [*block.self_attn.children().values(), *block.mlp.children().values()]
    weights = [layer.weight for layer in layers if hasattr(layer, "weight") and layer.weight.ndim == 2] * case.layers
    weights.append(model.model.embed_tokens.weight)  # pyright: ignore
    inputs = [mx.random.normal((case.rows, weight.shape[1])) for weight in weights]
    mx.eval(inputs)
    decode_steps = case.completion - 1
    for _ in stopwatch.steps():
        for _ in range(decode_steps):
            mx.eval([x @ weight.T for x, weight in zip(inputs, weights, strict=True)])
        stopwatch.lap("rollout")
        stopwatch.done(case.rows * decode_steps, decode_s=stopwatch.phases["rollout"]["s"] / decode_steps)


CONTENDERS: dict[str, Contender] = {
    "mlx-lm batch_generate": batch_generate,
    "plain log-softmax": log_softmax,
    "matrix products alone": products,
}
