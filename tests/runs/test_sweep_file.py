"""A sweep's file: which runs it means, what halving costs, and a sentence for every fault."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.runs.archive import summary
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.sweep import Halving, dump_sweep, load_sweep, parse_sweep, rungs
from backend.runs.sweep_results import (
    INTERRUPTED,
    find_sweep,
    fresh_results,
    make_runs,
    make_sweep,
    read_results,
    shown_state,
    write_results,
)
from backend.utils.errors import UserError
from tests.support.cases import cases
from tests.support.verbs import refused, run_ok

BASE = {"model": "m", "data": "d", "iters": 80, "steps_per_eval": 10}
OVER = {"learning_rate": ["1e-5", 5e-5], "beta": [0, 0.1]}


def sweep(**changes: Any) -> dict[str, Any]:
    return {"name": "s", "base": BASE, "over": OVER} | changes


def test_a_grid_is_every_combination_with_every_seed() -> None:
    plan = parse_sweep(sweep(seeds=[3, 4]))
    # PyYAML reads 1e-5 as text; settings are numbers all the same.
    chosen = [(each.settings["learning_rate"], each.settings["beta"]) for each in plan.configurations]
    assert chosen == [(1e-5, 0.0), (1e-5, 0.1), (5e-5, 0.0), (5e-5, 0.1)]
    assert [member.run for member in plan.members()][:3] == ["s-1-seed3", "s-1-seed4", "s-2-seed3"]
    raw = plan.raw_settings(plan.members()[1])
    assert raw == BASE | {"learning_rate": 1e-5, "beta": 0.0, "seed": 4, "run_name": "s-1-seed4"}
    assert plan.metric == "reward"
    imitates = {"train_mode": "sft", "completion_feature": "answer"}
    follows = {"train_mode": "distill", "teacher_model": "t"}
    for changes, metric in ((imitates, "loss"), (follows, "distillation/divergence")):
        assert parse_sweep(sweep(base=BASE | changes, over={"rank": [2, 4]})).metric == metric
    for rank_by, metric in (("held_out", "r1_int"), ("held_out", "rewrd"), ("training", "rewrd")):
        with pytest.raises(UserError, match=f"There is no metric eval/{metric}."):
            parse_sweep(sweep(metric=metric, rank_by=rank_by))
    parse_sweep(sweep(metric="r1_int_reward_func", rank_by="training"))


def test_a_setting_that_the_stages_replace_does_not_vary() -> None:
    stages = [{"iters": 40}, {"iters": 40, "learning_rate": 1e-6}]
    with pytest.raises(UserError) as raised:
        parse_sweep(sweep(base=BASE | {"stages": stages}))
    assert [(fault.setting, fault.sentence) for fault in raised.value.faults] == [
        ("learning_rate", "The stages of the base have a Learning Rate of their own; vary the stages instead.")
    ]
    others = [stages, [{"iters": 80, "learning_rate": 1e-4}]]
    assert len(parse_sweep(sweep(base=BASE | {"stages": stages}, over={"stages": others})).configurations) == 2
    assert len(parse_sweep(sweep(base=BASE | {"stages": stages}, over={"beta": [0, 0.1]})).configurations) == 2


def test_a_random_search_draws_the_same_configurations_again_and_none_twice() -> None:
    over = {"learning_rate": {"log_uniform": [1e-6, 1e-3]}, "group_size": {"uniform": [4, 16]}, "beta": [0, 0.1]}
    first = parse_sweep(sweep(search="random", trials=4, over=over)).configurations
    more = parse_sweep(sweep(search="random", trials=40, over=over)).configurations
    assert more[:4] == first
    assert len({json.dumps(each.settings) for each in more}) == 40
    rates = sorted(each.settings["learning_rate"] for each in more)
    assert 1e-6 <= rates[0] < 1e-5 and 1e-4 < rates[-1] <= 1e-3  # even in the logarithm: 13 of 40 in each decade
    assert {type(each.settings["group_size"]) for each in more} == {int}
    assert parse_sweep(sweep(search="random", trials=4, over=over, search_seed=1)).configurations != first


@cases(
    ("halving", "count", "steps", "every", "expected"),
    [
        (Halving(10, 0.5), 8, 80, 10, [(10, 4), (20, 2), (40, 1)]),
        (Halving(10, 0.5), 8, 40, 10, [(10, 4), (20, 2)]),
        (Halving(8, 1 / 3), 9, 100, 8, [(8, 3), (24, 1)]),
        (Halving(10, 0.3), 10, 100, 10, [(10, 3), (40, 1)]),  # 33 steps, rounded up to an evaluation
        (Halving(10, 0.9), 3, 40, 5, [(10, 3), (15, 3), (20, 3), (25, 3), (30, 3), (35, 3)]),
        (None, 8, 80, 10, []),
    ],
)
def test_rungs(halving: Halving | None, count: int, steps: int, every: int, expected: list[tuple[int, int]]) -> None:
    assert [(rung.step, rung.keep) for rung in rungs(halving, count, steps, every)] == expected


def test_the_written_file_is_the_same_sweep(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE | {"data": "rows.jsonl"}))
    (tmp_path / "rows.jsonl").write_text("")
    raw = {"base": "base.yaml", "over": OVER, "seeds": [1, 2], "halving": {"first_rung": 20, "keep": 0.5}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    plan = load_sweep(tmp_path / "mine.yaml")
    assert plan.name == "mine" and plan.base["data"] == str(tmp_path / "rows.jsonl")
    (tmp_path / "again.yaml").write_text(dump_sweep(plan))
    assert load_sweep(tmp_path / "again.yaml") == plan
    planned = json.loads(run_ok("sweep", tmp_path / "again.yaml", "--plan", "--json").stdout)
    assert (planned["runs"], planned["steps"], planned["steps_together"]) == (8, 80, 2 * (4 * 20 + 2 * 20 + 40))
    assert planned["rungs"][0] == {"step": 20, "keep": 2} and planned["configurations"][0]["settings"]["beta"] == 0
    random_plan = parse_sweep(sweep(search="random", trials=3, over={"beta": {"uniform": [0, 1]}}))
    (tmp_path / "random.yaml").write_text(dump_sweep(random_plan))
    assert load_sweep(tmp_path / "random.yaml") == random_plan


@cases(
    ("changes", "setting", "words"),
    [
        ({"halvin": "off"}, "halvin", "Did you mean halving?"),
        ({"base": None}, "base", "a file of settings, or the settings themselves"),
        ({"base": BASE | {"learning_rat": 1}}, "learning_rat", "Did you mean learning_rate?"),
        ({"over": {"learning_rat": [1]}}, "learning_rat", "Did you mean learning_rate?"),
        ({"over": {"num_generations": [4, 8]}}, "num_generations", "Did you mean group_size?"),
        ({"over": {"seed": [1, 2]}}, "seed", "seeds go under seeds"),
        ({"over": {"iters": [10, 20]}}, "iters", "the same length"),
        ({"over": {"learning_rate": [1e-5, "1e-5"]}}, "learning_rate", "twice"),
        ({"over": {"learning_rate": [-1]}}, "learning_rate", "above 0, not -1"),
        ({"over": {"learning_rate": {"log_uniform": [1e-5, 1e-3]}}}, "learning_rate", "a grid cannot enumerate"),
        ({"search": "random", "over": {"beta": {"loguniform": [0, 1]}}, "trials": 2}, "beta", "mean log_uniform?"),
        ({"search": "random", "over": {"beta": {"log_uniform": [0, 1]}}, "trials": 2}, "beta", "limits above 0"),
        ({"search": "random", "over": {"model": {"uniform": [1, 2]}}, "trials": 2}, "model", "is no number"),
        ({"search": "random"}, "trials", "needs trials"),
        ({"search": "random", "trials": 10**9}, "trials", "from 1 to 500"),
        ({"search": "random", "trials": 5}, "trials", "only 4 different"),
        ({"trials": 5}, "trials", "go with search: random"),
        ({"seeds": [1, 1]}, "seeds", "listed twice"),
        ({"seeds": list(range(200))}, "seeds", "800 runs; at most 500"),
        ({"halving": {"first_rung": 15}}, "halving", "no multiple of Eval, 10"),
        ({"halving": {"first_rung": 80}}, "halving", "not below the length of a run, 80 steps"),
        ({"halving": {"first_rung": 10}, "base": BASE | {"steps_per_eval": 0}}, "halving", "Eval is 0"),
        ({"halving": {"first_rung": 10}, "base": BASE | {"steps_per_eval": -1}}, "halving", "Eval is -1"),
        ({"halving": {"first_rung": 10}, "base": BASE | {"epochs": 1}}, "halving", "runs of a given length"),
        ({"halving": {"first_rung": 10}, "over": {"steps_per_eval": [5, 10]}}, "steps_per_eval", "at the same steps"),
        ({"rank_by": ["held_out"]}, "rank_by", "it is held_out or training"),
        ({"name": "a/b"}, "name", "cannot be a folder's name"),
        ({"over": {"max_completion_length": [64, 4096]}}, "max_completion_length", "Configuration 2 (Completion"),
        (
            {"over": {key: [2, 3, 4, 5, 6] for key in ("rank", "group_size", "batch_size", "keep_checkpoints")}},
            "over",
            "625 configurations",
        ),
    ],
)
def test_every_fault_has_a_sentence_about_its_setting(changes: dict[str, Any], setting: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_sweep(sweep(**changes))
    (fault,) = raised.value.faults
    assert fault.setting == setting and words in fault.sentence and fault.sentence[-1] in ".?"


def test_a_sweep_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    plan = parse_sweep(sweep())
    (tmp_path / "s-2-seed0").mkdir()
    with pytest.raises(UserError, match="The run s-2-seed0 exists already"):
        make_sweep(plan, tmp_path)
    assert not (tmp_path / "sweeps").exists()
    (tmp_path / "s-2-seed0").rmdir()
    folder = make_sweep(plan, tmp_path)
    make_runs(plan, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"s-{n}-seed0" for n in (1, 2, 3, 4)), "sweeps"]
    waiting = folder.run("s-1-seed0")
    os.utime(waiting.config, (1, 1))
    assert summary(waiting).state == "queued", "it waits for its turn, however long; it has not crashed"
    assert find_sweep("s", tmp_path) == find_sweep(folder.path) == folder
    assert find_sweep("t", tmp_path) is None
    with pytest.raises(UserError, match="The sweep s exists already"):
        make_sweep(plan, tmp_path)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    plan = parse_sweep(sweep(seeds=[0, 1]))
    folder = make_sweep(plan, tmp_path)
    results = fresh_results(plan)
    for number, values in enumerate([(1.0, 2.0), (2.5, 1.5), (0.0, None), (1.0, 9.0)]):
        for run, value in zip(results.configurations[number].runs, values, strict=True):
            run.value, run.state, run.completions = value, "finished", 10
    results.configurations[3].runs[1].state = "failed"
    write_results(folder, results)
    again = read_results(folder)
    assert again == results
    # Mean 1.5, 2, none (a seed has no value), none (a seed failed).
    assert [each.number for each in again.ranked] == [2, 1, 3, 4]
    assert again.ranked[0].value == 2.0 and again.ranked[0].sd == pytest.approx(0.5**0.5)
    assert [each.sd for each in again.ranked[2:]] == [None, None]
    assert again.completions == 80 and again.winner is None
    again.state = "finished"
    assert again.winner is again.ranked[0] and again.best_run(again.winner) is again.ranked[0].runs[0]
    again.metric, (first, second) = "distillation/divergence", again.ranked[0].runs
    first.value, second.value = 0.2, 0.1
    assert again.best_run(again.winner) is second, "the lowest is the best"
    raw = json.loads(folder.results.read_text())
    assert raw["configurations"][0]["mean"] == 1.5 and raw["configurations"][0]["state"] == "finished"


def test_a_live_sweep_is_left_as_it_is(tmp_path: Path) -> None:
    """A second process wrote its BLAS into log.txt, and an error of the dataset into the results."""
    folder = make_sweep(parse_sweep(sweep()), tmp_path)  # of a dataset that is not there
    lock, before = hold_lock(folder), folder.results.read_text()
    try:
        assert "is being trained" in refused("sweep", folder.path, "--resume")
    finally:
        os.close(lock)
    assert not folder.log.exists() and folder.results.read_text() == before


def test_a_sweep_whose_process_has_died_is_interrupted(tmp_path: Path) -> None:
    plan = parse_sweep(sweep())
    folder = make_sweep(plan, tmp_path)
    results = fresh_results(plan)
    results.state = "running"
    assert shown_state(folder, results) == INTERRUPTED
    handle = hold_lock(RunFolder(folder.path))
    assert shown_state(folder, results) == "running"
    os.close(handle)
    folder.results.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_results(folder)
