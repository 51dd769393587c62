"""Every setting has a label and help, refuses invalid values, and means the same in a file as in the form."""

import ast
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backend.config import checks
from backend.config.config import SECTIONS, SETTINGS, dump, load, needs_reference, parse, problems, read, resolve_paths
from backend.config.notes import USUAL, unusual
from backend.config.setting import Modes, Setting
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.utils.errors import UserError
from backend.utils.text import about_path
from tests.support.cases import cases

SOUND = {"model": "owner/model", "data": "owner/rows"}
LARGEST = {"batch_size": 100, "gradient_accumulation_steps": 10, "steps_per_generation": 10, "group_size": 100}
"""A step of as many completions as are allowed."""
OWN_REWARDS = ({"reward_functions": ["r1_int", "f.py::f"]}, {"reward_functions_file": "f.py"})


def for_every_setting(check: Callable[[Setting], None]) -> Callable[[], None]:
    """A test that runs `check` on every setting and names all that fail: a hundred tests cost a second of setup."""

    def test() -> None:
        failures: list[str] = []
        for about in SETTINGS.values():
            try:
                check(about)
            except AssertionError as error:
                failures.append(f"{about.key}: {error}")
        assert not failures, "\n".join(failures)

    return test


def sentences(raw: dict[str, Any], key: str | None = None) -> list[str]:
    """The fault sentences of valid settings changed by `raw`; with `key`, only those of that setting."""
    return [fault.sentence for fault in problems(SOUND | raw) if key in (None, fault.setting)]


def one_sentence(raw: dict[str, Any], key: str) -> str:
    """The sentence of the only fault, which must be about `key`."""
    (fault,) = problems(SOUND | raw)
    assert fault.setting == key
    return fault.sentence


@for_every_setting
def test_a_default_is_valid_and_of_the_right_type(about: Setting) -> None:
    value = about.default or SOUND.get(about.key, about.default)
    assert not sentences({about.key: value}, about.key)
    types = {"int": int, "float": float, "bool": bool, "mapping": dict}
    types |= dict.fromkeys(("list", "rewards", "numbers", "stages"), list)
    assert about.default is None or type(about.default) is types.get(about.kind, str)
    assert about.default is not None or about.optional


@for_every_setting
def test_a_menu_holds_its_default_and_nothing_twice(about: Setting) -> None:
    values = [choice.value for choice in about.choices]
    assert len(set(values)) == len(values) and all(choice.label for choice in about.choices)
    if about.kind == "choice":
        assert about.default in values
        assert one_sentence({about.key: "nonsense"}, about.key).startswith(f"{about.label} cannot be 'nonsense'; it is")
        assert len(one_sentence({about.key: "/a/long/path" * 40}, about.key)) <= 200


@for_every_setting
def test_the_setting_that_another_depends_on_exists(about: Setting) -> None:
    if about.when is None:
        assert about.applies({})
        return
    key, values = about.when
    other = SETTINGS[key]
    assert not other.choices or {*values} <= {choice.value for choice in other.choices}
    assert about.applies({key: values[0]}) and not about.applies({key: object()})


def beyond(about: Setting, limit: float, towards: int) -> float:
    """The nearest value past a limit: the next number for whole ones, a little further for the others."""
    return limit + towards * (1 if about.kind == "int" else 1e-3)


@for_every_setting
def test_limits_are_enforced_on_both_sides(about: Setting) -> None:
    for limit, is_open, outward in ((about.low, about.low_open, -1), (about.high, about.high_open, 1)):
        if limit is None:
            continue
        refused = limit if is_open else beyond(about, limit, outward)
        allowed = beyond(about, limit, -outward) if is_open else limit
        faults = sentences({about.key: refused}, about.key)
        assert len(faults) == 1 and faults[0].startswith(f"{about.label} must be ") and "e+" not in faults[0]
        assert not [sentence for sentence in sentences({about.key: allowed}, about.key) if "must be" in sentence]


