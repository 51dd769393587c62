"""Mutation testing: change one expression of the program at a time, run the tests of that part, and report what no test notices.

    python -m tests.support.mutate --count 66 --seed 1            66 mutations, spread evenly over MODULES
    python -m tests.support.mutate --module backend/training/losses.py --count 20
    … --list                                                      only print them
    … --stale                                                     the harmless ones whose line has been written anew
    … --module backend/training/batch.py --replace OLD NEW        one mutation by hand: the only OLD in the file becomes NEW

Each mutation is made in a copy of the tree, never in the checkout. A mutation is *caught* when a test fails or the run exceeds its
time limit, and *survives* when all tests of its row of MODULES pass: it names a missing test. Those of harmless_mutations.yaml change
nothing that a test could notice (the edge of a tolerance, a default that nothing takes), and are not drawn; where a mutation that is drawn has
the text of one of them, it may survive as *harmless*.
Not part of `make test`; `make mutations` runs it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

import yaml

from tests.support.mutations import ROOT, Mutation, by_hand, mutations
from tests.support.warm_tests import WarmTests

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
    "backend/training/grpo.py": (
        "tests/training/test_grpo.py",
        "tests/training/test_loss_family.py",
        "tests/training",
        "tests/run/test_trainer.py",
    ),
    "backend/training/learner.py": (
        "tests/training/test_learner.py",
        "tests/training",
        "tests/run/test_own_updates.py",
        "tests/run/test_trainer.py",
    ),
    "backend/training/microbatch.py": ("tests/training/test_microbatch.py", "tests/training"),
    "backend/training/shared_prefix.py": ("tests/training/test_shared_prefix.py", "tests/training"),
    "backend/training/importance_sampling.py": ("tests/training/test_batch.py", "tests/training"),
    "backend/generation/sampler.py": ("tests/generation/test_sampler.py", "tests/generation"),
    "backend/generation/filters.py": ("tests/generation/test_filters.py",),
    "backend/generation/scheduler.py": ("tests/generation/test_rollout.py", "tests/generation"),
    "backend/generation/outputs.py": (
        "tests/generation/test_outputs.py",
        "tests/generation/test_rollout.py",
        "tests/generation",
    ),
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
        "tests/run/test_cut_back.py",
        "tests/run/test_damaged_checkpoints.py",
        "tests/run/test_garbage_in_diaries.py",
    ),
    "backend/run/room_for_saving.py": ("tests/run/test_full_disk.py",),
    "backend/spec/events.py": ("tests/spec/test_events.py", "tests/run/test_full_disk.py", "tests/spec"),
    "backend/spec/whole_file.py": ("tests/spec/test_disk_faults.py", "tests/run/test_full_disk.py"),
    "backend/run/evaluation/evaluate.py": ("tests/run/test_evaluate.py", "tests/run"),
    "backend/run/scoring_stages.py": ("tests/run/test_stages.py", "tests/run"),
    "backend/rewards/runner/score.py": (
        "tests/rewards/test_rewards.py",
        "tests/rewards",
        "tests/run/test_stages.py",
    ),
    "backend/rewards/weights.py": ("tests/rewards/test_reward_weights.py", "tests/rewards", "tests/run/test_stages.py"),
    "backend/rewards/functions/r1.py": ("tests/rewards/test_rewards.py", "tests/rewards"),
    "backend/rewards/functions/answers.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/arithmetic.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/formats.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/lengths.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/math_equality.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/functions/texts.py": ("tests/rewards/test_shipped_rewards.py", "tests/rewards"),
    "backend/rewards/runner/extra_logs.py": ("tests/rewards/test_trl_rewards.py", "tests/rewards"),
    "backend/rewards/sandbox/answers.py": ("tests/rewards/test_isolation.py", "tests/rewards"),
    "backend/rewards/runner/returned_scores.py": ("tests/rewards/test_rewards.py", "tests/rewards"),
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
    "backend/spec/other_programs/translation.py": (
        "tests/spec/other_programs/test_translation.py",
        "tests/spec/test_config.py",
        "tests/spec/other_programs",
    ),
}
"""What is mutated, and the tests that should notice, the likeliest first; a folder stands for its remaining files."""


HARMLESS = Path(__file__).with_name("harmless_mutations.yaml")


def harmless(modules: list[str]) -> dict[tuple[str, str], str]:
    """(module, change) → why no test can notice it."""
    listed = yaml.safe_load(HARMLESS.read_text("utf-8"))
    return {
        (module, change): why
        for module in modules
        for why, changes in listed.get(module, {}).items()
        for change in changes
    }


def _key(mutation: Mutation) -> tuple[str, str]:
    return mutation.module, mutation.change


def print_stale(modules: list[str]) -> None:
    """The entries of HARMLESS that are no mutation of their module any more."""
    present = set(map(_key, chain.from_iterable(map(mutations, modules))))
    stale = [f"{module}  {change}" for module, change in harmless(modules) if (module, change) not in present]
    print(*stale, f"{len(stale)} stale", sep="\n")


def harmless_ones(module: str) -> list[Mutation]:
    """The mutations of HARMLESS that no other has the text of."""
    listed, every = harmless([module]), list(mutations(module))
    seen = Counter(map(_key, every))
    return [mutation for mutation in every if _key(mutation) in listed and seen[_key(mutation)] == 1]


def chosen(modules: list[str], count: int, seed: int) -> list[Mutation]:
    """`count` mutations, as evenly over the modules as their numbers allow, the same ones for the same seed."""
    pools = []
    for module in modules:
        left_out = set(harmless_ones(module))
        pool = [mutation for mutation in mutations(module) if mutation not in left_out]
        random.Random(f"{seed} {module}").shuffle(pool)
        pools.append(pool)
    picked: list[Mutation] = []
    while (len(picked) < count or not count) and any(pools):
        picked += [pool.pop() for pool in pools if pool]
    return picked[: count or None]


def test_files(module: str) -> list[list[str]]:
    """For each entry of `MODULES[module]` its files, each file once."""
    files: list[list[str]] = []
    for path in MODULES[module]:
        found = [path] if path.endswith(".py") else [str(file.relative_to(ROOT)) for file in _tests_in(ROOT / path)]
        files.append([file for file in found if not any(file in before for before in files)])
    return [each for each in files if each]


def _tests_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("test_*.py"))


@dataclass(frozen=True, slots=True)
class Workplace:
    """A copy of the tree, and the process that runs its tests. `sound`: test files that have passed without a mutation, those of all workplaces."""

    tree: Path
    tests: WarmTests
    sound: set[str]

    def outcome(self, mutation: Mutation) -> tuple[str, float]:
        """ "caught", "survived" or "caught (time limit)", and the seconds it took. Restores the file. Raises RuntimeError where the tests that
        failed do so without the mutation too."""
        file = self.tree / mutation.module
        source = file.read_bytes()
        file.write_bytes(mutation.applied_to(source))
        began = time.monotonic()
        try:
            ran = ((self.tests.run(files), files) for files in test_files(mutation.module))
            status, failed = next(((status, files) for status, files in ran if status), (0, []))
        finally:
            file.write_bytes(source)
        seconds = time.monotonic() - began
        self._require_sound(failed)
        return "survived" if status == 0 else "caught (time limit)" if status == -signal.SIGXCPU else "caught", seconds

    def _require_sound(self, files: list[str]) -> None:
        if self.sound.issuperset(files):
            return
        if self.tests.run(files):
            print(f"unsteady: {', '.join(files)}\n{self.tests.failures()}", flush=True)
            if self.tests.run(files):
                raise RuntimeError(f"The tests of {', '.join(files)} fail without a mutation.\n{self.tests.failures()}")
        self.sound.update(files)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Report which one-expression changes of the program no test notices.")
    parser.add_argument("--count", type=int, default=66, help="0: every one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module", action="append", choices=list(MODULES), help="only this file; may be repeated")
    parser.add_argument("--replace", nargs=2, metavar=("OLD", "NEW"), action="append", help="needs one --module")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--stale", action="store_true", help="print harmless mutations that are there no more")
    options = parser.parse_args()
    if options.replace and len(options.module or ()) != 1:
        parser.error("--replace needs one --module")
    return options


@contextmanager
def workplaces(count: int) -> Iterator[SimpleQueue[Workplace]]:
    """`count` of them, all free."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        free, sound = SimpleQueue[Workplace](), set[str]()
        for job in range(count):
            tree = Path(folder) / str(job)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
            kernels = Path(tempfile.gettempdir()) / f"mutations-{job}"
            free.put(Workplace(tree, WarmTests(tree, kernels), sound))
        try:
            yield free
        finally:
            while not free.empty():
                free.get().tests.close()


