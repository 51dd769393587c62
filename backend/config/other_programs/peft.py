"""PEFT's LoraConfig, as `peft_config` of a file for TRL and in the file of a trained adapter (peft 0.21.2)."""

from collections.abc import Mapping
from typing import Any

from backend.config.other_programs.keys import TABLES, Refused, Translator, as_bool, tables_of
from backend.models.architectures import ALL_LINEAR
from backend.rewards.catalogue import split_names
from backend.utils.text import quote

WORD = "peft_config"
OTHER_KINDS = {kind: nearest for nearest, kinds in TABLES["adapter_kinds"].items() for kind in kinds.split()}
"""peft_type → what is nearest here, for every kind but LORA."""
LORA_WORDS = tables_of("peft")["LoraConfig"]
_INTO_TRL = {  # key of LoraConfig → the same in TRL's ModelConfig
    word: word if word.startswith(("lora_", "use_")) else f"lora_{word}"
    for word in ("r", "lora_dropout", "target_modules", "lora_alpha", "use_rslora", "use_dora", "modules_to_save")
}
DEFAULTS = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
"""LoraConfig's defaults that differ from ours; the modules are those for Llama, Qwen and similar models."""


def kind_sentence(kind: str) -> str:
    """Why adapters of another kind than LoRA are refused, without the subject."""
    if kind not in OTHER_KINDS:
        return f"is of the kind {quote(kind, 30)}, which is unknown here; there are LoRA, rsLoRA and DoRA."
    return f"is {kind}; nearest here is {OTHER_KINDS[kind]}."


def peft_config(to: Translator) -> None:
    """Replace a mapping of LoraConfig's keys by the keys of TRL's ModelConfig."""
    config: Any = to.take(WORD)
    if config is None:
        return
    if not isinstance(config, Mapping):
        to.refuse(WORD, f"peft_config must be a mapping of LoraConfig's words, not {quote(config, 60)}.")
        return
    given = {str(word): value for word, value in config.items() if value is not None}
    kind = str(given.get("peft_type", "LORA")).strip().upper().removeprefix("PEFTTYPE.")
    if kind != "LORA":
        to.refuse(WORD, f"peft_config {kind_sentence(kind)}")
        return
    to.fill("use_peft", True, WORD)
    for word, value in given.items():
        fate = LORA_WORDS.get(word)
        names = split_names(value) if isinstance(value, str) else []
        are_names = all(name == ALL_LINEAR or name.replace("_", "a").isalnum() for name in names)
        if fate is None:
            to.refuse(WORD, f"peft_config has {quote(word, 40)}, which is no word of LoraConfig here; take it out.")
        elif isinstance(fate, Refused):
            # init_lora_weights: false asks for a random B, which changes the model.
            if fate.asks(value) or (word == "init_lora_weights" and as_bool(value) is False):
                to.refuse(WORD, f"peft_config has {word}: {quote(value, 30)}. {fate.nearest}")
        elif word == "target_modules" and not are_names:
            sentence = f"target_modules is a pattern, {quote(value, 40)}; list the names of the layers, or all-linear."
            to.refuse(WORD, sentence)
        elif word in _INTO_TRL:
            to.fill(_INTO_TRL[word], value, WORD)


def defaults(config: Any) -> dict[str, Any]:
    """TRL's keys for what a `peft_config` leaves out."""
    if not isinstance(config, Mapping):
        return {"use_peft": False} if config is None else {}
    left_out = {_INTO_TRL[word]: value for word, value in DEFAULTS.items() if config.get(word) is None}
    return {"use_peft": True} | left_out
