"""A table of hostile reward functions, called as a run calls them: what each gets is one sentence, and nothing else happens.

`make test` takes those marked `in_suite`, `make proofs` all of them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.rewards.inputs import TrainerState
from backend.rewards.scorer import begin_scorer
from backend.rewards.worker_process import RewardWorker
from backend.utils.errors import UserError
from tests.rewards.hostile_functions import HOSTILE, STILL_RUNNING, TIMEOUT_S, Hostile
from tests.support.scoring import make_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for what is left in /proc")

MARK = "GRPO_HOSTILE_TEST"
"""An environment variable by which everything that a function starts is found again."""
AMPLE_S = 8.0
"""The limit of those that end by themselves, on a busy machine too."""
TIDY = {"returns", "raises", "logs"}
"""Kinds that leave nothing behind in their process, which is used again."""
TIDY_WHERE_REFUSED = {"ends", "descriptors", "files", "reaches out", "import"}
REFUSALS = {"PermissionError", "SystemExit", "MemoryError", "RecursionError", "EOFError"}
"""What Python raises for all of what a function of these kinds tries: nothing has come of it, and its process is used again."""


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder / "checkpoints" / "000004").mkdir(parents=True)
    for name in ("events.jsonl", "run.lock", "control.json", "checkpoints/000004/adapters.safetensors"):
        (folder / name).write_text(f"precious {name}")
    return folder


@pytest.fixture(scope="module")
def process() -> Iterator[RewardWorker]:
    """One scoring process for all, replaced wherever a function ended it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))
        for secret in ("HF_TOKEN", "GRPO_HOSTILE_SECRET"):  # one of the table's functions looks for them
            patch.setenv(secret, "precious")
        scoring = RewardWorker()
        yield scoring
        scoring.stop()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward file with nothing wrong in it."""
    file = tmp_path_factory.mktemp("sound") / "sound.py"
    file.write_text(
        "from backend.rewards import register_reward_function\n"
        "@register_reward_function('length')\n"
        "def length(prompts, completions, answer, types=None):\n    return [len(c) for c in completions]\n"
    )
    return file


def scored(process: RewardWorker, name: str, file: Path, timeout_s: float) -> list[Any]:
    """The two completions' scores, by a new scorer of the process. Raises UserError."""
    settings: Any = SimpleNamespace(
        reward_functions=[name], reward_functions_file=str(file), stages=[], reward_timeout=timeout_s,
        reward_isolation="process", reward_network=False,
    )  # fmt: skip
    group = make_group("four", "5")
    begin_scorer(settings, {False: process}).score([group], 0, [1.0], timeout_s, TrainerState())
    return [completion.reward for completion in group.completions]


def sentence_of(hostile: Hostile, process: RewardWorker, file: Path) -> str:
    """The one fault's sentence; "" where it scores as if nothing were wrong."""
    may_hang = STILL_RUNNING in (hostile.sentence or "")
    try:
        assert scored(process, "mine", file, TIMEOUT_S if may_hang else AMPLE_S) == [1.0, 1.0]
    except UserError as mistake:
        (fault,) = mistake.faults
        assert fault.setting in ("reward_functions", "reward_functions_file")
        return fault.sentence
    return ""


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    paths = (folder, *sorted(folder.rglob("*")))
    return {
        str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_text() if path.is_file() else "")
        for path in paths
    }


def left_behind() -> list[str]:
    """Processes that come from a scoring process of these tests, by their environment."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.name != str(os.getpid()) and mark in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {(entry / 'cmdline').read_text()}")
        except OSError:  # it has just ended, or is another user's
            continue
    return found


def run_and_check(hostile: Hostile, process: RewardWorker, sound: Path, victim: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(hostile.source(victim, os.getpid(), Path.home()))
    before, home = contents(victim.parent), sorted(os.listdir(Path.home()))
    begun = time.monotonic()
    process.start()
    sentence = sentence_of(hostile, process, file)
    seconds = time.monotonic() - begun
    print(f"{hostile.kind}: {hostile.name}: {sentence or 'scored'} [{seconds:.1f} s]")
    check_sentence(hostile, sentence)
    if not is_tidy(hostile):
        process.stop(1.0)
        assert not left_behind()
    assert scored(process, "length", sound, 20.0) == [4.0, 1.0], "the next scoring"
    assert contents(victim.parent) == before
    assert sorted(os.listdir(Path.home())) == home
    assert file.exists()
    assert seconds < 10


def is_tidy(hostile: Hostile) -> bool:
    return hostile.kind in TIDY or (hostile.kind in TIDY_WHERE_REFUSED and hostile.sentence in REFUSALS)


def check_sentence(hostile: Hostile, sentence: str) -> None:
    assert re.search(hostile.sentence or "^$", sentence), sentence
    if not sentence:
        return
    assert sentence.isprintable() and sentence.endswith("."), sentence
    assert "mine.py" in sentence
    if not hostile.at_import:
        assert "The reward function mine of mine.py" in sentence
        assert "What is 2 + 2?" in sentence and ("“four”" in sentence or "“5”" in sentence)
    assert len(sentence) <= 200, sentence


def named(functions: list[Hostile]) -> list[Any]:
    return [pytest.param(hostile, id=f"{hostile.kind}: {hostile.name}") for hostile in functions]


@pytest.mark.parametrize("hostile", named([hostile for hostile in HOSTILE if hostile.in_suite]))
def test_a_hostile_function_gets_a_sentence(
    hostile: Hostile, process: RewardWorker, sound: Path, victim: Path, tmp_path: Path
) -> None:
    run_and_check(hostile, process, sound, victim, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("hostile", named([hostile for hostile in HOSTILE if not hostile.in_suite]))
def test_every_hostile_function_gets_a_sentence(
    hostile: Hostile, process: RewardWorker, sound: Path, victim: Path, tmp_path: Path
) -> None:
    run_and_check(hostile, process, sound, victim, tmp_path)


def test_the_table_is_large_and_its_sample_of_every_kind() -> None:
    assert len(HOSTILE) >= 80
    assert {hostile.kind for hostile in HOSTILE if hostile.in_suite} == {hostile.kind for hostile in HOSTILE}
    assert len({(hostile.kind, hostile.name) for hostile in HOSTILE}) == len(HOSTILE)
