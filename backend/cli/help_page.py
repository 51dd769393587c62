"""The help page: groups of verbs, examples, and exit codes."""

from __future__ import annotations

from backend.cli.common import BUG, FINISHED, STOPPED, USER_ERROR

VERBS: dict[str, tuple[str, ...]] = {
    "Train": ("train", "resume", "change", "clone", "queue", "sweep", "demo"),
    "Before training": ("check", "import", "estimate", "rewards"),
    "What a run has learned": (
        *("runs", "doctor", "compare", "evaluate", "generate", "chat", "export", "validate", "track"),
    ),
    "This machine and this program": ("where", "machines", "hub", "bench", "replay", "rank", "serve"),
}
"""Title of a group → its verbs, in the order of the help page."""
MODULES = {
    **dict.fromkeys(("resume", "demo"), "train"),
    **dict.fromkeys(("change", "clone", "doctor", "compare", "track", "replay"), "runs"),
    **dict.fromkeys(("import", "validate"), "check"),
    **dict.fromkeys(("where", "machines", "bench", "serve"), "machine"),
    "generate": "chat",
}
"""Verb → the module of `backend.cli` that has its function, where the name differs."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("demo", "train config.yaml --set iters=200", "runs", "evaluate RUN", "export RUN --to lmstudio"),
    "train": (
        "train config.yaml",
        "train config.yaml --hosts two-macs.json",
        "train config.yaml --set learning_rate=1e-5 --set group_size=8 --name first-try",
    ),
    "sweep": ("sweep sweep.yaml --plan", "sweep sweep.yaml", "sweep NAME --resume"),
    "runs": ("runs", "runs --search 'lr>1e-5 tag:math -state:failed'"),
    "compare": ("compare RUN RUN", "compare RUN RUN RUN --markdown"),
    "queue": ("queue add config.yaml --set seed=1", "queue run", "queue move RUN 1"),
    "resume": ("resume RUN", "resume RUN --hosts none", "resume RUN --set iters=400"),
    "change": ("change RUN learning_rate=5e-6 beta=0.05",),
    "clone": (
        "clone RUN --step 200 --set learning_rate=5e-6 --start",
        "clone RUN --step best --cold --name second-stage",
    ),
    "check": ("check config.yaml",),
    "import": ("import trl.yaml --output mine.yaml", "import checkpoint-200 --model Qwen/Qwen3-0.6B"),
    "estimate": ("estimate config.yaml --prompt 512", "estimate config.yaml --hosts hosts.json"),
    "export": (
        "export RUN --to lmstudio",
        "export RUN --to folder --folder models --format 4bit --checkpoint best",
        "export RUN --to trl --folder cluster",
    ),
    "generate": ('generate RUN --prompt "What is 17 plus 25?" --both',),
    "doctor": ("doctor RUN", "doctor RUN --json"),
    "evaluate": ("evaluate RUN --n 8", "evaluate owner/model config.yaml --limit 100"),
    "replay": ("replay RUN", "replay RUN --speed 10 --name demonstration"),
    "track": ("track RUN --to csv", "track RUN --to wandb --upload"),
    "where": ("where", "where --remove settings"),
    "machines": ("machines hosts.json", "machines hosts.json --model owner/name --copy"),
}
"""Verb ("" for the program) → example arguments."""

CODES = {
    FINISHED: "done",
    USER_ERROR: "a mistake in settings, files or options, which a sentence names",
    STOPPED: "stopped before the end; what was reached is saved",
    BUG: "a fault of the program, with a traceback",
}


def epilog(verb: str = "") -> str | None:
    lines = [f"  {line}" for line in EXAMPLES.get(verb, ())]
    parts = ["Examples:", *lines] if lines else []
    if not verb:
        parts += ["", "Exit codes:", *(f"  {code}  {meaning}" for code, meaning in sorted(CODES.items()))]
    return "\n".join(parts) or None
