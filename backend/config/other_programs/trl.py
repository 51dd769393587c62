"""TRL's GRPO: how its keys are read together, and its defaults. TRL counts completions and updates of the weights, GRPO
Studio prompts and steps. In TRL, `per_device_train_batch_size` completions are a batch, `gradient_accumulation_steps`
batches an update, and `steps_per_generation` batches are sampled at once (by default those of one update) and used
`num_iterations` times (trl/trainer/grpo_config.py). Here a step samples `batch_size` × `gradient_accumulation_steps` ×
`steps_per_generation` prompts and makes `num_iterations` × `steps_per_generation` updates. Schedules are those of
transformers/optimization.py, `get_scheduler`."""

import math
from collections.abc import Mapping
from typing import Any

from backend.config.other_programs import peft
from backend.config.other_programs.keys import (
    OPTIMIZER_ARGS,
    TABLES,
    OtherProgram,
    Translator,
    as_bool,
    as_number,
    plain,
    tables_of,
)
from backend.config.setting import MOST_COMPLETIONS, NEVER
from backend.rewards.catalogue import split_names
from backend.utils.text import about_value, quote

_BATCH = ("per_device_train_batch_size", "per_gpu_train_batch_size")
_TRL_BATCH, _OUR_GROUP, _TRL_LOGGING = 8, 4, 10  # TRL's batch in completions, our group, TRL's logging_steps
_MOST = MOST_COMPLETIONS**2  # completions of an update: as many as Batch and Gradient accumulation allow together
_TRL_PROMPT, _OUR_MAX_SEQ = 512, 2048  # tokens of a prompt in TRL's former default; our default of max_seq_length
_TEACHER = "teacher_model_name_or_path"
SDPO_TABLE = "Self-distillation (SDPOConfig of trl.experimental)"
_SDPO = {*TABLES["trl"][SDPO_TABLE]["same"].split(), *TABLES["trl"][SDPO_TABLE]["converted"]}
SCHEDULES = {name: ours for ours, names in TABLES["schedules"].items() for name in names.split()}  # theirs → ours
_POLYNOMIAL_END = 1e-7  # of `get_polynomial_decay_schedule_with_warmup`; the others end at 0
OPTIMIZERS = {name: (ours, bits) for names, ours, bits in TABLES["optimizers"] for name in names.split()}
"""transformers' name of an optimizer → (ours, bits of its state)."""
REWARDS: dict[str, str] = TABLES["rewards"]
SAMPLING = "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
REGEX_WORDS = (
    *("guided_decoding_regex", "vllm_guided_decoding_regex"),
    *("structured_outputs_regex", "vllm_structured_outputs_regex"),
)
NO_REMOTE_CODE = "the code of models is mlx-lm's; none from a model's repository is run"
_LOADED_ELSEWHERE = ("attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "trust_remote_code")
"""Options of `from_pretrained` that say how PyTorch loads a model."""


def _distillation(to: Translator) -> None:
    """DistillationConfig, whose beta is the divergence's; one completion a prompt by default. Before `_batches`."""
    if (teacher := to.take(_TEACHER)) is None:
        return
    to.fill("teacher_model", teacher, _TEACHER)
    to.fill("train_mode", "distill", _TEACHER)
    to.fill("distillation_beta", to.take("beta"), _TEACHER)
    if not to.has("num_generations", "group_size"):
        to.values["group_size"] = 1


def _batches(to: Translator) -> None:
    counts_batches = to.has("steps_per_generation") and to.program == "trl" and not to.has("batch_size")
    if not to.has(*_BATCH, "generation_batch_size") and not counts_batches:
        return
    word = next((name for name in (*_BATCH, "generation_batch_size") if to.has(name)), "steps_per_generation")
    group = int(to.peek("num_generations", "group_size", default=_OUR_GROUP))
    names = ((*_BATCH,), ("generation_batch_size",), ("gradient_accumulation_steps",), ("steps_per_generation",))
    of_others = len(to.faults)
    size, sampled, accumulated, rollout = (int(to.number(*name, whole=True) or 0) for name in names)
    if len(to.faults) > of_others or group < 1:
        return
    size, accumulated = size or _TRL_BATCH, accumulated or 1
    completions, product = size * accumulated, f"{quote(f'{size:,}', 24)} × {quote(f'{accumulated:,}', 24)}"
    both = sampled and rollout
    rollout = sampled // size if sampled else rollout or accumulated
    if rollout and accumulated % rollout == 0 and to.peek("num_iterations", default=1) == 1:
        rollout = accumulated  # the policy is the same for all batches of an update
    counts = f"steps_per_generation ({rollout:,})", f"gradient_accumulation_steps ({accumulated:,})"
    sizes = f"generation_batch_size ({sampled:,})", f"per_device_train_batch_size ({size:,})"
    wrong = [
        (both, word, "generation_batch_size and steps_per_generation say the same; give one of them."),
        (sampled % size, "generation_batch_size", f"{sizes[0]} must be a multiple of {sizes[1]}."),
        (rollout % accumulated, "steps_per_generation", f"{counts[0]} must be a multiple of {counts[1]} here."),
        (completions > _MOST, word, f"An update of {product} completions is more than the {_MOST:,} possible here."),
    ]
    if found := next((problem for is_so, *problem in wrong if is_so), None):
        to.refuse(*found)
    else:
        prompts, most = math.ceil(completions / group), max(1, size // group)
        divisors = (d for d in range(1, math.isqrt(prompts) + 1) if prompts % d == 0)
        piece = max(part for d in divisors for part in (d, prompts // d) if part <= most)
        to.fill("batch_size", piece, word)
        to.fill("gradient_accumulation_steps", prompts // piece, word)
        if rollout > accumulated:
            to.fill("steps_per_generation", rollout // accumulated, word)
        made = f"{prompts:,} {'prompt' if prompts == 1 else 'prompts'} of {group:,}"
        rounded = f", rounded up to whole groups: {prompts * group:,} completions" if completions % group else ""
        to.remarks[word] = f"{product} completions an update are {made}{rounded}"


def _updates_a_step(to: Translator) -> int:
    return max(1, int(to.peek("num_iterations", default=1) * to.peek("steps_per_generation", default=1)))


def _length(to: Translator) -> None:
    """`max_steps` and `num_train_epochs` → iters or epochs. As in TRL, max_steps above 0 comes first."""
    updates, steps = _updates_a_step(to), to.number("max_steps")
    if steps is not None and steps > 0:
        to.fill("iters", math.ceil(steps / updates), "max_steps")
        if updates > 1:
            to.remarks["max_steps"] = f"{plain(steps):,} updates, {updates:,} a step"
        if to.take("num_train_epochs") is not None:
            to.remarks["num_train_epochs"] = "max_steps is given, which counts"
    elif (passes := to.number("num_train_epochs")) is not None:
        if passes < 0 or passes != int(passes):
            whole = f"num_train_epochs must be a whole number of passes here, not {quote(passes, 40)}"
            to.refuse("num_train_epochs", f"{whole}; or give max_steps.")
        else:
            to.fill("epochs", int(passes), "num_train_epochs")


def _rhythm(to: Translator) -> None:
    def strategy_of(*words: str) -> str:
        word, value = to.first(*words), to.take(*words)
        strategy = "no" if value is False else "" if value is None else str(value).strip().lower()
        if strategy == "best":
            to.remarks[word] = "the best checkpoint is kept in any case"
        elif strategy not in ("", "no", "steps", "epoch"):
            to.refuse(word, f"{word} must be no, steps or epoch, not {quote(value, 40)}.")
        return strategy if strategy in ("no", "steps", "epoch") else ""

    def steps_of(word: str) -> int | None:
        """Updates, or below 1 a share of the run, in steps of ours, rounded up."""
        number = to.number(word)
        if number is None or number >= 1:
            return None if number is None else math.ceil(number / _updates_a_step(to))
        iters = as_number(to.values.get("iters"))
        if number <= 0 or iters is None or to.values.get("epochs"):
            share = "give a number of steps, or with a share of the run its max_steps too"
            to.refuse(word, f"{word} is {number:g}: {share}.")
            return None
        return max(1, math.ceil(number * iters))

    to.fill("steps_per_report", logging := steps_of("logging_steps"), "logging_steps")
    word = to.first("eval_strategy", "evaluation_strategy")
    strategy, steps = strategy_of("eval_strategy", "evaluation_strategy"), steps_of("eval_steps")
    if strategy == "no":
        to.fill("steps_per_eval", 0, word)
    elif strategy or steps is not None:
        every = -1 if strategy == "epoch" else steps or logging or _TRL_LOGGING
        to.fill("steps_per_eval", every, word if strategy else "eval_steps")
        to.values.setdefault("val_batches", -1)
    if (prompts := to.number("per_device_eval_batch_size", "per_gpu_eval_batch_size", whole=True)) is not None:
        group = to.peek("num_generations_eval", "num_generations", "group_size", default=_OUR_GROUP)
        to.fill("eval_batch_size", math.ceil(prompts / max(1, group)), "per_device_eval_batch_size")
    counts_epochs = strategy == "epoch"
    strategy, steps = strategy_of("save_strategy"), steps_of("save_steps")
    every = {"no": NEVER, "epoch": -1}.get(strategy, steps)
    to.fill("save_every", every, "save_strategy" if strategy in ("no", "epoch") else "save_steps")
    if to.program == "trl" and (delay := to.number("eval_delay")) is not None:
        if delay and counts_epochs:
            to.refuse("eval_delay", "eval_delay counts epochs with eval_strategy: epoch; set it to 0 or count steps.")
        to.values["eval_delay"] = math.ceil(delay / _updates_a_step(to))


def _optimizer(to: Translator) -> None:
    if (name := to.take("optim")) is not None:
        ours, bits = OPTIMIZERS.get(str(name).strip().lower(), ("", ""))
        to.fill("optimizer", ours or None, "optim")
        to.fill("optimizer_bits", bits or None, "optim")
        if not ours:
            nearest = "adamw is nearest, with optimizer_bits: 8 for a small state"
            to.refuse("optim", f"There is no optimizer {quote(name, 40)} here; {nearest}.")
    pairs = str(to.take("optim_args") or "").replace(" ", "").split(",")
    arguments = {name: value for name, _, value in (pair.partition("=") for pair in pairs) if name}
    to.spread("optim_args", arguments, OPTIMIZER_ARGS)


def _schedule(to: Translator) -> None:
    """`lr_scheduler_type`, its kwargs and the warm-up, with transformers' own ends. After `_length`."""
    named, word = to.take("lr_scheduler_type"), "lr_scheduler_type"
    is_trl = to.program == "trl"  # elsewhere warmup_steps are our supervised ones
    if named is None and to.has("warmup_ratio", "warmup_steps") and is_trl and not to.has("lr_schedule"):
        named = "linear"
        to.remarks[to.first("warmup_ratio", "warmup_steps")] = "with TRL's linear schedule"
    options = to.options("lr_scheduler_kwargs")
    ratio, steps = to.number("warmup_ratio"), to.number("warmup_steps") if is_trl else None
    if steps is not None and 0 < steps < 1:  # transformers 5: a share of the run
        ratio, steps = steps, None
    if steps:  # as there, a number of updates comes before a ratio
        to.fill("lr_warmup_steps", int(steps), "warmup_steps")
    elif ratio:
        to.fill("lr_warmup_ratio", ratio, "warmup_ratio")
    elif steps == 0 or ratio == 0:
        to.values.setdefault("lr_warmup_steps", 0)
    if named is None:
        if options:
            to.remarks["lr_scheduler_kwargs"] = "it shapes the schedule of lr_scheduler_type, which is not given"
        return
    kind = str(named).strip().lower().removeprefix("schedulertype.")
    if (ours := SCHEDULES.get(kind)) is None:
        built = ", ".join(sorted(set(SCHEDULES.values())))
        to.refuse(word, about_value("The schedule ", kind, f" of transformers is not built; one of {built} is.", 40))
        return
    to.fill("lr_schedule", ours, word)
    if ours == "constant":
        return
    if not to.has("lr_warmup_steps", "lr_warmup_ratio"):
        to.values.setdefault("lr_warmup_steps", 0)
    to.values.setdefault("lr_warmup_init", 0.0)
    if ours in ("linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"):
        _fall(to, ours, options)
    for name in options:
        to.refuse("lr_scheduler_kwargs", f"{kind} has no {quote(name, 40)} here; take it out of lr_scheduler_kwargs.")


def _fall(to: Translator, ours: str, options: dict[str, Any]) -> None:
    """What a schedule falls to, and over which part of the run; takes the options that it reads."""
    iters = None if to.values.get("epochs") else as_number(to.values.get("iters"))
    updates = iters and iters * to.peek("num_iterations", default=1) * to.peek("steps_per_generation", default=1)
    peak = as_number(to.values.get("learning_rate"))
    if ours == "warmup_stable_decay":  # falls over its last num_decay_steps updates to min_lr_ratio of the peak
        decay = as_number(options.pop("num_decay_steps", None))
        options.pop("num_stable_steps", None)  # the rest of the run
        if not decay or not updates:
            needed = "num_decay_steps in lr_scheduler_kwargs, and max_steps"
            to.refuse("lr_scheduler_kwargs", f"warmup_stable_decay needs {needed}; or set lr_decay_fraction.")
            return
        to.values.setdefault("lr_final", as_number(options.pop("min_lr_ratio", 0.0), 0.0) * (peak or 0.0))
        to.values.setdefault("lr_decay_fraction", decay / updates)
        return
    end: Any = options.pop("lr_end", _POLYNOMIAL_END) if ours == "polynomial" else options.pop("min_lr", None)
    share = as_number(options.pop("min_lr_rate", None))
    if end is None and share is not None and peak is not None:
        end = share * peak
    to.values.setdefault("lr_final", 0.0 if end is None else end)
    ratio = as_number(to.values.get("lr_warmup_ratio"))
    if ratio is None:
        steps = as_number(to.values.get("lr_warmup_steps"))
        ratio = steps / updates if steps and updates else 0.0
    to.values.setdefault("lr_decay_fraction", 1.0 - ratio if 0 <= ratio < 1 else 1.0)
    if ours == "cosine_with_restarts":
        to.values.setdefault("lr_cycles", options.pop("num_cycles", 1))
    if ours == "polynomial":
        to.values.setdefault("lr_power", options.pop("power", 1.0))
    if ours == "cosine" and as_number(options.get("num_cycles")) == 0.5:
        options.pop("num_cycles")  # half a wave is the plain cosine


def _model(to: Translator) -> None:
    options, revision = to.options("model_init_kwargs"), to.take("model_revision")
    revisions = {to.first("model_name_or_path", "model"): options.pop("revision", revision)}
    for key, revision in (revisions | {"teacher_model": to.take("teacher_model_revision")}).items():
        if revision not in (None, "", "main"):
            to.values[key] = f"{to.values.get(key, '')}@{revision}"
    if as_bool(options.get("trust_remote_code")):
        to.remarks["model_init_kwargs"] = NO_REMOTE_CODE
    to.spread("model_init_kwargs", options, {"dtype": "dtype", "torch_dtype": "dtype"}, _LOADED_ELSEWHERE)
    flags = [flag for flag in ("bf16", "fp16") if as_bool(to.values.get(flag))]
    if to.program == "trl" and flags and to.take("dtype", "torch_dtype") is not None:
        to.remarks["dtype"] = f"{flags[0]} is on, and is what TRL computes in"


def _adapters(to: Translator) -> None:
    use_peft, dora = to.flag("use_peft"), to.flag("use_dora")
    if use_peft is not None:
        to.fill("train_type", "full" if not use_peft else "dora" if dora else "lora", "use_peft")
        if use_peft:
            to.values.setdefault("num_layers", -1)
    elif dora:
        to.fill("train_type", "dora", "use_dora")


def _dataset(to: Translator) -> None:
    entries: Any = to.take("datasets") or [{}]
    if not (isinstance(entries, list) and len(entries) == 1 and isinstance(entries[0], Mapping)):
        sentence = "datasets must list one dataset here, with its path: mix several into one file, and give it as data."
        to.refuse("datasets", sentence)
        return
    to.spread("datasets", entries[0], {"path": "data", "name": "dataset_config", "split": "train_split"})
    if (share := to.number("test_split_size")) is not None:
        if not 0 <= share < 1:
            to.refuse("test_split_size", "test_split_size must be a share of the rows below 1 here.")
            return
        to.fill("validation_split", share, "test_split_size")
    if to.program != "trl":
        return
    # TRL limits prompt and completion each by itself, and cuts a prompt that is too long on the left.
    if to.has("max_prompt_length"):
        to.values.setdefault("long_prompts", "cut_left")
    needed = int(to.peek("max_completion_length", default=0) + to.peek("max_prompt_length", default=_TRL_PROMPT))
    if needed > _OUR_MAX_SEQ and not to.has("max_seq_length"):
        to.values["max_seq_length"] = needed
        to.remarks["max_completion_length"] = f"max_seq_length is {needed:,}, so that a prompt fits beside it"


def _rewards(to: Translator) -> None:
    model, listed = to.take("reward_model_name_or_path"), to.take("reward_funcs")
    if model is None and listed is None:
        return
    models = model if isinstance(model, list) else [model] if model else []  # a list where its path is absolute now
    entries = [*map(str, models), *reward_entries([] if listed is None else listed)]
    to.fill("reward_functions", entries, "reward_funcs" if model is None else "reward_model_name_or_path")
    if any(entry.startswith("accuracy_reward") for entry in entries) and not to.has("answer_feature"):
        to.values["answer_feature"] = "solution"
        to.remarks["reward_funcs"] = "answers are in the column solution, as TRL's accuracy_reward has them"


def reward_entries(listed: Any) -> list[str]:
    """Our entries for `reward_funcs`: a name, a list of names, or names with commas."""
    names = [str(name) for name in listed] if isinstance(listed, list) else split_names(str(listed))
    entries: list[str] = []
    for name in filter(None, map(str.strip, names)):
        module, dot, function = name.rpartition(".")
        if name.startswith("trl."):
            name, dot = function, ""
        is_path = dot and "/" not in name and "(" not in name and "::" not in name
        entries.append(REWARDS.get(name) or (f"{module.replace('.', '/')}.py::{function}" if is_path else name))
    return entries


def _generation(to: Translator) -> None:
    names = {name: name for name in (*SAMPLING.split(), "stop")} | {"stop_strings": "stop"}
    to.spread("generation_kwargs", to.options("generation_kwargs"), names)
    for word in REGEX_WORDS:
        to.fill("output_regex", to.take(word), word)
    mode, is_on = to.take("vllm_importance_sampling_mode"), to.flag("vllm_importance_sampling_correction")
    if is_on is False:
        to.fill("sampling_correction", "none", "vllm_importance_sampling_correction")
    elif is_on or mode is not None:
        to.fill("sampling_correction", "sequence_mask" if mode is None else mode, "vllm_importance_sampling_mode")


def _self_distillation(to: Translator) -> None:
    """SDPOConfig with its own defaults. Its `ema` is here a reference that follows; its loss has no KL term."""
    if to.program != "trl" or not _SDPO.intersection(to.written):
        return
    to.values.setdefault("distillation_weight", 1.0)
    kind = str(to.take("teacher_model_kind") or "ema").strip().lower()
    rate, steps = to.number("teacher_update_rate"), to.number("teacher_sync_steps", whole=True)
    to.fill("teacher_model_kind", "base" if kind == "ema" else kind, "teacher_model_kind")
    if kind == "ema" and to.peek("distillation_weight", default=1.0):
        word = next(word for word in to.written if word in _SDPO)
        to.remarks[word] = "TRL's teacher, ema, is here the reference, which follows the policy"
        to.fill("sync_ref_model", True, "teacher_model_kind")
        to.fill("ref_model_mixup_alpha", 0.05 if rate is None else rate, "teacher_update_rate")
        to.fill("ref_model_sync_steps", int(steps or 1), "teacher_sync_steps")


def _best(to: Translator) -> None:
    if (metric := to.take("metric_for_best_model")) is not None:
        name = str(metric).strip()
        if name in ("loss", "eval_loss"):
            nearest = "the loss of GRPO says little; eval_reward is nearest"
            to.refuse("metric_for_best_model", f"No loss is measured on held-out prompts, and {nearest}.")
        else:
            ours = name if name.startswith("eval/") else f"eval/{name.removeprefix('eval_')}"
            to.fill("best_metric", ours, "metric_for_best_model")
    greater = to.flag("greater_is_better")
    to.fill("best_is_lowest", None if greater is None else not greater, "greater_is_better")


_OF_REWARDS = ("beta", "num_generations", "loss_type", "epsilon")
_ADAPTER_DEFAULTS = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
"""Of its ModelConfig; the modules are PEFT's for Llama, Qwen and similar models."""


def _defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    defaults = TABLES["defaults"]["trl"] | peft.defaults(raw.get(peft.WORD))
    if raw.get(_TEACHER) is not None:
        defaults = {key: value for key, value in defaults.items() if key not in _OF_REWARDS}
    evaluates = any(raw.get(word) not in (None, False, "no") for word in ("eval_strategy", "evaluation_strategy"))
    if "model_name_or_path" in raw and evaluates:  # the layout of `trl grpo`, which reads no such split otherwise
        defaults |= {"dataset_test_split": "test"}
    return defaults | (_ADAPTER_DEFAULTS if as_bool(raw.get("use_peft")) else {})


TRL = OtherProgram(
    key="trl",
    name="TRL",
    source="document 003 (TRL 0.16 with transformers 4.49), and TRL 1.16 with transformers 5.23",
    sections=tables_of("trl"),
    regroups=(
        *(_distillation, _batches, _length, _rhythm, _optimizer, _schedule, _model, peft.peft_config),
        *(_adapters, _dataset, _rewards, _generation, _self_distillation, _best),
    ),
    defaults=_defaults,
)
