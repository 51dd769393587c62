"""The data of one training step: a Problem is sampled into a Group of Completions. Plain lists; no arrays, no mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from backend.runs.completion_rows import Stop, TurnRow

IMAGES = ("image", "images")  # columns with images, as TRL names them


def is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    items = value if isinstance(value, list) else []
    return bool(items) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str | list)
        for item in items
    )


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a message's content; images have none."""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The image parts of a chat, in order."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part for content in contents for part in content if part["type"] == "image"] if contents else []


def image_paths(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [part["image"] for part in image_parts(messages)]


@dataclass(slots=True)
class Problem:
    """One row of the dataset, tokenised and ready to be sampled."""

    index: int
    prompt: str  # the user's own text (of messages the last user message): what reward functions and tables show
    messages: list[dict[str, Any]]
    """The content of a message with images is a list of parts, {"type": "image", "image": path} and {"type": "text",
    "text": …}; others are text."""
    tokens: list[int]  # ids that the model reads, generation prompt included; one image token a feature
    answer: str
    type: str | None = None
    row: dict[str, Any] = field(default_factory=dict)  # every column of the dataset's row, unchanged
    label: Label | None = None  # the row's answer to imitate, in supervised fine-tuning
    recorded: Sequence[Mapping[str, Any]] = ()  # completions that were sampled before, in place of new ones

    @property
    def images(self) -> list[str]:
        """Paths of the prompt's images, in order."""
        return image_paths(self.messages)


@dataclass(frozen=True, slots=True)
class Label:
    """A row of a labelled dataset as the model reads it; `mask`: 1 for the tokens to imitate, the first token never.
    `is_cut`: it was longer than Max Seq."""

    tokens: list[int]
    mask: list[int]
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote, its arguments typed by the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave: text that the model reads. `failed`: it raised, took too long, or names no tool; `content` is
    then {"error": …} as text. `reward`: what the server of the environment gave for the call."""

    name: str
    content: str
    failed: bool = False
    seconds: float = 0.0
    reward: float = 0.0


@dataclass(slots=True)
class Turn:
    """What the policy wrote until it ended a turn, and the results of the calls in it; `content`: the text outside the
    calls. `tokens`: ids of the completion that belong to the turn, `result_tokens` those of its results; 0 where they
    did not fit and were left out, which ends the completion."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    tokens: int = 0
    results: list[ToolResult] = field(default_factory=list)
    result_tokens: int = 0

    def messages(self) -> list[dict[str, Any]]:
        """The turn as chat messages, as TRL hands them to reward functions; without results that were left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            functions = ({"name": call.name, "arguments": call.arguments} for call in self.calls)
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        kept = self.results if self.result_tokens else []
        return [message, *({"role": "tool", "name": result.name, "content": result.content} for result in kept)]

    def row(self) -> TurnRow:
        turn = asdict(self)
        for result in turn["results"]:
            if not result["reward"]:
                del result["reward"]
        return TurnRow(text=turn.pop("content"), **turn)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Turn:
        """Raises KeyError or TypeError for a row that is none."""
        calls, results = [ToolCall(**call) for call in row["calls"]], [ToolResult(**each) for each in row["results"]]
        return cls(row["text"], calls, row["tokens"], results, row["result_tokens"])


@dataclass(slots=True)
class Completion:
    """One sampled answer. Every per-token list is as long as `tokens`."""

    tokens: list[int]  # the sampled ids, end-of-sequence included
    logps: list[float]
    """log π(tokens[t] | prompt, tokens[<t]) in nats under the policy that sampled, after dividing the logits by the
    temperature and before top-p, top-k and min-p filter anything. Not read where `mask` is 0."""
    text: str  # `tokens` decoded, without the end-of-sequence token
    stop: Stop
    log_kept: list[float] = field(default_factory=list)
    """log of the share of the policy's probability mass that top-p, top-k and min-p left at each token, so that
    logps − log_kept is the log-probability each token was really sampled with. Empty: 0 throughout."""
    log_held: list[float] = field(default_factory=list)
    """log of the share of the policy's mass that the grammar allowed at each token, part of `log_kept`. Empty: free."""
    mask: list[int] = field(default_factory=list)
    """1 where the policy produced the token and is trained on it, 0 where something else wrote it into the
    conversation, such as a tool's result. Empty: 1 throughout."""
    turns: list[Turn] = field(default_factory=list)
    """The completion as a conversation. Empty for a run without tools; `text` is the last turn's otherwise."""
    conversation: int = -1  # its number at the tool host; its environment lives until the next rollout; −1: no tools
    scores: dict[str, float | None] = field(default_factory=dict)  # of each function, None where it has no opinion
    reward: float | None = None
    advantage: float = 0.0
    columns: dict[str, Any] = field(default_factory=dict)
    """Values that reward functions get by name beside the row's columns: those of a program's `rollout_func`."""
    logged: dict[str, Any] = field(default_factory=dict)  # what reward functions logged of it (TRL's `log_extra`)
    teacher_prompt: list[int] = field(default_factory=list)
    """The ids before the completion that the teacher of self-distillation reads. Empty: it has no teacher."""
    teacher_context: dict[str, Any] = field(default_factory=dict)
    """What that prompt shows: `solution_of`, the index of a completion of the group, and `feedback`."""

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask) if self.mask else len(self.tokens)


@dataclass(slots=True)
class Group:
    """The G completions of one problem; advantages are relative to this group."""

    problem: Problem
    completions: list[Completion]
    images: Any = None  # the problem's pictures as the model reads them (`PromptImages`), while the step is computed
