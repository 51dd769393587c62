"""Entries of reward_functions are parsed, made canonical, and refused in one sentence without running code; the
catalogue reads names and sentences from source text as running it would register them."""

import keyword
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.rewards import functions as functions
from backend.rewards.catalogue import (
    BUILT_IN,
    DEFAULT_REWARDS,
    JUDGE,
    Parameter,
    RewardCall,
    builtin_rewards,
    canonical_entry,
    computes_names,
    metric_name,
    nearest,
    read_call,
    reward_faults,
    rewards_in_file,
    scorable,
    split_names,
)
from backend.rewards.registry import REWARD_REGISTRY
from backend.rewards.resolve import load_reward_file, resolve
from backend.utils.errors import UserError
from backend.utils.text import quote
from tests.support.cases import cases
from tests.support.scoring import make_group, score


def sentence_of(text: str) -> str:
    with pytest.raises(UserError) as caught:
        read_call(text)
    (fault,) = caught.value.faults
    assert fault.setting == "reward_functions" and fault.sentence.endswith(".") and len(fault.sentence) < 300
    return fault.sentence


def sentences(*texts: str, entries=None, base: Path | None = None) -> list[str]:
    faults = reward_faults(texts, builtin_rewards() if entries is None else entries, base)
    assert all(fault.setting == "reward_functions" for fault in faults)
    return [fault.sentence for fault in faults]


# Reading


@cases(
    ("text", "call"),
    [
        ("r1_int", RewardCall("r1_int")),
        (" r1_int ( ) ", RewardCall("r1_int")),
        ("keyword(word=therefore)", RewardCall("keyword", {"word": "therefore"})),
        ("keyword(word='a, (b', case=true)", RewardCall("keyword", {"word": "a, (b", "case": True})),
        ("f(a=-1, b=2.5, c=none, e=[1, x])", RewardCall("f", {"a": -1, "b": 2.5, "c": None, "e": [1, "x"]})),
        ("keyword(word=so, name=says_so)", RewardCall("keyword", {"word": "so"}, alias="says_so")),
        (r'regex_match(pattern="^\d+$")', RewardCall("regex_match", {"pattern": r"^\d+$"})),
        (r'regex_match(pattern=r"\bx")', RewardCall("regex_match", {"pattern": r"\bx"})),
        ("mine.py::f", RewardCall("f", file="mine.py")),
        ("~/my files (1)/mine.py::f(limit=3)", RewardCall("f", {"limit": 3}, file="~/my files (1)/mine.py")),
        ('keyword(word="a::b")', RewardCall("keyword", {"word": "a::b"})),
        ("a name with spaces", RewardCall("a name with spaces")),
    ],
)
def test_entries_parse_into_function_arguments_alias_and_file(text: str, call: RewardCall) -> None:
    assert read_call(text) == call


NOT_A_CALL = ("f(", "f(a=1", "f(a=1)(b=2)", "f(a=1) or g(b=2)", "f(a=\0)", "f(" + "[" * 5000)


