"""The reward functions' own process: what goes wrong in it is one sentence, and what comes out of it is not trusted."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from backend.rewards.calls import RewardError
from backend.rewards.confinement.confine import FOLDER_PREFIX, make_working_folder
from backend.rewards.resolve import resolve
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import Answer, RewardSource, TrainerState
from backend.rewards.worker import RewardWorker
from backend.types import Group
from backend.utils import file_lock
from tests.support.scoring import make_group, score

PRELUDE = "import asyncio, atexit, ctypes, json, os, re, signal, subprocess, sys, threading, time\n"
STATE = TrainerState(step=3, max_steps=9, max_completion_length=7)


@pytest.fixture(scope="module")
def process() -> Iterator[RewardWorker]:
    """Shared, for starting one takes a while; what ends it ends no other test, for the next request starts another."""
    process = RewardWorker()
    yield process
    process.stop()


@pytest.fixture
def scorer(process: RewardWorker, tmp_path: Path):
    """Makes a scorer of entries `name`, functions of a file with this text."""

    def make(text: str, *names: str, timeout_s: float = 20.0) -> Scorer:
        file = tmp_path / "mine.py"
        file.write_text(PRELUDE + text)
        source = RewardSource([[f"{file}::{name}" for name in names]], None, tmp_path, (file,))
        return Scorer(source, process, timeout_s)

    return make


def scored(scorer: Scorer, *groups: Group, timeout_s: float = 20.0) -> Answer:
    names, scorer.timeout_s = scorer.load()[0], timeout_s
    return scorer.score(list(groups), 0, [1.0] * len(names), STATE)


def rewards(scorer: Scorer, group: Group) -> list[float | None]:
    scored(scorer, group)
    return [completion.reward for completion in group.completions]


def failure(scorer: Scorer, timeout_s: float = 20.0) -> str:
    group = make_group("a", "b")
    with pytest.raises(RewardError) as caught:
        scored(scorer, group, timeout_s=timeout_s)
    assert [completion.scores for completion in group.completions] == [{}, {}], "no completion is changed"
    (fault,) = caught.value.faults
    assert "prompt" not in fault.sentence and "\n" not in fault.sentence, "no completion is known to be to blame"
    return fault.sentence


KINDS = """
seen = []
def plain(completions, trainer_state, log_extra, log_metric, **columns):
    log_extra("length", [len(text) for text in completions])
    log_metric("steps", trainer_state.step)
    return [None if text == "a" else len(text) / 3 for text in completions]
async def judge(completions, answer, completion_ids):
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    seen.append(loop)
    return [float(loop is seen[0]) + sum(ids) for ids in completion_ids]
def types_of(when, money, raw, completions):
    kinds = {type(when[0]).__name__, type(money[0]).__name__, type(raw[0]).__name__}
    return [float(kinds == {"date", "Decimal", "bytes"})] * len(completions)
"""


def test_scores_logs_and_rewards_are_those_of_the_trainers_own_process(scorer, tmp_path: Path) -> None:
    mine = scorer(KINDS, "plain", "judge", "types_of")
    columns: dict[str, Any] = {"when": date(2026, 1, 2), "money": Decimal("1.10"), "raw": b"\x00"}
    groups = [make_group("a", "bbb", **columns), make_group("cc", **columns)]
    reports = [scored(mine, *groups), scored(mine, *groups)]
    there = [completion.scores | {"reward": completion.reward} for group in groups for completion in group.completions]
    entries = [f"{tmp_path / 'mine.py'}::{name}" for name in ("plain", "judge", "types_of")]
    here = score(groups, resolve(entries), 20.0, STATE)
    assert there == [each.scores | {"reward": each.reward} for group in groups for each in group.completions]
    assert reports[1].columns == here.columns == {"length": [1, 3, 2]} and reports[1].metrics == here.metrics == {
        "steps": 3.0
    }
    assert [row["types_of"] for row in there] == [1.0] * 3
    assert mine.load()[0][0].line == 4


def test_a_file_reads_and_imports_what_lies_beside_it_and_works_in_a_folder_of_its_own(scorer, tmp_path: Path) -> None:
    (tmp_path / "my_helper.py").write_text("HALF = 0.5\n")
    (tmp_path / "table.txt").write_text("2")
    mine = scorer(
        "import my_helper\nfrom pathlib import Path\n"
        "def f(completions):\n"
        "    open('scratch', 'w').close()\n"
        "    factor = int((Path(__file__).parent / 'table.txt').read_text())\n"
        "    return [my_helper.HALF * factor] * len(completions)\n",
        "f",
    )
    group = make_group("a")
    scored(mine, group)
    folder = mine.host._child.folder
    assert group.completions[0].reward == 1.0 and (folder / "scratch").is_file() and folder != Path.cwd()
    mine.host.stop()
    assert not folder.exists()


ASYNC = """
async def good(completions):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)
async def blocks(completions):
    time.sleep(1000)
