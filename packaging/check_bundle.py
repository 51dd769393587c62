#!/usr/bin/env python3
"""Check an app bundle, frozen or light, as far as that is possible without a Mac.

    python packaging/check_bundle.py APP [--foreign PATH …]     one problem a line; exit 1 if there is any

Checked are Info.plist, the program and the icon; that links stay inside the bundle; that no file names a path of the
machine that built it; and of every Mac program and library: that it is for Apple silicon, runs on the oldest macOS we
promise, and loads nothing from outside but the system's own. Needs macholib (`pip install -e '.[dev]'`).
"""

import argparse
import os
import plistlib
import sys
from collections.abc import Iterator
from pathlib import Path

from macholib.mach_o import LC_BUILD_VERSION, LC_LOAD_DYLIB, LC_LOAD_WEAK_DYLIB, LC_VERSION_MIN_MACOSX
from macholib.MachO import MachO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packaging"))

from info_plist import MINIMUM_MACOS, info_plist  # noqa: E402

CPU_TYPE_ARM64 = 0x0100000C
MACH_O_MAGIC = {b"\xcf\xfa\xed\xfe", b"\xfe\xed\xfa\xcf", b"\xce\xfa\xed\xfe", b"\xfe\xed\xfa\xce", b"\xca\xfe\xba\xbe"}
OF_EVERY_MAC = ("/usr/lib/", "/System/Library/", "@")
"""Beginnings of the names of libraries that a Mac has or, with @, that are looked up relative to the bundle."""
PROMISE_OLDER = {"PySide6", "shiboken6"}
"""Folders of libraries whose headers name the macOS of the machine that built them, while their makers promise an older
one: Qt for Python's since 6.10 say 15 (6.12: 26), and its wheels are for 13. macOS compares that number for programs
and not for libraries, where only what they call counts; docs/mac-checklist.md has the proof on macOS 14."""
SHELLS = (b"#!/bin/sh\n", b"#!/bin/sh ")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check an app bundle.")
    parser.add_argument("app", type=Path)
    parser.add_argument("--foreign", type=Path, nargs="*", default=[], help="further paths that no file may name")
    options = parser.parse_args()
    found = list(problems(options.app, [*builders_paths(), *options.foreign]))
    for problem in found:
        print(problem)
    return 1 if found else 0


def builders_paths() -> list[Path]:
    """Folders of this machine that have no business in a bundle: the checkout and, if there is one, the virtual
    environment."""
    return [ROOT] if sys.prefix == sys.base_prefix else [ROOT, Path(sys.prefix)]


def problems(app: Path, foreign: list[Path]) -> Iterator[str]:
    """What is wrong with a bundle, one sentence each; `foreign` are paths that no file in it may name."""
    if not (app / "Contents").is_dir():
        yield f"{app} is no app bundle: it has no folder Contents."
        return
    yield from (
        f"{path.name} lies beside Contents; signing refuses that." for path in app.iterdir() if path.name != "Contents"
    )
    yield from plist_problems(app / "Contents")
    for folder, folders, files in os.walk(app):
        for name in sorted([*folders, *files]):
            path = Path(folder) / name
            yield from (f"{path.relative_to(app)} {problem}" for problem in file_problems(app, path, foreign))


def plist_problems(contents: Path) -> Iterator[str]:
    try:
        plist = plistlib.loads((contents / "Info.plist").read_bytes())
    except (OSError, plistlib.InvalidFileException, ValueError) as error:
        yield f"Contents/Info.plist cannot be read: {error}."
        return
    try:
        expected = info_plist(str(plist.get("CFBundleShortVersionString")), str(plist.get("CFBundleExecutable")))
    except ValueError as error:
        yield str(error)
        return
    for key, value in expected.items():
        if plist.get(key) != value:
            yield f"Info.plist: {key} is {plist.get(key)!r}, and should be {value!r}."
    program = contents / "MacOS" / str(plist.get("CFBundleExecutable"))
    if not program.is_file() or not os.access(program, os.X_OK):
        yield f"The program Contents/MacOS/{program.name} is missing or not executable."
    elif not is_mach_o(program) and not head(program, 10).startswith(SHELLS):
        yield f"The program Contents/MacOS/{program.name} is neither a Mac program nor a script for /bin/sh."
    icon = contents / "Resources" / str(plist.get("CFBundleIconFile"))
    if not icon.is_file() or head(icon, 4) != b"icns":
        yield f"The icon Contents/Resources/{icon.name} is missing or no .icns file."


def file_problems(app: Path, path: Path, foreign: list[Path]) -> Iterator[str]:
    """What is wrong with one file, folder or link, as the end of a sentence that begins with its path."""
    if path.is_symlink():
        target = path.readlink()
        if target.is_absolute() or not path.resolve().is_relative_to(app.resolve()):
            yield f"is a link out of the bundle, to {target}."
        elif not path.exists():
            yield f"is a link to {target}, which is missing."
    elif path.is_file():
        if is_mach_o(path):
            yield from mach_o_problems(path)
        content = path.read_bytes()
        yield from (
            f"names {place}, a path of the machine that built it."
            for place in foreign
            if os.fsencode(place) + b"/" in content
        )


def mach_o_problems(path: Path) -> Iterator[str]:
    """What would keep a program or library from loading on another Mac."""
    try:
        headers = MachO(str(path)).headers
    except ValueError as error:
        yield f"begins like a Mac program, and is none: {error}."
        return
    native = [header for header in headers if header.header.cputype == CPU_TYPE_ARM64]
    if not native:
        yield "is not built for Apple silicon."
    for header in native:
        for load, command, data in header.commands:
            if load.cmd in (LC_BUILD_VERSION, LC_VERSION_MIN_MACOSX):
                needed = int(command.minos if load.cmd == LC_BUILD_VERSION else command.version)
                if needed > packed(MINIMUM_MACOS) and not PROMISE_OLDER & set(path.parts):
                    yield f"needs macOS {needed >> 16}.{needed >> 8 & 255}, and the app promises {MINIMUM_MACOS}."
            elif load.cmd in (LC_LOAD_DYLIB, LC_LOAD_WEAK_DYLIB):
                library = data.rstrip(b"\0").decode()
                if not library.startswith(OF_EVERY_MAC):
                    yield f"loads {library}, which other Macs do not have."


def packed(version: str) -> int:
    """A version as Mach-O headers hold it: major in the upper 16 bits, minor in the next 8."""
    major, minor = version.split(".")
    return int(major) << 16 | int(minor) << 8


def is_mach_o(path: Path) -> bool:
    """Whether a file is a Mac program or library. Java classes and static libraries for several processors begin with
    the same bytes."""
    return head(path, 4) in MACH_O_MAGIC and path.suffix not in (".class", ".a")


def head(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)


if __name__ == "__main__":
    sys.exit(main())
