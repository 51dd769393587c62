"""A tokenizer of the user's choice in place of the model's: found, loaded, and held against the model's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn

from backend.models.hub_errors import hub_errors_as_mistakes
from backend.models.hub_search import check_reachable
from backend.models.tokenizers import load_tokenizer
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder, user_path
from backend.utils.hub_cache import local_folder
from backend.utils.text import quote, shown_path

SETTING = "tokenizer"
FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("spiece.model", "*.tiktoken", "chat_template.*"),
)
"""What is fetched of a repository of the Hub."""


def tokenizer_folder(name: str) -> Path:
    """The folder with the tokenizer's files: `name` itself, or those of an id in the Hub's cache, fetched where they are missing. Raises
    UserError."""
    folder = user_path(name, SETTING)
    if is_folder(folder):
        return _checked(folder)
    cached = local_folder(name)
    if cached is not None and is_file(cached / "tokenizer_config.json"):
        return cached
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(
            SETTING,
            f"There is no tokenizer {shown_path(name, 90)}: it is neither a folder nor an owner/name id on Hugging Face.",
        )
    from huggingface_hub import snapshot_download

    check_reachable(name, "model", SETTING)
    with hub_errors_as_mistakes(name, "model", SETTING):
        return _checked(Path(snapshot_download(name, allow_patterns=list(FILES))))


def _checked(folder: Path) -> Path:
    if not is_file(folder / "tokenizer_config.json"):
        raise UserError(SETTING, f"The folder {quote(folder)} holds no tokenizer: tokenizer_config.json is missing.")
    return folder


def run_tokenizer(name: str, own: Any, model: nn.Module) -> Any:
    """The tokenizer `name`, or the model's `own` where `name` is "". Raises UserError for one that does not fit the model."""
    if not name:
        return own
    folder = tokenizer_folder(name)
    tokenizer = load_tokenizer(folder, SETTING)
    largest, rows = max(tokenizer.get_vocab().values(), default=-1), vocabulary_rows(model)
    if rows is not None and largest >= rows:
        raise UserError(
            SETTING,
            f"The tokenizer {quote(Path(name), 50)} has tokens up to {largest:,}, and the model's vocabulary ends at {rows - 1:,}: it is another "
            "model's.",
        )
    if not set(tokenizer.eos_token_ids):
        raise UserError(SETTING, f"The tokenizer {quote(Path(name), 50)} names no token that ends a text.")
    return tokenizer


def with_end_tokens(config: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A model's config.json for `tokenizer`: who loads what is saved ends its texts at these tokens."""
    return config | {"eos_token_id": sorted(int(token) for token in tokenizer.eos_token_ids)}


def vocabulary_rows(model: nn.Module) -> int | None:
    """Tokens that the model's embedding has; None for a model without one."""
    rows = [
        module.weight.shape[0]
        for _, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
    ]
    return max(rows, default=None)
