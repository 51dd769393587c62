"""The shipped rewards besides the five r1 functions score as their tables say, and no text makes them slow or fail."""

import math
import os
import re
import signal
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.rewards.calls import RewardError
from backend.rewards.catalogue import COMPARING_REWARDS, JUDGE, builtin_rewards
from backend.rewards.functions import math_equality
from backend.rewards.functions.answers import value
from backend.rewards.functions.formats import regex_match, think_format_reward
from backend.rewards.functions.math_equality import answer_part, correct, final_answer
from backend.rewards.resolve import resolve
from backend.rewards.scoring import TrainerState
from backend.utils.errors import UserError
from tests.support.cases import cases
from tests.support.cpu_time import Work
from tests.support.scoring import make_group, report_of, score, score_of, scores_of


@cases(
    ("text", "part", "final"),
    [
        ("4", "4", "4"),
        ("<think>3</think> 4\n", "4", "4"),
        ("<think>a</think>b<think>c</think>4", "4", "4"),
        ("<think>3</think>5<answer> 4 </answer>6", "4", "4"),
        ("<think>\\boxed{3}</think> 4", "4", "4"),
        ("<think>3", "<think>3", "<think>3"),
        ("so \\boxed{3} or \\boxed{\\frac{1}{2}}.", "so \\boxed{3} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{4}", "\\fbox{4}", "4"),
        ("\\boxed{\\{1, 2\\}}", "\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("1 \\boxed{4", "1 \\boxed{4", "1 \\boxed{4"),  # not closed
        ("3\n#### 4\n5", "3\n#### 4\n5", "4"),
        ("<answer>so \\boxed{4}</answer>", "so \\boxed{4}", "4"),
        ("", "", ""),
    ],
)
def test_final_answer_finds_tag_box_mark_or_last_text(text: str, part: str, final: str) -> None:
    assert (answer_part(text), final_answer(text)) == (part, final)


@cases(
    ("answer", "text", "right"),
    [
        *(("72", text, True) for text in ("So it is 72.", "\\boxed{72}", "<think>71</think><answer>72</answer>")),
        ("Two times 36.\n#### 72", "so\n#### 72\n", True),
        *(("72", text, False) for text in ("#### 71", "")),
        ("1,234", "1234", True),
        ("1234", "#### 1,234.00", True),
        ("-3", "−3", True),
        ("007", "7", True),
        ("9" * 400, "\\boxed{" + "9" * 400 + "}", True),
        ("$18.90", "It costs \\boxed{\\$18.9}", True),
        ("sqrt(12)", "\\boxed{2\\sqrt{3}}", True),
        ("(1,2)", "\\boxed{(1,2)}", True),
        ("(1,2)", "\\boxed{(2,1)}", False),
        ("x=5", "5", True),
        ("12", "\\boxed{12 apples}", True),
        ("Paris", "<answer>paris.</answer>", True),
        ("Paris", "<answer>pairs</answer>", False),  # as formulas they were one product of letters
        ("\\text{Paris}", "\\boxed{Paris}", True),
        *((empty, "4", None) for empty in ("", " \n")),
    ],
)
def test_accuracy_compares_mathematics_and_words(answer: str, text: str, right: bool | None) -> None:
    assert score_of("accuracy_reward", text, answer) == right


def test_an_endless_comparison_scores_0_and_the_next_one_is_compared() -> None:
    # sympy computes 9^{9^9} in one call into C, which no thread and no Python signal handler can end.
    began = time.perf_counter()
    assert correct(["\\boxed{9^{9^{9}}}", "\\boxed{\\frac{14}{4}}"], ["7/2", "7/2"]) == [False, True]
    assert time.perf_counter() - began < 15


def test_after_five_endless_comparisons_the_rest_is_compared_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = []
    monkeypatch.setattr(math_equality, "_math_verify_verdict", lambda right, given: comparisons.append(given))
    texts = [f"\\boxed{{{n}!!}}" for n in range(8)] + ["\\boxed{x+1}"]
    assert correct([texts[0], *texts], ["x+1"] * 10) == [False] * 9 + [True]
    assert comparisons == ["0!!", *(f"{n}!!" for n in range(5))]  # one text that comes twice counts once


def test_math_verify_that_cannot_start_raises_instead_of_scoring_0() -> None:
    with pytest.raises(RuntimeError, match="ended at once, with code 7"):
        math_equality._MathVerify([sys.executable, "-c", "raise SystemExit(7)"]).ask("1/2", "0.5")
    with pytest.raises(RuntimeError, match="math-verify is gone"):
        math_equality._MathVerify([sys.executable, "-c", "print('\"math-verify is gone\"')"]).ask("1/2", "0.5")


ECHO = """
import json, os, signal, sys
open(sys.argv[1], "a").write("x")
print('"ready"', flush=True)
for line in sys.stdin:
    right, given = json.loads(line)
    if given == "die": raise SystemExit(1)
    if given == "endless": os.kill(os.getpid(), signal.SIGPROF)
    print(json.dumps(right == given), flush=True)
"""


def test_a_child_that_died_is_replaced_and_the_comparison_repeated(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    math_verify = math_equality._MathVerify([sys.executable, "-c", ECHO, str(starts)])
    assert math_verify.ask("a", "a") is True
    assert math_verify.child.pid is not None
    os.kill(math_verify.child.pid, signal.SIGKILL)
    assert math_verify.ask("a", "b") is False
    assert math_verify.ask("a", "die") is None
    assert starts.read_text() == "xxx", "given up after the second child"
    assert math_verify.ask("a", "endless") is None
    assert starts.read_text() == "xxxx", "what ran out of time is not tried again"
    assert math_verify.ask("a", "a") is True
    math_verify.child.stop()
    assert math_verify.child.pid is None


@cases(
    ("text", "number"),
    [
        ("14", 14),
        ("(3+4)*2", 14),
        ("[3+4]×2 ÷ 1", 14),
        ("3+4 = 7", 7),
        ("1+1 = 14", None),  # a false equation is no answer, though it ends in one
        ("2^10", 1024),
        ("2**-2", Fraction(1, 4)),
        ("7 // 2 + 7 % 2", 4),
        ("1/3", Fraction(1, 3)),
        ("0.1+0.2", Fraction(3, 10)),
        ("1,234 + 1", 1235),
        ("007 + 1.007", Fraction(8007, 1000)),
        ("$5.", 5),
        *((text, None) for text in ("", "4**0.5", "1/0", "3(4)", "x", "1j", "1e999", "1,23", "9**9**9", "(1/3)**5000")),
        *((text, None) for text in ("__import__('os').getpid()", "9" * 5000, "(" * 240 + "1" + ")" * 240)),
        ("10**300*10**300*10**300*10**300*10**300", None),
    ],
)
def test_arithmetic_is_exact_within_its_limits(text: str, number) -> None:
    with Work() as work:
        assert value(text) == number
    assert work.seconds < 0.2


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="0123456789+-*/%^().=eE ", max_size=40))
def test_arithmetic_never_fails_and_never_hangs(text: str) -> None:
    number = value(text)
    assert number is None or isinstance(number, Fraction)


@cases(
    ("text", "answer", "right"),
    [
        ("B", "B", True),
        ("b", "(B)", True),
        *((text, "B", False) for text in ("C", "BC", "<answer>Paris (B)</answer>", "")),
        ("<answer>(B)</answer>", "B) Paris", True),
        *((text, "B", True) for text in ("<answer>B: A city</answer>", "\\boxed{\\text{B}}", "**B**")),
        ("A is wrong, and C too. The answer is B because C is not.", "B", True),
        ("Answer: A? No. Answer: **B**", "B", True),
        ("It is Paris.\nB", "B", True),
        ("<answer>A city</answer>", "A", False),  # an article
        ("A city", "A", False),
        ("A and C", "C, A", True),
        ("A, B, and D", "A, B, D", True),
        ("A and C", "A", False),
        ("A and C are wrong", "A, C", False),
        ("answer: B\n" + "." * 490, "B", True),
        ("answer: B\n" + "." * 491, "B", False),  # of a huge text the last 500 characters are read
    ],
)
def test_multiple_choice_compares_sets_of_options(text: str, answer: str, right: bool) -> None:
    assert score_of("multiple_choice", text, answer) == float(right)


SAID = ["the cat sat", "the cat", "sat sat sat", "<think>a cat</think><answer>dog</answer>"]
SCORES: list[tuple[str, list[str], str, list[float | None]]] = [
    (
        "accuracy_reward(after_thoughts=true)",
        ["<think>5</think> \\boxed{4}", "<think>\\boxed{4}", "\\boxed{4}", "<think>4</think> 5"],
        "4",
        [1, 0, 0, 0],
    ),
    ("math_eval", ["<think>?</think><answer>(1+3)*6</answer>", "24", "25", "", "many"], "24", [1, 1, 0, 0, 0]),
    ("math_eval", ["0.333", "0.3333333"], "1/3", [0, 1]),
    ("math_eval(tolerance=0.01)", ["0.333", "0.3", "1/3"], "1/3", [1, 0, 1]),
    ("math_eval(tolerance=0)", ["0.3333333", "2/6"], "1/3", [0, 1]),
    ("math_eval", ["0.0000001"], "0", [0]),  # nothing is near zero but zero
    ("math_eval", ["-1"], "-1.0000001", [1]),
    ("math_eval", ["4"], "a word", [None]),
    ("multiple_choice", ["A", "A, C", "A, B"], "A, C", [0, 1, 0]),
    ("multiple_choice", [""], "", [None]),
    ("multiple_choice(partial=true)", ["A", "A, C", "A, B", "", "D"], "A, C", [0.5, 1, 1 / 3, 0, 0]),
    ("multiple_choice(partial=true)", ["A"], "Paris", [None]),
    ("jaccard", SAID, "The cat sat.", [1, 2 / 3, 1 / 3, 0]),
    ("jaccard", ["the cat", ""], "a cat", [1 / 3, 0]),
    ("jaccard", ["cat"], "…", [None]),
    ("jaccard", ["Straße"], "STRASSE", [1]),
    ("keyword(word=therefore)", ["Therefore", "so", "", "x thereforex"], "4", [1, 0, 0, 1]),
    ("keyword(word=Therefore, case=true)", ["Therefore", "so", "", "x thereforex"], "4", [1, 0, 0, 0]),
    ("keyword(word=THEREFORE)", ["Therefore", "so", "", "x thereforex"], "4", [1, 0, 0, 1]),
    (r'regex_match(pattern=r"^\d+$")', ["12", "a12", "", "12 "], "4", [1, 0, 0, 0]),
    ("regex_match(pattern='b')", ["abc", "a"], "4", [1, 0]),
    ("regex_match(pattern='a.c')", ["a\nc"], "4", [0]),
    ("regex_match(pattern='(?s)a.c')", ["a\nc"], "4", [1]),
    ("diversity", ["a b c", "a b c"], "4", [0, 0]),
    ("diversity", ["a b", "c d"], "4", [1, 1]),
    ("diversity", ["a b c", "a b c", "d e f"], "4", [0.5, 0.5, 1]),
    ("diversity", ["a b c", "A B D"], "4", [2 / 3, 2 / 3]),  # ab in {ab, bc, bd}
    ("diversity", ["", ""], "4", [0, 0]),
    ("diversity", ["", "a"], "4", [1, 1]),
    ("diversity", ["a"], "4", [None]),
    ("r1_int", ["<answer>-3</answer>", "<answer>3</answer>", "<answer></answer>"], "4", [0.5, 0.5, 0]),
    ("r1_int(sign=false)", ["<answer>-3</answer>", "<answer>3</answer>", "<answer></answer>"], "4", [0, 0.5, 0]),
]


@cases(("entry", "texts", "answer", "expected"), SCORES)
def test_functions_score_as_their_tables_say(entry: str, texts: list[str], answer: str, expected: list) -> None:
    assert scores_of(entry, texts, answer) == pytest.approx(expected)


def test_a_pattern_that_backtracks_for_years_matches_nothing_and_ends() -> None:
    texts = ["a" * 60 + "b", "aaa"]
    began = time.thread_time()
    assert regex_match(["?"] * 2, texts, ["4"] * 2, pattern="^(a|aa)+$") == [0, 1]
    assert time.thread_time() - began < 0.5


@cases(
    ("text", "score"),
    [
        *((text, 1.0) for text in ('{"a": 1}', ' {"a": [1, {"b": null}]}\n', "<think>{</think>{}", '{\n"a": 1\n}')),
        ('```json\n{"a": 1}\n```', 1.0),
        ('{"a": ' + "9" * 10_000 + "}", 1.0),  # Python's own limit is 4300 digits
        *((text, 0.5) for text in ("[1, 2]", "3")),
        *(
            (text, 0.0)
            for text in ("```json\n{\n", '{"a": NaN}', "{'a': 1}", '{"a": 1} so', "", "[" * 100_000 + "]" * 100_000)
        ),
    ],
)
def test_json_scores_whole_for_an_object_and_half_for_the_rest(text: str, score: float) -> None:
    assert score_of("valid_json", text) == score


PIECES = ["<think>", "</think>", "a", "\n", "<answer>", "think"]
TRL_THINK = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.sampled_from(["", " ", "\n\n"]))
def test_think_format_is_trls_with_white_space_free_before_it(text: str, before: str) -> None:
    # The regular expression that it replaces, which backtracks, on text without leading white space.
    expected = float(TRL_THINK.match(text.lstrip()) is not None)
    assert think_format_reward(["?"], [before + text], ["4"]) == [expected]


def test_repetition_is_the_share_of_repeated_token_runs() -> None:
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2], [], [1, 2, 1, 2, 1, 2]]
    texts = ["a", "b", "c", "", "d"]
    assert scores_of("repetition_penalty(ngram_size=2)", texts, ids=ids) == [0, -0.75, 0, 0, pytest.approx(-0.6)]
    assert scores_of("repetition_penalty(max_penalty=-0.5)", texts, ids=ids) == [0, pytest.approx(-1 / 3), 0, 0, -0.25]
    assert scores_of("repetition_penalty(ngram_size=1)", ["a"], ids=[[7] * 100]) == [pytest.approx(-0.99)]
    assert math.copysign(1, scores_of("repetition_penalty", ["a"], ids=[[1]])[0]) == 1  # a plain zero


