"""A tokenizer.json of a few lines that would make a text fill the memory is refused before it is loaded; those in use are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from backend.models.tokenizer_limits import check_growth
from backend.models.tokenizers import load_tokenizer
from backend.utils.errors import UserError
from tests.support.random_models import tiny_tokenizer


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def with_parts(sound: Path, folder: Path, **parts: Any) -> Path:
    shutil.copytree(sound, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def replacing(pattern: dict[str, str], content: str, times: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": pattern, "content": content}] * times}


BOMBS = {
    "two for one": {"normalizer": replacing({"String": "a"}, "aa", 40)},
    "at every place": {"normalizer": replacing({"Regex": "(?=.)"}, "x", 11)},
    "one long replacement": {"normalizer": replacing({"String": "a"}, "a" * 5000, 1)},
    "put before": {"normalizer": {"type": "Prepend", "prepend": "x" * 2000}},
    "on the way back": {"decoder": {"type": "Sequence", "decoders": replacing({"String": "a"}, "aa", 40)["normalizers"]}},
    "nested": {"normalizer": {"type": "Sequence", "normalizers": [replacing({"String": "a"}, "aa", 6)] * 2}},
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_a_tokenizer_that_multiplies_texts_is_refused_before_it_is_loaded(
    kind: str, sound: Path, tmp_path: Path
) -> None:
    folder = with_parts(sound, tmp_path / "bomb", **BOMBS[kind])
    with pytest.raises(UserError, match=r"makes texts .* times as long; no more than 1000 are allowed") as refused:
        load_tokenizer(folder)
    assert len(refused.value.faults[0].sentence) <= 200


def test_a_replacement_hidden_in_escapes_is_found(sound: Path, tmp_path: Path) -> None:
    folder = with_parts(sound, tmp_path / "bomb", **BOMBS["two for one"])
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"Replace"', '"\\u0052eplace"'))
    with pytest.raises(UserError, match="makes texts"):
        check_growth(folder, "model")


def test_what_tokenizers_in_use_replace_is_loaded(sound: Path, tmp_path: Path) -> None:
    """Llama 2's and Gemma's space, T5's and CLIP's white space, ALBERT's quotes."""
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        *[{"type": "Replace", "pattern": {"String": "``"}, "content": '"'}] * 2,
    ]
    folder = with_parts(sound, tmp_path / "usual", normalizer={"type": "Sequence", "normalizers": steps})
    assert load_tokenizer(folder).encode("hi")
