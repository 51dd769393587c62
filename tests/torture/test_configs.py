"""A sample of `python -m tests.torture configs`, and that the harness sees what it is for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.torture import configs


def test_a_sample_of_hostile_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert configs.main(150, 0) == 0, capsys.readouterr().out


def test_a_traceback_a_hang_and_a_stray_file_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: configs.Case, place: configs.Place, is_repeated: bool) -> str:
        number = len(list(place.root.glob("tried-*")))
        (place.root / f"tried-{number}").touch()
        if number == 1:
            raise RecursionError("deep")
        if number == 2:
            (place.root / "cwd" / "stray").touch()
        while number == 3:
            time.monotonic()
        return "A sentence."

    monkeypatch.setattr(configs, "try_case", broken)
    monkeypatch.setattr(configs, "SECONDS", 0.2)
    told = list(configs.forked_cases(range(4), configs.make_place(tmp_path)))
    assert [result["failure"] == "" for result in told] == [True, False, False, False]
    assert (
        "RecursionError: deep" in told[1]["failure"] and "stray" in told[2]["failure"] and "hang" in told[3]["failure"]
    )
