"""A user's reward file, written for mlx-lm-lora or TRL, runs as its library would run it, or fails in one sentence."""

import asyncio
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from backend.rewards import get_reward_function
from backend.rewards.calls import RewardError
from backend.rewards.registry import REWARD_REGISTRY
from backend.rewards.resolve import load_reward_file, resolve
from backend.rewards.scoring import Answer, TrainerState
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError
from tests.support.scoring import make_group, reward_function, score

LIBRARY = "mlx_lm_lora.trainer.grpo_reward_functions"

# The shape of the file that users of mlx-lm-lora write: two snippets pasted one after the other, each with its imports.
PASTED = f"""
    import json
    from {LIBRARY} import register_reward_function

    @register_reward_function("same")
    def same(prompts, completions, answer, types=None):
        return [1.0 if c.strip() == a.strip() else 0.0 for c, a in zip(completions, answer)]

    @register_reward_function("is_json")
    def is_json(prompts, completions, answer, types=None):
        def one(text):
            try:
                return 1.0 if json.loads(text) is not None else 0.5
            except Exception:
                return 0.0
        return [one(c) for c in completions]

    import json
    from {LIBRARY} import register_reward_function

    @register_reward_function("per_type")
    def per_type(prompts, completions, answer, types=None):
        types = types or [None] * len(completions)
        return [2.0 if t == "math" else 0.5 for t in types]
"""


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No test changes the built-in table; the stand-in for the library is taken out again."""
    table = dict(REWARD_REGISTRY)
    yield
    assert table == REWARD_REGISTRY
    for name in library_modules():
        del sys.modules[name]


def library_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "mlx_lm_lora"}


def sentence_of(path: Path) -> str:
    before = set(sys.modules)
    with pytest.raises(UserError) as caught:
        load_reward_file(path)
    assert set(sys.modules) - set(library_modules()) <= before
    assert [fault.setting for fault in caught.value.faults] == ["reward_functions_file"]
    sentence = caught.value.faults[0].sentence
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


def run(path: Path, *names: str, kind: str | None = None) -> list[dict[str, float | None]]:
    group = Group(Problem(0, "p", [], [], "4", kind), [Completion([1], [0.0], each, "eos") for each in ("4", "{}")])
    score([group], resolve(list(names), path))
    return [completion.scores for completion in group.completions]


@pytest.mark.parametrize("name", ["mine.py", "mine.txt"])
def test_a_file_written_for_mlx_lm_lora_loads_and_scores_unchanged(write, name: str) -> None:
    path = write(PASTED, name)
    assert list(load_reward_file(path).functions) == ["same", "is_json", "per_type"]
    expected = [{"same": 1.0, "is_json": 1.0, "per_type": 2.0}, {"same": 0.0, "is_json": 1.0, "per_type": 2.0}]
    assert run(path, "same", "is_json", "per_type", kind="math") == expected
    assert run(path, "per_type")[0] == {"per_type": 0.5}


def test_the_stand_in_has_every_name_of_the_librarys_module(write) -> None:
    path = write(f"""
        from {LIBRARY} import *
        from {LIBRARY} import RewardFunctions, REWARD_REGISTRY, r1_count_xml, r1_extract_xml_answer
        calls: list[RewardFunctions] = get_default_reward_functions()
        assert len(calls) == 5 and get_reward_function("r1_count_xml") is r1_count_xml is calls[-1]
        assert r1_extract_xml_answer("<answer> 4 </answer>") == "4"
        register_reward_function("mine")(r1_int_reward_func)
        REWARD_REGISTRY["direct"] = r1_int_reward_func
        assert set(list_available_reward_functions()) >= {{"mine", "direct", "r1_accuracy_reward_func"}}
    """)
    assert sorted(load_reward_file(path).functions) == ["direct", "mine"]


def test_the_stand_in_replaces_an_installed_library(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "mlx_lm_lora" / "trainer"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "grpo_reward_functions.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path = write(PASTED)
    real = __import__(LIBRARY, fromlist=["REAL"])
    assert real.REAL
    assert len(load_reward_file(path).functions) == 3
    assert sys.modules[LIBRARY] is real


def test_a_syntax_error_names_the_line(write) -> None:
    assert sentence_of(write("x = 1\ndef f(:\n    pass\n")) == "mine.py has a syntax error on line 2: invalid syntax."


@pytest.mark.parametrize("text", [b"x = '\xff'\n", b"x = 1\0\n", b"(" * 5000])
def test_a_file_that_is_no_python_text_is_a_mistake(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(text)
    assert "mine.py" in sentence_of(path)


def test_an_exception_while_loading_names_the_line_and_registers_nothing(write) -> None:
    path = write("""
        from backend.rewards import register_reward_function
        @register_reward_function("half")
        def half(completions): return [0] * len(completions)
        import no_such_module_here
    """)
    sentence = sentence_of(path)
    assert sentence.startswith("mine.py cannot be loaded: ModuleNotFoundError: No module named 'no_such_module_here'")
    assert "(mine.py, line 5)" in sentence
    with pytest.raises(KeyError):
        get_reward_function("half")


def test_a_decorator_that_was_not_imported_is_told_with_the_line_that_is_missing(write) -> None:
    path = write("""
        @register_reward_function("half")
        def half(completions): return [0] * len(completions)
    """)
    assert sentence_of(path) == (
        "mine.py cannot be loaded: NameError: name 'register_reward_function' is not defined (mine.py, line 2). "
        "Begin the file with “from backend.rewards import register_reward_function”."
    )


def test_a_file_without_a_reward_function_says_what_one_is(write) -> None:
    says = "mine.py has no reward function, which is a function that takes completions."
    assert sentence_of(write("def f(text): return [0]\ndef main(**options): pass\n_g = f\n")) == says


def test_a_users_function_replaces_a_shipped_one_in_this_run_only_and_a_note_says_so(write) -> None:
    path = write("""
        from backend.rewards import register_reward_function
        @register_reward_function("r1_count_xml")
        def mine(prompts, completions, answer, types=None): return [9.0] * len(completions)
    """)
    (mine,) = resolve(["r1_count_xml"], path)
    assert mine.about.file == path and mine.call(["p"], ["c"], ["a"]) == [9.0]
    assert mine.about.note == "r1_count_xml of mine.py takes the place of the built-in function of that name."
    (beside,) = resolve(["r1_int"], path)
    assert beside.about.file is None and beside.about.note == ""
    (shipped,) = resolve(["r1_count_xml"])
    assert shipped.call(["p"], ["c"], ["a"]) == [0.0] and shipped.about.note == ""


def test_dataclasses_work_in_a_file_with_postponed_annotations(write) -> None:
    # dataclasses looks its module up in sys.modules, where a file run by exec alone would not be.
    path = write("""
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import ClassVar
        from backend.rewards import register_reward_function
        @dataclass
        class Rule:
            points: float
            kind: ClassVar[str] = "x"
        @register_reward_function("rule")
        def rule(completions): return [Rule(3.0).points for _ in completions]
    """)
    assert run(path, "rule")[0] == {"rule": 3.0}


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]


def chat(*texts: str, column: str = "prompt", **row: object) -> Group:
    row = {column: CHAT[1:], **row}
    return Group(Problem(0, "2 + 2?", CHAT, [], "4", None, row), [Completion([1], [0.0], t, "eos") for t in texts])


def scored(calls, *groups: Group, timeout_s: float = 5.0, **about) -> Answer:
    functions = [reward_function(name, call) for name, call in calls.items()]
    return score(list(groups), functions, timeout_s, **about)


# Files

# Functions in the style of TRL's documentation and guides.
TRL_FILE = '''
    import re

    def format_reward(completions, **kwargs):
        """1.0 for the format."""
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(r"^<think>.*?</think>", text) else 0.0 for text in contents]

    def truth(prompts, completions, ground_truth, **kwargs):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        return [1.0 if c[0]["content"].endswith(str(t)) else None for c, t in zip(completions, ground_truth)]

    async def length(completion_ids, scale=1.0, **kwargs):
        return [scale * len(ids) for ids in completion_ids]

    class Judge:
        def __call__(self, completions, trainer_state, log_extra, log_metric, **kwargs):
            log_extra("judged", [trainer_state.global_step] * len(completions))
            log_metric("judged/share", 0.5)
            return [0.0] * len(completions)

    judge = Judge()
'''


def test_a_file_written_for_trl_runs_unchanged(write, tmp_path: Path) -> None:
    path = write(TRL_FILE, "trl_file.py")
    entries = [
        "trl_file.py::format_reward",
        f"{path}::truth",
        "trl_file.py::length(scale=2)",
        "trl_file.py::judge",
        "r1_int",
    ]
    functions = resolve(entries, base=tmp_path)
    names = ["format_reward", "truth", "length", "judge", "r1_int_reward_func"]
    assert [function.about.name for function in functions] == names
    assert [function.about.file for function in functions] == [path, path, path, path, None]
    group = chat("<think>a</think>4", "5", ground_truth=4)
    report = score([group], functions, trainer_state=TrainerState(step=7, max_steps=9))
    scores = [list(completion.scores.values()) for completion in group.completions]
    assert scores == [[1, 1, 2, 0, 0], [0, None, 2, 0, 0]]
    assert (report.columns, report.metrics) == ({"judged": [7, 7]}, {"judged/share": 0.5})


def test_each_file_is_run_once_and_may_be_the_registering_one_too(write, tmp_path: Path, capsys) -> None:
    path = write(
        """
        print("loading")
        from backend.rewards import register_reward_function
        @register_reward_function("known")
        def mine(completions): return [1.0 if isinstance(c, str) else 0.0 for c in completions]
        def other(completions): return [0.0] * len(completions)
    """,
        "trl_file.py",
    )
    functions = resolve(["known", "trl_file.py::mine", "trl_file.py::other"], path, tmp_path)
    assert capsys.readouterr().out == "loading\n"
    resolve(["trl_file.py::mine", f"{tmp_path}/../{tmp_path.name}/trl_file.py::other"], base=tmp_path)
    assert capsys.readouterr().out == "loading\n"
    group = chat("a")
    score([group], functions)
    # `known` is called our way, with texts; `mine` is the same function, called as TRL calls it
    assert group.completions[0].scores == {"known": 1.0, "mine": 0.0, "other": 0.0}


# Functions of conversational prompts, as guides print them.
INDEXING = """
    import functools
    def first(completions, **kwargs):
        return [comp[0]['content'] == "ab" for comp in completions]
    def asks(prompts, completions, **kwargs):
        return [prompt[-1].get("content") == "What is 2 + 2?" for prompt in prompts if prompt[-1]["content"]]
    def _text(completion):
        return completion[0]["content"]
    def helped(completions, **kwargs):
        return [_text(completion) == "ab" for completion in completions]
    short = functools.partial(first, scale=2)
    class Adaptive:
        def __init__(self, function):
            self.function = function
        def __call__(self, *args, **kwargs):
            return self.function(*args, **kwargs)
    adaptive = Adaptive(first)
    def characters(completions, **kwargs):
        return [len(completion) == 2 for completion in completions]
