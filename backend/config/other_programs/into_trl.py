"""A run's settings as arguments of TRL (`trl grpo --config`), and what of them is not carried over. Rows of TRL's table
that only rename a setting are read backwards; the functions here undo the others. The exported train.py follows our
learning-rate curve; these arguments are what `trl grpo` does without it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from backend.config.config import SETTINGS, Config
from backend.config.other_programs.keys import TABLES, Translated, plain
from backend.config.other_programs.trl import SDPO_TABLE, TRL
from backend.config.setting import NEVER
from backend.config.updates import OWN, final_rate, warmup_updates
from backend.models.architectures import adapter_scale
from backend.runs.metric_names import EVALUATION, transformers_name
from backend.tools.mcp_settings import openenv_servers
from backend.utils.errors import UserError
from backend.utils.text import quote

_ROWS = (
    "prompt_feature answer_feature type_feature system_feature system_prompt prompt_template answer_pattern "
    "map_function valid_data test_data eval_data validation_split train_split valid_split test_split dataset_config "
    "streaming"
)
_STOPPING = ("early_stopping_patience", "early_stopping_min_delta")
BY_FILES: dict[str, str] = {  # setting → the file of the folder that carries it, where `trl grpo` would ignore it
    **dict.fromkeys(_ROWS.split(), "dataset.py makes the rows with it"),
    "data_seed": "train.py takes prompts in the order of this seed; trl grpo alone shuffles by seed",
    "reward_functions": "rewards.py has one function for each",
    "reward_functions_file": "a copy lies in user_code/, and rewards.py loads it",
    "max_seq_length": "train.py leaves out prompts with no room for a completion; vLLM gets it as its limit",
    **dict.fromkeys(("max_prompt_length", "long_prompts"), "train.py applies it"),
    "num_layers": "train.py puts adapters on the last layers only; trl grpo alone on all",
    **dict.fromkeys(("tools_file", "tools"), "train.py loads a copy, as tools=[…]; trl grpo alone has no tools"),
    "environment": "train.py loads a copy, as environment_factory=…; trl grpo alone has no environments",
    "environment_column": "dataset.py writes it as the column environment",
    "tokenizer": "train.py loads it",
    "val_batches": "train.py evaluates on so many prompts; trl grpo alone on all",
    "test": "train.py answers the test prompts at the end",
    "test_batches": "train.py takes so many test prompts",
    **dict.fromkeys(_STOPPING, "train.py adds transformers' EarlyStoppingCallback"),
}
AS_TRL_DOES = {"num_layers": -1, "val_batches": -1}  # settings whose default is not what TRL does → the value that is
INSTEAD = {  # setting without a counterpart in TRL → what happens instead, where that is worth saying
    "adapter": "the run begins with new adapters; export their run with --format original, and name it as the model",
    "reference_model_path": "the reference is the model itself as it was before training",
    "distillation_weight": "TRL's GRPO has no self-distillation; its experimental SDPOTrainer does",
    "log_kl": "TRL computes no KL without a KL weight",
    "kl_estimator": "TRL has Schulman's k3",
    "ratio_against": "the ratio is against the policy that sampled",
    "advantage_baseline": "TRL's GRPO takes the mean of the group; its RLOOTrainer leaves one out",
    "reward_weight_schedule": "the weights stay as they begin",
    "stages": "the settings outside of the stages hold for the whole run, whose length is iters",
    "own_optimizer": "AdamW; an object of a program is in no file",
    "own_schedule": "the learning rate as it is set; an object of a program is in no file",
    "stop_when": "the run goes on to its end",
    "memory_limit": "memory is PyTorch's there; lower per_device_train_batch_size",
    "mcp_servers": "TRL speaks to no MCP servers: the model is trained without their tools",
    "fuse": "the adapter is saved by itself; PEFT's merge_and_unload merges it",
}
_OF_GRPO = {word: fate for title, table in TRL.sections.items() if title != SDPO_TABLE for word, fate in table.items()}
_CARRIED = {key for fate in _OF_GRPO.values() if isinstance(fate, Translated) for key in fate.settings} | {
    *("scale", "tracker_run_name", "output_schema")
}
_UNLESS_DEFAULT = (  # settings that are off in TRL too at their default, and then not written
    *("min_p", "neftune_noise_alpha", "chat_template_kwargs", "num_generations_eval", "reward_weights", "delta"),
    *("epsilon_high", "off_policy_mask_threshold", "repetition_penalty", "save_only_model", "use_rslora"),
    *("mask_truncated_completions", "dataset_config", "modules_to_save", "sync_ref_model", "load_best_at_end"),
    *("tracker_project", "run_name"),
)
NO_LIMIT = 1_000_000  # for a correction without an upper limit: as large as the setting may be
WHOLE_RUN = 0.999999  # a warm-up over all updates, as a share below 1
_OPTIM = {(ours, bits): names.split()[0] for names, ours, bits in TABLES["optimizers"]}
"""(our optimizer, bits of its state) → transformers' usual name."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A setting that is not carried over. `instead`: what happens instead, a clause without a full stop."""

    setting: str
    value: Any
    instead: str

    @property
    def line(self) -> str:
        return f"{self.setting}: {self.shown} – {self.instead}"

    @property
    def shown(self) -> str:
        """Its value; the export dialog shows it too."""
        if self.value is None:
            return "empty"
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return f"{self.value:g}" if isinstance(self.value, float) else quote(self.value, 60)


