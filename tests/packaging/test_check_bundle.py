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
    """Nor has one with a library of Qt, which promises an older system than its headers name."""
    (contents / "Frameworks" / "PySide6").mkdir()
    (contents / "Frameworks" / "PySide6" / "QtCore.abi3.so").write_bytes(library(macos=(15, 0)))
    assert list(check.problems(contents.parent, [FOREIGN])) == []


FAT = b"\xca\xfe\xba\xbe\0\0\0\x01" + b"\0" * 60
BREW = library(loads="/opt/homebrew/lib/libffi.dylib")
FILES: dict[str, tuple[str, bytes, str]] = {
    "plist": ("Info.plist", b"no plist", "Info.plist cannot be read"),
    "program": ("MacOS/GRPO Studio", b"#!/usr/bin/env python3\n", "neither a Mac program nor"),
    "icon": ("Resources/app.icns", b"\x89PNG", "no .icns file"),
    "beside": ("../notes.txt", b"", "lies beside Contents"),
    "path": ("Resources/a.txt", f"x={FOREIGN}/app/y".encode(), "names /somewhere/checkout"),
    "Intel": ("Frameworks/a.so", library(X86_64), "not built for Apple silicon"),
    "torn": ("Frameworks/a.so", FAT, "begins like a Mac program"),
    "newer": ("Frameworks/a.so", library(macos=(15, 2)), "needs macOS 15.2"),
    "brew": ("Frameworks/a.so", BREW, "loads /opt/homebrew"),
}
"""What is wrong: (file, its content, what is said)."""
OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "version": (lambda c: set_plist(c, CFBundleShortVersionString="1.0rc1"), "up to three numbers"),
    "system": (lambda c: set_plist(c, LSMinimumSystemVersion="12.0"), "LSMinimumSystemVersion is '12.0'"),
    "bit": (lambda c: (c / "MacOS" / "GRPO Studio").chmod(0o644), "missing or not executable"),
    "link out": (lambda c: (c / "link").symlink_to("/usr/bin"), "is a link out of the bundle"),
    "link up": (lambda c: (c / "link").symlink_to("../../elsewhere"), "is a link out of the bundle"),
    "dangling": (lambda c: (c / "link").symlink_to("missing"), "which is missing"),
}


@pytest.mark.parametrize("case", [*FILES, *OTHERS])
def test_each_of_these_is_found(check: ModuleType, contents: Path, case: str) -> None:
    if case in FILES:
        name, content, expected = FILES[case]
        (contents / name).write_bytes(content)
    else:
        spoil, expected = OTHERS[case]
        spoil(contents)
    [problem] = check.problems(contents.parent, [FOREIGN])
    assert expected in problem


def test_on_the_command_line(check: ModuleType, contents: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["check_bundle.py", str(contents.parent)])
    assert (check.main(), capsys.readouterr().out) == (0, "")
    os.rename(contents, contents.with_name("contents"))
    assert check.main() == 1 and "no folder Contents" in capsys.readouterr().out
