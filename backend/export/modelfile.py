"""Ollama's Modelfile: chat template, sampling parameters and system message.

Format: https://docs.ollama.com/modelfile. The Jinja template is rendered on a sample chat and the text between messages
becomes a Go template, used only if it reproduces other chats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.models.tokenizers import load_tokenizer
from backend.utils.files import open_regular

MODELFILE = "Modelfile"
LONGEST_LICENCE = 2**20
"""In bytes; the GPL has 35,000."""
NO_TEMPLATE = (
    "The chat template does more than a Modelfile can say, so the Modelfile leaves it to Ollama, which knows those of "
    "many models; compare an answer with the run's before you rely on it."
)
MARKS = {
    "system": "\u2402sys\u2403",
    "first": "\u2402one\u2403",
    "answer": "\u2402two\u2403",
    "second": "\u2402three\u2403",
}
"""Marker messages to find in the rendered text."""

Message = dict[str, str]
Render = Callable[[list[Message]], str]
"""Renders a chat that ends with a user message. Raises if the template refuses it."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Text around messages.

    `opening`, or `before_system` system `after_system`; then each user text and `after_user`, each answer and
    `after_answer`.
    """

    opening: str
    before_system: str
    after_system: str
    after_user: str
    after_answer: str
    takes_system: bool

    def render(self, messages: list[Message]) -> str:
        system = [message["content"] for message in messages if message["role"] == "system"]
        text = f"{self.before_system}{system[0]}{self.after_system}" if system and self.takes_system else self.opening
        for message in messages:
            if message["role"] != "system":
                text += message["content"] + (self.after_user if message["role"] == "user" else self.after_answer)
        return text

    def go_template(self) -> str:
        opening = _go_text(self.opening)
        if self.takes_system:
            system = f"{_go_text(self.before_system)}{{{{ .System }}}}{_go_text(self.after_system)}"
            opening = f"{{{{ if .System }}}}{system}{{{{ else }}}}{opening}{{{{ end }}}}"
        user = f'{{{{ if eq .Role "user" }}}}{{{{ .Content }}}}{_go_text(self.after_user)}'
        answer = f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{_go_text(self.after_answer)}{{{{ end }}}}'
        return f"{opening}{{{{ range .Messages }}}}{user}{answer}{{{{ end }}}}"


def chat_format(render: Render, beginning: str = "") -> ChatFormat | None:
    """Extract a chat template's text around messages; None if it does more.

    `beginning` is the token that Ollama itself adds before every prompt.
    """
    user = {"role": "user", "content": MARKS["first"]}
    answered = [user, {"role": "assistant", "content": MARKS["answer"]}, {"role": "user", "content": MARKS["second"]}]
    system = {"role": "system", "content": MARKS["system"]}
    try:
        plain = render(answered).removeprefix(beginning)
        opening, rest = plain.split(MARKS["first"])
        after_user, rest = rest.split(MARKS["answer"])
        after_answer, _ = rest.split(MARKS["second"])
        before_system = after_system = ""
        takes_system = False
        try:
            before_system, rest = render([system, user]).removeprefix(beginning).split(MARKS["system"])
            after_system, takes_system = rest.split(MARKS["first"])[0], True
        except Exception:  # a template may refuse a system message in any way
            before_system = ""
        found = ChatFormat(opening, before_system, after_system, after_user, after_answer, takes_system)
        chats = ([user], answered, *([system, user], [system, *answered]) * takes_system)
        is_same = all(found.render(list(chat)) == render(list(chat)).removeprefix(beginning) for chat in chats)
    except Exception:
        return None
    return found if is_same else None


def write_modelfile(config: Config, tokenizer_from: Path, weights: Path) -> tuple[str, ...]:
    """Write a run's Modelfile for the GGUF file `weights`; returns notes."""
    tokenizer = load_tokenizer(tokenizer_from)
    chat = None
    if tokenizer.has_chat_template:
        options = {"tokenize": False, "add_generation_prompt": True, **config.chat_template_kwargs}
        chat = chat_format(
            lambda messages: tokenizer.apply_chat_template(messages, **options), tokenizer.bos_token or ""
        )
    ends = [tokenizer.convert_ids_to_tokens(number) for number in tokenizer.eos_token_ids]
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
    names, neutral = ("repeat_penalty", "presence_penalty", "frequency_penalty"), (1.0, 0.0, 0.0)
    penalties = {name: now for name, now, off in zip(names, config.penalties, neutral, strict=True) if now != off}
    licence = ""
    if files := sorted(tokenizer_from.glob("LICENSE*")):
        try:
            with open_regular(files[0]) as file:
                licence = file.read(LONGEST_LICENCE).decode(errors="replace")
        except OSError:
            licence = ""
    parameters = {**sampling, **penalties, "stop": sorted({*ends, *config.stop})}
    text = modelfile(weights.name, chat, parameters, config.system_prompt, licence)
    (weights.parent / MODELFILE).write_text(text, encoding="utf-8")
    return (NO_TEMPLATE,) if chat is None and tokenizer.has_chat_template else ()


def modelfile(weights: str, chat: ChatFormat | None, parameters: dict[str, Any], system: str, licence: str) -> str:
    """Text of a Modelfile; a list in `parameters` gives one line per value."""
    lines = [f"FROM ./{weights}"]
    if chat is not None:
        lines.append(f"TEMPLATE {_quoted(chat.go_template())}")
    for name, value in parameters.items():
        for one in value if isinstance(value, list) else [value]:
            lines.append(f"PARAMETER {name} {_quoted(one) if isinstance(one, str) else one}")
    if system:
        lines.append(f"SYSTEM {_quoted(system)}")
    if licence:
        lines.append(f"LICENSE {_quoted(licence)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f'"""{text.replace(chr(34) * 3, chr(39) * 3)}"""'


def _go_text(text: str) -> str:
    return re.sub(r"\{{2,}|\{\Z", lambda found: f'{{{{ "{found[0]}" }}}}', text)
