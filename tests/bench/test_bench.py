"""The engine's fast paths are faster than the plain ones, by ratios with slack; and the benchmark says what it measured.

Ratios are of CPU seconds, the least of several interleaved runs in this process, so a busy machine does not decide. A
fast path that silently falls back to the plain one makes its ratio about 1 and fails here.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from backend.bench import baseline_contenders, our_contenders, peers, report, results_file
from backend.bench.ablation import SWITCHES
from backend.bench.contender import Contender
from backend.bench.peer_contenders import CONTENDERS, DIFFERS
from backend.bench.random_model import END, folder_of
from backend.bench.side_by_side import Result, Worker, measure
from backend.bench.stopwatch import Stopwatch
from backend.bench.workloads import ABLATED, MATCHES, PEERS, SMALL, SWEEPS, Bar, Case, Match
from backend.generation.rollout import Rollout
from backend.models.policy import load_policy
from backend.training.batch import pack
from backend.training.grpo import grpo_learner

TINY = Case("tiny", prompts=2, group_size=4, prompt=8, completion=6, vocab=320, hidden=64, layers=1)
Work = Callable[[], Any]
Off = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


# ── the guard ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ratio(fast: Work, slow: Work, rounds: int) -> float:
    """CPU seconds of `fast` over those of `slow`: the least of each over interleaved rounds, after one to warm up."""
    took: dict[Work, list[float]] = {fast: [], slow: []}
    for _ in range(rounds + 1):
        for work in (fast, slow):
            began = time.process_time()
            work()
            mx.synchronize()
            took[work].append(time.process_time() - began)
    return min(took[fast][1:]) / min(took[slow][1:])


def sampling_of(case: Case, folder: Path, off: Off = nullcontext) -> Work:
    """Sampling one step's groups, or the same with a technique off."""
    with off():
        rollout = Rollout(load_policy(our_contenders.settings(case, folder)), case.completion)

    def work() -> None:
        with off():
            rollout.sample(our_contenders.problems(case, 0), case.group_size, our_contenders.sampling(case), 0, 0)

    return work


def learning_of(case: Case, folder: Path, off: Off = nullcontext) -> Work:
    config = our_contenders.settings(case, folder)
    with off():
        policy = load_policy(config)
        learner = grpo_learner(policy, config, 100)
    groups = our_contenders.made_up(case, 0)

    def work() -> None:
        with off():
            learner.learn(pack(groups, pad_id=policy.pad_id))

    return work


def one_at_a_time(case: Case, folder: Path) -> Work:
    """Every completion decoded by itself, as mlx-lm's `generate_step` does it."""
    model, _ = baseline_contenders._adapted(folder, case.layers)
    sampler = make_sampler(temp=case.temperature)

    def work() -> None:
        for ids in our_contenders.prompt_ids(case):
            for _ in range(case.group_size):
                for token, _ in generate_step(mx.array(ids), model, max_tokens=case.completion, sampler=sampler):
                    int(token)

    return work


@pytest.mark.alone
def test_groups_decoded_together_beat_one_at_a_time(models: Path):
    """Four groups of eight."""
    case = Case("guard", prompts=4, prompt=16, completion=10, vocab=1024, hidden=128, layers=2)
    folder = folder_of(case, models)
    assert ratio(sampling_of(case, folder), one_at_a_time(case, folder), 1) < 0.1


GUARDED: dict[str, tuple[Callable[..., Work], Case, float]] = {
    "groups decoded together": (sampling_of, Case("", prompts=4, prompt=16, completion=16), 0.75),
    "one prefill a prompt": (sampling_of, Case("", prompt=256, completion=8), 0.6),
    "compiled decoding": (sampling_of, Case("", prompt=16, completion=48, hidden=64, layers=4), 0.8),
    "compaction": (sampling_of, Case("", prompts=8, prompt=16, natural=True, end_chance=1 / 12), 0.85),
    "prompt sharing": (learning_of, Case("", prompt=128, completion=16), 0.75),
    "no old-policy pass": (learning_of, Case("", prompt=128, completion=16, beta=0.0), 0.9),
}
"""Technique → what it speeds up, at which sizes, and the most of the plain way's seconds that it may take."""


