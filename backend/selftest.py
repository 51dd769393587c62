"""The self-test, one check of each part. Its report, which a user can send, names neither the user nor a path."""

import json
import platform
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import yaml

from backend.bench.device import this_machine
from backend.config.config import Config, load, read
from backend.engine import cpu, cpu_setup
from backend.engine.device import has_metal
from backend.engine.metal import MetalKernel
from backend.export.export_run import Export, export_run
from backend.rewards.bench import RewardBench, group_of
from backend.rewards.functions import math_equality
from backend.runs.checkpoint import arrays_of
from backend.runs.events import is_number, read_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints
from backend.trainer.control import handlers_restored
from backend.trainer.run_process import train
from backend.trainer.telemetry import versions
from backend.utils.about import without_private
from backend.utils.child_process import ChildProcess
from backend.utils.command import backend_command, backend_environment, is_bundled, window_command
from backend.utils.disk import save_as
from backend.utils.places import RUNS_VARIABLE, demo_config, project_root, resources

SIDE = 32
GAP = "sampling/logp_gap/max"
LOGP_TOLERANCE = 0.02  # most nats between sampler and learner in float32; a wrong position or mask differs far more
PATIENCE_S = 60.0  # seconds for a process to answer, on a cold disk or a busy machine
SQUARES = MetalKernel("selftest_squares", ("x",), ("y",), "uint i = thread_position_in_grid.x; y[i] = x[i] * x[i];")
REWARD_FILE = '''
from backend.rewards import register_reward_function

@register_reward_function("selftest_length")
def selftest_length(completions, **kwargs):
    """Characters of each completion."""
    return [float(len(text)) for text in completions]
'''
TWO_STEPS: dict[str, Any] = {  # changes to the demo's settings for a short run
    "iters": 2,
    "batch_size": 2,
    "steps_per_eval": 0,
    "save_every": 1,
    "fuse": False,
    "report_to": ["none"],
}


class CheckFailed(Exception):
    """A wrong result: a sentence, and a traceback where there is one."""

    def __init__(self, sentence: str, traceback: str = "") -> None:
        super().__init__(sentence)
        self.traceback = traceback


class CheckSkipped(Exception):
    """The check cannot run here; the message says why."""


def require(is_right: bool, sentence: str) -> None:
    if not is_right:
        raise CheckFailed(sentence)


