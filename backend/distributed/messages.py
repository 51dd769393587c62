"""What travels between ranks: values as JSON and arrays, the rounds of sampling, and the files of reward functions."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime
from datetime import time as clock_time
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.engine.penalties import Penalties
from backend.rewards.catalogue import locate_reward_file, read_call
from backend.sampling.grammar import Grammar
from backend.sampling.row_costs import RowCosts
from backend.sampling.sampler import Sampling
from backend.trainer.machine import StepSize
from backend.training.batch import Batch
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError
from backend.utils.files import read_bytes
from backend.utils.text import quote

PREFIX = struct.Struct("<4sIQ")  # MAGIC, bytes of the header, bytes of the arrays
MAGIC = b"GRS3"
LONGEST_HEADER, LONGEST_ARRAYS = 256 << 20, 16 << 30  # bytes
SHORT = 8  # numbers of a list that is sent as JSON; a longer one is an array


class MessageError(Exception):
    """The other end sends what is no message, or nothing."""


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """The common part of all rounds of one step, or of one evaluation."""

    step: int
    epoch: float
    seed: int
    position: int  # the first problem's number in the run
    group_size: int
    scoring: list[dict[str, Any]]  # state of adaptive reward weights


@dataclass(slots=True)
class SampledRound:
    """Some of a step's problems, sampled and scored on one rank. `start`: place of the first."""

    rank: int
    start: int
    groups: list[Group]
    sampling_s: float = 0.0
    scoring_s: float = 0.0
    logged: dict[str, float] | None = None  # the metrics that reward functions logged

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
        *(Batch, Completion, Grammar, Group, Penalties, Problem, RowCosts, SampledRound, Sampling, SamplingOrder),
        *(ToolCall, ToolResult, Turn),
    )
} | {"StepSize": StepSize}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "bytes": base64.b64decode,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": clock_time.fromisoformat,
    "Decimal": Decimal,
}
"""Type → reader of its text."""
TYPE, VALUE = "\0type", "\0value"  # keys of a mapping that stands for a value that JSON lacks


def to_json(value: Any, arrays: list[np.ndarray]) -> Any:
    """`value` in the types of JSON; long lists of numbers and arrays go to `arrays`. Raises TypeError ("a set")."""
    kind = type(value).__name__
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: to_json(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        numbers = _numbers(value)
        if numbers is None:
            return [to_json(item, arrays) for item in value]
        arrays.append(numbers)
        return {TYPE: kind, VALUE: len(arrays) - 1}
    if isinstance(value, (np.ndarray, mx.array)):
        arrays.append(np.array(value))
        return {TYPE: kind, VALUE: len(arrays) - 1}
    if isinstance(value, tuple):
        return {TYPE: kind, VALUE: to_json([*value], arrays)}
    if isinstance(value, Config):
        return {TYPE: kind, VALUE: value.model_dump(mode="json")}
    if kind in _DATACLASSES:
        return {TYPE: kind, VALUE: {each.name: to_json(getattr(value, each.name), arrays) for each in fields(value)}}
    if isinstance(value, bytes):
        return {TYPE: kind, VALUE: base64.b64encode(value).decode()}
    if kind in _TEXTS:
        return {TYPE: kind, VALUE: str(value) if isinstance(value, Decimal) else value.isoformat()}
    raise TypeError(f"a {kind}")


def _numbers(values: list[Any]) -> np.ndarray | None:
    if len(values) <= SHORT or {*map(type, values)} not in ({int}, {float}):
        return None
    array = np.array(values)
    if array.dtype == np.int64:
        fits = (x for x in (np.uint8, np.int32) if np.iinfo(x).min <= array.min() and array.max() <= np.iinfo(x).max)
        return array.astype(next(fits, np.int64))
    if array.dtype != np.float64:  # of integers that no number of an array can hold
        return None
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    return single if np.array_equal(single, array, equal_nan=True) else array


def from_json(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Raises ValueError, TypeError, KeyError or IndexError."""
    if isinstance(value, list):
        return [from_json(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if TYPE not in value:
        return {key: from_json(item, arrays) for key, item in value.items()}
    kind, content = value[TYPE], value[VALUE]
    if kind == "list":
        return arrays[content].tolist()
    if kind in ("ndarray", "array"):
        return arrays[content] if kind == "ndarray" else mx.array(arrays[content])
    if kind == "Config":
        return Config.model_validate(content)
    if kind in _TEXTS:
        return _TEXTS[kind](content)
    items = from_json(content, arrays)
    return tuple(items) if kind == "tuple" else _DATACLASSES[kind](**items)


def encode(kind: str, body: Mapping[str, Any]) -> list[bytes | memoryview]:
    """The parts of a message. Raises TypeError or ValueError for what cannot be sent."""
    arrays: list[np.ndarray] = []
    plain = to_json(body, arrays)
    layout = [(array.dtype.name, array.shape) for array in arrays]
    values = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    text = json.dumps({"kind": kind, "body": plain, "arrays": layout}, ensure_ascii=False)
    header = text.encode(errors="surrogatepass")
    size = sum(value.nbytes for value in values)
    if len(header) > LONGEST_HEADER or size > LONGEST_ARRAYS:
        raise ValueError(f"a message of {len(header):,} and {size:,} bytes is too long")
    return [PREFIX.pack(MAGIC, len(header), size) + header, *values]


def decode(read: Callable[[int], bytearray]) -> tuple[str, dict[str, Any]]:
    """Kind and body of the next message. `read` takes memory only as bytes arrive. Raises MessageError."""
    magic, header_bytes, array_bytes = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC or header_bytes > LONGEST_HEADER or array_bytes > LONGEST_ARRAYS:
        raise MessageError("sent an invalid message")
    raw = read(header_bytes)
    try:
        header = json.loads(raw.decode(errors="surrogatepass"))
        layout = [(np.dtype(dtype), tuple(map(int, shape))) for dtype, shape in header["arrays"]]
        if any(dtype.kind not in "biuf" or min(shape, default=0) < 0 for dtype, shape in layout):
            raise ValueError("an array that cannot be")
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in layout]
        if sum(sizes) != array_bytes:
            raise ValueError("arrays of another length")
        values, offset, arrays = read(array_bytes), 0, list[np.ndarray]()
        for (dtype, shape), size in zip(layout, sizes, strict=True):
            arrays.append(np.ndarray(shape, dtype, values, offset) if size else np.empty(shape, dtype))
            offset += size
        return str(header["kind"]), from_json(dict(header["body"]), arrays)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise MessageError(f"sent an invalid message ({error})") from error


def check_sendable(values: Mapping[str, Any]) -> None:
    """Raise UserError for a dataset's row, or values that reward functions logged, that cannot be sent."""
    for column, value in values.items():
        try:
            encode("", {"value": value})
        except (TypeError, ValueError) as error:
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
