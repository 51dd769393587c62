"""Prompts as the model will see them: built and tokenised by `backend.data.rows`, told piece by piece, and counted.

A row that training would refuse is counted, and said in the sentence that `check` prints. A model that is not on this
machine is not fetched: then there are messages, and no tokens.
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

from backend.data.rows import Row, messages_of, problem_of, rendered, whole_characters
from backend.spec.config import Config
from backend.spec.faults import Fault, Mistake
from backend.spec.model_and_data_names import model_source
from backend.types import Problem

SAMPLE = 1000
"""Rows that are counted before all others, spread over the dataset: the shape of it is known after a moment."""
UNSEEN, REFUSED = -1, -2
"""In place of a length: not looked at yet; training would refuse the row."""
_MARKUP = re.compile(r"[<\[].*[>\]]\Z", re.DOTALL)


# ── the tokenizer ────────────────────────────────────────────────────────────────────────────────────────────────────

_loaded: tuple[Any, Any] | None = None
_loading = threading.Lock()


def tokenizer_for(config: Config) -> Any:
    """The tokenizer of `config.model`, kept until its files change. Raises Mistake where there is none on this machine,
    with a sentence that says what is missing."""
    global _loaded
    folder = _folder(config.model)
    with _loading:
        files = sorted(folder.glob("*token*")) + sorted(folder.glob("*.jinja"))
        stamp = (str(folder), [(file.name, file.stat().st_mtime_ns) for file in files])
        if _loaded is None or _loaded[0] != stamp:
            _loaded = (stamp, _load(folder))
        return _loaded[1]


def is_warm(config: Config) -> bool:
    """Whether `tokenizer_for` would answer at once."""
    try:
        return _loaded is not None and _loaded[0][0] == str(_folder(config.model))
    except Mistake:
        return False


def _folder(model: str) -> Path:
    """Where the tokenizer's files lie. Raises Mistake."""
    if not model.strip():
        raise Mistake("model", "No model is chosen yet, so there are no tokens to show.")
    path = Path(model_source(model, "model"))
    if not path.is_dir():
        return _cached(model)
    if not (path / "tokenizer_config.json").is_file():
        raise Mistake("model", f"The folder {path} holds no tokenizer: tokenizer_config.json is missing.")
    return path


def _cached(model: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "tokenizer_config.json")
    except ValueError:  # of what cannot be an id
        found = None
    if not isinstance(found, str):
        raise Mistake("model", f"The model {model} is not on this machine yet, so there are no tokens to show.")
    return Path(found).parent


def _load(folder: Path) -> Any:
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(folder)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Mistake("model", f"The tokenizer in {folder} cannot be loaded: {reason}.") from error


# ── one row ──────────────────────────────────────────────────────────────────────────────────────────────────────────


_rendering = threading.Lock()
"""Questions share one tokenizer and not their threads; a tokenizer may change its own settings while it works."""


def made_of(index: int, row: Row, tokenizer: Any, config: Config, source: str) -> Problem:
    """What training makes of one row, however long its prompt. Without a tokenizer there are no tokens. Raises Mistake."""
    where = f"row {index + 1} of {source}"
    messages = messages_of(row, config, where)
    whole_characters(messages, where)
    if tokenizer is None:
        return problem_of(index, row, messages, [], config)
    with _rendering:
        tokens = rendered(messages, tokenizer, config, where)
    return problem_of(index, row, messages, tokens, config)


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[dict[str, Any]]:
    """The prompt cut before and after every special token: [{text, ids, special}]. The texts joined are the prompt."""
    special = _special_ids(tokenizer)
    cut: list[list[int]] = []
    for place, token in enumerate(tokens):
        if place and token not in special and tokens[place - 1] not in special:
            cut[-1].append(token)
        else:
            cut.append([token])
    texts = _texts(cut, tokenizer)
    return [{"text": text, "ids": ids, "special": ids[0] in special} for text, ids in zip(texts, cut, strict=True)]


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that mean something to the model beside their text: special ones, and added ones that look like markup."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {number for number, token in added.items() if token.special or _MARKUP.match(token.content)}
    return frozenset(marked.union(tokenizer.all_special_ids))


def _texts(cut: Sequence[list[int]], tokenizer: Any) -> Iterator[str]:
    """The text of each piece as it reads after the one before: some tokenizers decode a beginning otherwise."""
    for before, ids in zip([[], *cut], cut, strict=False):
        ahead, together = _decoded(tokenizer, before), _decoded(tokenizer, before + ids)
        yield together.removeprefix(ahead) if together.startswith(ahead) else _decoded(tokenizer, ids)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


# ── all rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Tally:
    """What is known so far of the prompts of a split; it can be left at any row and taken up again.

    `lengths` has a row's tokens (or UNSEEN, REFUSED); `by_length` counts rows by tokens, `refused` those refused, of
    which `fault` is the first in the file. Without a tokenizer every length is 0.
    """

    rows: Sequence[Row]
    config: Config
    source: str
    lengths: array[int] = field(init=False)
    by_length: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    fault: tuple[int, Fault] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.lengths = array("i", [UNSEEN]) * len(self.rows)

    @property
    def seen(self) -> int:
        return self.by_length.total() + self.refused

    def count(self, places: Sequence[int], tokenizer: Any) -> None:
        """Look at the rows at these places, unless that was done."""
        with self._lock:
            for place in places:
                if self.lengths[place] == UNSEEN:
                    self.lengths[place] = self._look_at(place, tokenizer)

    def _look_at(self, place: int, tokenizer: Any) -> int:
        try:
            found = made_of(place, self.rows[place], tokenizer, self.config, self.source)
        except Mistake as mistake:
            self.refused += 1
            if self.fault is None or place < self.fault[0]:
                self.fault = (place, mistake.faults[0])
            return REFUSED
        self.by_length[len(found.tokens)] += 1
        return len(found.tokens)

    def told(self) -> dict[str, Any]:
        """{seen, rows, lengths [[tokens, rows], …] rising, refused, faults}."""
        with self._lock:
            return {
                "seen": self.seen,
                "rows": len(self.rows),
                "lengths": sorted(self.by_length.items()),
                "refused": self.refused,
                "faults": [self.fault[1].to_dict()] if self.fault else [],
            }


def order(count: int, sample: int = SAMPLE) -> Iterator[int]:
    """Every place below `count` once, at first `sample` of them spread evenly."""
    step = max(1, count // sample)
    spread = range(0, count, step)
    yield from spread
    if step > 1:
        yield from (place for place in range(count) if place % step)
