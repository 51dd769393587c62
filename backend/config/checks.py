"""Checks across settings. Each runs only when all settings it reads are valid. Nothing here opens a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import starmap
from types import SimpleNamespace
from typing import Any, NamedTuple

from backend.config.row_settings import evaluation_set_fault, evaluation_sets, pattern_fault, template_fault
from backend.config.setting import LARGEST_WEIGHT, MOST_COMPLETIONS, Modes
from backend.config.settings.training import EIGHT_BIT
from backend.config.updates import DEFAULT_FINAL, OF_THE_RATE, OWN
from backend.runs.metric_names import EVALUATION, condition_fault, metric_fault
from backend.tools.mcp_settings import openenv_fault, server_fault
from backend.trainer.trackers.targets import project_fault, report_to_fault
from backend.utils.errors import ConfigProblem
from backend.utils.text import quote

RESERVED_TEMPLATE_OPTIONS = (  # options of `apply_chat_template` that the trainer sets itself
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
)
_ONE_PROCESS = "An object of a program is in one process, and a hosts file trains in several; clear one of the two."


def default_score(values: Mapping[str, Any]) -> str:
    """The metric by which checkpoints are compared where `best_metric` is empty."""
    mode, has_rewards = values.get("train_mode"), values.get("reward_functions") or values.get("environment")
    without = "distillation/divergence" if mode == "distill" and not has_rewards else "reward"
    return "loss" if mode == "sft" and values.get("sft_targets") == "dataset" else without


class _InvalidSettingError(Exception):
    """A check reads a setting that is not valid, and so does not apply."""


class CheckedValues(Modes, SimpleNamespace):
    """Valid values by key."""

    def __getattr__(self, key: str) -> Any:
        raise _InvalidSettingError(key)


_NOT_DIVIDED = {  # settings without a meaning for a model that is divided among machines
    "dropout": "Each machine would drop inputs of its own; set Dropout to 0, or Parallelism to Prompts.",
    "modules_to_save": "A model divided among machines trains only adapters; leave Modules to save empty.",
    "reference_model_path": "With a model divided among machines the reference is the base model; clear this.",
    **dict.fromkeys(
        ("tools_file", "environment", "mcp_servers"),
        "The machines of a divided model cannot wait for tools; set Parallelism to Prompts.",
    ),
    "use_speculative_decoding": "The machines of a divided model draw each token together; switch Speculative decoding "
    "off.",
    "teacher_model": "A model divided among machines has no teacher; set Parallelism to Prompts.",
    "sync_ref_model": "With a model divided among machines the reference stays the base model; switch Reference "
    "follows off.",
}


class Rule(NamedTuple):
    """A setting's problem. In its sentence `{found}` is the condition's result; other names are settings' values."""

    setting: str
    sentence: str
    condition: Callable[[CheckedValues], Any] = lambda c: False

    def when(self, condition: Callable[[CheckedValues], Any]) -> Rule:
        return self._replace(condition=condition)


