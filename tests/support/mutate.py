"""Mutation testing: change one expression of the program at a time, run the tests of that part, and report what no test notices.

    python -m tests.support.mutate --count 66 --seed 1            66 mutations, spread evenly over MODULES
    python -m tests.support.mutate --module backend/training/losses.py --count 20
    … --list                                                      only print them
    … --module backend/training/batch.py --replace OLD NEW        one mutation by hand: the only OLD in the file becomes NEW

Each mutation is made in a copy of the tree, never in the checkout. A mutation is *caught* when a test fails or the run exceeds its
time limit, and *survives* when all tests of its row of MODULES pass. Some survivors are equivalent programs (a tolerance, a default
that nothing reads); the others name a missing test. Not part of `make test`; `make mutations` runs it.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]

MODULES: dict[str, tuple[str, ...]] = {
    "backend/training/losses.py": (
        "tests/training/test_losses.py",
        "tests/training/test_loss_family.py",
        "tests/training",
    ),
    "backend/training/advantages.py": (
        "tests/training/test_advantages.py",
        "tests/run/test_stages.py",
        "tests/rewards",
    ),
    "backend/training/batch.py": ("tests/training/test_batch.py", "tests/training/test_learner.py", "tests/training"),
    "backend/training/grpo.py": ("tests/training/test_algorithm.py", "tests/training", "tests/run/test_trainer.py"),
    "backend/training/learner.py": ("tests/training/test_learner.py", "tests/training", "tests/run/test_trainer.py"),
    "backend/training/microbatch.py": ("tests/training/test_microbatch.py", "tests/training"),
    "backend/training/shared_prefix.py": ("tests/training/test_shared_prefix.py", "tests/training"),
    "backend/training/importance_sampling.py": ("tests/training/test_losses.py", "tests/training"),
    "backend/generation/sampler.py": ("tests/generation/test_sampler.py", "tests/generation"),
    "backend/generation/filters.py": ("tests/generation/test_filters.py",),
    "backend/generation/scheduler.py": ("tests/generation/test_rollout.py", "tests/generation"),
    "backend/generation/outputs.py": ("tests/generation/test_rollout.py", "tests/generation"),
    "backend/engine/lm_head.py": ("tests/engine/test_lm_head.py", "tests/engine", "tests/training/test_learner.py"),
    "backend/engine/attention.py": ("tests/engine/test_attention.py", "tests/engine/test_forward.py", "tests/engine"),
    "backend/training/not_finite.py": ("tests/run/test_not_finite.py", "tests/training"),
    "backend/run/not_finite.py": ("tests/run/test_not_finite.py",),
    "backend/run/checkpoints/checkpoint.py": (
        "tests/run/test_checkpoint_folder.py",
        "tests/run/test_damaged_checkpoints.py",
        "tests/run/test_trainer.py",
        "tests/run",
    ),
    "backend/run/checkpoints/checkpoint_integrity.py": ("tests/run/test_damaged_checkpoints.py",),
    "backend/run/checkpoints/checkpoint_writer.py": (
        "tests/run/test_checkpoint_writer.py",
        "tests/run/test_full_disk.py",
        "tests/run",
    ),
    "backend/run/checkpoints/run_saver.py": ("tests/run/test_checkpoint_writer.py", "tests/run/test_trainer.py"),
    "backend/run/checkpoints/cut_back.py": (
        "tests/run/test_damaged_checkpoints.py",
        "tests/run/test_garbage_in_diaries.py",
    ),
    "backend/run/room_for_saving.py": ("tests/run/test_full_disk.py",),
    "backend/spec/events.py": ("tests/spec/test_events.py", "tests/run/test_full_disk.py", "tests/spec"),
    "backend/spec/whole_file.py": ("tests/spec/test_disk_faults.py", "tests/run/test_full_disk.py"),
    "backend/run/evaluation/evaluate.py": ("tests/run/test_evaluate.py", "tests/run"),
    "backend/run/scoring_stages.py": ("tests/run/test_stages.py", "tests/run"),
    "backend/rewards/runner/score.py": (
        "tests/rewards/test_reward_calls.py",
        "tests/rewards",
        "tests/run/test_stages.py",
    ),
    "backend/rewards/weights.py": ("tests/rewards/test_reward_weights.py", "tests/rewards", "tests/run/test_stages.py"),
    "backend/rewards/functions/r1.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/answers.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/arithmetic.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/formats.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/lengths.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/math_equality.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/texts.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/runner/extra_logs.py": ("tests/rewards/test_trl_rewards.py", "tests/rewards"),
    "backend/rewards/sandbox/answers.py": ("tests/rewards/test_isolation.py", "tests/rewards"),
    "backend/rewards/runner/returned_scores.py": ("tests/rewards/test_reward_calls.py", "tests/rewards"),
    "backend/spec/checks.py": (
        "tests/spec/test_config.py",
        "tests/training/test_loss_family.py",
        "tests/run/test_stages.py",
        "tests/spec",
        "tests/cli",
    ),
    "backend/spec/config.py": (
        "tests/spec/test_config.py",
        "tests/training/test_loss_family.py",
        "tests/spec",
        "tests/cli",
    ),
    "backend/spec/other_programs/translation.py": ("tests/spec/test_config.py", "tests/spec"),
}
"""What is mutated, and the tests that should notice, the likeliest first; a folder stands for its remaining files."""

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "sum": "max", "any": "all", "all": "any",
    "argmax": "argmin", "floor": "ceil", "logsumexp": "max", "isnan": "isinf",
}  # fmt: skip
TIME_LIMIT_S = 300.0
NO_BEHAVIOUR = {"slots", "frozen", "kw_only", "repr", "strict", "init", "compare"}
"""Keyword arguments of `dataclass`, `field` and `zip` that do not change what a correct program computes."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Characters `start`–`end` of `module` replaced by `new`."""

    module: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        """With its line, the part that changes marked: `0 → 1` alone names none of the zeros of a line."""
        source = (ROOT / self.module).read_bytes()
        before = source[source.rfind(b"\n", 0, self.start) + 1 : self.start].decode().lstrip()
        after = source[self.end :].split(b"\n", 1)[0].decode()
        return f"{self.module}:{self.line}  {' '.join(f'{before}⟦{self.old}⟧{after}'.split())}  →  {' '.join(self.new.split())}"


