"""PEFT's words: what TRL users pass as `peft_config`. LoRA's are read or refused one by one; every other kind has one sentence with what is nearest.

From peft 0.21.2. `backend.models.peft.settings` reads the same words in the file of a trained adapter, and takes its sentences from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from backend.config.other_programs.rewriting import Translator, as_bool
from backend.config.other_programs.words import (
    IgnoredKey,
    Refused,
    Translated,
    Words,
    refused,
    renamed,
    same,
    without_effect,
)
from backend.models.adapter_types import ALL_LINEAR
from backend.utils.text import quote

WORD = "peft_config"
_LORA = "LoRA (train_type: lora)"
_SMALL = "LoRA of rank 1 or 2 (train_type: lora)"
_DORA = "DoRA (train_type: dora), which learns length and direction of weights apart"
_PROMPT = "system_prompt for words, and LoRA of rank 1 or 2 for what is learned"
_FULL = "full fine-tuning (train_type: full)"


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """`does`: what it does, as in “which …”. `nearest`: what there is here in its place."""

    does: str
    nearest: str


OTHER_KINDS: dict[str, AdapterKind] = {
    "PROMPT_TUNING": AdapterKind("learns vectors before the prompt", _PROMPT),
    "MULTITASK_PROMPT_TUNING": AdapterKind("learns vectors before the prompt, shared by tasks", _PROMPT),
    "P_TUNING": AdapterKind("learns vectors before the prompt by a small network", _PROMPT),
    "PREFIX_TUNING": AdapterKind("learns keys and values before the prompt", _PROMPT),
    "CARTRIDGE": AdapterKind("learns a cache of keys and values", _PROMPT),
    "CPT": AdapterKind("learns vectors of examples before the prompt", _PROMPT),
    "ADAPTION_PROMPT": AdapterKind("learns gated prompts in the upper layers", _PROMPT),
    "ADALORA": AdapterKind("moves ranks between layers while it learns", _LORA),
    "ADAMSS": AdapterKind("learns low-rank updates in clusters of subspaces", _LORA),
    "C3A": AdapterKind("learns circular convolutions in blocks", _LORA),
    "DEFT": AdapterKind("projects a part of each weight away and learns another", _LORA),
    "GLORA": AdapterKind("scales and shifts weights and biases", _LORA),
    "GRALORA": AdapterKind("has LoRA in blocks of each weight", _LORA),
    "HIRA": AdapterKind("multiplies weights by low-rank matrices", _LORA),
    "LILY": AdapterKind("shares low-rank matrices between layers", _LORA),
    "LOHA": AdapterKind("learns Hadamard products of low-rank matrices", _LORA),
    "LOKR": AdapterKind("learns Kronecker products of small matrices", _LORA),
    "MISS": AdapterKind("shares one small matrix among the blocks of a weight", _LORA),
    "PEANUT": AdapterKind("makes updates of the weights by a small network", _LORA),
    "POLY": AdapterKind("mixes the adapters of several skills", _LORA),
    "RANDLORA": AdapterKind("scales sums of random matrices", _LORA),
    "SHADOW": AdapterKind("runs a small network beside the model", _LORA),
    "XLORA": AdapterKind("mixes several LoRA adapters token by token", _LORA),
    "BEFT": AdapterKind("learns biases of the value projections alone", _SMALL),
    "FOURIERFT": AdapterKind("learns Fourier coefficients of the update", _SMALL),
    "FROD": AdapterKind("learns sparse numbers in projections that layers share", _SMALL),
    "IA3": AdapterKind("scales activations by learned vectors", _SMALL),
    "PVERA": AdapterKind("draws the scales of random matrices that layers share", _SMALL),
    "TINYLORA": AdapterKind("projects a handful of numbers onto all layers", _SMALL),
    "UNILORA": AdapterKind("projects one vector onto all LoRA matrices", _SMALL),
    "VBLORA": AdapterKind("composes LoRA from a bank of vectors", _SMALL),
    "VERA": AdapterKind("scales random matrices that layers share", _SMALL),
    "WAVEFT": AdapterKind("learns wavelet coefficients of the update", _SMALL),
    "BOFT": AdapterKind("turns weights by butterfly rotations", _DORA),
    "DELORA": AdapterKind("learns direction and strength of LoRA apart", _DORA),
    "HRA": AdapterKind("turns weights by Householder reflections", _DORA),
    "OFT": AdapterKind("turns weights by rotations in blocks", _DORA),
    "PSOFT": AdapterKind("turns weights within a subspace", _DORA),
    "ROAD": AdapterKind("turns pairs of activations", _DORA),
    "LN_TUNING": AdapterKind("trains the norms alone", "modules_to_save with the norms' names, beside LoRA"),
    "TRAINABLE_TOKENS": AdapterKind("trains rows of the embedding", "modules_to_save: [embed_tokens], beside LoRA"),
    "OSF": AdapterKind("trains weights within a subspace", _FULL),
    "SHIRA": AdapterKind("trains some of the weights", _FULL),
    "SUPERTUNING": AdapterKind("trains the largest of the weights", _FULL),
}  # fmt: skip
"""peft_type → what it is, for every kind but LORA."""

_OF_ITS_START = "it is for a start that init_lora_weights names, which is refused by itself"
LORA_WORDS: Words = {
    "peft_type": Translated(("train_type",), "LORA; another kind is refused with the nearest that exists."),
    **renamed(r="rank", lora_dropout="dropout"),
    **same("lora_alpha", "use_rslora", "modules_to_save"),
    "use_dora": Translated(("train_type",), "true is dora.", is_switch=True),
    "target_modules": Translated(("lora_keys",), "Names or all-linear; a pattern is refused."),
    **without_effect("it is a mark of the file", "auto_mapping", "peft_version", "inference_mode"),
    **without_effect("the model is named beside it", "base_model_name_or_path", "revision"),
    **without_effect("MLX stores the weights of a layer in one way", "fan_in_fan_out"),
    **without_effect("a run is one process on one Mac", "megatron_config", "megatron_core"),
    **without_effect("it is for PyTorch; grad_checkpoint saves memory here", "runtime_config", "velora_config"),
    **without_effect("it says something only with use_qalora", "qalora_group_size"),
    **without_effect(_OF_ITS_START, "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    **without_effect("layers are found in the model's own code", "layers_pattern"),
    **without_effect("an embedding that is the output layer too is one array here", "ensure_weight_tying"),
    **refused("Every model here is a causal language model.", "task_type", off=("CAUSAL_LM",)),
    **refused("Adapters begin as peft's do by default, A drawn and B 0; leave it out.", "init_lora_weights", off=("true",)),
    **refused("Name the layers that get adapters in lora_keys, and leave these out.", "exclude_modules"),
    **refused("Adapters are on the last layers, as many as num_layers says, or on all.", "layers_to_transform"),
    **refused("mlx-lm has one rank and one scale for all layers: rank and lora_alpha.", "rank_pattern", "alpha_pattern"),
    **refused("modules_to_save trains a module whole, with its bias.", "bias", "lora_bias", off=("none",)),
    **refused("modules_to_save: [embed_tokens] trains all rows of the embedding.", "trainable_token_indices"),
    **refused("Adapters are put on linear layers and experts, by lora_keys.", "target_parameters"),
    **refused("A model keeps its layers; name one that has more.", "layer_replication"),
    **refused("An adapter works on every token here.", "alora_invocation_tokens"),
    **refused("A run has one adapter; mix them where they are served.", "arrow_config"),
    **refused("LoRA beside packed weights is nearest (quantization).", "use_qalora"),
    **refused("Plain LoRA is nearest, by leaving it out.", "monteclora_config", "use_bdlora", "kasa_config"),
}  # fmt: skip
"""The words of peft's LoraConfig."""
_INTO_TRL = {"r": "lora_r", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules", "lora_alpha": "lora_alpha",
             "use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}  # fmt: skip
"""Word of LoraConfig → the same in TRL's ModelConfig, whose words are read after these."""
DEFAULTS = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
"""LoraConfig's own, where they are not ours; the modules are those for Llama, Qwen and their like."""


def kind_sentence(kind: str) -> str:
    """Why adapters of another kind than LoRA are refused, without its subject: “is IA3, which …; nearest is ….”"""
    about = OTHER_KINDS.get(kind)
    if about is None:
        return f"is of the kind {quote(kind, 30)}, which is unknown here; there are LoRA, rsLoRA and DoRA."
    return f"is {kind}, which {about.does}; nearest here is {about.nearest}."


def peft_config(to: Translator) -> None:
    """A mapping of peft's words, as `peft_config` of TRL's GRPOTrainer or in an adapter_config.json, as the words of TRL's ModelConfig."""
    config: Any = to.take(WORD)
    if config is None:
        return None
    if not isinstance(config, Mapping):
        return to.refuse(WORD, f"peft_config must be a mapping of LoraConfig's words, not {quote(config, 60)}.")
    given = {str(word): value for word, value in cast("Mapping[Any, Any]", config).items() if value is not None}
    kind = str(given.get("peft_type", "LORA")).strip().upper().removeprefix("PEFTTYPE.")
    if kind != "LORA":
        return to.refuse(WORD, f"peft_config {kind_sentence(kind)}")
    to.fill("use_peft", True, WORD)
    for word, value in given.items():
        _read(to, word, value)
    return None


def _read(to: Translator, word: str, value: Any) -> None:
    fate = LORA_WORDS.get(word)
    if fate is None:
        to.refuse(WORD, f"peft_config has {quote(word, 40)}, which is no word of LoraConfig here; take it out.")
    elif isinstance(fate, Refused):
        # No draw of B is no start that changes nothing: false asks for one.
        if fate.asks(value) or (word == "init_lora_weights" and as_bool(value) is False):
            to.refuse(WORD, f"peft_config has {word}: {quote(value, 30)}. {fate.nearest}")
    elif (
        word == "target_modules"
        and isinstance(value, str)
        and value != ALL_LINEAR
        and not value.replace("_", "a").isalnum()
    ):
        to.refuse(
            WORD, f"target_modules is a pattern, {quote(value, 40)}; list the names of the layers, or all-linear."
        )
    elif not isinstance(fate, IgnoredKey) and word in _INTO_TRL:
        to.fill(_INTO_TRL[word], value, WORD)


def defaults(config: Any) -> dict[str, Any]:
    """TRL's words for what a `peft_config` leaves out; none where there is none, or of another kind."""
    if not isinstance(config, Mapping):
        return {}
    given = cast("Mapping[str, Any]", config)
    return {"use_peft": True} | {_INTO_TRL[word]: value for word, value in DEFAULTS.items() if given.get(word) is None}
