"""`python -m tests.torture`: what it lists, runs, counts and repeats."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.torture import __main__ as frame
from tests.torture.report import run_cases


@pytest.fixture
def a_torture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A torture by the name of `made_up`, of which every third case fails."""
    module = ModuleType("tests.torture.made_up")

    def main(count: int, seed: int) -> int:
        tried: list[int] = []

        def case(number: int, folder: Path) -> str:
            assert folder.is_dir()
            tried.append(number)
            return "its words\nIt broke." if number % 3 == 2 else ""

        failures = run_cases("made_up", case, range(seed, seed + count))
        assert tried == list(range(seed, seed + count))
        return failures

    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(frame, "TORTURES", {"made_up": frame.Torture("breaks every third", 9)})
    return module


def test_failures_are_counted_and_can_be_repeated(a_torture: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["made_up", "--count", "4", "--seed", "1"]) == 1
    told = capsys.readouterr().out
    repeated = "FAILED It broke.\n     python -m tests.torture made_up --count 1 --seed 2\n     | its words"
    assert repeated in told
    assert told.splitlines()[-1].split()[:3] == ["made_up", "4", "1"]
    assert frame.main(["made_up", "--count", "1", "--seed", "2"]) == 1
    assert frame.main(["made_up", "--count", "1", "--seed", "3"]) == 0


def test_without_a_name_everything_runs_at_full_size(a_torture: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["made_up", "9", "3"]


def test_a_torture_that_raises_has_failed(a_torture: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    a_torture.main = lambda count, seed: 1 // 0  # type: ignore[attr-defined]
    assert frame.main(["made_up"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("name", frame.TORTURES)
def test_each_has_a_module_with_the_function(name: str) -> None:
    main = importlib.import_module(f"tests.torture.{name}").main
    assert list(inspect.signature(main).parameters) == ["count", "seed"]


def test_the_list_has_every_torture_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--list"]) == 0
    sizes = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert sizes.keys() == frame.TORTURES.keys() and sizes["syscalls"] == "all" and sizes["configs"] == "100,000"
