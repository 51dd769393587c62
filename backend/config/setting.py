"""The description of a setting: a pydantic field with label, help, unit, limits, and when it applies; the order of the
form: blocks, headings, and within a heading first what MLX LoRA Studio's guide documents; and which settings may have
other values from a step of a run on."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, starmap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

# Upper limits that several settings share: higher values are slips.
MOST_TOKENS = 10_000_000
NEVER = 1_000_000_000  # of settings that count steps between two events
MOST_COMPLETIONS = 1_000_000  # completions of one step
MOST_STEPS = 100_000_000
LARGEST_WEIGHT = 1_000_000  # of a reward: products with larger ones leave float32's exact range

Kind = (  # which editor a setting has. `prose`: text of several lines; `numbers`: a list; `mapping`: a small YAML map
    Literal["int", "float", "bool", "text", "prose", "choice", "file", "hosts", "model", "adapter", "dataset"]
    | Literal["list", "numbers", "mapping", "stages", "rewards"]
)

Use = Literal["task", "rows", "row_view", "prompt_limit", "rewards", "scoring", "duration", "tools"]
"""What depends on a setting (see `keys_used_by`). `task`: what a user trains on and for; a preset leaves it alone.
`rows`: which rows a dataset has. `row_view`: the preview of a row. `prompt_limit`: the longest prompt. `rewards`: how
completions are rewarded during a run. `scoring`: scores, rewards and advantages of given completions. `duration`: how
long a completion takes, sampling and learning."""

Part = Literal["", "sampling", "scoring", "policy"]
"""A part of a training step that a setting belongs to: completions, their rewards, the loss of the policy."""


def step_parts(values: Mapping[str, Any]) -> set[Part]:
    """The parts of a step. SFT samples only for rewards; distillation at weight 1 has no policy loss."""
    weight, mode = values.get("distillation_weight"), values.get("train_mode")
    if mode == "sft":
        samples = values.get("sft_targets") == "best_of_n" or values.get("reward_functions")
        return {"sampling", "scoring"} if samples else set()
    return {"sampling", "scoring"} if mode == "distill" and weight in (None, 1) else {"sampling", "scoring", "policy"}


def has_default_rewards(values: Mapping[str, Any]) -> bool:
    """True if no reward functions mean the defaults: in GRPO and SFT on the best of N, without environments."""
    mode = values.get("train_mode", "grpo")
    samples = mode == "grpo" or (mode == "sft" and values.get("sft_targets") == "best_of_n")
    return samples and not values.get("environment")


class Modes:
    """What the settings of a `Config`, or values that are being checked, say together about its way of training."""

    @property
    def imitates(self: Any) -> bool:
        """True for supervised fine-tuning: one update a step."""
        return self.train_mode == "sft"

    @property
    def learns_labels(self: Any) -> bool:
        """True for supervised fine-tuning on the labels of its rows."""
        return self.imitates and self.sft_targets == "dataset"

    @property
    def reads_labels(self: Any) -> bool:
        """True if a step imitates the labels of its rows."""
        return self.sft_targets == "dataset" and (self.imitates or self.warms_up)

    @property
    def warms_up(self: Any) -> bool:
        """True for a run whose first steps are supervised, and its others not."""
        return self.warmup_steps > 0 and not self.imitates

    @property
    def learns_from_rewards(self: Any) -> bool:
        return "policy" in step_parts(vars(self))

    @property
    def self_distillation_weight(self: Any) -> float:
        return (self.distillation_weight or 0.0) if self.train_mode == "grpo" else 0.0

    @property
    def needs_reference(self: Any) -> bool:
        """True if a step computes log-probabilities under the reference policy."""
        if not self.learns_from_rewards:
            return False
        measures = self.beta > 0 or self.log_kl or self.ratio_against == "reference"
        return measures or (self.teacher_model_kind == "base" and self.self_distillation_weight > 0)

    @property
    def moves_reference(self: Any) -> bool:
        """True if the reference is the run's own at some step: that of the end of a warm-up, or one that follows."""
        return self.needs_reference and not self.reference_model_path and (self.sync_ref_model or self.warms_up)

    @property
    def holds_output(self: Any) -> bool:
        return bool(self.output_regex or self.output_schema)

    @property
    def uses_tools(self: Any) -> bool:
        return bool(self.tools_file or self.environment or self.mcp_servers)

    @property
    def is_divided(self: Any) -> bool:
        return bool(self.hosts) and self.parallelism == "tensor"


