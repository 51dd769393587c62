"""The tools of a run's settings, read from source text without running it, in the form of the schemas that the model
reads: for the window, before a user has allowed the files to run."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.rewards.catalogue import Function, functions, parse_reward_file
from backend.tools.host import NOT_TOOLS, ToolSchemas
from backend.utils.errors import UserError
from backend.utils.files import user_path
from backend.utils.text import quote

OF_SERVER = "MCP server"
_ARGUMENT = re.compile(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SECTION = re.compile(r"^\s*(?:Args|Arguments|Returns|Raises|Example|Examples|Yields):\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ListedTool:
    """`origin`: a file's name, a class, or "MCP server". `schema`: JSON schema. `environment`: rows that have it."""

    schema: Mapping[str, Any]
    origin: str
    environment: str | None = None

    @property
    def is_optional(self) -> bool:
        """A function of the tools file, which the setting `tools` may leave out."""
        return self.environment is None and self.origin != OF_SERVER

    @property
    def name(self) -> str:
        return str(self.schema.get("name"))

    @property
    def description(self) -> str:
        return str(self.schema.get("description") or "")

    @property
    def parameters(self) -> list[tuple[str, str, str]]:
        """(name, type and if it is required, description) of each."""
        about = self.schema.get("parameters") or {}
        required = about.get("required") or ()
        return [
            (name, type_text(each) + ("" if name in required else ", optional"), str(each.get("description") or ""))
            for name, each in (about.get("properties") or {}).items()
        ]


def type_text(schema: Mapping[str, Any]) -> str:
    """The type of a parameter in words: “integer”, “list of string”, “one of "a", "b"”."""
    if choices := schema.get("enum"):
        return f"one of {', '.join(map(str, choices))}"
    if options := schema.get("anyOf"):
        return " or ".join(map(type_text, options))
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"list of {type_text(schema['items'])}"
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)


def listed_tools(settings: Mapping[str, Any]) -> list[ListedTool]:
    """Public functions of the tools file, and tools of the environments, by their source. Raises UserError."""
    listed: list[ListedTool] = []
    if file := str(settings.get("tools_file") or "").strip():
        path = user_path(file, "tools_file", Path.cwd())
        found = functions(parse_reward_file(path, "tools_file"))
        listed += [ListedTool(_schema(each), path.name) for each in found if not each.name.startswith("_")]
    environment = settings.get("environment")
    entries = environment if isinstance(environment, Mapping) else {"": environment}
    for name, entry in entries.items():
        file, _, kind = str(entry or "").strip().rpartition("::")
        if file:
            path = user_path(file, "environment", Path.cwd())
            methods = _methods(parse_reward_file(path, "environment"), kind, path)
            origin = f"{kind} ({name})" if name else kind
            listed += [ListedTool(_schema(each), origin, str(name)) for each in methods]
    return listed


def classes_of(path: Path) -> list[str]:
    """Names of the classes of a file that can be environments: those with a `reset`."""
    classes = (node for node in parse_reward_file(path, "environment").body if isinstance(node, ast.ClassDef))
    return [each.name for each in classes if any(method.name == "reset" for method in functions(each))]


def with_exact(listed: Sequence[ListedTool], schemas: ToolSchemas) -> list[ListedTool]:
    """These tools with the schemas that the model reads, and tools of MCP servers besides."""
    by_environment: dict[str | None, Sequence[Any]] = {None: schemas.shared, **schemas.by_environment}
    read = ((name, tool["function"]) for name, tools in by_environment.items() for tool in tools)
    exact = {(name, schema["name"]): schema for name, schema in read}
    found: list[ListedTool] = []
    for each in listed:
        schema = exact.pop((each.environment, each.name), None)
        found.append(each if schema is None else replace(each, schema=schema))
    return found + [ListedTool(schema, OF_SERVER, name) for (name, _), schema in exact.items()]


def _methods(tree: ast.Module, kind: str, path: Path) -> Iterator[Function]:
    """The tools of a class, and of those of the file that it inherits from."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if kind not in classes:
        known = ", ".join(classes) or "none"
        raise UserError("environment", f"{quote(path.name)} has no class {quote(kind, 40)}; it has {quote(known, 60)}.")
    bases = [base.id for base in classes[kind].bases if isinstance(base, ast.Name) and base.id in classes]
    own = {method.name: method for method in functions(classes[kind])}
    for base in bases:
        own = {method.name: method for method in _methods(tree, base, path)} | own
    properties = {"property", "cached_property"}
    for name, method in own.items():
        marks = {getattr(mark, "id", getattr(mark, "attr", "")) for mark in method.decorator_list}
        if not name.startswith("_") and name not in NOT_TOOLS and not marks & properties:
            yield method


def _schema(function: Function) -> dict[str, Any]:
    description, *sections = _SECTION.split(ast.get_docstring(function) or "")
    described: dict[str, str] = {}
    for line in (sections[0] if sections else "").splitlines():
        if match := _ARGUMENT.fullmatch(line):
            described[match[1]] = match[2]
        elif described:  # a line that continues the last one
            described[[*described][-1]] += f" {line.strip()}"
    args = function.args
    named = [arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs] if arg.arg not in ("self", "cls")]
    kinds = {arg.arg: ast.unparse(arg.annotation) if arg.annotation else "no type" for arg in named}
    positional = [arg.arg for arg in named if arg not in args.kwonlyargs]
    required = positional[: len(positional) - len(args.defaults)]
    required += [arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    return {
        "name": function.name,
        "description": " ".join(description.split()),
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": kind, "description": described.get(name, "").strip()} for name, kind in kinds.items()
            },
            "required": required,
        },
    }