@pytest.mark.alone
@pytest.mark.parametrize("technique", GUARDED)
def test_a_technique_pays(models: Path, technique: str):
    build, case, most = GUARDED[technique]
    case = case.changed(vocab=1024, hidden=min(case.hidden, 128), layers=min(case.layers, 2))
    folder = folder_of(case, models)
    fast, slow = build(case, folder), build(case, folder, SWITCHES[technique])
    assert any(ratio(fast, slow, 3) < most for _ in range(3)), (
        "thrice: a busy machine may spoil a ratio, not all of them"
    )


@pytest.mark.alone
def test_the_fused_head_holds_no_vocabulary_for_all_tokens(models: Path):
    """Memory, which wavers less than time: 1024 tokens over 32k, whose logits alone are 134 MB."""
    case = Case("guard", prompt=16, vocab=32_768, hidden=64, layers=1, beta=0.0)
    folder = folder_of(case, models)
    # How far mlx runs ahead of a busy processor adds some tens of megabytes to either.
    assert peak(learning_of(case, folder)) < 0.7 * peak(learning_of(case, folder, SWITCHES["fused head"]))


def peak(work: Work) -> float:
    """Bytes, weights included."""
    mx.clear_cache()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return mx.get_peak_memory()


@pytest.mark.alone
def test_learning_beats_the_log_softmax_of_everything(models: Path):
    """A prompt six times as long as each of its eight completions."""
    case = Case("guard", "train", prompt=192, completion=32, hidden=128, layers=2, beta=0.0)
    folder = folder_of(case, models)
    took = {run: min(one["train_s"] for one in steps_of(run, case, folder, 3)[1:]) for run in RUNS}
    assert took[our_contenders.trainings] < 0.25 * took[baseline_contenders.log_softmax]


RUNS: tuple[Contender, ...] = (our_contenders.trainings, baseline_contenders.log_softmax)


def steps_of(run: Contender, case: Case, folder: Path, count: int) -> list[dict[str, float]]:
    """What the meter says of so many steps, taken in this process."""
    asked, told = io.StringIO("\n" * count), io.StringIO()
    with pytest.raises(SystemExit):
        run(case, folder, Stopwatch(asked, told))
    return [json.loads(line) for line in told.getvalue().splitlines()]


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chance", [None, 1 / 16])
def test_a_model_ends_as_often_as_asked(models: Path, chance: float | None):
    case = TINY.changed(vocab=2048) if chance is None else TINY.changed(vocab=2048, natural=True, end_chance=chance)
    policy = load_policy(our_contenders.settings(case, folder_of(case, models)))
    logits = policy.model(mx.random.randint(2, case.vocab, (8, 64)))
    share = mx.softmax(logits, axis=-1)[..., END].mean().item()
    assert share < 1e-15 if chance is None else share == pytest.approx(chance, rel=0.2)
    assert policy.eos_ids == [END]


@pytest.mark.parametrize("work", ["step", "rollout", "train", "decode"])
def test_the_meter_is_told_what_each_kind_of_work_has(models: Path, work: Any):
    case = TINY.changed(work=work)
    first, second = steps_of(our_contenders.contender("ours"), case, folder_of(case, models), 2)
    wanted = {"step": {"rollout_s", "train_s"}, "rollout": {"rollout_s"}, "train": {"train_s"}, "decode": {"decode_s"}}
    assert wanted[work] | {"tokens", "step_s", "step_wall", "peak"} <= second.keys() == first.keys()
    assert second["tokens"] == case.rows * case.completion
    assert second["step_s"] > 0 and second["peak"] > 0


def test_contenders_run_side_by_side_in_processes_of_their_own(models: Path):
    case = TINY.changed(work="rollout")
    results = measure(case, ("ours", "mlx-lm batch_generate"), 2, 0, models, lambda said: None)
    assert [result.contender for result in results] == ["ours", "mlx-lm batch_generate"]
    assert all(len(result.runs) == 2 and result.medians["tokens"] == case.rows * case.completion for result in results)
    assert Result.of(json.loads(json.dumps(results[0].as_dict()))) == results[0]


