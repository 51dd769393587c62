"""Data of the Dataset page: what training reads, without downloads."""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from backend.config.config import Config, keys_used_by, problems
from backend.config.model_and_data_names import DATA_SUFFIXES, check_data, model_source
from backend.config.setting import MOST_TOKENS, ColumnSettings, DatasetSettings, PromptSettings
from backend.data.dataset_columns import likeliest_column
from backend.data.files import Row, Rows
from backend.data.images import with_paths
from backend.data.labels import label_of, whole_chat
from backend.data.problems import (
    PromptFormat,
    TooLong,
    check_unicode,
    count,
    cut_left,
    messages_of,
    problem_of,
    tokenize_if_fits,
    tokenizer_lock,
)
from backend.data.rows import (
    SPLITS,
    MapRows,
    Splits,
    check_columns,
    column_names,
    missing_columns,
    read_splits,
    row_name,
)
from backend.models.tokenizers import load_tokenizer, tokenizer_folder
from backend.runs.archive import raw_settings
from backend.runs.completion_rows import parse_group_row, prompt_key
from backend.runs.run_folder import RunFolder, all_runs
from backend.types import IMAGES, Label, Problem
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_file, is_folder, open_regular, user_path
from backend.utils.hub_cache import local_folder, split_revision
from backend.vision.tokenizer import with_vision

READING = keys_used_by("rows")  # settings that select rows
MAPPING = keys_used_by("row_view", "prompt_limit")  # settings that turn a row into a prompt
CODE = ("reward_functions_file", "reward_network", "reward_timeout")  # settings of the process for map functions
COLUMNS_OF_STEPS = ("prompt_feature", "answer_feature", "reward_functions_file")  # that the row steps depend on too
KINDS_GUESSED = {"prompt_feature": ("text", "messages"), "answer_feature": ("text", "number", "yes or no")}
"""Setting with a guessed column → allowed cell kinds. “Answered messages” hold the answer, so they are no prompt."""
INSPECTED_ROWS = 200  # rows for inferring a column's kind
SAMPLE = 1000  # evenly spread rows to measure first
UNMEASURED, REFUSED = -1, -2  # instead of a length: not tokenised yet; refused by training
RUNS = 200  # newest runs searched for one on the dataset
FORGOTTEN = 0.5  # loss of pass rate, between a prompt's best group and its last, from which it counts as noisy
_MARKUP = re.compile(r"[<\[].*[>\]]\Z", re.DOTALL)


def settings_of(raw: Mapping[str, Any]) -> Config:
    """Settings for a preview; invalid ones get their defaults."""
    given = {key: raw[key] for key in (*READING, *MAPPING, *CODE) if raw.get(key) not in (None, "")}
    wrong = {fault.setting for fault in problems(given)} - {"model", "data"}
    return Config(**{key: value for key, value in given.items() if key not in wrong})


_opened: tuple[Any, Splits] | None = None
_reading = threading.Lock()


def open_dataset(config: Config, map_rows: MapRows | None = None) -> Splits:
    """Rows of all splits, only the first of large files; cached until settings or files change. Raises UserError."""
    global _opened
    with _reading:
        files = [user_path(name, "data") for name in (config.data, config.valid_data, config.test_data) if name]
        makes = config.prompt_template or config.answer_pattern or config.map_function
        depends = (*READING, *(COLUMNS_OF_STEPS if makes else ()))
        stamp = (*(getattr(config, key) for key in depends), map_rows is None, [_written(file) for file in files])
        if _opened is None or _opened[0] != stamp:
            _opened = None  # frees the old rows first: two datasets may not fit in memory
            # The sets of `eval_data` are read when a run begins: the page shows the splits.
            own = config.model_copy(update={"eval_data": {}})
            _opened = (stamp, read_splits(own, map_rows, head=True))
        return _opened[1]


def _written(path: Path) -> list[tuple[str, int, int]]:
    """Name, time and size of the possible source files; [] if unreadable."""
    try:
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in DATA_SUFFIXES)
        return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
    except OSError:
        return []


def form_of(data: str) -> str:
    """file, folder or hub; a missing path is a file."""
    try:
        check_data(data)
    except UserError:
        return "file"
    path = user_path(data, "data")
    return "file" if is_file(path) else "folder" if is_folder(path) else "hub"


