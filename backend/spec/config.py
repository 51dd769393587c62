"""Every setting of a run, declared once. Form, YAML, command line, checks and help are read from this list.

The keys are those of the YAML file; a file written for mlx-lm-lora or TRL means the same here (`backend.spec.setting_aliases`
translates its keys). To add a setting, add one field below and the line that uses it. Where other code depends on a group of
settings, tag the field (`used_by`) and ask `keys_used_by`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from backend.spec.checks import MOST_COMPLETIONS, MOST_STEPS, cross_setting_faults, reference_is_needed
from backend.spec.faults import Fault, Mistake
from backend.spec.loss_menu import levels, losses
from backend.spec.rewards.catalog import DEFAULT_REWARDS, nearest, split_names, with_absolute_file
from backend.spec.setting import Setting, Use, setting, setting_from_field
from backend.spec.setting_aliases import FOREIGN_KEYS, translate
from backend.spec.user_input.documents import read_yaml
from backend.spec.user_input.files import exists
from backend.spec.user_input.paths import user_path
from backend.spec.user_input.text import shown
from backend.spec.user_input.values import unusable

SECTIONS: dict[str, str] = {
    "algorithm": "Algorithm",
    "model_data": "Model & Data",
    "fine_tune": "Fine-tune",
    "training": "Training Settings",
    "columns": "Dataset Columns",
    "output": "Output",
    "preference": "Preference And Judge",
    "generation": "GRPO Generation And Rewards",
}
"""Section key → title, in reading order of the form."""

MOST_TOKENS = 10_000_000
"""Tokens of a prompt and its completion: a hundred times what most models read, as many as any does."""
NEVER = 1_000_000_000
"""Upper limit of settings that say how often or how many at most: longer than any run."""
LONGEST_LIST = 1_000
"""Entries of a setting that is a list."""
_ADAPTERS = ("train_type", ("lora", "dora"))
_DECAYING = ("lr_schedule", ("cosine", "linear"))
_SAPO, _VESPO = ("grpo_loss_type", ("sapo",)), ("grpo_loss_type", ("vespo",))
_CORRECTED = ("sampling_correction", ("auto", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))


class Config(BaseModel):
    """The settings of one run, validated. Build it with `load` or `parse`, which explain what is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # fmt: off
    # Algorithm
    train_mode: str = setting(
        "grpo", "algorithm", "Mode", "How the model learns. GRPO samples a group of answers to each prompt, scores them "
        "with your reward functions, and makes the better ones of each group more likely.",
        choices=[("grpo", "GRPO", "Learns from reward functions, no labelled answers to imitate.")],
    )

    # Model & Data
    model: str = setting("", "model_data", "Base model", "A folder that holds an MLX or Hugging Face model, or the id of "
                         "one on Hugging Face, such as mlx-community/Qwen3-0.6B-4bit.", kind="model", used_by=("task", "row_view"))
    data: str = setting("", "model_data", "Dataset", "A jsonl, json, csv or parquet file, a folder with train, valid and "
                        "test files, or the id of a dataset on Hugging Face.", kind="dataset", used_by=("task", "rows"))
    lm_studio_name: str = setting("", "model_data", "LM Studio export name", "When set, the finished model is also put "
                                  "into LM Studio's models folder under this name. Needs Fuse.", used_by=("task",))

    # Fine-tune
    train_type: str = setting(
        "lora", "fine_tune", "Fine-tune", "Which weights change.",
        choices=[("lora", "LoRA", "Small matrices beside the frozen weights: little memory, and the usual choice."),
                 ("dora", "DoRA", "LoRA with the size of each weight row learned apart: a little slower, often a little better."),
                 ("full", "Full", "Every weight. Needs several times the memory, and cannot start from a quantised model.")],
        used_by=("duration",),
    )
    num_layers: int = setting(16, "fine_tune", "Layers", "How many of the last layers get adapters. −1 means all of them.",
                              ge=-1, le=10_000, unit="layers", when=_ADAPTERS, used_by=("duration",))
    rank: int = setting(8, "fine_tune", "Rank", "Width of the adapter matrices. More can learn more and costs more memory.",
                        ge=1, le=4096, when=_ADAPTERS)
    scale: float = setting(20.0, "fine_tune", "Scale", "Factor on what the adapter adds to the frozen weight.",
                           gt=0, le=1_000_000, when=_ADAPTERS)
    dropout: float = setting(0.0, "fine_tune", "Dropout", "Share of adapter inputs set to zero while learning.",
                             ge=0, lt=1, when=_ADAPTERS)
    lora_keys: list[str] = setting([], "fine_tune", "Target modules", "Names of the linear layers that get adapters, such as "
                                   "self_attn.q_proj. Empty means all of them.", advanced=True, when=_ADAPTERS)
    quantization: str = setting(
        "none", "fine_tune", "Quantization", "Stores the frozen base weights in fewer bits, after loading.",
        choices=[("none", "None", "As the model comes."), ("4", "4-bit", "A quarter of 16-bit memory; some loss."),
                 ("6", "6-bit", ""), ("8", "8-bit", "Half of 16-bit memory; hardly any loss."),
                 ("mxfp4", "MXFP4", "4-bit floating point with shared exponents.")],
    )
    dtype: str = setting(
        "auto", "fine_tune", "Precision", "The floating-point type that the model computes in, and that its float weights have while it "
        "learns. What is saved has the precision that the model came with.",
        choices=[("auto", "Automatic", "As the model comes; 32 bits where every weight is trained."),
                 ("float32", "float32", "Sampling and learning agree exactly. Twice the memory of 16 bits; with 4-bit weights only the "
                  "activations grow."),
                 ("bfloat16", "bfloat16", "What most models come in. The widest range and the coarsest steps; under full fine-tuning "
                  "the weights that learn stay in 32 bits beside it."),
                 ("float16", "float16", "Eight times finer than bfloat16, so sampling and learning agree better; a smaller range.")],
    )

    # Training Settings
    iters: int = setting(1000, "training", "Iterations", "Training steps. Each samples a group for every prompt of the "
                         "batch and learns from it.", ge=1, le=MOST_STEPS, unit="steps")
    epochs: int = setting(0, "training", "Epochs", "Passes over the dataset. Above 0 it decides how long the run is, and "
                          "Iterations is not used.", ge=0, le=1_000_000, unit="passes")
    batch_size: int = setting(1, "training", "Batch", "Prompts in one step (before gradient accumulation).", ge=1, le=MOST_COMPLETIONS, unit="prompts")
    gradient_accumulation_steps: int = setting(
        1, "training", "Gradient accumulation", "Multiplies the prompts of a step; their gradients are summed piece by "
        "piece, so memory stays the same.", ge=1, le=MOST_COMPLETIONS, unit="batches")
    num_iterations: int = setting(
        1, "training", "Updates per rollout", "How often the weights are updated from the same completions (μ). At 1 the "
        "ratio is always 1 and nothing is ever clipped.", ge=1, le=10_000, unit="updates", used_by=("duration",))
    steps_per_generation: int = setting(
        1, "training", "Batches per rollout", "How many optimizer batches are sampled at once. Above 1, the later ones learn from "
        "completions that a slightly older policy wrote.", ge=1, le=10_000, unit="batches", advanced=True)
    max_seq_length: int = setting(2048, "training", "Max Seq", "Prompt and completion together. Rows whose prompt leaves no "
                                  "room for the completion are left out, and counted.", ge=2, le=MOST_TOKENS, unit="tokens",
                                  used_by=("prompt_limit",))
    seed: int = setting(0, "training", "Seed", "The same seed on the same machine gives the same run.", ge=0, le=2**32 - 1,
                        used_by=("rows",))
    learning_rate: float = setting(1e-5, "training", "Learning rate", "Size of each update. LoRA wants roughly ten times "
                                   "what full fine-tuning wants.", gt=0, le=10)
    optimizer: str = setting(
        "adamw", "training", "Optimizer", "Turns gradients into updates.",
        choices=[("adamw", "AdamW", "Adam with weight decay apart from the gradient: the usual choice."),
                 ("adam", "Adam", ""), ("muon", "Muon", "Orthogonalised momentum for matrices."), ("sgd", "SGD", ""),
                 ("lion", "Lion", "Sign of the momentum; wants a smaller learning rate."),
                 ("adafactor", "Adafactor", "Little memory."), ("rmsprop", "RMSprop", ""), ("adagrad", "Adagrad", ""),
                 ("adadelta", "AdaDelta", ""), ("adamax", "Adamax", "")],
    )
    weight_decay: float = setting(0.01, "training", "Weight decay", "Pulls weights towards zero at each update, in the "
                                  "optimizers that have it.", ge=0, le=1, advanced=True,
                                  when=("optimizer", ("adamw", "muon", "sgd", "lion", "adafactor")))
    adam_beta1: float = setting(0.9, "training", "Beta 1", "Memory of the mean gradient.", ge=0, lt=1, advanced=True,
                                when=("optimizer", ("adam", "adamw", "adamax", "lion")))
    adam_beta2: float = setting(0.999, "training", "Beta 2", "Memory of the squared gradient.", ge=0, lt=1, advanced=True,
                                when=("optimizer", ("adam", "adamw", "adamax", "lion")))
    max_grad_norm: float = setting(1.0, "training", "Max gradient norm", "Longer gradients are shortened to this length. "
                                   "0 never shortens.", ge=0, le=1_000_000, advanced=True)
    lr_schedule: str = setting(
        "constant", "training", "LR schedule", "How the learning rate changes over the run.",
        choices=[("constant", "Constant", "The same from the first step to the last, without warm-up."),
                 ("cosine", "Cosine decay", "Warms up, then falls along a cosine to the final rate."),
                 ("linear", "Linear", "Warms up, then falls along a line to the final rate.")],
    )
    lr_warmup_steps: int = setting(40, "training", "Warm-up", "Updates over which the rate rises to its peak.", ge=0, le=NEVER,
                                   unit="updates", when=_DECAYING)
    lr_warmup_init: float = setting(1e-7, "training", "Warm-up start", "The rate of the first update.", ge=0, le=10, when=_DECAYING)
    lr_decay_fraction: float = setting(0.8, "training", "Decay fraction", "Share of the run over which the rate falls, "
                                       "counted from the end of the warm-up. Above 1 the run ends on the way down.",
                                       gt=0, le=10, when=_DECAYING)
    lr_final: float = setting(2e-6, "training", "Final rate", "The rate once it has fallen.", ge=0, le=10, when=_DECAYING)
    steps_per_report: int = setting(10, "training", "Report", "How often the terminal prints a line. The charts have "
                                    "every step.", ge=1, le=NEVER, unit="steps")
    steps_per_eval: int = setting(200, "training", "Eval", "How often held-out prompts are answered and scored. 0 never "
                                  "does.", ge=0, le=NEVER, unit="steps")
    save_every: int = setting(100, "training", "Save", "How often a checkpoint is written.", ge=1, le=NEVER, unit="steps")
    stop_when: list[str] = setting([], "training", "Stop when", "Ends the run once one of these is met, as finished: a metric, a sign and a "
                                   "number, such as kl > 0.8 or reward >= 2.5. The mean of the last five steps is compared; with eval/ "
                                   "before it, a metric of the newest evaluation.", advanced=True)
    early_stopping_patience: int = setting(0, "training", "Early stopping", "Ends the run, as finished, once the held-out reward has not "
                                           "risen in this many evaluations; without evaluations, the training reward between checkpoints. "
                                           "The best checkpoint is kept. 0 never does.", ge=0, le=NEVER, unit="evaluations", advanced=True)
    early_stopping_min_delta: float = setting(0.0, "training", "Least gain", "How much the reward must rise to count for Early stopping.",
                                              ge=0, le=1_000_000, advanced=True)
    keep_checkpoints: int = setting(3, "training", "Keep checkpoints", "How many of the newest stay on disk, beside the "
                                    "best one.", ge=1, le=NEVER, unit="checkpoints", advanced=True)
    val_batches: int = setting(25, "training", "Val batches", "Batches of held-out prompts in one evaluation. −1 takes "
                               "all.", ge=-1, le=NEVER, unit="batches")
    test: bool = setting(False, "training", "Evaluate test split", "Answers the test prompts once more when training ends.")
    test_batches: int = setting(100, "training", "Test batches", "Batches of test prompts. −1 takes all.", ge=-1, le=NEVER,
                                unit="batches", when=("test", (True,)))
    grad_checkpoint: bool = setting(False, "training", "Gradient checkpointing", "Recomputes each layer in the backward "
                                    "pass: less memory, about a third slower.", used_by=("duration",))
    memory_limit: float = setting(0.0, "training", "Memory limit", "What a run may use. Sampling and learning are cut up so that "
                                  "they stay within it. 0 takes a safe share of this machine.", ge=0, le=1_000_000, unit="GB", advanced=True)
    retry_on_gpu_error: int = setting(3, "training", "Retries after a GPU error", "How often in a row a run that the GPU has failed, for want "
                                      "of memory or because macOS stopped its work, goes on from its last step in a new process, each time "
                                      "with half the micro-batch. 0 never does.", ge=0, le=1_000, unit="times", advanced=True)
    relax_gpu_timeout: bool = setting(False, "training", "Relax GPU timeout", "Asks macOS to wait longer before it stops the GPU's work "
                                      "because the display waits (AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1). Apple does not document it, it does not "
                                      "always help, and the display may stutter. Only on a Mac.", advanced=True)
    efficient_long_context: bool = setting(False, "training", "Efficient long context", "Reads long prompts and works out "
                                           "log-probabilities piece by piece, in steps of the sequence step size.", advanced=True)
    seq_step_size: int = setting(512, "training", "Sequence step size", "Tokens per piece.", ge=16, le=MOST_TOKENS, unit="tokens",
                                 advanced=True, when=("efficient_long_context", (True,)))
    record_tokens: bool = setting(False, "training", "Record tokens", "Writes every token of a completion beside its text: its log-"
                                  "probability when it was sampled and when it was learned from, its ratio, and whether it was clipped. "
                                  "The Completions page colours tokens by them. Changes no weight; completions.jsonl grows about fivefold.",
                                  advanced=True)
    mask_prompt: bool = setting(True, "training", "Mask prompt", "GRPO never trains on the prompt, so this changes "
                                "nothing; the key is accepted.", advanced=True, kind="fact")
    fuse: bool = setting(True, "training", "Fuse", "At the end, folds the adapters into a complete model in the run "
                         "folder.", when=_ADAPTERS)

    # Dataset Columns
    prompt_feature: str = setting("prompt", "columns", "Prompt", "Column with the question: text, or a list of chat messages.",
                                  used_by=("task", "row_view", "prompt_text"))
    answer_feature: str = setting("answer", "columns", "Answer", "Column with the right answer, for the rewards that compare.",
                                  used_by=("task", "row_view"))
    type_feature: str = setting("type", "columns", "Type", "Column that reward functions may switch on; may be absent.",
                                used_by=("task", "row_view"))
    system_feature: str = setting("system", "columns", "System", "Column with a system message for each row; may be absent.",
                                  used_by=("task", "row_view", "prompt_text"))
    system_prompt: str = setting("", "columns", "System prompt", "Used for rows without a system message of their own.",
                                 kind="prose", used_by=("row_view", "prompt_text"))
    dataset_config: str = setting("", "columns", "Dataset config", "Which configuration of a Hugging Face dataset.", advanced=True,
                                  used_by=("task", "rows"))
    train_split: str = setting("train", "columns", "Train split", "Split to train on.", advanced=True, used_by=("task", "rows"))
    valid_split: str = setting("valid", "columns", "Valid split", "Split to evaluate on; “validation” is found too.", advanced=True,
                               used_by=("task", "rows"))
    test_split: str = setting("test", "columns", "Test split", "Split for the test at the end.", advanced=True,
                              used_by=("task", "rows"))
    validation_split: float = setting(0.0, "columns", "Validation share", "Share of the training rows held out when there "
                                      "is no valid split. 0 holds none.", ge=0, lt=1, advanced=True, used_by=("rows",))
    chat_template_kwargs: dict[str, Any] = setting({}, "columns", "Chat template options", "Passed to the tokenizer's chat "
                                                   "template, such as enable_thinking: false.", advanced=True,
                                                   used_by=("row_view", "prompt_text"))
    stop: list[str] = setting([], "columns", "Stop strings", "A completion ends once it contains one of these.", advanced=True)
    num_generations_eval: int | None = setting(None, "columns", "Group in evaluation", "Completions per held-out prompt. "
                                               "Empty means the same as Group.", ge=1, le=MOST_COMPLETIONS, advanced=True)

    # Output
    run_name: str = setting("", "output", "Run folder name", "Empty names the run after model, kind of training and date.",
                            used_by=("task",))

    # Preference And Judge
    beta: float = setting(0.1, "preference", "KL weight", "Holds the model near the reference model. 0 turns it off and "
                          "saves the reference pass.", ge=0, le=1_000_000)
    reference_model_path: str = setting("", "preference", "Reference model", "The model to stay near. Empty means the base "
                                        "model as it was before training, without a second copy in memory under LoRA.", kind="model",
                                        used_by=("task",))
    sync_ref_model: bool = setting(False, "preference", "Reference follows", "Moves the reference towards the policy now and then.",
                                   advanced=True)
    ref_model_mixup_alpha: float = setting(0.6, "preference", "Mix-up", "Share of the policy in the new reference.", gt=0, le=1,
                                           advanced=True, when=("sync_ref_model", (True,)))
    ref_model_sync_steps: int = setting(512, "preference", "Sync every", "Updates between two moves of the reference.", ge=1, le=NEVER,
                                        unit="updates", advanced=True, when=("sync_ref_model", (True,)))
    log_kl: bool = setting(False, "preference", "Log KL at weight 0", "Measures the KL although it is not used, at the "
                           "price of a reference pass.", advanced=True, when=("beta", (0, 0.0)))
    use_bias_correction_kl: bool = setting(True, "preference", "Bias-corrected KL", "Multiplies the KL estimate by the "
                                           "ratio, which makes its gradient right off-policy (TRL's present default).", advanced=True)
    ratio_against: str = setting(
        "old", "preference", "Ratio against", "Which policy stands below the line of the importance ratio.", advanced=True,
        choices=[("old", "Policy that sampled", "As in the papers and TRL."),
                 ("reference", "Reference model", "As in the guide of MLX LoRA Studio; ties the policy to the reference.")],
    )

    # GRPO Generation And Rewards
    group_size: int = setting(4, "generation", "Group", "Completions sampled for each prompt and compared with one "
                              "another. More give a steadier signal and cost more.", ge=2, le=MOST_COMPLETIONS, unit="completions")
    max_completion_length: int = setting(512, "generation", "Completion", "Longest completion.", ge=1, le=MOST_TOKENS, unit="tokens",
                                         used_by=("prompt_limit", "scoring", "duration"))
    temperature: float = setting(0.8, "generation", "Temp", "How freely tokens are drawn; log-probabilities are taken at "
                                 "the same temperature. 0 is invalid: a group would be one answer many times.", gt=0, le=10)
    top_p: float = setting(0.95, "generation", "Top P", "Draws only from the likeliest tokens that make up this share. 1 "
                           "turns it off.", gt=0, le=1)
    top_k: int = setting(20, "generation", "Top K", "Draws only from this many likeliest tokens. 0 turns it off.", ge=0, le=10_000_000, unit="tokens")
    min_p: float = setting(0.0, "generation", "Min P", "Drops tokens below this share of the likeliest one. 0 turns it off.", ge=0, le=1)
    epsilon: float = setting(1e-4, "generation", "Epsilon", "How far below 1 the ratio may fall before its gradient stops.", gt=0, lt=1)
    epsilon_high: float | None = setting(None, "generation", "Epsilon high", "How far above 1 the ratio may rise. Empty "
                                         "means the same as Epsilon; DAPO sets it higher.", gt=0, le=1_000_000)
    grpo_loss_type: str = setting(
        "grpo", "generation", "GRPO loss", "How the tokens' losses are averaged.",
        choices=[(entry.key, entry.name, entry.sentence) for entry in losses()],
    )
    importance_sampling_level: str = setting(
        "token", "generation", "Importance", "Whether the ratio is taken for each token or for the whole completion.",
        choices=[(entry.key, entry.name, entry.sentence) for entry in levels()],
    )
    delta: float | None = setting(None, "generation", "Delta", "Largest ratio that is left alone where nothing else clips it "
                                  "(two-sided clipping, INTELLECT-2). Empty turns it off.", gt=1, le=1_000_000, advanced=True)
    sapo_temperature_pos: float = setting(1.0, "generation", "SAPO temperature, better", "How sharply the gate closes for "
                                          "completions above their group's mean.", gt=0, le=1_000_000, advanced=True, when=_SAPO)
    sapo_temperature_neg: float = setting(1.05, "generation", "SAPO temperature, worse", "The same for completions below it.",
                                          gt=0, le=1_000_000, advanced=True, when=_SAPO)
    vespo_k_pos: float = setting(2.0, "generation", "VESPO k, better", "Power of the ratio in the weight of completions "
                                 "above their group's mean.", gt=0, le=1_000_000, advanced=True, when=_VESPO)
    vespo_lambda_pos: float = setting(3.0, "generation", "VESPO lambda, better", "How fast that weight falls off.", gt=0, le=1_000_000,
                                      advanced=True, when=_VESPO)
    vespo_k_neg: float = setting(3.0, "generation", "VESPO k, worse", "The power for completions below it.", gt=0, le=1_000_000,
                                 advanced=True, when=_VESPO)
    vespo_lambda_neg: float = setting(2.0, "generation", "VESPO lambda, worse", "How fast that weight falls off.", gt=0, le=1_000_000,
                                      advanced=True, when=_VESPO)
    top_entropy_quantile: float = setting(1.0, "generation", "Entropy share", "Share of the tokens, the most uncertain ones, "
                                          "that carry the policy term. 1 takes all.", ge=0, le=1, advanced=True)
    entropy_coef: float = setting(0.0, "generation", "Entropy bonus", "Rewards uncertainty itself, against collapse. 0 turns "
                                  "it off.", ge=0, le=1, advanced=True)
    entropy_adaptive: bool = setting(False, "generation", "Adaptive entropy bonus", "Moves the bonus by 0.005 after each update, "
                                     "up while the entropy is at or below the target, else down.", advanced=True)
    entropy_target: float = setting(0.2, "generation", "Entropy target", "The entropy that the adaptive bonus holds.", ge=0, le=100,
                                    unit="nats", advanced=True, when=("entropy_adaptive", (True,)))
    off_policy_mask_threshold: float | None = setting(None, "generation", "Off-policy mask", "Leaves out worse-than-average "
                                                      "completions that have drifted further than this. Empty leaves none out.",
                                                      gt=0, le=1_000_000, unit="nats a token", advanced=True)
    mask_truncated_completions: bool = setting(False, "generation", "Mask truncated completions", "Does not train on completions "
                                               "that ran into the length limit; their reward still counts in the group.", advanced=True)
    sampling_correction: str = setting(
        "auto", "generation", "Sampling correction", "What to do about the gap between the policy and what was drawn from: a model "
        "in 16 bits rounds differently in sampling and in learning, and top-p, top-k and min-p cut the distribution. The gap is "
        "measured in any case.", advanced=True,
        choices=[("auto", "Automatic", "Token, truncated where the model computes in 16 bits; none in 32."),
                 ("none", "None", "Leave it."),
                 ("token_truncate", "Token, truncated", "Multiply each token's term by the ratio, held within the limits (TIS)."),
                 ("token_mask", "Token, masked", "The same, with tokens outside the limits left out (MIS)."),
                 ("sequence_truncate", "Sequence, truncated", "One ratio a completion, held within the limits."),
                 ("sequence_mask", "Sequence, masked", "One ratio a completion; outside the limits it is left out.")],
    )
    sampling_correction_max: float | None = setting(3.0, "generation", "Largest correction", "Upper limit of the ratio. Empty "
                                                    "means none.", gt=0, le=1_000_000, advanced=True, when=_CORRECTED)
    sampling_correction_min: float | None = setting(None, "generation", "Smallest correction", "Lower limit of the ratio. Empty "
                                                    "means none.", gt=0, le=1_000_000, advanced=True, when=_CORRECTED)
    scale_rewards: str = setting(
        "group", "generation", "Scale rewards", "What the distance from the group's mean is divided by.", advanced=True,
        choices=[("group", "Group", "The standard deviation of the group."),
                 ("batch", "Batch", "The standard deviation of the whole batch."),
                 ("none", "None", "Nothing, as in Dr. GRPO.")],
        used_by=("scoring",),
    )
    advantage_baseline: str = setting(
        "group", "generation", "Baseline", "What a completion's reward is compared with.", advanced=True,
        choices=[("group", "Group mean", "The mean of the whole group, as in GRPO."),
                 ("leave_one_out", "Leave one out", "The mean of the other completions of the group (RLOO).")],
        used_by=("scoring",),
    )
    multi_objective_aggregation: str = setting(
        "sum_then_normalize", "generation", "Several rewards", "How several reward functions become one advantage.", advanced=True,
        choices=[("sum_then_normalize", "Sum, then normalise", "Weigh and add the scores, then compare."),
                 ("normalize_then_sum", "Normalise, then sum", "Compare each score by itself first, so that no function drowns "
                  "another (GDPO). Scale rewards is not used.")],
        used_by=("scoring",),
    )
    skip_zero_signal: bool = setting(True, "generation", "Skip groups without signal", "Does no forward and backward pass for "
                                     "completions that cannot move the policy. Changes no gradient.", advanced=True)
    dynamic_sampling: bool = setting(False, "generation", "Dynamic sampling", "Draws on, prompt after prompt, until every group of "
                                     "the step has completions of different reward (DAPO).", advanced=True)
    dynamic_sampling_rounds: int = setting(10, "generation", "Rounds at most", "How often a step may draw before it goes on with what "
                                           "it has.", ge=1, le=10_000, unit="rounds", advanced=True, when=("dynamic_sampling", (True,)))
    reward_functions: list[str] = setting(list(DEFAULT_REWARDS), "generation", "Reward functions", "Names of the functions "
                                          "that score a completion, in order.", kind="rewards",
                                          used_by=("task", "row_view", "rewards", "scoring"))
    reward_weights: list[float] = setting([], "generation", "Reward weights", "One number a function. Empty means 1 for each.",
                                          kind="numbers", used_by=("task", "rewards", "scoring"))
    reward_weight_schedule: str = setting(
        "constant", "generation", "Weight schedule", "Whether the weights change over the run.", advanced=True,
        choices=[("constant", "Constant", "The weights as they stand."),
                 ("linear", "Linear", "Along a line to the final weights."),
                 ("adaptive", "Adaptive", "A function that seldom succeeds gains weight, one that nearly always does loses some.")],
        used_by=("rewards",),
    )
    reward_weights_final: list[float] = setting([], "generation", "Final weights", "The weights at the last step, one a function.",
                                                kind="numbers", advanced=True, when=("reward_weight_schedule", ("linear",)),
                                                used_by=("rewards",))
    stages: list[dict[str, Any]] = setting([], "generation", "Stages", "Parts of the run, one after the other, each with its own "
                                           "iters, reward_functions and reward_weights. Together they decide how long the run is.",
                                           kind="stages", advanced=True)
    reward_functions_file: str = setting("", "generation", "Reward functions file", "A Python file (.py or .txt) that "
                                         "registers functions of your own.", kind="file", used_by=("task", "rewards", "scoring"))
    reward_timeout: float = setting(60.0, "generation", "Reward timeout", "A reward function that takes longer than this "
                                    "in one step stops the run.", gt=0, le=1_000_000, unit="s", advanced=True,
                                    used_by=("rewards", "scoring"))
    reward_isolation: str = setting(
        "process", "generation", "Reward isolation", "Where reward functions run.", advanced=True,
        choices=[("process", "Own process", "In a process beside the trainer, without its files and environment: a function that hangs, "
                  "crashes or exits is told by one sentence, and the run is saved."),
                 ("thread", "In the trainer", "In the trainer's own process, for functions that need what it has in memory. One that crashes "
                  "or never returns takes the run with it.")],
        used_by=("rewards",),
    )
    reward_network: bool = setting(False, "generation", "Reward network", "Reward functions may use the network, as one that asks a judge "
                                   "does. Needs Reward isolation by process; in the trainer nothing keeps them from it.", advanced=True,
                                   when=("reward_isolation", ("process",)), used_by=("rewards", "scoring"))
    # fmt: on

    @property
    def prompts_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.steps_per_generation

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.steps_per_generation

    @property
    def weights(self) -> list[float]:
        """One weight a reward function."""
        return self.reward_weights or [1.0] * len(self.reward_functions)

    @property
    def needs_reference(self) -> bool:
        """Whether a step computes log-probabilities under the reference policy."""
        return reference_is_needed(self.beta, self.log_kl, self.ratio_against)