@dataclass(slots=True)
class TrlSettings:
    """The arguments of TRL for a run's settings: `words`, in the order of its table. `left_out`: settings that nothing
    there carries. `by_files`: settings that the folder's own files carry, and the words do not → how."""

    config: Config
    words: dict[str, Any] = field(default_factory=dict[str, Any])
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    by_files: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def updates(self) -> int | None:
        """Updates of the whole run; None where its length is in epochs."""
        return None if self.config.epochs else self.config.iters * self.config.updates_per_step

    def put(self, **words: Any) -> None:
        self.words |= {word: plain(value) if isinstance(value, float) else value for word, value in words.items()}

    def leave(self, setting: str, instead: str) -> None:
        self.left_out.append(LeftOut(setting, getattr(self.config, setting), instead))

    def curve(self, setting: str, alone: str) -> None:
        """Note that train.py carries a setting of the learning rate. `alone`: what `trl grpo` does without it."""
        self.by_files[setting] = f"train.py follows the curve of GRPO Studio; trl grpo alone: {alone}"

    def applies(self, setting: str) -> bool:
        return SETTINGS[setting].applies(vars(self.config))


def trl_yaml(words: Mapping[str, Any], heading: str) -> str:
    parts = [f"# {heading}\n"]
    for title, section in TRL.sections.items():
        if chosen := {word: words[word] for word in section if word in words}:
            parts.append(f"# {title}\n" + yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True, width=120))
    return "\n".join(parts)


def require_grpo(config: Config) -> None:
    if config.imitates:
        rows = "trl sft reads rows with prompt and completion, or messages, as they are"
        raise UserError("train_mode", f"The folder is for TRL's GRPO, and this run imitates answers; {rows}.")
    if config.train_mode == "distill":
        words = "trl distillation takes teacher_model_name_or_path, and beta for distillation_beta"
        raise UserError("train_mode", f"The folder is for TRL's GRPO, and this run has a teacher; {words}.")


def into_trl(config: Config) -> TrlSettings:
    """Every setting as TRL has it. Reads no files and refuses nothing: what TRL lacks is listed."""
    to = TrlSettings(config)
    renamed: dict[str, str] = {}
    for word, fate in _OF_GRPO.items():
        if isinstance(fate, Translated) and len(fate.settings) == 1 and not fate.is_converted and not fate.is_switch:
            renamed.setdefault(fate.settings[0], word)
    for key, word in renamed.items():
        value = getattr(config, key)
        if to.applies(key) and not (key in _UNLESS_DEFAULT and value == SETTINGS[key].default):
            to.put(**{word: value})
    for regroup in (_length, _rhythm, _best, _precision, _adapters, _importance, _sampling, _optimizer, _schedule):
        regroup(to, config)
    for key, about in SETTINGS.items():
        is_changed = to.applies(key) and getattr(config, key) != AS_TRL_DOES.get(key, about.default)
        if is_changed and key in BY_FILES:
            to.by_files[key] = BY_FILES[key]
        elif is_changed and key not in _CARRIED and key != "train_mode":
            to.leave(key, INSTEAD.get(key, "TRL has no such setting"))
    if openenv_servers(config.environment):
        to.leave("environment", "OpenEnv's own client is the environment there, as TRL's guide to OpenEnv has it")
    to.words = {word: to.words[word] for word in TRL.words if to.words.get(word) is not None}
    return to


def _length(to: TrlSettings, config: Config) -> None:
    accumulated = config.gradient_accumulation_steps
    to.put(
        output_dir="output",
        per_device_train_batch_size=config.batch_size * config.group_size,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=accumulated * config.steps_per_generation,
        num_train_epochs=config.epochs or None,
        max_steps=to.updates,
    )
    if config.grpo_loss_type == "bnpo" and accumulated > 1:
        same = "over a whole update dapo is the same formula"
        to.leave("grpo_loss_type", f"TRL's bnpo divides by the tokens of each batch; {same}")
        to.put(loss_type="dapo")


