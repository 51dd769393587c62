"""Estimates are within 15 % of the measured peak, plans keep their limit, what cannot fit is refused in a sentence."""

import gc
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from backend.config.config import SETTINGS, Config, parse
from backend.models.policy import Policy, QuantizedRollouts, load_policy, load_teacher
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.memory import estimate
from backend.trainer.memory.model_shape import ModelShape, shape_from, shape_of
from backend.trainer.memory.plan import image_tokens, plan_limits, plan_memory
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.training.learner import Learner
from backend.types import Completion, Group, Problem
from tests.support.random_models import tiny_model
from tests.support.small_run import settings_for, train_here
from tests.support.vision_models import chat, picture, tiny_vision_model

PLENTY = 64 * estimate.GB

pytestmark = pytest.mark.usefixtures("compiled", "as_on_a_cpu")  # the peaks of a GPU cannot be measured on a CPU


@pytest.fixture(autouse=True)
def _restored_memory_limit() -> Iterator[None]:
    gc.collect()  # models of earlier tests would be counted too
    mx.clear_cache()
    before = mx.set_memory_limit(PLENTY)
    yield
    mx.set_memory_limit(before)


@dataclass(frozen=True)
class Case:
    """A model, settings, and the lengths of prompts and completions in tokens."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: int = 1
    group: int = 8
    prompt: int = 64
    completion: int = 96
    side: int = 0  # pixels of a prompt's picture; the model is `qwen3_vl` or that of `arch`

    def __str__(self) -> str:
        return self.name

    def folder(self, within: Path) -> Path:
        sizes = {"vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        arguments = ("arch", "layers", "tie", "dtype", "bits", "hidden")
        outside = {key: value for key, value in self.model.items() if key in arguments}
        if self.side:
            return self._vision_folder(within)
        own = sizes | {"intermediate_size": 384}
        own |= {key: value for key, value in self.model.items() if key not in arguments}
        return tiny_model(within / "model", **({"hidden": 128, "layers": 4} | outside), own=own)

    def _vision_folder(self, within: Path) -> Path:
        family, is_qwen = self.model.get("arch", "qwen3_vl"), "arch" not in self.model
        text = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "head_dim": 64}
        vision = {"hidden_size": 128, "intermediate_size": 512}
        vision |= {"depth": 4, "num_heads": 4, "out_hidden_size": 128} if is_qwen else {"num_hidden_layers": 4}
        vision |= {} if is_qwen else {"image_size": self.side, "num_attention_heads": 4}
        folder = tiny_vision_model(within / "model", family, text=text, vision=vision)
        size = {"longest_edge": self.side} | ({"longest_edge": self.side**2, "shortest_edge": 256} if is_qwen else {})
        tiles = {} if is_qwen else {"max_image_size": {"longest_edge": self.side}}
        by_name = {"preprocessor": {"size": size} | tiles, "processor": {"image_seq_len": self.side**2 // 256}}
        for name, more in by_name.items():
            if (file := folder / f"{name}_config.json").is_file():
                file.write_text(json.dumps(json.loads(file.read_text()) | more))
        return folder

    def config(self, folder: Path) -> Config:
        usual = {"num_layers": -1, "beta": 0.0, "top_p": 1.0, "top_k": 0, "temperature": 1.0, "max_seq_length": 1 << 14}
        lengths = {"batch_size": self.prompts, "group_size": self.group, "max_completion_length": self.completion}
        files = {"model": str(folder), "teacher_model": str(folder), "data": "rows.jsonl"}
        return parse(files | usual | lengths | self.settings)

    def groups(self, policy: Policy) -> list[Group]:
        rng = np.random.default_rng(0)
        made: list[Group] = []
        for _ in range(self.prompts * self.settings.get("gradient_accumulation_steps", 1)):
            problem = Problem(0, "", [], rng.integers(2, 288, self.prompt).tolist(), "")
            if self.side:
                image = picture(Path(policy.tokenizer.folder) / "picture.png", self.side, self.side)
                problem.messages = chat("What is it?", image)
                problem.tokens = policy.tokenizer.apply_chat_template(problem.messages)
            ids = rng.integers(2, 300, (self.group, self.completion)).tolist()
            advantages = [1.0 - 2 * (i % 2) for i in range(len(ids))]
            rows = zip(ids, advantages, strict=True)
            made.append(
                Group(problem, [Completion(row, [-1.0] * len(row), "", "length", advantage=a) for row, a in rows])
            )
            for completion in made[-1].completions if self.settings.get("distillation_weight") else ():
                room = self.settings["max_seq_length"] - self.completion
                completion.teacher_prompt = rng.integers(2, 300, room).tolist()
        return made


def held_by_fixtures() -> int:
    """Bytes of the models that fixtures of other files keep."""
    gc.collect()
    return mx.get_active_memory()


def peaks(case: Case, folder: Path) -> tuple[estimate.Estimate, int, int]:
    """(estimate, peak of sampling, peak of learning) with the plan's limits, as in a run; bytes."""
    elsewhere = held_by_fixtures()
    config = case.config(folder)
    policy = load_policy(config)
    load_teacher(policy, config)
    shape, dtype = _shape(folder), config.dtype  # as the case says
    problems = [group.problem for group in case.groups(policy)]
    prompt, images = len(problems[0].tokens), image_tokens(policy.tokenizer, problems, len(problems[0].tokens))
    estimated = estimate.estimate_run(config, shape.reading(images), PLENTY, prompt, gpu=False, dtype=dtype)
    plan = plan_memory(config, policy, [prompt], lambda sentence: None, images=images)
    assert plan == estimated.plan
    trained = build_learner(policy, config, 100, **plan_limits(plan)[0])
    mx.eval(policy.model.state, trained.optimizer.state)
    learnt = learning_peak(case, trained)  # first: it may give the reference weights of its own
    sampled = QuantizedRollouts(policy, config) if config.rollout_quantization != "none" else policy
    return estimated, sampling_peak(case, config, sampled, plan_limits(plan)[1]) - elsewhere, learnt - elsewhere


