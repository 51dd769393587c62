"""`check` and `train` agree: settings that look sound over tiny models and datasets, checked, and trained for one step.

A case changes one to five settings of a sound run to values that are valid by themselves. Where `check` finds no fault, the run takes its first
step; where it finds some, `train` refuses with the same sentences and leaves no folder. A case fails where a run that was checked ends before its
first step, whatever it says then.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.cli.new_run import new_run
from backend.run.ending import Ending, ending_of
from backend.run.parts import SharedParts
from backend.run.preflight import preflight
from backend.run.run_inputs import RunInputs
from backend.run.run_process import open_run
from backend.spec.config import SETTINGS, Config, parse
from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder
from tests.support.adapters import save_adapters
from tests.support.random_models import tiny_model
from tests.support.small_run import QUICK, low_half, write_config, write_rows
from tests.torture.report import Report

Raw = dict[str, Any]


class Place:
    """Models, datasets, adapters and a reward file that the cases draw from."""

    def __init__(self, root: Path) -> None:
        from backend.models.policy import load_policy

        self.root = root
        self.runs = root / "runs"
        self.runs.mkdir(parents=True)
        self.models = [
            tiny_model(root / "model"),
            tiny_model(root / "wide", hidden=64, layers=1, dtype="bfloat16"),
            tiny_model(root / "quantised", hidden=64, layers=1, bits=4),
            tiny_model(root / "other-tokens", vocab=300),
            tiny_model(root / "experts", "qwen3_moe", layers=1),
        ]
        for split, count in (("train", 6), ("valid", 2), ("test", 2)):
            write_rows(root / "splits" / f"{split}.jsonl", count)
        write_rows(root / "train-only" / "train.jsonl", 3)
        write_rows(root / "one.jsonl", 1)
        (root / "no-answer.jsonl").write_text(json.dumps({"prompt": "Why?", "system": "Be brief."}) + "\n")
        (root / "long.jsonl").write_text(json.dumps({"prompt": "seven " * 500, "answer": "1"}) + "\n")
        (root / "odd-valid").mkdir()
        shutil.copy(root / "one.jsonl", root / "odd-valid" / "train.jsonl")
        shutil.copy(root / "long.jsonl", root / "odd-valid" / "valid.jsonl")
        self.data = [
            root / name for name in ("splits", "train-only", "one.jsonl", "no-answer.jsonl", "long.jsonl", "odd-valid")
        ]
        self.rewards = low_half(root)
        self.adapters = [root / "adapters", root / "adapters-of-another"]
        for model, folder in zip(self.models, self.adapters, strict=False):
            config = parse(self.sound() | {"model": str(model), "rank": 4})
            save_adapters(load_policy(config), config, folder)

    def sound(self) -> Raw:
        return QUICK | {"model": str(self.models[0]), "data": str(self.root / "splits"), "iters": 2}


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _any_setting(raw: Raw, rng: random.Random, place: Place) -> None:
    """A value of the setting's own kind, within its limits, and small enough for a step of milliseconds."""
    about = SETTINGS[
        rng.choice([key for key, about in SETTINGS.items() if about.kind in ("int", "float", "bool", "choice")])
    ]
    if about.kind == "bool":
        raw[about.key] = rng.random() < 0.5
    elif about.kind == "choice":
        raw[about.key] = rng.choice(about.choices).value
    else:
        numbers = [0, 1, 2, 3, 5, 0.1, 0.5, 0.9, 1.5, about.low, about.default]
        whole = about.kind == "int"
        raw[about.key] = rng.choice(
            [number for number in numbers if number is not None and (not whole or number == int(number))]
        )
        if whole:
            raw[about.key] = int(raw[about.key])