@dataclass(frozen=True, slots=True)
class Choice:
    """One entry of a menu: the value in the file, its label, one sentence on when to choose it."""

    value: str
    label: str
    sentence: str = ""
    is_hidden: bool = False  # a program writes this value, or it is never right: menus leave it out
    paper: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `low` and `high` are inclusive unless `low_open` or `high_open`; None means no limit."""

    key: str
    kind: Kind
    default: Any
    section: str
    label: str
    help: str
    unit: str = ""
    choices: tuple[Choice, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    optional: bool = False  # empty is a valid value, None
    advanced: bool = False
    when: tuple[str, tuple[Any, ...]] | None = None  # (other key, values it must have for this setting to apply)
    part: Part = ""
    used_by: tuple[Use, ...] = ()
    stays_visible: bool = False  # the form disables it where `when` does not hold, instead of hiding it
    empty_is_default: bool = False  # an empty list means the default, as in mlx-lm-lora
    note: str = ""  # a sentence that the form always shows below the control
    group: str = ""  # heading in the form (HEADINGS)
    default_entry: str = ""  # label of an additional first menu entry for the default
    known_as: tuple[str, ...] = ()  # other labels that people search for

    def applies(self, values: Mapping[str, Any]) -> bool:
        return self.fits_mode(values) and (self.when is None or values.get(self.when[0]) in self.when[1])

    def fits_mode(self, values: Mapping[str, Any]) -> bool:
        is_chosen = self.when is None or self.when[0] != "train_mode" or values.get("train_mode") in self.when[1]
        return is_chosen and (not self.part or self.part in step_parts(values))


_RANGES = {"within": ("ge", "le"), "above": ("gt", "le"), "below": ("ge", "lt"), "between": ("gt", "lt")}


def setting(default: Any, label: str, *choices: tuple[Any, ...], section: str, **about: Any) -> Any:
    """Declare a setting; the text under the declaration is its help. `choices`: fields of `Choice`. `about` takes a
    range (low, high) or (low, high, unit) and fields of `Setting`. The range is `within` (both ends included), `above`
    (without its lower end), `below` (without its upper end) or `between` (without both)."""
    limits: dict[str, Any] = {}
    for name in about.keys() & _RANGES.keys():
        from_, to = _RANGES[name]
        low, high, about["unit"] = (*about.pop(name), "")[:3]
        about |= {"low": low, "low_open": from_ == "gt", "high": high, "high_open": to == "lt"}
        limits = {from_: low, to: high, "allow_inf_nan": False}
    about |= {"section": section, "label": label, "choices": tuple(starmap(Choice, choices))}
    return Field(default, **limits, json_schema_extra={"setting": about})  # pyright: ignore


_KINDS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "text", list: "list", dict: "mapping"}


def declared_settings(fields: Mapping[str, FieldInfo]) -> Iterator[Setting]:
    """The settings behind pydantic fields declared with `setting`."""
    helps: dict[str, str] = {}  # key → the text under its declaration, which Python does not keep
    for file in (Path(__file__).parent / "settings").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for field, text in pairwise(node.body) if isinstance(node, ast.ClassDef) else ():
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(help))):
                        helps[key] = " ".join(help.split())
    for key, field in fields.items():
        about = dict(cast("dict[str, Any]", field.json_schema_extra)["setting"])
        types = get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
        about.setdefault("kind", "choice" if about["choices"] else _KINDS[get_origin(types[0]) or types[0]])
        yield Setting(
            key=key,
            default=field.get_default(call_default_factory=True),
            help=helps[key],
            optional=NoneType in types,
            **about,
        )


SECTIONS: dict[str, str] = {  # section key → title, in the order of the form
    "algorithm": "Algorithm",
    "model_data": "Model & Data",
    "fine_tune": "Fine-tune",
    "training": "Training Settings",
    "columns": "Dataset Columns",
    "output": "Output",
    "preference": "Preference And Judge",
    "generation": "GRPO Generation And Rewards",
}

MACHINES = "Machines"
HEADINGS = (  # in the order of the form
    "",  # settings without a heading come first
    *("LoRA Settings", "Weights"),
    *("Steps and batches", "Learning rate and optimizer", "Evaluation and checkpoints", "Memory, test and fusing"),
    *("Supervised learning", "Early stopping", MACHINES),
    *("Columns", "Prompts", "Answers", "Rows and splits", "Held-out prompts"),
    *("Sampling", "Loss", "Self-distillation", "Entropy", "Advantages", "Rewards over the run"),
    *("Limits of reward functions", "Tools and environments"),
)

DOCUMENTED: dict[str, tuple[str, ...]] = {  # section → keys of the guide, in its order
    "algorithm": ("train_mode",),
    "model_data": ("model", "data", "lm_studio_name"),
    "fine_tune": ("train_type", "num_layers", "rank", "scale", "dropout", "quantization"),
    "training": (
        *("iters", "epochs", "batch_size", "max_seq_length", "seed", "learning_rate", "optimizer", "lr_schedule"),
        *("steps_per_report", "steps_per_eval", "save_every", "val_batches", "gradient_accumulation_steps"),
        *("seq_step_size", "test_batches", "grad_checkpoint", "mask_prompt", "fuse"),
    ),
    "columns": ("prompt_feature", "answer_feature", "type_feature"),
    "output": ("run_name",),
    "preference": ("beta", "reference_model_path"),
    "generation": (
        *("group_size", "max_completion_length", "temperature", "epsilon", "top_p", "top_k", "min_p", "epsilon_high"),
        *("grpo_loss_type", "importance_sampling_level"),
        *("reward_functions", "reward_weights", "reward_functions_file"),
    ),
}


def documented_part(section: str, settings: Iterable[Setting]) -> list[Setting]:
    """The documented settings of a section, each followed by what depends on it and is not advanced."""
    members = [about for about in settings if about.section == section]
    documented = DOCUMENTED.get(section, ())
    part: list[Setting] = []
    for key in documented:
        part += [about for about in members if about.key == key]
        dependent = (about for about in members if about.when is not None and about.when[0] == key)
        part += [about for about in dependent if not about.advanced and about.key not in documented]
    return part


def in_form_order(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Key → setting: by section and heading, the documented ones first, the advanced ones last."""
    settings = list(settings)
    ordered: dict[str, Setting] = {}
    for section in SECTIONS:
        members = [about for about in settings if about.section == section]
        members.sort(key=lambda about: about.advanced)  # stable: otherwise in the order of declaration
        once = {about.key: about for about in (*documented_part(section, settings), *members)}
        ordered |= sorted(once.items(), key=lambda entry: HEADINGS.index(entry[1].group))
    return ordered


