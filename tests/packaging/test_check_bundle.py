"""The checker of bundles finds what would keep an app from starting on another Mac; each case spoils a sound bundle."""

from __future__ import annotations

import os
import plistlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.mach_o import X86_64, library

FOREIGN = Path("/somewhere/checkout")


@pytest.fixture
def check(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("check_bundle")


@pytest.fixture
def contents(script: Callable[[str], ModuleType], tmp_path: Path) -> Path:
    """The folder Contents of a sound bundle."""
    made = tmp_path / "Some.app" / "Contents"
    for folder in ("MacOS", "Resources", "Frameworks"):
        (made / folder).mkdir(parents=True)
    (made / "Info.plist").write_bytes(plistlib.dumps(script("info_plist").info_plist("1.2.3")))
    (made / "MacOS" / "GRPO Studio").write_bytes(library())
    (made / "MacOS" / "GRPO Studio").chmod(0o755)
    (made / "Resources" / "app.icns").write_bytes(b"icns")
    (made / "Frameworks" / "sound.dylib").write_bytes(library())
    (made / "Resources" / "sound.dylib").symlink_to("../Frameworks/sound.dylib")
    return made


def set_plist(contents: Path, **changes: object) -> None:
    plist = plistlib.loads((contents / "Info.plist").read_bytes())
    (contents / "Info.plist").write_bytes(plistlib.dumps(plist | changes))


def test_a_sound_bundle_has_no_problems(check: ModuleType, contents: Path) -> None:
    assert list(check.problems(contents.parent, [FOREIGN])) == []


def test_libraries_that_promise_an_older_system_than_their_headers_name_are_taken_at_their_word(
    check: ModuleType, contents: Path
) -> None:
    (contents / "Frameworks" / "PySide6").mkdir()
    (contents / "Frameworks" / "PySide6" / "QtCore.abi3.so").write_bytes(library(macos=(15, 0)))
    assert list(check.problems(contents.parent, [FOREIGN])) == []


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "plist": (lambda c: (c / "Info.plist").write_text("no plist"), "Info.plist cannot be read"),
    "version": (lambda c: set_plist(c, CFBundleShortVersionString="1.0rc1"), "up to three numbers"),
    "system": (lambda c: set_plist(c, LSMinimumSystemVersion="12.0"), "LSMinimumSystemVersion is '12.0'"),
    "bit": (lambda c: (c / "MacOS" / "GRPO Studio").chmod(0o644), "missing or not executable"),
    "program": (lambda c: (c / "MacOS" / "GRPO Studio").write_text("#!/usr/bin/env python3\n"), "neither a Mac program nor"),
    "icon": (lambda c: (c / "Resources" / "app.icns").write_bytes(b"\x89PNG"), "no .icns file"),
    "beside": (lambda c: (c.parent / "notes.txt").touch(), "lies beside Contents"),
    "link out": (lambda c: (c / "link").symlink_to("/usr/bin"), "is a link out of the bundle"),
    "link up": (lambda c: (c / "link").symlink_to("../../elsewhere"), "is a link out of the bundle"),
    "dangling": (lambda c: (c / "link").symlink_to("missing"), "which is missing"),
    "path": (lambda c: (c / "Resources" / "a.txt").write_text(f"x={FOREIGN}/app/y"), "names /somewhere/checkout"),
    "Intel": (lambda c: (c / "Frameworks" / "a.so").write_bytes(library(X86_64)), "not built for Apple silicon"),
    "torn": (lambda c: (c / "Frameworks" / "a.so").write_bytes(b"\xca\xfe\xba\xbe\0\0\0\x01" + b"\0" * 60), "begins like a Mac program"),
    "newer": (lambda c: (c / "Frameworks" / "a.so").write_bytes(library(macos=(15, 2))), "needs macOS 15.2"),
    "brew": (lambda c: (c / "Frameworks" / "a.so").write_bytes(library(loads="/opt/homebrew/lib/libffi.dylib")), "loads /opt/homebrew"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_each_of_these_is_found(check: ModuleType, contents: Path, case: str) -> None:
    spoil, expected = SPOILED[case]
    spoil(contents)
    [problem] = check.problems(contents.parent, [FOREIGN])
    assert expected in problem


def test_on_the_command_line_problems_are_lines_and_the_exit_code(
    check: ModuleType, contents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check_bundle.py", str(contents.parent)])
    assert (check.main(), capsys.readouterr().out) == (0, "")
    os.rename(contents, contents.with_name("contents"))
    assert check.main() == 1 and "no folder Contents" in capsys.readouterr().out
