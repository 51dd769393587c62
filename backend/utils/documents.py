"""YAML and JSON that a user supplied, with limits on size, depth and aliases.

YAML is what PyYAML's safe loader reads, without tags: a document that names a type of its own is refused. An alias (`*name`) counts as
much as what it stands for, so that a small file cannot stand for billions of values; a key that is given twice is a mistake.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import yaml

from backend.utils.errors import UserError
from backend.utils.files import TEXT_LIMIT, is_text, read_text
from backend.utils.numbers import fits_a_float
from backend.utils.text import about_path, quote

YAML_LIMIT = 2**20
"""Characters of a YAML document, aliases written out; bytes of a YAML file."""
VALUES = 10_000
"""Keys and values of a YAML document, aliases written out. About a second of PyYAML."""
DEPTH = 50
"""Levels of lists and mappings, far below Python's recursion limit."""
NUMBER_LENGTH = 400
"""Characters of a number in YAML; no float has more than 309 digits before its point."""
_WHY = 60
"""Characters of a reason."""
_NUMBERS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
_MERGE = "tag:yaml.org,2002:merge"


# ── YAML ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_yaml(path: Path, setting: str) -> Any:
    """The content of a YAML file. Raises UserError that names the file."""
    return parse_yaml(read_text(path, setting, YAML_LIMIT), str(path), setting)


def parse_yaml(text: str, what: str, setting: str) -> Any:
    """The content of a YAML text. Raises UserError; `what` names the text in its sentence, such as a file's path."""
    try:
        if len(text) > YAML_LIMIT:
            raise _Refused(f"it is longer than {YAML_LIMIT:,} characters")
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}" if mark else ""
        why = error.problem or error.context
    except yaml.YAMLError as error:
        where, why = "", getattr(error, "reason", None) or "it cannot be parsed"
    except (ValueError, OverflowError) as error:  # a date such as 2026-13-45, a float written with colons
        where, why = "", str(error).strip().partition("\n")[0]
    raise UserError(setting, about_path(what, f" is not valid YAML{where}: {quote(why or 'it cannot be parsed')}."))


class _Refused(yaml.MarkedYAMLError):
    """A document that PyYAML would read and we do not."""

    def __init__(self, problem: str, mark: Any = None) -> None:
        super().__init__(None, None, problem, mark)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the limits above. They hold while nodes are composed, before any value is made of them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values, self._characters = 0, 0
        self._weights: dict[
            int, tuple[int, int]
        ] = {}  # by the id of an anchored node: (values, characters) of all of it
        self._open: set[str] = set()

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = cast("Any", self.peek_event())  # pyright: ignore
        if isinstance(event, yaml.AliasEvent):
            self._count_alias(event)
            return super().compose_node(parent, index)
        if event.tag is not None:
            raise _Refused(f"tags are not read, and {quote(event.tag, 40)} is one", event.start_mark)
        if event.anchor is not None:
            if event.anchor in self.anchors:
                raise _Refused(f"the anchor {quote(event.anchor, 40)} is set twice", event.start_mark)
            self._open.add(event.anchor)
        before = (self._values, self._characters)
        self._count(1, len(event.value) if isinstance(event, yaml.ScalarEvent) else 0, event.start_mark)
        self._depth += isinstance(event, yaml.CollectionStartEvent)
        if self._depth > DEPTH:
            raise _Refused(f"it is nested more than {DEPTH} levels deep", event.start_mark)
        node = cast("yaml.Node", super().compose_node(parent, index))
        self._depth -= isinstance(event, yaml.CollectionStartEvent)
        if event.anchor is not None:
            self._open.discard(event.anchor)
            self._weights[id(node)] = (self._values - before[0], self._characters - before[1])
        self._check(node)
        return node

    def _count_alias(self, event: Any) -> None:
        if event.anchor in self._open:
            raise _Refused(f"the alias {quote(event.anchor, 40)} stands inside what it stands for", event.start_mark)
        if event.anchor in self.anchors:
            self._count(*self._weights[id(self.anchors[event.anchor])], event.start_mark)

    def _count(self, values: int, characters: int, mark: Any) -> None:
        self._values += values
        self._characters += characters
        if self._values > VALUES:
            raise _Refused(f"it holds more than {VALUES:,} values, aliases written out", mark)
        if self._characters > YAML_LIMIT:
            raise _Refused(f"it is longer than {YAML_LIMIT:,} characters, aliases written out", mark)

    def _check(self, node: yaml.Node) -> None:
        """Refuse a key given twice, a number of absurd length, and text that no file could hold."""
        if isinstance(node, yaml.MappingNode):
            seen: set[tuple[str, str]] = set()
            for key, _ in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    if (written := (key.tag, key.value)) in seen:
                        raise _Refused(f"{quote(key.value, 40)} is given twice", key.start_mark)
                    seen.add(written)
        elif isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > NUMBER_LENGTH:
                raise _Refused(f"a number has more than {NUMBER_LENGTH} characters", node.start_mark)
            if not node.value.isascii() and not is_text(node.value):
                raise _Refused("an escape stands for no character", node.start_mark)


