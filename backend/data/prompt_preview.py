"""What the Dataset page shows of prompts: one row's prompt in pieces as the model sees it, and all prompts' lengths.

Problems are made by `backend.data.problems`, as in training. A row that training would refuse is counted, and its fault has
the sentence of `check`. A model that is not on this machine is not downloaded: there are messages then, and no tokens.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.config.model_and_data_names import model_source
from backend.config.setting_groups import PromptSettings
from backend.data.chat_tokens import TooLong, check_unicode, count, cut_left, tokenize_if_fits
from backend.data.files import Row
from backend.data.problems import PromptFormat, messages_of, problem_of
from backend.data.rows import row_name
from backend.models.own_tokenizer import tokenizer_folder
from backend.models.tokenizers import load_tokenizer
from backend.types import Problem
from backend.utils.errors import ConfigProblem, UserError

SAMPLE = 1000
"""Rows, spread evenly over the dataset, that are measured first: the distribution of lengths shows after a moment."""
UNMEASURED, REFUSED = -1, -2
"""In place of a length: not tokenised yet; training would refuse the row."""
_MARKUP = re.compile(r"[<\[].*[>\]]\Z", re.DOTALL)


# ── the tokenizer ────────────────────────────────────────────────────────────────────────────────────────────────────

_loaded: tuple[Any, Any] | None = None
_loading = threading.Lock()


def tokenizer_for(config: Config) -> Any:
    """The run's tokenizer, its own or the model's, cached until its files change. Raises UserError where this machine has none."""
    global _loaded
    folder = _folder_of(config)
    with _loading:
        files = sorted(folder.glob("*token*")) + sorted(folder.glob("*.jinja"))
        stamp = (str(folder), [(file.name, file.stat().st_mtime_ns) for file in files])
        if _loaded is None or _loaded[0] != stamp:
            _loaded = (stamp, load_tokenizer(folder))
        return _loaded[1]


def is_warm(config: Config) -> bool:
    """Whether the tokenizer is loaded already, so that `tokenizer_for` returns without delay."""
    try:
        return _loaded is not None and _loaded[0][0] == str(_folder_of(config))
    except UserError:
        return False


def _folder_of(config: Config) -> Path:
    """The folder with the tokenizer's files. Raises UserError."""
    return tokenizer_folder(config.tokenizer) if config.tokenizer else _folder(config.model)


def _folder(model: str) -> Path:
    """The folder with the tokenizer's files of a model. Raises UserError."""
    if not model.strip():
        raise UserError("model", "No model is chosen yet, so there are no tokens to show.")
    path = Path(model_source(model, "model"))
    if not path.is_dir():
        return _cached(model)
    if not (path / "tokenizer_config.json").is_file():
        raise UserError("model", f"The folder {path} holds no tokenizer: tokenizer_config.json is missing.")
    return path


def _cached(model: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, "tokenizer_config.json")
    except ValueError:  # the name cannot be an id
        path = None
    if not isinstance(path, str):
        raise UserError("model", f"The model {model} is not on this machine yet, so there are no tokens to show.")
    return Path(path).parent


# ── one row ──────────────────────────────────────────────────────────────────────────────────────────────────────────


_tokenizer_lock = threading.Lock()
"""Questions run in threads of their own and share one tokenizer, which may change its own settings while it works."""


def preview_problem(index: int, row: Row, tokenizer: Any, config: PromptSettings, source: str) -> tuple[Problem, int]:
    """The problem that training makes of a row whose prompt it does not cut, and the number of its tokens; without a tokenizer it has none,
    and neither has one that is so long that its tokens were only estimated from below (`backend.data.chat_tokens`).

    Raises UserError for a row that training would refuse.
    """
    where, prompt_format = row_name(index, source), PromptFormat.of(config)
    messages = messages_of(row, prompt_format, where)
    check_unicode(messages, where)
    if tokenizer is None:
        return problem_of(index, row, messages, [], prompt_format), 0
    with _tokenizer_lock:
        tokens = tokenize_if_fits(
            messages, tokenizer, prompt_format.template_variables, where, max(prompt_format.max_tokens, 0)
        )
    ids = [] if isinstance(tokens, TooLong) else tokens
    return problem_of(index, row, messages, ids, prompt_format), count(tokens)