"""


def test_a_function_that_indexes_messages_gets_messages_of_text_rows_too(write, tmp_path: Path) -> None:
    path = write(INDEXING, "deep.py")
    names = ["first", "asks", "helped", "characters"]
    entries = [*names, "deep.py::short", "deep.py::adaptive"]
    functions = resolve(entries, path, tmp_path)  # none is registered: the file's are found by name
    assert [function.takes_messages for function in functions] == [True, True, True, False, True, True]
    group = make_group("ab", prompt="What is 2 + 2?")
    score([group], functions)
    assert list(group.completions[0].scores.values()) == [1.0] * 6
    registered = write(
        f"    from backend.rewards import register_reward_function{INDEXING}    register_reward_function()(first)"
    )
    (first,) = resolve(["first"], registered)
    assert first.takes_messages and first.dialect == "ours"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1.0]", "f of trl_file.py, line 3, returned 1 score for 2 completions."),
        ("return [x.y for x in completions]", "raised AttributeError: 'str' object has no attribute 'y' (trl_file.py"),
        ("log_extra('c', [1]); return [0, 0]", "line 3, logged 1 values in the column c for 2 completions."),
        ("log_extra('c', 'ab'); return [0, 0]", "raised TypeError: log_extra takes a list of values, one a completion"),
        ("log_extra('', [1, 2]); return [0, 0]", "raised ValueError: log_extra takes a name on one line first, not ''"),
        ("log_metric('m', float('nan')); return [0, 0]", "log_metric takes a finite number, and m is nan (trl_file"),
        ("log_metric('reward', 1); return [0, 0]", "reward is a metric of the trainer; log yours under another name"),
        ("log_metric('rewards/x/mean', 1); return [0, 0]", "rewards/x/mean is a metric of the trainer"),
    ],
)
def test_a_failure_names_file_and_line(write, tmp_path: Path, body: str, words: str) -> None:
    write(f"\n\ndef f(completions, log_extra, log_metric, **kwargs):\n    {body}\n", "trl_file.py")
    with pytest.raises(RewardError) as caught:
        score([make_group("a", "b")], resolve(["trl_file.py::f"], base=tmp_path), 0.3)
    (fault,) = caught.value.faults
    assert words in fault.sentence


# Messages


def seen_by(group: Group, style: str) -> tuple:
    """Prompts and completions as a function of this style receives them."""
    seen = []

    def inputs(prompts, completions):
        seen.append((prompts, completions))
        return [0.0] * len(completions)

    function = reward_function("mine", inputs)
    if style == "trl":
        function = replace(function, dialect="trl")
    score([group], [function])
    return seen[0]


def test_a_prompt_of_messages_gives_messages_to_trl_functions_and_text_to_ours() -> None:
    assert seen_by(chat("a", "b"), "ours") == (["2 + 2?"] * 2, ["a", "b"])
    chats = [[{"role": "assistant", "content": text}] for text in ("a", "b")]
    assert seen_by(chat("a", "b"), "trl") == ([CHAT, CHAT], chats)
    assert seen_by(chat("a", "b", column="question"), "trl") == ([CHAT, CHAT], chats)


def test_a_prompt_of_text_gives_text() -> None:
    assert seen_by(make_group("a", prompt="What is 2 + 2?"), "trl") == (["What is 2 + 2?"], ["a"])
    assert seen_by(make_group("a"), "trl") == (["What is 2 + 2?"], ["a"])
    assert seen_by(chat("a", column="messages", prompt="What is 2 + 2?"), "trl")[1] == ["a"]
    assert seen_by(chat("a", column="history", history=[{"role": "user", "content": "Else"}]), "trl")[1] == ["a"]
    assert seen_by(chat("a", column="facts", facts=[1, 2]), "trl")[1] == ["a"]


def test_with_tools_trl_functions_get_the_conversation_of_text_rows_too() -> None:
    turns = [Turn("", [ToolCall("add", {"a": 2})], 3, [ToolResult("add", "4")], 2), Turn("4", [], 1)]
    group = make_group("4", prompt="What is 2 + 2?")
    group.completions[0].turns = turns
    assert seen_by(group, "ours")[1] == ["4"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = {"role": "tool", "name": "add", "content": "4"}
    assert seen_by(group, "trl")[1] == [[asked, told, {"role": "assistant", "content": "4"}]]


def test_trl_functions_get_columns_as_they_are() -> None:
    columns = {}

    def takes_columns(answer, types, completion_ids, **kwargs):
        columns.update(kwargs, answer=answer, types=types, ids=completion_ids)
        return [0.0]

    group = make_group("a", answer="four", kind="sum")
    group.problem.row = {
        "prompt": "p",
        "answer": 4,
        "types": "sum",
        "completion_ids": "mine",
        "trainer_state": "mine",
        "extra": {"a": 1},
    }
    state = TrainerState(step=3)
    score([group], [replace(reward_function("mine", takes_columns), dialect="trl")], trainer_state=state)
    assert [columns[name] for name in ("answer", "types", "ids", "extra")] == [[4], ["sum"], [[0, 1]], [{"a": 1}]]
    assert columns["trainer_state"] == replace(state, reward_timeout=5.0) and "prompt" not in columns
    columns.clear()
    score([group], [reward_function("mine", takes_columns)], trainer_state=state)
    assert (columns["answer"], columns["types"]) == (["four"], ["sum"])


# trainer_state and logs


def test_logged_columns_and_metrics_are_in_the_report() -> None:
    def first_logger(completions, log_extra, log_metric):
        log_extra("parts", completions[:1])
        log_extra("parts", completions[1:])  # in two pieces
        log_metric("share", 1)
        log_metric("share", np.float32(2.0))
        return [0.0] * len(completions)

    async def two(completions, log_extra, log_metric):
        log_extra("odd", (math.inf, {"a": (1, None)}, np.int64(3)))
        log_metric("own/metric", True)
        return [0.0] * len(completions)

    def kinds(completions, log_extra):
        log_extra("kinds", np.arange(3))
        log_extra("text", [Path("x"), int, [np.float64(2)]])
        return [0.0] * 3

    report = scored({"one": first_logger, "two": two, "kinds": kinds}, make_group("a", "b"), make_group("c"))
    assert report.columns == {
        "parts": ["a", "b", "c"],
        "kinds": [0, 1, 2],
        "text": ["x", "<class 'int'>", [2.0]],
        "odd": [None, {"a": [1, None]}, 3],
    }
    assert report.metrics == {"share": 1.5, "own/metric": 1.0}
    assert len(report.seconds) == 3


# Async


def test_async_functions_run_concurrently() -> None:
    """Each waits until all three run; one after the other they would wait for the time limit."""
    running, all_run = 0, asyncio.Event()

    async def slow(completions, **kwargs):
        nonlocal running
        running += 1
        if running == 3:
            all_run.set()
        await all_run.wait()
        await asyncio.sleep(0.05)
        return [float(len(text)) for text in completions]

    class Slow:
        async def __call__(self, completions):
            return await slow(completions)

    group = make_group("a", "bcd")
    report = scored({"first": slow, "plain": lambda completions: [0, 0], "second": slow, "third": Slow()}, group)
    assert [*group.completions[1].scores.items()] == [("first", 3.0), ("plain", 0.0), ("second", 3.0), ("third", 3.0)]
    assert all(report.seconds[index] >= 0.04 for index in (0, 2, 3))
