"""Remove local paths, user and host names, and tokens from published files; refuse uploads that leak."""

import getpass
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from backend.utils.errors import UserError
from backend.utils.files import exists, possible_path

FREE_TEXT = ("system_prompt", "stop", "chat_template_kwargs")  # settings whose slashes are ordinary text

GENERIC = ("model", "data", "dataset", "fused", "train.jsonl")  # uninformative folder names

_ABSOLUTE = re.compile(r"(?<![\w/.])(?:~|/)[\w.~+@ -]*/[^\s:'\",]*")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
BASE_KEYS = ("model", "base_model_name_or_path")
_PATH_KEYS = (*BASE_KEYS, "data", "adapter_path", "_name_or_path", "name_or_path", "config")
"""JSON keys of mlx-lm and transformers that hold local paths."""

OURS = ("README.md", "training.yaml", "adapter_config.json", "config.json")  # written by us: no tokenizer's vocabulary


def public_name(name: str) -> str:
    """A name without its local path: a Hub id, also from a cache path, or the last part, or two if generic."""
    if not _is_path(name):
        return name
    path = PurePosixPath(name)
    for part in path.parts:
        if cached := re.fullmatch(r"(?:models|datasets)--([^-].*?)--(.+)", part):
            return f"{cached[1]}/{cached[2]}"
    return f"{path.parent.name}-{path.name}" if path.name in GENERIC and path.parent.name else path.name


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~", "./", "../")) or ((path := possible_path(text)) is not None and exists(path))


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce paths in settings to their last part, and MCP servers to their names: the rest may hold keys."""
    public = {key: _public(value, is_text=key in FREE_TEXT) for key, value in settings.items()}
    if servers := public.get("mcp_servers"):
        public["mcp_servers"] = {name: {} for name in servers}
    return public


def _public(value: Any, *, is_text: bool) -> Any:
    if isinstance(value, str):
        return public_text(value) if is_text else _ABSOLUTE.sub(lambda found: public_name(found[0]), value)
    if isinstance(value, Mapping):
        return {key: _public(item, is_text=is_text) for key, item in cast("Mapping[str, Any]", value).items()}
    return [_public(item, is_text=is_text) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def public_text(text: str) -> str:
    """Remove the home folder and tokens from text."""
    return _TOKEN.sub("hf_…", text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text)


def clean_json_files(folder: Path, base: str) -> None:
    """Remove local paths from a model's JSON files; `base` replaces that of the base model."""
    for file in folder.glob("*config.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        changed = {
            key: base if key in BASE_KEYS else public_name(value)
            for key, value in content.items()
            if key in _PATH_KEYS and isinstance(value, str) and _is_path(value)
        }
        if changed:
            file.write_text(json.dumps({**content, **changed}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_leaks(folder: Path, token: str = "") -> None:
    """Raise UserError if a text file has a local path, user or host name, or a token."""
    host = socket.gethostname().partition(".")[0]
    secrets = [("an access token", _TOKEN), *([("an access token", re.compile(re.escape(token)))] if token else [])]
    local = [
        ("a path of this machine", re.compile(re.escape(str(Path.home())) + r"/")),
        ("the path of a user's home", re.compile(rf"/(?:home|Users)/{re.escape(getpass.getuser())}\b")),
    ]
    if len(host) > 5:  # shorter ones are words
        local.append(("the name of this machine", re.compile(rf"\b{re.escape(host)}\b")))
    for file in sorted(folder.rglob("*")):
        if file.suffix not in (".md", ".yaml", ".json", ".txt", ".jinja", ".py") or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        for what, pattern in [*secrets, *(local if file.name in OURS else [])]:
            if pattern.search(text):
                raise UserError("repo", f"{file.name} contains {what}, so nothing is sent; take it out of {file}.")
