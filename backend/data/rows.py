"""Rows of a run's dataset splits and evaluation sets, and the steps applied to them."""

import random
import re
import string
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from backend.config.model_and_data_names import DATA_SUFFIXES, check_data
from backend.config.row_settings import evaluation_sets, template_columns
from backend.config.setting import ColumnSettings, DatasetSettings
from backend.data.files import HEAD_ROWS, PATH, LazyRows, Row, Rows, read_file, read_head, stream_file
from backend.data.images import with_paths
from backend.rewards.catalogue import CODE_TESTS, COMPARING_REWARDS, metric_name, without_tests
from backend.runs.start_progress import telling
from backend.types import IMAGES
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_file, is_folder, user_path
from backend.utils.text import quote, reason_of

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"valid": ("valid", "validation", "val", "dev"), "test": ("test",), "train": ("train",)}
NAMES_ELSEWHERE = {  # split → names to try in another dataset, most likely first
    "valid": (*SPLIT_NAMES["valid"], *SPLIT_NAMES["test"], *SPLIT_NAMES["train"]),
    "test": (*SPLIT_NAMES["test"], *SPLIT_NAMES["valid"], *SPLIT_NAMES["train"]),
}
WHOLE = "rows"  # the split of a dataset with one wanted split
INDEX = "I"  # four bytes per row number
MATCH_S = 1.0  # seconds that the answer pattern may take per answer
CHUNK = 256  # rows per call of the map function
MOST_SHUFFLED = 1_000_000  # maximum rows that Python shuffles
HEAD_OF_HUB = 200_000  # rows of a Hub split in a preview
_CONFIGURATIONS = re.compile(r"available(?: configs)?: \[(.+)\]", re.IGNORECASE)  # in a message of `datasets`

Where = Callable[[int], str]  # names the i-th row in messages
MapRows = Callable[[str, Sequence[Row], Where], Sequence[Row | None]]
"""(map function, rows, row names) → mapped rows, None to drop one. Raises UserError."""


@lru_cache(16)
def shown_source(source: str) -> str:
    """Short name of a split's source for messages."""
    return quote(Path(source), 50)


def row_name(index: int, source: str) -> str:
    """A row's name in messages, such as "row 3 of train.jsonl", from 1."""
    return f"row {index + 1} of {shown_source(source)}"


def column_names(rows: Rows) -> list[str]:
    """Every column of the rows, in order of appearance."""
    return rows.columns if isinstance(rows, LazyRows) else list(dict.fromkeys(name for row in rows for name in row))


def missing_columns(rows: Rows, names: Iterable[str]) -> list[str]:
    """Names that no row has as a column; reads rows until all are found."""
    missing, known = list(names), rows.known_columns if isinstance(rows, LazyRows) else None
    for row in rows if known is None else (known,):
        missing = [name for name in missing if name not in row]
        if not missing:
            break
    return missing


@dataclass(frozen=True, slots=True)
class RowSteps:
    """Map function, prompt template and answer pattern of one dataset. False if there are none."""

    config: DatasetSettings
    map_rows: MapRows | None  # calls map functions; None skips them

    @property
    def map_function(self) -> str:
        return self.config.map_function if self.map_rows is not None else ""

    def __bool__(self) -> bool:
        return bool(self.map_function or self.config.prompt_template or self.config.answer_pattern)

    def apply(self, rows: Sequence[Row], source: str, first: int) -> list[Row | None]:
        """`rows`, from row `first` of `source` on, after the steps; None for dropped ones. Raises UserError."""
        config, mapped = self.config, rows

        def where(index: int) -> str:
            return row_name(first + index, source)

        if self.map_rows is not None and config.map_function:
            rows = [with_paths(row, source, where(index)) for index, row in enumerate(rows)]
            mapped = self.map_rows(config.map_function, rows, where)
        made: list[Row | None] = []
        for index, row in enumerate(mapped):
            if row is None or not (config.prompt_template or config.answer_pattern):
                made.append(row)
                continue
            # The template sees the row as it was: a pattern that cuts the answer must not change the prompt.
            changed, answer = dict(row), row.get(config.answer_feature)
            if config.prompt_template:
                changed[config.prompt_feature] = fill_template(config.prompt_template, row, partial(where, index))
            if config.answer_pattern:
                answer = find_answer(config.answer_pattern, answer, partial(where, index))
                changed[config.answer_feature] = answer
            made.append(None if config.answer_pattern and answer is None else changed)
        return made


