"""What travels between ranks arrives as it was: problems, completions, files of reward functions."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import parse
from backend.distributed import messages
from backend.engine.penalties import Penalties
from backend.sampling.grammar import Grammar
from backend.sampling.row_costs import RowCosts
from backend.sampling.sampler import Sampling
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError
from tests.support.cases import cases


def sent(value: Any) -> Any:
    """Through the frames of the control channel."""
    whole = b"".join(messages.encode("a test", {"it": value}))
    place = 0

    def read(count: int) -> bytearray:
        nonlocal place
        place += count
        return bytearray(whole[place - count : place])

    kind, body = messages.decode(read)
    assert kind == "a test"
    return body["it"]


ROW = (
    {"text": "é\udce9\0", "none": None, "big": 2**80, "nan": 0.1, "list": [1, [True, {"a": b"\0\xff"}]]}
    | {"when": datetime(2026, 1, 2, tzinfo=UTC), "day": date(2026, 1, 2), "price": Decimal("1.10")}
    | {"messages": [{"role": "user", "content": "x"}]}
)


def test_problem_keeps_every_column_with_its_type() -> None:
    problem = Problem(7, "What?", [{"role": "user", "content": "What?"}], [5, 6], "42", "sum", ROW)
    received = sent(problem)
    assert received == problem
    assert [type(x) for x in received.row.values()] == [type(x) for x in ROW.values()]


def test_column_that_cannot_travel_is_named() -> None:
    with pytest.raises(UserError, match="column picture holds a set"):
        messages.check_sendable({"picture": [{1}]})


def test_scored_groups_arrive_as_they_were() -> None:
    numbers = np.random.default_rng(0).normal(size=5).astype(np.float32).tolist()
    scored = Completion([3, 4, 5], numbers[:3], "abc", "eos", [-0.5, 0.0, -1.0], scores={"f": 0.1, "g": None})
    scored.reward, scored.advantage = 0.1, 1 / 3
    empty = Completion([], [], "", "length", scores={"f": float("nan"), "g": 1.0}, logged={"note": "hm"})
    masked = Completion([6, 7], numbers[3:], "d", "string", mask=[1, 0], log_held=[-0.25, 0.0], reward=3.0)
    call, result = ToolCall("add", {"a": [1, {"b": None}]}), ToolResult("add", "3", failed=True, seconds=0.5)
    masked.turns, masked.conversation = [Turn("d", [call], 1, [result], 1)], 7
    groups = [Group(Problem(0, "a", [], [1, 2], "x"), [scored, empty]), Group(Problem(1, "b", [], [], "y"), [masked])]
    assert repr(sent(groups)) == repr(groups)


@cases(
    ("numbers", "dtype"),
    [
        ([0, 1] * 9, "uint8"),
        ([-1, 70_000] * 9, "int32"),
        ([2**63] * 9, None),
        ([2**80] * 9, None),
        ([0.5, float("nan"), float("-inf")] * 9, "float32"),
        ([0.1, 1e300] * 9, "float64"),
        ([1, True] * 9, None),
        ([0] * 8, None),
    ],
)
def test_numbers_travel_in_the_smallest_type_that_holds_them(numbers: list[Any], dtype: str | None) -> None:
    arrays: list[np.ndarray] = []
    messages.to_json(numbers, arrays)
    assert [array.dtype.name for array in arrays] == ([dtype] if dtype else [])
    assert repr(sent(numbers)) == repr(numbers)


def test_what_a_model_is_computed_with_arrives_as_it_was() -> None:
    sampling = Sampling(0.5, penalties=Penalties(1.2), grammar=Grammar("regex", "a*"))
    config, costs = parse({"model": "m", "data": "d", "stages": [{"iters": 2}]}), RowCosts(((1, 0.5), (8, 1.0)))
    value = {"sampling": sampling, "config": config, "costs": costs, "rest": (1, "two", None)}
    assert sent(value) == value
    assert mx.array_equal(sent(mx.array([[1.5, 2.5]])), mx.array([[1.5, 2.5]]))


def test_reward_files_move_to_the_worker(tmp_path: Path) -> None:
    """Two files of one name from two folders, in the setting of the file, in entries, and in a stage."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        source = f"# {folder}\r\ndef f(completions, **_):\n    return [0.0]\n"
        (tmp_path / folder / "own.py").write_text(source, newline="")
    entry, file = f"{tmp_path}/a/own.py::f(name=first)", f"{tmp_path}/b/own.py"
    raw = {"model": "m", "data": "d", "reward_functions": [entry, "r1_int"], "reward_functions_file": file}
    raw |= {"tools_file": file, "environment": {"own": f"{file}::f"}}
    config = parse(raw | {"stages": [{"iters": 1, "reward_functions": [f"{file}::f"]}, {"iters": 1}]})
    files = messages.write_reward_code(sent(messages.reward_code(config)), tmp_path / "worker")
    moved = messages.with_reward_files(config, files)
    first, second = moved.reward_functions[0].removesuffix("::f(name=first)"), moved.reward_functions_file
    assert Path(first).read_bytes().startswith(b"# a\r\n") and Path(second).read_bytes().startswith(b"# b\r\n")
    assert moved.reward_functions[1] == "r1_int"
    assert moved.tools_file == second and moved.environment == {"own": f"{second}::f"}
    assert moved.stages[0]["reward_functions"] == [f"{second}::f"]
    assert str(tmp_path / "worker") in first and str(tmp_path / "worker") in second