def outcomes(picked: list[Mutation], modules: list[str], jobs: int) -> list[str]:
    """What became of each mutation, in a word; a line of each is printed as soon as it is known."""
    reasons = harmless(modules)

    def run(mutation: Mutation) -> str:
        why = reasons.get(_key(mutation), "")
        workplace = free.get()
        try:
            word, seconds = workplace.outcome(mutation)
        finally:
            free.put(workplace)
        if why and word == "survived":
            word = "harmless"
        print(f"{word:<20} {seconds:5.0f} s  {mutation}{f'    ({why})' if word == 'harmless' else ''}", flush=True)
        return word

    with workplaces(jobs) as free, ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(run, picked))
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> None:
    options = _options()
    modules = options.module or list(MODULES)
    if options.stale:
        print_stale(modules)
        return
    if options.replace:
        picked = [by_hand(options.module[0], *pair) for pair in options.replace]
    else:
        picked = chosen(modules, options.count, options.seed)
    if options.list:
        print(*picked, sep="\n")
        return
    words = outcomes(picked, modules, options.jobs)
    survived, excused = words.count("survived"), words.count("harmless")
    left_out = sum(len(harmless_ones(module)) for module in modules)
    print(f"{len(words) - survived - excused} of {len(words)} caught, {excused} harmless, {survived} survived")
    print(f"{left_out} more of these modules are listed as harmless and were not drawn ({HARMLESS.name})")


if __name__ == "__main__":
    main()