def fill_template(template: str, row: Row, where: Callable[[], str]) -> str:
    """Fill a row's cells into the template. Raises UserError for a missing or non-scalar cell."""
    cells: dict[str, str] = {}
    for column in template_columns(template):
        named = f"The prompt template names {quote(column, 24)}, which"
        if column not in row:
            there = quote(", ".join(row), 50)
            raise UserError("prompt_template", f"{named} {where()} does not have; it has {there}.")
        cell = row[column]
        if isinstance(cell, (list, dict, bytes)):
            raise UserError("prompt_template", f"{named} is neither text nor a number in {where()}.")
        cells[column] = "" if cell is None else str(cell)
    parts = string.Formatter().parse(template)
    return "".join(text + (cells[column] if column is not None else "") for text, column, _, _ in parts)


def find_answer(pattern: str, answer: Any, where: Callable[[], str]) -> str | None:
    """Stripped match of the pattern's group in an answer, or None. Raises UserError."""
    import regex

    if answer is None:
        return None
    try:
        found = regex.search(pattern, str(answer), timeout=MATCH_S)
    except TimeoutError:
        slow = f"The answer pattern takes more than {MATCH_S:g} s on the answer of {where()}"
        raise UserError("answer_pattern", f"{slow}; write a simpler one.") from None
    except regex.error as error:  # Python's own re accepts it, see `backend.config.row_settings`
        sentence = f"The answer pattern is not a regular expression: {quote(error, 80)}."
        raise UserError("answer_pattern", sentence) from None
    return None if found is None or found[1] is None else found[1].strip()


def applied(rows: Rows, steps: RowSteps, source: str) -> Iterator[tuple[int, Row | None]]:
    """(number, row after the steps) in order, with progress. Raises UserError."""

    def made() -> Iterator[tuple[int, Row | None]]:
        rest, first = iter(rows), 0
        while chunk := list(islice(rest, CHUNK)):
            yield from enumerate(steps.apply(chunk, source, first), first)
            first += len(chunk)

    # Rows count when the steps are done with them: a map function may take long for a chunk.
    return telling(made(), "Preparing the rows of", source, lambda done: done / len(rows))


class PickedRows(LazyRows):
    def __init__(self, rows: LazyRows, numbers: Iterable[int]) -> None:
        super().__init__(rows.known_columns)
        self._rows, self._numbers = rows, array(INDEX, numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, index: int) -> Row:
        return self._rows[self._numbers[index]]


class SteppedRows(LazyRows):
    def __init__(self, rows: Rows, steps: RowSteps, source: str) -> None:
        """Passes over `source` once. Raises UserError naming the first refused row."""
        self._rows, self._steps, self._source = rows, steps, source
        self._numbers = array(INDEX)
        columns: dict[str, None] = {}
        for number, row in applied(rows, steps, source):
            if row is not None:
                self._numbers.append(number)
                columns |= dict.fromkeys(row)
        super().__init__(columns)

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, index: int) -> Row:
        number = self._numbers[index]
        (row,) = self._steps.apply([self._rows[number]], self._source, number)
        if row is None:
            changed = f"The map function kept {row_name(number, self._source)} at first and left it out now"
            raise UserError("map_function", f"{changed}; it must not depend on chance.")
        return row


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of a split or an evaluation set, and their file or Hub split. `about`: estimated total if only the first
    were read. `settings`: those in which an evaluation set differs."""

    rows: Rows
    source: str
    about: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading mode: in memory, `streamed` from disk, or only the `head` of large files."""

    streamed: bool = False
    head: bool = False

    def file(self, path: Path) -> Found:
        """Rows of a file. Raises UserError."""
        if self.head and (part := read_head(path)) is not None:
            return Found(part[0], str(path), part[1])
        rows = stream_file(path) if self.streamed else read_file(path)
        if path.suffix.lower() == ".parquet" and not self.streamed:  # the bytes of images would fill the memory
            rows = [with_paths(row, str(path), row_name(index, str(path))) for index, row in enumerate(rows)]
        return Found(rows, str(path))

    def split(self, dataset: Any, source: str) -> Found:
        """Rows of a split of `datasets`, memory-mapped if streamed or with images. Raises any error."""
        streamed = self.streamed or not set(IMAGES).isdisjoint(dataset.column_names)
        if self.head and (streamed or len(dataset) > HEAD_OF_HUB):
            return Found([dict(row) for row in islice(dataset, HEAD_ROWS)], source, len(dataset))
        return Found(HubRows(dataset) if streamed else [dict(row) for row in dataset], source)


