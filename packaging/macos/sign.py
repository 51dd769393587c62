"""Sign an app bundle from the inside out: a signature covers what lies inside, so that has to be signed before."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from check_bundle import is_mach_o
from commands import run

AD_HOC = "-"
"""The identity of a signature without a certificate: Apple silicon runs no code without one, and it vouches for
nobody."""
ENTITLEMENTS = Path(__file__).resolve().parent / "entitlements.plist"
NESTED_BUNDLES = (".framework", ".app", ".bundle", ".xpc", ".plugin")


def sign(app: Path, identity: str = AD_HOC) -> None:
    """Sign everything in `app`, then `app` itself, and verify. Raises ToolFailed.

    With a certificate, under the hardened runtime and with Apple's timestamp, as notarising demands. Without one,
    without the runtime: it would refuse our own libraries, which then share no team with the program.
    """
    options = ["--force", "--sign", identity]
    if identity != AD_HOC:
        options += ["--timestamp", "--options", "runtime"]
    for part in parts(app):
        # Entitlements belong to programs; on a library they mean nothing.
        rights = ["--entitlements", str(ENTITLEMENTS)] if is_program(app, part) and identity != AD_HOC else []
        run("codesign", *options, *rights, part)
    run("codesign", "--verify", "--deep", "--strict", "--verbose=2", app)


def parts(app: Path) -> list[Path]:
    """Everything that is signed, in this order: programs, libraries and nested bundles, the deepest first; `app` is the
    last."""
    inside = [path for path in app.rglob("*") if not path.is_symlink() and is_signed_alone(path)]
    return [*sorted(inside, key=lambda path: (-len(path.parts), str(path))), app]


def is_signed_alone(path: Path) -> bool:
    return path.suffix in NESTED_BUNDLES if path.is_dir() else path.is_file() and is_mach_o(path)


def is_program(app: Path, part: Path) -> bool:
    return part == app or part.parent == app / "Contents" / "MacOS"
