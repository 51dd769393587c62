"""The tools of a run's settings, for the window: before a user has allowed the files to run, the functions of the tools
file by name, read without running it; afterwards all as the schemas that the model reads."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.rewards.catalogue import functions, parse_reward_file
from backend.tools.host import ToolSchemas
from backend.utils.files import user_path


@dataclass(frozen=True, slots=True)
class ListedTool:
    """`schema`: JSON schema; the name alone while it is not known. `origin`: a file's name, a class, or "MCP server".
    `is_optional`: a function of the tools file, which the setting `tools` may leave out."""

    schema: Mapping[str, Any]
    origin: str
    is_optional: bool = False

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


def listed_tools(settings: Mapping[str, Any], schemas: ToolSchemas | None) -> list[ListedTool]:
    """Public functions of the tools file; with `schemas` those of environments and servers too. Raises UserError."""
    known = {tool["function"]["name"]: tool["function"] for tool in schemas.shared} if schemas else {}
    listed: list[ListedTool] = []
    if file := str(settings.get("tools_file") or "").strip():
        path = user_path(file, "tools_file", Path.cwd())
        names = [function.name for function in functions(parse_reward_file(path, "tools_file"))]
        listed = [
            ListedTool(known.pop(name, {"name": name}), path.name, is_optional=True)
            for name in names
            if not name.startswith("_")
        ]
    environment = settings.get("environment")
    for name, tools in schemas.by_environment.items() if schemas else ():
        kind = str(environment[name] if isinstance(environment, Mapping) else environment).rpartition("::")[2]
        listed += [ListedTool(tool["function"], f"{kind} ({name})" if name else kind) for tool in tools]
    return listed + [ListedTool(schema, "MCP server") for schema in known.values()]


def classes_of(path: Path) -> list[str]:
    """Names of the classes of a file that can be environments: those with a `reset`."""
    classes = (node for node in parse_reward_file(path, "environment").body if isinstance(node, ast.ClassDef))
    return [each.name for each in classes if any(method.name == "reset" for method in functions(each))]
