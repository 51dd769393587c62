"""The process in which a chat template is tried: JSON of its text on stdin, "fine" or what is wrong with it on stdout.

Rendered as transformers does, in the same sandbox with the same additions, over made-up chats; whether the template takes those is not the
question, so what it raises counts as fine. Imports Jinja alone, to begin quickly.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser

from backend.models.template_limits import LONGEST, MEMORY, TIME_S

_USER, _SYSTEM = {"role": "user", "content": "What is 2 plus 3?"}, {"role": "system", "content": "Be brief."}
_ANSWER = {"role": "assistant", "content": "5"}
CHATS = ([_USER], [_SYSTEM, _USER], [_SYSTEM, *[_USER, _ANSWER] * 8, _USER])


class _Generation(ext.Extension):
    """`{% generation %}` of transformers, which marks what the assistant said: here its body only."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> int:
    template = json.loads(sys.stdin.buffer.read())
    for what, limit in ((resource.RLIMIT_CPU, int(TIME_S)), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(what, (limit, limit))
    try:
        words = "fine" if _longest(template) <= LONGEST else f"makes more than {LONGEST:,} characters of a few words"
    except MemoryError:
        words = f"takes more than {MEMORY / 2**30:g} GB of memory for one message"
    except Exception:  # it is no template at all: the one that loads it says so
        words = "fine"
    sys.stdout.write(words)
    return 0


def _longest(template: str) -> int:
    """Characters of the longest rendered chat. Raises whatever the template does, MemoryError first."""
    compiled = _environment().from_string(template)
    longest = 0
    for chat in CHATS:
        for thinking in (False, True):
            try:
                longest = max(longest, _length(compiled, chat, thinking))
            except MemoryError:
                raise
            except Exception:  # a template may refuse a chat in any way; its words are told where it refuses a row
                continue
    return longest


def _length(compiled: jinja2.Template, chat: list[dict[str, str]], thinking: bool) -> int:
    length = 0
    for piece in compiled.generate(messages=chat, tools=None, documents=None, add_generation_prompt=True,
                                   bos_token="<s>", eos_token="</s>", enable_thinking=thinking):  # fmt: skip
        length += len(piece)
        if length > LONGEST:
            break
    return length


def _environment() -> jinja2.Environment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    sys.exit(main())