class HubRows(LazyRows):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset.column_names)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        """Raises UserError for a row that `datasets` cannot read."""
        try:
            return dict(self._dataset[index])
        except Exception as error:  # `datasets` raises anything at all
            raise UserError("data", f"Row {index + 1:,} of the dataset cannot be read: {reason_of(error)}.") from error


def find_splits(
    name: str, config_name: str, setting: str, names: Mapping[str, Sequence[str]], reading: Reading
) -> tuple[dict[str, Found], str | None]:
    """(splits that a dataset has, those of the Hub as text; "" for a folder, None for a file, which has only the first
    of `names`). `names`: split → possible names, most likely first. Raises UserError on `setting`."""
    check_data(name, setting)
    path = user_path(name, setting)
    if is_file(path):
        return {next(iter(names)): reading.file(path)}, None
    if is_folder(path):

        def in_folder(each: str) -> Path | None:
            paths = (user_path(each + suffix, "data", path) for suffix in DATA_SUFFIXES)
            found = [file for file in paths if is_file(file)]
            if len(found) > 1:
                both = " and ".join(quote(file.name, 30) for file in found[:2])
                raise UserError(setting, f"The folder {quote(path, PATH)} has {both}; leave one of them there.")
            return found[0] if found else None

        files = {split: next(filter(None, map(in_folder, usual)), None) for split, usual in names.items()}
        return {split: reading.file(file) for split, file in files.items() if file}, ""
    from datasets.exceptions import DatasetGenerationError
    from datasets.table import CastError

    from backend.data import hub_rows

    try:
        dataset = hub_rows.load(name, config_name or None, setting)
        available = {str(split): split for split in dataset}
        chosen = {split: next((each for each in usual if each in available), None) for split, usual in names.items()}
        found = {
            split: reading.split(dataset[available[each]], f"{name}, {each}") for split, each in chosen.items() if each
        }
        return found, quote(", ".join(available), 60)
    except UserError:
        raise
    except Exception as error:  # `datasets` raises anything at all for rows that it cannot read
        if configurations := _CONFIGURATIONS.search(str(error)):
            listed = quote(configurations[1].replace("'", ""), 90)
            where = "dataset_config" if setting == "data" else setting
            raise UserError(
                where, f"The dataset {quote(name, 50)} needs one of its configurations: {listed}."
            ) from error
        if isinstance(error, DatasetGenerationError):
            error = error.__cause__ or error  # which names the row
        why = f"its files differ in columns: {error.details()}" if isinstance(error, CastError) else reason_of(error)
        sentence = f"The dataset {quote(name, 50)} of Hugging Face cannot be loaded: {quote(why, 90)}."
        raise UserError(setting, sentence) from error


@dataclass(slots=True)
class Splits:
    """Rows by split; `source[split]` names their file or Hub split."""

    train: Rows
    valid: Rows = field(default_factory=list)
    test: Rows = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    evals: dict[str, Found] = field(default_factory=dict)  # the sets of `eval_data` by name
    notes: list[str] = field(default_factory=list)  # messages about dropped rows
    about: dict[str, int] = field(default_factory=dict)  # split → estimated rows, if only the first were read
    computed: dict[Any, Any] = field(default_factory=dict)  # cache of the Dataset page

    def rows(self, split: str) -> Rows:
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]

    def source_of(self, split: str) -> str:
        """`source` of a split; of train for rows held out of it."""
        return self.source.get(split) or self.source["train"]


def read_splits(config: DatasetSettings, map_rows: MapRows | None = None, *, head: bool = False) -> Splits:
    """Rows of all splits of `config.data` (file, folder or Hub id) and of the evaluation sets. `map_rows` calls the map
    function; None skips it. `head` reads only the start of large files. Raises UserError."""
    reading, steps, splits = Reading(config.streaming, head), RowSteps(config, map_rows), Splits([])
    found = own_splits(config, reading)
    found |= {split: other.find(reading) for split, other in splits_elsewhere(config).items()}
    for split, each in found.items():
        setattr(splits, split, stepped(each, steps, split, splits.notes))
        splits.source[split] = each.source
        if each.about is not None:
            splits.about[split] = each.about
    if not splits.train:
        raise UserError("data", f"The dataset {shown_source(config.data)} has no rows to train on.")
    for name, about in evaluation_sets(config.eval_data).items():
        own, each = config.model_copy(update=about), evaluation_set(about).find(reading)
        rows = stepped(each, RowSteps(own, map_rows), name, splits.notes)
        splits.evals[name] = Found(rows, each.source, settings=about)
    return hold_out(splits, config)