def sampling_peak(case: Case, config: Config, policy: Policy, limits: dict[str, Any]) -> int:
    sampler = Sampler(policy, config.max_completion_length, **limits)
    policy.eos_ids = [-1]  # every completion runs to its limit
    mx.clear_cache()
    mx.reset_peak_memory()
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.min_p)
    groups = sampler.sample([group.problem for group in case.groups(policy)], case.group, sampling, 0, 0)
    assert all(len(completion.tokens) == case.completion for group in groups for completion in group.completions)
    return mx.get_peak_memory()


def learning_peak(case: Case, trained: Learner) -> int:
    """The peak of a step; under full fine-tuning of the second one, when the reference has weights of its own."""
    groups = case.groups(trained.policy)
    for group in groups if case.side else ():
        (group.images,) = trained.policy.images_of([group.problem])
    batch = pack(groups, pad_id=0)
    if case.settings.get("train_type") == "full":
        trained.learn(batch)
    mx.clear_cache()
    mx.reset_peak_memory()
    # As rank 0 of several machines does.
    kept = (trained.policy.trainable(), trained.state_arrays()) if case.settings.get("hosts") else ()
    trained.learn(batch)
    del kept
    return mx.get_peak_memory()


EXPERTS = {"arch": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
QWEN = {"hidden": 1024, "layers": 4, "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN |= {"head_dim": 128, "intermediate_size": 3072}
FEEDBACK = {"distillation_weight": 0.5, "include_environment_feedback": True, "max_seq_length": 1024}
TEACHER = {"train_mode": "distill"}
FULL, DORA, RECOMPUTED = {"train_type": "full"}, {"train_type": "dora"}, {"grad_checkpoint": True}

CASES = (
    Case("LoRA, V 320"),
    Case("G 32, T 32, KL", settings={"beta": 0.1}, group=32, completion=32),
    Case("T 256, llama", {"arch": "llama"}, group=4, completion=256),
    Case("V 4k, untied", {"vocab_size": 4096, "tie": False}),
    Case("V 32k, filters", {"vocab_size": 32768}, {"top_p": 0.95, "top_k": 20}, completion=32),
    Case("V 150k", {"vocab_size": 150016, "layers": 2}, group=4, completion=64),
    Case("prompt 512, T 32", prompt=512, completion=32),
    Case("prompt 256, G 2", group=2, prompt=256),
    Case("prompt 512, G 2, last layer", settings={"num_layers": 1}, group=2, prompt=512, completion=32),
    Case("four prompts, accumulated", {"layers": 2}, {"gradient_accumulation_steps": 2}, prompts=2, completion=64),
    Case("8 layers, recomputed", {"layers": 8}, RECOMPUTED),
    Case("T 256, recomputed", {}, RECOMPUTED, group=4, completion=256),
    Case("DoRA", {}, DORA),
    Case("DoRA, recomputed, V 4k", {"vocab_size": 4096}, DORA | RECOMPUTED, completion=64),
    Case("teacher, LoRA", {}, TEACHER),
    Case("teacher, V 32k", {"vocab_size": 32768}, TEACHER, completion=32),
    Case("teacher, V 150k", {"vocab_size": 150016, "layers": 2}, TEACHER, group=4, completion=64),
    Case("full", {}, FULL),
    Case("full, V 8k, KL", {"vocab_size": 8192, "layers": 2}, FULL | {"beta": 0.1}, completion=32),
    Case("full, recomputed, KL", {}, FULL | RECOMPUTED | {"beta": 0.1}),
    Case("full, 8-bit states", {"hidden": 256, "layers": 6}, FULL | {"optimizer_bits": "8"}, group=4, completion=16),
    Case("full, few tokens", {"hidden": 256, "layers": 6}, FULL, group=4, prompt=16, completion=16),
    Case("experts", EXPERTS, completion=64),
    Case("sliding windows", {"arch": "gemma3_text"}, prompts=2, completion=160),
    Case("bf16", {"dtype": "bfloat16", "layers": 3}, group=4, completion=64),
    Case("4 bits", {"bits": 4, "layers": 3}, group=4, completion=64),
    Case("Qwen3-0.6B, 4 layers", QWEN | {"dtype": "bfloat16"}, {"dtype": "float32", "beta": 0.1}, completion=32),
    Case("rollouts in 4 bits", {"dtype": "bfloat16", "layers": 3, "vocab_size": 4096}, {"rollout_quantization": "4"}),
    Case("4 bits, expanded", {"bits": 4, "layers": 3}, {"dtype": "float32"}, group=4, completion=64),
    Case("4 bits, small", {"bits": 4, "layers": 2}, group=4, prompt=32, completion=48),
    Case("self-distillation, long feedback", {}, FEEDBACK, group=4, prompt=16, completion=32),
    Case("4 bits, bf16, DoRA", {"bits": 4, "dtype": "bfloat16", "layers": 2}, DORA, group=4, completion=48),
    Case(
        "two layers, q and v, dropout",
        settings={"num_layers": 2, "lora_keys": ["self_attn.q_proj", "self_attn.v_proj"], "dropout": 0.1},
    ),
    Case("picture", side=256),
    Case("picture, four prompts", prompts=4, completion=32, side=128),
    Case("picture, SmolVLM", {"arch": "smolvlm"}, prompts=2, group=4, completion=32, side=256),
)


IN_CI = ("full, V 8k, KL", "four prompts, accumulated")
"""Together: LoRA and full, recomputed layers, several prompts, a large vocabulary with a reference, packed weights."""


@pytest.mark.parametrize(
    "case", [case if case.name in IN_CI else pytest.param(case, marks=pytest.mark.proof) for case in CASES], ids=str
)
def test_the_estimate_is_within_15_percent_of_the_measured_peak(case: Case, tmp_path: Path) -> None:
    estimated, sampled, learnt = peaks(case, case.folder(tmp_path))
    print(f"{case.name} | {estimated.rollout.total / sampled:.3f} | {estimated.training.total / learnt:.3f}")
    assert estimated.training.total == pytest.approx(learnt, rel=0.15)
    assert estimated.rollout.total == pytest.approx(sampled, rel=0.15)


SMALL = Case("small", {"hidden": 64, "layers": 2, "num_attention_heads": 2, "intermediate_size": 96})


@pytest.mark.parametrize(
    ("kind", "train_type"),
    [
        ("adamw", "lora"),
        ("adamw", "dora"),
        *((choice.value, "full") for choice in SETTINGS["optimizer"].choices if not choice.is_hidden),
    ],
)
def test_weights_adapters_and_optimizer_state_are_exact(kind: str, train_type: str, small_model: Path) -> None:
    config = SMALL.config(small_model).model_copy(update={"optimizer": kind, "train_type": train_type})
    policy = load_policy(config)
    optimizer = build_learner(policy, config, 100).optimizer
    parts = estimate.estimate_run(config, _shape(small_model), PLENTY, 64).training.to_dict()
    learns = sum(array.nbytes for array in policy.trainable().values())
    model_bytes = sum(array.nbytes for _, array in tree_flatten(policy.model.parameters()))
    assert parts["weights"] == model_bytes - (0 if train_type == "full" else learns)
    assert parts.get("adapters", learns) == learns
    remembered = sum(array.nbytes for name, array in tree_flatten(optimizer.state) if array.size > 1)
    assert parts["optimizer"] == pytest.approx(remembered, rel=0.03)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("quantization", ["4", "8", "mxfp4", "none"])
def test_quantised_weights_are_within_a_percent(quantization: str, dtype: str, tmp_path: Path) -> None:
    """Quantised after loading, or as they come; on a CPU float32 expands them."""
    model = {"hidden": 128, "layers": 2, "vocab_size": 2048} | ({"bits": 4} if quantization == "none" else {})
    case = Case("packed", model, {"quantization": quantization, "dtype": dtype})
    config = case.config(case.folder(tmp_path))
    policy = load_policy(config)
    held = sum(array.nbytes for _, array in tree_flatten(policy.model.parameters()))
    estimated = estimate.estimate_run(config, _shape(Path(config.model)), PLENTY, 64, gpu=False, dtype=dtype)
    parts = estimated.training.to_dict()
    assert parts["weights"] + parts["adapters"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("model", [{}, {"tie": False}, EXPERTS, {"arch": "llama"}, {"bits": 4}], ids=str)
def test_config_json_alone_gives_the_weights_within_two_percent(model: dict[str, Any], tmp_path: Path) -> None:
    folder = Case("any", {"vocab_size": 2048} | model).folder(tmp_path)
    read, computed = _shape(folder), shape_from(json.loads((folder / "config.json").read_text()))
    assert read.exact and computed is not None and not computed.exact
    assert computed.weights == pytest.approx(read.weights, rel=0.02)
    usual = {matrix.name.removeprefix("mlp.") for matrix in computed.layers[0]}
    assert usual <= {matrix.name.removeprefix("mlp.") for matrix in read.layers[0]}


@pytest.mark.parametrize("share", [pytest.param(0.7, marks=pytest.mark.proof), 0.25])
def test_a_run_stays_below_its_memory_limit(share: float, tmp_path: Path) -> None:
    case = Case("constrained", {"vocab_size": 1024, "layers": 3}, prompts=2, completion=32)
    folder = case.folder(tmp_path)
    config = case.config(folder)
    free = estimate.estimate_run(config, _shape(folder), PLENTY, case.prompt)
    limit = share * free.total
    held = config.model_copy(update={"memory_limit": limit / estimate.GB})
    estimated, notes = estimate.estimate_run(held, _shape(folder), PLENTY, case.prompt), []
    elsewhere, policy = held_by_fixtures(), load_policy(held)
    plan = plan_memory(held, policy, [case.prompt], notes.append)
    assert plan == estimated.plan and estimated.reductions and notes == [estimated.sentence]
    assert estimated.plan.recompute == (share < 0.5)
    assert learning_peak(case, build_learner(policy, held, 100, **plan_limits(plan)[0])) - elsewhere < limit
    assert sampling_peak(case, held, policy, plan_limits(plan)[1]) - elsewhere < limit


def _big() -> ModelShape:
    """A model of 8 billion weights in 16 bits."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False}
    shape = shape_from({"model_type": "qwen3", "torch_dtype": "bfloat16", **sizes})
    assert shape is not None and shape.weights == pytest.approx(16.4e9, rel=0.01)
    return shape


def test_the_fault_names_a_change_of_settings_that_fits() -> None:
    config = parse({"model": "m", "data": "d.jsonl"})
    estimated = estimate.estimate_run(config, _big(), 12 * estimate.GB, 128)
    assert not estimated.fits and "it does not fit" in estimated.sentence
    fault = estimated.fault
    assert fault is not None and fault.setting == "memory_limit" and "12.0 GB" in fault.sentence
    assert "With 4-bit quantization it would need" in fault.sentence
    advice = re.search(r"set Memory limit to (\d+) GB", fault.sentence)
    assert advice is not None
    changed = estimate.estimate_run(config.model_copy(update={"quantization": "4"}), _big(), 12 * estimate.GB, 128)
    assert changed.fits and changed.fault is None
    insisted = config.model_copy(update={"memory_limit": float(advice[1])})
    assert estimate.estimate_run(insisted, _big(), 12 * estimate.GB, 128).fits


def test_a_run_that_cannot_fit_is_refused_and_one_that_is_constrained_notes_it(tmp_path: Path) -> None:
    raw = settings_for(tmp_path, layers=2, iters=1, max_completion_length=16, group_size=8)
    refused = train_here(raw | {"memory_limit": 1e-4}, RunFolder(tmp_path / "refused"))
    assert refused.exit_code == 2 and "memory_limit" in refused.sentence
    assert "set Memory limit to 1 GB" in refused.sentence
    held = RunFolder(tmp_path / "held")
    assert train_here(raw | {"memory_limit": 1.6e-3}, held).exit_code == 0
    notes = [event["sentence"] for event in read_events(held.events) if event["kind"] == "note"]
    assert any("held down by" in sentence for sentence in notes), notes


def test_no_memory_limit_outlives_its_policy(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to be planned is the first to go: the second must not bring its limit back."""
    monkeypatch.setattr("backend.trainer.memory.plan._limits_held", {})  # of policies that earlier tests keep
    config = SMALL.config(small_model)
    first, second = (load_policy(config.model_copy(update={"group_size": size})) for size in (2, 16))
    limits = []
    for policy, size in ((first, 2), (second, 16)):
        plan_memory(config.model_copy(update={"group_size": size}), policy, [64], lambda sentence: None)
        limits.append(mx.set_memory_limit(PLENTY))
        mx.set_memory_limit(limits[-1])
    assert limits[0] < limits[1]
    del policy, first
    gc.collect()
    assert mx.set_memory_limit(limits[1]) == limits[1], "the second's own"
    del second
    gc.collect()
    assert mx.set_memory_limit(PLENTY) == PLENTY


def test_a_rough_estimate_refuses_no_run(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "mamba", "mamba")
    config = Case("any").config(folder).model_copy(update={"memory_limit": 1e-4})
    notes: list[str] = []
    plan_memory(config, load_policy(config), [64], notes.append)
    assert len(notes) == 1 and notes[0].startswith("Roughly") and "does not fit" in notes[0]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.folder(tmp_path_factory.mktemp("small"))


def _shape(folder: Path) -> ModelShape:
    shape = shape_of(folder)
    assert shape is not None
    return shape
