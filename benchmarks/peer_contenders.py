"""Other GRPO trainers on MLX as contenders, each called as its documentation or its own loop calls it, at our work.

Where a peer's loop cannot be called step by step, it runs as it is, and the stopwatch is driven from its callbacks: its
tokenizer, its dataset, its reward function. DIFFERS lists what a peer computes differently, from reading
the versions that `benchmarks.peers` installs. This module runs in the peers' environment.
"""

import importlib.util
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contender import RANK, RATE, SCALE, Contender, picture, prompt_ids, reward
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Case

FOREVER = 10**9  # steps of a run that ends when stdin does, and the interval of what should not happen

MANY = 200  # steps whose prompts unsloth-zoo encodes before the first: more than any benchmark takes

DIFFERS = {
    "unsloth-zoo": (
        "Pads to a multiple of 32 tokens, draws each row's token by itself, corrects Adam's bias, and limits the norm "
        "of each gradient to 1."
    ),
    "mlxrl": (
        "One more forward pass for the old log-probabilities. Token mean instead of GRPO's mean of means, no clipping. "
        "An early end makes it decode the batch again one by one; with natural ends it is therefore asked not to batch."
    ),
    "mlx-lm-lora": (
        "By default decodes and trains as many rows at once as there are prompts in the batch; “all rows” decodes all "
        "together. The reference is a second copy of the model. The ratio is always 1."
    ),
    "mlx-vlm": (
        "Decodes and trains one completion at a time, and reads the prompt with its picture for each. The reference is "
        "a second copy of the model. The ratio is always 1."
    ),
    "mlx-tune": (
        "REINFORCE: no KL, no reference, no ratio; the prompt is trained on too. One completion at a time, one update "
        "a prompt. It has no top-p."
    ),
}


class NumberedPrompts:
    """Mixed into mlx-lm's tokenizer: a prompt's text is its index, which encodes to its ids; decoded lengths are
    recorded."""

    prompts: list[list[int]]
    decoded: list[int]

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.prompts[int(text)]

    def decode(self, ids: Any, **_: Any) -> str:
        self.decoded.append(len(ids))
        return self._tokenizer.decode(ids)  # pyright: ignore[reportAttributeAccessIssue]


def with_numbered_prompts(tokenizer: Any, case: Case) -> Any:
    """A copy of `tokenizer` that encodes the case's prompts."""
    cls = type("Tokenizer", (NumberedPrompts, type(tokenizer)), {})
    copied = cls.__new__(cls)
    copied.__dict__.update(tokenizer.__dict__)
    copied.__dict__.update(prompts=prompt_ids(case), decoded=[])
    return copied