def own_splits(config: DatasetSettings, reading: Reading) -> dict[str, Found]:
    """A run's own splits; without data, an environment's empty rows. Raises UserError without train or named split."""
    if not config.data.strip() and isinstance(config.environment, str):
        return {"train": Found([{} for _ in range(config.prompts_per_step)], config.environment)}

    names = names_by_split(config)
    found, existing = find_splits(config.data, config.dataset_config, "data", names, reading)
    if existing is None:
        return found
    name = quote(config.data, 50) if existing else f"The folder {quote(user_path(config.data, 'data'), PATH)}"
    if "train" not in found and existing:
        raise UserError("train_split", f"{name} has no split {quote(config.train_split, 40)}; it has {existing}.")
    if "train" not in found:
        expected = ", ".join(quote(config.train_split, 20) + suffix for suffix in DATA_SUFFIXES)
        raise UserError("data", f"{name} has none of {expected}.")
    for key in ("valid_split", "test_split"):
        split, named = key.removesuffix("_split"), getattr(config, key)
        if split in names and named != split and split not in found:
            has = f"{name} has {existing or 'no file of that name'}."
            raise UserError(key, f"There is no split {quote(named, 40)}. {has}")
    return found


def names_by_split(config: DatasetSettings) -> dict[str, tuple[str, ...]]:
    """Split → its possible names in the run's own dataset: the configured one, or all usual names for the default."""
    configured = {"train": config.train_split, "valid": config.valid_split, "test": config.test_split}
    return {
        split: SPLIT_NAMES[split] if name == split else (name,)
        for split, name in configured.items()
        if split not in splits_elsewhere(config)
    }


@dataclass(frozen=True, slots=True)
class OtherDataset:
    """A dataset for one split or evaluation set. `names`: split names to try, most likely first."""

    name: str
    config_name: str
    setting: str
    names: tuple[str, ...]

    def find(self, reading: Reading) -> Found:
        """Its stored rows. Raises UserError if they are missing or none."""
        found, _ = find_splits(self.name, self.config_name, self.setting, {WHOLE: self.names}, reading)
        if WHOLE not in found:
            lacks = f"has none of the splits {quote(', '.join(self.names), 60)}"
            raise UserError(self.setting, f"{shown_source(self.name)} {lacks}.")
        if not found[WHOLE].rows:
            raise UserError(self.setting, f"The dataset {shown_source(self.name)} has no rows.")
        return found[WHOLE]


def splits_elsewhere(config: DatasetSettings) -> dict[str, OtherDataset]:
    """Split → the other dataset that replaces it."""
    others: dict[str, OtherDataset] = {}
    for split, usual in NAMES_ELSEWHERE.items():
        name, own = getattr(config, f"{split}_data"), getattr(config, f"{split}_split")
        # Another dataset has the configuration only where it is the same one.
        of_same = config.dataset_config if name == config.data else ""
        if name:
            others[split] = OtherDataset(name, of_same, f"{split}_data", usual if own in ("", split) else (own,))
    return others


def evaluation_set(about: Mapping[str, Any]) -> OtherDataset:
    wanted = about.get("valid_split") or about.get("test_split") or about.get("train_split")
    names = (wanted,) if wanted else NAMES_ELSEWHERE["test"]
    return OtherDataset(about["data"], about.get("dataset_config", ""), "eval_data", names)


def stepped(found: Found, steps: RowSteps, split: str, notes: list[str]) -> Rows:
    """Apply the steps and note how many rows they drop. Raises UserError if none remain."""
    if not steps or not found.rows:
        return found.rows
    if isinstance(found.rows, LazyRows):
        rows: Rows = SteppedRows(found.rows, steps, found.source)
    else:
        rows = [row for _, row in applied(found.rows, steps, found.source) if row is not None]
    map_function, has_pattern = steps.map_function, bool(steps.config.answer_pattern)
    reasons = [f"the map function {quote(map_function, 40)} returned None for them"] if map_function else []
    reasons += ["the answer pattern matches nothing in their answers"] if has_pattern else []
    why = ", or ".join(reasons)
    if not rows:
        setting = "answer_pattern" if has_pattern else "map_function"
        raise UserError(setting, f"No row of {shown_source(found.source)} is left: {why}.")
    if left_out := len(found.rows) - len(rows):
        notes.append(f"{left_out:,} of {len(found.rows):,} rows of {split} are left out: {why}.")
    return rows


