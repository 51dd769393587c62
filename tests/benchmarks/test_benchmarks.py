"""The engine's techniques can be switched off without changing a result; the benchmark measures, stores and renders
correctly. That they do less work is counted in tests/sampling/test_rollout.py and tests/training/test_loss_family.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.models.policy import Policy, load_policy
from backend.sampling.rollout import Sampler
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from benchmarks import our_contenders, peers, report, results_file
from benchmarks.ablation import SWITCHES
from benchmarks.random_model import model_folder
from benchmarks.side_by_side import measure
from benchmarks.workloads import MATCHES, PEERS, Case

TINY = Case("tiny", prompts=2, group_size=4, prompt=8, completion=6, vocab=320, hidden=64, layers=1)
Run = Callable[[], Any]
Off = Callable[[], AbstractContextManager[Any]]


def learning_of(case: Case, folder: Path, off: Off = nullcontext) -> tuple[Policy, Run]:
    """A policy, and an update of it."""
    config = our_contenders.settings(case, folder)
    with off():
        policy = load_policy(config)
        learner = build_learner(policy, config, 100)
    batch = pack(our_contenders.random_groups(case, 0), pad_id=policy.pad_id)

    def run() -> dict[str, float]:
        with off():
            return learner.learn(batch)

    return policy, run


@pytest.mark.alone
@pytest.mark.usefixtures("as_on_a_cpu")  # a GPU's chunk holds all of them
def test_the_fused_head_holds_no_vocabulary_for_all_tokens(models: Path):
    """512 tokens over 16k words, whose logits alone are 34 MB."""
    case = Case("guard", group_size=4, prompt=16, vocab=16_384, hidden=64, layers=1, beta=0.0)
    folder = model_folder(case, models)
    # How far mlx runs ahead of a busy processor adds some tens of megabytes to either.
    assert peak(learning_of(case, folder)[1]) < 0.7 * peak(learning_of(case, folder, SWITCHES["fused head"])[1])


def peak(run: Run) -> float:
    """Bytes, weights included."""
    mx.clear_cache()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return mx.get_peak_memory()


SAMPLING_ONLY = {"groups decoded together", "one prefill a prompt", "packed and merged layers", "merged adapters"}
SAMPLING_ONLY |= {"compaction", "compiled decoding", "late reading", "sliced products"}
LEARNING_ONLY = {"attention in blocks", "prompt sharing", "prompts read once for all micro-batches"}
LEARNING_ONLY |= {"small micro-batches", "fused head", "no old-policy pass"}


@pytest.fixture(scope="module")
def plain_loss(models: Path) -> float:
    return tiny_loss(models)


def tiny_loss(models: Path) -> float:
    return learning_of(TINY, model_folder(TINY, models))[1]()["loss"]


@pytest.mark.parametrize("technique", SWITCHES)
def test_a_switched_off_technique_changes_no_result(models: Path, technique: str, plain_loss: float):
    """Completions of full length, and the same loss; a switch whose target has moved raises."""
    with SWITCHES[technique]():
        if technique not in LEARNING_ONLY:
            rollout = Sampler(load_policy(our_contenders.settings(TINY, model_folder(TINY, models))), TINY.completion)
            completions = [
                completion for group in our_contenders.sample(rollout, TINY) for completion in group.completions
            ]
            assert [len(completion.tokens) for completion in completions] == [TINY.completion] * TINY.rows
        if technique not in SAMPLING_ONLY:
            assert tiny_loss(models) == pytest.approx(plain_loss, abs=1e-5)


def test_the_document_shows_the_numbers_of_the_json():
    """The tables are exactly those rendered from the JSON: no number is edited by hand."""
    text = results_file.document().read_text("utf-8")
    assert results_file.rendered(text, results_file.read()) == text
    assert {*report.DOCUMENTED, "differs", "devices"} == {name for _, name, _ in results_file.MARKED.findall(text)}


def test_a_new_measurement_changes_only_its_own_tables():
    text = results_file.document().read_text("utf-8")
    rows = [{"until": "the first token", "wall": 1.234, "cpu": 0.5}]
    about = {"date": "2026-01-01", "machine": "M", "rounds": 3, "warm_up": 1, "versions": {"mlx": "1"}, "blas": "B."}
    new = results_file.rendered(text, results_file.read() | {"start": {"about": about, "results": rows}})
    assert "| the first token | 1.23 | 0.5 |" in new
    others = [[block[0] for block in results_file.MARKED.finditer(t) if block[2] != "start"] for t in (text, new)]
    assert others[0] == others[1] and len(others[0]) > 1
    # A bar against the best peer names it, and stands only when every contender of its case was measured.
    measured = {name: {"step_s": 9.0, "token_s": 9.0, "tokens": 1, "peak_train": 80.0} for name in ("ours", *PEERS)}
    measured["ours"] |= {"step_s": 2.0, "token_s": 2.0}
    measured["mlx-vlm"] |= {"step_s": 4.0, "token_s": 4.0}
    results = [{"case": asdict(MATCHES[0].case), "contender": n, "runs": [run]} for n, run in measured.items()]
    against = {"against": {"about": about, "results": results}}
    name = MATCHES[0].case.name
    assert f"| {name} | mlx-vlm | step | 2 s | 4 s | 0.5 | 0.45 | missed |" in results_file.rendered(text, against)
    del results[-1]
    assert "missed |" not in results_file.rendered(text, against)


@pytest.mark.proof
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_takes_a_step(models: Path, peer: str):
    if not peers.versions():
        pytest.skip("the peers are not installed: python -m benchmarks peers --install")
    (result,) = measure(TINY, (peer,), 1, 1, models, lambda sentence: None)
    assert result.medians["tokens"] == TINY.rows * TINY.completion
    assert result.medians["rollout_s"] > 0 and result.medians["train_s"] > 0
