"""Messages between ranks: values as JSON, the rounds of sampling, and the files of reward functions."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime
from datetime import time as clock_time
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.engine.penalties import Penalties
from backend.rewards.catalogue import locate_reward_file, read_call
from backend.sampling.grammar import Grammar
from backend.sampling.row_costs import RowCosts
from backend.sampling.sampler import Sampling
from backend.trainer.machine import StepSize
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError
from backend.utils.files import read_bytes
from backend.utils.text import quote

PREFIX = struct.Struct("<4sQ")  # MAGIC, bytes of the JSON
MAGIC = b"GRS5"
LONGEST = 4 << 30  # bytes


class MessageError(Exception):
    """The other end sends what is no message, or nothing."""


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """What to sample of one step, or of one evaluation: all `problems`, or those of one round. `start`: place of the
    first; `position`: number in the run of the one at place 0."""

    problems: Sequence[Problem]
    step: int
    epoch: float
    seed: int
    position: int
    group_size: int
    scoring: list[dict[str, Any]]  # state of adaptive reward weights
    start: int = 0


@dataclass(slots=True)
class SampledRound:
    """A round, sampled and scored on one rank. `start`: place of the first problem."""

    rank: int
    start: int
    groups: list[Group]
    sampling_s: float = 0.0
    scoring_s: float = 0.0
    logged: dict[str, float] = field(default_factory=dict[str, float])  # the metrics that reward functions logged

    @property
    def completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    @property
    def tokens(self) -> int:
        return sum(completion.trained_tokens for group in self.groups for completion in group.completions)

    @property
    def seconds(self) -> float:
        return self.sampling_s + self.scoring_s


_DATACLASSES: dict[str, Callable[..., Any]] = {
    cls.__name__: cls
    for cls in (
        *(Completion, Grammar, Group, Penalties, Problem, RowCosts, SampledRound, Sampling, SamplingOrder),
        *(StepSize, ToolCall, ToolResult, Turn),
    )
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "Config": Config.model_validate,
    "tuple": tuple,
    "bytes": base64.b64decode,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": clock_time.fromisoformat,
    "Decimal": Decimal,
}
TYPE, VALUE = "\0type", "\0value"  # keys of a mapping that stands for a value that JSON lacks


def to_json(value: Any) -> Any:
    """`value` in the types of JSON. Raises TypeError ("a set")."""
    kind = type(value).__name__
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        content = to_json([*value])
    elif isinstance(value, Config):
        content = value.model_dump(mode="json")
    elif kind in _DATACLASSES:
        content = {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    elif isinstance(value, bytes):
        content = base64.b64encode(value).decode()
    elif kind in _READERS:
        content = str(value) if isinstance(value, Decimal) else value.isoformat()
    else:
        raise TypeError(f"a {kind}")
    return {TYPE: kind, VALUE: content}


def _from_json(value: dict[str, Any]) -> Any:
    if TYPE not in value:
        return value
    kind, content = value[TYPE], value[VALUE]
    return _READERS[kind](content) if kind in _READERS else _DATACLASSES[kind](**content)


def encode(kind: str, body: Mapping[str, Any]) -> bytes:
    """Raises TypeError or ValueError for what cannot be sent."""
    text = json.dumps({"kind": kind, "body": to_json(body)}, ensure_ascii=False).encode(errors="surrogatepass")
    if len(text) > LONGEST:
        raise ValueError(f"a message of {len(text):,} bytes is too long")
    return PREFIX.pack(MAGIC, len(text)) + text


def decode(read: Callable[[int], bytearray]) -> tuple[str, dict[str, Any]]:
    """Kind and body of the next message. `read` takes memory only as bytes arrive. Raises MessageError."""
    magic, size = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC or size > LONGEST:
        raise MessageError("sent an invalid message")
    text = read(size)
    try:
        message = json.loads(text.decode(errors="surrogatepass"), object_hook=_from_json)
        return str(message["kind"]), dict(message["body"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MessageError(f"sent an invalid message ({error})") from error


def check_sendable(values: Mapping[str, Any]) -> None:
    """Raise UserError for a dataset's row, or values that reward functions logged, that cannot be sent."""
    for column, value in values.items():
        try:
            to_json(value)
        except TypeError as error:
            holds = f"The column {quote(column, 40)} holds {error}"
            raise UserError("data", f"{holds}, which cannot be sent to other machines.") from None


def reward_code(config: Config) -> dict[str, tuple[str, str]]:
    """Files of reward functions, tools and environments: name in the settings → (path, text). Raises UserError."""
    entries = [*config.reward_functions]
    for stage in config.stages:
        entries += stage.get("reward_functions") or []
    environments = config.environment.values() if isinstance(config.environment, dict) else [config.environment]
    entries += filter(None, environments)
    names = {read_call(entry).file for entry in entries} | {config.reward_functions_file, config.tools_file}
    files = {name: locate_reward_file(name).resolve() for name in names if name}
    return {
        name: (str(path), read_bytes(path, "reward_functions_file").decode(errors="surrogateescape"))
        for name, path in files.items()
    }


def write_reward_code(code: dict[str, tuple[str, str]], folder: Path) -> dict[str, Path]:
    """Write each file to a separate folder. → path by its name in the settings."""
    written: dict[str, Path] = {}
    for name, (path, text) in code.items():
        file = folder / sha256(path.encode(errors="surrogateescape")).hexdigest()[:16] / Path(path).name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        written[name] = file
    return written


def with_reward_files(config: Config, files: dict[str, Path]) -> Config:
    """The settings with other paths for the files that they name."""

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        name, colons, rest = value.partition("::") if isinstance(value, str) else (str(value), "", "")
        return f"{files[name.strip()]}{colons}{rest}" if name.strip() in files else value

    keys = ("reward_functions", "stages", "environment", "reward_functions_file", "tools_file")
    return config.model_copy(update={key: moved(getattr(config, key)) for key in keys})