@for_every_setting
def test_a_value_of_another_type_is_refused_with_the_label(about: Setting) -> None:
    odd: dict[str, list[Any]] = (
        {"int": ["many", 1.5, True, [1], {}], "float": ["much", True, [0.5], {}, math.nan, math.inf]}
        | {"bool": ["perhaps", 2, [True]], "list": [5, [5], {"a": 1}], "rewards": [{"a": 1}, [[]]]}
        | {"numbers": [["heavy"], {"a": 1}, True], "mapping": ["a", [1]], "stages": ["a", [1], {"iters": 1}]}
    )
    for value in odd.get(about.kind, [True, {"a": 1}] if about.kind != "choice" else []):
        faults = sentences({about.key: value}, about.key)
        assert len(faults) == 1, (value, faults)
        assert faults[0].startswith(f"{about.label} must be ") and faults[0].endswith(".")


SPEC_FORM: dict[str, Any] = (  # the keys and defaults in the documentation
    {"train_mode": "grpo", "model": "", "data": "", "lm_studio_name": "", "train_type": "lora", "num_layers": 16}
    | {"rank": 8, "scale": 20.0, "dropout": 0.0, "quantization": "none", "iters": 1000, "epochs": 0, "batch_size": 1}
    | {"max_seq_length": 2048, "seed": 0, "learning_rate": 1e-5, "optimizer": "adamw", "weight_decay": 0.01}
    | {"adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "lr_schedule": "constant", "lr_warmup_steps": 40}
    | {"lr_warmup_init": 1e-7, "lr_decay_fraction": 0.8, "lr_final": 2e-6, "steps_per_report": 10}
    | {"steps_per_eval": 200, "save_every": 100, "val_batches": 25, "gradient_accumulation_steps": 1}
    | {"seq_step_size": 512, "efficient_long_context": False, "test_batches": 100, "test": False}
    | {"grad_checkpoint": False, "mask_prompt": True, "fuse": True, "prompt_feature": "prompt"}
    | {"answer_feature": "answer", "type_feature": "type", "system_feature": "system", "system_prompt": ""}
    | {"dataset_config": "", "train_split": "train", "valid_split": "valid", "test_split": "test"}
    | {"validation_split": 0.0, "chat_template_kwargs": {}, "stop": [], "num_generations_eval": None, "run_name": ""}
    | {"beta": 0.1, "reference_model_path": "", "log_kl": False, "use_bias_correction_kl": True}
    | {"ratio_against": "old", "group_size": 4, "max_completion_length": 512, "temperature": 0.8, "epsilon": 1e-4}
    | {"epsilon_high": None, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "grpo_loss_type": "grpo"}
    | {"importance_sampling_level": "token", "scale_rewards": "group", "num_iterations": 1, "keep_checkpoints": 3}
    | {"reward_functions": list(DEFAULT_REWARDS), "reward_weights": [], "reward_functions_file": ""}
    | {"reward_timeout": 60.0}
)


def test_documented_keys_have_their_documented_defaults() -> None:
    assert {key: SETTINGS[key].default for key in SPEC_FORM} == SPEC_FORM


@cases(
    ("raw", "needed"),
    [
        ({}, True),  # the KL weight is above 0 by default
        ({"beta": 0.0, "ratio_against": "old", "log_kl": False}, False),
        ({"beta": "0.1"}, True),
        *(({"beta": 0} | raw, True) for raw in ({"log_kl": True}, {"ratio_against": "reference"})),
    ],
)
def test_a_run_needs_a_reference_for_its_kl_or_its_ratio(raw: dict[str, Any], needed: bool) -> None:
    assert needs_reference(raw) == needed == parse(SOUND | raw).needs_reference
    unused = "there is no reference to move" in " ".join(sentences(raw | {"sync_ref_model": True}, "sync_ref_model"))
    assert unused == (not needed), "nothing else decides whether the reference is used"


def test_a_reference_that_follows_has_no_effect_without_rewards_and_is_not_refused() -> None:
    """The KL weight is above 0, so to say that it is 0 would be wrong."""
    assert not sentences({"train_mode": "sft", "sync_ref_model": True}, "sync_ref_model")


def test_what_several_settings_come_to() -> None:
    pieces = {"batch_size": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 5, "num_iterations": 7}
    config = parse(SOUND | pieces)
    assert (config.prompts_per_step, config.updates_per_step) == (30, 35)
    assert config.prompts_per_evaluation_batch == 30
    assert parse(SOUND | pieces | {"eval_batch_size": 4}).prompts_per_evaluation_batch == 4


SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"data": None} | raw, {"data": "a/b"}) for raw in ({"dataset": ["a/b"]}, {"dataset": "a/b"}, {"data": ["a/b"]})),
    ({"lora_parameters": {"rank": 4, "scale": "10", "dropout": 0.05}}, {"rank": 4, "scale": 10.0, "dropout": 0.05}),
    ({"lora_parameters": {"rank": 4, "scale": None}, "rank": None, "scale": 3}, {"rank": 4, "scale": 3.0}),
    ({"lora_parameters": {"keys": ["self_attn.q_proj"]}}, {"lora_keys": ["self_attn.q_proj"]}),
    ({"load_in_4bits": True, "load_in_8bits": False}, {"quantization": "4"}),
    ({"load_in_mxfp4": 1, "quantization": None}, {"quantization": "mxfp4"}),
    ({"load_in_4bits": False, "load_in_mxfp4": None}, {"quantization": "none"}),
    *(({"quantization": raw}, {"quantization": ours}) for raw, ours in ((8, "8"), ("4-bit", "4"), (None, "none"))),
    ({"reward_functions": "r1_int, r1_count_xml"}, {"reward_functions": ["r1_int", "r1_count_xml"]}),
    ({"reward_functions": "[r1_int]", "reward_weights": "[0.5]"}, {"reward_weights": [0.5]}),
    ({"reward_functions": "r1_int", "reward_weights": 2}, {"reward_weights": [2.0]}),
    ({"reward_functions": " "}, {"reward_functions": list(DEFAULT_REWARDS)}),
    ({"learning_rate": "1e-4", "epsilon": "1.0e-4"}, {"learning_rate": 1e-4, "epsilon": 1e-4}),
    *(({"importance_sampling_level": empty}, {"importance_sampling_level": "token"}) for empty in (None, "")),
    ({"epsilon_high": ""}, {"epsilon_high": None}),
    *(({"scale_rewards": raw}, {"scale_rewards": ours}) for raw, ours in ((True, "group"), (False, "none"))),
    ({"num_generations": 8, "loss_type": "dr-grpo"}, {"group_size": 8, "grpo_loss_type": "dr_grpo"}),
    ({"stop": "</answer>"}, {"stop": ["</answer>"]}),
    ({"prompt_feature": "", "valid_split": ""}, {"prompt_feature": "prompt", "valid_split": "valid"}),
    ({"mask_prompt": False, "train": True, "adapter_path": "here"}, {"mask_prompt": False}),
    ({"run_name": 12, "iters": 100.0}, {"run_name": "12", "iters": 100}),
]


