"""Every word of the other programs has one fate, and the settings that the tables name exist."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.config.config import SETTINGS, Config, load, parse, problems, read
from backend.config.other_programs.files import import_file
from backend.config.other_programs.into_trl import BY_FILES, INSTEAD, TrlSettings, into_trl
from backend.config.other_programs.keys import OtherProgram, Refused, Translated
from backend.config.other_programs.mlx_lm import MLX_GRPO, MLX_LM_LORA
from backend.config.other_programs.peft import LORA_WORDS, OTHER_KINDS
from backend.config.other_programs.translation import PROGRAMS, TranslatedKey, is_ours, translate
from backend.config.other_programs.trl import NO_REMOTE_CODE, TRL
from backend.config.updates import final_rate
from backend.export.peft_files import OTHER_KINDS as NOT_CARRIED
from backend.export.peft_files import read_settings
from backend.models.architectures import adapter_scale
from backend.utils.errors import UserError
from tests.support import other_programs_page as page
from tests.support.cases import cases
from tests.support.random_settings import NEEDED, random_config
from tests.support.verbs import call, refused, run_ok

BY_HOSTS = "--hosts FILE says which machines train, and whether they share the prompts or the model"

HERE = Path(__file__).parent
FILES = dict.fromkeys(("trl_document_003", "trl_1_16", "trl_every_argument"), TRL)
FILES |= dict.fromkeys(
    ("mlx_lm_defaults", *(f"mlx_lm_lora_{kind}" for kind in ("defaults", "example_grpo", "example_lora"))), MLX_LM_LORA
)
FILES["mlx_grpo_every_argument"] = MLX_GRPO


def recorded_words(name: str) -> dict[str, Any]:
    return yaml.safe_load((HERE / f"{name}.yaml").read_text())


def test_every_setting_that_a_table_names_exists() -> None:
    fates = [fate for program in PROGRAMS for fate in program.words.values()]
    assert {key for fate in fates if isinstance(fate, Translated) for key in fate.settings} - SETTINGS.keys() == set()


@cases("name", FILES)
def test_a_file_with_every_word_has_no_unknown_key_and_each_word_is_told(name: str) -> None:
    """Files with every argument of TRL, all defaults of mlx-lm-lora and mlx-lm, its examples, all flags of mlx-grpo."""
    raw = recorded_words(name)
    translation = translate(raw)
    assert translation.program is FILES[name]
    assert translation.faults == []
    assert [key for key in translation.values if key not in SETTINGS] == []
    told = {word.word for word in translation.words}
    assert [word for word, value in raw.items() if value is not None and word not in told and not is_ours(word)] == []


WORTH_ASKING: dict[str, Any] = {"entropy_coef_min": 0.1, "entropy_coef_max": 0.5, "entropy_coef_delta": 0.1}
"""What asks for something, of words whose program's default is a number."""


@cases(
    ("program", "word"),
    [(program, word) for program in PROGRAMS for word, fate in program.words.items() if isinstance(fate, Refused)],
)
def test_a_refused_word_names_what_is_nearest(program: OtherProgram, word: str) -> None:
    fate = program.words[word]
    assert isinstance(fate, Refused)
    asking = WORTH_ASKING.get(word, "something")
    faults = translate({word: False if True in [off for off in fate.off if isinstance(off, bool)] else asking}).faults
    assert [fault.setting for fault in faults] == [word]
    assert faults[0].sentence.endswith(fate.nearest) and len(faults[0].sentence) <= 200
    for off in (None, *fate.off):
        assert translate({word: off}).faults == [], off


def test_a_word_without_effect_says_why_and_leaves_nothing_behind() -> None:
    translation = translate({"ddp_timeout": 1800, "use_vllm": True})
    assert translation.values == {}
    assert translation.words[0] == TranslatedKey("ddp_timeout", "without effect", BY_HOSTS)


@cases(
    ("raw", "why"),
    [
        ({"lr_scheduler_kwargs": {"min_lr": 1e-6}}, "it shapes the schedule of lr_scheduler_type"),
        ({"trust_remote_code": True}, NO_REMOTE_CODE),
        ({"model_init_kwargs": {"trust_remote_code": True}}, NO_REMOTE_CODE),
        *(({word: 2}, BY_HOSTS) for word in ("fsdp", "tp_size", "deepspeed", "num_processes")),
    ],
)
def test_what_asks_for_something_else_is_not_called_the_default(raw: dict[str, Any], why: str) -> None:
    translation = translate(raw)
    ((word, told),) = zip(raw, translation.words, strict=True)
    assert translation.faults == [] and told.word == word and told.fate == "without effect"
    assert told.sentence.startswith(why)


