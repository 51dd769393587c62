"""Agreement of a judge with labels and with itself; planted biases are found, and unbiased judges are not accused."""

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.judges.agreement import Agreement, Kind, Labels, Question, measure, pad, questions_for
from backend.judges.model_reward import score_metrics
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.serve.questions import QuestionCall
from backend.serve.reward_questions import judge_agreement
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.cases import cases
from tests.support.judge_server import JudgeServer, judge_server
from tests.support.verbs import refused, run_ok

NOISE, BIAS = 0.1, 0.1
PLACES: dict[str, Callable[[float], float]] = {  # of a place from 0 to 1
    "none": lambda place: 0.0,
    "first": lambda place: BIAS * (place == 0),
    "last": lambda place: BIAS * (place == 1),
    "early": lambda place: BIAS * (1 - place),
}


def simulated(kind: Kind, seed: int, place: str = "none", length: float = 0.0, noise: float = NOISE) -> Agreement:
    """8 groups of 8; the user has scored every second completion."""
    chance = random.Random(seed)
    quality = [[chance.random() for _ in range(8)] for _ in range(8)]
    groups: list[Labels] = [
        {f"Answer {i} to {group}, in a few words.": score if i % 2 else None for i, score in enumerate(scores)}
        for group, scores in enumerate(quality)
    ]

    def answer(question: Question) -> list[float | None]:
        added = {i: PLACES[place](at / 7) for at, i in enumerate(question.order)}
        true = quality[question.group]
        return [true[i] + chance.gauss(0, noise) + added[i] + length * (i in question.padded) for i in range(8)]

    questions = questions_for(groups, kind, seed)
    return measure("j", kind, groups, questions, [answer(question) for question in questions])


PLANTED: list[Any] = [
    ("group", "none", 0.0, ""),
    *(("group", place, 0.0, "looks at the place") for place in ("first", "last", "early")),
    ("group", "none", BIAS, "rewards length"),
    ("group", "none", -BIAS, "punishes length"),
    ("single", "none", 0.0, ""),
    ("single", "none", BIAS, "rewards length"),
]


def share_found(kind: Kind, place: str, length: float, sign: str, judges: int) -> float:
    """Of the judges with this bias those that are accused of it; of those without any, those accused of something."""
    concerns = ["; ".join(simulated(kind, seed, place, length).concerns) for seed in range(judges)]
    return sum(sign in text if sign else bool(text) for text in concerns) / judges


@cases(("kind", "place", "length", "sign"), PLANTED)
def test_planted_biases_are_found(kind: Kind, place: str, length: float, sign: str) -> None:
    share = share_found(kind, place, length, sign, 10)
    assert share >= 0.8 if sign else share <= 0.1


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "place", "length", "sign"), PLANTED)
def test_of_200_judges_nine_in_ten_are_found_and_one_in_twenty_accused(
    kind: Kind, place: str, length: float, sign: str
) -> None:
    share = share_found(kind, place, length, sign, 200)
    assert share >= 0.9 if sign else share <= 0.05


def test_figures_and_verdict() -> None:
    sure = simulated("group", 1, noise=0.0)
    assert (sure.calls, sure.pairs, sure.accuracy, sure.itself, sure.failed) == (48, 48, 1.0, 1.0, 0.0)
    assert sure.spearman == pytest.approx(1.0) and sure.verdict == (
        "Agrees with your labels on 100% of 48 pairs; no bias of place or length was found."
    )
    longer = simulated("group", 1, length=0.12, noise=0.0)
    assert longer.length and longer.length.points == pytest.approx(0.12)
    assert longer.verdict.endswith("; scores rise by 0.12 when answers are padded: it rewards length.")
    early = simulated("group", 1, "early", noise=0.0)
    assert early.places[0] - early.places[-1] == pytest.approx(BIAS, abs=0.03)


def test_labels_alone_failures_and_ties() -> None:
    """One case a prompt can only be compared where scores are absolute. A tie counts half, a missing score not."""
    groups: list[Labels] = [{"a": 1.0}, {"b": 0.0}, {"c": 0.5}]
    assert questions_for(groups, "group") == []
    questions = questions_for(groups, "model")
    answers = [[2.0], [3.0], [1.0], [1.0], [None], [None]]  # each plain, then padded
    found = measure("rm", "model", groups, questions, answers)
    assert (found.pairs, found.accuracy, found.failed, found.itself) == (1, 1.0, pytest.approx(1 / 3), None)
    assert found.verdict.startswith("Agrees with your labels on 100% of 1 pair, too few to tell; 33% of completions")
    tied = measure("rm", "model", groups, questions, [[1.0]] * 6)
    assert tied.accuracy == 0.5 and "does not tell" in tied.verdict


def test_filler_doubles_an_answer_and_keeps_it() -> None:
    text = "word " * 50 + "end"
    assert pad(text).startswith(text) and 100 <= len(pad(text).split()) <= 120


