#!/usr/bin/env python3
"""Replace installed packages that were built for a newer macOS than the app promises by their wheels for the promised
one.

    python packaging/macos/oldest_wheels.py         in the environment that the app is frozen from, before it is frozen

pip takes the newest build that runs on the machine: on macOS 26 it installs mlx's for 26, and an app frozen from that
would not start on macOS 14. `check_bundle.py` finds what is left. Does nothing on other systems.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from info_plist import MINIMUM_MACOS

TAG = re.compile(r"^Tag: \S+-macosx_(\d+)_(\d+)_\w+$", re.MULTILINE)


def main() -> None:
    newer = [f"{each.name}=={each.version}" for each in distributions() if is_newer(each)]
    if sys.platform == "darwin" and newer:
        replace(newer)


def is_newer(installed: Distribution) -> bool:
    """Whether a package's wheel is built for nothing but a newer macOS than MINIMUM_MACOS."""
    built_for = [tuple(map(int, found)) for found in TAG.findall(installed.read_text("WHEEL") or "")]
    return bool(built_for) and min(built_for) > tuple(map(int, MINIMUM_MACOS.split(".")))


def replace(requirements: list[str]) -> None:
    """Install these exact versions again, from the wheels for MINIMUM_MACOS. Raises CalledProcessError where there is
    none."""
    print("Taking the builds for macOS", MINIMUM_MACOS, "of", *requirements)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platform = f"macosx_{MINIMUM_MACOS.replace('.', '_')}_arm64"
    with tempfile.TemporaryDirectory() as folder:
        only = ("--no-deps", "--only-binary", ":all:", "--platform", platform)
        subprocess.run([*pip, "download", *only, "--dest", folder, *requirements], check=True)
        wheels = [str(wheel) for wheel in Path(folder).iterdir()]
        subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--force-reinstall", *wheels], check=True)


if __name__ == "__main__":
    main()
