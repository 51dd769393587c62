"""Files of other programs mean here what they mean there: units, schedules, adapters, rewards."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import SETTINGS, parse
from backend.config.other_programs.mlx_lm import MLX_LM_LORA, OTHER_MODES
from backend.config.other_programs.translation import (
    FOREIGN_WORDS,
    NAMES,
    account,
    other_names,
    program_of,
    read_file,
    summary,
    translate,
)
from backend.config.other_programs.trl import REWARDS, TRL
from backend.config.setting import NEVER
from backend.utils.documents import parse_yaml
from tests.support.cases import cases

NEEDED = {"model": "owner/model", "data": "owner/rows"}
BATCH, SAMPLED = "per_device_train_batch_size", "vllm_importance_sampling_"
SCHEDULE, OPTIONS = "lr_scheduler_type", "lr_scheduler_kwargs"
CONTENT = {"reward_content_type": "choice_correctness", "reward_format_weight": 0.3, "reward_content_weight": 0.7}
THEIRS = {"train": True, "batch_size": 2, "iters": 1000, "gradient_accumulation_steps": 10}  # a file for mlx-lm-lora


def made(**raw: Any) -> dict[str, Any]:
    """What a file becomes, without faults."""
    translation = translate(raw)
    assert translation.faults == []
    return translation.values


def sentence(**raw: Any) -> str:
    """The sentence of the only fault of a file."""
    (fault,) = translate(raw).faults
    return fault.sentence


@cases(
    ("size", "accumulated", "group", "batch", "pieces"),
    [
        *((8, 1, 8, 1, 1), (8, 4, 8, 1, 4), (16, 4, 8, 2, 4), (64, 1, 8, 8, 1)),
        *((2, 8, 8, 1, 2), (1, 8, 8, 1, 1), (12, 2, 8, 1, 3), (24, 1, 8, 3, 1)),
        *((1, 4, 8, 1, 1), (4, 2, 16, 1, 1), (4, 3, 8, 1, 2)),  # not whole groups: rounded up
    ],
)
def test_completions_become_prompts(size: int, accumulated: int, group: int, batch: int, pieces: int) -> None:
    """The completions of an update are the same; a piece is at most a batch there, or one prompt if that is more."""
    values = made(**{BATCH: size, "gradient_accumulation_steps": accumulated, "num_generations": group})
    assert (values["batch_size"], values["gradient_accumulation_steps"]) == (batch, pieces)
    assert 0 <= batch * pieces * group - size * accumulated < group


def test_a_batch_of_completions_is_told_in_prompts_and_counted_in_whole_numbers() -> None:
    raw = {BATCH: 4, "gradient_accumulation_steps": 3, "num_generations": 8}
    told = "4 × 3 completions an update are 2 prompts of 8, rounded up to whole groups: 16 completions"
    translation = translate(raw)
    assert next(word.sentence for word in translation.words if word.word == BATCH).endswith(told)
    assert f"; {told}; " in summary(translation, "theirs.yaml")
    assert "must be a whole number above 0" in sentence(per_device_train_batch_size=0.5)
    assert "must be a number, not many" in sentence(per_device_train_batch_size="many")


@pytest.mark.parametrize(
    ("raw", "pieces", "rollouts"),
    [
        ({}, 2, 1),  # TRL samples the batches of one update at once
        ({"steps_per_generation": 4}, 2, 2),
        ({"generation_batch_size": 64}, 2, 4),
        ({"steps_per_generation": 1}, 2, 1),  # twice as often within one update: the policy is the same
    ],
)
def test_what_is_sampled_at_once_is_counted_in_updates(raw: dict[str, Any], pieces: int, rollouts: int) -> None:
    values = made(per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=8, **raw)
    assert values.get("batch_size") == 1 and values["gradient_accumulation_steps"] == pieces
    assert values.get("steps_per_generation", 1) == rollouts


def test_rollouts_that_no_step_of_ours_makes_are_refused() -> None:
    batch = {BATCH: 8, "num_generations": 8}
    says = sentence(**batch, gradient_accumulation_steps=2, steps_per_generation=3)
    assert "must be a multiple of gradient_accumulation_steps (2)" in says
    assert "say the same" in sentence(**batch, steps_per_generation=2, generation_batch_size=16)
    assert "must be a multiple of per_device_train_batch_size (8)" in sentence(**batch, generation_batch_size=12)
    faults = translate(batch | {"generation_batch_size": 12, "think_end_tag": "x"}).faults
    assert [fault.setting for fault in faults] == ["think_end_tag", "generation_batch_size"], "every fault at once"


def test_the_length_and_rhythm_of_a_run_are_counted_in_steps() -> None:
    """Four updates a step: two batches a rollout, each gone through twice."""
    raw = (
        {BATCH: 8, "num_generations": 8, "steps_per_generation": 2, "num_iterations": 2}
        | {"max_steps": 402, "save_steps": 100, "eval_strategy": "steps", "eval_steps": 0.25, "logging_steps": 1}
        | {"eval_delay": 9, "num_train_epochs": 3.0}
    )
    values = made(**raw)
    assert values["iters"] == 101 and "epochs" not in values, "max_steps comes before passes, as there"
    assert (values["save_every"], values["steps_per_eval"], values["steps_per_report"]) == (25, 26, 1)
    assert values["eval_delay"] == 3 and values["val_batches"] == -1
    assert made(num_train_epochs=3.0, max_steps=-1) == {"epochs": 3}


@cases(
    ("raw", "ours"),
    [
        ({"eval_strategy": "no"}, {"steps_per_eval": 0}),
        ({"eval_strategy": False}, {"steps_per_eval": 0}),  # YAML reads no as false
        ({"evaluation_strategy": "steps", "eval_steps": 5}, {"steps_per_eval": 5, "val_batches": -1}),
        ({"save_strategy": "no", "save_steps": 500}, {"save_every": NEVER}),
        ({"save_strategy": "best"}, {}),
        ({"resume_from_checkpoint": False}, {}),
        ({"model_name_or_path": "a/b", "model_revision": "v2"}, {"model": "a/b@v2"}),
        ({"model_name_or_path": "a/b", "model_revision": "main"}, {"model": "a/b"}),
        ({"model_name_or_path": "a/b", "model_init_kwargs": {"revision": "v2"}}, {"model": "a/b@v2"}),
        ({"eval_strategy": "epoch", "eval_steps": 9}, {"steps_per_eval": -1, "val_batches": -1}),
        ({"save_strategy": "epoch", "save_steps": 500}, {"save_every": -1}),
        ({"logging_strategy": "epoch"}, {}),
    ],
)
def test_strategies(raw: dict[str, Any], ours: dict[str, Any]) -> None:
    assert made(**raw) == ours


@cases(
    ("raw", "says"),
    [
        ({"eval_strategy": "hour"}, "eval_strategy must be no, steps or epoch, not hour."),
        ({"eval_strategy": "epoch", "eval_delay": 1}, "eval_delay counts epochs with eval_strategy: epoch"),
        ({"save_steps": 0.1}, "give a number of steps, or with a share of the run its max_steps too."),
        ({"num_train_epochs": 0.5}, "must be a whole number of passes here, not 0.5; or give max_steps."),
        ({"metric_for_best_model": "eval_loss"}, "eval_reward is nearest."),
        ({"optim": "galore_adamw"}, "There is no optimizer galore_adamw here; adamw is nearest"),
        ({"optim_args": "foreach=true"}, "optim_args has foreach"),
        ({SCHEDULE: "reduce_lr_on_plateau"}, "The schedule reduce_lr_on_plateau of transformers is not built"),
        ({SCHEDULE: [{"adamw": "owner/"}, "null", 1000]}, "of transformers is not built"),
        ({"optim_target_modules": [[1] * 1000, 1_000_000]}, "has no counterpart here"),
        ({BATCH: 10**300, "num_generations": 2}, "completions is more than the 1,000,000,000,000"),
        ({"think_end_tag": [[1] * 1000]}, "has no counterpart here"),
        ({SCHEDULE: "linear", OPTIONS: {"odd": 1}}, "linear has no odd here"),
        ({SCHEDULE: "linear", OPTIONS: "odd"}, "must be a mapping of options, not odd"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs has num_beams"),
        ({"datasets": [{"path": "a/b"}, {"path": "c/d"}]}, "must list one dataset here"),
        ({"reward_content_type": "bleu"}, "it is one of jaccard, math_eval, choice_correctness."),
        ({"hf_dataset": [1, 2]}, "must be one mapping with a path"),
        ({"peft_config": {"target_modules": ".*_proj"}}, "target_modules is a pattern"),
        *(({"train_mode": mode}, f"There is no mode {mode} here: ") for mode in OTHER_MODES),
        ({"train_mode": "ORPO"}, "orpo here: it learns from pairs of answers; here a reward function"),
        ({"train_mode": "rlhf-reinforce"}, "a reward function and beta, the KL penalty, do the same here."),
    ],
)
def test_what_has_no_counterpart_is_one_sentence(raw: dict[str, Any], says: str) -> None:
    assert says in sentence(**raw) and len(sentence(**raw)) <= 200


@cases(
    ("raw", "ours"),
    [
        ({SCHEDULE: "cosine", "warmup_ratio": 0.1}, {"lr_warmup_ratio": 0.1, "lr_decay_fraction": 0.9}),
        ({"warmup_steps": 10, "max_steps": 40}, {"lr_warmup_steps": 10, "lr_decay_fraction": 0.75}),
        ({"warmup_steps": 10, "iters": 40, "lr_schedule": "linear"}, {"warmup_steps": 10}),  # ours: supervised
        ({"warmup_steps": 0.2, SCHEDULE: "constant_with_warmup"}, {"lr_warmup_ratio": 0.2}),
        ({SCHEDULE: "cosine_with_restarts", OPTIONS: {"num_cycles": 3}}, {"lr_cycles": 3, "lr_final": 0.0}),
        ({SCHEDULE: "polynomial", OPTIONS: '{"power": 2}'}, {"lr_power": 2, "lr_final": 1e-7}),
        ({SCHEDULE: "cosine_with_min_lr", "learning_rate": 1e-4, OPTIONS: {"min_lr_rate": 0.1}}, {"lr_final": 1e-5}),
        (
            {SCHEDULE: "warmup_stable_decay", "max_steps": 9, OPTIONS: {"num_decay_steps": 3}},
            {"lr_decay_fraction": 1 / 3},
        ),
        ({SCHEDULE: "constant"}, {"lr_schedule": "constant"}),
        ({"optim": "paged_adamw_8bit"}, {"optimizer": "adamw", "optimizer_bits": "8"}),
        (
            {BATCH: 8, "success_reward_threshold": 0.9},  # of SDPOConfig, whose teacher is `ema`
            {"distillation_weight": 1.0, "teacher_model_kind": "base", "sync_ref_model": True}
            | {"ref_model_mixup_alpha": 0.05, "ref_model_sync_steps": 1, "success_reward_threshold": 0.9},
        ),
        ({BATCH: 8, "teacher_model_kind": "live", "distillation_weight": 0.5}, {"teacher_model_kind": "live"}),
        ({"optim": "lion_32bit", "optim_args": "beta1=0.8"}, {"optimizer": "lion", "adam_beta1": "0.8"}),
        ({"adafactor": True}, {"optimizer": "adafactor"}),
        ({"use_peft": True, "lora_r": 8, "lora_alpha": 16}, {"train_type": "lora", "rank": 8, "lora_alpha": 16}),
        ({"use_peft": True, "lora_target_modules": "q_proj,v_proj"}, {"lora_keys": ["q_proj", "v_proj"]}),
        ({"use_peft": True, "use_dora": True}, {"train_type": "dora"}),
        ({"use_peft": False}, {"train_type": "full"}),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"quantization": "4"}),
        ({"bf16": True, "dtype": "float32", "loss_type": "dapo"}, {"dtype": "bfloat16", "grpo_loss_type": "dapo"}),
        ({"fp16": False, "model_init_kwargs": {"torch_dtype": "bfloat16"}}, {"dtype": "bfloat16"}),
        ({"use_cpu": True, "no_cuda": False}, {"device": "cpu"}),
        ({"reward_funcs": ["my_lib.rewards.custom"]}, {"reward_functions": ["my_lib/rewards.py::custom"]}),
        ({"reward_funcs": "trl.rewards.accuracy_reward"}, {"answer_feature": "solution"}),
        ({"reward_funcs": "owner/rm.v2, r1_int"}, {"reward_functions": ["owner/rm.v2", "r1_int"]}),
        (
            {"reward_model_name_or_path": "owner/rm", "reward_funcs": ["r1_int"], "reward_weights": [2, 1]},
            {"reward_functions": ["owner/rm", "r1_int"], "reward_weights": [2, 1]},
        ),
        ({"reward_funcs": "accuracy_reward", "answer_feature": "gold"}, {"answer_feature": "gold"}),
        *(
            ({"reward_funcs": f"trl.rewards.{path}"}, {"reward_functions": [ours]})
            for path, ours in (
                *(("accuracy_reward",) * 2, ("format_rewards.think_format_reward", "think_format_reward")),
                ("other_rewards.get_soft_overlong_punishment", REWARDS["get_soft_overlong_punishment"]),
                ("reasoning_accuracy_reward", REWARDS["reasoning_accuracy_reward"]),
            )
        ),
        ({SAMPLED + "correction": True}, {"sampling_correction": "sequence_mask"}),
        ({SAMPLED + "correction": False, SAMPLED + "mode": "token_mask"}, {"sampling_correction": "none"}),
        *(
            ({f"{vllm}{word}_regex": "a+", "loss_type": "dapo"}, {"output_regex": "a+", "grpo_loss_type": "dapo"})
            for vllm, word in product(("", "vllm_"), ("guided_decoding", "structured_outputs"))
        ),
        ({"generation_kwargs": {"stop_strings": "</s>"}}, {"stop": ["</s>"]}),
        ({"metric_for_best_model": "eval_rewards/a/mean"}, {"best_metric": "eval/rewards/a/mean"}),
        ({"metric_for_best_model": "eval_a", "greater_is_better": False}, {"best_is_lowest": True}),
        ({"max_prompt_length": 256, "loss_type": "grpo"}, {"max_prompt_length": 256, "long_prompts": "cut_left"}),
        ({"max_completion_length": 4096, "loss_type": "grpo"}, {"max_seq_length": 4608}),
        ({"datasets": [{"path": "a/b", "name": "main", "split": "train"}]}, {"data": "a/b", "dataset_config": "main"}),
        ({"report_to": "wandb,tensorboard"}, {"report_to": ["wandb", "tensorboard"]}),
        ({"report_to": "none"}, {"report_to": ["none"]}),
        ({"teacher_model_name_or_path": "a/b", "beta": 0.5}, {"teacher_model": "a/b", "distillation_beta": 0.5}),
        ({"teacher_model_name_or_path": "a/b", BATCH: 4}, {"batch_size": 4, "group_size": 1}),
        ({"scale_rewards": True, "use_adaptive_entropy": True}, {"scale_rewards": "group", "entropy_adaptive": True}),
        ({"wand": "project", "train": True}, {"report_to": ["wandb"], "tracker_project": "project"}),
        ({"train_mode": "SFT", "chat_feature": "chat"}, {"train_mode": "sft", "messages_feature": "chat"}),
        ({"fine_tune_type": "lora", "train": True}, {"train_mode": "sft"}),
        ({"fine_tune_type": "lora", "reward_functions": "r1_int"}, {"train_mode": None}),
        ({"train_mode": "sft", "hf_dataset": {"path": "a", "completion_feature": "y"}}, {"completion_feature": "y"}),
        ({"train_mode": "sft", "hf_dataset": {"path": "a", "chat_feature": "z"}}, {"messages_feature": "z"}),
        ({"hf_dataset": {"path": "a/b", "train_split": "x", "completion_feature": "y"}}, {"answer_feature": "y"}),
        ({"resume_adapter_file": "a.safetensors"}, {"adapter": "a.safetensors"}),
        ({"optimizer": "adam", "optimizer_config": {"adam": {"eps": 1e-6}}}, {"adam_epsilon": 1e-6}),
        ({"importance_sampling_level": "none"}, {"importance_sampling_level": "token"}),
        (CONTENT, {"reward_functions": ["r1_soft_format_reward_func", "choice_correctness"]}),
        (CONTENT, {"reward_weights": [0.3, 0.7]}),
        ({"train_dataset_path": "train.jsonl", "num_rollout_samples": 4}, {"data": "train.jsonl", "group_size": 4}),
        ({"use_wandb": True, "wandb_project": "p"}, {"report_to": ["wandb"], "tracker_project": "p"}),
    ],
)
def test_words_become_settings(raw: dict[str, Any], ours: dict[str, Any]) -> None:
    values = made(**raw)
    for key, value in ours.items():
        assert values.get(key) == (pytest.approx(value) if isinstance(value, float) else value), key


def test_other_programs_learn_the_prompt_too() -> None:
    of_mlx_lm = read_file({"fine_tune_type": "lora", "data": "d"})
    assert of_mlx_lm.defaults == {"batch_size": 4, "optimizer": "adam", "test_batches": 500, "mask_prompt": False}
    assert read_file({"train_mode": "sft", "load_in_4bits": True}).defaults["mask_prompt"] is False
    assert "mask_prompt" not in read_file({"train_mode": "grpo", "load_in_4bits": True}).defaults


TEXTS = ("{},{}", "{}, {}", " {} ,{} ", "[{}, {}]", "['{}', '{}']", '["{}","{}"]', "'{}', '{}'")


@cases(
    ("word", "key", "parts"),
    [
        *((word, "lora_keys", ["q_proj", "v_proj"]) for word in ("lora_keys", "lora_target_modules")),
        *((word, "modules_to_save", ["norm", "lm_head"]) for word in ("modules_to_save", "lora_modules_to_save")),
        *((word, "reward_functions", ["a_b", "c"]) for word in ("reward_functions", "reward_funcs")),
        ("reward_weights", "reward_weights", ["2.0", "1.5"]),
        ("report_to", "report_to", ["wandb", "tensorboard"]),
        ("stop_when", "stop_when", ["reward > 0.9", "kl > 1"]),
        ("target_modules", "lora_keys", ["q_proj", "v_proj"]),
    ],
)
def test_a_list_may_be_text_with_commas(word: str, key: str, parts: list[str]) -> None:
    for value in (*(text.format(*parts) for text in TEXTS), [f" {parts[0]}", f"{parts[1]} "]):
        raw = {"peft_config": {word: value}} if word == "target_modules" else {word: value}
        assert made(**raw)[key] == parts, value


def test_iterations_of_mlx_lm_lora_are_batches_of_which_every_kth_updates() -> None:
    """Its own file and ours sample the same prompts and make the same updates; ours once sampled ten times as many."""
    config = parse(NEEDED | THEIRS | {"steps_per_eval": 200, "save_every": 25, "steps_per_report": 10})
    assert config.iters == 100 and config.prompts_per_step == 20
    assert config.iters * config.prompts_per_step == 1000 * 2
    assert (config.steps_per_eval, config.save_every, config.steps_per_report) == (20, 3, 1)
    told = {word.word: word.sentence for word in translate(THEIRS | {"iters": 7}).words}
    says = "its 7 iterations are 1 update of 10 batches each; the last has 7 there and 10 here"
    assert told["gradient_accumulation_steps"].endswith(says)


@pytest.mark.parametrize(
    "ours", [{}, {"group_size": 4}, {"num_generations": 4}, {"lora_parameters": {"rank": 4}, "num_generations": 4}]
)
def test_in_a_file_of_ours_and_in_a_mixed_one_a_step_is_k_batches(ours: dict[str, Any]) -> None:
    config = parse(NEEDED | ours | {"iters": 1000, "gradient_accumulation_steps": 10, "batch_size": 2})
    assert config.iters == 1000 and config.prompts_per_step == 20


def test_iterations_come_before_epochs_in_mlx_lm_lora() -> None:
    assert "epochs" not in made(**THEIRS, epochs=3)
    assert made(epochs=3, iters=100)["epochs"] == 3, "in a file of ours the other way round"


@cases(
    ("raw", "word"),
    [
        ({"optimizer": "adam"}, "optimizer"),
        ({"optimizer": "adamw", "optimizer_config": {"adamw": {"eps": 1e-6}}}, "optimizer_config"),
        ({"model": "a/b"}, "model"),
        ({"optimizer": "adam", "optimizer_config": {"adam": {"bias_correction": True}}}, ""),
        ({"optimizer": "muon"}, ""),
    ],
)
def test_adam_corrects_its_bias_here(raw: dict[str, Any], word: str) -> None:
    words = translate(THEIRS | {"model": "a/b"} | raw).words
    assert [read.word for read in words if "corrects its bias" in read.sentence] == ([word] if word else [])


def test_a_file_belongs_to_the_only_program_whose_own_words_stand_in_it() -> None:
    assert program_of({"num_generations": 8, "beta": 0.0}) is TRL
    assert program_of({"train": True, "iters": 5}) is MLX_LM_LORA
    assert program_of({"train": None, "iters": 5}) is None
    assert program_of({"group_size": 8, "gradient_accumulation_steps": 4, "learning_rate": 1e-5}) is None
    assert program_of({"num_generations": 8, "lora_parameters": {}}) is None
    assert translate({"num_generations": 8, "lora_parameters": {}}).is_mixed
    assert not translate({"num_generations": 8}).is_mixed
    assert program_of(dict.fromkeys(SETTINGS, 1)) is None, "no key of ours is a mark"


@cases(
    ("change", "ours"),
    [
        ({BATCH: 32}, {"batch_size": 4, "group_size": 8, "gradient_accumulation_steps": 2}),
        ({"num_generations": 4}, {"batch_size": 4, "group_size": 4}),
        ({"gradient_accumulation_steps": 1}, {"batch_size": 2, "gradient_accumulation_steps": 1}),
        ({"batch_size": 1}, {"batch_size": 1, "gradient_accumulation_steps": 2}),
        ({"learning_rate": 1e-3}, {"learning_rate": 1e-3}),
        ({"max_steps": 5}, {"iters": 5}),
        ({"max_steps": None}, {"iters": None}),
        ({"iters": None}, {"iters": None}),
    ],
)
def test_a_change_by_a_foreign_word_replaces_its_line(change: dict[str, Any], ours: dict[str, Any]) -> None:
    translation = read_file({BATCH: 16, "num_generations": 8, "gradient_accumulation_steps": 2, "max_steps": 9}, change)
    assert translation.faults == []
    assert {key: translation.values.get(key) for key in ours} == ours


SCRIPT = {"model_name_or_path": "a/b", "dataset_name": "c/d"}  # a file for `trl grpo` with nothing but what it needs


@cases(
    ("raw", "changes", "ours"),
    [
        (SCRIPT, {}, {"train_type": "full", "epochs": 3, "learning_rate": 1e-6, "group_size": 8, "beta": 0.0}),
        (SCRIPT | {"model_name_or_path": "a/b"}, {}, {"valid_split": None}),
        (SCRIPT | {"model_name_or_path": "a/b", "eval_strategy": "steps"}, {}, {"valid_split": "test"}),
        (SCRIPT, {"beta": 0.1, "num_generations": 4}, {"beta": 0.1, "group_size": 4, "batch_size": 2}),
        (SCRIPT, {"group_size": 4}, {"group_size": 4, "batch_size": 1}),
        (SCRIPT | {"beta": 0.1}, {"beta": None}, {"beta": 0.0}),
        (SCRIPT | {"max_steps": 5}, {}, {"iters": 5, "epochs": None}),
        (SCRIPT, {"iters": 5}, {"iters": 5, "epochs": None}),
        (SCRIPT | {"max_steps": 5}, {"max_steps": None}, {"iters": None, "epochs": 3}),
        (SCRIPT | {"stages": [{"iters": 5}]}, {}, {"epochs": None, "iters": None}),
        (SCRIPT | {"adapter": "run"}, {}, {"train_type": None}),
        (SCRIPT | {"use_peft": True}, {}, {"train_type": "lora", "rank": 16, "lora_alpha": 32}),
        (SCRIPT, {"use_peft": True}, {"train_type": "lora", "rank": 16}),
        (SCRIPT | {"peft_config": {"r": 4}}, {}, {"train_type": "lora", "rank": 4, "lora_alpha": 8}),
        (SCRIPT, {"defaults": "ours"}, {"train_type": None, "beta": None, "group_size": None}),
        (SCRIPT | {"defaults": "ours"}, {}, {"beta": None}),
        (SCRIPT | {"defaults": "ours"}, {"defaults": "theirs"}, {"beta": 0.0}),
        ({"train": True, "lora_parameters": {"rank": 4}}, {}, {"rank": 4, "scale": 10.0, "optimizer": "adam"}),
        ({"train": True, "adapter": "run"}, {"epochs": 2}, {"rank": None, "dropout": 0.0, "iters": None}),
        ({"num_rollout_samples": 4}, {}, {"group_size": 4, "iters": 500, "train_type": "full", "top_p": 1.0}),
        ({"model": "a/b", "defaults": "ours"}, {"beta": 0}, {"beta": 0, "epochs": None}),
        (SCRIPT | {"iters": 5}, {}, {"beta": None, "iters": 5}),
        (SCRIPT | {"iters": 5, "defaults": "theirs"}, {}, {"beta": 0.0, "iters": 5}),
        ({"num_generations": 8, "train": True}, {}, {"epochs": None, "optimizer": None}),
    ],
)
def test_a_file_has_the_defaults_of_its_program(raw: dict[str, Any], changes: dict[str, Any], ours: dict[str, Any]):
    translation = read_file(raw, changes)
    assert translation.faults == [] and {key: translation.values.get(key) for key in ours} == ours
    assert read_file(translation.values).values == translation.values, "it is a file of ours now"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (SCRIPT | {"defaults": "mine"}, "defaults must be ours or theirs, not mine."),
        ({"model": "a/b", "defaults": "theirs"}, "This is not a file for TRL, mlx-lm-lora or mlx-grpo alone, so there"),
    ],
)
def test_other_defaults_that_do_not_exist_are_refused(raw: dict[str, Any], says: str) -> None:
    (fault,) = read_file(raw).faults
    assert fault.setting == "defaults" and fault.sentence.startswith(says)


def test_account_names_the_program_and_says_what_became_of_each_word() -> None:
    file = {"num_generations": 8, "ddp_backend": "nccl", "beta": 0.0}
    lines = account(read_file(file))
    assert lines[0].startswith("This is a file for TRL. What it leaves out has TRL's defaults; --set defaults=ours")
    assert lines[-1].startswith("TRL's defaults: learning_rate 1e-06, ") and "group_size" not in lines[-1]
    whole = "From a.yaml, a file for TRL: 1 setting converted; without effect here: ddp_backend; TRL's defaults for the"
    assert summary(read_file(file), "a.yaml").startswith(whole)
    assert summary(read_file({"group_size": 8}), "a.yaml") == ""
    lines = account(read_file(file, {"defaults": "ours"}))
    assert lines[0] == "This is a file for TRL. What it leaves out has GRPO Studio's defaults."
    (told,) = read_file({"train": True, "model": "a/b"}).words[1:]
    assert told.word == "optimizer" and "Adam corrects its bias" in told.sentence, "a remark on a default"
    assert lines[1] == "num_generations: read as group_size: 8."
    assert lines[2].startswith("ddp_backend: without effect here: --hosts FILE says")
    assert account(translate({"group_size": 8})) == []
    assert "Words of several programs" in account(translate({"num_generations": 8, "train": True}))[0]


def test_each_word_is_told_by_what_was_made_of_it() -> None:
    raw = {BATCH: 8, "gradient_accumulation_steps": 4, "num_generations": 8, "group_size": 8}
    raw |= {"model_name_or_path": "owner/Model", "use_adaptive_entropy": True, "bf16": True, "use_cpu": False}
    as_here = ("as here", "already the default here")
    assert {word.word: (word.fate, word.sentence) for word in translate(raw).words} == {
        BATCH: ("translated", "batch_size: 1; 8 × 4 completions an update are 4 prompts of 8"),
        "gradient_accumulation_steps": ("translated", "gradient_accumulation_steps: 4"),
        "num_generations": as_here,
        "model_name_or_path": ("translated", "model: owner/Model"),
        "use_adaptive_entropy": ("translated", "entropy_adaptive: true"),
        "bf16": ("translated", "dtype: bfloat16"),
        "use_cpu": as_here,
    }


def test_a_word_with_a_fault_is_neither_told_nor_translated() -> None:
    """That of a contradiction said that it asks for what is so here anyway."""
    translation = translate({"num_generations": 8, "group_size": 4, "ddp_backend": "nccl", "think_end_tag": "x"})
    assert {fault.setting for fault in translation.faults} == {"group_size", "think_end_tag"}
    assert translation.values == {} and [word.word for word in translation.words] == ["ddp_backend"]


def test_names_are_those_of_one_setting_alone() -> None:
    assert NAMES["num_generations"] == "group_size" and "lr_scheduler_type" not in NAMES
    assert "num_generations" in other_names("group_size") and "generation_kwargs" not in other_names("temperature")
    assert "max_prompt_len" in other_names("long_prompts"), "one of two settings"
    assert "datasets" not in other_names("train_split"), "one of three"
    assert not set(NAMES) - set(FOREIGN_WORDS)


@cases("value", ["", "odd", -1, [1], {"a": 1}, True, 1e400])
def test_any_value_of_any_word_is_read_or_refused_in_a_sentence(value: Any) -> None:
    for word in FOREIGN_WORDS:
        for fault in translate({word: value}).faults:
            assert fault.sentence.endswith(".") and len(fault.sentence) <= 200, word


def test_the_users_example_means_what_it_meant() -> None:
    raw = parse_yaml(Path(__file__).with_name("users_example.yaml").read_text(), "the example", "config")
    translation = translate(raw)
    assert translation.program is None and translation.faults == []
    assert translation.values == (
        {"train_mode": "grpo", "model": "mlx-community/Qwen3-0.6B-4bit"}
        | {"data": "mlx-community/Dolci-Think-RL-7B-2k", "group_size": 4, "max_completion_length": 512}
        | {"temperature": 0.8, "beta": 0.1, "epsilon": 1e-4, "grpo_loss_type": "grpo"}
        | {"importance_sampling_level": "sequence", "reward_functions": ["exact_match", "by_type", "concise"]}
        | {"reward_weights": [2.0, 1.5, 0.5], "reward_functions_file": "~/my_rewards.py"}
    )