RULES: tuple[Rule, ...] = (
    Rule("model", "Choose a base model: a folder, or an id on Hugging Face.").when(lambda c: not c.model.strip()),
    Rule("data", "Choose a dataset: a file, a folder, or an id on Hugging Face.").when(
        lambda c: not c.data.strip() and not c.environment
    ),
    Rule(
        "data", "Several environments need a dataset whose column {environment_column} names each row's environment."
    ).when(lambda c: not c.data.strip() and isinstance(c.environment, dict) and c.environment),
    Rule("epochs", "Without a dataset there are no epochs; set Epochs to 0 and give Iterations.").when(
        lambda c: not c.data.strip() and c.environment and c.epochs
    ),
    Rule("teacher_model", "Distillation needs a teacher: a folder, or an id on Hugging Face.").when(
        lambda c: c.train_mode == "distill" and not c.teacher_model.strip()
    ),
    Rule(
        "distillation_weight",
        "Distillation weight 0 leaves the teacher out; choose the mode GRPO, or a weight above 0.",
    ).when(lambda c: c.train_mode == "distill" and c.distillation_weight == 0),
    Rule(
        "reward_functions",
        "Below Distillation weight 1 the rest of the loss learns from rewards: choose a reward function, "
        "or clear the weight.",
    ).when(lambda c: c.train_mode == "distill" and c.learns_from_rewards and not (c.reward_functions or c.environment)),
    Rule("group_size", "GRPO compares the completions of a prompt with each other; set Group to at least 2.").when(
        lambda c: c.group_size < 2 and c.learns_from_rewards
    ),
    Rule("tools", "No tools file is given that has {found}.").when(
        lambda c: not c.tools_file and quote(", ".join(c.tools), 40)
    ),
    Rule("tools_file", "The model cannot call tools while {found} holds its output; clear one of the two.").when(
        lambda c: c.holds_output and c.uses_tools and ("Output regex" if c.output_regex else "Output schema")
    ),
    Rule("batch_size", f"A step would have {{found}} completions; at most {MOST_COMPLETIONS:,} can be sampled.").when(
        lambda c: _above(c.batch_size * c.gradient_accumulation_steps * c.steps_per_generation * c.group_size)
    ),
    Rule("num_layers", "Layers is 0, so nothing would be trained; give a number of layers, or −1 for all.").when(
        lambda c: c.num_layers == 0 and c.train_type != "full"
    ),
    Rule(
        "max_completion_length",
        "Completion ({max_completion_length} tokens) leaves no room for a prompt within Max Seq ({found}).",
    ).when(
        lambda c: (
            (not c.imitates or c.reward_functions)  # which score what is sampled
            and c.max_completion_length >= c.max_seq_length
            and f"{c.max_seq_length} tokens"
        )
    ),
    Rule("reward_functions", "{found} is listed twice; list each reward function once.").when(
        lambda c: quote(", ".join(sorted({x for x in c.reward_functions if c.reward_functions.count(x) > 1})))
    ),
    Rule("reward_weights", "{found}; give one weight for each, or none.").when(
        lambda c: (
            len(c.reward_weights) not in (0, len(c.reward_functions))
            and f"Reward weights: {len(c.reward_weights)}, reward functions: {len(c.reward_functions)} "
            f"({quote(', '.join(c.reward_functions))})"
        )
    ),
    Rule("reward_weights", "Every reward weight is 0, so no completion could be better than another.").when(
        lambda c: 0 < len(c.reward_weights) == len(c.reward_functions) and not any(c.reward_weights)
    ),
    Rule("reward_weights", f"A reward weight must be a number within ±{LARGEST_WEIGHT:,}, not {{found}}.").when(
        lambda c: _first(f"{weight:g}" for weight in c.reward_weights if not abs(weight) <= LARGEST_WEIGHT)
    ),
    Rule(
        "eval_batch_size", f"A batch would have {{found}} completions; at most {MOST_COMPLETIONS:,} can be sampled."
    ).when(lambda c: _above((c.eval_batch_size or 0) * (c.num_generations_eval or c.group_size))),
    Rule("stop", "A stop string may not be empty: every completion contains it and would end at once.").when(
        lambda c: "" in c.stop
    ),
    Rule("chat_template_kwargs", "{found} is not an option to choose: the trainer sets it itself.").when(
        lambda c: quote(next((key for key in c.chat_template_kwargs if key in RESERVED_TEMPLATE_OPTIONS), ""), 40)
    ),
    Rule(
        "adapter",
        "Full fine-tuning has no adapter to start from; fuse it into a model, and choose that as the Base model.",
    ).when(lambda c: c.adapter and c.train_type == "full"),
    Rule(
        "quantization", "Full fine-tuning has no gradient for quantised weights; choose LoRA, or no quantization."
    ).when(lambda c: c.train_type == "full" and c.quantization != "none"),
    Rule("dtype", "Full fine-tuning needs the range of float32 or bfloat16; choose one of them, or LoRA.").when(
        lambda c: c.train_type == "full" and c.dtype == "float16"
    ),
    Rule("use_rslora", "rsLoRA divides LoRA alpha by the root of the rank; give LoRA alpha, or turn it off.").when(
        lambda c: c.use_rslora and c.lora_alpha is None and c.train_type != "full"
    ),
    Rule(
        "quantization",
        "DoRA cannot be trained on 6-bit weights with this version of mlx-lm; choose 4 or 8 bits, or LoRA.",
    ).when(lambda c: c.train_type == "dora" and c.quantization == "6"),
    Rule("lm_studio_name", "LM Studio loads complete models only; turn Fuse on, or clear the export name.").when(
        lambda c: c.lm_studio_name.strip() and c.train_type != "full" and not c.fuse
    ),
    Rule("lr_final", "The final rate ({lr_final:g}) is above the learning rate ({learning_rate:g}).").when(
        lambda c: (
            c.lr_schedule not in ("constant", "constant_with_warmup", "inverse_sqrt", OWN)
            and c.lr_final not in (None, DEFAULT_FINAL)  # the default gives way to a share of the learning rate
            and c.lr_final > c.learning_rate
        )
    ),
    Rule("lr_final", "A rate that falls by factors never reaches 0; give one above 0, or leave it empty.").when(
        lambda c: c.lr_final == 0 and c.lr_schedule in ("exponential", "step")
    ),
    Rule(
        "optimizer_bits", "The state of a program's optimizer has the precision that its own code gives it; set 32."
    ).when(lambda c: c.optimizer_bits == "8" and c.optimizer == OWN),
    Rule(
        "optimizer_bits", f"The state of {{optimizer}} is not built in 8 bits; that of {', '.join(EIGHT_BIT)} is."
    ).when(lambda c: c.optimizer_bits == "8" and c.optimizer not in (OWN, *EIGHT_BIT)),
    Rule(
        "warmup_steps",
        "A warm-up of {warmup_steps} steps leaves none of the {iters} Iterations; lower it, or raise Iterations.",
    ).when(lambda c: not c.imitates and not (c.epochs or c.stages) and c.warmup_steps >= c.iters),
    Rule(
        "reward_functions",
        "The best of the model's own completions and the warm-up's goal go by rewards; choose a reward function.",
    ).when(
        lambda c: (
            not (c.reward_functions or c.environment)
            and (c.imitates or c.warmup_steps)
            and (c.sft_targets == "best_of_n" or (not c.imitates and c.warmup_pass_rate))
        )
    ),
    Rule("warmup_steps", "A supervised warm-up runs on one machine; warm up there, and start from its adapter.").when(
        lambda c: not c.imitates and c.warmup_steps and c.hosts.strip()
    ),
    Rule("optimizer", _ONE_PROCESS).when(lambda c: c.hosts.strip() and c.optimizer == OWN),
    Rule("lr_schedule", _ONE_PROCESS).when(lambda c: c.hosts.strip() and c.lr_schedule == OWN != c.optimizer),
    Rule(
        "stages", "A stage has {found}, and the learning rate is the program's schedule, which sees only the update."
    ).when(
        lambda c: (
            c.lr_schedule == OWN and min({*OF_THE_RATE} & {key for stage in c.stages for key in stage}, default="")
        )
    ),
    Rule(
        "sync_ref_model", "Reference follows is on, but Beta (KL weight) is 0, so there is no reference to move."
    ).when(lambda c: c.sync_ref_model and c.learns_from_rewards and not c.needs_reference),
    Rule("sync_ref_model", "A separate reference model cannot follow the policy; clear one of the two.").when(
        lambda c: c.sync_ref_model and c.reference_model_path
    ),
    Rule(
        "sampling_correction",
        "Sampling correction is for the ratio against the policy that sampled, but Ratio against is the "
        "reference model; change one of the two.",
    ).when(lambda c: c.sampling_correction not in ("none", "auto") and c.ratio_against == "reference"),
    Rule(
        "sampling_correction_min",
        "The smallest correction ({sampling_correction_min:g}) is above the largest correction "
        "({sampling_correction_max:g}).",
    ).when(
        lambda c: (
            c.sampling_correction != "none"
            and None not in (c.sampling_correction_min, c.sampling_correction_max)
            and c.sampling_correction_min > c.sampling_correction_max
        )
    ),
    Rule(
        "rollout_quantization", "Weights that are trained as a whole are not quantised for rollouts; choose None."
    ).when(lambda c: c.rollout_quantization != "none" and (c.train_type == "full" or c.modules_to_save)),
    Rule("rollout_quantization", "Quantization has packed the base already; choose None for one of the two.").when(
        lambda c: "none" not in (c.rollout_quantization, c.quantization)
    ),
    Rule("rollout_quantization", "Rollouts are quantised on one machine only; choose None.").when(
        lambda c: c.rollout_quantization != "none" and c.hosts.strip()
    ),
    Rule(
        "ratio_against",
        "Quantised rollouts are corrected against the policy that sampled, but Ratio against is the reference model; "
        "change one of the two.",
    ).when(lambda c: c.rollout_quantization != "none" and c.ratio_against == "reference"),
    Rule(
        "repetition_penalty",
        "A repetition penalty would punish the teacher of self-distillation for the solution that it "
        "reads; set it to 1, or Distillation weight to 0.",
    ).when(lambda c: c.repetition_penalty != 1 and c.self_distillation_weight),
    Rule("reward_weights_final", "There are {found} reward functions; give one weight for each.").when(
        lambda c: (
            c.reward_weight_schedule == "linear"
            and len(c.reward_weights_final) != len(c.reward_functions)
            and f"{len(c.reward_weights_final)} final weights for {len(c.reward_functions)}"
        )
    ),
    Rule("advantage_baseline", "Normalise, then sum has its own baseline; set Baseline to Group mean.").when(
        lambda c: c.multi_objective_aggregation == "normalize_then_sum" and c.advantage_baseline != "group"
    ),
    Rule("reward_weight_schedule", "Stages have their own weights; set Weight schedule to Constant.").when(
        lambda c: c.stages and c.reward_weight_schedule != "constant"
    ),
    Rule("parallelism", "mlx passes no gradient between machines that hold different layers; choose Tensors.").when(
        lambda c: c.hosts and c.parallelism == "pipeline"
    ),
    Rule("train_type", "A model divided among machines is trained with LoRA, not with {train_type}.").when(
        lambda c: c.is_divided and c.train_type != "lora"
    ),
    *(
        Rule(key, sentence).when(lambda c, key=key: c.is_divided and getattr(c, key))
        for key, sentence in _NOT_DIVIDED.items()
    ),
    Rule("stop_when", "{found}").when(lambda c: _first(condition_fault(text, *_metrics_of(c)) for text in c.stop_when)),
    Rule("best_metric", "{found}").when(lambda c: c.best_metric and metric_fault(c.best_metric, *_metrics_of(c))),
    Rule("best_metric", "{found} is a metric of evaluations, and this run makes no evaluations: Eval is 0.").when(
        lambda c: c.best_metric.startswith(EVALUATION) and not c.steps_per_eval and quote(c.best_metric, 60)
    ),
    Rule("save_every", "Save must be at least 1 step, or −1: once per epoch.").when(lambda c: not c.save_every),
    Rule("prompt_template", "{found}").when(lambda c: template_fault(c.prompt_template)),
    Rule("answer_pattern", "{found}").when(lambda c: pattern_fault(c.answer_pattern)),
    Rule("map_function", "{found} should map the rows, but no reward functions file is given.").when(
        lambda c: not c.reward_functions_file and quote(c.map_function, 40)
    ),
    Rule("eval_data", "{found}").when(
        lambda c: _first(starmap(evaluation_set_fault, evaluation_sets(c.eval_data).items()))
    ),
    Rule("mcp_servers", "{found}").when(lambda c: _first(starmap(server_fault, c.mcp_servers.items()))),
    Rule("environment", "{found}").when(lambda c: openenv_fault(c.environment)),
    Rule("report_to", "{found}").when(lambda c: report_to_fault(c.report_to)),
    Rule("tracker_project", "{found}").when(lambda c: project_fault(c.tracker_project)),
    Rule("lm_studio_name", "The LM Studio export name {found}.").when(lambda c: name_fault(c.lm_studio_name)),
    Rule("run_name", "The run folder name {found}.").when(lambda c: name_fault(c.run_name)),
    Rule(
        "output_schema", "Output can be constrained by a regex or by a schema, not by both; clear one of the two."
    ).when(lambda c: c.output_regex and c.output_schema),
    Rule(
        "ratio_against",
        "Constrained output is corrected against the policy that sampled, but Ratio against is the reference model; "
        "change one of the two.",
    ).when(lambda c: c.holds_output and c.ratio_against == "reference"),
)


