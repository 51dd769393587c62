"""What the Completions page finds in a file of any size: filters, full-text search, differences, folding, exports."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.pages.completions.reading_pane import diff, fold
from app.state import run_completions
from app.state.run_completions import CompletionFacts, FactsReader, Query, RunCompletions, select, sort
from backend.runs.completion_rows import (
    LEFT_OUT,
    NOT_RUN,
    CompletionIndex,
    conversation_text,
    export_completions,
    turns_mark,
    without_token_data,
)
from backend.runs.events import JsonLines
from backend.utils.errors import UserError
from tests.support.cases import cases


def completion(text: str, reward: float | None = 0.0, stop: str = "eos", **rewards: float | None) -> dict[str, Any]:
    return {"text": text, "tokens": len(text), "stop": stop, "rewards": rewards, "reward": reward, "advantage": reward}


def row(step: int, *completions: dict[str, Any], prompt: str = "What is it?") -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "answer": "4", "type": None, "completions": list(completions)}


def write(path: Path, rows: Sequence[dict[str, Any]], *, ascii_only: bool = False) -> Path:
    if ascii_only:
        path.write_text("".join(json.dumps(item) + "\n" for item in rows))
        return path
    lines = JsonLines(path)
    for item in rows:
        lines.append(item)
    lines.close()
    return path


def facts_of(rows: Sequence[dict[str, Any]]) -> CompletionFacts:
    facts = CompletionFacts()
    for number, item in enumerate(rows):
        facts.append(item, number)
    return facts


ROWS = [
    row(
        1,
        completion("a", 1.0, r1_accuracy_reward_func=2.0, r1_count_xml=0.5),
        completion("b", 0.0, "length", r1_accuracy_reward_func=0.0, r1_count_xml=0.4),
        completion("b", 0.0, r1_accuracy_reward_func=0.0, r1_count_xml=0.1),
    ),
    row(
        2,
        completion("c", 0.5, r1_accuracy_reward_func=0.0),
        completion("d", 0.5),
        completion("e", None),
        prompt="Another",
    ),
]


@cases(
    ("query", "expected"),
    [
        (Query(), [0, 1, 2, 3, 4, 5]),
        (Query("best"), [0]),  # the second group's rewards are equal, so none of it is best or worst
        (Query("worst"), [1, 2]),
        (Query("cut_off"), [1]),
        (Query("identical"), [1, 2]),
        (Query("well_formed_wrong"), [1]),  # 2 is wrong too, but has a fifth of the format score; 3 has none
        (Query("score", "reward", is_above=True, limit=0.4), [0, 3, 4]),
        (Query("score", "score:r1_count_xml", is_above=False, limit=0.4001), [1, 2]),
        (Query("score", "score:unknown", is_above=False, limit=9.0), []),
        (Query(prompt=hash(("Another",))), [3, 4, 5]),
    ],
)
def test_a_filter_leaves_what_it_says(query: Query, expected: list[int]) -> None:
    assert select(facts_of(ROWS), query).tolist() == expected


def test_sorting_puts_missing_values_last_and_keeps_ties_in_order() -> None:
    facts = facts_of(ROWS)
    every = np.arange(6)
    assert sort(facts, every, "reward", descending=True).tolist() == [0, 3, 4, 1, 2, 5]
    assert sort(facts, every, "reward", descending=False).tolist() == [1, 2, 3, 4, 0, 5]
    assert sort(facts, every, "step", descending=True).tolist() == [3, 4, 5, 0, 1, 2]


def found(path: Path, text: str) -> list[tuple[int, int]]:
    """(step, place) of every match."""
    search = FactsReader(path, text)
    while search.advance(0.01):
        pass
    steps, places = search.facts.per_completion("step"), search.facts.column("place")
    return [(int(steps[number]), int(places[number])) for number in search.matches]


FOUND = {
    "NEEDLE": [(2, 1)],
    'say "yes"': [(3, 0)],
    "one\ntwo": [(3, 1)],
    "back\\slash": [(4, 0)],
    "CAFÉ": [(4, 1)],
    "café": [(4, 1)],
    "пРивет": [(5, 0)],
    "日本": [(5, 1)],
    "<answer>7</answer>": [(6, 0)],
    "Wholly": [(7, 0), (7, 1)],  # in the prompt
    "reward": [],  # a key of every line
    "`answer`": [],  # equal to other signs but for one bit
    "nowhere": [],
}


@pytest.mark.parametrize("ascii_only", [False, True])
def test_text_is_found_in_any_case_and_spelling(tmp_path: Path, ascii_only: bool) -> None:
    texts = [
        ("x", "y"),
        ("a", "A Needle here"),
        ('She will say "Yes".', "one\ntwo"),
        ("a back\\slash", "un Café noir"),
        ("Привет, мир", "日本語"),
        ("<answer>7</answer>", "@answer@"),
        ("a", "b"),
    ]
    rows = [row(step, *(completion(one) for one in pair)) for step, pair in enumerate(texts, 1)]
    rows[6]["prompt"] = "A wholly other prompt"
    file = write(tmp_path / "completions.jsonl", rows, ascii_only=ascii_only)
    assert {text: found(file, text) for text in FOUND} == FOUND


def test_search_over_slices(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_completions, "READ_BYTES", 1000)
    rows = [row(step, completion(f"number {step};" + "x" * (step * 7 % 1500))) for step in range(1, 200)]
    path = write(tmp_path / "completions.jsonl", rows)
    for step in (1, 99, 198, 199):
        assert found(path, f"number {step};") == [(step, 0)]
    assert len(found(path, "NUMBER")) == 199


def test_search_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "completions.jsonl", [row(1, completion("needle"))])
    search = FactsReader(path, "needle")
    assert not search.advance(1.0) and search.matches == [0] and search.share == 1.0
    write(path, [row(2, completion("no")), row(3, completion("a needle"))])
    assert not search.advance(1.0) and search.matches == [0, 1]
    path.write_bytes(b"")
    search.advance(1.0)
    assert search.is_void


def test_the_index_of_a_long_file_is_read_in_slices(tmp_path: Path) -> None:
    text = "x" * 100_000
    rows = [row(step, completion(text), completion(f"{step} {number}")) for step in range(1, 21) for number in range(3)]
    path = write(tmp_path / "completions.jsonl", rows)
    index = CompletionIndex(path)
    assert index.advance() and len(index.steps()) < 10, "there is more to read"
    while index.advance():
        pass
    assert index.steps() == list(range(1, 21)) and len(index.rows(20)) == 3
    assert [item["completions"][1]["text"] for item in index.rows()] == ["20 0", "20 1", "20 2"]
    for offset, item in index.placed_rows(13):
        with path.open("rb") as file:
            file.seek(offset)
            assert json.loads(file.readline()) == item


def test_facts_of_a_file_cut_back_start_over(qtbot, tmp_path: Path) -> None:
    path = write(tmp_path / "completions.jsonl", [row(step, completion("x"), completion("y")) for step in range(1, 5)])
    completions = RunCompletions(path)
    voided = []
    completions.voided.connect(lambda: voided.append(len(completions.facts)))
    completions.follow(True)
    qtbot.waitUntil(lambda: len(completions.facts) == 8 and completions.shown.is_done)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    qtbot.waitUntil(lambda: voided == [0] and len(completions.facts) == 4)
    completions.follow(False)


TRICKY = ['], "logp": [', ', "token_data": {"text": [', '"', "}", "\\", '\\"], "logp": [1']


def test_token_data_is_cut_out_of_a_line_whatever_the_texts_hold(tmp_path: Path) -> None:
    data = {"text": TRICKY, "logp": [-1.5, None, 0.0, 1e-9, -2.0, 3.0], "mask": [1, 1, 0, 1, 1, 1], "ratio": [1.0] * 6}
    plain = [completion("".join(TRICKY)) | {"logged": {"a": "}"}}, completion("b")]
    recorded = [one | {"token_data": data | {"text": texts}} for one, texts in zip(plain, (TRICKY, []), strict=True)]
    line = write(tmp_path / "a.jsonl", [row(1, *recorded)]).read_bytes()
    assert json.loads(without_token_data(line)) == row(1, *plain)
    without = write(tmp_path / "b.jsonl", [row(1, *plain)]).read_bytes()
    assert without_token_data(without) is without


@cases(
    ("old", "new", "parts"),
    [
        ("2 + 2 = 4", "2 + 2 = 5", [("same", "2 + 2 = "), ("removed", "4"), ("added", "5")]),
        ("so it is", "so that is", [("same", "so "), ("removed", "it"), ("added", "that"), ("same", " is")]),
        ("same", "same", [("same", "same")]),
        ("", "new", [("added", "new")]),
        ("<a>1</a>", "<a></a>", [("same", "<a>"), ("removed", "1"), ("same", "</a>")]),
    ],
)
def test_a_difference_is_in_words_and_signs(old: str, new: str, parts: list[tuple[str, str]]) -> None:
    assert diff(old, new) == parts


def test_folding_counts_the_words_between_tags() -> None:
    text = "<think>one two\nthree</think><answer>4</answer>"
    assert fold(text, ["think"]) == "<think> … 3 words … </think><answer>4</answer>"
    assert fold(text, ["answer"]).endswith("<answer> … 1 word … </answer>")
    assert fold("<think>cut off here", ["think"]) == "<think> … 3 words … "
    assert fold(text, []) == text


def exported(source: Path, target: Path, places: list[tuple[int, int]]) -> str:
    for _ in export_completions(source, places, target):
        assert not target.exists(), "never half a file"
    return target.read_text()


def test_an_export_has_what_was_chosen_in_its_order(tmp_path: Path) -> None:
    source = write(
        tmp_path / "completions.jsonl",
        [
            row(1, completion("a", accuracy=2.0), completion("``` b", 1.5) | {"logged": {"kind": "sum", "digits": 2}}),
            row(2, completion("é")),
        ],
    )
    second = len(source.read_bytes().splitlines(keepends=True)[0])
    places = [(second, 0), (0, 1)]
    lines = [json.loads(line) for line in exported(source, tmp_path / "out.jsonl", places).splitlines()]
    told = [(line["step"], line["text"], line["prompt"]) for line in lines]
    assert told == [(2, "é", "What is it?"), (1, "``` b", "What is it?")]
    page = exported(source, tmp_path / "out.md", places)
    assert "## Step 2" in page and "````\n``` b\n````" in page and "reward 1.5" in page
    assert "\n\nkind: sum\n\ndigits: 2\n\n### Prompt" in page and page.count("kind:") == 1
    assert lines[1]["logged"] == {"kind": "sum", "digits": 2} and "logged" not in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["completions.jsonl", "out.jsonl", "out.md"]


def test_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "completions.jsonl", [row(1, completion("a"), completion("b"))])
    export = export_completions(source, [(0, 0), (0, 1)], tmp_path / "out.jsonl")
    assert next(export) == 1
    export.close()
    assert [path.name for path in tmp_path.iterdir()] == ["completions.jsonl"]
    with pytest.raises(UserError, match="must end in"):
        next(export_completions(source, [], tmp_path / "out.txt"))
    with pytest.raises(UserError, match="cannot be written"):
        next(export_completions(source, [], tmp_path / "no" / "out.md"))


CALLS = [{"name": "search", "arguments": {"query": "grüße", "limit": 3}}, {"name": "cube", "arguments": {}}]
RESULTS = [
    {"name": "search", "content": "one\ntwo", "failed": False, "seconds": 0.0123},
    {"name": "cube", "content": "{'error': 'no'}", "failed": True, "seconds": 10.0},
]


def turn(text: str, calls: Any = (), results: Any = (), result_tokens: int = 0) -> dict[str, Any]:
    return {"text": text, "tokens": 9, "calls": calls, "results": results, "result_tokens": result_tokens}


@pytest.mark.parametrize(
    ("turns", "mark", "text"),
    [
        ([], "", "last"),
        ([turn("last")], "no call", "last"),
        (
            [turn("Let me look.", CALLS, RESULTS, 20), turn("last")],
            "2 turns, 2 calls, 1 failed",
            'Turn 1, 9 tokens\nLet me look.\n→ search(query="grüße", limit=3)  12.3 ms\n← one\n  two\n'
            "→ cube()  10 s\n✕ {'error': 'no'}\n\nTurn 2, 9 tokens\nlast",
        ),
        (
            [turn("", CALLS[1:], RESULTS[1:])],
            "1 turn, 1 call, 1 failed",
            f"Turn 1, 9 tokens\n→ cube()  10 s\n✕ {{'error': 'no'}}\n{LEFT_OUT}",
        ),
        ([turn("", CALLS[1:])], "1 turn, 1 call", f"Turn 1, 9 tokens\n→ cube()\n{NOT_RUN}"),
    ],
)
def test_a_conversation_reads_as_its_turns_calls_and_results(turns: Any, mark: str, text: str, tmp_path: Path) -> None:
    row = completion("last") | ({"turns": turns} if turns else {})
    assert (turns_mark(row), conversation_text(row)) == (mark, text)
    path = write(tmp_path / "completions.jsonl", [{"step": 1, "prompt": "Which?", "completions": [row]}])
    assert found(path, "grüße") == ([(1, 0)] if "grüße" in text else [])
    assert found(path, "→ CUBE()") == ([(1, 0)] if "cube" in text else [])
    list(export_completions(path, [(0, 0)], tmp_path / "out.md"))
    assert f"```\n{text}\n```" in (tmp_path / "out.md").read_text(encoding="utf-8")