async def keeps(completions):
    await asyncio.sleep(0.01)
    time.sleep(1000)
async def shrugs(completions):
    while True:
        try: await asyncio.sleep(60)
        except BaseException: pass
"""


@pytest.mark.parametrize("bad", ["blocks", "keeps", "shrugs"])
def test_of_several_async_functions_the_one_that_hangs_is_named(scorer, bad: str) -> None:
    mine = scorer(ASYNC, "good", bad)
    mine.load()
    assert f"{bad} of mine.py" in failure(mine, timeout_s=0.3)


SERVED = """
jobs = None
async def serve():
    while True:
        (await jobs.get()).set_result(0.5)
async def served(completions):
    global jobs
    if jobs is None:
        jobs = asyncio.Queue()
        asyncio.create_task(serve())
    job = asyncio.get_running_loop().create_future()
    await jobs.put(job)
    return [await job] * len(completions)
"""


def test_a_task_kept_for_the_next_step_ends_quietly(scorer, process: RewardWorker, capsys: pytest.CaptureFixture[str]):
    """Python said of its task that it was destroyed, with a traceback, at the end of every run."""
    mine = scorer(SERVED, "served")
    for _ in range(2):
        assert rewards(mine, make_group("a", "b")) == [0.5, 0.5]
    process.stop(1.0)
    assert capsys.readouterr().err == ""


def test_what_is_printed_at_once_is_forwarded_whole(scorer, process: RewardWorker, capsys: pytest.CaptureFixture[str]):
    mine = scorer("def f(completions):\n    os.write(2, b'<' + b'x' * 40_000 + b'>')\n    return [1.0]\n", "f")
    assert rewards(mine, make_group("a")) == [1.0]
    process.stop(1.0)
    assert capsys.readouterr().err == f"<{'x' * 40_000}>"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_function_that_hangs_ends_with_its_trainer(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os, sys, time\nprint(os.readlink('/proc/self'), file=sys.stderr)\ntime.sleep(1000)\n")
    code = (
        "import sys\nfrom pathlib import Path\nfrom backend.rewards.scorer import Scorer\n"
        "from backend.rewards.scoring import Answer, RewardSource\n"
        "from backend.rewards.worker import RewardWorker\n"
        "file = Path(sys.argv[1])\nsource = RewardSource([[f'{file}::f']], None, file.parent, (file,))\n"
        "Scorer(source, RewardWorker(), 60).load()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(file)], stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        stat = Path(f"/proc/{int(parent.stderr.readline())}/stat")
        assert stat.exists()
        parent.kill()
    until = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "it goes on without its trainer"
        time.sleep(0.02)


def test_abandoned_working_folders_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    abandoned, held, other = (tmp_path / f"{FOLDER_PREFIX}{end}" for end in (f"{gone.pid}-a", f"{gone.pid}-b", "own"))
    for folder in (abandoned, held, other):
        (folder / "home").mkdir(parents=True)
    (tmp_path / f"{FOLDER_PREFIX}{gone.pid}-link").symlink_to(other)
    handle = os.open(held, os.O_RDONLY)
    assert file_lock.take(handle)  # by a trainer whose number means nothing here, in another container
    mine, kept = make_working_folder()
    assert not abandoned.exists()
    assert held.exists() and (other / "home").exists() and mine.exists()
    os.close(handle)
    os.close(kept)
