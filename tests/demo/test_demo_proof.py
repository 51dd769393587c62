"""What the demo learns; too long for CI, run by `make proofs`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from backend.config.config import parse, read
from backend.demo import Sum, careful, pools
from backend.demo import test_accuracy as accuracy
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config
from tests.support.small_run import events, notes, train_here


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("which", [(), ("--tools",), ("--images",)])
def test_the_demo_gains_thirty_points_within_four_minutes(which: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    where = ("--runs-dir", str(tmp_path), "--seed", str(seed), "--json", "--no-progress")
    command = backend_command("demo", *which, *where)
    done = subprocess.run(command, env=backend_environment(), capture_output=True, text=True, check=True, cwd=tmp_path)
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["after"] - result["before"] >= 0.3 and result["seconds"] <= 240


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_in_bfloat16_is_within_two_points_of_float32(seed: int, tmp_path: Path) -> None:
    """Full fine-tuning: the model computes in bfloat16, and what learns stays in float32. Ten minutes: this CPU's
    bfloat16 products run at a twentieth of the speed of its float32."""
    reached: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        raw = read(demo_config()) | {"seed": seed, "dtype": dtype}
        run = RunFolder(tmp_path / dtype)
        assert train_here(raw, run).kind == "finished"
        reached[dtype] = accuracy(parse(raw), run)
    print(reached)
    assert reached["bfloat16"] >= reached["float32"] - 0.02


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_loss_improves_the_held_out_reward(seed: int) -> None:
    """`docs/algorithms.md` holds the figures; the demo's model begins at a held-out reward of about 1.24."""
    from benchmarks.loss_comparison import VARIANTS, measure

    for name, changes in VARIANTS.items():
        measured = measure(changes, seed)
        print(name, measured)
        assert measured["reward_held_out"] > measured["reward_before"], name


PLAIN_SUM = '''
import re
from backend.rewards import register_reward_function
@register_reward_function("plain_sum")
def plain_sum(prompts, completions, answer, types=None):
    """1 for working and the right sum without a tag, which the demo's model always writes."""
    matches = [re.fullmatch(r"[0-9+=,]+,(\\d+)", text) for text in completions]
    return [float(match is not None and match[1] == right) for match, right in zip(matches, answer)]
'''


def plain(problem: Sum) -> str:
    return careful(problem).removeprefix("<think>").replace("</think><answer>", ",").removesuffix("</answer>")


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_warm_up_teaches_what_grpo_alone_never_finds(seed: int, tmp_path: Path) -> None:
    """Measured: GRPO alone stays at 0.00 in each step and on the test split."""
    (tmp_path / "plain_sum.py").write_text(PLAIN_SUM)
    for split in ("train", "valid", "test"):
        rows = [sum_.row() | {"completion": plain(sum_)} for sum_ in pools(0)[split]]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = read(demo_config()) | {"data": str(tmp_path), "seed": seed, "steps_per_eval": 0, "fuse": False}
    raw |= {"reward_functions": ["plain_sum"], "reward_weights": [], "reward_isolation": "thread"}
    raw |= {"reward_functions_file": str(tmp_path / "plain_sum.py"), "test": True, "test_batches": -1}
    raw |= {"batch_size": 16, "group_size": 4, "num_generations_eval": 1, "learning_rate": 2e-4}
    warm = {"iters": 180, "warmup_steps": 100, "warmup_learning_rate": 1e-3, "warmup_pass_rate": 0.9}
    reached: dict[str, float] = {}
    for name, changes in {"alone": {"iters": 30, "group_size": 8}, "warm": warm}.items():
        run = RunFolder(tmp_path / name)
        assert train_here(raw | changes, run).kind == "finished"
        (test,) = events(run, "eval")
        reached[name] = test["metrics"]["reward"]
        if name == "alone":
            assert not any(event["metrics"]["reward"] for event in events(run, "step"))
        else:
            print(*notes(run), sep="\n")
    print(reached)
    assert reached["alone"] == 0 and reached["warm"] >= 0.9
