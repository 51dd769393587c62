"""The five r1 functions score as documented; scoring a step fills every completion or stops the run in one printable
line; weights follow their schedule exactly, also after a resume."""

import asyncio
import itertools
import json
import math
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from backend.rewards import calls as timeout
from backend.rewards import get_reward_function
from backend.rewards.calls import Failure, RewardError, describe_error
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import resolve
from backend.rewards.weights import WeightSchedule
from backend.types import Completion, Problem
from backend.utils.errors import UserError
from tests.support.cases import cases
from tests.support.scoring import make_group, reward_function, score

PERFECT = "<think>2 and 2</think><answer>4</answer>"


def r1(text: str, answer: str = "4") -> tuple[float, ...]:
    """Accuracy, integer, strict, soft, count of one completion."""
    return tuple(get_reward_function(name)(["q"], [text], [answer], None)[0] for name in DEFAULT_REWARDS)


def scored(call, *texts: str, timeout_s: float = 5.0, **about) -> list[float | None]:
    group = make_group(*(texts or ("a", "b")), **about)
    score([group], [reward_function("mine", call)], timeout_s)
    return [completion.scores["mine"] for completion in group.completions]


def failure(call, *texts: str, timeout_s: float = 5.0) -> str:
    with pytest.raises(RewardError) as caught:
        scored(call, *texts, timeout_s=timeout_s)
    assert [fault.setting for fault in caught.value.faults] == ["reward_functions"]
    sentence = caught.value.faults[0].sentence
    assert sentence.endswith(".") and "\n" not in sentence
    assert "mine" in sentence
    return sentence


@cases(
    "text",
    [
        PERFECT,
        "<think>\n2 and 2\n</think>\n<answer>\n4\n</answer>",
        "<think>2\nand\n2</think>\n\n<answer> 4 </answer>\n",
        "\n  <think> 2 and 2 </think> <answer> 4 </answer>  \n\n",
        "<reasoning>\n2 and 2\n</reasoning>\n<answer>\n4\n</answer>\n",
        "<think>no <reasoning> here</think><answer>4</answer>",
    ],
)
def test_a_well_formed_completion_earns_every_r1_reward_in_full(text: str) -> None:
    # The library these names come from required "<think>\n" in one function and "<think> " in another:
    # no completion could have both.
    assert r1(text) == (2.0, 0.5, 0.5, 0.5, 0.5)


@cases(
    ("text", "expected"),
    [
        ("", (0, 0, 0, 0, 0)),
        ("4", (0, 0, 0, 0, 0)),  # no tags, nothing extracted
        ("<answer>4</answer>", (2, 0.5, 0, 0, 0.25)),
        ("<answer>4", (0, 0, 0, 0, 0.125)),
        ("<think>2 and 2", (0, 0, 0, 0, 0.125)),
        ("<think>a</think><answer>5</answer><answer>4</answer>", (2, 0.5, 0, 0.5, 0.25)),  # the last one counts
        ("<think>a</think><answer>4</answer><answer>5</answer>", (0, 0.5, 0, 0.5, 0.25)),
        ("<answer>4</answer><answer>5", (2, 0.5, 0, 0, 0.116)),  # the last that is closed; nine characters trail
        ("<think>a</think><answer>4</answer> so", (2, 0.5, 0, 0.5, 0.497)),  # three trailing characters
        ("Well: " + PERFECT, (2, 0.5, 0, 0.5, 0.5)),
        ("<think>a</think>so<answer>4</answer>", (2, 0.5, 0, 0.5, 0.5)),
        ("<answer>4</answer><think>a</think>", (2, 0.5, 0, 0, 0.484)),
        ("<think></think><answer>4</answer>", (2, 0.5, 0, 0, 0.5)),
        ("<think>a</think><answer> </answer>", (0, 0, 0, 0, 0.5)),
        ("<think>a</reasoning><answer>4</answer>", (2, 0.5, 0, 0, 0.375)),
        ("</think><think>a</think><answer>4</answer>", (2, 0.5, 0, 0.5, 0.375)),  # closed once more before it opens
        ("<think>a</think><think>b</think><answer>4</answer>", (2, 0.5, 0, 0.5, 0.25)),
        (PERFECT + "x" * 501, (2, 0.5, 0, 0.5, 0)),  # never below 0
    ],
)
def test_each_edge_scores_as_the_table_says(text: str, expected: tuple[float, ...]) -> None:
    assert r1(text) == pytest.approx(expected)


