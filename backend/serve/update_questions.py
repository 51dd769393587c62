"""Handler of the update check: read the list of releases. It downloads no release, and sends nothing but the request itself."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from backend.serve.question_call import QuestionCall
from backend.utils.about import is_newer, our_version, release_in
from backend.utils.errors import UserError

TIMEOUT_S = 10.0
MOST_BYTES = 4 << 20


def newer_release(request: dict[str, Any], call: QuestionCall) -> dict[str, str] | None:
    """{feed: address} → {version, page} of a release that is newer than this program; None where there is none."""
    address = str(request["feed"])
    if not address.startswith(("https://", "http://127.0.0.1", "http://localhost")):
        raise UserError("updates", "The list of releases must have an address that begins with https://.")
    asked = urllib.request.Request(address, headers={"User-Agent": "grpo-studio", "Accept": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            content = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # URLError and time-outs are OSErrors
        reason = getattr(error, "reason", None) or error
        raise UserError("updates", f"The list of releases cannot be read: {reason}.") from None
    if len(content) > MOST_BYTES:
        raise UserError("updates", "The list of releases is too large to be one.")
    try:
        release = release_in(json.loads(content))
    except ValueError:
        raise UserError("updates", "The list of releases is not JSON.") from None
    return release.to_dict() if is_newer(release.version, our_version()) else None
