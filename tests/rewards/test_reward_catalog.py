"""The catalogue reads names and sentences from source text, and reads the same as running the source would register."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from backend.rewards import functions as functions
from backend.rewards.catalogue import (
    BUILT_IN,
    DEFAULT_REWARDS,
    JUDGE,
    Parameter,
    builtin_rewards,
    computes_names,
    nearest,
    rewards_in_file,
    scorable,
)
from backend.rewards.registry import REWARD_REGISTRY
from backend.rewards.resolve import load_reward_file


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


def test_parameters_are_read_from_text_as_python_reads_them() -> None:
    parameters = {entry.name: list(entry.parameters) for entry in builtin_rewards()}
    assert parameters.keys() == REWARD_REGISTRY.keys()
    assert parameters["keyword"] == [Parameter("word", "str", None), Parameter("case", "bool", "False")]
    assert parameters["r1_soft_format_reward_func"] == []


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


def test_parsing_never_runs_the_file(write, tmp_path: Path) -> None:
    path = write(f"open({str(tmp_path / 'ran')!r}, 'w')\n@register_reward_function('a')\ndef a(completions): ...\n")
    assert [entry.name for entry in rewards_in_file(path)] == ["a"]
    assert not computes_names(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("code", "is_loaded", "is_not"),
    [
        ("import backend.rewards.scoring", "backend.rewards.functions.answers", "numpy"),
        ("import backend.rewards.catalogue as c; c.builtin_rewards()", "backend.rewards.catalogue", "numpy regex"),
    ],
)
def test_neither_the_catalogue_nor_scoring_loads_an_engine(code: str, is_loaded: str, is_not: str) -> None:
    program = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"]
    loaded = set(subprocess.run(program, capture_output=True, text=True, check=True).stdout.split())
    assert is_loaded in loaded and not {"sympy", "math_verify", "mlx", "mlx.core", *is_not.split()} & loaded


NAMES = ["r1_accuracy", "r1_int", "accuracy_reward(name=right)", "mine.py::brevity", "jaccard"]


def test_functions_that_compare_are_left_out_without_an_answer():
    chosen = scorable(NAMES, [1.0, 2.0, 3.0, 4.0, 5.0], has_answer=False)
    assert chosen.names == ["r1_int", "mine.py::brevity"] and chosen.weights == [2.0, 4.0]
    assert chosen.left_out == ["r1_accuracy_reward_func", "right", "jaccard"]


def test_with_an_answer_all_of_them_score():
    assert scorable(NAMES, [], has_answer=True) == (NAMES, [1.0] * 5, [])