@cases(
    ("entry", "length", "score"),
    [
        ("(max_completion_length=100, cache=20)", 81, -0.05),
        ("(max_completion_length=100, cache=20)", 90, -0.5),
        ("(max_completion_length=100, cache=20)", 101, -1.0),
        ("(max_completion_length=100, cache=0)", 100, 0.0),
        ("(max_completion_length=100, cache=0)", 101, -1.0),
        ("(max_completion_length=100)", 90, -0.5),  # a fifth
        ("", 45, -0.5),  # of the run's 50
        ("(cache=50)", 25, -0.5),
        ("(max_completion_length=100)", 0, 0.0),
    ],
)
def test_overlong_completions_are_punished_softly(entry: str, length: int, score: float) -> None:
    state = TrainerState(max_completion_length=50)
    text = "x" if length else ""
    assert score_of(f"soft_overlong_punishment{entry}", text, ids=[1] * length, trainer_state=state) == pytest.approx(
        score
    )


def test_cosine_rewards_short_right_answers_and_long_wrong_ones() -> None:
    state = TrainerState(max_completion_length=100)

    def at(text: str, length: int, entry: str = "cosine_scaled") -> float | None:
        return score_of(entry, text, "4", [1] * length, trainer_state=state)

    assert [at("4", n) for n in (1, 50, 100, 1000)] == [pytest.approx(1.0, abs=1e-3), 0.75, 0.5, 0.5]
    assert [at("5", n) for n in (1, 50, 100, 1000)] == [pytest.approx(-1.0, abs=1e-3), -0.75, -0.5, -0.5]
    assert at("4", 25) == pytest.approx(0.5 + 0.25 * (1 + math.cos(math.pi / 4)))
    assert at("", 0) == -1.0
    values = "min_value_wrong=-4, max_value_wrong=-3, min_value_correct=1, max_value_correct=2"
    assert at("4", 20, f"cosine_scaled({values}, max_completion_length=20)") == 1.0
    assert at("5", 10, f"cosine_scaled({values}, max_completion_length=20)") == -3.5
    assert score_of("cosine_scaled", "4", "", [1], trainer_state=state) is None


