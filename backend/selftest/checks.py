"""A check of the self-test, its outcome, and the loop that runs one after the other."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import yaml

from backend.config import config as spec_config
from backend.engine import cpu, cpu_setup
from backend.engine.device import has_metal
from backend.engine.metal import MetalKernel
from backend.export.export_run import Export, export_run
from backend.rewards.bench import BenchSettings, RewardBench
from backend.rewards.functions import math_equality
from backend.runs.checkpoints import checkpoint
from backend.runs.checkpoints.checkpoint_writer import CheckpointWriter, snapshot
from backend.runs.run_folder import RunFolder
from backend.trainer.run_context import load_context
from backend.training.batch import Batch, pack
from backend.training.policy_forward import micro_batch_of
from backend.types import Group
from backend.utils.about import without_private
from backend.utils.child_process import ChildProcess
from backend.utils.command import backend_command, backend_environment, window_command
from backend.utils.places import RUNS_VARIABLE, resources

if TYPE_CHECKING:
    from backend.trainer.run_context import RunContext
    from backend.types import Group

# What the checks of the self-test share: a temporary folder, and what earlier checks have made for later ones.


@dataclass(slots=True)
class Workbench:
    """`folder` is empty at first, and deleted at the end. `parts` are the loaded demo, `groups` what it has sampled;
    both are set by the checks that make them."""

    folder: Path
    parts: RunContext | None = None
    groups: list[Group] = field(default_factory=list)

    @property
    def run(self) -> RunFolder:
        """The run whose step is learned and saved."""
        return RunFolder(self.folder / "runs" / "selftest")

    @property
    def loaded(self) -> RunContext:
        assert self.parts is not None, "the check that loads the demo comes first"
        return self.parts

    def settings(self) -> dict[str, Any]:
        """The demo's settings, for a single short step of one group."""
        from backend.config.config import read
        from backend.utils.places import demo_config

        changes: dict[str, Any] = {
            "iters": 1,
            "batch_size": 1,
            "group_size": 4,
            "num_iterations": 1,
            "max_completion_length": 16,
            "learning_rate": 2e-5,
            "lr_schedule": "constant",
            "lr_warmup_steps": 0,
            "steps_per_eval": 0,
            "val_batches": 1,
        }
        return read(demo_config()) | changes


State = Literal["ok", "failed", "skipped"]


class CheckFailed(Exception):
    """What was computed is not what it should be; the message is one sentence."""