@cases(("written", "canonical"), SPELLINGS)
def test_keys_of_other_programs_are_translated(written: dict[str, Any], canonical: dict[str, Any]) -> None:
    config = parse(SOUND | written)
    assert {key: getattr(config, key) for key in canonical} == canonical


def test_a_schedule_mapping_means_what_it_means_in_mlx_lm() -> None:
    """mlx's linear_schedule takes its end before its steps, and what the mapping leaves out is 0, not our default."""
    cosine = {"name": "cosine_decay", "arguments": ["1e-4", "5e2", 1e-6], "warmup": 10, "warmup_init": 1e-8}
    linear = {"name": "linear_schedule", "arguments": [1e-4, 1e-6, 200]}
    falling = {"lr_schedule": "cosine", "learning_rate": 1e-4, "lr_final": 1e-6, "lr_decay_fraction": 0.5}
    falling |= {"lr_warmup_steps": 10, "lr_warmup_init": 1e-8}
    assert parse(SOUND | {"lr_schedule": cosine, "learning_rate": 3e-5}).model_dump().items() >= falling.items()
    falling |= {"lr_schedule": "linear", "lr_decay_fraction": 2.0, "lr_warmup_steps": 0, "lr_warmup_init": 0.0}
    assert parse(SOUND | {"lr_schedule": linear, "iters": 100}).model_dump().items() >= falling.items()
    assert parse(SOUND | {"lr_schedule": {"name": "cosine_decay", "arguments": [1e-4, 10]}}).lr_final == 0
    assert parse(SOUND | {"lr_schedule": linear, "lr_warmup_steps": 7, "iters": 100}).lr_warmup_steps == 7


