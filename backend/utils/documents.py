"""YAML and JSON that a user supplied, with limits on size and depth, and the whole numbers in such texts."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from backend.utils.errors import UserError
from backend.utils.files import DEPTH, is_text, levels, read_text
from backend.utils.places import resources
from backend.utils.text import about_path, quote

YAML_LIMIT = 2**20
VALUES = 10_000
FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's: several times as fast, and without limits
_MERGE = "tag:yaml.org,2002:merge"


def read_resource(name: str) -> Any:
    """Content of a YAML file of ours in resources/."""
    return yaml.load((resources() / name).read_text(encoding="utf-8"), Loader=FAST_LOADER)


def read_yaml(path: Path, setting: str) -> Any:
    """Content of a YAML file. Raises UserError that names the file."""
    return parse_yaml(read_text(path, setting, YAML_LIMIT), str(path), setting)


def parse_yaml(text: str, what: str, setting: str) -> Any:
    """Content of a YAML text without tags. Raises UserError; `what` names the text, such as a file's path."""
    where, why = "", None
    try:
        if len(text) > YAML_LIMIT:
            raise ValueError(f"it is longer than {YAML_LIMIT:,} characters")
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}" if mark else ""
        why = error.problem or error.context
    except yaml.YAMLError as error:
        why = getattr(error, "reason", None)
    except RecursionError:
        why = f"it is nested more than {DEPTH} levels deep"
    except (ValueError, OverflowError) as error:  # a date such as 2026-13-45, a float written with colons
        why = str(error).strip().partition("\n")[0]
    raise UserError(setting, about_path(what, f" is not valid YAML{where}: {quote(why or 'it cannot be parsed')}."))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses tags and keys that are given twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # pyright: ignore
        if getattr(event, "tag", None) is not None:
            problem = f"tags are not read, and {quote(event.tag, 40)} is one"
            raise yaml.MarkedYAMLError(None, None, problem, event.start_mark)
        node: Any = super().compose_node(parent, index)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{quote(key.value, 40)} is given twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node


# YAML 1.1 has a type of its own for a bare “=”, for which PyYAML has no value.
_Loader.add_constructor("tag:yaml.org,2002:value", yaml.SafeLoader.construct_yaml_str)  # pyright: ignore


def read_json(path: Path, setting: str, *, advice: str = "") -> Any:
    """Content of a JSON file. Raises UserError that names the file and ends in `advice`."""
    return parse_json(read_text(path, setting), str(path), setting, advice=advice)


def parse_json(text: str, what: str, setting: str, *, advice: str = "") -> Any:
    """Content of a JSON text without NaN, Infinity and keys given twice. Raises UserError; `what` names the text."""

    def refuse(name: str) -> Any:
        raise BrokenJson(f"{name} is not a number")

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            names = [name for name, _ in pairs]
            raise BrokenJson(f"{max(names, key=names.count)} is given twice")
        return found

    try:
        return _loads(text, DEPTH, parse_constant=refuse, object_pairs_hook=mapping)
    except BrokenJson as error:
        where = f" at line {error.line}" if error.line > 1 else f" at character {error.column}" if error.line else ""
        ending = f"; {advice}." if advice else "."
        why = error.why if error.why.startswith("NaN") else error.why[:1].lower() + error.why[1:]
        raise UserError(setting, about_path(what, f" is not valid JSON{where}: {quote(why, 60)}{ending}")) from None


def parse_loose_json(text: str) -> Any:
    """Value of a JSON text as Python writes it, NaN and Infinity included, of at most 100 levels. Raises BrokenJson."""
    return _loads(text, 100)


class BrokenJson(ValueError):
    """The text is not usable JSON: why, as part of a sentence, and the place where that shows (line 0 if none does)."""

    def __init__(self, why: str, line: int = 0, column: int = 0) -> None:
        super().__init__(why)
        self.why, self.line, self.column = why, line, column


def _loads(text: str, most_levels: int, **options: Any) -> Any:
    try:
        value = json.loads(text, **options)
        if text.count("[") + text.count("{") > most_levels and levels(value, most_levels) > most_levels:
            raise RecursionError
    except BrokenJson:
        raise
    except json.JSONDecodeError as error:
        raise BrokenJson(error.msg.removesuffix(" at").removesuffix(" starting"), error.lineno, error.colno) from None
    except RecursionError:
        raise BrokenJson(f"it is nested more than {most_levels} levels deep") from None
    except ValueError:  # Python's limit on the digits of an int
        raise BrokenJson("a whole number has more than 4,300 digits") from None
    return value


def validation_error(value: object) -> str:
    """Why a nested value of settings is unusable, as the end of a sentence; "" if it is fine."""
    level, count = [value], 0
    for _ in range(DEPTH + 1):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, str) and not part.isascii() and not is_text(part):
                return f"contains characters that are not valid text: {quote(part)}"
            if isinstance(part, int) and abs(part) > sys.float_info.max:
                return f"contains {quote(part)}, which is beyond every limit"
            if isinstance(part, dict):
                inner += [*part, *part.values()]
            elif isinstance(part, list | tuple):
                inner += part
        count += len(inner)
        if count > VALUES:  # a small YAML file with aliases can stand for billions of values
            return f"contains more than {VALUES:,} values"
        if not inner:
            return ""
        level = inner
    return f"is nested more than {DEPTH} levels deep"


def written_whole(text: str) -> int | None:
    """The whole number of up to 30 decimal digits that a text writes; None for any other text."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 30 else None