def _rhythm(to: TrlSettings, config: Config) -> None:
    updates, save, evaluate = config.updates_per_step, config.save_every, config.steps_per_eval
    group = config.num_generations_eval or config.group_size
    to.put(
        logging_steps=config.steps_per_report * updates,
        save_strategy="epoch" if save < 0 else "steps" if save < NEVER else "no",
        save_steps=save * updates if 0 < save < NEVER else None,
        eval_strategy="epoch" if evaluate < 0 else "steps" if evaluate else "no",
        eval_steps=evaluate * updates if evaluate > 0 else None,
        eval_on_start=bool(evaluate) or None,
        eval_delay=(config.eval_delay * updates if evaluate > 0 else 0) or None,
        per_device_eval_batch_size=config.prompts_per_evaluation_batch * group,
        report_to=[name for name in config.report_to if name != "csv"] or "none",
        log_completions=True,
        run_name=config.tracker_run_name or config.run_name or None,
    )
    if config.eval_delay and evaluate < 0:
        to.leave("eval_delay", "TRL counts epochs there where it evaluates once per epoch")
    if "csv" in config.report_to:
        to.leave("report_to", "TRL writes no csv: trainer_state.json in the output folder has every logged metric")


def _best(to: TrlSettings, config: Config) -> None:
    to.put(greater_is_better=False if config.best_is_lowest else None)
    if config.best_metric.startswith(EVALUATION):
        to.put(metric_for_best_model=transformers_name(config.best_metric, config.eval_data))
    elif config.best_metric:
        to.leave("best_metric", "TRL compares checkpoints by a metric of evaluations alone: by the held-out reward")
    wanted = [key for key in ("load_best_at_end", "early_stopping_patience") if getattr(config, key)]
    if wanted and config.steps_per_eval:
        to.words.setdefault("metric_for_best_model", "eval_reward")
        to.put(greater_is_better=not config.best_is_lowest)
        wanted = ["load_best_at_end"] if config.load_best_at_end else []
        why = "TRL needs Save to be a multiple of Eval for it: the last checkpoint counts"
        rhythms = config.save_every, config.steps_per_eval
        if rhythms == (-1, -1) or (min(rhythms) > 0 and rhythms[0] % rhythms[1] == 0 and rhythms[0] < NEVER):
            return
    else:
        why = "TRL knows the best checkpoint from evaluations, and this run has none: the last one counts"
    for key in wanted:
        to.leave(key, why)
    to.put(load_best_model_at_end=None)


def _precision(to: TrlSettings, config: Config) -> None:
    own = "float32" if config.train_type == "full" else "auto"
    nearest = {"6": "8", "mxfp4": "4"}.get(config.quantization, config.quantization)
    to.put(
        dtype=own if config.dtype == "auto" else config.dtype,
        bf16=config.dtype == "bfloat16",
        fp16=config.dtype == "float16" or None,
        load_in_4bit=nearest == "4" or None,
        load_in_8bit=nearest == "8" or None,
        use_cpu=config.device == "cpu" or None,
    )
    if nearest != config.quantization:
        to.leave("quantization", f"bitsandbytes has no such format: {nearest} bits of its own")


def _adapters(to: TrlSettings, config: Config) -> None:
    """PEFT's alpha is ours times the rank, or times its root."""
    adapts = config.train_type != "full"
    alpha = config.lora_alpha if config.lora_alpha is not None else adapter_scale(config) * config.rank
    to.put(
        use_peft=adapts,
        use_dora=config.train_type == "dora" or None,
        lora_alpha=alpha if adapts else None,
        lora_target_modules=(list(config.lora_keys) or ["all-linear"]) if adapts else None,
    )
    if config.sync_ref_model and (adapts or config.beta == 0):
        why = "without a KL weight TRL has no reference"
        if adapts:
            why = "TRL moves no reference under adapters: the reference stays the base model"
        to.leave("sync_ref_model", why)
        to.put(sync_ref_model=None)


def _importance(to: TrlSettings, config: Config) -> None:
    if config.importance_sampling_level == "sequence_token":
        to.put(importance_sampling_level="sequence")
        to.leave("importance_sampling_level", "sequence has the same ratio, with one gradient for the whole completion")
    high, low, mode = config.sampling_correction_max, config.sampling_correction_min, config.sampling_correction
    if high is None:
        high = NO_LIMIT
        to.leave("sampling_correction_max", f"TRL takes 3 where none is given: {NO_LIMIT:,}, which nothing reaches")
    if low is not None and low >= high:
        low = None
        to.leave("sampling_correction_min", "TRL wants it below the largest correction: no lower limit")
    if mode == "auto":
        mode = "sequence_truncate" if config.holds_output else "none" if config.dtype == "float32" else "token_truncate"
    if config.grpo_loss_type == "vespo" and mode.startswith("sequence"):
        mode = mode.replace("sequence", "token")
        to.leave("sampling_correction", f"TRL's vespo takes a correction by token alone: {mode}")
    to.put(
        vllm_importance_sampling_correction=mode != "none",
        vllm_importance_sampling_mode=mode if mode != "none" else None,
        vllm_importance_sampling_clip_max=high,
        vllm_importance_sampling_clip_min=low,
    )