def test_the_window_and_the_verb_ask_a_server(tmp_path: Path) -> None:
    """The user's cases lie beside the rubric; their prompts and texts need not be among the completions."""
    rubric = tmp_path / "short.toml"
    rubric.write_text('title = "Short"\ntext = "Prefer short answers."\n')
    lines = [{"prompt": "p", "completion": "one", "expected": {"another name": 1.0}}]
    lines += [{"prompt": "p", "completion": "one two three", "expected": {"another name": 0.1}}]
    (tmp_path / "short.cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = [{"prompt": "q", "answer": "", "completions": [{"text": text} for text in ("a b", "a b c d", "a b")]}]
    reports: list[dict[str, Any]] = []
    with judge_server() as server:
        server.score = lambda text: 1 / len(text.split())
        entry = f'judge(rubric="{rubric}", url="{server.url}", name=short)'
        request = {"settings": {"reward_functions": [entry]}, "groups": groups}
        calls = judge_agreement(QuestionCall(), **(request | {"only_calls": True}))
        assert calls == {"calls": {"short": 12}, "judges": []} and not server.calls
        (found,) = judge_agreement(QuestionCall(reports.append), **request)["judges"]
        assert len(server.calls) == found["calls"] == 12 and reports[-1] == {"phase": "short", "done": 12, "of": 12}
        assert (found["pairs"], found["accuracy"], found["itself"]) == (1, 1.0, 1.0)
        assert json.loads(json.dumps(found))["length"]["points"] < 0

        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"reward_functions": [entry, "r1_int_reward_func"]}))
        printed = run_ok("rewards", "judge", config, "--cases", tmp_path / "short.cases.jsonl")
    assert printed.stdout.startswith("short: Agrees with your labels on 100% of 1 pair, too few to tell")
    one = [groups[0] | {"completions": groups[0]["completions"][:1]}]
    (tmp_path / "short.cases.jsonl").unlink()
    assert judge_agreement(QuestionCall(), **(request | {"groups": one, "only_calls": True}))["calls"] == {"short": 0}
    with pytest.raises(UserError, match="give two completions of one prompt"):
        judge_agreement(QuestionCall(), **(request | {"groups": one}))
    config.write_text("reward_functions: [r1_int_reward_func]")
    assert "is a judge or a reward model" in refused("rewards", "judge", config)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as server:
        server.score = lambda text: (len(text) % 7) / 6
        yield server


def settings(folder: Path, server: JudgeServer, **arguments: Any) -> dict[str, Any]:
    given = "".join(f', {name}="{value}"' for name, value in arguments.items())
    judge = f'judge(rubric="Be nice.", url="{server.url}"{given}, name=nice)'
    return small_run.settings_for(folder, reward_functions=[judge, "r1_int"], reward_weights=[1.0, 0.1], iters=4)


def test_a_killed_run_asks_nothing_twice(server: JudgeServer, tmp_path: Path, run: RunFolder) -> None:
    raw = settings(tmp_path, server) | {"save_every": 2}
    assert small_run.train_here(raw, run).kind == "finished"
    assert small_run.events(run, "step")[0]["metrics"]["judge/nice/failed"] == 0.0
    resumed, calls = RunFolder(tmp_path / "resumed"), len(server.calls)
    shutil.copytree(run.path, resumed.path)
    shutil.rmtree(resumed.checkpoints / "000004")
    assert small_run.train_here(raw, resumed).kind == "finished"
    assert len(server.calls) == calls
    small_run.assert_same_run(run, resumed)


def test_a_run_pauses_while_its_server_is_gone(server: JudgeServer, tmp_path: Path, run: RunFolder) -> None:
    def come_back() -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            last = [event for event in read_events(run.events) if event["kind"] == "phase"][-1:]
            if last and last[0]["phase"] == "paused":
                server.start()
                run.say("resume")
                return
            time.sleep(0.02)

    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            server.stop()
            threading.Thread(target=come_back).start()

    assert small_run.train_here(settings(tmp_path, server), run, echo).kind == "finished"
    (note,) = [note for note in small_run.notes(run) if "does not answer" in note]
    assert note.startswith("The judge nice cannot score") and "resume it" in note
    assert [event["metrics"]["judge/nice/failed"] for event in small_run.events(run, "step")] == [0.0] * 4


def test_a_run_goes_on_without_its_server(server: JudgeServer, tmp_path: Path, run: RunFolder) -> None:
    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            server.stop()

    raw = settings(tmp_path, server, when_unreachable="skip")
    assert small_run.train_here(raw, run, echo).kind == "finished"
    (note,) = [note for note in small_run.notes(run) if "does not answer" in note]
    assert "gave no score for some completions" in note
    assert [event["metrics"]["judge/nice/failed"] for event in small_run.events(run, "step")] == [0.0, 0.0, 1.0, 1.0]


def groups(*lengths: list[int]) -> list[Group]:
    problem = Problem(0, "p", [], [], "")
    return [Group(problem, [Completion([1] * length, [], "", "eos") for length in each]) for each in lengths]


def test_length_counts_within_groups_and_only_scores_at_one_end_saturate() -> None:
    """The second group is longer and scores lower: over both the correlation would be negative."""
    two = groups([1, 2, 3], [11, 12, 13])
    found = score_metrics("j", two, [0.7, 0.8, 0.9, 0.1, 0.2, 0.3])
    assert found == {"judge/j/saturated": 0.0, "judge/j/length_correlation": pytest.approx(1.0)}
    assert score_metrics("j", two, [1, 1, None, 0, 1, 0])["judge/j/saturated"] == 3 / 5
    assert score_metrics("j", two, [1.0] * 6) == {"judge/j/saturated": 1.0}
    assert score_metrics("j", two, [None] * 6) == {}
    assert set(score_metrics("rm", two, [-3.0, 8.0, 2.0, 1.0, 0.0, 1.0])) == {"judge/rm/length_correlation"}
