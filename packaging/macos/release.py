#!/usr/bin/env python3
"""From the frozen app to what people download: sign, notarise, staple, put it into a disk image, and write its
checksum.

    python packaging/macos/release.py "dist/GRPO Studio.app" [--out dist]

On a Mac. SIGNING_IDENTITY names a certificate of the keychain ("Developer ID Application: …"); NOTARY_PROFILE, or
NOTARY_KEY with NOTARY_KEY_ID and NOTARY_ISSUER, says who submits to Apple. Without them the app is signed ad hoc, and
the output says that macOS will ask people to allow it by hand. CONTRIBUTING.md has the whole story.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import plistlib
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from check_bundle import builders_paths, problems  # noqa: E402
from commands import ToolFailed, run  # noqa: E402
from info_plist import ICON, NAME  # noqa: E402
from notarise import credentials, notarise  # noqa: E402
from sign import AD_HOC, sign  # noqa: E402

IDENTITY = "SIGNING_IDENTITY"
UNSIGNED = (
    "Not signed by a developer: SIGNING_IDENTITY is not set. On other Macs this app opens only after "
    "System Settings > Privacy & "
    "Security > Open Anyway."
)
UNNOTARISED = (
    "Not notarised: neither NOTARY_PROFILE nor NOTARY_KEY is set. macOS will refuse to open this app on other Macs."
)


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


if __name__ == "__main__":
    sys.exit(main())