class CheckSkipped(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """`run` tries one thing and returns a sentence about it. It raises CheckFailed, CheckSkipped, or whatever the tried
    code raises. `needs` names the checks whose results it uses."""

    name: str
    run: Callable[[Workbench], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a check ended. `traceback` is that of an exception that nobody expected, else ""; neither text names the user
    or the home."""

    name: str
    state: State
    sentence: str
    seconds: float
    traceback: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_checks(checks: Sequence[Check], workbench: Workbench) -> Iterator[CheckResult]:
    """Run the checks in order; one whose needs were not met is skipped, and a failure ends none of the others."""
    passed: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name not in passed]
        if missing:
            result = CheckResult(
                check.name, "skipped", f"It needs what did not work before: {', '.join(missing)}.", 0.0
            )
        else:
            result = _run(check, workbench)
        if result.state == "ok":
            passed.add(check.name)
        yield result


def _run(check: Check, workbench: Workbench) -> CheckResult:
    began = time.perf_counter()
    state: State
    state, trace = "ok", ""
    try:
        sentence = check.run(workbench)
    except CheckSkipped as skipped:
        state, sentence = "skipped", str(skipped)
    except CheckFailed as failed:
        state, sentence = "failed", str(failed)
    except Exception as error:
        state, trace = "failed", traceback.format_exc()
        sentence = f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - began, 2)
    private = (str(workbench.folder),)
    return CheckResult(
        check.name, state, without_private(sentence, private), seconds, without_private(trace, private).strip()
    )


SIDE = 32
LOGP_TOLERANCE = 0.02
"""Most nats by which sampler and learner may differ on a token, in float32: a wrong position or mask differs by far
more."""

SQUARES = MetalKernel("selftest_squares", ("x",), ("y",), "uint i = thread_position_in_grid.x; y[i] = x[i] * x[i];")


def check_device(_: Workbench) -> str:
    """Small whole numbers, which float32 multiplies exactly in any order; on Metal by kernels of mlx's metallib, and
    one of our own."""
    left, right = _whole_numbers(3), _whole_numbers(5)
    product: Any = (mx.array(left, mx.float32) @ mx.array(right, mx.float32)).tolist()
    expected = [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*right, strict=True)] for row in left
    ]
    if product != expected:
        raise CheckFailed("A product of two small matrices of whole numbers is wrong.")
    x = mx.arange(SIDE, dtype=mx.float32)
    compiled: Any = mx.compile(lambda x: x * 2 + 1)(x).tolist()
    if compiled != [2.0 * n + 1 for n in range(SIDE)]:
        raise CheckFailed("A compiled function gives wrong numbers.")
    done = f"{mx.default_device()} multiplies matrices and runs a compiled function"
    if has_metal():
        squares: Any = SQUARES([x], [((SIDE,), mx.float32)], {}, (SIDE, 1, 1), (SIDE, 1, 1))[0].tolist()
        if squares != [float(n * n) for n in range(SIDE)]:
            raise CheckFailed("A Metal kernel of our own gives wrong numbers.")
        done += " and a Metal kernel of our own"
    return f"{done}."


def check_blas(_: Workbench) -> str:
    """Nothing can fail here that would not fail elsewhere; what is slow on this machine is said."""
    return " ".join(filter(None, (cpu_setup.load_openblas(), cpu.check_compiler())))


def load_demo(bench: Workbench) -> str:
    bench.run.path.mkdir(parents=True, exist_ok=True)
    bench.run.config.write_text(yaml.safe_dump(bench.settings()), encoding="utf-8")
    bench.parts = load_context(spec_config.load(bench.run.config), lambda sentence: None)
    count = sum(array.size for array in bench.parts.policy.trainable().values())
    return f"The bundled model is loaded: {count:,} weights, {len(bench.parts.prompt_stream.take(1))} prompt ready."


def sample_group(bench: Workbench) -> str:
    """A group, whose log-probabilities are then computed again as the learner does it."""
    parts, config = bench.loaded, _config(bench)
    problems = parts.prompt_stream.take(1)
    began = time.perf_counter()
    groups = parts.rollout.sample(problems, config.group_size, parts.sampling, config.seed, 0)
    seconds = time.perf_counter() - began
    tokens = sum(len(completion.tokens) for completion in groups[0].completions)
    if len(groups[0].completions) != config.group_size or not tokens:
        raise CheckFailed(f"{config.group_size} completions were asked for, and {len(groups[0].completions)} came.")
    parts.scoring.score(groups, 1)
    batch = _batch(bench, groups)
    difference = float(mx.max(mx.abs(_logps(bench, batch) - batch.sampling_logp_BT) * batch.mask_BT).item())  # pyright: ignore
    if not difference <= LOGP_TOLERANCE:
        raise CheckFailed(f"Sampler and learner disagree about the probability of a token, by {difference:.3g} nats.")
    bench.groups = groups
    return (
        f"{config.group_size} completions sampled and scored, {tokens} tokens in {seconds:.1f} s; "
        f"sampler and learner differ by "
        f"{difference:.1g} nats at most."
    )


def learn_step(bench: Workbench) -> str:
    """One update towards the first completion, whatever its reward was. Towards one alone: what makes all of them
    likelier together depends on how the loss weights tokens, and rewards of a group may all be equal."""
    for number, completion in enumerate(bench.groups[0].completions):
        completion.advantage = 0.0 if number else 1.0
    batch = _batch(bench, bench.groups)
    before = _preference(bench, batch)
    metrics = bench.loaded.learner.learn(batch)
    after = _preference(bench, batch)
    if not all(math.isfinite(number) for number in (metrics["loss"], metrics["grad_norm"], before, after)):
        raise CheckFailed("Loss, gradient or log-probabilities are no finite numbers.")
    if not metrics["grad_norm"] > 0:
        raise CheckFailed("The gradient is zero.")
    if not after > before:
        raise CheckFailed("After the step, what was rewarded is no likelier than before.")
    return f"One step learned: what was rewarded is likelier than before, by {after - before:.2g} nats a token."


def write_checkpoint(bench: Workbench) -> str:
    """Weights and optimizer, written, read back and compared bit by bit."""
    parts, config = bench.loaded, _config(bench)
    taken = snapshot(checkpoint.TrainingState(step=1, updates=1), parts.policy, parts.learner, config)
    writer = CheckpointWriter(bench.run, config.keep_checkpoints)
    try:
        writer.begin(taken, ())
        writer.wait()
    finally:
        writer.close()
    saved = checkpoint.newest(bench.run)
    if saved is None:
        raise CheckFailed("The checkpoint that was written is not found again.")
    optimizer = taken.optimizer or {}  # None where a run saves only its model
    different = [*_different(saved.weights(), taken.weights), *_different(saved.optimizer(), optimizer)]
    if different:
        raise CheckFailed(f"Read back, {len(different)} arrays of the checkpoint differ, {different[0]} first.")
    arrays = len(taken.weights) + len(optimizer)
    return f"A checkpoint of {arrays} arrays, written and read back, is equal in every bit."


def export_model(bench: Workbench) -> str:
    """The checkpoint as a model folder, which export itself loads back and compares with what was trained."""
    request = Export("folder", "exported", bench.folder / "exports", checkpoint="last", overwrite=True)
    exported = export_run(bench.run, request)
    if not list(exported.path.glob("*.safetensors")):
        raise CheckFailed("The exported folder holds no weights.")
    return f"Exported, {exported.bytes / 1e6:.1f} MB. {' '.join(exported.sentences())}"


ENGINE_CHECKS = (
    Check("device", check_device),
    Check("BLAS and compiler", check_blas),
    Check("demo model", load_demo, ("device",)),
    Check("sampling", sample_group, ("demo model",)),
    Check("learning", learn_step, ("sampling",)),
    Check("checkpoint", write_checkpoint, ("demo model",)),
    Check("export", export_model, ("checkpoint",)),
)


def _whole_numbers(seed: int) -> list[list[int]]:
    return [[(seed * row + 7 * column) % 8 for column in range(SIDE)] for row in range(SIDE)]


def _config(bench: Workbench) -> spec_config.Config:
    return spec_config.load(bench.run.config)


def _batch(bench: Workbench, groups: Sequence[Group]) -> Batch:
    return pack(list(groups), pad_id=bench.loaded.policy.pad_id, mask_truncated_completions=False)


def _logps(bench: Workbench, batch: Batch) -> mx.array:
    """[B, T] log-probabilities of the completions' tokens in nats, by the learner's forward pass."""
    forward, policy = bench.loaded.learner.forward, bench.loaded.policy
    policy.model.eval()
    micro_batch = micro_batch_of(batch)
    return next(iter(forward.logps_without_gradient(policy.split_model, [micro_batch])))


def _preference(bench: Workbench, batch: Batch) -> float:
    """Mean log-probability of the tokens of the completions with an advantage, in nats: what a step is to increase."""
    weight_BT = batch.advantage_B[:, None] * batch.mask_BT
    return float((mx.sum(_logps(bench, batch) * weight_BT) / mx.sum(weight_BT)).item())  # pyright: ignore[reportArgumentType]


def _different(read: dict[str, mx.array], written: Mapping[str, Any]) -> list[str]:
    """Names of arrays that are missing, or differ in shape, type or any value."""
    names = sorted(read.keys() | written.keys())
    return [name for name in names if name not in read or name not in written or not _equal(read[name], written[name])]


def _equal(one: mx.array, other: Any) -> bool:
    return one.dtype == other.dtype and bool(mx.array_equal(one, other).item())


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
    """The process that the window asks, with a question that it answers without the engine and one that it must
    refuse."""
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
    """The window's own program draws every page, into pictures that must not be empty. Nothing appears on the
    screen."""
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
    """With a home of its own, so that the window neither shows nor changes anything of the user's; offscreen without a
    display."""
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
