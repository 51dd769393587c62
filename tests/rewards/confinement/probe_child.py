"""A confined child that runs snippets of Python sent to it, a JSON line each, and says how each ended.

Arguments: its folder, and "network" or "no network". First line out: its Confinement; then for every {"code", "names"}
either
{"value": what the snippet left in `value`} or {"error": the exception's type, "errno": …, "text": …}.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from backend.rewards.confinement.confine import confine, secret_places


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    confinement = confine([Path(sys.argv[1])], sys.argv[2] == "network", secret_places())
    about = {**asdict(confinement), "descriptors": open_descriptors()}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(outcome(request["code"], request["names"])), file=answers, flush=True)


def open_descriptors() -> list[int]:
    """Those of this process, as far as Linux tells them."""
    try:
        names = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []
    return sorted(name for name in names if Path(f"/proc/self/fd/{name}").exists())


def outcome(code: str, names: dict[str, object]) -> dict[str, object]:
    scope: dict[str, object] = {**names, "value": None}
    try:
        exec(code, scope)
    except BaseException as error:
        return {"error": type(error).__name__, "errno": getattr(error, "errno", None), "text": str(error)}
    return {"value": scope["value"] if isinstance(scope["value"], int | float | str | list) else None}


if __name__ == "__main__":
    main()