def hold_out(splits: Splits, config: DatasetSettings) -> Splits:
    """Move a seeded share of train to valid if there is no valid split and `validation_split` is set."""
    if splits.valid or not config.validation_split:
        return splits
    rows = splits.train
    count = max(1, round(len(rows) * config.validation_split))
    if count >= len(rows):
        raise UserError("validation_split", f"Holding out {count} of {len(rows)} rows leaves none to train on.")
    held_out = _drawn(len(rows), count, f"hold-out {data_seed(config)}")
    is_held_out = set(held_out)
    kept = (i for i in range(len(rows)) if i not in is_held_out)
    if isinstance(rows, LazyRows):
        splits.valid, splits.train = PickedRows(rows, held_out), PickedRows(rows, kept)
    else:
        splits.valid, splits.train = [rows[i] for i in held_out], [rows[i] for i in kept]
    return splits


def _drawn(size: int, count: int, seed: str) -> list[int]:
    """`count` distinct sorted numbers below `size`, determined by the seed."""
    if size <= MOST_SHUFFLED:
        return sorted(random.Random(seed).sample(range(size), size)[:count])
    import numpy as np

    generator = np.random.default_rng(list(seed.encode()))
    return np.sort(generator.choice(size, count, replace=False, shuffle=False)).tolist()


def data_seed(config: DatasetSettings) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def compares_answers(config: ColumnSettings) -> bool:
    """True if a built-in reward function compares with the dataset's answers."""
    return any(metric_name(name) in COMPARING_REWARDS for name in config.reward_functions)


def check_columns(rows: Rows, config: ColumnSettings, source: str) -> list[ConfigProblem]:
    """Problems with the columns of `rows` (at least one row)."""
    wanted = ["answer_feature"] if compares_answers(config) or config.answer_feature != "answer" else []
    is_chat = False
    if config.reads_labels:
        absent = missing_columns(rows, [config.completion_feature, config.messages_feature])
        if len(absent) == 2:
            neither = f"There is no column {quote(absent[0], 24)}, and no {quote(absent[1], 24)}, to learn answers from"
            return [ConfigProblem("completion_feature", f"{neither}; {_existing(rows, source)}.")]
        is_chat = config.learns_labels and config.completion_feature in absent
    if not is_chat and not config.environment:  # whose `reset` may write the whole prompt
        wanted.insert(0, "prompt_feature")
    if isinstance(config.environment, dict) and config.environment:
        wanted.append("environment_column")
    optional = {"type_feature": "type", "system_feature": "system"}
    wanted += [key for key, default in optional.items() if getattr(config, key) not in (default, "")]
    missing = missing_columns(rows, [getattr(config, key) for key in wanted])
    # All names of columns may take reading all rows, so only where code is tested or a column is missing.
    runs_tests = any(CODE_TESTS in name for name in config.reward_functions)
    tests = without_tests(config.reward_functions, [*column_names(rows), "answer"]) if runs_tests else []
    if not missing and not tests:
        return []
    existing = _existing(rows, source)
    faults = [
        ConfigProblem(key, f"There is no column {quote(getattr(config, key), 24)}; {existing}.")
        for key in wanted
        if getattr(config, key) in missing
    ]
    for name in tests:
        sentence = f"code_tests finds no column {quote(name, 24)} with tests; {existing}."
        faults.append(ConfigProblem("reward_functions", f"{sentence} Name it: code_tests(column=…)."))
    return faults


def _existing(rows: Rows, source: str) -> str:
    names, kept = column_names(rows), list[str]()
    for name in names:
        kept.append(quote(name if name == " ".join(name.split()) else repr(name), 24))
        if sum(map(len, kept)) + 2 * len(kept) > 60:
            break
    rest = len(names) - len(kept)
    listed = ", ".join(kept) + (f" and {rest:,} more" if rest else "")
    return f"{shown_source(source)} has the column{'s' if len(names) > 1 else ''} {listed}"
