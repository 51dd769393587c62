"""PEFT's LoraConfig, as `peft_config` of a file for TRL and in the file of a trained adapter (peft 0.21.2).

`backend.models.peft_files` takes its messages from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from backend.config.other_programs.keys import (
    BY_HOSTS,
    Refused,
    Translator,
    Words,
    as_bool,
    converted,
    ignored,
    refused,
    renamed,
    same,
    switch,
)
from backend.models.adapter_types import ALL_LINEAR
from backend.rewards.catalogue import split_names
from backend.utils.text import quote

WORD = "peft_config"
_NEAREST = {
    "LoRA (train_type: lora)": "ADALORA ADAMSS C3A DEFT GLORA GRALORA HIRA LILY LOHA LOKR MISS PEANUT POLY RANDLORA "
    "SHADOW XLORA",
    "LoRA of rank 1 or 2 (train_type: lora)": "BEFT FOURIERFT FROD IA3 PVERA TINYLORA UNILORA VBLORA VERA WAVEFT",
    "DoRA (train_type: dora)": "BOFT DELORA HRA OFT PSOFT ROAD",
    "full fine-tuning (train_type: full)": "OSF SHIRA SUPERTUNING",
    "system_prompt for words, and LoRA of rank 1 or 2 for what is learned": "PROMPT_TUNING MULTITASK_PROMPT_TUNING "
    "P_TUNING PREFIX_TUNING CARTRIDGE CPT ADAPTION_PROMPT",
    "modules_to_save with the norms' names, beside LoRA": "LN_TUNING",
    "modules_to_save: [embed_tokens], beside LoRA": "TRAINABLE_TOKENS",
}
OTHER_KINDS: dict[str, str] = {kind: nearest for nearest, kinds in _NEAREST.items() for kind in kinds.split()}
"""peft_type → what is nearest here, for every kind but LORA."""

LORA_WORDS: Words = {
    **converted(peft_type="train_type", target_modules="lora_keys"),
    **renamed(r="rank", lora_dropout="dropout"),
    **same("lora_alpha use_rslora modules_to_save"),
    **switch("use_dora", "train_type"),
    **ignored("it is a mark of the file", "auto_mapping peft_version inference_mode"),
    **ignored("the model is named beside it", "base_model_name_or_path revision"),
    **ignored("MLX stores the weights of a layer in one way", "fan_in_fan_out"),
    **ignored(BY_HOSTS, "megatron_config megatron_core"),
    **ignored("it is for PyTorch; grad_checkpoint saves memory here", "runtime_config velora_config"),
    **ignored("it only matters with use_qalora", "qalora_group_size"),
    **ignored(
        "it is for a start that init_lora_weights names, which is refused by itself",
        "loftq_config eva_config corda_config lora_ga_config",
    ),
    **ignored("layers are found in the model's own code", "layers_pattern"),
    **ignored("an embedding that is the output layer too is one array here", "ensure_weight_tying"),
    **refused("Every model here is a causal language model.", "task_type", ("CAUSAL_LM",)),
    **refused(
        "Adapters begin as peft's do by default, A random and B 0; leave it out.", "init_lora_weights", ("true",)
    ),
    **refused("Name the layers that get adapters in lora_keys, and leave these out.", "exclude_modules"),
    **refused("Adapters are on the last layers, as many as num_layers says, or on all.", "layers_to_transform"),
    **refused("mlx-lm has one rank and one scale for all layers: rank and lora_alpha.", "rank_pattern alpha_pattern"),
    **refused("modules_to_save trains a module whole, with its bias.", "bias lora_bias", ("none",)),
    **refused("modules_to_save: [embed_tokens] trains all rows of the embedding.", "trainable_token_indices"),
    **refused("Adapters are put on linear layers and experts, by lora_keys.", "target_parameters"),
    **refused("A model keeps its layers; name one that has more.", "layer_replication"),
    **refused("An adapter works on every token here.", "alora_invocation_tokens"),
    **refused("A run has one adapter; mix them where they are served.", "arrow_config"),
    **refused("LoRA beside packed weights is nearest (quantization).", "use_qalora"),
    **refused("Plain LoRA is nearest, by leaving it out.", "monteclora_config use_bdlora kasa_config"),
}
_INTO_TRL = {
    word: word if word.startswith(("lora_", "use_")) else f"lora_{word}"
    for word in ("r", "lora_dropout", "target_modules", "lora_alpha", "use_rslora", "use_dora", "modules_to_save")
}
"""Key of LoraConfig → the same in TRL's ModelConfig."""
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
    given = {str(word): value for word, value in cast("Mapping[Any, Any]", config).items() if value is not None}
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
    """TRL's keys for what a `peft_config` leaves out; {} where there is none."""
    if not isinstance(config, Mapping):
        return {}
    given = cast("Mapping[str, Any]", config)
    return {"use_peft": True} | {_INTO_TRL[word]: value for word, value in DEFAULTS.items() if given.get(word) is None}
