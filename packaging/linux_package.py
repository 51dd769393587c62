#!/usr/bin/env python3
"""Make the Linux download from the frozen folder: GRPO-Studio-<version>-linux-<machine>.tar.xz, with a script that
installs it.

A tarball and not an AppImage: an AppImage is mounted as long as its program runs, and our trainings outlive the window
that started them.

    python packaging/linux_package.py [DIST]        DIST holds "GRPO Studio/", by default dist/
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from backend import __version__  # noqa: E402

BUNDLE = "GRPO Studio"
BESIDE = ("packaging/linux/install.sh", "packaging/linux/grpo-studio.desktop", "LICENSE")
ICON = "resources/icons/app/app.svg"


def package(dist: Path) -> Path:
    """Write the tarball into `dist`, whole or not at all, and return its path."""
    name = f"GRPO-Studio-{__version__}-linux-{platform.machine()}"
    archive = dist / f"{name}.tar.xz"
    with tempfile.TemporaryDirectory(dir=dist) as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        for file in BESIDE:
            shutil.copy2(ROOT / file, folder)
        shutil.copy2(ROOT / ICON, folder / "grpo-studio.svg")
        unfinished = Path(temporary) / archive.name
        subprocess.run(_tar(folder, dist / BUNDLE, unfinished), env=os.environ | {"XZ_OPT": "-T0 -6"}, check=True)
        unfinished.replace(archive)
    return archive


def _tar(folder: Path, bundle: Path, archive: Path) -> list[str]:
    """The command that packs `folder` with the bundle in it: the system's tar and xz, which use all cores as Python's
    do not."""
    return [
        *("tar", "--create", "--xz", "--file", str(archive), "--sort=name"),
        *("--owner=0", "--group=0", "--numeric-owner"),  # not the user who builds
        *("--transform", f"s,^{bundle.name},{folder.name}/{bundle.name},S"),  # S: not the targets of links
        *("-C", str(folder.parent), folder.name, "-C", str(bundle.resolve().parent), bundle.name),
    ]


def main() -> int:
    dist = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    if not (dist / BUNDLE).is_dir():
        print(f"There is no {dist / BUNDLE}: build it first, with make app.", file=sys.stderr)
        return 2
    archive = package(dist)
    print(f"{archive} ({archive.stat().st_size / 1e6:.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
