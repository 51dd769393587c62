"""The help page: groups of verbs, examples, and exit codes."""

from backend.cli.common import BUG, FINISHED, STOPPED, USER_ERROR
from backend.utils.documents import read_resource

VERBS: dict[str, tuple[str, ...]] = {  # title of a group → its verbs, in the order of the help page
    "Train": ("train", "job", "resume", "change", "clone", "queue", "sweep", "demo"),
    "Before training": ("check", "import", "estimate", "rewards"),
    "What a run has learned": (
        *("runs", "doctor", "compare", "evaluate", "generate", "chat", "endpoint", "sessions"),
        *("export", "validate", "track"),
    ),
    "This machine and this program": ("where", "machines", "hub", "bench", "replay", "rank", "serve", "mcp"),
}
MODULES = {  # verb → the module of `backend.cli` that has its function, where the name differs
    **dict.fromkeys(("resume", "job", "demo"), "train"),
    **dict.fromkeys(("change", "clone", "doctor", "compare", "track", "replay"), "runs"),
    **dict.fromkeys(("estimate", "import", "validate"), "check"),
    **dict.fromkeys(("where", "machines", "bench", "serve"), "machine"),
    "generate": "chat",
    "sessions": "endpoint",
    "hub": "export",
}

EXAMPLES: dict[str, list[str]] = read_resource("cli_examples.yaml")  # verb ("" for the program) → example arguments

CODES = {
    FINISHED: "done",
    BUG: "a fault of the program, with a traceback",
    USER_ERROR: "a mistake in settings, files or options, which a sentence names",
    STOPPED: "stopped before the end; what was reached is saved",
    "128 + n": "ended by signal n with nothing to save; 141: its output's reader has gone",
}


def epilog(verb: str = "") -> str | None:
    lines = [f"  {line}" for line in EXAMPLES.get(verb, ())]
    parts = ["Examples:", *lines] if lines else []
    if not verb:
        parts += ["", "Exit codes:", *(f"  {code}  {meaning}" for code, meaning in CODES.items())]
    return "\n".join(parts) or None