SETTINGS: dict[str, Setting] = {key: setting_from_field(key, field) for key, field in Config.model_fields.items()}
"""Every setting by key, in the order of the form."""

NOT_BUILT = {
    "tools": "Tools",
    "environments": "Environments",
    "rollout_func": "A rollout function of your own",
    "router_aux_loss_coef": "The router loss of mixture-of-experts models",
    "repetition_penalty": "The sampler's repetition penalty",
}
"""Keys of related programs for features that are not built yet → what they are, to be refused in a sentence."""


TEXTS = ("text", "prose", "model", "dataset", "file", "choice")
"""Kinds of settings whose value is text even where YAML reads a number."""


def keys_used_by(*uses: Use) -> tuple[str, ...]:
    """Keys of the settings tagged with any of these uses, in the order of the form."""
    return tuple(key for key, about in SETTINGS.items() if set(uses) & set(about.used_by))


def needs_reference(raw: Mapping[str, Any]) -> bool:
    """As `Config.needs_reference`, from raw settings; what is missing or invalid counts as its default."""
    return reference_is_needed(*(_valid_or_default(key, raw.get(key)) for key in ("beta", "log_kl", "ratio_against")))


def _valid_or_default(key: str, value: Any) -> Any:
    if value is None or unusable(value):
        return SETTINGS[key].default
    valid, sentence = _validated(SETTINGS[key], value)
    return SETTINGS[key].default if sentence else valid