CONTRADICTING: list[tuple[dict[str, Any], str, str]] = [
    ({"dataset": ["a", "b"], "data": None}, "data", "2 datasets are listed; give exactly one."),
    ({"dataset": "a/b"}, "data", "data is owner/rows and dataset is a/b; give one of them."),
    ({"load_in_4bits": True, "load_in_8bits": True}, "quantization", "load_in_8bits makes it 8; give one of them."),
    ({"load_in_4bits": True, "quantization": 8}, "quantization", "quantization is 8, and load_in_4bits makes it 4"),
    ({"load_in_4bits": "flase"}, "load_in_4bits", "load_in_4bits must be true or false, not flase."),
    ({"group_size": 4, "num_generations": 8}, "group_size", "group_size is 4 and num_generations is 8; give one"),
    ({"rank": 8, "lora_parameters": {"rank": 16}}, "rank", "rank is 8, and lora_parameters makes it 16; give one"),
    ({"lora_parameters": 8}, "lora_parameters", "must be a mapping"),
]
"""No second fault about a default that the user did not choose, and no silent choice between the two keys."""
SCHEDULES: list[tuple[dict[str, Any], str, str]] = [
    ({"arguments": [1e-4]}, "lr_schedule", "a mapping with a name and arguments"),
    ({"name": "cosine_decay"}, "lr_schedule", "a list of at most three numbers"),
    ({"name": "one_cycle", "arguments": [1e-4, 0.9]}, "lr_schedule", "it is one of constant, constant_with_"),
    ({"name": "step_decay", "arguments": [1e-4, 0.9, 10]}, "lr_schedule", "give step as a word, with lr_final."),
    ({"name": "cosine_decay", "arguments": ["fast", 10]}, "learning_rate", "must be a number, not 'fast'"),
    ({"name": "cosine_decay", "arguments": [1e-4, "soon"]}, "lr_decay_fraction", "must be a number, not 'soon'"),
]


def test_an_unknown_key_is_a_fault_that_names_the_nearest() -> None:
    near = {"temprature": "temperature", "learning-rate": "learning_rate", "lora_paramters": "lora_parameters"}
    near |= {"load_in_4bitss": "load_in_4bits", "reward_function": "reward_functions", "datset": "dataset"}
    for key, nearest in near.items():
        assert one_sentence({key: 1}, key) == f"There is no setting {key}. Did you mean {nearest}?"
    assert one_sentence({"qqqq": 1}, "qqqq") == "There is no setting qqqq."
    assert one_sentence({"lora_parameters": {" ": 1}}, "config") == "A setting has no name."
    assert one_sentence({3: 1}, "3") == "There is no setting 3."  # pyright: ignore


def test_no_reward_function_means_the_defaults() -> None:
    assert parse(SOUND).reward_functions == list(DEFAULT_REWARDS) and parse(SOUND).weights == [1.0] * 5
    for empty in ("", [], "[]", None):
        assert parse(SOUND | {"reward_functions": empty}).reward_functions == list(DEFAULT_REWARDS)