STEERABLE: tuple[str, ...] = (  # settings that may change during a run, in the order of the offer
    *("iters", "learning_rate", "lr_final", "max_grad_norm", "beta", "epsilon", "epsilon_high", "delta"),
    *("entropy_coef", "temperature", "top_p", "top_k", "min_p", "reward_weights", "reward_weights_final"),
    *("scale_rewards", "mask_truncated_completions", "dynamic_sampling", "save_every", "steps_per_eval"),
    *("stop_when", "early_stopping_patience", "early_stopping_min_delta"),
)

AT_RESUME = ("hosts", "distributed_backend", "on_lost_rank", "parallelism")
"""Settings that may also change when a run is resumed: where it runs, not what it learns."""

DATASET_KEYS = (  # which rows a dataset has and how they become prompts: an evaluation set may have its own
    *("data", "dataset_config", "train_split", "valid_split", "test_split"),
    *("prompt_feature", "answer_feature", "type_feature", "system_feature"),
    *("system_prompt", "prompt_template", "answer_pattern", "map_function"),
)

STAGE_OWN = ("iters", "reward_functions", "reward_weights")
"""Keys of a stage that are its own: its length, and its scoring (`backend.trainer.scoring_stages`)."""
STAGE_SETTINGS = (  # that a stage may have; memory is planned with all stages known, so those that decide it too
    *(key for key in STEERABLE if key not in (*STAGE_OWN, "reward_weights_final")),
    *("batch_size", "group_size", "max_completion_length"),
)
STAGE_DATA = tuple(key for key in DATASET_KEYS if key not in ("valid_split", "test_split"))
"""Settings of a stage's training rows. Held-out rows are the run's own, so that evaluations can be compared."""
STAGE_KEYS = (*STAGE_OWN, *STAGE_SETTINGS, *STAGE_DATA)

# Names by which a signature says which part of a `Config` it reads; any object with these settings will do.
AdapterSettings = Any  # which weights learn, and the shape of the adapters
ColumnSettings = Any  # which columns hold prompt, answer, type and system text, and whether rewards need an answer
DatasetSettings = Any  # which rows there are
ModelSettings = Any  # which model is loaded and how, with adapters and reference
PromptSettings = Any  # how a row becomes a prompt, and how long it may be
RewardSettings = Any  # reward functions of a run and its stages, and where they run
