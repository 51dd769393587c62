#!/usr/bin/env python3
"""From the frozen app to what people download: sign, notarise, staple, put it into a disk image, and write its
checksum.

    python packaging/macos/release.py "dist/GRPO Studio.app" [--out dist]

On a Mac. SIGNING_IDENTITY names a certificate of the keychain ("Developer ID Application: …"); NOTARY_PROFILE, or
NOTARY_KEY with NOTARY_KEY_ID and NOTARY_ISSUER, says who submits to Apple. Without them the app is signed ad hoc, and
the output says that macOS will ask people to allow it by hand. CONTRIBUTING.md has the whole story.
"""

import argparse
import hashlib
import json
import os
import plistlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from check_bundle import builders_paths, is_mach_o, problems  # noqa: E402
from info_plist import ICON, NAME  # noqa: E402

IDENTITY = "SIGNING_IDENTITY"
PROFILE, KEY, KEY_ID, ISSUER = "NOTARY_PROFILE", "NOTARY_KEY", "NOTARY_KEY_ID", "NOTARY_ISSUER"
"""Environment variables: a profile that `notarytool store-credentials` made, or an App Store Connect key's file, id and
issuer."""
AD_HOC = "-"
"""The identity of a signature without a certificate: Apple silicon runs no code without one, and it vouches for
nobody."""
ENTITLEMENTS = FOLDER / "entitlements.plist"
NESTED_BUNDLES = (".framework", ".app", ".bundle", ".xpc", ".plugin")
UNSIGNED = (
    "Not signed by a developer: SIGNING_IDENTITY is not set. On other Macs this app opens only after "
    "System Settings > Privacy & "
    "Security > Open Anyway."
)
UNNOTARISED = (
    "Not notarised: neither NOTARY_PROFILE nor NOTARY_KEY is set. macOS will refuse to open this app on other Macs."
)


class ToolFailed(Exception):
    """A tool of Apple's ended with an error; the message is for people."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Sign, notarise and pack the frozen app.")
    parser.add_argument("app", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="the folder for the disk image")
    options = parser.parse_args()
    try:
        print(release(options.app, options.out))
    except ToolFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def release(app: Path, out: Path) -> Path:
    """The finished disk image. Raises ToolFailed when the bundle is not sound or a step fails."""
    found = list(problems(app, builders_paths()))
    if found:
        raise ToolFailed("The bundle is not fit for release:\n" + "\n".join(found))
    identity, who = os.environ.get(IDENTITY, AD_HOC), credentials()
    sign(app, identity)
    if identity == AD_HOC:
        print(UNSIGNED)
    elif not who:
        print(UNNOTARISED)
    is_notarised = identity != AD_HOC and bool(who)
    if is_notarised:
        notarise(app, who)  # before it is packed, so that the copy in Applications carries its own ticket
        run("spctl", "--assess", "--type", "execute", "--verbose=2", app)
    image = disk_image(app, out)
    if identity != AD_HOC:
        run("codesign", "--force", "--sign", identity, "--timestamp", image)
    if is_notarised:
        notarise(image, who)
    write_checksum(image)
    return image


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
        is_program = part == app or part.parent == app / "Contents" / "MacOS"
        rights = ["--entitlements", str(ENTITLEMENTS)] if is_program and identity != AD_HOC else []
        run("codesign", *options, *rights, part)
    run("codesign", "--verify", "--deep", "--strict", "--verbose=2", app)


def parts(app: Path) -> list[Path]:
    """Everything that is signed, in this order: programs, libraries and nested bundles, the deepest first; `app` is the
    last."""
    inside: list[Path] = []
    for path in app.rglob("*"):
        is_part = path.suffix in NESTED_BUNDLES if path.is_dir() else path.is_file() and is_mach_o(path)
        if is_part and not path.is_symlink():
            inside.append(path)
    return [*sorted(inside, key=lambda path: (-len(path.parts), str(path))), app]


def credentials(environment: Mapping[str, str] = os.environ) -> list[str]:
    """notarytool's options that say who we are; empty where nothing is set. Raises ToolFailed for half of a key."""
    if environment.get(PROFILE):
        return ["--keychain-profile", environment[PROFILE]]
    given = [environment.get(name, "") for name in (KEY, KEY_ID, ISSUER)]
    if not any(given):
        return []
    missing = [name for name, value in zip((KEY, KEY_ID, ISSUER), given, strict=True) if not value]
    if missing:
        raise ToolFailed(
            f"To notarise with a key, {KEY}, {KEY_ID} and {ISSUER} must all be set; missing: {', '.join(missing)}."
        )
    return ["--key", given[0], "--key-id", given[1], "--issuer", given[2]]


def notarise(path: Path, who: list[str]) -> None:
    """Submit an .app or .dmg, wait for the verdict, and staple it. Raises ToolFailed with Apple's reasons when it is
    refused."""
    with tempfile.TemporaryDirectory() as folder:
        upload = path
        if path.suffix == ".app":  # notarytool takes single files
            upload = Path(folder) / f"{path.stem}.zip"
            run("ditto", "-c", "-k", "--keepParent", path, upload)
        verdict = json.loads(run("xcrun", "notarytool", "submit", upload, *who, "--wait", "--output-format", "json"))
    if verdict.get("status") != "Accepted":
        reasons = run("xcrun", "notarytool", "log", verdict["id"], *who)
        raise ToolFailed(f"Apple refused {path.name} ({verdict.get('status')}):\n{reasons}")
    run("xcrun", "stapler", "staple", path)
    run("xcrun", "stapler", "validate", path)


def disk_image(app: Path, out: Path) -> Path:
    """Pack the app into a compressed disk image whose window shows it beside a link to Applications."""
    import dmgbuild  # only where it is needed: it installs on any system, and works on a Mac alone

    version = plistlib.loads((app / "Contents" / "Info.plist").read_bytes())["CFBundleShortVersionString"]
    out.mkdir(parents=True, exist_ok=True)
    image = out / f"{NAME.replace(' ', '-')}-{version}-arm64.dmg"
    image.unlink(missing_ok=True)
    dmgbuild.build_dmg(str(image), NAME, settings=layout(app))
    return image


def layout(app: Path) -> dict[str, Any]:
    """dmgbuild's settings. Places are the middles of icons, in points from the top left of the window; the arrow of the
    built-in background, 640 × 280, points from one to the other."""
    return {
        "files": [str(app)],
        "symlinks": {"Applications": "/Applications"},
        "icon_locations": {app.name: (140, 120), "Applications": (500, 120)},
        "icon": str(app / "Contents" / "Resources" / ICON),
        "background": "builtin-arrow",
        "window_rect": ((200, 200), (640, 280)),
        "default_view": "icon-view",
        "icon_size": 128,
        "text_size": 13,
        "format": "ULFO",  # LZFSE, which every macOS that we run on reads
    }


def write_checksum(file: Path) -> None:
    """FILE.sha256 beside the file, in the form that `shasum -c` reads."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n", encoding="utf-8")


def run(*command: str | Path) -> str:
    """Run a command and return its stdout. Raises ToolFailed when it fails or is not there."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise ToolFailed(f"{words[0]} was not found; it comes with Xcode's command line tools on a Mac.") from None
    if done.returncode:
        raise ToolFailed(
            f"{words[0]} failed with exit code {done.returncode}:\n{done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