@cases(
    ("raw", "key", "says"),
    [
        *CONTRADICTING,
        *(({"lr_schedule": schedule}, key, says) for schedule, key, says in SCHEDULES),
        ({"reward_functions": [], "reward_weights": [1, 2]}, "reward_weights", "Reward weights: 2,"),
        ({"reward_functions": ["a", "a"]}, "reward_functions", "listed twice"),
        ({"reward_weights": [1, 2]}, "reward_weights", "Reward weights: 2, reward functions: 5 (r1_acc"),
        ({"reward_weights": [0, 0, 0, 0, 0]}, "reward_weights", "Every reward weight is 0"),
        ({"reward_weights": [1, 1, 1, 1, math.nan]}, "reward_weights", "must be a number within ±1,000,000, not nan."),
        ({"reward_weights": [1, 1, 1, 1, -1_000_001]}, "reward_weights", "within ±1,000,000, not -1e+06."),
        (LARGEST | {"batch_size": 101}, "batch_size", "have 1,010,000 completions"),
        ({"eval_batch_size": 10_001, "num_generations_eval": 100}, "eval_batch_size", "have 1,000,100 completions"),
        ({"eval_batch_size": 250_001}, "eval_batch_size", "have 1,000,004 completions"),
        ({"save_every": 0}, "save_every", "at least 1 step, or −1: once per epoch"),
        ({"best_metric": "eval/reward", "steps_per_eval": 0}, "best_metric", "makes no evaluations"),
        ({"max_completion_length": 2048}, "max_completion_length", "leaves no room for a prompt within Max Seq (2048"),
        ({"num_layers": 0}, "num_layers", "nothing would be trained"),
        ({"train_type": "full", "quantization": 4}, "quantization", "Full fine-tuning has no gradient"),
        ({"train_type": "full", "rollout_quantization": 4}, "rollout_quantization", "trained as a whole"),
        ({"quantization": 8, "rollout_quantization": 4}, "rollout_quantization", "packed the base already"),
        ({"rollout_quantization": 4, "ratio_against": "reference"}, "ratio_against", "Quantised rollouts"),
        ({"train_type": "full", "dtype": "float16"}, "dtype", "float32 or bfloat16"),
        ({"train_type": "full", "adapter": "mine"}, "adapter", "has no adapter to start from"),
        ({"use_rslora": True}, "use_rslora", "give LoRA alpha"),
        ({"train_type": "dora", "quantization": 6}, "quantization", "DoRA cannot be trained on 6-bit"),
        ({"lm_studio_name": "mine", "fuse": False}, "lm_studio_name", "turn Fuse on"),
        ({"lm_studio_name": "a/b"}, "lm_studio_name", "may not contain '/'"),
        ({"run_name": "../up"}, "run_name", "may not contain '/'"),
        ({"run_name": ".."}, "run_name", "must not begin with a dot"),
        ({"run_name": "é" * 60 + "n"}, "run_name", "longer than 120 bytes"),
        ({"lr_schedule": "cosine", "lr_final": 1.0}, "lr_final", "rate (1) is above the learning rate (1e-05)."),
        ({"lr_schedule": "exponential", "lr_final": 0}, "lr_final", "never reaches 0"),
        ({"optimizer": "sgd", "optimizer_bits": 8}, "optimizer_bits", "The state of sgd is not built in 8 bits"),
        ({"optimizer": "own", "optimizer_bits": 8}, "optimizer_bits", "set 32"),
        ({"optimizer": "own", "hosts": "hosts.json"}, "optimizer", "in one process"),
        ({"lr_schedule": "own", "hosts": "hosts.json"}, "lr_schedule", "in one process"),
        ({"lr_schedule": "own", "stages": [{"iters": 1, "lr_final": 1e-6}]}, "stages", "A stage has lr_final"),
        ({"stop": ["", "x"]}, "stop", "may not be empty"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "tokenize is not an option to choose"),
        ({"temperature": 0}, "temperature", "Temp must be above 0, not 0."),
        ({"seed": 2**32}, "seed", "Seed must be at most 4294967295, not 4294967296."),
        ({"model": ""}, "model", "Choose a base model"),
        ({"data": " "}, "data", "Choose a dataset"),
        ({"data": "", "environment": {"a": "a.py::A"}}, "data", "Several environments need a dataset whose column"),
        ({"data": "", "environment": "a.py::A", "epochs": 1}, "epochs", "Without a dataset there are no epochs"),
        ({"tools": ["add", "find"]}, "tools", "No tools file is given that has add, find."),
        ({"tools_file": "tools.py", "output_regex": "a+"}, "tools_file", "cannot call tools while Output regex"),
        ({"mcp_servers": {"a": {"command": "x"}}, "output_schema": "{}"}, "tools_file", "while Output schema holds"),
        ({"run_name": True}, "run_name", "Run folder name must be text, not true."),
        ({"optimizer": "AdamV"}, "optimizer", "Did you mean adam?"),
    ],
)
def test_an_invalid_setting_is_one_fault(raw: dict[str, Any], key: str, says: str) -> None:
    assert says in one_sentence(raw, key)