def mutations(module: str) -> list[Mutation]:
    """Every mutation of one file, in the order of its lines."""
    source = (ROOT / module).read_text("utf-8")
    tree = ast.parse(source)
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line.encode()))
    data = source.encode()

    def byte_range(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset

    changes = []
    for node in _expressions(tree):
        start, end = byte_range(node)
        for new in _changes(node, lambda part: data[slice(*byte_range(part))].decode()):
            mutation = Mutation(module, node.lineno, start, end, data[start:end].decode(), new)
            if _compiles(mutation.applied_to(data)):
                changes.append(mutation)
    return sorted(changes, key=lambda mutation: mutation.start)


def _expressions(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions that run: annotations, docstrings, f-strings and `NO_BEHAVIOUR` are left out."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and (node.arg in NO_BEHAVIOUR or _is_last_axis(node)):
            skipped.update(id(part) for part in ast.walk(node.value))
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                skipped.update(id(part) for part in ast.walk(annotation))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in ast.walk(node))
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.expr) and id(node) not in skipped)


def _is_last_axis(node: ast.keyword) -> bool:
    """`axis=-1`: 1 in its place is the same axis of a matrix and an error elsewhere."""
    return node.arg == "axis" and isinstance(node.value, ast.UnaryOp)


def _compiles(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _changes(node: ast.expr, text) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield f"({text(node.left)}) {COMPARISONS[type(node.ops[0])]} ({text(node.comparators[0])})"
    elif (
        isinstance(node, ast.BinOp)
        and type(node.op) in ARITHMETIC
        and not isinstance(node.left, ast.Constant | ast.JoinedStr)
        and not isinstance(node.right, ast.JoinedStr)
        and not (isinstance(node.right, ast.Constant) and isinstance(node.right.value, str))
    ):
        yield f"({text(node.left)}) {ARITHMETIC[type(node.op)]} ({text(node.right)})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + word.join(f"({text(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({text(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({text(node.orelse)} if {text(node.test)} else {text(node.body)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield str(node.value + 1)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in NAMES:
            called = text(node.func)
            yield called[: len(called) - len(name)] + NAMES[name] + text(node)[len(called) :]
        elif name in ("stop_gradient", "sorted", "reversed", "abs", "exp", "expm1") and len(node.args) == 1:
            yield f"({text(node.args[0])})"


def chosen(modules: list[str], count: int, seed: int) -> list[Mutation]:
    """`count` mutations, as evenly over the modules as their numbers allow, the same ones for the same seed."""
    pools = []
    for module in modules:
        pool = mutations(module)
        random.Random(f"{seed} {module}").shuffle(pool)
        pools.append(pool)
    picked: list[Mutation] = []
    while len(picked) < count and any(pools):
        picked += [pool.pop() for pool in pools if pool]
    return picked[:count]


def test_files(module: str) -> list[str]:
    """The files of `MODULES[module]`, each once: pytest may otherwise reorder a file and the folder it is in."""
    files: dict[str, None] = {}
    for path in MODULES[module]:
        names = (
            [path]
            if path.endswith(".py")
            else sorted(str(one.relative_to(ROOT)) for one in (ROOT / path).glob("test_*.py"))
        )
        files |= dict.fromkeys(names)
    return list(files)


def by_hand(module: str, old: str, new: str) -> Mutation:
    """The mutation that replaces `old`, which the file has once."""
    source = (ROOT / module).read_text("utf-8")
    if source.count(old) != 1:
        raise SystemExit(f"{module} has {old!r} {source.count(old)} times, not once.")
    before = source[: source.index(old)]
    start = len(before.encode())
    return Mutation(module, before.count("\n") + 1, start, start + len(old.encode()), old, new)


def outcome(tree: Path, mutation: Mutation) -> tuple[str, float]:
    """ "caught", "survived" or "caught (time limit)", and the seconds it took. Restores the file."""
    file = tree / mutation.module
    source = file.read_bytes()
    file.write_bytes(mutation.applied_to(source))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *test_files(mutation.module)]
    environment = os.environ | {
        "QT_QPA_PLATFORM": "offscreen",
        "TMPDIR": str(_kernel_cache(tree)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=TIME_LIMIT_S)
        word = "survived" if done.returncode == 0 else "caught"
    except subprocess.TimeoutExpired:
        word = "caught (time limit)"
    finally:
        file.write_bytes(source)
    return word, time.monotonic() - began


def _kernel_cache(tree: Path) -> Path:
    """mlx keeps its compiled CPU kernels in TMPDIR: a folder per worker that later calls find warm."""
    folder = Path(tempfile.gettempdir()) / f"mutations-kernels-{tree.parent.name}"
    folder.mkdir(exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Report which one-expression changes of the program no test notices.")
    parser.add_argument("--count", type=int, default=66)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module", action="append", choices=list(MODULES), help="only this file; may be repeated")
    parser.add_argument("--replace", nargs=2, metavar=("OLD", "NEW"), action="append", help="needs one --module")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    options = parser.parse_args()
    if options.replace:
        if len(options.module or ()) != 1:
            parser.error("--replace needs one --module")
        picked = [by_hand(options.module[0], *pair) for pair in options.replace]
    else:
        picked = chosen(options.module or list(MODULES), options.count, options.seed)
    if options.list:
        print(*picked, sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            tree = Path(folder) / str(job) / "tree"
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__")
            shutil.copytree(ROOT, tree, ignore=ignored)
            trees.put(tree)

        def run(mutation: Mutation) -> str:
            tree = trees.get()
            try:
                word, seconds = outcome(tree, mutation)
            finally:
                trees.put(tree)
            print(f"{word:<20} {seconds:5.0f} s  {mutation}", flush=True)
            return word

        with ThreadPoolExecutor(options.jobs) as pool:
            words = list(pool.map(run, picked))
    print(f"{sum(word != 'survived' for word in words)} of {len(words)} caught")


if __name__ == "__main__":
    main()
