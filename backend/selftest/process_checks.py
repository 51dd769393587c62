"""Checks of the processes that GRPO Studio starts: the warm process, the reward sandbox, the child for mathematics, the window."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from backend.rewards.bench import BenchSettings, RewardBench
from backend.rewards.functions import math_equality
from backend.selftest.check import Check, CheckFailed, CheckSkipped, Workbench
from backend.utils.child_process import ChildProcess
from backend.utils.command import backend_command, backend_environment, window_command
from backend.utils.places import RUNS_VARIABLE, resources

PATIENCE_S = 60.0
"""How long a process may take to answer: a disk that is cold, a machine that is busy."""
QUESTION = "model_facts"

REWARD_FILE = '''
from backend.rewards import register_reward_function

@register_reward_function("selftest_length")
def selftest_length(completions, **kwargs):
    """Characters of each completion."""
    return [float(len(text)) for text in completions]
'''


def ask_warm_process(bench: Workbench) -> str:
    """The process that the window asks, with a question that it answers without the engine and one that it must refuse."""
    child = ChildProcess(backend_command("serve"), grace_s=5.0, environment=_environment(bench))
    try:
        model = str(resources() / "demo" / "model")
        reply = child.request({"id": 1, "ask": QUESTION, "with": {"name": model}}, PATIENCE_S)
        if not (reply.get("answer") or {}).get("kind"):
            raise CheckFailed(f"Asked about the demo's model, it answered {json.dumps(reply)[:200]}.")
    finally:
        child.stop()
    return f"It started, and knows the demo's model as {reply['answer']['kind']}."


def score_in_sandbox(bench: Workbench) -> str:
    """A reward file of a user's, in the process that scores on the Rewards page."""
    file = bench.folder / "selftest_rewards.py"
    file.write_text(REWARD_FILE, encoding="utf-8")
    row = {"prompt": "", "answer": "", "completions": ["", "four"]}
    rewards = RewardBench()
    try:
        (result,) = rewards.score(BenchSettings(["selftest_length"], file=file, timeout_s=PATIENCE_S), [row])
    finally:
        rewards.close()
    if result.error is not None:
        raise CheckFailed(result.error["sentence"])
    if result.scores != [0.0, 4.0]:
        raise CheckFailed(f"Two completions of 0 and 4 characters were scored {result.scores}.")
    return "A reward file ran in it, and its scores are right."


def compare_mathematics(_: Workbench) -> str:
    """Answers that are equal only as mathematics, so that the child process has to decide."""
    verdicts = math_equality.correct([r"\boxed{\frac{3}{8}}", r"\boxed{\frac{3}{8}}"], ["0.375", "0.385"])
    if verdicts != [True, False]:
        raise CheckFailed(f"3/8 = 0.375 and 3/8 = 0.385 were judged {verdicts}.")
    return "It knows that 3/8 is 0.375 and not 0.385."


def draw_pages(bench: Workbench) -> str:
    """The window's own program draws every page, into pictures that must not be empty. Nothing appears on the screen."""
    command = window_command("--draw-pages", str(bench.folder / "pages.json"))
    if not Path(command[0]).exists():
        raise CheckSkipped("The window's program is not installed beside the trainer's.")
    done = subprocess.run(
        command,
        env=_window_environment(bench),
        cwd=bench.folder,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    try:
        pages: list[dict[str, Any]] = json.loads((bench.folder / "pages.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CheckFailed(f"The window ended with exit code {done.returncode}: {last}") from None
    faults = [f"{page['title']}: {page['fault']}" for page in pages if page["fault"]]
    if faults or not pages:
        raise CheckFailed(" ".join(faults) or "The window has no pages.")
    return f"{len(pages)} pages drawn ({pages[0]['platform']}): {', '.join(page['title'] for page in pages)}."


PROCESS_CHECKS = (
    Check("warm process", ask_warm_process),
    Check("reward sandbox", score_in_sandbox),
    Check("mathematics", compare_mathematics),
    Check("window", draw_pages),
)


def _environment(bench: Workbench) -> dict[str, str]:
    """A backend process's, with runs in the workbench and no network."""
    return backend_environment() | {RUNS_VARIABLE: str(bench.folder / "runs"), "HF_HUB_OFFLINE": "1"}


def _window_environment(bench: Workbench) -> dict[str, str]:
    """With a home of its own, so that the window neither shows nor changes anything of the user's; offscreen without a display."""
    environment = _environment(bench)
    home = bench.folder / "home"
    home.mkdir(exist_ok=True)
    if sys.platform.startswith("linux"):
        authority = Path.home() / ".Xauthority"  # X looks for it in the home folder, which is another one now
        if authority.exists():
            environment.setdefault("XAUTHORITY", str(authority))
        if not any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")):
            environment["QT_QPA_PLATFORM"] = "offscreen"
    for name in (
        "XDG_DATA_HOME",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
    ):
        environment.pop(name, None)
    return environment | {"HOME": str(home), "GRPO_STUDIO_PREFS": str(home / "prefs"), "PYTHONFAULTHANDLER": "1"}
