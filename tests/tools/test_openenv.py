"""Environments of OpenEnv: a server with a Python of its own, and what may go wrong with one."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backend.config.checks import cross_setting_faults
from backend.config.config import parse, resolve_paths
from backend.rewards.calls import wait_on
from backend.rewards.scorer import begin_scorer
from backend.rewards.scoring import TrainerState
from backend.tools.host import ToolHost
from backend.tools.load import ScorerTools, load_tools, openenv_tools, tool_names
from backend.tools.mcp_settings import openenv_servers
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError
from backend.utils.places import resources
from tests.support.cases import cases
from tests.support.tool_calls import results

# As openenv-core 0.3.0 answers; its import alone takes seconds.
SERVER = """
import asyncio, json, os, sys
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

FIELDS = {"by": {"type": "integer"}, "metadata": {"type": "object"}}
SCHEMA = {"action": {"description": "Add a number.", "properties": FIELDS, "required": ["by"]}}
assert os.environ["MAX_CONCURRENT_ENVS"] and "SECRET" not in os.environ
free = asyncio.Semaphore(4)

async def session(socket):
    await socket.accept()
    if free.locked():
        await socket.send_json({"type": "error", "data": {"message": "Server at capacity: 4/4 sessions active"}})
        return await socket.close()
    async with free:
        total = 0
        async for asked in socket.iter_json():
            data, reward = asked["data"], None
            if asked["type"] == "reset":
                total = data.get("start", 0)
            elif data["by"] == 66:
                os._exit(3)
            elif not isinstance(data["by"], int):
                error = {"loc": ["by"], "msg": "Input should be a valid integer"}
                await socket.send_json({"type": "error", "data": {"message": "Invalid message", "errors": [error]}})
                continue
            else:
                await asyncio.sleep(data["by"] == 99 and 60)
                total, reward = total + data["by"], data["by"] / 2
            observation = {"observation": {"total": total}, "reward": reward, "done": False}
            await socket.send_json({"type": "observation", "data": observation})

async def answer(request):
    return JSONResponse(SCHEMA)