def test_the_page_is_written_from_the_tables() -> None:
    """`python -m tests.support.other_programs_page` writes it."""
    assert page.PAGE.read_text() == page.page()


DOCUMENTED = yaml.safe_load((Path(__file__).parent / "trl_1_16.yaml").read_text())
"""Every argument of `trl grpo` in TRL 1.16 (a proof checks the file with TRL's own parser)."""
SCHEDULE = [key for key in SETTINGS if key.startswith("lr_")]
DECIDED = {"sampling_correction": ("auto",), "dtype": ("auto",), "device": ("auto", "gpu")}
"""Values that leave a choice to the run; there one is written."""


def made(**raw: Any) -> TrlSettings:
    return into_trl(parse(NEEDED | raw))


def left_out(**raw: Any) -> dict[str, str]:
    return {left.setting: left.instead for left in made(**raw).left_out}


def meaning(config: Config) -> dict[str, Any]:
    """The settings as what they amount to: those that TRL writes in one way and that may stand here in several."""
    ratio, steps = config.lr_warmup_ratio or 0, config.lr_warmup_steps
    steps = None if ratio else 0 if config.lr_warmup_ratio == 0 else steps
    values = config.model_dump() | (
        {"scale": adapter_scale(config), "lora_alpha": None}
        | {"use_rslora": config.use_rslora and config.lora_alpha is not None}
        | {"lora_keys": config.lora_keys or ["all-linear"], "eval_batch_size": config.prompts_per_evaluation_batch}
        | {"lr_final": final_rate(config.learning_rate, config.lr_final)}
        | {"run_name": config.tracker_run_name or config.run_name, "tracker_run_name": None}
        | {"report_to": config.report_to if config.report_to != ["none"] else []}
        | {"iters": 0 if config.epochs else config.iters, "lr_warmup_steps": steps, "lr_warmup_ratio": ratio}
    )
    if config.steps_per_eval:
        values["best_metric"] = config.best_metric or "eval/reward"
    if config.lr_schedule == "constant" and ratio:
        values["lr_schedule"] = "constant_with_warmup"
    return values | ({} if ratio or steps else {"lr_warmup_init": 0})


@cases("seed", range(40))
def test_a_config_comes_back_from_trl_as_the_same_run(seed: int) -> None:
    """Each setting is read again as it was, or is listed as left out or as carried by a file of the folder."""
    config = random_config(random.Random(f"trl {seed}")).model_copy(update={"train_mode": "grpo"})
    settings = into_trl(config)
    assert not settings.words.keys() - DOCUMENTED.keys()
    assert yaml.safe_load(yaml.safe_dump(settings.words)) == settings.words
    translation = translate(settings.words)
    assert translation.program is TRL and translation.faults == []
    listed = {left.setting for left in settings.left_out} | settings.by_files.keys()
    listed |= set(SCHEDULE) if "lr_schedule" in listed else set()  # another curve, listed as a whole
    before, after = meaning(config), meaning(parse(translation.values))
    for key, value in before.items():
        if key in listed or not SETTINGS[key].applies(before) or value in DECIDED.get(key, ()):
            continue
        expected = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert after[key] == expected, key


def test_only_what_differs_from_the_default_is_listed() -> None:
    assert left_out() == {} and {*BY_FILES, *INSTEAD} <= set(SETTINGS)
    assert made().by_files.keys() == {"num_layers", "val_batches"}
    assert made(num_layers=-1, val_batches=-1).by_files == {}


def test_units_are_completions_and_updates() -> None:
    batches = {"batch_size": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 2}
    words = made(**batches, group_size=8, num_iterations=2, iters=10).words
    expected = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 3, "steps_per_generation": 6}
    expected |= {"num_generations": 8, "max_steps": 40, "save_steps": 400, "eval_steps": 800, "logging_steps": 40}
    assert {word: words[word] for word in expected} == expected
    assert "max_steps" not in made(epochs=2).words


