"""What a tiny random model of a type has to do before the table of architectures says that the type works."""

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import load

from backend.config.config import Config, parse
from backend.engine.caches import new_prompt_cache
from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.export.export_run import Export, export_run
from backend.models import architectures
from backend.models.architectures import UNTRAINABLE
from backend.models.policy import Policy, load_policy
from backend.runs import checkpoint
from backend.runs.checkpoint import arrays_of
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.sampling.rollout import Sampler
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.utils.errors import UserError
from tests.support import random_models, small_run
from tests.support.architectures.outcome import FINE_TUNES, Outcome
from tests.support.architectures.tiny_configs import tiny_config
from tests.support.forward_cases import Case, assert_same_gradients, gradients
from tests.support.reference_forward import sampled_groups

# Most nats by which a token's log-probability in sampling and in training may differ, in float32
MAX_GAP = 1e-4

# mlx-lm's cache classes in the words of docs/architectures.json
CACHES = {"KVCache": "keys and values", "RotatingKVCache": "sliding window", "ChunkedKVCache": "chunks"}
CACHES |= {"ArraysCache": "state"}

RUN: dict[str, Any] = {"iters": 2, "group_size": 3, "max_completion_length": 12, "top_p": 1.0, "top_k": 0}
RUN |= {"num_iterations": 2, "beta": 0.05, "learning_rate": 1e-2, "save_every": 2}

# Longer than the windows and chunks of the tiny models
TOKENS = mx.array([[5, 6, 70, 8, 33, 100, 5, 6, 250, 11, 12, 13]])


def tiny_model(models: Path, arch: str) -> Path:
    """The folder of a random model of `arch` within `models`, made the first time."""
    folder = models / arch
    return folder if folder.exists() else random_models.tiny_model(folder, arch, own=tiny_config(arch), noise=0.05)


def config_of(folder: Path, train_type: str = "lora") -> Config:
    raw = {"model": str(folder), "data": "none", "num_layers": -1, "rank": 2, "batch_size": 3}
    return parse(raw | {"train_type": train_type, "learning_rate": 1e-3, "num_iterations": 2})


def run_and_resume(folder: Path, work: Path) -> None:
    """Two steps of a run with LoRA."""
    raw = small_run.settings_for(work, model=str(folder), data=str(small_run.write_rows(work / "rows.jsonl")), **RUN)
    raw |= small_run.low_half(work)
    unbroken, broken = RunFolder(work / "unbroken"), RunFolder(work / "broken")
    _train(raw, unbroken)

    def stop_after_the_first_step(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 1:
            broken.say("stop")

    _train(raw, broken, "stopped", stop_after_the_first_step)
    _train(raw, broken)
    _check_steps(unbroken)
    saved = [checkpoint.newest(run) for run in (unbroken, broken)]
    assert saved[0] and saved[1] and saved[0].state.step == saved[1].state.step == 2
    weights, resumed = (arrays_of(checkpoint_, "weights") for checkpoint_ in saved if checkpoint_)
    changed = [name for name, x in weights.items() if not np.array_equal(np.array(x), np.array(resumed[name]))]
    assert not changed, f"a resumed run ends with other weights: {changed[0]}"
    _check_reopened(folder, unbroken, load_policy(parse(raw)), weights)
    export_run(unbroken, Export("folder", "exported", work))


def _train(raw: dict[str, Any], run: RunFolder, expected: str = "finished", echo: Any = None) -> None:
    ending = small_run.train_here(raw, run, echo)
    assert ending.kind == expected, f"a run {ending.kind}: {ending.sentence}"


def _check_steps(run: RunFolder) -> None:
    steps = [event["metrics"] for event in read_events(run.events) if event["kind"] == "step"]
    gap = max(step["sampling/sampling_logp_difference/max"] for step in steps)
    assert gap < MAX_GAP, f"log-probabilities while sampling and learning differ by {gap:.2g} nats"
    assert all(math.isfinite(step[name]) for step in steps for name in ("loss", "kl", "grad_norm", "entropy"))
    assert steps[0]["grad_norm"] > 0, "the first step has no gradient"
    assert steps[1]["kl"] > 0, "the policy has not moved"


def _check_reopened(folder: Path, run: RunFolder, policy: Policy, weights: dict[str, mx.array]) -> None:
    policy.assign(weights)
    policy.model.eval()
    tuned, base = load(str(folder), adapter_path=str(run.adapters))[0], load(str(folder))[0]
    logits = policy.model(TOKENS)
    assert mx.allclose(tuned(TOKENS), logits, atol=1e-5), "mlx-lm's logits with the adapters are others"
    assert not mx.allclose(base(TOKENS), logits, atol=1e-5), "the adapters change no logit"


def learn(folder: Path, train_type: str) -> None:
    """Two updates on synthetic completions."""
    config = config_of(folder, train_type)
    policy = load_policy(config)
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    policy.model.eval()
    mx.eval(policy.model(TOKENS))  # a model may keep something that it derives from its weights in eval mode
    metrics = build_learner(policy, config, 1).learn(pack(sampled_groups(policy.model), pad_id=0))
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0, f"no finite gradient: {metrics}"
    arrays = dict(tree_flatten(policy.model.parameters()))
    moved = {name for name, x in arrays.items() if name in before and not np.array_equal(np.array(x), before[name])}
    assert moved and moved <= set(policy.trainable()), f"frozen: {sorted(moved - set(policy.trainable()))}"
    policy.model.train()
    learning = policy.model(TOKENS)
    policy.model.eval()
    assert mx.allclose(policy.model(TOKENS), learning, atol=1e-4), (
        "after an update it decodes with other weights than it learns"
    )


def check_gradients(folder: Path) -> None:
    """Every weight's gradient is plain autodiff's over each row alone, with and without gradient checkpointing."""
    policy, case = load_policy(config_of(folder, "full")), Case()
    model, split_model = policy.model, policy.split_model

    def plain_model(tokens: mx.array) -> mx.array:
        return split_model.logits(split_model.hidden(tokens))

    # Gemma 3n is another model without the caches in which its layers find each other's keys.
    by_itself = mx.allclose(model(TOKENS), plain_model(TOKENS), atol=1e-4)
    _, expected = gradients(model, lambda: case.plain(model if by_itself else plain_model, 0.7)[0])  # pyright: ignore
    for recompute in (False, True):
        with gradient_checkpointing(model, recompute):
            _, actual = gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])
        assert_same_gradients(actual, expected, rtol=1e-3, floor=1e-5)


