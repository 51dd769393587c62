"""The profile for macOS, as text: seatbelt itself is only on a Mac (docs/mac-checklist.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.rewards.confinement import seatbelt


@pytest.mark.parametrize("network", [False, True])
def test_the_profile(tmp_path: Path, network: bool) -> None:
    """Of several rules that fit, the last one holds."""
    own = f'(subpath "{tmp_path.resolve()}")'
    lines = seatbelt.profile([tmp_path], [tmp_path / "keys"], network).splitlines()
    assert lines[:2] == ["(version 1)", "(allow default)"]
    writing = [line for line in lines if "file-write*" in line]
    assert writing == ["(deny file-write*)", f"(allow file-write* {own})"]
    assert lines.index("(deny signal)") < lines.index("(allow signal (target same-sandbox))")
    assert f'(deny file-read-data (subpath "{tmp_path.resolve()}/keys"))' in lines
    assert ("(deny network*)" in lines) is not network
    last = [line for line in lines if "network*" in line][-2:]
    assert last == [f"(allow network* ({side} unix-socket {own}))" for side in ("local", "remote")]


def test_any_name_is_one_string(tmp_path: Path) -> None:
    (line,) = (
        line
        for line in seatbelt.profile([tmp_path / 'a "b\\c'], [], False).splitlines()
        if "allow file-write* " in line
    )
    assert line.endswith('/a \\"b\\\\c"))')
