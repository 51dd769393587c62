"""Rows of a dataset → Problems: reading files or the Hub, mapping columns, rendering the chat template, shuffling.

A prompt is never cut: rows whose prompt leaves no room for the completion are left out, and counted.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from backend.spec.config import Config
from backend.spec.faults import Fault, Mistake
from backend.spec.model_and_data_names import DATA_SUFFIXES as SUFFIXES
from backend.spec.model_and_data_names import check_data
from backend.spec.rewards.catalog import COMPARING_REWARDS, metric_name
from backend.types import Problem

Row = dict[str, Any]
SPLIT_NAMES = {"valid": ("valid", "validation", "val", "dev"), "test": ("test",), "train": ("train",)}


@dataclass(slots=True)
class Splits:
    """Raw rows by split; `source[split]` names the file or Hub split they came from."""

    train: list[Row]
    valid: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_splits(config: Config) -> Splits:
    """Rows of all splits of `config.data`: a file (all of it is train), a folder, or a Hub id. Raises Mistake."""
    path = Path(config.data).expanduser()
    if path.is_file():
        splits = Splits(_read_file(path), source={"train": str(path)})
    elif path.is_dir():
        splits = _read_folder(path, config)
    else:
        splits = _read_hub(config)
    if not splits.train:
        raise Mistake("data", f"The dataset {config.data} has no rows to train on.")
    return _hold_out(splits, config)


def _read_folder(folder: Path, config: Config) -> Splits:
    files = {split: _split_file(folder, names) for split, names in _wanted(config).items()}
    if files["train"] is None:
        wanted = ", ".join(config.train_split + suffix for suffix in SUFFIXES)
        raise Mistake("data", f"The folder {folder} has none of {wanted}.")
    _refuse_missing(files, config, f"The folder {folder} has no file of that name.")
    rows = {split: _read_file(file) if file else [] for split, file in files.items()}
    return Splits(**rows, source={split: str(file) for split, file in files.items() if file})


def _wanted(config: Config) -> dict[str, tuple[str, ...]]:
    """Split → names it may have; a name the person gave comes first, and ours follow only if it is the default."""
    given = {"train": config.train_split, "valid": config.valid_split, "test": config.test_split}
    return {split: SPLIT_NAMES[split] if name == split else (name,) for split, name in given.items()}


def _refuse_missing(found: Mapping[str, Any], config: Config, why: str) -> None:
    """A split that the person named must be there; one that we only look for by habit may be absent."""
    for key in ("valid_split", "test_split"):
        split, name = key.removesuffix("_split"), getattr(config, key)
        if name != split and found[split] is None:
            raise Mistake(key, f"There is no split {name}. {why}")


def _split_file(folder: Path, names: Sequence[str]) -> Path | None:
    for name in names:
        for suffix in SUFFIXES:
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    return None


def _read_file(path: Path) -> list[Row]:
    """Rows of one file by its ending. Raises Mistake naming file and line."""
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet,
    }  # fmt: skip
    check_data(str(path))  # an ending that is not ours is refused there
    reader = readers[path.suffix.lower()]
    try:
        return reader(path)
    except UnicodeDecodeError:
        raise Mistake("data", f"{path} is not UTF-8 text.") from None
    except OSError as error:
        raise Mistake("data", f"{path} cannot be read: {error.strerror or error}.") from None


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_json_object(line, f"line {number} of {path}"))
    return rows


def _json_object(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Mistake("data", f"The JSON in {where} is broken: {error.msg}.") from None
    if not isinstance(value, dict):
        raise Mistake("data", f"The JSON in {where} must be an object with columns.")
    return value


def _read_json(path: Path) -> list[Row]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise Mistake("data", f"The JSON in {path} is broken at line {error.lineno}: {error.msg}.") from None
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise Mistake("data", f"{path} must hold a list of objects.")
    return value


def _read_csv(path: Path) -> list[Row]:
    csv.field_size_limit(sys.maxsize)  # a prompt of any length may come; one that is too long is left out later
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise csv.Error("it has more fields than the header has columns")
                rows.append(dict(row))
        except csv.Error as error:
            raise Mistake("data", f"The CSV in line {reader.reader.line_num} of {path} is broken: {error}.") from None
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise Mistake("data", f"{path} cannot be read as parquet: {_first_line(error)}") from None


def _read_hub(config: Config) -> Splits:
    """A dataset on Hugging Face through `datasets`; what cannot be reached or does not exist becomes a sentence."""
    check_data(config.data)
    from backend.data import hub_rows as hub_rows

    try:
        found = hub_rows.load(config.data, config.dataset_config or None)
    except Mistake:
        raise
    except Exception as error:
        raise Mistake("data", f"There is no file or folder {config.data}, and Hugging Face's dataset of that name "
                      f"cannot be loaded: {_first_line(error)}") from error  # fmt: skip
    there = ", ".join(map(str, found))
    names = {split: next((name for name in names if name in found), None) for split, names in _wanted(config).items()}
    if names["train"] is None:
        raise Mistake("train_split", f"{config.data} has no split {config.train_split}; it has {there}.")
    _refuse_missing(names, config, f"{config.data} has {there}.")
    rows = {split: [dict(row) for row in found[name]] if name else [] for split, name in names.items()}
    return Splits(**rows, source={split: f"{config.data}, {name}" for split, name in names.items() if name})


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if text.endswith(".") else f"{text}."


def _hold_out(splits: Splits, config: Config) -> Splits:
    """Take a seeded share of the training rows for evaluation when there is no valid split and one is asked for."""
    if splits.valid or not config.validation_split:
        return splits
    count = max(1, round(len(splits.train) * config.validation_split))
    if count >= len(splits.train):
        raise Mistake("validation_split", f"Holding out {count} of {len(splits.train)} rows leaves none to train on.")
    order = random.Random(f"hold-out {config.seed}").sample(range(len(splits.train)), len(splits.train))
    held, kept = sorted(order[:count]), sorted(order[count:])
    rows = splits.train
    splits.valid, splits.train = [rows[i] for i in held], [rows[i] for i in kept]
    return splits


# ── columns and template ─────────────────────────────────────────────────────────────────────────────────────────────


def check_columns(rows: Sequence[Row], config: Config, source: str) -> list[Fault]:
    """What is wrong with the columns of `rows` (at least one row); the sentences name the columns there are."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    there = f"{source} has the columns {', '.join(columns)}"
    faults: list[Fault] = []
    if config.prompt_feature not in columns:
        faults.append(Fault("prompt_feature", f"There is no column {config.prompt_feature}; {there}."))
    if config.answer_feature not in columns and _needs_answer(config):
        faults.append(Fault("answer_feature", f"There is no column {config.answer_feature}; {there}."))
    for key, default in (("type_feature", "type"), ("system_feature", "system")):
        name = getattr(config, key)
        if name not in (default, "") and name not in columns:
            faults.append(Fault(key, f"There is no column {name}; {there}."))
    return faults