def _sampling(to: TrlSettings, config: Config) -> None:
    own = {"presence_penalty": config.presence_penalty, "frequency_penalty": config.frequency_penalty}
    own |= {"stop": list(config.stop)}
    to.put(
        use_vllm=config.device != "cpu",
        vllm_mode="colocate",
        vllm_max_model_length=config.max_seq_length,
        vllm_structured_outputs_regex=config.output_regex or None,
        generation_kwargs={name: value for name, value in own.items() if value} or None,
    )
    for key in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(config, key) != SETTINGS[key].default:
            to.leave(key, "TRL samples with it and learns without it; here it is part of the policy")
    if config.output_schema:
        free = "they are free, and only rewards see their form"
        to.leave("output_schema", f"TRL constrains completions by a regular expression alone: {free}")


def _optimizer(to: TrlSettings, config: Config) -> None:
    bits = "8" if config.optimizer_bits == "8" and to.applies("optimizer_bits") else ""
    to.put(optim=_OPTIM.get((config.optimizer, bits), _OPTIM["adamw", bits]))
    if config.optimizer == "adam":
        to.leave("optimizer", "AdamW without weight decay is the same update")
        to.put(weight_decay=0.0)
    elif (config.optimizer, bits) not in _OPTIM:
        to.leave("optimizer", "transformers has no such optimizer: AdamW, which wants a learning rate of its own")


def _schedule(to: TrlSettings, config: Config) -> None:
    kind, options = _curve(to, config)
    to.put(lr_scheduler_type=kind, lr_scheduler_kwargs=options or None)
    ratio = config.lr_warmup_ratio
    if kind != "constant":
        if ratio is not None and ratio >= 1:  # transformers would read 1 as one update
            to.curve("lr_warmup_ratio", f"{WHOLE_RUN:%} of the updates")
            ratio = WHOLE_RUN
        # transformers 5 has one word for updates and, below 1, a share of the run.
        to.put(warmup_steps=ratio if ratio is not None else warmup_updates(config, to.updates or 0))
        if to.words["warmup_steps"] and config.lr_warmup_init:
            to.curve("lr_warmup_init", "the warm-up begins at 0")
    if kind in ("constant", "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay"):
        return
    # transformers' rate falls from the end of the warm-up to the end of the run.
    warmup: float | None = config.lr_warmup_ratio
    if warmup is None:
        warmup = config.lr_warmup_steps / to.updates if to.updates else None if config.lr_warmup_steps else 0.0
    if warmup is None or config.lr_decay_fraction != 1.0 - warmup:
        to.curve("lr_decay_fraction", "the rate falls until the end of the run")


def _curve(to: TrlSettings, config: Config) -> tuple[str, dict[str, Any]]:
    """(transformers' name, its options), the nearest where it has no such curve."""
    name, final = config.lr_schedule, final_rate(config.learning_rate, config.lr_final)
    if name == OWN:
        to.leave("lr_schedule", "constant, at the learning rate as it is set")
        return "constant", {}
    if name == "constant":
        return ("constant_with_warmup" if config.lr_warmup_ratio else "constant"), {}
    if name in ("constant_with_warmup", "inverse_sqrt"):
        return name, {}
    if final >= config.learning_rate:
        to.curve("lr_schedule", "constant with warm-up, as the final rate is not below the learning rate")
        return "constant_with_warmup", {}
    if name == "cosine":
        return ("cosine", {}) if not final else ("cosine_with_min_lr", {"min_lr": final})
    if name == "cosine_with_restarts":
        if final:
            to.curve("lr_final", "each cosine falls to 0")
        return name, {"num_cycles": config.lr_cycles}
    if name == "warmup_stable_decay":
        if to.updates is None or config.lr_decay_fraction > 1:
            to.curve("lr_schedule", "constant with warm-up, as it wants the length of the fall in updates")
            return "constant_with_warmup", {}
        decay = max(1, round(config.lr_decay_fraction * to.updates))
        if decay / to.updates != config.lr_decay_fraction:
            to.curve("lr_decay_fraction", f"the last {decay:,} updates")
        return name, {"num_decay_steps": decay, "min_lr_ratio": final / config.learning_rate}
    if name == "linear" and not final:
        return "linear", {}
    if name != "polynomial":
        to.curve("lr_schedule", f"polynomial with power 1, a line to {final:g}")
    return "polynomial", {"lr_end": final, "power": config.lr_power if name == "polynomial" else 1.0}
