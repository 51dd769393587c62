"""A large completions.jsonl: how fast it opens, how fast it is searched, and what it costs in memory.

`GRPO_STUDIO_PROOF_BYTES` sets the size, by default a tenth of the 2 GB for which the limits are: 2 s, 5 s, 300 MB.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication

from app.pages.completions.completions_page import CompletionsPage
from app.state.session import Session
from tests.support import made_up_runs

SIZE = int(os.environ.get("GRPO_STUDIO_PROOF_BYTES", 200_000_000))
LIMIT = 2_000_000_000
SEARCH_S, READ_TURN_MS, MOST_MEMORY_MB = 5.0, 20.0, 300
NEEDLE = "a needle in the haystack"


def write_large(path: Path) -> None:
    """Steps of 4 groups of 8 completions, one and a half kilobytes each; the needle is in the last."""
    dice = random.Random(3)
    words = [
        "the",
        "a",
        "number",
        "so",
        "we",
        "add",
        "carry",
        "ten",
        "ones",
        "think",
        "café",
        '"quoted"',
        "equal",
        "plus",
    ]
    pool = [" ".join(dice.choices(words, k=260)) for _ in range(200)]
    step = 0
    with path.open("wb") as file:
        while file.tell() < SIZE:
            step += 1
            for _ in range(4):
                file.write(line(step, [f"<think>{dice.choice(pool)}</think><answer>{dice.random()}" for _ in range(8)]))
        file.write(line(step + 1, [NEEDLE]))


def line(step: int, texts: list[str]) -> bytes:
    completions = [
        {"text": text, "tokens": 300, "stop": "eos", "rewards": {"accuracy": 0.0, "format": 0.5}, "reward": 0.5}
        for text in texts
    ]
    row = {"step": step, "prompt": "What is 2 + 2?", "answer": "4", "type": None, "completions": completions}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


class Turns:
    """CPU milliseconds between two beats of the event loop: what a click would wait for, on a machine with nothing else to do."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.process_time()
        self._timer = QTimer()
        self._timer.timeout.connect(self._beat)
        self._timer.start(1)

    def _beat(self) -> None:
        now = time.process_time()
        self.longest, self._last = max(self.longest, (now - self._last) * 1000), now


def seconds_until(done: Callable[[], bool]) -> float:
    """CPU seconds until `done`: wall time would measure the machine's other work."""
    began, deadline = time.process_time(), time.monotonic() + 600
    while not done():
        assert time.monotonic() < deadline
        QApplication.processEvents()
    return time.process_time() - began


def resident_mb() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("memory is read from /proc")
    return next(int(text.split()[1]) / 1024 for text in status.read_text().splitlines() if text.startswith("VmRSS"))


@pytest.mark.proof
def test_a_large_file_is_shown_at_once_and_searched_in_seconds(qtbot, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=0, reward_functions=["accuracy", "format"])
    write_large(folder.completions)
    session = Session()
    page = CompletionsPage(session)
    qtbot.addWidget(page)
    page.show()
    before, share = resident_mb(), SIZE / LIMIT
    session.open_run(tmp_path / "run")
    first = seconds_until(lambda: page.model.rowCount() > 0)
    assert first < 1.0 and page.model.lines[1].completion == {**page.model.lines[1].completion, "text": NEEDLE}
    run, completions = session.run, page.completions
    assert run is not None and completions is not None
    seconds_until(lambda: len(run.completion_steps()) > 1 and not run._index.advance())
    turns = Turns()
    page._search(NEEDLE.upper())
    search = seconds_until(lambda: completions.search is not None and completions.search.is_done)
    assert [text.completion["text"] for text in page.model.lines if text.completion] == [NEEDLE]
    search_turn = turns.longest
    assert search < max(0.5, SEARCH_S * share) and search_turn < READ_TURN_MS
    page._search("")
    page.bar.show_filter("well_formed_wrong")
    page.bar.scope.choose("run")
    facts = seconds_until(lambda: page.model.rowCount() > 0)
    QApplication.processEvents()  # the new list is painted
    turns.longest = 0.0
    facts += seconds_until(lambda: completions.is_complete)
    resident = resident_mb()
    grown = resident - before
    assert len(completions.facts) > 6e5 * share and grown < 40 + 140 * share, (
        "beside the 120 MB that the window has without a run"
    )
    assert turns.longest < READ_TURN_MS and resident < MOST_MEMORY_MB
    print(
        f"first rows {first:.2f} s, search {search:.2f} s, facts {facts:.1f} s, longest turn {search_turn:.0f} and {turns.longest:.0f} ms, "
        f"{grown:.0f} MB more, {resident:.0f} MB in all"
    )
    session.close_run()