def hub_choices(data: str, config_name: str) -> dict[str, list[str]]:
    """Configurations and splits of a Hub dataset; empty if unavailable."""
    import datasets

    configs: list[str] = []
    repo, revision = split_revision(data)
    try:
        configs = [str(name) for name in datasets.get_dataset_config_names(repo, revision=revision)]
        chosen = config_name if config_name in configs else configs[0] if len(configs) == 1 else config_name or None
        splits = [str(name) for name in datasets.get_dataset_split_names(repo, chosen, revision=revision)]
    except Exception:  # reading the rows meets the same error, and reports it
        splits = []
    return {"configs": configs, "splits": splits}


def overview(config: Config, map_rows: MapRows | None = None) -> dict[str, Any]:
    """The page's dataset summary, with problems if unreadable. {form, splits {split: {rows, about, source, unanswered,
    repeated}}, names, columns, likely, faults, notes, written}. `about`: a large file's estimated rows, or None."""
    known: dict[str, Any] = {"form": form_of(config.data), "names": [], "splits": {}, "columns": [], "likely": {}}
    known |= {"faults": [], "notes": [], "written": []}
    try:
        known["written"] = _written(user_path(config.data, "data"))
        if known["form"] == "folder":
            known["names"] = list(dict.fromkeys(Path(name).stem for name, _, _ in known["written"]))
        opened = open_dataset(config, map_rows)
    except UserError as error:
        return known | {"faults": [fault.to_dict() for fault in error.faults]}
    present = [split for split in SPLITS if opened.rows(split)]
    columns = columns_of([opened.rows(split) for split in present])
    by_split = (check_columns(opened.rows(split), config, opened.source_of(split)) for split in present)
    faults = next((faults for faults in by_split if faults), [])  # as `check`: of the first split that has any
    for split in present:
        key = ("gaps", split, config.prompt_feature, config.system_feature, config.answer_feature)
        if key not in opened.computed:
            opened.computed[key] = gaps(opened.rows(split), config)
        about = {"about": opened.about.get(split), "source": opened.source.get(split, "")}
        known["splits"][split] = {"rows": len(opened.rows(split)), **about, **opened.computed[key]}
    return known | {
        "columns": columns,
        "likely": likely(columns, config),
        "faults": [fault.to_dict() for fault in faults],
        "notes": opened.notes,
    }


def gaps(rows: Rows, config: ColumnSettings) -> dict[str, int | None]:
    """Rows without an answer and with a repeated prompt; None without that column."""
    missing, prompts = 0, set[Any]()
    for row in rows:
        missing += not cell_text(row.get(config.answer_feature), 64).strip()
        prompt, system = row.get(config.prompt_feature), row.get(config.system_feature)
        images = [str(row[name]) for name in IMAGES if row.get(name)]
        is_plain = isinstance(prompt, str) and not system and not images
        prompts.add(prompt if is_plain else (cell_text(prompt, 1 << 30), cell_text(system, 1 << 30), hash(str(images))))
    absent = missing_columns(rows, (config.answer_feature, config.prompt_feature))
    return {
        "unanswered": None if config.answer_feature in absent else missing,
        "repeated": None if config.prompt_feature in absent else len(rows) - len(prompts),
    }


def columns_of(splits: Sequence[Rows]) -> list[dict[str, str]]:
    """Name, kind and an example of every column."""
    examples: dict[str, Any] = dict.fromkeys(name for rows in splits for name in column_names(rows))
    for row in islice(chain.from_iterable(splits), INSPECTED_ROWS):
        for name, cell in row.items():
            if examples[name] is None and cell not in ("", []):
                examples[name] = cell
    return [{"name": name, "kind": kind_of(cell), "example": cell_text(cell, 120)} for name, cell in examples.items()]


def kind_of(value: Any) -> str:
    if isinstance(value, list):
        is_chat = bool(value) and all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value)
        if not is_chat:
            return "list"
        return "answered messages" if value[-1]["role"] == "assistant" else "messages"
    kinds = {str: "text", bool: "yes or no", int: "number", float: "number", dict: "object", type(None): "empty"}
    return kinds.get(type(value), type(value).__name__)


def cell_text(value: Any, most: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value[:most]
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:  # an image of `datasets`
        return value["path"] or "image"
    if kind_of(value).endswith("messages"):
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)[:most]
    return json.dumps(value, ensure_ascii=False, default=str)[:most]