def test_a_fall_that_ends_with_the_run_is_transformers_own() -> None:
    falling = {"lr_schedule": "cosine", "lr_warmup_ratio": 0.25, "lr_warmup_init": 0.0}
    assert "lr_decay_fraction" not in made(**falling, lr_decay_fraction=0.75).by_files
    by_file = made(**falling, lr_decay_fraction=1.0).by_files["lr_decay_fraction"]
    assert "trl grpo alone: the rate falls until the end" in by_file
    falling = {"lr_schedule": "linear", "lr_final": 0.0, "lr_warmup_steps": 20, "lr_warmup_init": 0.0}
    linear = made(**falling, iters=100, num_iterations=2, lr_decay_fraction=0.9)
    assert "lr_decay_fraction" not in linear.by_files and linear.words["lr_scheduler_type"] == "linear"


@cases(
    ("raw", "word", "value", "setting"),
    [
        ({"optimizer": "adam"}, "weight_decay", 0, "optimizer"),
        ({"optimizer": "muon"}, "optim", "adamw_torch", "optimizer"),
        ({"importance_sampling_level": "sequence_token"}, "importance_sampling_level", "sequence", ""),
        ({"grpo_loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type", "dapo", "grpo_loss_type"),
        ({"quantization": "mxfp4"}, "load_in_4bit", True, "quantization"),
        ({"sync_ref_model": True}, "sync_ref_model", None, "sync_ref_model"),
        (
            {"sampling_correction": "token_mask", "sampling_correction_max": ""},
            *("vllm_importance_sampling_clip_max", 1_000_000, "sampling_correction_max"),
        ),
        ({"load_best_at_end": True, "save_every": 3, "steps_per_eval": 2}, "load_best_model_at_end", None, ""),
        ({"load_best_at_end": True, "save_every": 3, "steps_per_eval": -1}, "load_best_model_at_end", None, ""),
        ({"eval_delay": 5, "steps_per_eval": -1}, "eval_delay", None, ""),
        ({"dynamic_sampling": True}, "dynamic_sampling", None, "dynamic_sampling"),
        ({"distillation_weight": 0.5}, "distillation_weight", None, "distillation_weight"),
    ],
)
def test_what_trl_lacks_is_listed(raw: dict[str, Any], word: str, value: Any, setting: str) -> None:
    assert made(**raw).words.get(word) == value
    assert (setting or next(iter(raw))) in left_out(**raw)


TRL_FILE = """\
model_name_or_path: owner/model
dataset_name: owner/rows
output_dir: out
learning_rate: 1e-6
lr_scheduler_type: linear
gradient_accumulation_steps: 4
max_steps: 200
reward_funcs: [accuracy_reward]
use_vllm: true
"""


def test_a_file_for_trl_becomes_one_of_ours_with_trls_defaults(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(TRL_FILE)
    imported = run_ok("import", tmp_path / "trl.yaml", "--output", tmp_path / "ours.yaml")
    assert imported.stderr == "" and "is a file for TRL; written to" in imported.stdout
    config, text = load(tmp_path / "ours.yaml"), (tmp_path / "ours.yaml").read_text()
    assert (config.batch_size, config.gradient_accumulation_steps, config.group_size) == (1, 4, 8)
    assert (config.learning_rate, config.lr_schedule, config.lr_final, config.iters) == (1e-6, "linear", 0.0, 200)
    assert (config.beta, config.grpo_loss_type, config.train_type, config.seed) == (0.0, "dapo", "full", 42)
    for line in (
        "# Not in the file; what TRL takes:",
        "#   beta: 0.0",
        "# Not carried over:",
        "#   use_vllm: completions are sampled",
        "# Read as:",
        "#   max_steps → iters: 200",
    ):
        assert line in text
    assert "epochs" not in text, "max_steps is given"
    (tmp_path / "trl.yaml").write_text("use_vllm: true\n")
    assert "\n\n\n" not in import_file(tmp_path / "trl.yaml", their_defaults=False)[0], "it names no setting of ours"


def test_a_file_for_mlx_lm_lora_keeps_its_own_lora_parameters(tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text(
        json.dumps({"train": True, "model": "a/b", "data": "c/d", "lora_parameters": {"rank": 4}})
    )
    (tmp_path / "ours.yaml").write_text(import_file(tmp_path / "theirs.json")[0])
    config = load(tmp_path / "ours.yaml")
    assert (config.rank, config.scale, config.num_layers, config.optimizer, config.iters) == (4, 10.0, -1, "adam", 100)


@pytest.mark.parametrize("file", sorted(HERE.glob("*_*.yaml")), ids=lambda path: path.stem)
def test_every_file_is_imported_without_an_unknown_key(file: Path, tmp_path: Path) -> None:
    if file.stem == "users_example":  # a file of ours
        return
    text, _, missing = import_file(file)
    (tmp_path / "ours.yaml").write_text(text)
    needed = dict.fromkeys({"model", "data"} & {fault.setting for fault in missing}, "given/later")
    ours = read(tmp_path / "ours.yaml") | needed
    assert not problems(ours) and parse(read(file) | needed) == parse(ours), "trained as it is, it is the same run"


def test_paths_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "rewards.py").write_text("def mine(completions, **_): return [0.0] * len(completions)\n")
    (tmp_path / "trl.yaml").write_text("model_name_or_path: model\ndataset_name: a/b\nreward_funcs: lib.rewards.mine\n")
    (tmp_path / "ours.yaml").write_text(import_file(tmp_path / "trl.yaml")[0])
    config = load(tmp_path / "ours.yaml")
    assert config.model == str(tmp_path / "model")
    assert config.reward_functions == [f"{tmp_path / 'lib' / 'rewards.py'}::mine"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("group_size: 4\n", "has no word of TRL, mlx-lm-lora or mlx-grpo alone"),
        ("- a\n", "must hold settings as “key: value” lines, but it holds a list."),
        (TRL_FILE + "eval_strategy: hour\n", "eval_strategy: eval_strategy must be no, steps or epoch, not hour"),
        (TRL_FILE + "num_generation: 4\n", "There is no setting num_generation. Did you mean num_generations?"),
        (TRL_FILE + "temperature: 0\n", "temperature: Temp must be above 0, not 0."),
    ],
)
def test_what_cannot_be_imported_is_a_sentence_and_writes_nothing(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    assert says in refused("import", tmp_path / "theirs.yaml", "-o", tmp_path / "ours.yaml")
    assert not (tmp_path / "ours.yaml").exists()


def test_what_a_script_names_and_its_arguments_do_not_is_still_to_be_given(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("num_generations: 8\n")
    title, *missing = run_ok("import", tmp_path / "args.yaml").stderr.splitlines()
    assert title == "Give or check these before training:"
    assert [line.split(":")[0] for line in missing] == ["model", "data", "reward_functions"]


def test_check_says_on_stderr_what_was_made_of_each_word_and_keeps_stdout_to_its_list(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(TRL_FILE + "save_strategy: hour\n")
    checked = call("check", tmp_path / "trl.yaml", "--json")
    assert checked.exit_code == 2
    assert [fault["setting"] for fault in json.loads(checked.stdout)] == ["save_strategy"]
    told = checked.stderr
    assert told.startswith("This is a file for TRL.") and "max_steps: read as iters: 200." in told
    assert "use_vllm: without effect here: completions are sampled" in told


LORA_CONFIG = (  # every field of its LoraConfig
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r "
    "target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save "
    "init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config "
    "megatron_core trainable_token_indices loftq_config eva_config corda_config lora_ga_config use_dora "
    "velora_config alora_invocation_tokens use_qalora qalora_group_size monteclora_config layer_replication "
    "runtime_config lora_bias target_parameters use_bdlora arrow_config kasa_config ensure_weight_tying "
)
FILE = {"model_name_or_path": "owner/model", "dataset_name": "owner/rows", "reward_funcs": "accuracy_reward"}
FILE |= {"num_generations": 8}
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def sentences(peft_config: Any) -> list[str]:
    return [fault.sentence for fault in problems(FILE | {"peft_config": peft_config})]


def meant(**peft_config: Any) -> dict[str, Any]:
    return parse(FILE | {"peft_config": ADAPTER | peft_config}).model_dump()


def adapter_file(folder: Path, **about: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(ADAPTER | about))
    return file


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_another_kind_is_refused_with_what_is_nearest(kind: str, tmp_path: Path) -> None:
    nearest = OTHER_KINDS[kind]
    (of_file,) = sentences({"peft_type": kind, "num_virtual_tokens": 8})
    folder = tmp_path / ("a long name of a folder " * 6).strip()
    folder.mkdir()
    with pytest.raises(UserError) as mistake:
        read_settings(adapter_file(folder, peft_type=kind))
    of_adapter = mistake.value.faults[0].sentence
    for sentence in (of_file, of_adapter):
        assert f"is {kind}; nearest here is {nearest}." in sentence and len(sentence) <= 200
    assert set(re.findall(r"[a-z]+_[a-z_]+", nearest.replace("[embed_tokens]", ""))) <= SETTINGS.keys()


def test_loras_words_are_read() -> None:
    values = meant(
        use_rslora=True, lora_dropout=0.1, modules_to_save=["lm_head"], target_modules="all-linear", use_dora=True
    )
    expected = {"train_type": "dora", "num_layers": -1, "rank": 4, "lora_alpha": 8.0, "use_rslora": True}
    expected |= {"dropout": 0.1, "modules_to_save": ["lm_head"], "lora_keys": ["all-linear"]}
    assert values.items() >= expected.items() and meant()["train_type"] == "lora"
    assert meant(target_modules=["q_proj", "v_proj"])["lora_keys"] == ["q_proj", "v_proj"]


ASKS: dict[str, Any] = (  # a value of each refused word that asks for something
    {"task_type": "SEQ_CLS", "init_lora_weights": "pissa", "exclude_modules": ["o_proj"]}
    | {"layers_to_transform": [0, 1], "bias": "all", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}}
    | {"lora_bias": True, "trainable_token_indices": [5], "use_qalora": True, "target_parameters": ["experts.w"]}
    | {"layer_replication": [[0, 4]], "alora_invocation_tokens": [3], "arrow_config": {"top_k": 2}}
    | {"monteclora_config": {"a": 1}, "use_bdlora": {"a": 1}, "kasa_config": {"a": 1}}
)
DEFAULTS: dict[str, Any] = {"task_type": "CAUSAL_LM", "init_lora_weights": True, "bias": "none"}
DEFAULTS |= {"rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False, "use_qalora": False, "exclude_modules": None}


@cases("word", [word for word, fate in LORA_WORDS.items() if isinstance(fate, Refused)])
def test_a_variant_that_is_not_built_is_refused_with_what_is_nearest(word: str) -> None:
    (sentence,) = sentences(ADAPTER | {word: ASKS[word]})
    fate = LORA_WORDS[word]
    assert isinstance(fate, Refused) and sentence.endswith(fate.nearest) and word in sentence and len(sentence) <= 200
    assert not sentences(ADAPTER | {word: DEFAULTS.get(word)})


def test_a_start_that_changes_the_model_is_refused_and_a_pattern_of_layers_too() -> None:
    for start in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "gaussian", "eva", False):
        assert "Adapters begin as peft's do by default" in sentences(ADAPTER | {"init_lora_weights": start})[0]
    assert sentences(ADAPTER | {"target_modules": r".*\.(q|v)_proj$"})[0].startswith("target_modules is a pattern, ")
    assert "which is no word of LoraConfig here" in sentences(ADAPTER | {"lora_r": 3})[0]


READ: dict[str, Any] = (
    {"r": 8, "lora_alpha": 4, "rank_pattern": {"q": 2}, "alpha_pattern": {"q": 2}, "use_rslora": True}
    | {"use_dora": True, "lora_dropout": 0.5, "base_model_name_or_path": "other"}
    | {"ensure_weight_tying": True}
)
NOT_CARRIED_TOO = {"peft_type": "IA3", "init_lora_weights": "pissa", "bias": "lora_only"}
OF_NO_CONSEQUENCE = (  # how it was loaded, trained or begun: the arrays say the rest
    "task_type auto_mapping peft_version revision inference_mode megatron_config megatron_core runtime_config "
    "velora_config qalora_group_size loftq_config eva_config corda_config lora_ga_config layers_pattern fan_in_fan_out "
    "target_modules exclude_modules layers_to_transform modules_to_save"
)


def test_every_word_of_an_adapters_file_is_read_refused_or_of_no_consequence(tmp_path: Path) -> None:
    assert sorted([*READ, *NOT_CARRIED, *NOT_CARRIED_TOO, *OF_NO_CONSEQUENCE.split()]) == sorted(LORA_CONFIG.split())
    plain = read_settings(adapter_file(tmp_path))
    for word, value in READ.items():
        assert read_settings(adapter_file(tmp_path, **{word: value})) != plain, word
    for word in OF_NO_CONSEQUENCE.split():
        assert read_settings(adapter_file(tmp_path, **{word: {"a": 1}})) == plain, word
    for word, value in ({key: [[1, 2]] for key in NOT_CARRIED} | NOT_CARRIED_TOO).items():
        with pytest.raises(UserError) as mistake:
            read_settings(adapter_file(tmp_path, **{word: value}))
        assert len(mistake.value.faults[0].sentence) <= 200