AGREEING: list[dict[str, Any]] = [
    LARGEST,
    {"eval_batch_size": 10_000, "num_generations_eval": 100},
    {"reward_weights": [1_000_000, -1_000_000, 0, 0, 0]},
    {"best_metric": "reward", "steps_per_eval": 0},
    *(ours | raw for ours, raw in product(OWN_REWARDS, ({"stop_when": ["my_own > 1"]}, {"best_metric": "my_own"}))),
    {"max_completion_length": 2047},
    {"dtype": "float16", "run_name": "é" * 60},
    {"train_type": "full", "use_rslora": True},
    {"train_type": "dora", "quantization": "4"},
    {"quantization": "6"},
    {"lr_schedule": "cosine", "learning_rate": 1e-4, "lr_final": 1e-4},
    {"lr_schedule": "cosine", "lr_final": 0},
    {"optimizer": "lion", "optimizer_bits": 8},
    {"lr_schedule": "own", "stages": [{"iters": 1}]},
    {"sampling_correction": "token_mask"},
    {"sampling_correction": "token_mask", "sampling_correction_min": 3, "sampling_correction_max": 3},
    {"reward_weight_schedule": "linear", "reward_weights_final": [1, 0, 0, 0, 0]},
]


def test_settings_that_only_just_agree_are_valid() -> None:
    assert [(raw, faults) for raw in AGREEING if (faults := sentences(raw))] == []


def test_an_invalid_field_hides_no_other_fault() -> None:
    """Every limited setting past its limit, an unknown key, a cross-check with sound inputs, and no model."""
    limited = {key: about for key, about in SETTINGS.items() if about.low is not None}
    raw: dict[str, Any] = {key: beyond(about, about.low or 0, -1) for key, about in limited.items()}
    raw |= {"train_mode": "x", "model": "", "unknown": 1, "reward_weights": [1.0], "lm_studio_name": "a:b"}
    raw |= {"dataset": [1, 2], "optimizer": "x"}
    settings = [fault.setting for fault in problems(raw)]
    assert set(settings) == (raw.keys() | {"data"}) - {"dataset"}
    assert len(settings) == len(set(settings))
    order = [key for key in SETTINGS if key in settings]
    assert settings == ["unknown", *order], "in the form's order, what is not in the form first"


def test_a_cross_check_runs_only_if_its_settings_are_valid() -> None:
    faults = problems(SOUND | {"max_seq_length": "x", "max_completion_length": 9999})
    assert [fault.setting for fault in faults] == ["max_seq_length"]