@cases(
    ("text", "words"),
    [
        *((text, "is empty") for text in ("", "   ")),
        *((text, "it names no function") for text in ("(a=1)", "::f", "mine.py::")),
        *((text, "what is in its brackets is not a list of arguments") for text in NOT_A_CALL),
        ("judge(url=http://localhost:1234/v1)", "not a list of arguments; text with signs or spaces needs quotes."),
        ("f(therefore)", "each of its arguments needs a name, as in keyword(word=therefore)"),
        ("f(**x)", "each of its arguments needs a name"),
        ("f(a=1, a=2)", "an argument is given twice"),
        ("f(a=well-known)", "a is neither a number nor text; text with signs or spaces needs quotes"),
        ("f(a=__import__('os'))", "a is neither a number nor text"),
        *((f"f(a={value})", "a is neither") for value in ("x.y", "1e999", "1j", "b'x'", "[[1, {}]]")),
        ("f(name='a/b')", "its name must be made of letters, digits, dots, dashes and underscores"),
        *((f"f(name={value})", "its name must") for value in ("''", "3")),
    ],
)
def test_malformed_entries_are_described_in_one_sentence(text: str, words: str) -> None:
    assert words in sentence_of(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
names = names.filter(lambda name: name != "name" and not keyword.iskeyword(name))


@settings(max_examples=40, deadline=None)
@given(
    names, st.dictionaries(names, values, max_size=3), st.sampled_from(["", "a.b-c_1"]), st.sampled_from(["", "x y.py"])
)
def test_any_call_survives_writing_and_parsing_alone_and_in_a_list(function, arguments, alias, file) -> None:
    call = RewardCall(function, arguments, alias, file)
    again = read_call(call.text)
    assert again == call and again.text == call.text
    assert [type(value) for value in again.arguments.values()] == [type(value) for value in arguments.values()]
    assert split_names(f"first, {call.text}, last") == ["first", call.text, "last"]


@cases(
    ("entries", "names"),
    [
        ("", []),
        (" [ ] ", []),
        ("a,b , ,c", ["a", "b", "c"]),
        ("['a', \"b\"]", ["a", "b"]),
        ("a, soft(x=1, y=[2, 3]), b", ["a", "soft(x=1, y=[2, 3])", "b"]),
        ('[regex_match(pattern="[0-9],]"), b]', ['regex_match(pattern="[0-9],]")', "b"]),
        ("f(w='a\\', ('), b", ["f(w='a\\', (')", "b"]),
        ("'f(w=\"x\")', b", ['f(w="x")', "b"]),
        ("it's.py::f, b", ["it's.py::f", "b"]),
        ("a), b", ["a)", "b"]),
        (["a", "soft(x=1", "y=2)", "b"], ["a", "soft(x=1, y=2)", "b"]),  # YAML's flow lists cut at every comma
        (["my, file.py::f", "b"], ["my, file.py::f", "b"]),
        (["keyword(word=':)')", "b"], ["keyword(word=':)')", "b"]),
        ([], []),
    ],
)
def test_entries_are_split_at_the_commas_between_them_only(entries, names: list[str]) -> None:
    assert split_names(entries) == names


@cases(
    ("text", "written", "metric"),
    [
        ("r1_int", "r1_int_reward_func", "r1_int_reward_func"),
        ("accuracy", "accuracy_reward", "accuracy_reward"),
        ("length_target( target = 4 )", "length_target(target=4)", "length_target"),
        ("keyword(word='so',name=says)", 'keyword(word="so", name="says")', "says"),
        ("mine.py::r1_int", "mine.py::r1_int", "r1_int"),
        ("mine.py::f(a=1)", "mine.py::f(a=1)", "f"),
        ("my_own", "my_own", "my_own"),
        ("broken(", "broken(", "broken("),
    ],
)
def test_each_entry_has_one_canonical_spelling_and_one_metric_name(text: str, written: str, metric: str) -> None:
    assert (canonical_entry(text), metric_name(text)) == (written, metric)
    assert canonical_entry(written) == written


WRONG_WORD = "keyword has no parameter wrod; the nearest is word, and its parameters are word, case."
ARGUMENT_MISTAKES = [
    ("keyword", ["keyword needs word, as in keyword(word=…)."]),
    ("keyword(wrod=so)", [WRONG_WORD, "keyword needs word, as in keyword(word=…)."]),
    ("r1_soft_format(scale=2)", ["r1_soft_format_reward_func has no parameter scale; it has none."]),
    ("keyword(word=3)", ["word of keyword must be text, not 3."]),
    ("keyword(word=so, case=1)", ["case of keyword must be true or false, not 1."]),
    ("length_target(target=true)", ["target of length_target must be a whole number, not True."]),
    ("length_target(target=2.5)", ["target of length_target must be a whole number, not 2.5."]),
    ("soft_overlong_punishment(cache=x)", ["cache of soft_overlong_punishment_reward must be a whole number or none"]),
    ("keyword(word=a), keyword(word=b)", ["keyword is listed 2 times; give each a name of its own, as in keyword("]),
    ("keyword(word=a), keyword(word=b, name=r1_int), mine(x=1)", ["There is no reward function mine; the known ones"]),
    ("keyword(", ["The reward function keyword( cannot be read: what is in its brackets"]),
]


@cases(("text", "expected"), ARGUMENT_MISTAKES)
def test_wrong_arguments_are_found_from_the_text_and_again_when_resolving(text: str, expected: list[str]) -> None:
    from_text = sentences(*split_names(text))
    assert len(from_text) == len(expected) and all(map(str.startswith, from_text, expected))
    with pytest.raises(UserError) as caught:
        resolve(split_names(text))
    assert [fault.sentence for fault in caught.value.faults] == from_text
    assert all(fault.setting == "reward_functions" for fault in caught.value.faults)


@cases(
    ("text", "words"),
    [
        ("repetition_penalty(ngram_size=0)", "ngram_size must be from 1 to 100, not 0"),
        ("repetition_penalty(max_penalty=0.5)", "max_penalty must not be above 0, as 0.5 is"),
        ("math_eval(tolerance=-1)", "tolerance must not be below 0, as -1 is"),
        ("keyword(word='')", "word must not be empty"),
        ("length_target(target=0)", "target must be at least 1, not 0"),
        ("soft_overlong_punishment(max_completion_length=0)", "max_completion_length must be at least 1, not 0"),
        ("soft_overlong_punishment(cache=-1)", "cache must be from 0 to max_completion_length"),
        (
            "soft_overlong_punishment(max_completion_length=9, cache=10)",
            "cache must be from 0 to max_completion_length (9)",
        ),
        ("cosine_scaled(min_value_wrong=1.0)", "min_value_wrong must not be above max_value_wrong"),
        ("cosine_scaled(max_value_correct=0.0)", "min_value_correct must not be above max_value_correct"),
        ("regex_match(pattern='(')", "pattern is not a regular expression: missing )"),
        ("regex_match(pattern='a{1000000000}')", "a{1000000000} is more than 1,000,000 characters long with its rep"),
        ("regex_match(pattern='\\bx')", 'pattern holds a backspace: write r"\\b"'),
    ],
)
def test_values_out_of_range_are_refused_before_a_run(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve([text])
    (fault,) = caught.value.faults
    assert fault.setting == "reward_functions" and f"cannot be used: {words}" in fault.sentence
    assert fault.sentence.startswith(canonical_entry(text)) and fault.sentence.endswith(".")


OWN = '''
    from backend.rewards import register_reward_function

    @register_reward_function("scaled")
    def scaled(prompts, completions, answer, types=None, *, factor: float = 2.0, offset=0, level=None):
        """`factor` times the length, and an offset."""
        return [factor * len(text) + offset + sum(level or [0]) for text in completions]

    @register_reward_function("odd(1)")
    def odd(completions): return [7.0] * len(completions)

    @register_reward_function("needs")
    def needs(completions, *, ground_truth): return [float(each) for each in ground_truth]
'''


def test_functions_of_a_users_file_take_arguments_too(write) -> None:
    path = write(OWN)
    entries = rewards_in_file(path)
    listed = ["scaled(factor=3, name=three)", "scaled(offset=[1])", "odd(1)", "needs"]
    parameters = [(parameter.name, parameter.kind, parameter.default) for parameter in entries[0].parameters]
    assert parameters == [("factor", "float", "2.0"), ("offset", "", "0"), ("level", "", "None")]
    assert sentences(*listed, entries=entries) == []
    assert sentences("scaled(faktor=3)", "scaled(factor=x, name=b)", entries=entries) == [
        "scaled has no parameter faktor; the nearest is factor, and its parameters are factor, offset, level.",
        "factor of scaled must be a number, not 'x'.",
    ]
    parameter = make_group("ab", level=1, ground_truth=5)
    called = ["scaled(factor=3, name=three)", "scaled", "odd(1)", "needs", "scaled(level=[10], name=ten)"]
    functions = resolve(called, path)
    score([parameter], functions)
    # a column fills a user's parameter, as in TRL, unless the entry sets it
    bare = make_group("a")
    score([bare], resolve(["needs(ground_truth=[3])"], path))
    assert bare.completions[0].scores == {"needs": 3.0}
    assert parameter.completions[0].scores == {"three": 7.0, "scaled": 5.0, "odd(1)": 7.0, "needs": 5.0, "ten": 14.0}


PLAIN = '''
    import functools
    from os.path import join as joined

    def brevity(completions, limit=10, **kwargs):
        """Short is good. Very."""
        return [float(len(c) <= limit) for c in completions]

    async def judged(completion_ids): return [0.0 for _ in completion_ids]
    def helper(text): return text
    def _hidden(completions): return [0.0]
    short = functools.partial(brevity, limit=3)
    if True:
        def nested(completions, **kwargs): return [0.0 for _ in completions]
    class Judge:
        def judge(self, completions): return [0.0 for _ in completions]
'''
REGISTERED = """
    from backend.rewards import register_reward_function
    @register_reward_function("known")
    def registered(completions): return [0.0 for _ in completions]
"""


def test_plain_functions_of_a_file_are_listed_and_checked_without_running_it(write, tmp_path: Path) -> None:
    entries = rewards_in_file(write(PLAIN))
    assert [(entry.name, entry.label, entry.scores, entry.line) for entry in entries] == [
        ("brevity", "Brevity", "Short is good.", 5),
        ("judged", "Judged", "", 9),
        ("nested", "Nested", "", 14),
    ]
    path = write(PLAIN + REGISTERED)
    assert [entry.name for entry in rewards_in_file(path)] == ["known"], "its author has said which"
    good = ["mine.py::brevity(limit=3)", "mine.py::short", "mine.py::joined", "mine.py::helper", f"{path}::nested"]
    assert sentences(*good, base=tmp_path) == []
    assert sentences("mine.py::brevty", "mine.py::brevity(limits=3)", "gone.py::f", "mine.md::f", base=tmp_path) == [
        "mine.py has no function brevty; "
        "the nearest is brevity, and it has brevity, judged, helper, nested, registered.",
        "brevity has no parameter limits; the nearest is limit, and its parameters are limit.",
        f"There is no file {quote(tmp_path / 'gone.py')}.",
        "mine.md should be a Python file that ends in .py or .txt.",
    ]


def test_the_catalogue_and_the_registry_agree() -> None:
    entries = builtin_rewards()
    assert [entry.name for entry in entries] == list(REWARD_REGISTRY)
    for entry in entries:
        code = REWARD_REGISTRY[entry.name].__code__
        assert entry.line in range(code.co_firstlineno, code.co_firstlineno + 3)
        assert entry.source == BUILT_IN
        assert entry.scores.endswith(".") and " ".join((REWARD_REGISTRY[entry.name].__doc__ or "").split()).startswith(
            entry.scores
        )


def test_the_docs_list_every_shipped_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("| name | label |")[2].partition("\n\n")[0]
    rows = {row.split("`")[1]: row for row in table.splitlines() if row.startswith("| `")}
    shipped = [entry for entry in builtin_rewards() if entry.name != JUDGE]  # which has a page of its own
    assert list(rows) == [entry.name for entry in shipped]
    for entry in shipped:
        cells = [cell.strip() for cell in rows[entry.name].strip("|").split(" | ")]
        assert cells[1] == entry.label
        assert cells[3] == ", ".join(_documented(parameter) for parameter in entry.parameters) or (
            cells[3] == "–" and not entry.parameters
        )
    # every number of the first sentence is in the row
    for entry in shipped:
        numbers = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", entry.scores)
        assert all(number in rows[entry.name] for number in {*numbers} - {"0.0"}), (entry.name, numbers)


def _documented(parameter: Parameter) -> str:
    return f"`{parameter.name}`" if parameter.default is None else f"`{parameter.name}={parameter.default}`"


def test_the_nearest_name_ignores_case_and_knows_short_names() -> None:
    assert nearest("exactmatch", ["exact_match", "by_type"]) == "exact_match"
    assert nearest("By_Type", ["exact_match", "by_type"]) == "by_type"
    assert nearest("r1_acuracy", DEFAULT_REWARDS) == "r1_accuracy_reward_func"
    assert nearest("r1_it", DEFAULT_REWARDS) == "r1_int_reward_func"
    assert nearest("r1_acuracy", ["by_type"]) is None
    assert nearest("zzz", DEFAULT_REWARDS) is None


EVERY_SHAPE = '''
    import json
    from mlx_lm_lora.trainer.grpo_reward_functions import register_reward_function
    from mlx_lm_lora.trainer.grpo_reward_functions import register_reward_function as reward
    import mlx_lm_lora.trainer.grpo_reward_functions as lib

    def helper(text): return text

    @register_reward_function("named")
    def f1(prompts, completions, answer, types=None):
        """2.0 for a match. And more that
        is not shown.

        Nor this."""

    @register_reward_function()
    def own_name(completions):
        """One sentence
        over two lines"""

    @reward(name="keyword", label="By Keyword")
    async def f2(completions): ...

    @lib.register_reward_function
    def bare(completions): ...

    try:
        import json
    except ImportError:
        pass
    else:
        if True:
            @lib.register_reward_function(None)
            def nested(completions): ...
'''


def test_every_form_of_registration_is_parsed_as_it_runs(write) -> None:
    path = write(EVERY_SHAPE)
    entries = rewards_in_file(path)
    assert [entry.name for entry in entries] == list(load_reward_file(path).functions)
    assert [(entry.name, entry.label, entry.scores, entry.line) for entry in entries] == [
        ("named", "Named", "2.0 for a match.", 10),
        ("own_name", "Own name", "One sentence over two lines", 17),
        ("keyword", "By Keyword", "", 22),
        ("bare", "Bare", "", 25),
        ("nested", "Nested", "", 34),
    ]
    assert all(entry.source == str(path) for entry in entries)
    assert not computes_names(path)


@pytest.mark.parametrize(
    "text",
    [
        "for n in (1, 2):\n    @register_reward_function(f'f{n}')\n    def f(completions): ...",
        "register_reward_function('x')(len)",
        "def make(n):\n    @register_reward_function()\n    def f(completions): ...\nmake(1)",
        "import lib\nreward = lib.register_reward_function\n@reward()\ndef f(completions): ...",
    ],
)
def test_a_file_with_computed_names_is_recognised(write, text: str) -> None:
    path = write(text)
    assert rewards_in_file(path) == []
    assert computes_names(path)


NAMES = ["r1_accuracy", "r1_int", "accuracy_reward(name=right)", "mine.py::brevity", "jaccard"]


def test_functions_that_compare_are_left_out_without_an_answer():
    assert scorable(NAMES, [1.0, 2.0, 3.0, 4.0, 5.0], has_answer=False) == (["r1_int", "mine.py::brevity"], [2.0, 4.0])
    assert scorable(NAMES, [], has_answer=True) == (NAMES, [1.0] * 5)
