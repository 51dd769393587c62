"""Shipped rewards from outside: of a language model, which `backend.judges` asks, or posted by an agent's own loop."""

from typing import Any
from urllib.parse import urlsplit

from backend.rewards.registry import Scores, Texts, Types, register_reward_function, require


@register_reward_function("judge", label="Judge")
def judge(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    rubric: str = "helpful_answer",
    mode: str = "group",
    url: str = "http://localhost:1234/v1",
    model: str = "",
    concurrency: int = 4,
    timeout: float = 60.0,
    when_unreachable: str = "pause",
) -> Scores:
    """The score 0 … 1 that a language model gives by a rubric: a text, a .toml or .json file, or a bundled one's name.
    `mode` group compares all completions of a prompt in one call (RULER of ART); single asks about each alone. `url`: a
    server with OpenAI's interface, or local for a `model` that the run loads itself. None where no score came in two
    tries. `when_unreachable`: pause the run, or skip the completions."""
    require(bool(rubric.strip()), "rubric is empty")
    require(mode in ("group", "single"), f"mode must be group or single, not {mode}")
    parts = urlsplit(url)
    is_server = parts.scheme in ("http", "https") and bool(parts.hostname)
    require(url == "local" or is_server, f"url must be local or begin with http:// or https://, not {url}")
    require("@" not in parts.netloc, "url holds a password; a key belongs into the keychain or OPENAI_API_KEY")
    require(bool(model) or url != "local", "url=local needs a model")
    require(1 <= concurrency <= 256, f"concurrency must be 1 to 256, not {concurrency}")
    require(timeout > 0, f"timeout must be above 0, not {timeout:g}")
    choice = f"when_unreachable must be pause or skip, not {when_unreachable}"
    require(when_unreachable in ("pause", "skip"), choice)
    if completions:
        raise RuntimeError("a judge scores in the trainer's process")
    return []


@register_reward_function("session_reward", label="Session Reward")
def session_reward(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, **columns: list[Any]
) -> Scores:
    """The reward that was posted for the recorded session. None for completions that are sampled."""
    return columns.get("session_reward") or [None] * len(completions)
