"""Ollama's Modelfile beside a GGUF file: how a chat is put to the model, how it was sampled in training, its system message.

The format: https://docs.ollama.com/modelfile. Ollama's templates are Go's, not Jinja, so the model's own template is rendered on a made-up
chat and what stands between the messages is taken from the result. The translation is used only where it gives the same text as the
original on other chats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
Render = Callable[[list[Message]], str]
"""The prompt as text for a chat whose last message is the user's. Raises for a chat that the template does not allow."""

MARKS = {
    "system": "\u2402sys\u2403",
    "first": "\u2402one\u2403",
    "answer": "\u2402two\u2403",
    "second": "\u2402three\u2403",
}
"""Messages that no template contains, by which their places in the result are found."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What stands around messages. A prompt is `opening`, or `before_system` system `after_system`; then for each message of the user its
    text and `after_user`, which opens the answer, and for each answer its text and `after_answer`, which opens the next message."""

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
        return (
            f'{opening}{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{{{{ .Content }}}}{_go_text(self.after_user)}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{_go_text(self.after_answer)}{{{{ end }}}}{{{{ end }}}}'
        )


def chat_format(render: Render, beginning: str = "") -> ChatFormat | None:
    """What a chat template puts around messages; None for one that does more than that. `beginning` is the token that the program puts before
    every prompt itself, which the template must not repeat."""
    user = {"role": "user", "content": MARKS["first"]}
    answered = [user, {"role": "assistant", "content": MARKS["answer"]}, {"role": "user", "content": MARKS["second"]}]
    system = {"role": "system", "content": MARKS["system"]}
    try:
        plain = render(answered).removeprefix(beginning)
        opening, rest = plain.split(MARKS["first"])
        after_user, rest = rest.split(MARKS["answer"])
        after_answer, _ = rest.split(MARKS["second"])
        try:
            before_system, rest = render([system, user]).removeprefix(beginning).split(MARKS["system"])
            after_system, takes_system = rest.split(MARKS["first"])[0], True
        except Exception:  # a template may refuse a system message in any way
            before_system = after_system = ""
            takes_system = False
        found = ChatFormat(opening, before_system, after_system, after_user, after_answer, takes_system)
        chats = ([user], answered, *([system, user], [system, *answered]) * takes_system)
        is_same = all(found.render(list(chat)) == render(list(chat)).removeprefix(beginning) for chat in chats)
    except Exception:
        return None
    return found if is_same else None


def modelfile(weights: str, chat: ChatFormat | None, parameters: Mapping[str, Any], system: str, licence: str) -> str:
    """The text of a Modelfile. `parameters` are those of Ollama by name; a list is given once for each of its values."""
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
    """In three quotation marks, within which everything else is taken as it is."""
    return f'"""{text.replace(chr(34) * 3, chr(39) * 3)}"""'


def _go_text(text: str) -> str:
    """Text that is no action of a Go template, nor becomes one with the action that follows it."""
    return re.sub(r"\{{2,}|\{\Z", lambda found: f'{{{{ "{found[0]}" }}}}', text)
