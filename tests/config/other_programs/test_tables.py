"""Every word of the other programs has one fate, and the settings that the tables name exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from backend.config.config import SETTINGS
from backend.config.other_programs.keys import OtherProgram, Refused, Translated
from backend.config.other_programs.mlx_grpo import MLX_GRPO
from backend.config.other_programs.mlx_lm import MLX_LM_LORA
from backend.config.other_programs.translation import PROGRAMS, TranslatedKey, is_ours, read_words
from backend.config.other_programs.trl import NO_REMOTE_CODE, TRL
from tests.support import other_programs_page as page
from tests.support.cases import cases

BY_HOSTS = "--hosts FILE says which machines train, and whether they share the prompts or the model"

HERE = Path(__file__).parent
FILES = dict.fromkeys(("trl_document_003", "trl_1_16", "trl_every_argument"), TRL)
FILES |= dict.fromkeys(
    ("mlx_lm_defaults", *(f"mlx_lm_lora_{kind}" for kind in ("defaults", "example_grpo", "example_lora"))), MLX_LM_LORA
)
FILES["mlx_grpo_every_argument"] = MLX_GRPO


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((HERE / f"{name}.yaml").read_text())


@cases("name", FILES)
def test_every_word_of_a_program_is_in_its_table(name: str) -> None:
    assert [word for word in read(name) if word not in FILES[name].words] == []


def test_every_setting_that_a_table_names_exists() -> None:
    fates = [fate for program in PROGRAMS for fate in program.words.values()]
    named = {key for fate in fates if isinstance(fate, Translated) for key in fate.settings}
    assert named - SETTINGS.keys() == set()


@cases("name", FILES)
def test_a_file_with_every_word_has_no_unknown_key_and_each_word_is_told(name: str) -> None:
    """The files that name every argument of TRL, every default of mlx-lm-lora and of mlx-lm, its examples, and every
    flag of mlx-grpo."""
    raw = read(name)
    translation = read_words(raw)
    assert translation.program is FILES[name]
    assert translation.faults == []
    assert [key for key in translation.values if key not in SETTINGS] == []
    told = {word.word for word in translation.words}
    silent = [word for word, value in raw.items() if value is not None and word not in told and not is_ours(word)]
    assert silent == []


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
    faults = read_words({word: False if True in [off for off in fate.off if isinstance(off, bool)] else asking}).faults
    assert [fault.setting for fault in faults] == [word]
    assert faults[0].sentence.endswith(fate.nearest) and len(faults[0].sentence) <= 200
    for off in (None, *fate.off):
        assert read_words({word: off}).faults == [], off


def test_a_word_without_effect_says_why_and_leaves_nothing_behind() -> None:
    translation = read_words({"ddp_timeout": 1800, "use_vllm": True})
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
    translation = read_words(raw)
    ((word, told),) = zip(raw, translation.words, strict=True)
    assert translation.faults == [] and told.word == word and told.fate == "without effect"
    assert told.sentence.startswith(why)


def test_the_page_is_written_from_the_tables() -> None:
    """`python -m tests.support.other_programs_page` writes it."""
    assert page.PAGE.read_text() == page.page()