def _needs_answer(config: Config) -> bool:
    return config.answer_feature != "answer" or any(
        metric_name(name) in COMPARING_REWARDS for name in config.reward_functions
    )


@dataclass(slots=True)
class Prepared:
    """The problems of one split, and how many rows were left out because the prompt is too long."""

    problems: list[Problem]
    too_long: int = 0
    longest: int = 0
    """Tokens of the longest prompt that was left out."""


def prepare(rows: Sequence[Row], tokenizer: Any, config: Config, source: str) -> Prepared:
    """Rows → Problems, rendered and tokenised one after the other; a run, which waits for none that it does not draw,
    has `backend.data.prompts` instead. Raises Mistake naming the column or the row."""
    if rows and (faults := check_columns(rows, config, source)):
        raise Mistake(faults)
    room = config.max_seq_length - config.max_completion_length
    prepared = Prepared([])
    for index, (row, where) in enumerate(_placed(rows, source)):
        messages = messages_of(row, config, where)
        problem = problem_of(index, row, messages, rendered(messages, tokenizer, config, where), config)
        if len(problem.tokens) <= room:
            prepared.problems.append(problem)
        else:
            prepared.too_long += 1
            prepared.longest = max(prepared.longest, len(problem.tokens))
    return prepared


def check_prompts(rows: Sequence[Row], tokenizer: Any, config: Config, source: str) -> None:
    """What `prepare` would refuse, without the work: every row's chat is looked at, and prompts are tokenised only until
    one fits. Raises Mistake naming the row, or `max_seq_length` when no prompt leaves room for the completion."""
    chats = [(messages_of(row, config, where), where) for row, where in _placed(rows, source)]
    room = config.max_seq_length - config.max_completion_length
    if not any(len(rendered(chat, tokenizer, config, where)) <= room for chat, where in chats):
        raise Mistake("max_seq_length", "Every prompt is longer than what Max Seq leaves beside the completion.")


