"""What a model that is divided among ranks must compute as one machine does."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from backend.config.config import parse
from backend.distributed.channel import WorkerChannel, open_channel
from backend.distributed.collectives import MlxCollectives, init_collectives
from backend.distributed.leader import load_leader_context
from backend.distributed.worker import work
from backend.models.policy import Policy
from backend.models.sharded_policy import load_sharded_policy
from backend.runs.run_folder import RunFolder
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.control import Stopped
from backend.trainer.run_process import train
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.types import Problem
from tests.support import small_run

TOKENS = mx.array([[5, 6, 70, 8, 33, 100, 5, 6], [7, 3, 2, 8, 33, 100, 61, 25]])
PROBLEMS = [Problem(0, "", [], tokens, "") for tokens in ([5, 6, 70], [8, 33, 100, 5, 6, 2, 9], [7])]
# SGD: Adam divides by the gradient's size, so that rounding of a gradient that is 0 would show in full
SETTINGS: dict[str, Any] = {"data": "none", "num_layers": -1, "rank": 4, "scale": 2.0, "beta": 0.1}
SETTINGS |= {"optimizer": "sgd", "learning_rate": 0.1, "num_iterations": 2, "max_grad_norm": 0.5}
SETTINGS |= {"batch_size": 3, "group_size": 4}
DISTURBED = "tokens under a disturbance"  # what only ranks find


def shake(policy: Policy) -> None:
    """Adapters that add something: fresh ones are zero, and would hide any mistake."""
    noise = {
        name: 0.05 * mx.random.normal(array.shape, key=mx.random.key(i))
        for i, (name, array) in enumerate(sorted(policy.trainable().items()))
    }
    policy.set_parameters(tree_map_with_path(lambda name, x: x + noise[name], policy.parameters()))
    mx.eval(policy.arrays())


def forward_and_gradient(policy: Policy) -> dict[str, np.ndarray]:
    """Logits of the policy and its reference, and the gradient in every adapter, by name."""

    def loss(model: nn.Module, tokens: mx.array) -> mx.array:
        logits = model(tokens[:, :-1]).astype(mx.float32)  # pyright: ignore
        return nn.losses.cross_entropy(logits, tokens[:, 1:]).mean()

    assert policy.reference_model is not None
    logits, reference = policy.model(TOKENS), policy.reference_model(TOKENS)  # pyright: ignore
    mx.eval(logits, reference)
    _, gradient = nn.value_and_grad(policy.model, loss)(policy.model, TOKENS)
    arrays = dict(tree_flatten(policy.gather_gradient(gradient)))
    return {"logits": np.array(logits), "reference": np.array(reference)} | {
        f"gradient of {name}": np.array(array) for name, array in arrays.items()
    }


def step(policy: Policy, raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """A rollout and its updates: tokens, log-probabilities, metrics and the weights after it."""
    groups = Sampler(policy, 8).sample(PROBLEMS, 4, Sampling(0.9), seed=3, first_number=0)
    completions = [completion for group in groups for completion in group.completions]
    for completion, advantage in zip(completions, np.linspace(-1, 1, len(completions)).tolist(), strict=True):
        completion.advantage = advantage
    metrics = build_learner(policy, parse(raw), 1).learn(pack(groups, pad_id=policy.pad_id))
    return {
        "tokens": np.array([token for completion in completions for token in completion.tokens]),
        "sampled logps": np.array([logp for completion in completions for logp in completion.logps], np.float32),
        "metrics": np.array([metrics[name] for name in sorted(metrics)], np.float32),
    } | {f"weight of {name}": np.array(array) for name, array in policy.trainable().items()}


def trial(policy: Policy, raw: dict[str, Any], *, steps: bool) -> dict[str, np.ndarray]:
    shake(policy)
    found = forward_and_gradient(policy)
    return found | step(policy, raw) if steps else found


def of_ranks(folder: Path, cases: dict[str, dict[str, Any]], ranks: int = 2) -> list[dict[str, dict[str, np.ndarray]]]:
    """What each rank found in each case (name → raw settings); cases whose name ends in "step" make one."""
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(ranks)]))
    program = [sys.executable, "-m", "tests.support.sharded_trial", str(folder)]
    # Uncompiled: ranks of one machine would compile the same kernels into one folder.
    ours = {"MLX_HOSTFILE": str(folder / "hosts.json"), "MLX_DISABLE_COMPILE": "1"}
    processes = [subprocess.Popen(program, env=os.environ | ours | {"MLX_RANK": str(rank)}) for rank in range(ranks)]
    try:
        ends = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert ends == [0] * ranks
    return [{name: dict(np.load(folder / f"{name}-{rank}.npz")) for name in cases} for rank in range(ranks)]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def disturbed_tokens(policy: Policy, rank: int) -> np.ndarray:
    """Tokens sampled where every rank but the first has other logits, as another chip has by rounding."""
    rollout = Sampler(policy, 8)
    logits = rollout.fused.split_model.logits
    if rank:
        rollout.fused.split_model.logits = lambda hidden: logits(hidden)[..., ::-1]
    groups = rollout.sample(PROBLEMS, 4, Sampling(0.9), seed=4, first_number=0)
    rollout.fused.split_model.logits = logits
    return np.array([token for group in groups for completion in group.completions for token in completion.tokens])


def _train(folder: Path, ranks: MlxCollectives) -> None:
    channel = open_channel(ranks)
    if isinstance(channel, WorkerChannel):
        work(channel, ranks)
    else:
        ranks.check = channel.check
        raw, run = json.loads((folder / "run.json").read_text()), RunFolder(folder / "run")
        small_run.prepare(run, raw["settings"])

        def look() -> None:
            if raw["stop_after"] in small_run.steps(run):
                raise Stopped("the test asked for it")

        load = partial(load_leader_context, channel, ranks, "ring")
        ending = train(parse(raw["settings"]), run, command="a test", look=look, load=load)
        (folder / "ending").write_text(ending.kind)
    channel.close()


def main(folder: Path) -> None:
    ranks = init_collectives("ring")
    for name, raw in json.loads((folder / "cases.json").read_text()).items():
        is_step, policy = name.endswith("step"), load_sharded_policy(parse(raw), ranks.group, ranks.sum)
        found = trial(policy, raw, steps=is_step)
        if is_step:
            found |= {DISTURBED: disturbed_tokens(policy, ranks.rank)}
        np.savez(folder / f"{name}-{ranks.rank}.npz", **found)  # pyright: ignore[reportArgumentType]
    if (folder / "run.json").exists():
        mx.synchronize()
        _train(folder, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