class Workbench:
    """An empty `folder`, and the run that earlier checks made for later ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunFolder(folder / "runs" / "selftest")

    def settings(self) -> dict[str, Any]:
        return read(demo_config()) | TWO_STEPS

    def environment(self) -> dict[str, str]:
        return backend_environment() | {RUNS_VARIABLE: str(self.folder / "runs"), "HF_HUB_OFFLINE": "1"}


def check_device(_: Workbench) -> str:
    """Small whole numbers, which float32 multiplies exactly in any order."""
    i, j = np.indices((SIDE, SIDE))
    left, right = (3 * i + 7 * j) % 8, (5 * i + 7 * j) % 8
    product = np.array(mx.array(left, mx.float32) @ mx.array(right, mx.float32))
    require(np.array_equal(product, left @ right), "A product of two small matrices of whole numbers is wrong.")
    x = mx.arange(SIDE, dtype=mx.float32)
    compiled: Any = mx.compile(lambda x: x * 2 + 1)(x).tolist()
    require(compiled == [2.0 * n + 1 for n in range(SIDE)], "A compiled function gives wrong numbers.")
    done = f"{mx.default_device()} multiplies matrices and runs a compiled function"
    if has_metal():
        squares: Any = SQUARES([x], [((SIDE,), mx.float32)], {}, (SIDE, 1, 1), (SIDE, 1, 1))[0].tolist()
        require(squares == [float(n * n) for n in range(SIDE)], "A Metal kernel of our own gives wrong numbers.")
        done += " and a Metal kernel of our own"
    return f"{done}."


def check_blas(_: Workbench) -> str:
    return " ".join(filter(None, (cpu_setup.load_openblas(), cpu.check_compiler())))


def train_demo(bench: Workbench) -> str:
    """Two steps of a run like any other: load, sample, score, learn, save; and both checkpoints read back."""
    bench.run.path.mkdir(parents=True, exist_ok=True)
    bench.run.config.write_text(yaml.safe_dump(bench.settings()), encoding="utf-8")
    with handlers_restored():
        ending = train(load(bench.run.config), bench.run, command="--selftest")
    if ending.kind == "stopped":  # Ctrl-C
        raise KeyboardInterrupt
    if ending.kind != "finished":
        raise CheckFailed(ending.sentence, ending.traceback)
    steps = [event["metrics"] for event in read_events(bench.run.events) if event["kind"] == "step"]
    finite = all(is_number(step[name]) for step in steps for name in ("loss", "grad_norm", GAP))
    require(finite, "Loss, gradient or log-probabilities are no finite numbers.")
    require(steps[0]["grad_norm"] > 0, "The gradient is zero.")
    gap = max(step[GAP] for step in steps)
    require(gap <= LOGP_TOLERANCE, f"Sampler and learner disagree about the probability of a token, by {gap:.3g} nats.")
    first, last = (arrays_of(saved, "weights") for saved in all_checkpoints(bench.run))
    is_changed = any(not mx.array_equal(array, last[name]).item() for name, array in first.items())
    require(is_changed, "The second step has changed no weight.")
    count, seconds = sum(array.size for array in last.values()), sum(step["time/step"] for step in steps)
    learned = f"{len(steps)} steps on {count:,} weights in {seconds:.1f} s, saved and read back"
    return f"{learned}; sampler and learner differ by {gap:.1g} nats at most."


def export_model(bench: Workbench) -> str:
    """The checkpoint as a model folder, which the export loads back and compares with the trained model."""
    request = Export("folder", "exported", bench.folder / "exports", checkpoint="last", overwrite=True)
    exported = export_run(bench.run, request)
    require(any(exported.path.glob("*.safetensors")), "The exported folder holds no weights.")
    return f"Exported, {exported.bytes / 1e6:.1f} MB. {' '.join(exported.sentences())}"


def ask_warm_process(bench: Workbench) -> str:
    child = ChildProcess(backend_command("serve"), grace_s=5.0, environment=bench.environment())
    try:
        question = {"id": 1, "ask": "model_facts", "with": {"name": str(resources() / "demo" / "model")}}
        reply = child.request(question, PATIENCE_S)
        kind = (reply.get("answer") or {}).get("kind")
        require(bool(kind), f"Asked about the demo's model, it answered {json.dumps(reply)[:200]}.")
    finally:
        child.stop()
    return f"It started, and knows the demo's model as {kind}."


def score_in_sandbox(bench: Workbench) -> str:
    file = bench.folder / "selftest_rewards.py"
    file.write_text(REWARD_FILE, encoding="utf-8")
    group = group_of({"prompt": "", "answer": "", "completions": ["", "four"]}, 0, "Row 1")
    with closing(RewardBench()) as rewards:
        about = {"reward_functions_file": str(file), "reward_timeout": PATIENCE_S}
        (result,) = rewards.score(Config(reward_functions=["selftest_length"], **about), [group])
    if result.error is not None:
        raise CheckFailed(result.error["sentence"])
    require(result.given == [0.0, 4.0], f"Two completions of 0 and 4 characters were scored {result.given}.")
    return "A reward file ran in it, and its scores are right."


def compare_mathematics(_: Workbench) -> str:
    verdicts = math_equality.correct([r"\boxed{\frac{3}{8}}", r"\boxed{\frac{3}{8}}"], ["0.375", "0.385"])
    require(verdicts == [True, False], f"3/8 = 0.375 and 3/8 = 0.385 were judged {verdicts}.")
    return "It knows that 3/8 is 0.375 and not 0.385."


def draw_pages(bench: Workbench) -> str:
    """The window draws every page off screen, with a home folder of its own."""
    command = window_command("--draw-pages", str(bench.folder / "pages.json"))
    if not Path(command[0]).exists():
        raise CheckSkipped("The window's program is not installed beside the trainer's.")
    home = bench.folder / "home"
    home.mkdir(exist_ok=True)
    of_user = ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    environment = {name: value for name, value in bench.environment().items() if name not in of_user}
    if sys.platform.startswith("linux"):
        if (authority := Path.home() / ".Xauthority").exists():  # X looks for it in the home folder
            environment.setdefault("XAUTHORITY", str(authority))
        if not environment.keys() & {"DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"}:
            environment["QT_QPA_PLATFORM"] = "offscreen"
    environment |= {"HOME": str(home), "GRPO_STUDIO_PREFS": str(home / "prefs"), "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(
        command, env=environment, cwd=bench.folder, capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    try:
        pages: list[dict[str, Any]] = json.loads((bench.folder / "pages.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CheckFailed(f"The window ended with exit code {done.returncode}: {last}") from None
    faults = [f"{page['title']}: {page['fault']}" for page in pages if page["fault"]]
    require(bool(pages) and not faults, " ".join(faults) or "The window has no pages.")
    return f"{len(pages)} pages drawn ({pages[0]['platform']}): {', '.join(page['title'] for page in pages)}."


@dataclass(frozen=True, slots=True)
class Check:
    """`run` returns a sentence, or raises CheckFailed, CheckSkipped or any error. `needs`: checks that come before."""

    name: str
    run: Callable[[Workbench], str]
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("device", check_device),
    Check("BLAS and compiler", check_blas),
    Check("training", train_demo, ("device",)),
    Check("export", export_model, ("training",)),
    Check("warm process", ask_warm_process),
    Check("reward sandbox", score_in_sandbox),
    Check("mathematics", compare_mathematics),
    Check("window", draw_pages),
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of a check; `state` is ok, failed or skipped."""

    name: str
    state: str
    sentence: str
    seconds: float = 0.0
    traceback: str = ""

    def line(self) -> str:
        head = f"{'FAILED' if self.state == 'failed' else self.state:8}{self.name:20}{self.seconds:6.1f} s  "
        return textwrap.fill(self.sentence, 110, initial_indent=head, subsequent_indent=" " * len(head))


