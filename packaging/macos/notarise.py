"""Have Apple check an app or a disk image, and attach its answer, so that it opens on a Mac without a network as well.

The key itself is never in a command or a log: notarytool is given a profile of the keychain, or the path of a key file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from commands import ToolFailed, run

PROFILE, KEY, KEY_ID, ISSUER = "NOTARY_PROFILE", "NOTARY_KEY", "NOTARY_KEY_ID", "NOTARY_ISSUER"
"""Environment variables: a profile that `notarytool store-credentials` made, or an App Store Connect key's file, id and
issuer."""


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