def likely(columns: Sequence[Mapping[str, str]], config: ColumnSettings) -> dict[str, str]:
    """Setting → likely column for prompt and answer if the configured one is missing."""
    kinds = {column["name"]: column["kind"] for column in columns}
    guessed: dict[str, str] = {}
    for key, allowed in KINDS_GUESSED.items():
        if getattr(config, key) in kinds:
            continue
        taken = {*guessed.values(), *(getattr(config, other) for other in KINDS_GUESSED if other != key)}
        taken |= {config.messages_feature} if config.learns_labels else set()
        free = [name for name, kind in kinds.items() if name not in taken and kind in allowed]
        if (name := likeliest_column(key, free)) is not None:
            guessed[key] = name
    return guessed


_loaded: tuple[Any, Any] | None = None
_loading = threading.Lock()


def tokenizer_for(config: Config) -> Any:
    """The run's tokenizer, cached until its files change. Raises UserError if it is not on this machine."""
    global _loaded
    folder = _tokenizer_files(config)
    with _loading:
        files = sorted(folder.glob("*token*")) + sorted(folder.glob("*.jinja"))
        model = folder if not config.tokenizer else local_folder(config.model) or folder
        stamp = (str(folder), [(file.name, file.stat().st_mtime_ns) for file in files], model, config.image_max_pixels)
        if _loaded is None or _loaded[0] != stamp:
            _loaded = (stamp, with_vision(load_tokenizer(folder), model, config.image_max_pixels))
        return _loaded[1]


def is_warm(config: Config) -> bool:
    try:
        return _loaded is not None and _loaded[0][0] == str(_tokenizer_files(config))
    except UserError:
        return False


def _tokenizer_files(config: Config) -> Path:
    if config.tokenizer:
        return tokenizer_folder(config.tokenizer)
    if not config.model.strip():
        raise UserError("model", "No model is chosen yet, so there are no tokens to show.")
    path = Path(model_source(config.model, "model"))
    if path.is_dir():
        if not (path / "tokenizer_config.json").is_file():
            raise UserError("model", f"The folder {path} holds no tokenizer: tokenizer_config.json is missing.")
        return path
    snapshot = local_folder(config.model)
    if snapshot is None or not (snapshot / "tokenizer_config.json").is_file():
        absent = "is not on this machine yet, so there are no tokens to show"
        raise UserError("model", f"The model {config.model} {absent}.")
    return snapshot


def preview_problem(
    index: int, row: Row, tokenizer: Any, prompt_format: PromptFormat, source: str, *, cuts: bool = False
) -> tuple[Problem, int]:
    """(problem; tokens of its whole prompt, 0 without a tokenizer or if far too long). `cuts`: with the prompt as
    trained on, a long one cut if configured. Raises UserError."""
    where = row_name(index, source)
    row = with_paths(row, source, where)
    messages = (whole_chat if prompt_format.labelled else messages_of)(row, prompt_format, where)
    check_unicode(messages, where)
    if tokenizer is None:
        return problem_of(index, row, messages, [], prompt_format), 0
    if prompt_format.labelled:
        with tokenizer_lock:
            _, _, label, _ = label_of(row, tokenizer, replace(prompt_format, max_tokens=MOST_TOKENS), where)
        ids = [] if isinstance(label, TooLong) else label.tokens
        shown = ids[: prompt_format.max_tokens] if cuts else ids
        problem = problem_of(index, row, messages, shown, prompt_format)
        return (problem, 0) if isinstance(label, TooLong) else (replace(problem, label=label), len(ids))
    most, variables = max(prompt_format.max_tokens, 0), prompt_format.variables_of(row)
    with tokenizer_lock:
        tokens = tokenize_if_fits(messages, tokenizer, variables, where, most)
        ids = [] if isinstance(tokens, TooLong) else tokens
        if cuts and prompt_format.cuts and count(tokens) > most:
            messages, ids = cut_left(messages, tokenizer, variables, where, most) or (messages, ids)
    return problem_of(index, row, messages, ids, prompt_format), count(tokens)