def test_a_length_target_falls_to_both_sides() -> None:
    ids = [[1] * n for n in (0, 1, 5, 10, 15, 20, 1000)]
    texts = ["", *"abcdef"]
    assert scores_of("length_target(target=10)", texts, ids=ids) == [0, pytest.approx(0.1), 0.5, 1, 0.5, 0, 0]
    assert score_of("length_target", "a", ids=[1] * 200) == 1


@pytest.mark.parametrize("entry", ["repetition_penalty", "soft_overlong_punishment", "cosine_scaled", "length_target"])
def test_length_rewards_have_no_opinion_without_token_ids(entry: str) -> None:
    state = TrainerState(max_completion_length=50)
    assert scores_of(entry, ["4", "5"], ids=[[], [1]], trainer_state=state)[0] is None


@pytest.mark.parametrize("entry", ["soft_overlong_punishment", "cosine_scaled"])
def test_a_missing_length_limit_is_refused(entry: str) -> None:
    with pytest.raises(RewardError, match="it needs a max_completion_length"):
        score_of(entry, "4", ids=[1])


def test_diversity_knows_the_groups_by_their_prompts() -> None:
    first, second = make_group("a b", "a b"), make_group("a b", "c d")
    second.problem.prompt = "another"
    score([first, second], resolve(["diversity"]), 20)
    assert [c.reward for group in (first, second) for c in group.completions] == [0.0, 0.0, 1.0, 1.0]
    assert scores_of("diversity(ngram_size=1)", ["b a", "a b"]) == [0.0, 0.0]
    with pytest.raises(UserError, match="ngram_size must be from 1 to 20"):
        resolve(["diversity(ngram_size=0)"])