def test_a_cross_check_reads_settings_that_exist_and_its_own_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node for node in ast.walk(ast.parse(Path(checks.__file__).read_text())) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "c"}
    assert len(read) > 50 and read <= SETTINGS.keys() | vars(Modes).keys()
    monkeypatch.setattr(checks, "RULES", (checks.Rule("model", "").when(lambda c: c.model.is_folder()),))
    with pytest.raises(AttributeError, match="is_folder"):
        checks.cross_setting_faults({"model": "a/b"})


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(("- a\n- b\n", "but it holds a list."), ("", "but it holds nothing.")),
        *(("just words", "but it holds plain text."), ("3", "but it holds a single value.")),
        ("a: [1,\nb: 2", "is not valid YAML at line 2"),
        ("a: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        (b"a: \xff", "cannot be read: it is not UTF-8 text."),
        ("a: \x07", "is not valid YAML"),
    ],
)
def test_a_file_without_settings_is_one_fault(tmp_path: Path, text: str | bytes, says: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read(file)
    (fault,) = caught.value.faults
    _, _, rest = fault.sentence.partition(file.name)
    assert fault.setting == "config" and says in rest and fault.sentence == about_path(file, rest)
    assert fault.sentence.endswith(".") and "\n" not in fault.sentence


def test_a_missing_file_or_a_folder_is_one_fault(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no file"):
        read(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read: it is a folder"):
        read(tmp_path)


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "rows", "elsewhere/rows"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mine.py").touch()
    text = "model: model\ndataset: [../{0}/rows]\nreward_functions_file: mine.py\nreference_model_path: owner/model\n"
    file = written(tmp_path, text.format(tmp_path.name))
    monkeypatch.chdir(tmp_path / "elsewhere")  # where another `rows` lies
    config = load(file)
    assert (config.model, config.data) == (str(tmp_path / "model"), str(tmp_path / "rows"))
    assert config.reward_functions_file == str(tmp_path / "mine.py") and config.reference_model_path == "owner/model"


def test_files_of_reward_functions_are_relative_to_the_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.touch()
    for written in (["mine.py::f(a=1)", "r1_int"], "mine.py::f(a=1), r1_int"):
        there = {"reward_functions": [f"{mine}::f(a=1)", "r1_int"]}
        assert resolve_paths(tmp_path, {"reward_functions": written}) == there
        assert resolve_paths(tmp_path, {"stages": [{"reward_functions": written}]}) == {"stages": [there]}
    for written in (None, 3, [3], "r1_int"):
        assert resolve_paths(tmp_path, {"reward_functions": written}) == {"reward_functions": written}


def values_of(about: Setting) -> st.SearchStrategy[Any]:
    """Valid values of this setting alone."""
    low, high = about.low if about.low is not None else -1e6, about.high if about.high is not None else 1e6
    text = st.text(max_size=20) | st.sampled_from(
        ["1e-5", "null", "yes", "0x1F", "2001-01-01", "12:30", "~", "#", "- a", "next\x85line", "a\u2028b\r\n "]
    )
    if about.kind == "choice":
        return st.sampled_from([choice.value for choice in about.choices])
    if about.kind == "int":
        return st.integers(math.ceil(low), math.floor(high))
    if about.kind == "float":
        return st.floats(low, high, exclude_min=about.low_open, exclude_max=about.high_open)
    simple = st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.none()
    return (
        {"bool": st.booleans(), "list": st.lists(text, max_size=3)}
        | {"rewards": st.lists(text, max_size=3), "numbers": st.lists(st.floats(-9, 9), max_size=3)}
        | {"mapping": st.dictionaries(text, simple, max_size=3)}
        | {"stages": st.lists(st.fixed_dictionaries({"iters": st.integers(1, 9)}), max_size=2)}
    ).get(about.kind, text)


IN_A_FILE = {  # empty text too, where that is a value
    key: values_of(about) | st.just("") if about.optional else values_of(about) for key, about in SETTINGS.items()
}
SOME = st.sets(st.sampled_from([*SETTINGS]), max_size=40).flatmap(
    lambda keys: st.fixed_dictionaries({key: IN_A_FILE[key] for key in sorted(keys)})
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=SOME)
@example(raw={"system_prompt": "next\x85line"})
@example(raw={"sampling_correction_max": ""})
def test_dumped_settings_load_to_the_same_settings(raw: dict[str, Any], tmp_path: Path) -> None:
    while faults := problems(SOUND | raw):  # contradicting values: drop those that have a fault
        wrong = {fault.setting for fault in faults} & raw.keys() or {next(iter(raw))}  # the other may be a default
        raw = {key: value for key, value in raw.items() if key not in wrong}
    config = parse(SOUND | raw)
    text = dump(config)
    again = parse(yaml.safe_load(text.encode()))
    assert again == (config.model_copy(update={"iters": SETTINGS["iters"].default}) if config.epochs else config)
    assert ("\niters:" in text) == (config.epochs == 0), "epochs take the place of iters in the file"
    assert all(f"# {title}\n" in text for title in SECTIONS.values())


def test_a_dumped_file_is_in_the_forms_order_and_its_letters_are_as_typed() -> None:
    config = parse(SOUND | {"system_prompt": "Réponds en français."})
    text = dump(config)
    assert list(yaml.safe_load(text)) == list(SETTINGS) and "Réponds en français." in text
    assert dump(config.model_dump()) == text


def test_a_number_has_limits_and_none_that_a_formula_cannot_take() -> None:
    numbers = {key: about for key, about in SETTINGS.items() if about.kind in ("int", "float")}
    assert [key for key, about in numbers.items() if about.low is None or about.high is None] == []
    above_zero = "learning_rate temperature repetition_penalty scale lora_alpha lr_decay_fraction lr_power adam_epsilon"
    above_zero += " top_p epsilon epsilon_high vespo_k_pos vespo_k_neg sapo_temperature_pos sapo_temperature_neg"
    assert [key for key in above_zero.split() if (numbers[key].low, numbers[key].low_open) != (0, True)] == []
    below_one = "dropout adam_beta1 adam_beta2 validation_split epsilon"  # 1 would leave nothing, or divide by 0
    assert [key for key in below_one.split() if (numbers[key].high, numbers[key].high_open) != (1, True)] == []
    assert numbers["delta"].low_open and numbers["delta"].low == 1, "it would bound what Epsilon leaves"
    counts = [key for key, about in numbers.items() if about.kind == "int" and about.low == -1]
    assert set(counts) == {"num_layers", "steps_per_eval", "save_every", "val_batches", "test_batches"}, "-1 means all"


@cases(
    ("stage", "sentence"),
    [
        ({}, "Stage 2: It needs iters, a whole number of steps above 0."),
        ({"iters": 0}, "Stage 2: Iterations must be at least 1, not 0."),
        ({"iters": 1, "rank": 4}, "Stage 2: There is rank, which no stage can have of its own; it can have iters, "),
        ({"iters": 1, "reward_functions": [3]}, "Stage 2: Custom reward function names must be a list of names, not"),
        ({"iters": 1, "reward_functions": ["a", "a"]}, "Stage 2: a is listed twice; list each reward function once."),
        ({"iters": 1, "reward_weights": ["heavy"]}, "Stage 2: Reward weights must be a list of numbers, not"),
        ({"iters": 1, "reward_functions": ["a"], "reward_weights": [0]}, "Stage 2: Every reward weight is 0, so no"),
        ({"iters": 1, "reward_weights": [1, 1]}, "Stage 2: Reward weights: 2, reward functions: 1 (r); "),
    ],
)
def test_a_stage_is_checked_as_the_run_is(stage: dict[str, Any], sentence: str) -> None:
    (found,) = sentences({"reward_functions": ["r"], "stages": [{"iters": 1}, stage]}, "stages")
    assert found.startswith(sentence)


TRL = {"group_size": 8, "max_completion_length": 512, "num_iterations": 1, "temperature": 1.0, "top_p": 1.0}
TRL |= {"beta": 0.04, "epsilon": 0.2, "learning_rate": 1e-6, "max_grad_norm": 1.0}
"""Defaults of its GRPOTrainer; of the KL weight the older one, as 0 is ours."""


def remarks(**settings: Any) -> dict[str, str]:
    return {fault.setting: fault.sentence for fault in unusual(parse({"model": "a/b", "data": "c/d", **settings}))}


def test_defaults_are_usual() -> None:
    assert remarks() == {} and remarks(**TRL) == {}
    assert all(SETTINGS[key].kind in ("int", "float") for key in USUAL), "a range is of a number"


@cases("key", [key for key in USUAL if key not in ("epochs", "max_seq_length")])
def test_beyond_a_range_is_remarked_upon(key: str) -> None:
    _, high, usual = USUAL[key]
    above = high * 2 if SETTINGS[key].kind == "float" else int(high) * 2
    if key in ("top_p", "dropout", "epsilon"):  # valid up to 1
        above = {"top_p": 0.4, "dropout": 0.9, "epsilon": 0.9}[key]
    room = {"max_seq_length": 1 << 20} if key == "max_completion_length" else {}
    assert usual in remarks(**{key: above}, **room)[key]


def test_what_has_no_effect_is_not_remarked_upon() -> None:
    assert remarks(iters=10**6, epochs=3) == {}
    assert remarks(rank=4096, train_type="full") == {}
    assert remarks(learning_rate=0.1, optimizer="sgd") == {}, "its rate is no size of a step"
    assert remarks(epsilon=0.9, grpo_loss_type="cispo") == {}