def prompt_pieces(tokens: Sequence[int], tokenizer: Any, label: Label | None = None) -> list[dict[str, Any]]:
    """The prompt split around special tokens, and where a label begins or ends: [{text, ids, special, learnt}]."""
    learnt = label.mask if label else [1] * len(tokens)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    # Added tokens that look like markup (`<think>`, `[INST]`) count as special: the page marks them.
    special = {number for number, token in added.items() if token.special or _MARKUP.match(token.content)}
    special |= set(tokenizer.all_special_ids)
    runs: list[list[int]] = []
    for index, token in enumerate(tokens):
        goes_on = index > 0 and learnt[index] == learnt[index - 1]
        if goes_on and (token == tokens[index - 1] or not special & {token, tokens[index - 1]}):
            runs[-1].append(token)
        else:
            runs.append([token])

    def decoded(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    pieces: list[dict[str, Any]] = []
    # Each run is decoded after the one before it: some tokenizers drop the leading space of a text.
    for before, ids in zip([[], *runs], runs, strict=False):
        prefix, both = decoded(before), decoded(before + ids)
        text = both.removeprefix(prefix) if both.startswith(prefix) else decoded(ids)
        if len(ids) > 1 and ids[0] in special:  # of an image
            text = f"{decoded(ids[:1])} × {len(ids)}"
        at = sum(len(piece["ids"]) for piece in pieces)
        pieces.append({"text": text, "ids": ids, "special": ids[0] in special, "learnt": bool(learnt[at])})
    return pieces


@dataclass
class PromptLengths:
    """Prompt lengths of a split, measured in any order. `lengths`: tokens per row, UNMEASURED or REFUSED. `by_length`
    counts rows by tokens. `fault` is the first of the refused rows. Without a tokenizer all lengths are 0."""

    rows: Sequence[Row]
    prompt_format: PromptFormat
    source: str
    lengths: array[int] = field(init=False)
    by_length: Counter[int] = field(default_factory=Counter)
    fault: tuple[int, ConfigProblem] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.lengths = array("i", [UNMEASURED]) * len(self.rows)

    @property
    def measured(self) -> int:
        return len(self.rows) - self.lengths.count(UNMEASURED)

    def measure(self, indices: Sequence[int], tokenizer: Any) -> None:
        """Tokenise those of these rows that were not measured yet."""
        with self._lock:
            for index in indices:
                if self.lengths[index] != UNMEASURED:
                    continue
                try:
                    _, tokens = preview_problem(index, self.rows[index], tokenizer, self.prompt_format, self.source)
                    self.by_length[tokens] += 1
                except UserError as error:
                    tokens = REFUSED
                    if self.fault is None or index < self.fault[0]:
                        self.fault = (index, error.faults[0])
                self.lengths[index] = min(tokens, 2**31 - 1)

    def summary(self) -> dict[str, Any]:
        """{seen, rows, lengths [[tokens, rows], …] ascending, refused, faults}."""
        with self._lock:
            return {
                "seen": self.measured,
                "rows": len(self.rows),
                "lengths": sorted(self.by_length.items()),
                "refused": self.lengths.count(REFUSED),
                "faults": [self.fault[1].to_dict()] if self.fault else [],
            }


def preview_order(count: int) -> Iterator[int]:
    """Every index below `count` once, SAMPLE evenly spread ones first."""
    step = max(1, count // SAMPLE)
    yield from range(0, count, step)
    if step > 1:
        yield from (index for index in range(count) if index % step)


def newest_run(config: DatasetSettings) -> tuple[RunFolder, float] | None:
    """The newest run with completions on the dataset, and the reward from which it counts a completion as solved."""
    for run in islice(all_runs(), RUNS):
        values = raw_settings(run)
        if str(values.get("data")) == config.data and run.completions.exists():
            return run, float(values.get("success_reward_threshold", 1.0))
    return None


def solved_prompts(
    rows: Sequence[Row], config: PromptSettings, source: str, run: RunFolder, solved_from: float
) -> list[tuple[int, int, int, str]]:
    """(row, completions solved, completions, kind) of each row whose prompt the run has sampled, hardest first. `kind`:
    never, always, sometimes, or noisy: solved less often in the end than before."""
    groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    with open_regular(run.completions) as file:
        for line in file:
            if (group := parse_group_row(line)) is not None:
                rewards = [each.get("reward") for each in group["completions"]]
                known = [reward >= solved_from for reward in rewards if reward is not None]
                groups.setdefault(prompt_key(group), []).append((sum(known), len(known)))
    found, prompt_format = list[tuple[int, int, int, str]](), PromptFormat.of(config)
    for index, row in enumerate(rows):
        try:
            problem, _ = preview_problem(index, row, None, prompt_format, source)
        except UserError:
            continue
        if counts := groups.get((problem.prompt, *problem.images)):
            solved, sampled = (sum(column) for column in zip(*counts, strict=True))
            rates = [of_group / max(1, size) for of_group, size in counts]
            kind = "never" if not solved else "always" if solved == sampled else "sometimes"
            found.append((index, solved, sampled, "noisy" if max(rates) - rates[-1] >= FORGOTTEN else kind))
    return sorted(found, key=lambda entry: entry[1] / max(1, entry[2]))
