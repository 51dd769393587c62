"""Checks across settings. Each runs only when all settings it reads are valid, so that an invalid one hides no other
problem.

Nothing here opens a file: see `backend.trainer.preflight` for what is on disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from backend.config.changeable import STAGE_DATA, STAGE_KEYS, STAGE_OWN, STAGE_SETTINGS
from backend.config.row_settings import evaluation_set_faults, map_function_faults, pattern_faults, template_faults
from backend.config.setting import LARGEST_WEIGHT, MOST_COMPLETIONS, MOST_STEPS
from backend.config.settings.training import EIGHT_BIT
from backend.config.updates import DEFAULT_FINAL, OF_THE_RATE, OWN
from backend.runs.metric_names import EVALUATION, condition_fault, metric_fault
from backend.sampling.output_grammar import held_output_faults
from backend.trainer.trackers.targets import project_fault, report_to_fault
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import quote

RESERVED_TEMPLATE_OPTIONS = (
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
)
"""Options of `apply_chat_template` that the trainer sets itself."""
_PATHS = (
    *("model", "adapter", "data", "reference_model_path", "reward_functions_file", "train_split", "valid_split"),
    *("test_split", "valid_data", "test_data", "tokenizer"),
)


def reference_is_needed(beta: float, log_kl: bool, ratio_against: str) -> bool:
    """Whether a step computes log-probabilities under the reference policy."""
    return beta > 0 or log_kl or ratio_against == "reference"


def duplicates(names: list[str]) -> str:
    """Names that are listed more than once, with commas."""
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


def _divided(parallelism: str, hosts: str) -> bool:
    return bool(hosts) and parallelism == "tensor"


_RULES: list[tuple[str, Callable[..., Any], str]] = [
    ("model", lambda model: not model.strip(), "Choose a base model: a folder, or an id on Hugging Face."),
    ("data", lambda data: not data.strip(), "Choose a dataset: a file, a folder, or an id on Hugging Face."),
    (
        "batch_size",
        lambda batch_size, gradient_accumulation_steps, steps_per_generation, group_size: _above(
            batch_size * gradient_accumulation_steps * steps_per_generation * group_size, MOST_COMPLETIONS
        ),
        f"A step would have {{found}} completions; at most {MOST_COMPLETIONS:,} can be sampled.",
    ),
    (
        "num_layers",
        lambda num_layers, train_type: num_layers == 0 and train_type != "full",
        "Layers is 0, so nothing would be trained; give a number of layers, or −1 for all.",
    ),
    (
        "max_completion_length",
        lambda max_completion_length, max_seq_length: max_completion_length >= max_seq_length,
        "Completion ({max_completion_length} tokens) leaves no room for a prompt within Max Seq ({max_seq_length} "
        "tokens).",
    ),
    (
        "reward_functions",
        lambda reward_functions: quote(duplicates(reward_functions)),
        "{found} is listed twice; list each reward function once.",
    ),
    (
        "reward_weights",
        lambda reward_weights, reward_functions: (
            len(reward_weights) not in (0, len(reward_functions))
            and f"There are {len(reward_weights)} reward weights for {len(reward_functions)} reward functions "
            f"({quote(', '.join(reward_functions))})"
        ),
        "{found}; give one weight for each, or none.",
    ),
    (
        "reward_weights",
        lambda reward_weights, reward_functions: (
            len(reward_weights) == len(reward_functions) and not any(reward_weights)
        ),
        "Every reward weight is 0, so no completion could be better than another.",
    ),
    (
        "reward_weights",
        lambda reward_weights: next((str(weight) for weight in reward_weights if not math.isfinite(weight)), ""),
        "A reward weight must be a finite number, not {found}.",
    ),
    (
        "reward_weights",
        lambda reward_weights: (
            all(map(math.isfinite, reward_weights))
            and next((f"{weight:g}" for weight in reward_weights if abs(weight) > LARGEST_WEIGHT), "")
        ),
        f"A reward weight must lie within ±{LARGEST_WEIGHT:,}, not {{found}}.",
    ),
    (
        "eval_batch_size",
        lambda eval_batch_size, num_generations_eval, group_size: _above(
            (eval_batch_size or 0) * (num_generations_eval or group_size), MOST_COMPLETIONS
        ),
        f"A batch would have {{found}} completions; at most {MOST_COMPLETIONS:,} can be sampled.",
    ),
    (
        "stop",
        lambda stop: "" in stop,
        "A stop string may not be empty: every completion contains it and would end at once.",
    ),
    (
        "chat_template_kwargs",
        lambda chat_template_kwargs: quote(
            next((key for key in chat_template_kwargs if key in RESERVED_TEMPLATE_OPTIONS), ""), 40
        ),
        "{found} is not an option to choose: the trainer sets it itself.",
    ),
    (
        "adapter",
        lambda adapter, train_type: adapter and train_type == "full",
        "Full fine-tuning has no adapter to start from; fuse it into a model, and choose that as the Base model.",
    ),
    (
        "quantization",
        lambda quantization, train_type: train_type == "full" and quantization != "none",
        "Full fine-tuning has no gradient for quantised weights; choose LoRA, or no quantization.",
    ),
    (
        "dtype",
        lambda dtype, train_type: train_type == "full" and dtype == "float16",
        "Full fine-tuning needs the range of float32 or bfloat16; choose one of them, or LoRA.",
    ),
    (
        "use_rslora",
        lambda use_rslora, lora_alpha, train_type: use_rslora and lora_alpha is None and train_type != "full",
        "rsLoRA divides LoRA alpha by the root of the rank; give LoRA alpha, or turn it off.",
    ),
    (
        "quantization",
        lambda quantization, train_type: train_type == "dora" and quantization == "6",
        "DoRA cannot be trained on 6-bit weights with this version of mlx-lm; choose 4 or 8 bits, or LoRA.",
    ),
    (
        "lm_studio_name",
        lambda lm_studio_name, fuse, train_type: lm_studio_name.strip() and train_type != "full" and not fuse,
        "LM Studio loads complete models only; turn Fuse on, or clear the export name.",
    ),
    (
        "lr_final",
        lambda lr_final, learning_rate, lr_schedule: (
            lr_schedule not in ("constant", "constant_with_warmup", "inverse_sqrt", OWN)
            and lr_final not in (None, DEFAULT_FINAL)  # the default gives way to a share of the learning rate
            and lr_final > learning_rate
        ),
        "The final rate ({lr_final:g}) is above the learning rate ({learning_rate:g}).",
    ),
    (
        "lr_final",
        lambda lr_final, lr_schedule: lr_final == 0 and lr_schedule in ("exponential", "step"),
        "A rate that falls by factors never reaches 0; give one above 0, or leave it empty.",
    ),
    (
        "optimizer_bits",
        lambda optimizer_bits, optimizer: optimizer_bits == "8" and optimizer == OWN,
        "The state of a program's optimizer has the precision that its own code gives it; set 32.",
    ),
    (
        "optimizer_bits",
        lambda optimizer_bits, optimizer: optimizer_bits == "8" and optimizer not in (OWN, *EIGHT_BIT),
        f"The state of {{optimizer}} is not built in 8 bits; that of {', '.join(EIGHT_BIT)} is.",
    ),
    (
        "optimizer",
        lambda optimizer, hosts: hosts.strip() and optimizer == OWN,
        "An object of a program is in one process, and a hosts file trains in several; clear one of the two.",
    ),
    (
        "lr_schedule",
        lambda lr_schedule, optimizer, hosts: hosts.strip() and lr_schedule == OWN != optimizer,
        "An object of a program is in one process, and a hosts file trains in several; clear one of the two.",
    ),
    (
        "stages",
        lambda stages, lr_schedule: (
            lr_schedule == OWN and min({key for stage in stages for key in stage} & {*OF_THE_RATE}, default="")
        ),
        "A stage has {found}, and the learning rate is the program's schedule, which sees only the update.",
    ),
    (
        "sync_ref_model",
        lambda sync_ref_model, beta, log_kl, ratio_against: (
            sync_ref_model and not reference_is_needed(beta, log_kl, ratio_against)
        ),
        "Reference follows is on, but Beta (KL weight) is 0, so there is no reference to move.",
    ),
    (
        "sync_ref_model",
        lambda sync_ref_model, reference_model_path: sync_ref_model and reference_model_path,
        "A reference model of its own cannot follow the policy; clear one of the two.",
    ),
    (
        "sampling_correction",
        lambda sampling_correction, ratio_against: (
            sampling_correction not in ("none", "auto") and ratio_against == "reference"
        ),
        "Sampling correction is for the ratio against the policy that sampled, but Ratio against is the reference "
        "model; change one of the two.",
    ),
    (
        "sampling_correction_min",
        lambda sampling_correction, sampling_correction_min, sampling_correction_max: (
            sampling_correction != "none"
            and None not in (sampling_correction_min, sampling_correction_max)
            and sampling_correction_min > sampling_correction_max
        ),
        "The smallest correction ({sampling_correction_min:g}) is above the largest correction "
        "({sampling_correction_max:g}).",
    ),
    (
        "reward_weights_final",
        lambda reward_weight_schedule, reward_weights_final, reward_functions: (
            reward_weight_schedule == "linear"
            and len(reward_weights_final) != len(reward_functions)
            and f"{len(reward_weights_final)} final weights for {len(reward_functions)}"
        ),
        "There are {found} reward functions; give one weight for each.",
    ),
    (
        "advantage_baseline",
        lambda multi_objective_aggregation, advantage_baseline: (
            multi_objective_aggregation == "normalize_then_sum" and advantage_baseline != "group"
        ),
        "Normalise, then sum has a baseline of its own; set Baseline to Group mean.",
    ),
    (
        "reward_weight_schedule",
        lambda stages, reward_weight_schedule: stages and reward_weight_schedule != "constant",
        "Stages have weights of their own; set Weight schedule to Constant.",
    ),
    (
        "parallelism",
        lambda parallelism, hosts: hosts and parallelism == "pipeline",
        "mlx passes no gradient between machines that hold different layers; choose Tensors.",
    ),
    (
        "train_type",
        lambda train_type, parallelism, hosts: _divided(parallelism, hosts) and train_type != "lora",
        "A model divided among machines is trained with LoRA, not with {train_type}.",
    ),
    (
        "dropout",
        lambda dropout, parallelism, hosts: _divided(parallelism, hosts) and dropout,
        "Each machine would drop inputs of its own; set Dropout to 0, or Parallelism to Prompts.",
    ),
    (
        "modules_to_save",
        lambda modules_to_save, parallelism, hosts: _divided(parallelism, hosts) and modules_to_save,
        "A model divided among machines trains only adapters; leave Modules to save empty.",
    ),
    (
        "reference_model_path",
        lambda reference_model_path, parallelism, hosts: _divided(parallelism, hosts) and reference_model_path,
        "With a model divided among machines the reference is the base model; clear this.",
    ),
    (
        "sync_ref_model",
        lambda sync_ref_model, parallelism, hosts: _divided(parallelism, hosts) and sync_ref_model,
        "With a model divided among machines the reference stays the base model; switch Reference follows off.",
    ),
]
"""(setting with the problem, test whose parameters are the settings it reads, message).