def cut_problem(problem: Problem, tokens: int, tokenizer: Any, config: PromptSettings, source: str) -> Problem:
    """The problem as it is trained on: its prompt of so many `tokens` cut, where the settings say so and it is too long. Raises UserError."""
    prompt_format = PromptFormat.of(config)
    most, variables = prompt_format.max_tokens, prompt_format.template_variables
    if not prompt_format.cuts or tokens <= most:
        return problem
    with _tokenizer_lock:
        cut = cut_left(problem.messages, tokenizer, variables, row_name(problem.index, source), most)
    return problem if cut is None else problem_of(problem.index, problem.row, *cut, prompt_format)


def prompt_pieces(tokens: Sequence[int], tokenizer: Any) -> list[dict[str, Any]]:
    """The prompt split before and after every special token: [{text, ids, special}]. The texts joined are the prompt."""
    special = _special_ids(tokenizer)
    runs: list[list[int]] = []
    for index, token in enumerate(tokens):
        if index and token not in special and tokens[index - 1] not in special:
            runs[-1].append(token)
        else:
            runs.append([token])
    texts = _texts(runs, tokenizer)
    return [{"text": text, "ids": ids, "special": ids[0] in special} for text, ids in zip(texts, runs, strict=True)]


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens, and added tokens that look like markup (`<think>`, `[INST]`): the page marks them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    markup = {number for number, token in added.items() if token.special or _MARKUP.match(token.content)}
    return frozenset(markup.union(tokenizer.all_special_ids))


def _texts(runs: Sequence[list[int]], tokenizer: Any) -> Iterator[str]:
    """The text of each run of tokens, decoded after the run before it: some tokenizers decode the beginning of a text
    differently, without its leading space."""
    for before, ids in zip([[], *runs], runs, strict=False):
        prefix, both = _decoded(tokenizer, before), _decoded(tokenizer, before + ids)
        yield both.removeprefix(prefix) if both.startswith(prefix) else _decoded(tokenizer, ids)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


# ── all rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class PromptLengths:
    """Lengths of a split's prompts, as far as they have been measured; rows may come in any order.

    `lengths` holds each row's tokens (or UNMEASURED, REFUSED); `by_length` counts rows by tokens, `refused` the refused rows,
    of which `fault` is the first in the file, with its row. Without a tokenizer every length is 0.
    """

    rows: Sequence[Row]
    config: PromptSettings
    source: str
    lengths: array[int] = field(init=False)
    by_length: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    fault: tuple[int, ConfigProblem] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.lengths = array("i", [UNMEASURED]) * len(self.rows)

    @property
    def measured(self) -> int:
        return self.by_length.total() + self.refused

    def measure(self, indices: Sequence[int], tokenizer: Any) -> None:
        """Tokenise those of these rows that were not measured yet."""
        with self._lock:
            for index in indices:
                if self.lengths[index] == UNMEASURED:
                    self.lengths[index] = self._length(index, tokenizer)

    def _length(self, index: int, tokenizer: Any) -> int:
        try:
            _, tokens = preview_problem(index, self.rows[index], tokenizer, self.config, self.source)
        except UserError as mistake:
            self.refused += 1
            if self.fault is None or index < self.fault[0]:
                self.fault = (index, mistake.faults[0])
            return REFUSED
        self.by_length[tokens] += 1
        return min(tokens, 2**31 - 1)  # the array's largest number

    def summary(self) -> dict[str, Any]:
        """{seen, rows, lengths [[tokens, rows], …] ascending, refused, faults}."""
        with self._lock:
            return {
                "seen": self.measured,
                "rows": len(self.rows),
                "lengths": sorted(self.by_length.items()),
                "refused": self.refused,
                "faults": [self.fault[1].to_dict()] if self.fault else [],
            }


def preview_order(count: int, sample: int = SAMPLE) -> Iterator[int]:
    """Every index below `count` once, `sample` of them first, spread evenly."""
    step = max(1, count // sample)
    spread = range(0, count, step)
    yield from spread
    if step > 1:
        yield from (index for index in range(count) if index % step)