def sections() -> dict[str, list[Setting]]:
    """Section key → its settings, in order."""
    return {section: [about for about in SETTINGS.values() if about.section == section] for section in SECTIONS}


def problems(raw: Mapping[str, Any]) -> list[Fault]:
    """Every fault in raw settings (a YAML mapping or the form's values), in the order of the form.

    Each field is validated by itself, and each cross-check runs if the settings it reads are valid. Nothing on disk is read.
    """
    return _validate(raw)[1]


def parse(raw: Mapping[str, Any]) -> Config:
    """The settings of a raw mapping. Raises Mistake with every fault."""
    values, faults = _validate(raw)
    if faults:
        raise Mistake(faults)
    return Config(**values)


def load(path: str | Path) -> Config:
    """The settings of a YAML file; paths in it are relative to the file. Raises Mistake."""
    return parse(read(path))


def read(path: str | Path) -> dict[str, Any]:
    """The raw mapping of a YAML file, with relative paths made absolute where they exist. Raises Mistake."""
    path = user_path(str(path), "config")
    raw = read_yaml(path, "config")
    if not isinstance(raw, dict):
        raise Mistake("config", f"{shown(path)} must hold settings as “key: value” lines, but it holds {_what(raw)}.")
    return beside(path.parent, cast("dict[str, Any]", raw))