def describe(folder: Path) -> dict[str, Any]:
    """Kinds of cache, and which fast paths a run takes; the trials that find out leave the weights as they were."""
    policy = load_policy(config_of(folder))
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    rollout = Sampler(policy, 4)
    after = dict(tree_flatten(policy.model.parameters()))
    assert all(np.array_equal(np.array(after[name]), x) for name, x in before.items()), "the trial changed the weights"
    return {
        "caches": list(dict.fromkeys(_cache_name(cache) for cache in new_prompt_cache(policy.model))),
        "together": rollout.has_continuous_batching,
        "whole_logits": policy.split_model.head is None,
        "shared_prompts": policy.split_model.prefix_layers > 0,
        "slow_paths": [*policy.split_model.slow_paths, *rollout.slow_paths],
    }


def _cache_name(cache: Any) -> str:
    kind = type(cache).__name__
    if kind == "CacheList":
        return " + ".join(dict.fromkeys(_cache_name(part) for part in cache.caches)) + " in one layer"
    return CACHES.get(kind, kind)


def refused(folder: Path, train_type: str) -> str:
    """The sentence with which a fine-tune type is refused; "" where it is not."""
    try:
        load_policy(config_of(folder, train_type))
    except UserError as mistake:
        return " ".join(fault.sentence for fault in mistake.faults).replace(str(folder), folder.name)
    return ""


def try_type(arch: str, work: Path) -> Outcome:
    """Try `arch` within the folder `work`."""
    if arch in UNTRAINABLE:
        return _still_untrainable(arch, work)
    outcome = Outcome()
    try:
        folder = tiny_model(work / "models", arch)
    except Exception as error:
        return Outcome(failures=[f"making it: {_where(error)}"])
    if sentence := refused(folder, "lora"):
        return Outcome(refusal=sentence)

    def attempt(what: str, trial: Callable[[], Any]) -> Any:
        try:
            return trial()
        except UserError:
            raise
        except Exception as error:
            outcome.failures.append(f"{what}: {_where(error)}")
            return None

    for name, value in (attempt("describing it", lambda: describe(folder)) or {}).items():
        setattr(outcome, name, value)
    if not refused(folder, "full"):
        attempt("gradients", lambda: check_gradients(folder))
    attempt("a run", lambda: run_and_resume(folder, work / "run"))
    for train_type in FINE_TUNES:
        try:
            attempt(train_type, lambda kind=train_type: learn(folder, kind))
        except UserError as mistake:
            outcome.refused[train_type] = " ".join(fault.sentence for fault in mistake.faults).replace(
                str(folder), arch
            )
    return outcome


def _still_untrainable(arch: str, work: Path) -> Outcome:
    refusal = architectures.refusal({"model_type": arch}, ["model.safetensors", "tokenizer.json"])
    try:
        folder = tiny_model(work / "models", arch)
        if not refused(folder, "lora"):
            run_and_resume(folder, work / "run")
            return Outcome(refusal, failures=["It is in UNTRAINABLE, and a run of it works."])
    except (Exception, SystemExit):  # it cannot be made, or its run fails: so it says
        pass
    return Outcome(refusal)


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said} ({Path(last.filename).name}:{last.lineno})"
