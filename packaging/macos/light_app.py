#!/usr/bin/env python3
"""Make the light app: a bundle without Python or Qt inside, which needs no certificate and makes its environment on the
first start.

    python packaging/macos/light_app.py [--wheel FILE] [--out FOLDER]

It holds the wheel of this checkout (built here unless one is given), the exact versions of what it needs, and the
scripts of `light/`. It needs nothing of the checkout afterwards, and can be made on any system.
"""

import argparse
import hashlib
import plistlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "light"
sys.path.insert(0, str(ROOT / "packaging"))

from info_plist import ICON, NAME, info_plist  # noqa: E402

PROGRAM = "launch.sh"
SET_UP = ("find_python.sh", "progress.js", "set_up.sh")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the light app bundle.")
    parser.add_argument("--wheel", type=Path, help="a wheel built earlier")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "light", help="the folder for the bundle")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        app = make_app(options.wheel or built_wheel(Path(folder)), options.out)
    print(app)


def built_wheel(folder: Path) -> Path:
    """This checkout as a wheel. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", folder, ROOT], check=True)
    return next(folder.glob("grpo_studio-*.whl"))


def make_app(wheel: Path, out: Path) -> Path:
    """Write the bundle into `out` in place of an earlier one, and return its path."""
    app = out / f"{NAME}.app"
    shutil.rmtree(app, ignore_errors=True)
    contents = app / "Contents"
    for folder in ("MacOS", "Resources/set_up", "Resources/package"):
        (contents / folder).mkdir(parents=True)
    resources, version = contents / "Resources", wheel.name.split("-")[1]
    (contents / "Info.plist").write_bytes(plistlib.dumps(info_plist(version)))
    put(SCRIPTS / PROGRAM, contents / "MacOS" / NAME, mode=0o755)
    put(ROOT / "resources" / "icons" / "app" / "app.icns", resources / ICON)
    for name in SET_UP:
        put(SCRIPTS / name, resources / "set_up" / name)
    package = resources / "package"
    put(wheel, package / wheel.name)
    put(ROOT / "constraints.txt", package / "constraints.txt")
    (package / "environment_name").write_text(environment_name(version, package), encoding="utf-8")
    return app


def put(source: Path, target: Path, mode: int = 0o644) -> None:
    shutil.copyfile(source, target)
    target.chmod(mode)


def environment_name(version: str, package: Path) -> str:
    """A name that changes with anything that is installed: the version, and a digest of the wheel and the
    constraints."""
    digest = hashlib.sha256()
    for file in sorted(package.iterdir()):
        digest.update(file.read_bytes())
    return f"{version}-{digest.hexdigest()[:12]}"


if __name__ == "__main__":
    main()