def beside(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Raw settings with relative paths that exist in `folder` made absolute. Ids, absolute paths and ~ stay as they are."""
    resolved = dict(raw)
    for key in ("model", "data", "dataset", "reference_model_path", "reward_functions_file"):
        value = raw.get(key)
        if isinstance(value, list) and len(cast("list[Any]", value)) == 1:
            value = value[0]  # pyright: ignore
        if isinstance(value, str) and value and not Path(value).is_absolute() and exists(folder / value):
            resolved[key] = os.path.realpath(folder / value)
    if "reward_functions" in raw:
        resolved["reward_functions"] = _rewards_beside(folder, raw["reward_functions"])
    if isinstance(stages := raw.get("stages"), list):
        resolved["stages"] = [_stage_beside(folder, stage) for stage in cast("list[Any]", stages)]
    return resolved


def _stage_beside(folder: Path, stage: Any) -> Any:
    if not isinstance(stage, dict) or "reward_functions" not in stage:
        return cast("Any", stage)
    stage = cast("dict[str, Any]", stage)
    return stage | {"reward_functions": _rewards_beside(folder, stage["reward_functions"])}


def _rewards_beside(folder: Path, rewards: Any) -> Any:
    """Entries such as file.py::function with their files made absolute; text is split first."""
    if isinstance(rewards, list):
        entries = cast("list[Any]", rewards)
        return [with_absolute_file(entry, folder) if isinstance(entry, str) else entry for entry in entries]
    if isinstance(rewards, str) and "::" in rewards:
        return [with_absolute_file(text, folder) for text in split_names(rewards)]
    return rewards


def dump(config: Config | Mapping[str, Any]) -> str:
    """All settings as YAML text, section by section; loading it gives the same settings."""
    values = config.model_dump() if isinstance(config, Config) else dict(config)
    if values.get("epochs"):
        values.pop("iters", None)
    parts: list[str] = []
    for section, members in sections().items():
        chosen = {about.key: values[about.key] for about in members if about.key in values}
        if chosen:
            text = yaml.dump(chosen, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
            parts.append(f"# {SECTIONS[section]}\n{text}")
    return "\n".join(parts)


class _Dumper(yaml.SafeDumper):
    """PyYAML reads back a "next line" character as a newline unless the text around it is quoted."""

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)  # pyright: ignore


_Dumper.add_representer(str, _Dumper.represent_text)


def valid_value(key: str, value: Any) -> Any:
    """The value of one setting as a run has it, whatever the others are. Raises Mistake."""
    if why := unusable(value):
        raise Mistake(key, f"{SETTINGS[key].label} {why}.")
    valid, sentence = _validated(SETTINGS[key], value)
    if sentence:
        raise Mistake(key, sentence)
    return valid


def _validate(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """(valid values by key, faults)."""
    raw, faults = _without_unusable(raw)
    translated, untranslatable = translate(raw)
    faults += untranslatable
    untranslated = {fault.setting for fault in faults}
    values: dict[str, Any] = {}
    for key in translated:
        if key not in SETTINGS:
            faults.append(Fault(key, _unknown(key)))
    for key, about in SETTINGS.items():
        if key in untranslated:
            continue
        if key not in translated:
            values[key] = about.default
            continue
        value, sentence = _validated(about, translated[key])
        if sentence:
            faults.append(Fault(key, sentence))
        else:
            values[key] = value
    faults += cross_setting_faults(values)
    order = list(SETTINGS)
    return values, sorted(faults, key=lambda fault: order.index(fault.setting) if fault.setting in order else -1)


def _without_unusable(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Fault]]:
    """(`raw` without the values that nothing can work with, their faults)."""
    faults: list[Fault] = []
    usable: dict[str, Any] = {}
    for key, value in raw.items():
        if unusable(key):
            faults.append(Fault(shown(key), f"There is no setting {shown(key, 40)}."))
        elif why := unusable(value):
            faults.append(Fault(key, f"{SETTINGS[key].label if key in SETTINGS else shown(key, 40)} {why}."))
        else:
            usable[key] = value
    return usable, faults


def _validated(about: Setting, value: Any) -> tuple[Any, str]:
    """(value, "") or (None, why not)."""
    if value == "" and about.optional:
        return None, ""
    if isinstance(value, bool) and about.kind in ("int", "float"):
        return None, f"{about.label} must be a number, not {str(value).lower()}."
    if isinstance(value, list) and len(cast("list[Any]", value)) > LONGEST_LIST:
        return None, f"{about.label} has more than {LONGEST_LIST:,} entries."
    if about.kind in TEXTS and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    try:
        value = _adapter(about.key).validate_python(value)
    except ValidationError as error:
        return None, _sentence(about, error.errors()[0], value)
    if about.choices and value not in [choice.value for choice in about.choices]:
        known = ", ".join(choice.value for choice in about.choices)
        near = nearest(value, [choice.value for choice in about.choices])
        return None, f"{about.label} cannot be {_quoted(value)}; it is one of {known}" + (
            f". Did you mean {near}?" if near else "."
        )
    return value, ""


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    field = Config.model_fields[key]
    return TypeAdapter[Any](Annotated[field.annotation, field])  # pyright: ignore


def _sentence(about: Setting, error: Any, value: Any) -> str:
    """One plain sentence for a pydantic error, with the limit and the actual value."""
    kind, context = error["type"], error.get("ctx", {})
    actual = str(value).lower() if isinstance(value, bool) else _quoted(value)
    limits = {"greater_than": ("above", "gt"), "greater_than_equal": ("at least", "ge"),
              "less_than": ("below", "lt"), "less_than_equal": ("at most", "le")}  # fmt: skip
    if kind in limits:
        word, limit = limits[kind]
        number = context[limit]
        return f"{about.label} must be {word} {int(number) if number == int(number) else f'{number:g}'}, not {actual}."
    expected = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list of texts",
              "rewards": "a list of names", "numbers": "a list of numbers", "mapping": "a mapping", "stages": "a list of stages"}.get(about.kind, "text")  # fmt: skip
    return f"{about.label} must be {expected}, not {actual}."


def _quoted(value: Any) -> str:
    """A value in a sentence, text in quotes."""
    return f"'{shown(value, 60)}'" if isinstance(value, str) else shown(value, 60)


def _unknown(key: str) -> str:
    if key in NOT_BUILT:
        return f"{NOT_BUILT[key]} ({key}) is not built yet; take the key out to run without it."
    near = nearest(key, [*SETTINGS, *FOREIGN_KEYS])
    return f"There is no setting {shown(key, 40)}." + (f" Did you mean {near}?" if near else "")


def _what(raw: Any) -> str:
    return {type(None): "nothing", list: "a list", str: "plain text"}.get(
        cast("type[Any]", type(raw)), "a single value"
    )
