"""Handlers about the servers that judges ask."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from backend.serve.questions import QuestionCall


def judge_servers(request: dict[str, Any], call: QuestionCall) -> list[dict[str, Any]]:
    """{} → the servers on this machine that could judge, {name, url, models}."""
    from backend.judges.server import find_servers

    return [asdict(server) for server in find_servers()]


def judge_key(request: dict[str, Any], call: QuestionCall) -> None:
    """{url, key}: the key of a server, kept in the system's keychain; an empty one is deleted."""
    from backend.judges.server import save_key

    save_key(urlsplit(request["url"]).hostname or "", str(request["key"]))
