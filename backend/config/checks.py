"""Checks across settings. Each names the settings it reads and runs only when all of them are valid by themselves, so that one
invalid field never hides another's fault. Nothing here opens a file: see `backend.trainer.preflight` for what is on disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from backend.config.learning_rate import DEFAULT_FINAL
from backend.config.own_updates import OF_THE_RATE
from backend.config.row_settings import evaluation_set_faults, map_function_faults, pattern_faults, template_faults
from backend.config.settings.limits import LARGEST_WEIGHT, MOST_COMPLETIONS, MOST_STEPS
from backend.config.settings.optimizer import EIGHT_BIT, OWN
from backend.runs.changeable import STAGE_DATA, STAGE_KEYS, STAGE_OWN, STAGE_SETTINGS
from backend.runs.metric_names import EVALUATION
from backend.runs.stop_conditions import condition_fault, metric_fault
from backend.sampling.output_grammar import held_output_faults
from backend.trainer.trackers.targets import project_fault, report_to_fault
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import quote

# What cannot be trained while a model is divided among several machines, with the reason.


def division_faults(
    parallelism: str,
    train_type: str,
    dropout: float,
    modules_to_save: list[str],
    reference_model_path: str,
    sync_ref_model: bool,
) -> Iterator[ConfigProblem]:
    """The faults of these settings under `parallelism`."""
    if parallelism == "pipeline":
        yield ConfigProblem(
            "parallelism",
            "Layers: what one machine sends to the next has no gradient in mlx, so a model divided so cannot be trained; choose Tensors.",
        )
    if parallelism != "tensor":
        return
    if train_type != "lora":
        reason = (
            "the norms of whole rows"
            if train_type == "dora"
            else "every weight with its optimizer state on one machine"
        )
        yield ConfigProblem(
            "train_type", f"Divided among machines a model is trained with LoRA; {train_type} needs {reason}."
        )
    if dropout:
        yield ConfigProblem(
            "dropout", "Each machine would drop inputs of its own; set Dropout to 0, or Parallelism to Prompts."
        )
    if modules_to_save:
        yield ConfigProblem(
            "modules_to_save",
            "Divided among machines a model learns in its adapters alone; leave Modules to save empty.",
        )
    if reference_model_path:
        yield ConfigProblem(
            "reference_model_path",
            "Divided among machines the reference is the base model; another one would have to be divided too.",
        )
    if sync_ref_model:
        yield ConfigProblem(
            "sync_ref_model", "Divided among machines the reference stays the base model; switch Reference follows off."
        )


# ── stage entries ────────────────────────────────────────────────────────────────────────────────────────────────────

# Whether one entry of `stages` has the shape of a stage. What its settings are worth is checked with the others
# (`backend.config.stages`).


def stage_faults(stage: Mapping[str, Any], name: str) -> Iterator[ConfigProblem]:
    strange = [key for key in stage if key not in STAGE_KEYS]
    iters, functions, weights = (stage.get(key) for key in STAGE_OWN)
    if strange:
        sentence = f"{name} has {quote(strange[0], 40)}, which no stage can have of its own; it can have "
        listed = quote(", ".join((*STAGE_OWN, *STAGE_DATA[:1], *STAGE_SETTINGS)), 199 - len(sentence))
        yield ConfigProblem("stages", f"{sentence}{listed}.")
    if not isinstance(iters, int) or isinstance(iters, bool) or iters < 1:
        yield ConfigProblem("stages", f"{name} needs iters, a whole number of steps above 0.")
    elif iters > MOST_STEPS:
        yield ConfigProblem("stages", f"{name} has {quote(iters)} steps; at most {MOST_STEPS:,} can be trained.")
    if functions is not None and not (_is_list_of(functions, str) and functions):
        yield ConfigProblem("stages", f"{name}: reward_functions must be a list of names.")
    elif functions and (twice := duplicates(cast("list[str]", functions))):
        yield ConfigProblem("stages", f"{name} lists {quote(', '.join(twice))} twice; list each reward function once.")
    if weights is not None and not _is_list_of(weights, (int, float)):
        yield ConfigProblem("stages", f"{name}: reward_weights must be a list of numbers.")
    elif weights and not (any(weights) and all(abs(weight) <= LARGEST_WEIGHT for weight in weights)):
        yield ConfigProblem(
            "stages", f"{name}: reward_weights must lie within ±{LARGEST_WEIGHT:,}, and at least one of them not be 0."
        )
    elif weights and _is_list_of(functions, str) and functions and len(weights) != len(functions):
        yield ConfigProblem(
            "stages", f"{name} has {len(weights)} reward weights for {len(functions)} reward functions."
        )


def _is_list_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether it is a list of these; true and false are no numbers."""
    items = cast("list[Any]", value) if isinstance(value, list) else [None]
    return all(isinstance(item, kind) and not isinstance(item, bool) for item in items)


