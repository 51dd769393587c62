"""A user's reward file loads without the library it was written for, or fails in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from backend.rewards import get_reward_function
from backend.rewards.registry import REWARD_REGISTRY
from backend.rewards.resolve import load_reward_file, resolve
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support.scoring import score

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
    """No test changes the built-in table or the library's entries in sys.modules."""
    table, library = dict(REWARD_REGISTRY), library_modules()
    yield
    assert table == REWARD_REGISTRY
    assert library_modules() == library


def library_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "mlx_lm_lora"}


def sentence_of(path: Path) -> str:
    before = set(sys.modules)
    with pytest.raises(UserError) as caught:
        load_reward_file(path)
    assert set(sys.modules) == before
    assert [fault.setting for fault in caught.value.faults] == ["reward_functions_file"]
    sentence = caught.value.faults[0].sentence
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


def run(path: Path, *names: str, kind: str | None = None) -> list[dict[str, float | None]]:
    group = Group(Problem(0, "p", [], [], "4", kind), [Completion([1], [0.0], each, "eos") for each in ("4", "{}")])
    score([group], resolve(list(names), path), [1.0] * len(names), 5.0)
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
    assert len(load_reward_file(path).functions) == 3
    assert library_modules() == {}
    try:
        real = __import__(LIBRARY, fromlist=["REAL"])
        assert real.REAL
        assert len(load_reward_file(path).functions) == 3
        assert sys.modules[LIBRARY] is real
    finally:
        for name in library_modules():
            del sys.modules[name]


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