# YAML 1.1 has a type of its own for a bare “=”, for which PyYAML has no value.
_Loader.add_constructor("tag:yaml.org,2002:value", yaml.SafeLoader.construct_yaml_str)  # pyright: ignore


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_json(path: Path, setting: str, limit: int = TEXT_LIMIT, *, advice: str = "") -> Any:
    """The content of a JSON file of at most `limit` bytes. Raises UserError that names the file; `advice` ends its sentence about a content
    that is no JSON, as in “mend or delete it”."""
    return parse_json(read_text(path, setting, limit), str(path), setting, advice=advice)


def parse_json(text: str, what: str, setting: str, *, advice: str = "") -> Any:
    """The content of a JSON text. Raises UserError; `what` names the text in its sentence. NaN and Infinity are refused, as JSON has
    none, and so are a whole number of more digits than Python reads (4,300) and more than DEPTH levels."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if _may_be_deep(text) and _is_deep(value):
            raise RecursionError
    except json.JSONDecodeError as error:
        where = f" at line {error.lineno}" if error.lineno > 1 else f" at character {error.colno}"
        why = error.msg[:1].lower() + error.msg[1:]
    except RecursionError:
        where, why = "", f"it is nested more than {DEPTH} levels deep"
    except ValueError as error:
        where, why = "", str(error) if isinstance(error, _NoNumber) else "a whole number has more than 4,300 digits"
    else:
        return value
    ending = f"; {advice}." if advice else "."
    raise UserError(setting, about_path(what, f" is not valid JSON{where}: {quote(why, _WHY)}{ending}"))


class _NoNumber(ValueError):
    """NaN or Infinity."""


def _no_constant(name: str) -> Any:
    raise _NoNumber(f"{name} is no number")


def _may_be_deep(text: str) -> bool:
    """Whether it has enough brackets; most texts have not, and need no walk."""
    return text.count("[") + text.count("{") > DEPTH


def _is_deep(value: Any) -> bool:
    """Whether lists and mappings are nested deeper than DEPTH, without recursion."""
    level: list[Any] = [value]
    for _ in range(DEPTH + 1):
        nested = cast("list[Any]", [item for item in level if isinstance(item, (list, dict))])
        if not nested:
            return False
        inner = (cast("dict[Any, Any]", part).values() if isinstance(part, dict) else part for part in nested)
        level = [item for items in inner for item in items]
    return True


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# Nested plain values that a user supplied (a YAML mapping, a form's values), checked as a whole before anything works
# on them.

_CONTAINERS = (list, tuple, dict)


def validation_error(value: object) -> str:
    """Why nothing can work with a value, as the end of a sentence (“… contains a number beyond every limit”); "" if all is well.

    It finds text that no file can hold, whole numbers beyond the range of a float, nesting deeper than DEPTH, and more than VALUES parts.
    """
    level: list[Any] = [value]
    parts = 0
    for _ in range(DEPTH + 1):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, str):
                if not part.isascii() and not is_text(part):
                    return f"contains characters that are not valid text: {quote(part)}"
            elif isinstance(part, int):
                if not fits_a_float(part):
                    return f"contains {quote(part)}, which is beyond every limit"
            elif isinstance(part, dict):
                mapping = cast("dict[Any, Any]", part)
                inner += [*mapping, *mapping.values()]
            elif isinstance(part, _CONTAINERS):
                inner += cast("list[Any]", part)
        if not inner:
            return ""
        parts += len(inner)
        if parts > VALUES:
            return f"contains more than {VALUES:,} values"
        level = inner
    return f"is nested more than {DEPTH} levels deep"