ARGUMENTS = {"keyword": "(word=so)", "regex_match": "(pattern='(a|aa)+$')"}
ENTRIES = [entry.name + ARGUMENTS.get(entry.name, "") for entry in builtin_rewards() if entry.name != JUDGE]
HUGE = [
    "",
    "a" * 2_000_000 + "!",
    "<think>" * 200_000,
    "<answer>" * 200_000 + "</answer>" * 9,
    "\\boxed{" * 200_000,
    "{" * 1_000_000 + "\\boxed{" + "}" * 9,
    "#" * 1_000_000,
    "$" * 1_000_000,
    "answer is " * 100_000,
    "A, " * 300_000,
    "(" * 1_000_000,
    "9" * 1_000_000,
    "1+" * 500_000 + "1",
    "= " * 500_000,
    '{"a":' * 200_000,
    "\0\ud800\u202e" * 300_000,
    "word " * 300_000,
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_huge_and_hostile_texts_are_scored_in_bounded_time(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_equality, "PATIENCE", 1)
    began = time.perf_counter()
    state = TrainerState(max_completion_length=512)
    scores = scores_of(entry, HUGE, "7/2", [[1] * min(len(text), 2048) for text in HUGE], trainer_state=state)
    assert time.perf_counter() - began < 30
    assert len(scores) == len(HUGE) and all(score is None or math.isfinite(score) for score in scores)
    without_zero = "cosine_scaled_reward", "multiple_choice", "choice_correctness", "code_tests", "diversity"
    if entry not in (*without_zero, "session_reward"):
        assert scores[0] == 0


def all_scores(entries: list[str], texts: list[str], answer: str) -> dict[str, list[float | None]]:
    group = make_group(*texts, answer=answer)
    report_of(group, entries, trainer_state=TrainerState(max_completion_length=512))
    return {name: [each.scores[name] for each in group.completions] for name in group.completions[0].scores}


@settings(max_examples=5, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=3), st.sampled_from(["4", "B", "1/2", "Paris"]))
def test_any_text_gets_a_finite_score_or_none_from_each(texts: list[str], answer: str) -> None:
    entries = [entry for entry in ENTRIES if entry not in ("accuracy_reward", "cosine_scaled_reward")]
    for scores in all_scores(entries, texts, answer).values():
        assert all(score is None or (type(score) is float and -1 <= score <= 2) for score in scores)


def test_only_the_comparing_rewards_depend_on_the_answer() -> None:
    texts = ["<think>a</think><answer>A</answer>", "<answer>4</answer>", "", '{"so": 1}', "A"]
    seen = [all_scores(ENTRIES, texts, right) for right in ("A", "4", "")]
    assert {name for name in seen[0] if any(each[name] != seen[0][name] for each in seen)} == {*COMPARING_REWARDS}
