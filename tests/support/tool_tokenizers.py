"""The tiny tokenizer with a chat template for tools."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx_lm.utils

from tests.support.random_models import tiny_model, tiny_tokenizer

TEMPLATES = Path(__file__).parent.parent / "golden" / "chat_templates"
"""Texts of published models, as the files of TRL 1.16 (trl/chat_templates, Apache-2.0) hold them."""


def tool_tokenizer(
    folder: Path, template: str = "qwen3", *, parser: str = "", special: Sequence[str] = (), end: str = ""
) -> Any:
    """`template`: the name of a file in TEMPLATES, or the text of one. `parser`: mlx-lm's, if it cannot be told from
    the template. `end`: the token that ends a turn, if it is not <|im_end|>."""
    file = TEMPLATES / f"{template}.jinja"
    text = file.read_text(encoding="utf-8") if len(template) < 40 and file.exists() else template
    tiny_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    first = 1 + max(tokenizer["model"]["vocab"].values())
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [*special, *([end] if end else [])]
    tokenizer["added_tokens"] += [{"id": first + i, "content": token} | entry for i, token in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) | {"chat_template": text}
    config |= {"tool_parser_type": parser} if parser else {}
    config |= {"eos_token": end} if end else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    return mlx_lm.utils.load_tokenizer(folder)


def tool_model(folder: Path) -> Path:
    """A tiny random model of the qwen3 architecture with this tokenizer."""
    vocab = len(tool_tokenizer(folder / "tokenizer"))
    tiny_model(folder, own={"vocab_size": vocab}, hidden=32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(folder / "tokenizer" / name, folder / name)
    (folder / "generation_config.json").unlink()
    return folder


def call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def schema(name: str, **types: Any) -> dict[str, Any]:
    """A tool's JSON schema; `types`: a parameter's type, or its whole schema."""
    properties = {key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
