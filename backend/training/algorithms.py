"""The algorithm of each `train_mode`, and the learner that makes its updates."""

from collections.abc import Callable

from backend.config.config import Config
from backend.engine.chunk_sizes import MICRO_BATCH_TOKENS, head_chunk
from backend.engine.device import on_gpu
from backend.engine.embedding_noise import EmbeddingNoise, input_embedding
from backend.engine.penalties import NO_PENALTIES, Penalties
from backend.models.policy import Policy
from backend.training.distill import Distill
from backend.training.grpo import Grpo
from backend.training.learner import Algorithm, Learner, learning_rate_of, optimizer_of
from backend.training.optimizers import SETTINGS_DECIDE, OwnUpdates
from backend.training.policy_forward import PolicyForward
from backend.training.sft import Sft

ALGORITHMS: dict[str, Callable[[Policy, Config], Algorithm]] = {"grpo": Grpo, "distill": Distill, "sft": Sft}


def build_learner(
    policy: Policy,
    config: Config,
    steps: int,
    *,
    algorithm: Algorithm | None = None,
    micro_batch_tokens: int | None = None,
    chunk: int | None = None,
    recompute: bool | None = None,
    own: OwnUpdates = SETTINGS_DECIDE,
) -> Learner:
    """The learner of a run of `steps` steps, with the algorithm of its mode unless one is given. `micro_batch_tokens`,
    `chunk` (completion tokens whose logits are in memory at once) and `recompute` trade memory for time. `own`: the
    program's optimizer and schedule."""
    algorithm = algorithm or ALGORITHMS[config.train_mode](policy, config)
    seq_step_size = config.seq_step_size if config.efficient_long_context else None
    noise = None
    if config.neftune_noise_alpha:
        noise = EmbeddingNoise(input_embedding(policy.model), config.neftune_noise_alpha, config.seed)
    return Learner(
        policy,
        algorithm,
        optimizer_of(config, own),
        learning_rate_of(config, steps, own),
        PolicyForward(
            config.temperature if algorithm.of_sampler else 1.0,
            chunk or seq_step_size or head_chunk(policy.split_model.vocab_size, on_gpu()),
            micro_batch_tokens or MICRO_BATCH_TOKENS[on_gpu()],
            has_dropout=config.dropout > 0,
            penalties=Penalties(*config.penalties) if algorithm.of_sampler else NO_PENALTIES,
            whole_rows=not algorithm.of_sampler,
            noise=noise,
            noisy_model=policy.split_model,
        ),
        own=own,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        recompute=config.grad_checkpoint if recompute is None else recompute,
    )