def test_a_contender_that_breaks_says_why(models: Path):
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        Worker("nobody", TINY, folder_of(TINY, models))


@pytest.mark.parametrize("technique", SWITCHES)
def test_a_switch_changes_nothing_but_the_way(models: Path, technique: str):
    """The same completions where sampling is concerned, and the same loss; a switch whose place has moved raises."""
    config, folder = our_contenders.settings(TINY, folder_of(TINY, models)), folder_of(TINY, models)
    losses = []
    for off in (nullcontext, SWITCHES[technique]):
        with off():
            policy = load_policy(config)
            groups = Rollout(policy, 6).sample(our_contenders.problems(TINY, 0), 4, our_contenders.sampling(TINY), 0, 0)
            assert [len(one.tokens) for group in groups for one in group.completions] == [6] * 8
            losses.append(
                grpo_learner(policy, config, 9).learn(pack(our_contenders.made_up(TINY, 0), pad_id=policy.pad_id))[
                    "loss"
                ]
            )
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert folder.exists()


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_peer_says_how_it_differs():
    assert set(PEERS) == set(DIFFERS) == set(CONTENDERS)
    assert len(PEERS) == len(peers.PEERS)


def test_every_case_has_a_name_of_its_own():
    for cases in ([match.case for match in MATCHES], SMALL, ABLATED, [one for axis in SWEEPS.values() for one in axis]):
        assert len({case.name for case in cases}) == len(cases)
    assert all(bar.against in match.contenders for match in MATCHES for bar in match.bars)


def test_a_bar_is_a_share_of_the_other(monkeypatch: pytest.MonkeyPatch):
    match = Match(TINY, ("ours", "mlxrl"), (Bar("mlxrl", "step_s", 0.55, stretch=True), Bar("mlxrl", "peak", 0.85)))
    monkeypatch.setattr(report, "MATCHES", (match,))
    results = [
        Result(TINY, "ours", [{"step_s": 1.0, "peak": 90.0}, {"step_s": 3.0, "peak": 90.0}]),
        Result(TINY, "mlxrl", [{"step_s": 4.0, "peak": 100.0}]),
    ]
    step, peak = report.bars(results).rows
    assert step == ["tiny", "mlxrl", "step", "2 s", "4 s", "0.5", "0.55*", "met"]
    assert peak[3:] == ["90 MB", "100 MB", "0.9", "0.85", "missed"]
    assert not report.bars(results[:1]).rows


def test_the_document_shows_what_was_measured():
    """Nobody edits a number: the tables are the JSON's, to the letter."""
    text = results_file.document().read_text("utf-8")
    assert results_file.rendered(text, results_file.read()) == text
    assert {*report.DOCUMENTED, "differs"} == {name for _, name, _ in results_file.MARKED.findall(text)}


def test_a_new_measurement_changes_its_own_tables_alone():
    text = results_file.document().read_text("utf-8")
    rows = [{"until": "the first token", "wall": 1.234, "cpu": 0.5}]
    about = {"date": "2026-01-01", "machine": "M", "rounds": 3, "warm_up": 1, "versions": {"mlx": "1"}, "blas": "B."}
    new = results_file.rendered(text, results_file.read() | {"start": {"about": about, "results": rows}})
    assert "| the first token | 1.23 | 0.5 |" in new
    before, after = (
        results_file.MARKED.sub(lambda found: "" if found[2] == "start" else found[0], t) for t in (text, new)
    )
    assert before == after


def test_help_is_quick_and_loads_no_engine():
    script = "import sys, backend.bench.__main__\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlx", "mlx_lm", "transformers", "numpy"} & {name.split(".")[0] for name in loaded}


@pytest.mark.proof
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_takes_a_step(models: Path, peer: str):
    if not peers.versions():
        pytest.skip("the peers are not installed: python -m backend.bench peers --install")
    (result,) = measure(TINY, (peer,), 1, 1, models, lambda said: None)
    assert result.medians["tokens"] == TINY.rows * TINY.completion
    assert result.medians["rollout_s"] > 0 and result.medians["train_s"] > 0