def duplicates(names: list[str]) -> list[str]:
    """Names that are listed more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Check = Callable[..., "Iterator[ConfigProblem]"]
CHECKS: list[tuple[tuple[str, ...], Check]] = []
RESERVED_TEMPLATE_OPTIONS = (
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
)
"""Options of `apply_chat_template` that the trainer sets itself: with other values a prompt would not be a prompt."""


def _reads(*keys: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.append((keys, check))
        return check

    return register


def cross_setting_faults(values: Mapping[str, Any]) -> list[ConfigProblem]:
    """The faults of every check whose settings are all in `values` (valid values by key)."""
    runnable = ((keys, check) for keys, check in CHECKS if all(key in values for key in keys))
    return [fault for keys, check in runnable for fault in check(*(values[key] for key in keys))]


@_reads("model")
def _model_is_set(model: str) -> Iterator[ConfigProblem]:
    if not model.strip():
        yield ConfigProblem("model", "Choose a base model: a folder, or an id on Hugging Face.")


@_reads("data")
def _dataset_is_set(data: str) -> Iterator[ConfigProblem]:
    if not data.strip():
        yield ConfigProblem("data", "Choose a dataset: a file, a folder, or an id on Hugging Face.")


def _can_be_a_path(key: str) -> None:
    """Register the check that a setting's text could be a path; an id on Hugging Face could."""

    @_reads(key)
    def _check(text: str) -> Iterator[ConfigProblem]:
        try:
            user_path(text, key)
        except UserError as mistake:
            yield from mistake.faults


for _key in (
    "model",
    "adapter",
    "data",
    "reference_model_path",
    "reward_functions_file",
    "train_split",
    "valid_split",
    "test_split",
    "valid_data",
    "test_data",
    "tokenizer",
):
    _can_be_a_path(_key)


_reads("prompt_template")(template_faults)
_reads("answer_pattern")(pattern_faults)
_reads("eval_data")(evaluation_set_faults)
_reads("map_function", "reward_functions_file")(map_function_faults)


@_reads("batch_size", "gradient_accumulation_steps", "steps_per_generation", "group_size")
def _a_step_can_be_sampled(batch: int, accumulation: int, generations: int, group: int) -> Iterator[ConfigProblem]:
    completions = batch * accumulation * generations * group
    if completions > MOST_COMPLETIONS:
        yield ConfigProblem(
            "batch_size", f"A step would have {completions:,} completions; at most {MOST_COMPLETIONS:,} can be sampled."
        )


@_reads("num_layers", "train_type")
def _some_layers_are_trained(num_layers: int, train_type: str) -> Iterator[ConfigProblem]:
    if num_layers == 0 and train_type != "full":
        yield ConfigProblem(
            "num_layers", "Layers is 0, so nothing would be trained; give a number of layers, or −1 for all."
        )


@_reads("max_completion_length", "max_seq_length")
def _completion_leaves_space_for_a_prompt(completion: int, sequence: int) -> Iterator[ConfigProblem]:
    if completion >= sequence:
        yield ConfigProblem(
            "max_completion_length",
            f"Completion ({completion} tokens) leaves no room for a prompt within Max Seq ({sequence} tokens).",
        )


@_reads("reward_functions")
def _reward_functions_are_listed_once(functions: list[str]) -> Iterator[ConfigProblem]:
    if twice := duplicates(functions):
        yield ConfigProblem(
            "reward_functions", f"{quote(', '.join(twice))} is listed twice; list each reward function once."
        )