print("ready", file=sys.stderr)
routes = [Route("/health", answer), Route("/schema", answer), WebSocketRoute("/ws", session)]
app = Starlette(routes=routes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a Python of its own, which is that of the tests."""
    folder = tmp_path_factory.mktemp("openenv") / "count-env"
    for name, text in (("server/app.py", SERVER), (".venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    (folder / ".venv/bin/python").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[ToolHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "1")
        stack = ExitStack()
        host = openenv_tools(openenv_servers(f"openenv:{folder}"), "", "", 1.0, stack)
    with stack:
        yield host


def run(host: ToolHost, numbers: list[int], *calls: ToolCall) -> list[list[ToolResult]]:
    """One turn of each conversation."""
    return results(host, dict.fromkeys(numbers, calls))


def add(by: Any) -> ToolCall:
    return ToolCall("count_env", {"by": by})


def test_each_conversation_has_a_session(host: ToolHost) -> None:
    (schema,) = host.schemas.of()
    assert schema["function"]["name"] == "count_env" and schema["function"]["description"] == "Add a number."
    assert schema["function"]["parameters"]["properties"] == {"by": {"type": "integer"}}
    began = host.begin([{"start": 1}, {"start": 5, "answer": "x"}], wait_on)
    assert [text for _, text in began] == ['{"total": 1}', '{"total": 5}']
    first, second = run(host, [number for number, _ in began], add(2), add("x"), ToolCall("nope", {}), add(1))
    assert [result.content for result in first] == [
        '{"total": 3}',
        str({"error": "Invalid message; by: Input should be a valid integer"}),
        str({"error": "Tool nope not found."}),
        '{"total": 4}',
    ]
    assert [result.reward for result in second] == [1.0, 0.0, 0.0, 0.5] and second[3].content == '{"total": 8}'


def test_a_server_that_runs_already(host: ToolHost) -> None:
    """By its URL; it is not ended."""
    assert isinstance(host, ScorerTools) and host._scorer.tools
    url = f"openenv:{host._scorer.tools.factories['']._url}"
    with ExitStack() as stack:
        other = openenv_tools(openenv_servers({"mine": url}), ["mine", "word"], "environment", 1.0, stack)
        (mine, nobody) = other.begin([{"environment": "mine", "start": 2}, {"environment": "word"}], wait_on)
        assert (mine[1], nobody[1]) == ('{"total": 2}', None)
    assert host.begin([{}], wait_on)[0][1] == '{"total": 0}'


@pytest.mark.proof  # waits for the time limit
def test_slow_calls_and_a_server_that_ends(host: ToolHost) -> None:
    (number, _), (other, _) = host.begin([{}, {}], wait_on)
    ((slow, after),) = run(host, [number], add(99), add(1))
    assert slow.failed and slow.seconds < 2.0 and after.failed and "ended" in after.content
    assert run(host, [other], add(1))[0][0].content == '{"total": 1}'
    ((number, text),) = host.begin([{"start": 3}], wait_on)
    assert text == '{"total": 3}' and run(host, [number], add(1))[0][0].reward == 0.5
    with pytest.raises(UserError, match="Server at capacity"):
        host.begin([{}] * 5, wait_on)
    (number, _), *_ = host.begin([{}], wait_on)
    assert run(host, [number], add(66))[0][0].content == str({"error": "the server has ended the session"})
    with pytest.raises(UserError, match="Connection"):
        host.begin([{}], wait_on)


@pytest.mark.proof  # 3 s: a worker and a server start
def test_rewards_and_tools_of_a_run(folder: Path, tmp_path: Path) -> None:
    """Beside a class and a tools file, each with its rows; rewards add up, under the environment's name."""
    (tmp_path / "own.py").write_text(
        "def totals(environments, **kwargs):\n    return [getattr(each, 'total', -1.0) for each in environments]\n"
    )
    examples = resources() / "examples"
    environment = {"word": f"{examples / 'wordle.py'}::Wordle", "count": f"openenv:{folder}"}
    settings: dict[str, Any] = {"model": "m", "data": "d", "environment": environment, "tool_timeout": 5}
    settings |= {"tools_file": str(examples / "calculator.py"), "reward_functions": [f"{tmp_path / 'own.py'}::totals"]}
    scorer = begin_scorer(config := parse(settings))
    try:
        host = load_tools(config, scorer)
        assert host and tool_names(host.schemas.of("count")) == ["calculate", "count"]
        assert tool_names(host.schemas.of("word")) == ["calculate", "guess"]
        rows = [{"environment": "count", "start": 1}, {"environment": "word", "answer": "crane"}]
        began = host.begin(rows, wait_on)
        assert began[0][1] == '{"total": 1}' and str(began[1][1]).startswith("Guess the hidden word")
        first, last = (ToolCall("count", {"by": by}) for by in (4, 1))
        calls = [first, ToolCall("calculate", {"expression": "1+1"}), last]
        ((*found,),) = run(host, [began[0][0]], *calls)
        assert [each.content for each in found] == ['{"total": 5}', "2", '{"total": 6}']
        turns = [[Turn("", calls, 1, found, 1)], []]
        groups = [
            Group(
                Problem(n, "", [], [], "", row=row), [Completion([1], [0.0], "", "eos", turns=own, conversation=number)]
            )
            for n, (row, own, (number, _)) in enumerate(zip(rows, turns, began, strict=True))
        ]
        scorer.score(groups, 0, [1.0] * 3, TrainerState())
        one, other = (group.completions[0] for group in groups)
        assert one.scores == {"totals": 2.5, "Wordle": None, "count": 2.5} and one.reward == 5.0
        assert other.scores["count"] is None and other.scores["Wordle"] == 0.0
    finally:
        scorer.close()


def test_what_cannot_start_is_one_message(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(where: Path | str) -> str:
        with pytest.raises(UserError) as caught, ExitStack() as stack:
            openenv_tools(openenv_servers(f"openenv:{where}"), "", "", 1.0, stack)
        return caught.value.faults[0].sentence

    broken = tmp_path / "broken"
    for name in ("server/app.py", ".venv/bin/python"):
        (broken / name).parent.mkdir(parents=True)
        (broken / name).write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    (broken / ".venv/bin/python").chmod(0o755)
    assert "; the last line that it printed is: no licence." in message(broken)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert f"ws://127.0.0.1:{port}/ws; <urlopen error" in message(f"ws://127.0.0.1:{port}/ws")
    monkeypatch.setenv("PATH", str(tmp_path))
    (broken / ".venv/bin/python").unlink()
    assert "has no .venv/bin/python, and uv is not installed. Install uv, or run there: " in message(broken)


@cases(
    ("entry", "sentence"),
    [
        ("ws://127.0.0.1:8000/ws", ""),
        ("ws://localhost:8000/ws", ""),
        ("ws://10.0.0.1:8000/ws", "is not a server on this machine"),
        ("ws://127.0.0.1.example.org/ws", "is not a server on this machine"),
        ("http://127.0.0.1:8000", "is not a server on this machine"),
        ("ws://[::1/ws", "is not a server on this machine"),
        ("/no/such", "/no/such is not the folder of an OpenEnv environment: it has no server/app.py."),
    ],
)
def test_setting_is_checked(entry: str, sentence: str) -> None:
    for environment in (f"openenv:{entry}", {"a": f"openenv:{entry}"}):
        found = [fault.sentence for fault in cross_setting_faults({"environment": environment})]
        assert len(found) == bool(sentence) and all(sentence in each for each in found), found


def test_folder_beside_the_settings_gets_an_absolute_path(folder: Path) -> None:
    raw = {"environment": {"a": "openenv:count-env", "b": "openenv:ws://127.0.0.1/ws"}}
    assert resolve_paths(folder.parent, raw)["environment"] == {"a": f"openenv:{os.path.realpath(folder)}"} | {
        "b": "openenv:ws://127.0.0.1/ws"
    }
