"""`bench device`: sampling, learning, memory and precision on random models of Qwen3's sizes, within a time limit. The
result is one JSON file, which is written again after every task and holds no name, host or path. Sizes are in GB of 10⁹
bytes, log-probabilities in nats. Seconds are wall time on a GPU; on a CPU those of all threads of this process."""

import copy
import gc
import itertools
import json
import math
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3

from backend.config.config import Config, parse
from backend.engine.device import on_gpu, release_cached_buffers
from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.adapters import attach_adapters
from backend.models.policy import Policy
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluation_rows import free_name
from backend.trainer.machine import gpu_error
from backend.trainer.memory.estimate import GB, estimate_run
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.memory.plan import plan_limits, plan_memory, working_set_bytes
from backend.training.algorithms import build_learner
from backend.training.batch import Batch, pack
from backend.types import Completion, Group, Problem
from backend.utils.disk import save_as
from backend.utils.errors import UserError
from backend.utils.machine import machine_bytes, processor

FORMAT = 1
BITS, GROUP = 4, 64
LOGIT_STD = 3.0
LORA_B_STD = 1e-3  # with rank 8 and scale 20, adapters then add about 3 % to a layer's output
FIRST_WORD = 2  # token ids below are padding and the end
SIZES = {"hidden": "hidden_size", "layers": "num_hidden_layers", "intermediate": "intermediate_size"}
SIZES |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
SIZES |= {"vocab": "vocab_size"}
"""Of a task's shape, in order → in config.json."""
SHAPES: list[dict[str, Any]] = [
    dict(zip(("name", *SIZES), sizes, strict=True))
    for sizes in (
        ("tiny", 128, 2, 384, 4, 2, 32, 1024),
        ("small", 256, 4, 768, 4, 2, 64, 8192),
        ("Qwen3-0.6B", 1024, 28, 3072, 16, 8, 128, 151936),
        ("Qwen3-1.7B", 2048, 28, 6144, 16, 8, 128, 151936),
        ("Qwen3-4B", 2560, 36, 9728, 32, 8, 128, 151936),
    )
]


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement (`prefill`, `sampling`, `learning` or `gap`) on one random model. Lengths are in tokens."""

    shape: dict[str, Any]
    precision: str  # `4-bit` or `bf16`; on a CPU also `4-bit float32` (activations and scales in float32) and `float32`
    measure: str
    group_size: int = 8
    prompt: int = 1
    completion: int = 1
    prompts: int = 1
    filters: bool = False
    kl: bool = False
    most_rounds: int = 5

    @property
    def model_name(self) -> str:
        return f"{self.shape['name']}, {self.precision}"

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True, slots=True)
class Scale:
    """The models and lengths of a bench: `full` on a GPU, `small` on a CPU, `quick` for a minute."""

    name: str
    shapes: list[dict[str, Any]]
    precisions: tuple[str, ...]
    group_sizes: tuple[int, ...] = (8, 32, 4, 16)
    prompt: int = 80
    sampled: int = 128
    learned: int = 256
    prefilled: tuple[int, int] = (4, 512)
    most_rounds: int = 5


def scale_for(gpu: bool, quick: bool) -> Scale:
    precisions = ("4-bit", "bf16") if gpu else ("4-bit float32", "bf16")
    if quick:
        return Scale("quick", SHAPES[:1], precisions, (8, 32), 16, 32, 32, (2, 64), 2)
    if gpu:
        return Scale("full", SHAPES[2:], precisions)
    precisions = (*precisions, "float32")
    return Scale("small", SHAPES[:2], precisions, sampled=32, learned=32, prefilled=(4, 64), most_rounds=3)


def tasks(scale: Scale) -> list[Task]:
    """All measurements, the most important of every model first: the time may end before the list does."""
    first, rest = list[Task](), list[Task]()
    for precision, shape in itertools.product(scale.precisions, scale.shapes):
        task = partial(Task, shape, precision, prompt=scale.prompt, most_rounds=scale.most_rounds)
        for size in scale.group_sizes:
            important = first if size in (8, 32) else rest
            important.append(task("sampling", size, completion=scale.sampled, filters=True))
            rest.append(task("sampling", size, completion=scale.sampled))
        first += [task("learning", completion=scale.learned), task("gap", completion=scale.sampled)]
        prompts, length = scale.prefilled
        rest.append(task("prefill", 1, prompt=length, prompts=prompts))
        rest.append(task("learning", completion=scale.learned, kl=True))
    return first + rest


def random_policy(config: Config, about: dict[str, Any]) -> Policy:
    """A policy on a model with this config.json, with adapters and a reference that shares its base."""
    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(about))
    model.set_dtype(getattr(mx, about["torch_dtype"]))
    if "quantization" in about:
        nn.quantize(model, GROUP, BITS)
    mx.random.seed(0)
    model.update(tree_map_with_path(_random_like, model.parameters()))
    # Largest first and one at a time, so that what drawing an array takes is never on top of all the others.
    arrays: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]  # pyright: ignore
    for array in sorted(arrays, key=lambda array: -array.nbytes):
        mx.eval(array)
    reference = copy_sharing_arrays(model).freeze().eval()
    attach_adapters(model, config)
    trainable: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    noise = [(name, LORA_B_STD * mx.random.normal(b.shape)) for name, b in trainable.items() if name.endswith("lora_b")]
    model.load_weights(noise, strict=False)
    mx.eval(model.parameters())
    return Policy(model, SilentTokenizer(), about, reference)


def _random_like(name: str, array: mx.array) -> mx.array:
    """A new array of this shape and type. Norms are 1; packed numbers 0 … 15 are scaled to be symmetric around 0."""
    if array.ndim == 1:
        return mx.ones(array.shape, array.dtype)
    if array.dtype == mx.uint32:
        # Halves of 16 bits: random integers come from floats, which have 24.
        halves = mx.random.randint(0, 1 << 16, (*array.shape[:-1], 2 * array.shape[-1]), mx.uint16)
        return halves.view(mx.uint32)
    inputs = array.shape[1] * (GROUP if name.endswith(("scales", "biases")) else 1)
    std = LOGIT_STD / math.sqrt(inputs) if "embed_tokens" in name else 1 / math.sqrt(inputs)
    step = std / math.sqrt((2 ** (2 * BITS) - 1) / 12)  # the standard deviation of the whole numbers 0 … 15 is 4.6
    if name.endswith("scales"):
        return mx.full(array.shape, step, array.dtype)
    if name.endswith("biases"):
        return mx.full(array.shape, -step * (2**BITS - 1) / 2, array.dtype)
    return mx.random.uniform(-math.sqrt(3) * std, math.sqrt(3) * std, array.shape, array.dtype)


class SilentTokenizer:
    eos_token_ids = (1,)
    pad_token_id = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""


def _now() -> float:
    return time.perf_counter() if on_gpu() else time.process_time()


def _seconds(run: Callable[[], Any]) -> float:
    mx.synchronize()
    began = _now()
    run()
    mx.synchronize()
    return _now() - began


def _rounds(run: Callable[[], float], allowance_s: float, most: int) -> tuple[int, float]:
    """(rounds, their median) after one to warm up: `most`, or as many as the allowance lasts, at least one."""
    deadline = time.perf_counter() + allowance_s
    run()
    results: list[float] = []
    while len(results) < most:
        began = time.perf_counter()
        results.append(run())
        if 2 * time.perf_counter() - began > deadline:  # another one, as long as this
            break
    return len(results), statistics.median(results)


class ModelBench:
    """Measures tasks on one model at a time; its config.json in `folder` is what the memory estimate reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model_name = ""
        self.policy: Any = None
        self.number = 0  # of the rollout: each draws other random numbers

    def measure(self, task: Task, allowance_s: float) -> dict[str, Any]:
        about = {
            **{name: task.shape[size] for size, name in SIZES.items()},
            "model_type": "qwen3",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
            "torch_dtype": "float32" if "float32" in task.precision else "bfloat16",
        }
        if "4-bit" in task.precision:
            about["quantization"] = {"bits": BITS, "group_size": GROUP, "mode": "affine"}
        (self.folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
        config = parse(
            {
                "model": str(self.folder),
                "data": str(self.folder),
                "num_layers": -1,
                "rank": 8,
                "scale": 20.0,
                "learning_rate": 1e-6,
                "batch_size": task.prompts,
                "group_size": max(2, task.group_size),
                "beta": 0.04 if task.kl else 0.0,
                "max_completion_length": task.completion,
                "max_seq_length": task.prompt + task.completion,
            }
            | ({} if task.filters else {"top_p": 1.0, "top_k": 0})
        )
        if task.model_name != self.model_name:
            self.policy = None  # before the next is made
            gc.collect()
        shape, machine = shape_of(self.folder), machine_bytes(mx.get_active_memory(), working_set_bytes())
        assert shape is not None  # the sizes of a Qwen3 are known
        needs = estimate_run(config, shape, machine, task.prompt, gpu=on_gpu())
        if not needs.fits:
            raise UserError("memory_limit", needs.sentence)
        if self.policy is None:
            self.policy, self.model_name = random_policy(config, about), task.model_name
        to_learn, to_sample = plan_limits(plan_memory(config, self.policy, [task.prompt], lambda sentence: None))
        gc.collect()  # compiled steps of the task before hold one another in circles, and would count in this peak
        mx.clear_cache()
        mx.reset_peak_memory()
        if task.measure == "learning":
            learner, batch = self._learner(config, task, to_learn), self._random_batch(task)

            def learn() -> None:
                release_cached_buffers()  # as the trainer does between sampling and learning
                learner.learn(batch)

            rounds, step_s = _rounds(lambda: _seconds(learn), allowance_s, task.most_rounds)
            numbers, estimate = {"step_s": step_s, "tokens_per_s": task.rows * task.completion / step_s}, needs.training
        else:
            to_sample["rows"] = to_sample["rows"] if to_sample["rows"] < task.rows else None
            sampler = Sampler(self.policy, task.completion, **to_sample)
            if task.measure == "gap":
                return self._gap(task, config, sampler, self._learner(config, task, to_learn))
            if task.measure == "prefill":
                once = partial(_seconds, lambda: self._sample(task, config, sampler))
                rounds, took_s = _rounds(once, allowance_s, task.most_rounds)
                return {"rounds": rounds, "tokens_per_s": task.prompts * task.prompt / took_s}

            def decode() -> float:
                """Completion tokens a second of all rows, between the first chunk of decoding steps and the last."""
                marks = list[tuple[float, int]]()
                self._sample(task, config, sampler, lambda tokens: marks.append((_now(), tokens)))
                (began, before), (ended, after) = marks[0], marks[-1]
                return (after - before) / (ended - began)

            rounds, rate = _rounds(decode, allowance_s, task.most_rounds)
            numbers, estimate = {"tokens_per_s": rate, "step_ms": 1000 * task.rows / rate}, needs.rollout
        memory = {"peak_gb": mx.get_peak_memory() / GB, "estimate_gb": estimate.total / GB}
        return {"rounds": rounds, **numbers, **memory, "reductions": list(needs.reductions)}

    def _problems(self, task: Task) -> list[Problem]:
        shape = (task.prompts, task.prompt)
        ids_PK = np.random.default_rng(7).integers(FIRST_WORD, task.shape["vocab"], shape)
        return [Problem(i, "", [], ids, "") for i, ids in enumerate(ids_PK.tolist())]

    def _sample(
        self, task: Task, config: Config, sampler: Sampler, poll: Callable[[int], None] = lambda tokens: None
    ) -> list[Group]:
        self.number += 1
        # An id beyond the vocabulary, so that no completion ends early. Not in the tokenizer: the sampler's trial pass
        # feeds the end token to the model.
        ends, self.policy.eos_ids = self.policy.eos_ids, [task.shape["vocab"]]
        try:
            first = self.number * task.prompts
            return sampler.sample(self._problems(task), task.group_size, Sampling.of(config), 0, first, poll)
        finally:
            self.policy.eos_ids = ends

    def _learner(self, config: Config, task: Task, limits: dict[str, Any]) -> Any:
        policy = self.policy
        if not task.kl:
            policy = copy.copy(policy)
            policy.reference = policy.reference_model = None
        return build_learner(policy, config, 10**6, **limits)

    def _random_batch(self, task: Task) -> Batch:
        draw, groups = np.random.default_rng(7), list[Group]()
        logps = [-math.log(task.shape["vocab"])] * task.completion
        for problem in self._problems(task):
            ids_GT = draw.integers(FIRST_WORD, task.shape["vocab"], (task.group_size, task.completion)).tolist()
            completions = [Completion(ids, list(logps), "", "length") for ids in ids_GT]
            for completion, advantage in zip(completions, draw.standard_normal(task.group_size), strict=True):
                completion.advantage = float(advantage)
            groups.append(Group(problem, completions))
        return pack(groups, pad_id=self.policy.pad_id)

    def _gap(self, task: Task, config: Config, sampler: Sampler, learner: Any) -> dict[str, Any]:
        """|log p of the sampler − log p of the learner| over the tokens of one rollout, before any update."""
        batch = pack(self._sample(task, config, sampler), pad_id=self.policy.pad_id)
        parts = learner.forward.micro_batches(self.policy.split_model, batch)
        logps = learner.forward.logps_without_gradient(self.policy.split_model, parts)
        gaps: list[Any] = []
        for logp_BT, part in zip(logps, parts, strict=True):
            gap_BT = np.abs(np.array(logp_BT) - np.array(part.batch.sampling_logp_BT))
            gaps.append(gap_BT[np.array(part.batch.mask_BT) > 0])
        gap_N = np.concatenate(gaps)
        mean, p99, most = float(gap_N.mean()), float(np.quantile(gap_N, 0.99)), float(gap_N.max())
        return {"tokens": len(gap_N), "mean_nats": mean, "p99_nats": p99, "max_nats": most}


def this_machine() -> dict[str, Any]:
    macos, working_set = platform.mac_ver()[0], working_set_bytes()
    return {
        "chip": str(mx.device_info()["device_name"]) if on_gpu() else processor(),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(psutil.virtual_memory().total / GB, 1),
        "working_set_gb": working_set / GB if working_set else None,
        "system": f"macOS {macos}" if macos else platform.system(),
        "computes_on": "gpu" if on_gpu() else "cpu",
    }


@dataclass(slots=True)
class DeviceBench:
    """Measures the tasks of a scale in `minutes`, and writes device-<chip>-<date>.json into `folder` after each, with
    a number where that is there."""

    scale: Scale
    minutes: float
    folder: Path
    machine: dict[str, Any] = field(default_factory=this_machine)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    ended: str = "interrupted"

    path: Path = field(init=False)

    def __post_init__(self) -> None:
        name = f"device-{self.machine['chip'].lower()}-{date.today().isoformat()}"
        self.path = self.folder / f"{free_name(self.folder, name)}.json"

    def run(self) -> Iterator[tuple[Task, dict[str, Any] | None]]:
        """Yields (task, None) before a task and (task, its outcome) after it, until the time is up."""
        began, waiting = time.monotonic(), tasks(self.scale)
        with tempfile.TemporaryDirectory() as folder:
            bench = ModelBench(Path(folder))
            self._write(began, waiting)
            while waiting and (left := 60 * self.minutes - (time.monotonic() - began)) > 0:
                task = waiting[0]
                yield task, None
                at, numbers, error = time.monotonic(), None, ""
                try:
                    numbers = {"measure": task.measure} | bench.measure(task, left / len(waiting))
                    mx.synchronize()  # raises an error of the GPU here, and not in the next task
                except UserError as problem:
                    error = str(problem)
                except Exception as problem:  # of any kind: mlx and Metal raise here; the next task continues
                    known = gpu_error(problem)
                    error = known.happened if known else f"{type(problem).__name__}: {problem}"
                error = re.sub(r"(~|/[\w.+-]+)(/[\w.+@-]*\w)+/?", "…", error)  # paths hold the user's name
                times = {"at_s": at - began, "took_s": time.monotonic() - at}
                self.outcomes.append({"task": asdict(task), **times, "numbers": numbers, "error": error})
                waiting.pop(0)
                self.ended = "interrupted" if waiting else "finished"
                self._write(began, waiting)
                yield task, self.outcomes[-1]
            self.ended = "out of time" if waiting else "finished"
            self._write(began, waiting)

    def _write(self, began: float, waiting: list[Task]) -> None:
        usual = Config()
        filters = f"default filters: top-k {usual.top_k}, top-p {usual.top_p:g}"
        versions = {name: version(name) for name in ("grpo-studio", "mlx", "mlx-lm")}
        file = {
            "format": FORMAT,
            "date": date.today().isoformat(),
            "machine": self.machine,
            "versions": versions | {"Python": platform.python_version()},
            "settings": {
                "minutes": self.minutes,
                "scale": self.scale.name,
                "sampling": f"temperature {usual.temperature:g}; {filters}",
                "clock": "wall" if on_gpu() else "CPU",
            },
            "ended": self.ended,
            "took_s": time.monotonic() - began,
            "outcomes": self.outcomes,
            "unmeasured": [f"{task.model_name}: {task.measure}" for task in waiting],
        }
        save_as(self.path, json.dumps(file, indent=1) + "\n")
