"""The self-test: green on a sound machine, and red in the right place where one part of it is broken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from backend import selftest
from backend.runs import checkpoint
from backend.selftest import CHECKS, Check, CheckResult, CheckSkipped, Workbench, run_checks
from tests.support.verbs import call

BY_NAME = {check.name: check for check in CHECKS}
ENGINE = CHECKS[:7]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A workbench on which every check of the engine has passed."""
    workbench = Workbench(tmp_path_factory.mktemp("selftest"))
    results = list(run_checks(ENGINE, workbench))
    assert [result.state for result in results] == ["ok"] * len(ENGINE), results
    return workbench


def alone(name: str, bench: Workbench) -> CheckResult:
    """One check on a workbench that has what it needs."""
    (result,) = run_checks([replace(BY_NAME[name], needs=())], bench)
    return result


@pytest.mark.parametrize("name", ["warm process", "reward sandbox"])
def test_processes_answer(bench: Workbench, name: str) -> None:
    result = alone(name, bench)
    assert result.state == "ok", result


def _cut_short(bench: Workbench) -> dict[str, Any]:
    settings = Workbench.settings(bench)
    broken = shutil.copytree(settings["model"], bench.folder / "broken")
    os.truncate(broken / "model.safetensors", 100_000)
    return settings | {"model": str(broken)}


def _rounded(*about: Any) -> dict[str, mx.array]:
    return {name: x.astype(mx.bfloat16).astype(x.dtype) for name, x in checkpoint.arrays_of(*about).items()}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("device", "A compiled function gives wrong numbers."),
        ("demo model", "UserError"),
        ("learning", "no likelier"),
        ("checkpoint", "differ"),
    ],
)
def test_a_broken_part_is_found(monkeypatch, tmp_path: Path, bench: Workbench, name: str, words: str) -> None:
    if name == "demo model":
        bench = Workbench(tmp_path)  # the others go on with the model that was loaded
        raw = _cut_short(bench)
        monkeypatch.setattr(Workbench, "settings", lambda self: raw)
    elif name == "device":
        monkeypatch.setattr(mx, "compile", lambda function: lambda x: function(x) + 1)
    elif name == "learning":
        monkeypatch.setattr(bench.parts.learner, "learning_rate", lambda update: -2e-5)
    else:
        monkeypatch.setattr(selftest, "arrays_of", _rounded)
    result = alone(name, bench)
    assert result.state == "failed" and words in result.sentence, result


def _raise(error: Exception) -> Callable[[Workbench], str]:
    return Mock(side_effect=error)


@pytest.fixture
def results(tmp_path: Path) -> list[CheckResult]:
    private = f"in {Path.home()}/secret of token=hf_abcdefghijklmnop at {tmp_path}/x"
    checks = [
        Check("one", _raise(ValueError(private))),
        Check("two", lambda bench: "fine", ("one",)),
        Check("three", lambda bench: "fine"),
        Check("four", _raise(CheckSkipped("Not here."))),
    ]
    return list(run_checks(checks, Workbench(tmp_path)))


def test_a_failure_ends_only_what_needs_it(results: list[CheckResult]) -> None:
    assert [result.state for result in results] == ["failed", "skipped", "ok", "skipped"]
    assert "one" in results[1].sentence


def test_the_report_names_neither_user_nor_home_nor_token(results: list[CheckResult], tmp_path: Path) -> None:
    text = selftest.write_report(results, tmp_path / "report.json")
    for content in (text.read_text("utf-8"), (tmp_path / "report.json").read_text("utf-8")):
        assert "ValueError: in ~/secret of token=…" in content and "hf_abc" not in content
        assert str(Path.home()) not in content and str(tmp_path) not in content
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert not report["passed"] and report["summary"].startswith("1 of 4 checks failed") and report["about"]["mlx"]


def test_options_that_make_no_sense_are_refused() -> None:
    for arguments, words in (
        ("--report x.json", "--report belongs to --selftest"),
        ("--selftest --report /no/such/folder/x.json", "a folder that exists"),
        ("--selftest --report x.txt", "name it x.json"),
        ("--selftest runs", "stands alone"),
    ):
        result = call(*arguments.split())
        assert result.exit_code == 2 and words in result.stderr