def run_checks(checks: Sequence[Check], bench: Workbench) -> Iterator[CheckResult]:
    passed: set[str] = set()
    for check in checks:
        if missing := [name for name in check.needs if name not in passed]:
            yield CheckResult(check.name, "skipped", f"It needs what did not work before: {', '.join(missing)}.")
            continue
        began, state, trace = time.perf_counter(), "failed", ""
        try:
            sentence, state = check.run(bench), "ok"
            passed.add(check.name)
        except CheckSkipped as skipped:
            sentence, state = str(skipped), "skipped"
        except CheckFailed as failed:
            sentence, trace = str(failed), failed.traceback
        except Exception as error:
            sentence, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        seconds, private = round(time.perf_counter() - began, 2), (str(bench.folder),)
        sentence, trace = without_private(sentence, private), without_private(trace, private).strip()
        yield CheckResult(check.name, state, sentence, seconds, trace)


def summary(results: Sequence[CheckResult]) -> str:
    failed = [result.name for result in results if result.state == "failed"]
    skipped = sum(result.state == "skipped" for result in results)
    left_out = f", {skipped} skipped" if skipped else ""
    if failed:
        return f"{len(failed)} of {len(results)} checks failed{left_out}: {', '.join(failed)}."
    seconds = sum(result.seconds for result in results)
    return f"Everything works: {len(results) - skipped} checks in {seconds:.0f} s{left_out}."


def write_report(results: Sequence[CheckResult], path: Path) -> Path:
    """Write the report as JSON to `path` and as text beside it; returns the text's path. Raises DiskError."""
    installed = "frozen app" if is_bundled() else "wheel" if (project_root() / "__init__.py").exists() else "checkout"
    known = versions() | {"installed as": installed, "platform": platform.platform(), **this_machine()}
    about = {name: without_private(value) if isinstance(value, str) else value for name, value in known.items()}
    passed = all(result.state != "failed" for result in results)
    checks = [asdict(result) for result in results]
    whole = {"about": about, "passed": passed, "summary": summary(results), "checks": checks}
    save_as(path, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    lines = "\n".join(f"{name}: {value}" for name, value in about.items())
    traces = [f"{result.name}\n{result.traceback}" for result in results if result.traceback]
    parts = ["GRPO Studio self-test", lines, "\n".join(result.line() for result in results), summary(results), *traces]
    text = path.with_suffix(".txt")
    save_as(text, "\n\n".join(parts) + "\n")
    return text