def _placed(rows: Sequence[Row], source: str) -> Iterator[tuple[Row, str]]:
    """Each row with its place as a person would name it."""
    return ((row, f"row {index + 1} of {source}") for index, row in enumerate(rows))


def problem_of(index: int, row: Row, messages: list[dict[str, Any]], tokens: list[int], config: Config) -> Problem:
    """A row as a problem, once its chat is built and tokenised."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return Problem(
        index=index,
        prompt=said[-1] if said else messages[-1]["content"],
        messages=messages,
        tokens=tokens,
        answer=_text(row.get(config.answer_feature)),
        type=_text(row[config.type_feature]) if row.get(config.type_feature) is not None else None,
        row=row,
    )


def messages_of(row: Row, config: Config, where: str) -> list[dict[str, Any]]:
    """The chat of one row: its prompt (text or messages), after its system message or the common one."""
    prompt = row.get(config.prompt_feature)
    if isinstance(prompt, str) and prompt.strip():
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt and all(_is_message(one) for one in prompt):
        messages = [{"role": one["role"], "content": one["content"]} for one in prompt]
    else:
        raise Mistake("prompt_feature", f"The column {config.prompt_feature} of {where} must hold text or a list of "
                      f"messages with role and content, and may not be empty.")  # fmt: skip
    system = _text(row.get(config.system_feature)) or config.system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def rendered(messages: list[dict[str, Any]], tokenizer: Any, config: Config, where: str) -> list[int]:
    """Token ids of a row's chat. Raises Mistake for a chat that the template or the tokenizer refuses."""
    whole_characters(messages, where)
    try:
        return render(messages, tokenizer, config.chat_template_kwargs)
    except TemplateError as error:  # some templates raise in words of their own: no system message, wrong turns
        raise Mistake("prompt_feature", f"The model's chat template refuses {where}: {_first_line(error)}") from None


def whole_characters(messages: list[dict[str, Any]], where: str) -> None:
    """Raises Mistake for a text that no tokenizer takes."""
    try:
        for message in messages:
            (message["role"] + message["content"]).encode()
    except UnicodeEncodeError:
        raise Mistake("prompt_feature", f"The text of {where} is broken: it holds half a character.") from None


def render(messages: list[dict[str, Any]], tokenizer: Any, template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids of a chat, up to where the assistant begins. A tokenizer without a chat template gets plain text."""
    if getattr(tokenizer, "has_chat_template", False) or getattr(tokenizer, "chat_template", None):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template_kwargs))
    return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PromptStream:
    """Rows in a seeded order, reshuffled each epoch; `cursor` counts the ones gone through and is all there is to save.

    A row whose prompt leaves no room (None) is passed over, so the order does not depend on which rows those are, and
    nothing needs to be known of a row before its turn. At least one row must be a problem.
    """

    def __init__(self, problems: Sequence[Problem | None], seed: int, cursor: int = 0) -> None:
        self.problems = problems
        self.seed = seed
        self.cursor = cursor
        self._epoch, self._order = -1, []

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far."""
        return self.cursor / len(self.problems)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems; every problem comes once an epoch."""
        taken: list[Problem] = []
        while len(taken) < count:
            if (problem := self._next()) is not None:
                taken.append(problem)
        return taken

    def _next(self) -> Problem | None:
        epoch, place = divmod(self.cursor, len(self.problems))
        if epoch != self._epoch:
            count = len(self.problems)
            self._epoch, self._order = epoch, random.Random(f"{self.seed} {epoch}").sample(range(count), count)
        self.cursor += 1
        return self.problems[self._order[place]]


def batches(problems: Sequence[Problem], size: int, count: int) -> Iterator[list[Problem]]:
    """The first `count` batches of `size` problems in file order (−1: all of them)."""
    stop = len(problems) if count < 0 else min(len(problems), size * count)
    for start in range(0, stop, size):
        yield list(problems[start : min(start + size, stop)])