@_reads("reward_functions", "reward_weights")
def _one_weight_per_reward_function(functions: list[str], weights: list[float]) -> Iterator[ConfigProblem]:
    if weights and len(weights) != len(functions):
        yield ConfigProblem(
            "reward_weights",
            f"There are {len(weights)} reward weights for {len(functions)} reward functions "
            f"({quote(', '.join(functions))}); give one weight for each, or none.",
        )
    elif weights and not any(weights):
        yield ConfigProblem(
            "reward_weights", "Every reward weight is 0, so no completion could be better than another."
        )


@_reads("reward_weights")
def _weights_are_usable(weights: list[float]) -> Iterator[ConfigProblem]:
    odd = [weight for weight in weights if not math.isfinite(weight)]
    if odd:
        yield ConfigProblem("reward_weights", f"A reward weight must be a finite number, not {odd[0]}.")
    elif large := [weight for weight in weights if abs(weight) > LARGEST_WEIGHT]:
        yield ConfigProblem("reward_weights", f"A reward weight must lie within ±{LARGEST_WEIGHT:,}, not {large[0]:g}.")


@_reads("stop_when", "reward_functions", "reward_functions_file", "eval_data")
def _stop_conditions_can_be_read(
    conditions: list[str], functions: list[str], file: str, eval_data: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    has_own_code = bool(file) or any("::" in name for name in functions)
    for text in conditions:
        if sentence := condition_fault(text, functions, may_log_metrics=has_own_code, sets=list(eval_data)):
            yield ConfigProblem("stop_when", sentence)


@_reads("best_metric", "steps_per_eval", "reward_functions", "reward_functions_file", "eval_data")
def _best_metric_is_one(
    metric: str, steps_per_eval: int, functions: list[str], file: str, eval_data: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    has_own_code = bool(file) or any("::" in name for name in functions)
    if metric and (sentence := metric_fault(metric, functions, has_own_code, list(eval_data))):
        yield ConfigProblem("best_metric", sentence)
    elif metric.startswith(EVALUATION) and not steps_per_eval:
        yield ConfigProblem(
            "best_metric", f"{quote(metric, 60)} is a metric of evaluations, and this run has none: Eval is 0."
        )


@_reads("eval_batch_size", "num_generations_eval", "group_size")
def _an_evaluation_batch_can_be_sampled(
    prompts: int | None, group: int | None, training_group: int
) -> Iterator[ConfigProblem]:
    if prompts and (completions := prompts * (group or training_group)) > MOST_COMPLETIONS:
        sentence = f"A batch would have {completions:,} completions; at most {MOST_COMPLETIONS:,} can be sampled."
        yield ConfigProblem("eval_batch_size", sentence)


@_reads("stop")
def _stop_strings_are_not_empty(stop: list[str]) -> Iterator[ConfigProblem]:
    if "" in stop:
        yield ConfigProblem(
            "stop", "A stop string may not be empty: every completion contains it and would end at once."
        )


@_reads("chat_template_kwargs")
def _template_options_are_not_reserved(options: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    ours = [key for key in options if key in RESERVED_TEMPLATE_OPTIONS]
    if ours:
        yield ConfigProblem(
            "chat_template_kwargs", f"{quote(ours[0], 40)} is not an option to choose: the trainer sets it itself."
        )


@_reads("adapter", "train_type")
def _full_fine_tuning_has_no_adapter(adapter: str, train_type: str) -> Iterator[ConfigProblem]:
    if adapter and train_type == "full":
        sentence = (
            "Full fine-tuning has no adapter to start from; fuse it into a model, and choose that as the Base model."
        )
        yield ConfigProblem("adapter", sentence)


@_reads("train_type", "quantization")
def _full_fine_tuning_needs_float_weights(train_type: str, quantization: str) -> Iterator[ConfigProblem]:
    if train_type == "full" and quantization != "none":
        yield ConfigProblem(
            "quantization", "Full fine-tuning has no gradient for quantised weights; choose LoRA, or no quantization."
        )


@_reads("train_type", "dtype")
def _full_fine_tuning_needs_range(train_type: str, dtype: str) -> Iterator[ConfigProblem]:
    if train_type == "full" and dtype == "float16":
        sentence = (
            "The gradients of weights in float16 fall out of its range, so full fine-tuning takes float32 or bfloat16"
        )
        yield ConfigProblem("dtype", f"{sentence}; choose one of them, or LoRA.")


@_reads("train_type", "lora_alpha", "use_rslora")
def _rslora_needs_alpha(train_type: str, alpha: float | None, rslora: bool) -> Iterator[ConfigProblem]:
    if rslora and alpha is None and train_type != "full":
        yield ConfigProblem(
            "use_rslora", "rsLoRA divides LoRA alpha by the root of the rank; give LoRA alpha, or turn it off."
        )


@_reads("train_type", "quantization")
def _dora_lacks_6_bits(train_type: str, quantization: str) -> Iterator[ConfigProblem]:
    if train_type == "dora" and quantization == "6":
        sentence = "DoRA cannot be trained on 6-bit weights with this version of mlx-lm; choose 4 or 8 bits, or LoRA."
        yield ConfigProblem("quantization", sentence)


@_reads("lm_studio_name", "fuse", "train_type")
def _lm_studio_needs_a_fused_model(name: str, fuse: bool, train_type: str) -> Iterator[ConfigProblem]:
    if name.strip() and train_type != "full" and not fuse:
        yield ConfigProblem(
            "lm_studio_name", "LM Studio loads complete models only; turn Fuse on, or clear the export name."
        )


@_reads("lm_studio_name")
def _safe_export_name(name: str) -> Iterator[ConfigProblem]:
    yield from _safe_name("lm_studio_name", "The LM Studio export name", name)


@_reads("run_name")
def _safe_run_name(name: str) -> Iterator[ConfigProblem]:
    yield from _safe_name("run_name", "The run folder name", name)


def _safe_name(setting: str, what: str, name: str) -> Iterator[ConfigProblem]:
    """Check a name that becomes a folder: no separators, no leading dot, nothing that a file system refuses."""
    bad = sorted({char for char in name if char in '/\\:*?"<>|' or not char.isprintable()})
    if bad:
        yield ConfigProblem(setting, f"{what} may not contain {' '.join(repr(char) for char in bad)}.")
    elif name.startswith(".") or name != name.strip() or len(name.encode(errors="surrogatepass")) > 120:
        yield ConfigProblem(
            setting, f"{what} must not begin with a dot, begin or end with a space, or be longer than 120 bytes."
        )


@_reads("learning_rate", "lr_final", "lr_schedule")
def _learning_rate_decays(peak: float, final: float | None, schedule: str) -> Iterator[ConfigProblem]:
    falls = schedule not in ("constant", "constant_with_warmup", "inverse_sqrt", OWN)
    if (
        falls and final is not None and final > peak and final != DEFAULT_FINAL
    ):  # which gives way to a share of the peak
        yield ConfigProblem("lr_final", f"The final rate ({final:g}) is above the learning rate ({peak:g}).")
    if final == 0 and schedule in ("exponential", "step"):
        yield ConfigProblem(
            "lr_final", "A rate that falls by factors never reaches 0; give one above 0, or leave it empty."
        )


@_reads("optimizer", "optimizer_bits")
def _state_is_built_in_8_bits(name: str, bits: str) -> Iterator[ConfigProblem]:
    if bits == "8" and name == OWN:
        yield ConfigProblem(
            "optimizer_bits", "The state of a program's optimizer has the precision that its own code gives it; set 32."
        )
    elif bits == "8" and name not in EIGHT_BIT:
        yield ConfigProblem(
            "optimizer_bits", f"The state of {name} is not built in 8 bits; that of {', '.join(EIGHT_BIT)} is."
        )


@_reads("optimizer", "lr_schedule", "hosts")
def _objects_are_of_one_process(optimizer: str, schedule: str, hosts: str) -> Iterator[ConfigProblem]:
    if hosts.strip() and OWN in (optimizer, schedule):
        key = "optimizer" if optimizer == OWN else "lr_schedule"
        yield ConfigProblem(
            key, "An object of a program is in one process, and a hosts file trains in several; clear one of the two."
        )


@_reads("lr_schedule", "stages")
def _stages_leave_a_schedule_of_a_program_alone(
    schedule: str, stages: list[Mapping[str, Any]]
) -> Iterator[ConfigProblem]:
    if schedule == OWN and (of_rate := {key for stage in stages for key in stage} & {*OF_THE_RATE}):
        key = min(of_rate)
        yield ConfigProblem(
            "stages",
            f"A stage has {key}, and the learning rate is the program's schedule, which sees the update alone.",
        )


def reference_is_needed(beta: float, log_kl: bool, ratio_against: str) -> bool:
    """Whether a step computes log-probabilities under the reference policy: for the KL term, to log the KL, or as the
    denominator of the importance ratio. The only place that decides it; `backend.config.config` has it by settings."""
    return beta > 0 or log_kl or ratio_against == "reference"


@_reads("sync_ref_model", "beta", "log_kl", "ratio_against")
def _synced_reference_is_used(sync: bool, beta: float, log_kl: bool, against: str) -> Iterator[ConfigProblem]:
    if sync and not reference_is_needed(beta, log_kl, against):
        yield ConfigProblem(
            "sync_ref_model", "Reference follows is on, but Beta (KL weight) is 0, so there is no reference to move."
        )


@_reads("sync_ref_model", "reference_model_path", "train_type")
def _synced_reference_is_the_base_model(sync: bool, path: str, train_type: str) -> Iterator[ConfigProblem]:
    if sync and path:
        yield ConfigProblem(
            "sync_ref_model", "A reference model of its own cannot follow the policy; clear one of the two."
        )


@_reads("sampling_correction", "ratio_against")
def _sampling_correction_needs_the_old_policy(correction: str, against: str) -> Iterator[ConfigProblem]:
    if correction not in ("none", "auto") and against == "reference":
        yield ConfigProblem(
            "sampling_correction",
            "Sampling correction mends the ratio against the policy that sampled, but Ratio against is the reference "
            "model; turn one of the two back.",
        )


_reads("output_regex", "output_schema", "ratio_against")(held_output_faults)


@_reads("sampling_correction", "sampling_correction_min", "sampling_correction_max")
def _correction_limits_are_ordered(correction: str, low: float | None, high: float | None) -> Iterator[ConfigProblem]:
    if correction != "none" and low is not None and high is not None and low > high:
        yield ConfigProblem(
            "sampling_correction_min", f"The smallest correction ({low:g}) is above the largest correction ({high:g})."
        )


@_reads("reward_weight_schedule", "reward_weights_final", "reward_functions")
def _one_final_weight_per_reward_function(
    schedule: str, final: list[float], functions: list[str]
) -> Iterator[ConfigProblem]:
    if schedule == "linear" and len(final) != len(functions):
        yield ConfigProblem(
            "reward_weights_final",
            f"There are {len(final)} final weights for {len(functions)} reward functions; give one weight for each.",
        )


@_reads("multi_objective_aggregation", "advantage_baseline")
def _gdpo_has_its_own_baseline(aggregation: str, baseline: str) -> Iterator[ConfigProblem]:
    if aggregation == "normalize_then_sum" and baseline != "group":
        yield ConfigProblem(
            "advantage_baseline", "Normalise, then sum has a baseline of its own; set Baseline to Group mean."
        )


@_reads("stages", "reward_weight_schedule")
def _stages_are_valid(stages: list[dict[str, Any]], schedule: str) -> Iterator[ConfigProblem]:
    if stages and schedule != "constant":
        yield ConfigProblem(
            "reward_weight_schedule", "Stages have weights of their own; set Weight schedule to Constant."
        )
    for number, stage in enumerate(stages, 1):
        yield from stage_faults(stage, f"Stage {number}")


@_reads("report_to")
def _trackers_exist(report_to: list[str]) -> Iterator[ConfigProblem]:
    if fault := report_to_fault(report_to):
        yield fault


@_reads("tracker_project")
def _project_is_a_name(project: str) -> Iterator[ConfigProblem]:
    if fault := project_fault(project):
        yield fault


@_reads("parallelism", "hosts", "train_type", "dropout", "modules_to_save", "reference_model_path", "sync_ref_model")
def _a_sharded_model_can_be_trained_so(parallelism: str, hosts: str, *settings: Any) -> Iterator[ConfigProblem]:
    if hosts:
        yield from division_faults(parallelism, *settings)