def _fine_tune(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= {
        "model": str(rng.choice(place.models)), "train_type": rng.choice(["lora", "lora", "dora", "full"]), "quantization": rng.choice(["none", "none", "4", "6", "8", "mxfp4"]),
        "dtype": rng.choice(["auto", "auto", "float32", "bfloat16", "float16"]),
    }  # fmt: skip


def _layers(raw: Raw, rng: random.Random, place: Place) -> None:
    names = [
        "self_attn.q_proj",
        "mlp.up_proj",
        "q_proj",
        "nosuch",
        "lm_head",
        "embed_tokens",
        "model.embed_tokens",
        "",
        "mlp",
        "mlp.switch_mlp.up_proj",
        "mlp.gate",
        "n" * 300,
    ]
    raw |= {
        "lora_keys": rng.sample(names, rng.choice([0, 1, 1, 2])),
        "num_layers": rng.choice([-1, 1, 2, 16]),
        "rank": rng.choice([1, 2, 8, 512]),
    }


def _data(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= {
        "data": str(rng.choice(place.data)),
        "steps_per_eval": rng.choice([0, 1, 2]),
        "val_batches": rng.choice([-1, 0, 1]),
        "test": rng.random() < 0.3,
    }
    if rng.random() < 0.5:
        raw["validation_split"] = rng.choice([0.01, 0.3, 0.5, 0.9])
    if rng.random() < 0.3:
        key = rng.choice(
            [
                "train_split",
                "valid_split",
                "test_split",
                "prompt_feature",
                "answer_feature",
                "type_feature",
                "system_feature",
            ]
        )
        raw[key] = rng.choice(["train", "valid", "validation", "test", "prompt", "answer", "nosuch", ""])
    if rng.random() < 0.3:
        raw["max_completion_length"] = rng.choice([1, 6, 190, 199])


def _rewards(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= place.rewards
    names = ["low_half", "r1_int", "r1_accuracy", "keyword(word=so)", "r1_count_xml", "nosuch"]
    functions = raw["reward_functions"] = rng.sample(names, rng.choice([0, 1, 1, 2, 3]))
    weights = [[], [1.0] * len(functions), [0.0] * len(functions), [-1.0] * len(functions), [1.0]]
    raw["reward_weights"] = rng.choice(weights)
    raw["reward_weight_schedule"] = rng.choice(["constant", "linear", "linear", "adaptive"])
    raw["reward_weights_final"] = rng.choice(weights)
    if rng.random() < 0.2:
        raw["reward_functions_file"] = ""


def _length(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= {
        "iters": rng.choice([1, 2, 5]),
        "epochs": rng.choice([0, 0, 1, 2]),
        "batch_size": rng.choice([1, 2, 9]),
        "steps_per_generation": rng.choice([1, 2]),
    }


def _stages(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= {key: place.rewards[key] for key in ("reward_functions_file",)}
    stages: list[Raw] = []
    for _ in range(rng.choice([1, 2, 3])):
        stage: Raw = {"iters": rng.choice([1, 2, 3])}
        if rng.random() < 0.7:
            stage["reward_functions"] = rng.sample(
                ["low_half", "r1_int", "r1_accuracy", "nosuch"], rng.choice([0, 1, 1, 2])
            )
        if rng.random() < 0.6:
            stage["reward_weights"] = rng.choice([[], [1.0], [1.0, 0.5], [0.0], [0.0, 0.0]])
        stages.append(stage)
    raw["stages"] = stages


def _ends(raw: Raw, rng: random.Random, place: Place) -> None:
    conditions = [
        "kl > 0.8",
        "reward >= 2.5",
        "eval/reward > 3",
        "rewards/low_half/mean > 1",
        "rewards/nosuch > 1",
        "r1_int > 1",
        "loss < -9",
        "kl >",
        "eval/kl > 1",
    ]
    raw |= {
        "stop_when": rng.sample(conditions, rng.choice([0, 1, 2])),
        "early_stopping_patience": rng.choice([0, 1, 2]),
        "steps_per_eval": rng.choice([0, 1]),
    }


def _reference(raw: Raw, rng: random.Random, place: Place) -> None:
    references = [*place.models, *place.adapters, place.root / "splits", place.root / "absent"]
    raw |= {
        "beta": rng.choice([0.0, 0.1]), "reference_model_path": str(rng.choice(references)) if rng.random() < 0.6 else "", "sync_ref_model": rng.random() < 0.3, "log_kl": rng.random() < 0.3,
        "ratio_against": rng.choice(["old", "old", "reference"]), "kl_estimator": rng.choice(["k3", "k3", "documented"]), "ref_model_sync_steps": 1,
    }  # fmt: skip


def _output(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= {
        "record_tokens": rng.random() < 0.5,
        "fuse": rng.random() < 0.5,
        "lm_studio_name": rng.choice(["", "tiny", "a/b", "..", "con"]),
        "run_name": rng.choice(["", "mine", "a b", ".."]),
    }


def _prompts(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= {
        "chat_template_kwargs": rng.choice([{}, {"enable_thinking": True}, {"tokenize": True}, {"a b": [1]}]),
        "stop": rng.choice([[], ["\n"], [""], ["x" * 500]]),
        "system_prompt": rng.choice(["", "Be brief.", "long " * 400]),
    }


def _optimizer(raw: Raw, rng: random.Random, place: Place) -> None:
    raw |= {
        "optimizer": rng.choice([choice.value for choice in SETTINGS["optimizer"].choices]), "lr_schedule": rng.choice(["constant", "cosine", "linear"]),
        "lr_warmup_steps": rng.choice([0, 1, 2, 10**9]), "lr_decay_fraction": rng.choice([1e-9, 0.8, 10]), "lr_final": rng.choice([0.0, 1e-6, 1.0]), "learning_rate": rng.choice([1e-5, 1e-12, 10.0]),
    }  # fmt: skip


CHANGES: tuple[Callable[[Raw, random.Random, Place], None], ...] = (
    _any_setting, _any_setting, _fine_tune, _layers, _data, _rewards, _length, _stages, _ends, _reference, _output, _prompts, _optimizer,
)  # fmt: skip

SMALL = {
    "batch_size": 9, "group_size": 8, "gradient_accumulation_steps": 3, "steps_per_generation": 3, "num_iterations": 3, "num_generations_eval": 4, "dynamic_sampling_rounds": 3,
}  # fmt: skip
"""A step of a case has no more than this."""


def draw(seed: int, place: Place) -> Raw:
    rng = random.Random(f"agreement {seed}")
    raw = place.sound()
    for _ in range(rng.choice([1, 2, 2, 3, 5])):
        rng.choice(CHANGES)(raw, rng, place)
    for key, most in SMALL.items():
        if isinstance(raw.get(key), int):
            raw[key] = min(raw[key], most)
    return raw | {"reward_isolation": "thread", "reward_timeout": 30.0}


UNSEEN = "dtype: The model "
"""How the one sentence begins that only computing shows: mlx has no product with experts in 16 bits on a CPU, and says so when it is evaluated."""


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def first_step(config: Config, run: RunFolder, inputs: RunInputs, shared: SharedParts) -> Ending:
    """How a run ends that is left after its first step."""
    trainer, saved = open_run(config, run, shared=shared)  # no signals: they are this process's

    def work() -> Ending:
        trainer.load(saved, "agreement", inputs)
        trainer.train_until(1)
        return Ending("finished", trainer.state.step, "", 0)

    try:
        return ending_of(work, lambda: trainer.state.step)
    finally:
        trainer.close()


def case(raw: Raw, place: Place) -> tuple[str, bool]:
    """(what is wrong with a case or "", whether it was trained)."""
    try:
        inputs = preflight(raw)
    except Mistake as mistake:
        return refused(raw, mistake, place), False
    config = parse(raw)
    run = RunFolder(place.runs / "mine")
    try:
        run.path.mkdir()
        write_config(run.config, raw)
        ending = first_step(config, run, inputs, SharedParts(None))
    finally:
        inputs.scorer.close()
        shutil.rmtree(run.path)
    is_well = (ending.kind == "finished" and ending.step == 1) or ending.sentence.startswith(UNSEEN)
    wrong = "" if is_well else f"checked, and ended before its first step: {ending.sentence} {ending.traceback}"
    return wrong, True


def refused(raw: Raw, mistake: Mistake, place: Place) -> str:
    """What is wrong where `check` has found faults: `train` is to find the same, and to make nothing."""
    try:
        new_run(raw, place.runs, None)
    except Mistake as again:
        wrong = "" if again.faults == mistake.faults else f"check says {mistake.faults}, train {again.faults}"
    else:
        wrong = f"check says {mistake.faults}, and train makes a run"
    return wrong or ", ".join(f"left {path.name}" for path in place.runs.iterdir())


def main(count: int, seed: int) -> int:
    """`count` cases; returns how many failed."""
    report, trained = Report("agreement"), 0
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        place = Place(Path(folder))
        for number in range(seed, seed + count):
            raw = draw(number, place)
            try:
                wrong, is_trained = case(raw, place)
            except Exception:
                wrong, is_trained = traceback.format_exc(), False
            trained += is_trained
            if wrong:
                changed = {key: value for key, value in raw.items() if place.sound().get(key) != value}
                report.failed(number, wrong.strip().splitlines()[-1][:300], f"{wrong}\n{changed}")
            else:
                report.passed()
    print(f"   {trained:,} of {count:,} took their first step", flush=True)
    return report.failures
