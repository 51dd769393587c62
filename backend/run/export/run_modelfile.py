"""The Modelfile of a run's GGUF file: the prompt as the run put it, sampled as in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.models.export.gguf.modelfile import ChatFormat, Message, chat_format, modelfile
from backend.models.export.gguf.ollama import MODELFILE
from backend.models.export.trained_weights import open_tokenizer
from backend.spec.config import Config
from backend.spec.regular_file import open_regular

LONGEST_LICENCE = 2**20
"""Bytes. The GPL has 35,000."""
NO_TEMPLATE = (
    "The chat template does more than a Modelfile was found to say, so the Modelfile leaves it to Ollama, which knows those of many models; "
    "compare an answer with the run's before you rely on it."
)


def write_modelfile(config: Config, tokenizer_from: Path, weights: Path) -> tuple[str, ...]:
    """Write the Modelfile beside the GGUF file `weights`; → what is to be said of it, in sentences."""
    tokenizer = open_tokenizer(tokenizer_from)
    chat = _chat_format(tokenizer, config)
    parameters: dict[str, Any] = {
        "temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p,
        **_penalties(config),
        "stop": sorted({*_ends(tokenizer), *config.stop}),
    }  # fmt: skip
    licence = next(map(_text_of, sorted(tokenizer_from.glob("LICENSE*"))), "")
    text = modelfile(weights.name, chat, parameters, config.system_prompt, licence)
    (weights.parent / MODELFILE).write_text(text, encoding="utf-8")
    return (NO_TEMPLATE,) if chat is None and tokenizer.has_chat_template else ()


def _penalties(config: Config) -> dict[str, float]:
    """Those that are on, by Ollama's names."""
    names = ("repeat_penalty", "presence_penalty", "frequency_penalty")
    neutral = (1.0, 0.0, 0.0)
    return {name: now for name, now, off in zip(names, config.penalties, neutral, strict=True) if now != off}


def _text_of(licence: Path) -> str:
    """The text of a licence that came with the model; "" for what is no file, or cannot be read."""
    try:
        with open_regular(licence) as file:
            return file.read(LONGEST_LICENCE).decode(errors="replace")
    except OSError:
        return ""


def _chat_format(tokenizer: Any, config: Config) -> ChatFormat | None:
    if not tokenizer.has_chat_template:
        return None

    def render(messages: list[Message]) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **config.chat_template_kwargs
        )

    return chat_format(render, tokenizer.bos_token or "")


def _ends(tokenizer: Any) -> list[str]:
    """The tokens that end an answer, as text."""
    return [tokenizer.convert_ids_to_tokens(number) for number in tokenizer.eos_token_ids]
