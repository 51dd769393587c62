"""The tokenizer of a GGUF file, from tokenizer.json: tokens with their types, merges, special tokens, the chat template.

llama.cpp splits text into words by code of its own, chosen by a name. The name is found by the pre-tokenizer's regular expressions; a
tokenizer that has others is refused, because llama.cpp would then read text differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from backend.models.export.gguf.gguf_family import use_converter

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LLAMA_3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN_2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"

WORD_SPLITTERS = {
    (LLAMA_3, "bytes"): "llama-bpe",
    (QWEN_2, "bytes"): "qwen2",
    ("digits", "gpt-2"): "smollm",
    ("gpt-2",): "gpt-2",
}
"""llama.cpp's name by the steps of the pre-tokenizer, as `_steps` tells them."""

WHOLE_WORDS_FIRST = {"llama-bpe"}
"""Those with which llama.cpp takes a word that is a token as it is, without merging (`ignore_merges`)."""


def check_vocabulary(folder: Path) -> None:
    """Raise Mistake for a tokenizer that llama.cpp is not known to read in the same way."""
    _word_splitter(_read(folder))


def write_vocabulary(folder: Path, size: int, writer: gguf.GGUFWriter) -> None:
    """Write the tokenizer in `folder`; `size` is the model's number of tokens, which may be larger. Raises as `check_vocabulary`."""
    tokenizer = _read(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_word_splitter(tokenizer))
    tokens, types = _tokens(tokenizer, size)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise use_converter("The tokenizer has no tokenizer.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _tokens(tokenizer: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every token by id, and its type. Ids that the model has and the tokenizer has not are unused."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    return tokens, types


def _word_splitter(tokenizer: dict[str, Any]) -> str:
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise use_converter("The tokenizer is no byte-level BPE")
    name = WORD_SPLITTERS.get(tuple(_steps(tokenizer.get("pre_tokenizer"))))
    if name is None or (name in WHOLE_WORDS_FIRST) != bool(model.get("ignore_merges")):
        raise use_converter("The tokenizer splits words in a way whose name in llama.cpp is not known")
    return name


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """The steps of a pre-tokenizer: a regular expression, "digits" one by one, "gpt-2" for its words in bytes, "bytes" for bytes alone;
    its type where it is none of these."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": steps}:
            return [name for step in steps for name in _steps(step)]
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": pattern}}:
            return [pattern]
        case {"type": "Digits", "individual_digits": True}:
            return ["digits"]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return ["gpt-2" if pre_tokenizer.get("use_regex", True) else "bytes"]
    return [str((pre_tokenizer or {}).get("type"))]