def mlxrl(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """inductive-mlxrl's library calls, as its README and its own rollout command put them together."""
    import mlx.optimizers as optim
    from mlxrl.algo import GRPOAlgorithm  # pyright: ignore[reportMissingImports]
    from mlxrl.policy import LoRAConfig, load_policy_with_lora  # pyright: ignore[reportMissingImports]
    from mlxrl.rollout.naive import SamplingConfig  # pyright: ignore[reportMissingImports]
    from mlxrl.rollout.optimized import generate_prefix_cached_group_rollouts  # pyright: ignore[reportMissingImports]
    from mlxrl.train import batch_from_rollouts, optimizer_step  # pyright: ignore[reportMissingImports]

    model, tokenizer, _ = load_policy_with_lora(str(folder), LoRAConfig(rank=RANK, scale=SCALE))
    tokenizer = with_numbered_prompts(tokenizer, case)
    sampling = SamplingConfig(max_tokens=case.completion, temperature=case.temperature, top_p=case.top_p)
    optimizer, algorithm = optim.Adam(learning_rate=RATE), GRPOAlgorithm()
    for number in stopwatch.steps():
        tokenizer.__dict__["prompts"] = prompt_ids(case, number)
        rollouts = generate_prefix_cached_group_rollouts(
            model,
            tokenizer,
            [str(i) for i in range(case.prompts)],
            case.group_size,
            sampling,
            seed=number,
            use_chat_template=False,
            compile_decode_step=not case.natural,
            batch_groups=not case.natural,
        )
        stopwatch.lap("rollout")
        batch = batch_from_rollouts(
            model,
            rollouts,
            [reward(rollout.text) for rollout in rollouts],
            case.group_size,
            0,
            algorithm,
            compute_reference=case.beta != 0,
        )
        optimizer_step(model, optimizer, batch, case.beta, 0, algorithm)
        stopwatch.lap("train")
        stopwatch.done(sum(len(rollout.completion_tokens) for rollout in rollouts))


def mlx_lm_lora(case: Case, folder: Path, stopwatch: Stopwatch, rows: int | None = None) -> None:
    """mlx-lm-lora's own loop, `train_grpo`, fed by a dataset that waits for the stopwatch. It decodes `rows` rows at
    once."""
    import mlx.optimizers as optim
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm_lora.trainer.grpo_trainer import GRPOTrainingArgs, train_grpo  # pyright: ignore[reportMissingImports]

    model, tokenizer = load(str(folder))[:2]
    reference = load(str(folder))[0].freeze()
    model.freeze()
    linear_to_lora_layers(model, case.layers, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    tokenizer = with_numbered_prompts(tokenizer, case)

    def batches(**_: Any) -> Iterator[Any]:
        for number in stopwatch.steps():
            prompts = prompt_ids(case, number)
            blank = [""] * case.prompts
            tokenizer.decoded.clear()
            yield prompts, prompts, blank, blank, None
            stopwatch.lap("train")
            stopwatch.done(
                sum(min(length + 1, case.completion) for length in tokenizer.decoded)
            )  # it leaves out the end

    def scores(completions: list[str], **_: Any) -> list[float]:
        stopwatch.lap("rollout")
        return [reward(text) for text in completions]

    with tempfile.TemporaryDirectory() as scratch:
        args = GRPOTrainingArgs(
            batch_size=rows or case.prompts,
            steps_per_report=FOREVER,
            **_settings(case, scratch),
        )
        train_grpo(
            model,
            reference,
            tokenizer,
            optim.Adam(learning_rate=RATE),
            [],
            reward_funcs=[scores],
            args=args,
            iterate_batches=batches,
            end_answer_token="",
        )


def _settings(case: Case, scratch: str) -> dict[str, Any]:
    """What mlx-lm-lora and mlx-vlm name alike."""
    return {
        "iters": FOREVER,
        "group_size": case.group_size,
        "beta": case.beta,
        "max_completion_length": case.completion,
        "temperature": case.temperature,
        "top_p": case.top_p,
        "top_k": 0,
        "steps_per_save": FOREVER,
        "adapter_file": str(Path(scratch) / "adapters.safetensors"),
    }


def mlx_tune(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """mlx-tune's own trainer, whose tokenizer and reward function drive the stopwatch."""
    _without_package_init("mlx_tune")
    from mlx_tune.model import FastLanguageModel  # pyright: ignore[reportMissingImports]
    from mlx_tune.rl_trainers import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    model, tokenizer = FastLanguageModel.from_pretrained(str(folder))
    model = FastLanguageModel.get_peft_model(model, r=RANK, lora_alpha=int(RANK * SCALE))
    hooks = _MlxTuneHooks(with_numbered_prompts(tokenizer, case), case, stopwatch)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            beta=case.beta,
            num_generations=case.group_size,
            temperature=case.temperature,
            learning_rate=RATE,
            max_completion_length=case.completion,
            max_steps=FOREVER,
            output_dir=scratch,
            logging_steps=FOREVER,
            save_steps=FOREVER,
        )
        rows = [{"prompt": str(i)} for i in range(case.prompts)]
        GRPOTrainer(model, rows, hooks.tokenizer, hooks.score, config).train()


class _MlxTuneHooks:
    """The two calls by which mlx-tune's loop is followed: it encodes a prompt when it starts on it, and scores
    completions."""

    def __init__(self, tokenizer: Any, case: Case, stopwatch: Stopwatch) -> None:
        self.tokenizer, self.case, self.stopwatch = tokenizer, case, stopwatch
        self.number, self.started, self.scored = -1, False, 0
        cls = type(tokenizer)
        cls.encode = lambda _, text, **more: self.start_prompt(int(text))

    def start_prompt(self, prompt: int) -> list[int]:
        if self.started:
            self.stopwatch.lap("train")
        if prompt == 0:
            if self.started:
                self.stopwatch.done(sum(self.tokenizer.decoded))
            self.stopwatch.begin()
            self.number, self.started = self.number + 1, True
            self.tokenizer.decoded.clear()
        return prompt_ids(self.case, self.number)[prompt]

    def score(self, text: str, answer: str) -> float:
        self.scored += 1
        if self.scored % self.case.group_size == 0:
            self.stopwatch.lap("rollout")
        return reward(text)


def unsloth_zoo(case: Case, folder: Path, stopwatch: Stopwatch, checkpointing: bool = True) -> None:
    """unsloth-zoo's own trainer for MLX, whose reward function and callbacks drive the stopwatch."""
    _without_package_init("unsloth_zoo")
    from unsloth_zoo.mlx.loader import FastMLXModel  # pyright: ignore[reportMissingImports]
    from unsloth_zoo.mlx.trainer import MLXGRPOConfig, MLXGRPOTrainer  # pyright: ignore[reportMissingImports]

    model, tokenizer = FastMLXModel.from_pretrained(str(folder), dtype="float32", load_in_4bit=False)
    adapters = {"r": RANK, "lora_alpha": int(RANK * SCALE), "use_gradient_checkpointing": checkpointing}
    model = FastMLXModel.get_peft_model(model, **adapters)
    tokenizer = with_numbered_prompts(tokenizer, case)
    tokenizer.__dict__["prompts"] = [ids for number in range(MANY) for ids in prompt_ids(case, number)]
    with tempfile.TemporaryDirectory() as scratch:
        config = MLXGRPOConfig(
            num_generations=case.group_size,
            per_device_train_batch_size=case.rows,
            gradient_accumulation_steps=1,
            max_steps=MANY,
            max_seq_length=case.prompt + case.completion,
            max_completion_length=case.completion,
            temperature=case.temperature,
            top_p=case.top_p,
            shuffle_dataset=False,
            loss_type="grpo",
            beta=case.beta,
            optim="adam",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            gradient_checkpointing=checkpointing,
            logging_steps=FOREVER,
            output_dir=scratch,
        )
        rows = [{"prompt": str(i)} for i in range(MANY * case.prompts)]
        hooks = _UnslothHooks(stopwatch)
        trainer = MLXGRPOTrainer(model, tokenizer, rows, args=config, reward_funcs=hooks.score, callbacks=[hooks])
        stopwatch.begin()
        trainer.train()


class _UnslothHooks:
    """The reward function and the callback by which unsloth-zoo's loop is followed."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch, self.tokens = stopwatch, 0

    def score(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.stopwatch.lap("rollout")
        self.tokens = sum(map(len, completion_ids))
        return [reward(text) for text in completions]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stopwatch.lap("train")
        self.stopwatch.done(self.tokens)
        self.stopwatch.begin()


def mlx_vlm(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """mlx-vlm's own trainer on its Qwen3-VL, or text-only Qwen3; its dataset, reward function and report drive the
    stopwatch."""
    _without_package_init("mlx_vlm")
    import mlx.optimizers as optim
    from mlx_lm.utils import load_tokenizer
    from mlx_vlm.trainer import GRPOTrainingArgs, Trainer, get_peft_model  # pyright: ignore[reportMissingImports]
    from mlx_vlm.utils import load_model  # pyright: ignore[reportMissingImports]

    model, reference = load_model(folder), load_model(folder)
    get_peft_model(model, rank=RANK, alpha=RANK * SCALE, dropout=0.0, verbose=False)
    hooks = _MlxVlmHooks(with_numbered_prompts(load_tokenizer(folder), case), case, folder, stopwatch)
    with tempfile.TemporaryDirectory() as scratch:
        args = GRPOTrainingArgs(
            batch_size=case.prompts,
            max_seq_length=case.prompt + case.completion,
            steps_per_report=1,
            **_settings(case, scratch),
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=hooks,
            processing_class=hooks.tokenizer,
            optimizer=optim.Adam(learning_rate=RATE),
            reference_model=reference,
            reward_funcs=[hooks.score],
            prepared=True,
            training_callback=hooks,
        )
        stopwatch.begin()
        trainer.train()


class _MlxVlmHooks:
    """The dataset, the reward function and the callback by which mlx-vlm's loop is followed."""

    def __init__(self, tokenizer: Any, case: Case, folder: Path, stopwatch: Stopwatch) -> None:
        self.tokenizer, self.case, self.stopwatch, self.number = tokenizer, case, stopwatch, 0
        self.folder, self.pixels = folder, None
        if case.image:
            from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (  # pyright: ignore[reportMissingImports]
                Qwen3VLImageProcessor,
            )

            self.pixels = Qwen3VLImageProcessor(max_pixels=case.image**2)

    def __len__(self) -> int:
        return self.case.prompts

    def __getitem__(self, index: int) -> dict[str, Any]:
        import mlx.core as mx

        ids = mx.array(prompt_ids(self.case, self.number)[index])
        inputs = {"input_ids": ids, "attention_mask": mx.ones_like(ids)}
        if self.pixels is not None:
            read = self.pixels([picture(self.case, self.folder, index, self.number)])
            inputs |= {name: mx.array(x) for name, x in read.items()}
        return {"inputs": inputs, "prompt": "", "answer": None}

    def score(self, completions: list[str], **_: Any) -> list[float]:
        self.stopwatch.lap("rollout")
        return [reward(text) for text in completions]

    def on_train_loss_report(self, _: dict[str, float]) -> None:
        self.stopwatch.lap("train")
        lengths = self.tokenizer.decoded
        self.stopwatch.done(sum(min(length + 1, self.case.completion) for length in lengths))  # it leaves out the end
        lengths.clear()
        self.number += 1
        self.stopwatch.begin()


def _without_package_init(name: str) -> None:
    """Make a package's modules importable without running its `__init__`, which needs packages for speech and
    vision."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package


CONTENDERS: dict[str, Contender] = {
    "unsloth-zoo": unsloth_zoo,
    "unsloth-zoo, no checkpointing": partial(unsloth_zoo, checkpointing=False),
    "mlxrl": mlxrl,
    "mlx-lm-lora": mlx_lm_lora,
    "mlx-lm-lora, all rows": lambda case, *more: mlx_lm_lora(case, *more, rows=case.rows),
    "mlx-vlm": mlx_vlm,
    "mlx-tune": mlx_tune,
}