def _above(count: int) -> str:
    return f"{count:,}" if count > MOST_COMPLETIONS else ""


def _first(sentences: Iterable[str]) -> str:
    return next(filter(None, sentences), "")


def name_fault(name: str) -> str:
    """What keeps a text from naming a folder, as the rest of a sentence; "" for nothing."""
    if bad := sorted({char for char in name if char in '/\\:*?"<>|' or not char.isprintable()}):
        return f"may not contain {' '.join(map(repr, bad))}"
    if name.startswith(".") or name != name.strip() or len(name.encode(errors="surrogatepass")) > 120:
        return "must not begin with a dot, begin or end with a space, or be longer than 120 bytes"
    return ""


def cross_setting_faults(values: Mapping[str, Any]) -> list[ConfigProblem]:
    """The problems of every check whose settings are all in `values` (valid values by key)."""
    faults: list[ConfigProblem] = []
    settings = CheckedValues(**values)
    for setting, sentence, condition in RULES:
        with suppress(_InvalidSettingError):
            if found := condition(settings):
                faults.append(ConfigProblem(setting, sentence.format_map({**values, "found": found})))
    return faults


def _metrics_of(c: CheckedValues) -> tuple[list[str], bool, list[str]]:
    names = [*c.reward_functions, *(name for stage in c.stages for name in stage.get("reward_functions") or ())]
    own_code = bool(c.reward_functions_file) or any("::" in name for name in names)
    return names, own_code, list(c.eval_data)
