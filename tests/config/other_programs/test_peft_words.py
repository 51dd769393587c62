"""PEFT's words: every adapter kind and LoraConfig word is read, accepted with a reason, or refused with advice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import SETTINGS, parse, problems
from backend.config.other_programs.keys import Refused
from backend.config.other_programs.peft import LORA_WORDS, OTHER_KINDS
from backend.models.peft_files import OTHER_KINDS as NOT_CARRIED
from backend.models.peft_files import read_settings
from backend.utils.errors import UserError
from tests.support.cases import cases

PEFT_0_21_2 = (
    "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING LORA ADALORA ADAMSS BOFT ADAPTION_PROMPT IA3 "
    "BEFT LILY LOHA LOKR OFT POLY LN_TUNING VERA FROD PVERA FOURIERFT GLORA XLORA HRA VBLORA UNILORA CPT MISS "
    "RANDLORA ROAD TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA PSOFT PEANUT "
    "SHADOW SUPERTUNING DEFT "
)
"""Every value of its PeftType."""
LORA_CONFIG = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r "
    "target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save "
    "init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config "
    "megatron_core trainable_token_indices loftq_config eva_config corda_config lora_ga_config use_dora "
    "velora_config alora_invocation_tokens use_qalora qalora_group_size monteclora_config layer_replication "
    "runtime_config lora_bias target_parameters use_bdlora arrow_config kasa_config ensure_weight_tying "
)
"""Every field of its LoraConfig."""
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


def test_the_table_has_every_kind_of_peft() -> None:
    assert {*OTHER_KINDS, "LORA"} == set(PEFT_0_21_2.split())
    assert set(LORA_WORDS) == set(LORA_CONFIG.split())


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
    named = re.findall(r"[a-z]+_[a-z_]+", nearest.replace("[embed_tokens]", ""))
    assert set(named) <= SETTINGS.keys()


def test_loras_words_are_read() -> None:
    values = meant(
        use_rslora=True, lora_dropout=0.1, modules_to_save=["lm_head"], target_modules="all-linear", use_dora=True
    )
    expected = {"train_type": "dora", "num_layers": -1, "rank": 4, "lora_alpha": 8.0, "use_rslora": True}
    expected |= {"dropout": 0.1, "modules_to_save": ["lm_head"], "lora_keys": ["all-linear"]}
    assert values.items() >= expected.items() and meant()["train_type"] == "lora"
    assert meant(target_modules=["q_proj", "v_proj"])["lora_keys"] == ["q_proj", "v_proj"]


ASKS: dict[str, Any] = (
    {"task_type": "SEQ_CLS", "init_lora_weights": "pissa", "exclude_modules": ["o_proj"]}
    | {"layers_to_transform": [0, 1], "bias": "all", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}}
    | {"lora_bias": True, "trainable_token_indices": [5], "use_qalora": True, "target_parameters": ["experts.w"]}
    | {"layer_replication": [[0, 4]], "alora_invocation_tokens": [3], "arrow_config": {"top_k": 2}}
    | {"monteclora_config": {"a": 1}, "use_bdlora": {"a": 1}, "kasa_config": {"a": 1}}
)
"""A value of each refused word that asks for something."""
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
    | {"use_dora": True, "lora_dropout": 0.5, "target_modules": ["v"], "exclude_modules": ["o"]}
    | {"layers_to_transform": [1], "modules_to_save": ["lm_head"], "base_model_name_or_path": "other"}
    | {"ensure_weight_tying": True}
)
NOT_CARRIED_TOO = {"peft_type": "IA3", "init_lora_weights": "pissa", "bias": "lora_only"}
OF_NO_CONSEQUENCE = (
    "task_type auto_mapping peft_version revision inference_mode megatron_config megatron_core runtime_config "
    "velora_config qalora_group_size loftq_config eva_config corda_config lora_ga_config layers_pattern fan_in_fan_out"
)
"""How it was loaded, trained or begun: the arrays say the rest."""


def test_every_word_of_an_adapters_file_is_read_refused_or_of_no_consequence(tmp_path: Path) -> None:
    fates = [*READ, *NOT_CARRIED, *NOT_CARRIED_TOO, *OF_NO_CONSEQUENCE.split()]
    assert sorted(fates) == sorted(LORA_CONFIG.split())
    plain = read_settings(adapter_file(tmp_path))
    for word, value in READ.items():
        assert read_settings(adapter_file(tmp_path, **{word: value})) != plain, word
    for word in OF_NO_CONSEQUENCE.split():
        assert read_settings(adapter_file(tmp_path, **{word: {"a": 1}})) == plain, word
    for word, value in ({key: [[1, 2]] for key in NOT_CARRIED} | NOT_CARRIED_TOO).items():
        with pytest.raises(UserError) as mistake:
            read_settings(adapter_file(tmp_path, **{word: value}))
        assert len(mistake.value.faults[0].sentence) <= 200