`{found}` in a message is the text that the test returns; other names are values of settings.
"""


def _above(count: int, most: int) -> str:
    return f"{count:,}" if count > most else ""


def cross_setting_faults(values: Mapping[str, Any]) -> list[ConfigProblem]:
    """The problems of every check whose settings are all in `values` (valid values by key)."""
    faults: list[ConfigProblem] = []
    for key, test, message in _RULES:
        if (arguments := _arguments(test, values)) is not None and (found := test(**arguments)):
            faults.append(ConfigProblem(key, message.format(found=found, **arguments)))
    for check in _CHECKS:
        if (arguments := _arguments(check, values)) is not None:
            faults += check(**arguments)
    for key in _PATHS:
        if key in values:
            try:
                user_path(values[key], key)
            except UserError as error:
                faults += error.faults
    for check, keys in _CHECKS_ELSEWHERE:
        if all(key in values for key in keys):
            faults += check(*(values[key] for key in keys))
    return faults


def _arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings that a function's parameters name; None where one is not valid."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {name: values[name] for name in names} if all(name in values for name in names) else None


def _stop_conditions(
    stop_when: list[str], reward_functions: list[str], reward_functions_file: str, eval_data: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    own_code = bool(reward_functions_file) or any("::" in name for name in reward_functions)
    for text in stop_when:
        if sentence := condition_fault(text, reward_functions, may_log_metrics=own_code, sets=list(eval_data)):
            yield ConfigProblem("stop_when", sentence)


def _best_metric(
    best_metric: str,
    steps_per_eval: int,
    reward_functions: list[str],
    reward_functions_file: str,
    eval_data: Mapping[str, Any],
) -> Iterator[ConfigProblem]:
    own_code = bool(reward_functions_file) or any("::" in name for name in reward_functions)
    if best_metric and (sentence := metric_fault(best_metric, reward_functions, own_code, list(eval_data))):
        yield ConfigProblem("best_metric", sentence)
    elif best_metric.startswith(EVALUATION) and not steps_per_eval:
        sentence = f"{quote(best_metric, 60)} is a metric of evaluations, and this run has none: Eval is 0."
        yield ConfigProblem("best_metric", sentence)


def _export_name(lm_studio_name: str) -> Iterator[ConfigProblem]:
    yield from _safe_name("lm_studio_name", "The LM Studio export name", lm_studio_name)


def _run_name(run_name: str) -> Iterator[ConfigProblem]:
    yield from _safe_name("run_name", "The run folder name", run_name)


def _safe_name(setting: str, what: str, name: str) -> Iterator[ConfigProblem]:
    """Check a name that becomes a folder."""
    bad = sorted({char for char in name if char in '/\\:*?"<>|' or not char.isprintable()})
    if bad:
        yield ConfigProblem(setting, f"{what} may not contain {' '.join(map(repr, bad))}.")
    elif name.startswith(".") or name != name.strip() or len(name.encode(errors="surrogatepass")) > 120:
        sentence = f"{what} must not begin with a dot, begin or end with a space, or be longer than 120 bytes."
        yield ConfigProblem(setting, sentence)


def _stages(stages: list[dict[str, Any]]) -> Iterator[ConfigProblem]:
    for number, stage in enumerate(stages, 1):
        yield from stage_faults(stage, f"Stage {number}")


def stage_faults(stage: Mapping[str, Any], name: str) -> Iterator[ConfigProblem]:
    """Problems of the shape of one stage; its settings are checked with the others (`backend.config.stages`)."""
    strange = [key for key in stage if key not in STAGE_KEYS]
    iters, functions, weights = (stage.get(key) for key in STAGE_OWN)
    sentences: list[str] = []
    if strange:
        sentence = f"{name} has {quote(strange[0], 40)}, which no stage can have of its own; it can have "
        listed = quote(", ".join((*STAGE_OWN, *STAGE_DATA[:1], *STAGE_SETTINGS)), 199 - len(sentence))
        sentences.append(f"{sentence}{listed}.")
    if not isinstance(iters, int) or isinstance(iters, bool) or iters < 1:
        sentences.append(f"{name} needs iters, a whole number of steps above 0.")
    elif iters > MOST_STEPS:
        sentences.append(f"{name} has {quote(iters)} steps; at most {MOST_STEPS:,} can be trained.")
    if functions is not None and not (_is_list_of(functions, str) and functions):
        sentences.append(f"{name}: reward_functions must be a list of names.")
    elif functions and (twice := duplicates(functions)):
        sentences.append(f"{name} lists {quote(twice)} twice; list each reward function once.")
    if weights is not None and not _is_list_of(weights, (int, float)):
        sentences.append(f"{name}: reward_weights must be a list of numbers.")
    elif weights and not (any(weights) and all(abs(weight) <= LARGEST_WEIGHT for weight in weights)):
        sentences.append(f"{name}: reward_weights must lie within ±{LARGEST_WEIGHT:,}, and not all be 0.")
    elif weights and _is_list_of(functions, str) and functions and len(weights) != len(functions):
        sentences.append(f"{name} has {len(weights)} reward weights for {len(functions)} reward functions.")
    yield from (ConfigProblem("stages", sentence) for sentence in sentences)


def _is_list_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether it is a list of these; true and false are no numbers."""
    items = cast("list[Any]", value) if isinstance(value, list) else [None]
    return all(isinstance(item, kind) and not isinstance(item, bool) for item in items)


def _trackers(report_to: list[str]) -> Iterator[ConfigProblem]:
    if fault := report_to_fault(report_to):
        yield fault


def _project(tracker_project: str) -> Iterator[ConfigProblem]:
    if fault := project_fault(tracker_project):
        yield fault


_CHECKS = (_stop_conditions, _best_metric, _export_name, _run_name, _stages, _trackers, _project)
_CHECKS_ELSEWHERE: tuple[tuple[Callable[..., Iterable[ConfigProblem]], tuple[str, ...]], ...] = (
    (template_faults, ("prompt_template",)),
    (pattern_faults, ("answer_pattern",)),
    (evaluation_set_faults, ("eval_data",)),
    (map_function_faults, ("map_function", "reward_functions_file")),
    (held_output_faults, ("output_regex", "output_schema", "ratio_against")),
)