@cases(
    ("text", "is_integer"),
    [
        *((text, True) for text in ("4", "-3", " 007\n")),
        *((text, False) for text in ("²", "٣", "4.0", "+4", "--4", "- 4", "1 2", "−3", "4\n5", "-")),
    ],
)
def test_an_integer_is_ascii_digits_with_an_optional_minus(text: str, is_integer: bool) -> None:
    # str.isdigit says yes to "²" and no to "-3".
    assert r1(f"<answer>{text}</answer>")[1] == (0.5 if is_integer else 0.0)


def test_answers_are_stripped_before_comparing_and_an_empty_one_is_never_right() -> None:
    assert r1("<answer>\n four \n</answer>", " four ")[0] == 2.0
    assert r1("<answer>Four</answer>", "four")[0] == 0.0
    assert r1("<answer></answer>", "")[0] == 0.0


def test_functions_of_the_own_file_are_the_nearest_and_come_first(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def format_reward(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    with pytest.raises(
        UserError, match="format; the nearest is format_reward, and the known ones are format_reward, r1"
    ):
        resolve(["format"], file)


def test_all_unknown_names_are_reported_at_once_each_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        resolve(["r1_acuracy", "zzz", "r1_int", "r1_int_reward_func"])
    near, far, twice = (str(fault) for fault in caught.value.faults)
    assert "r1_acuracy; the nearest is r1_accuracy_reward_func, and the known ones are" in near
    assert "zzz; the known ones are r1_accuracy_reward_func, " in far
    assert "r1_int_reward_func is listed 2 times" in twice
    assert all(fault.setting == "reward_functions" for fault in caught.value.faults)


def test_reward_is_the_weighted_sum_over_functions_with_an_opinion() -> None:
    first, second = make_group("a", "bb"), make_group("ccc")
    functions = [
        reward_function("length", lambda completions, **_: [len(text) for text in completions]),
        reward_function("picky", lambda completions, **_: [10 if "b" in text else None for text in completions]),
    ]
    report = score([first, second], functions, weights=[2.0, 0.5])
    assert [c.reward for c in first.completions + second.completions] == [2.0, 9.0, 6.0]
    assert first.completions[0].scores == {"length": 1.0, "picky": None}
    assert len(report.seconds) == 2 and all(s >= 0 for s in report.seconds)


def test_a_function_is_called_once_with_the_completions_of_all_groups() -> None:
    calls = []

    def mine(prompts, completions, answer, types):
        calls.append((prompts, completions, answer, types))
        return [0] * len(prompts)

    score([make_group("a", "b"), make_group("c", answer="5", kind="sum")], [reward_function("mine", mine)])
    assert calls == [(["What is 2 + 2?"] * 3, ["a", "b", "c"], ["4", "4", "5"], [None, None, "sum"])]


def test_columns_and_token_ids_are_passed_by_name() -> None:
    def mine(completions, difficulty, completion_ids, *, unknown=7, **rest):
        assert unknown == 7
        inputs = {"prompts", "answer", "types", "completions_ids", "trainer_state", "log_extra", "log_metric"}
        assert set(rest) == inputs | {"topic"}
        return [d + len(ids) for d, ids in zip(difficulty, completion_ids, strict=True)]

    assert scored(mine, difficulty=3, topic="sums", prompt="raw", answer="4") == [5.0, 5.0]


def test_an_unknown_required_argument_is_named_with_the_nearest_input() -> None:
    # Reported by users of such trainers: the function takes `answers` where the trainer passes `answer`.
    sentence = failure(lambda completions, answers: [0, 0])
    assert "asks for answers" in sentence and "the nearest is answer." in sentence


def test_a_function_that_sorts_its_inputs_does_not_change_the_next_functions_inputs() -> None:
    group = make_group("b", "a")
    sorts = reward_function("sorts", lambda completions: completions.sort() or [0, 0])
    looks = reward_function("looks", lambda completions: [text == "b" for text in completions])
    score([group], [sorts, looks])
    assert [completion.scores["looks"] for completion in group.completions] == [1.0, 0.0]


@cases(
    "call",
    [
        lambda completions: [True, False],
        lambda completions: (1, 0),
        lambda completions: (float(x) for x in (1, 0)),
        lambda completions: np.array([1.0, 0.0], dtype=np.float32),
        lambda completions: [np.float16(1), np.int64(0)],
    ],
)
def test_numbers_of_every_library_are_scores(call) -> None:
    scores = scored(call)
    assert scores == [1.0, 0.0] and all(type(number) is float for number in scores)


# Scoring that stops the run


def raises(completions):
    raise KeyError("no\nsuch key")


@cases(
    ("call", "words"),
    [
        (raises, "raised KeyError: 'no\\nsuch key' (test_rewards.py, line"),
        (lambda completions: exit(3), "raised SystemExit: 3"),
        (lambda completions: [1.0], "returned 1 score for 2 completions."),
        (lambda completions: 1.0, "returned float where a list of 2 scores was expected"),
        (lambda completions: None, "returned None where"),
        (lambda completions: "10", "returned str where"),
        (lambda completions: {"a": 1, "b": 2}, "returned dict where"),
        (lambda completions: [1, "0.5"], "returned '0.5' (str) as a score, which is not a number"),
        (lambda completions: [1, 2j], "2j (complex) as a score, which is not a number"),
        (lambda completions: [1, math.nan], "returned nan as a score"),
        (lambda completions: [1, -math.inf], "returned -inf as a score"),
        (lambda completions: [1, 10**400], "returned inf as a score"),
        (lambda completions: [1, -1.1e30], "returned -1.1e+30 as a score, which is too large for 32 bits"),
    ],
)
def test_a_failing_function_stops_the_run_in_one_sentence(call, words: str) -> None:
    sentence = failure(call)
    assert words in sentence
    assert ("What is 2 + 2?" in sentence) == ("as a score" in words), "only a wrong score has a completion to blame"


def test_the_sentence_quotes_the_first_wrong_completion_shortened() -> None:
    sentence = failure(lambda completions: [0, math.nan], "fine", "bad\n" + "x" * 10_000_000)
    assert "“bad xxx" in sentence and "fine" not in sentence and len(sentence) < 400


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reward function"]


def hangs(completions):
    while True:
        pass


def hangs_and_shrugs(completions):
    while True:
        with suppress(Exception):
            hangs(completions)


def hangs_when_read(completions):
    yield 1.0
    hangs(completions)


async def hangs_in_await(completions):
    await asyncio.sleep(1000)


@pytest.mark.parametrize("call", [hangs, hangs_and_shrugs, hangs_when_read, hangs_in_await])
def test_a_function_that_hangs_is_interrupted_and_named(call) -> None:
    began = time.perf_counter()
    sentence = failure(call, timeout_s=0.2)
    assert "was still running after 0.2 s (reward_timeout)" in sentence
    assert time.perf_counter() - began < 3.0
    assert workers() == []  # its event loop does not outlive the call


def test_a_function_that_cannot_be_interrupted_still_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """time.sleep is one call into C: the exception that is to interrupt it waits until it returns."""
    monkeypatch.setattr(timeout, "_INTERRUPT_FOR_S", 0.2)
    began = time.perf_counter()
    failure(lambda completions: time.sleep(1.5), timeout_s=0.1)
    assert time.perf_counter() - began < 1.2
    assert all(thread.daemon for thread in workers())  # nor does it keep the process from ending


HUGE = "long \x1b[31m\n\u202e" * 500


@pytest.mark.parametrize("raised", [False, True])
def test_messages_fit_on_a_line(raised: bool) -> None:
    whats = ["raised ValueError: no (mine.py, line 3)", f"raised {HUGE} (mine.py, line 3)"]
    blamed = [None, *itertools.product(["", "short", HUGE], repeat=2)]
    files = [None, Path("mine.py"), Path("m" * 250 + ".py")]
    for what, texts, name, file in itertools.product(whats, blamed, ["f", "f" * 2_500], files):
        samples = [(Problem(0, texts[0], [], [], ""), Completion([], [], texts[1], "eos"))] if texts else []
        function = FunctionDescription(name, file, 12_345)
        failure = Failure(what, completion=0 if texts else None, raised=raised)
        (problem,) = RewardError.of_call(function, failure, samples).faults
        assert len(problem.sentence) <= (320 if texts else 200) and problem.sentence.isprintable()
        assert f"line 3){', on the prompt “' if texts else '.'}" in problem.sentence, "what is cut keeps its end"
        assert ("line 12345" in problem.sentence) != raised
        if texts and len("".join(texts)) <= 10:
            assert problem.sentence.endswith(f", on the prompt “{texts[0]}” and the completion “{texts[1]}”.")


def test_in_the_app_a_missing_module_comes_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rewards_for_mathematics.py"
    file.write_text("import sentence_transformers\n")
    with pytest.raises(ModuleNotFoundError) as missing:
        exec(compile(file.read_text(), str(file), "exec"), {"__name__": "theirs"})
    words = describe_error(missing.value, file)
    assert "sentence_transformers" in words and words.endswith("line 1)")
    monkeypatch.setattr("backend.rewards.calls.is_bundled", lambda: True)
    assert describe_error(missing.value, file) == f"{words}; not in the app: use grpo-studio from pip"


def adaptive(weights=(2.0, 1.0), names=("a", "b"), **about) -> WeightSchedule:
    return WeightSchedule("adaptive", list(weights), names=list(names), **about)


def graded(**scores: list[float | None]):
    group = make_group(*("" for _ in next(iter(scores.values()))))
    for index, completion in enumerate(group.completions):
        completion.scores = {name: values[index] for name, values in scores.items()}
    return [group]


def test_linear_weights_reach_their_final_value_at_the_last_step_and_keep_it() -> None:
    schedule = WeightSchedule("linear", [1.0, 0.0, 0.1], [0.0, 3.0, 0.1], steps=5)
    assert [schedule.at(step) for step in (1, 2, 3, 5)] == [
        [1.0, 0.0, 0.1],
        [0.75, 0.75, pytest.approx(0.1)],
        [0.5, 1.5, pytest.approx(0.1)],
        [0.0, 3.0, 0.1],
    ]
    assert schedule.at(0) == schedule.at(1) and schedule.at(6) == schedule.at(99) == schedule.at(5)
    shortest = WeightSchedule("linear", [1.0], [3.0], steps=2)
    assert [shortest.at(1), shortest.at(2)] == [[1.0], [3.0]]


def test_an_adaptive_weight_rises_where_a_function_struggles_and_falls_where_it_succeeds() -> None:
    schedule = adaptive(every=2, window=2)
    schedule.observe(1, {"a": 0.1, "b": 0.9})
    assert schedule.at(2) == [2.0, 1.0]  # not yet
    schedule.observe(2, {"a": 0.4, "b": 0.9})
    assert schedule.at(3) == [2.0 * 1.2, 1.0 * 0.9]
    schedule.observe(3, {"a": 0.3, "b": 0.8})
    schedule.observe(4, {"a": 0.3, "b": 0.8})
    assert schedule.at(5) == [2.0 * 1.2, 1.0 * 0.9]  # exactly 0.3 and 0.8 are neither


def test_adaptive_weights_stay_within_bounds_and_keep_their_sign() -> None:
    schedule = adaptive([2.0, -1.0, 0.0], "abc", every=1)
    for step in range(1, 100):
        schedule.observe(step, {"a": 0.0, "b": 0.0, "c": 0.0})
    assert schedule.at(100) == [20.0, -10.0, 0.0]
    for step in range(100, 300):
        schedule.observe(step, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert schedule.at(300) == pytest.approx([0.2, -0.1, 0.0])


def test_success_is_a_score_above_the_middle_of_the_range_so_far() -> None:
    schedule = adaptive([1, 1, 1, 1], ["hit", "penalty", "mixed", "mute"], every=1)
    step = graded(hit=[2.0, 0.0, 1.0, None], penalty=[0, -0.1, -0.6, -1], mixed=[-1.0, 1.0, 0.0, 0.5], mute=[None] * 4)
    assert schedule.observe_scores(1, step) == {"hit": pytest.approx(1 / 3), "penalty": 0.5, "mixed": 0.5}
    # the range is that of the whole run: a step of equal scores is compared with earlier ones
    again = graded(hit=[0.0, 0.0], penalty=[0.0, 0.0], mixed=[1.0, 1.0], mute=[0.0, 0.0])
    assert schedule.observe_scores(2, again) == {"hit": 0.0, "penalty": 1.0, "mixed": 1.0}
    # and 0 is in it, returned or not
    assert adaptive([1], ["a"]).observe_scores(1, graded(a=[2.0, 1.25])) == {"a": 1.0}
    assert adaptive([1], ["a"]).observe_scores(1, graded(a=[-2.0, -0.75])) == {"a": 0.5}


def random_run(schedule: WeightSchedule, steps: range, seed: int) -> list[list[float]]:
    weights = []
    for step in steps:
        draw = random.Random(f"{seed} {step}")
        scores = {name: [draw.choice([None, -1.0, 0.0, 0.5, 2.0]) for _ in range(4)] for name in schedule.names}
        schedule.observe_scores(step, graded(**scores))
        weights.append(schedule.at(step + 1))
    return weights


@pytest.mark.parametrize("cut", [1, 7, 10, 23])
def test_a_restored_schedule_continues_exactly(cut: int) -> None:
    uninterrupted = random_run(adaptive(every=3, window=5), range(1, 40), 1)
    assert len({tuple(weights) for weights in uninterrupted}) > 3
    first = adaptive(every=3, window=5)
    before = random_run(first, range(1, cut + 1), 1)
    state = first.state()
    saved = json.loads(json.dumps(state))
    random_run(first, range(cut + 1, 40), 2)  # what happens later does not reach into what was saved
    second = adaptive(every=3, window=5)
    second.restore(saved)
    assert second.at(cut + 1) == before[-1]
    assert before + random_run(second, range(cut + 1, 40), 1) == uninterrupted
    assert state == saved != second.state()


def test_a_state_of_another_schedule_is_refused() -> None:
    saved = adaptive().state()
    for other in (
        adaptive(names=("a", "c")),
        adaptive(names=("b", "a")),
        WeightSchedule("constant", [1, 1], names=["a", "b"]),
    ):
        with pytest.raises(ValueError, match="another schedule or of other reward functions"):
            other.restore(saved)


@cases(
    ("arguments", "words"),
    [
        ({"kind": "constant", "weights": [float("nan")]}, "must be a finite number"),
        ({"kind": "linear", "weights": [1], "final": [float("inf")], "steps": 5}, "must be a finite number"),
        ({"kind": "linear", "weights": [1], "final": [2], "steps": 1}, "at least 2 steps"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WeightSchedule(**arguments)
