"""Tools of MCP servers: a real server over stdio and over HTTP on this machine, and what may go wrong with one."""

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from backend.config.checks import cross_setting_faults
from backend.config.config import resolve_paths
from backend.rewards.calls import wait_on
from backend.tools.load import McpServers
from backend.types import ToolCall, ToolResult
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.errors import UserError
from tests.support.cases import cases
from tests.support.tool_calls import opened, results

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")

SERVER = '''
import asyncio, os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("echo", log_level="ERROR")

@server.tool()
def echo(text: str, times: int = 1) -> str:
    """Repeat a text.

    Args:
        text: What to repeat.
    """
    return text * times

@server.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"waited {seconds}"

@server.tool()
def picture() -> Image:
    return Image(data=b"1", format="png")

@server.tool()
def refuse(why: str) -> str:
    raise ToolError(why)

@server.tool()
def die() -> str:
    os._exit(3)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''

OLD_SERVER = """
import json, sys, time
tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("die", "wait", "time")]
made = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "old", "version": "1"}}
answers = {"initialize": made, "tools/list": {"tools": tools}}
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "tools/call":
        name = asked["params"]["name"]
        if name == "die":
            sys.exit("out of luck")
        elif name == "wait":
            continue
        answers["tools/call"] = {"content": [{"type": "text", "text": str(time.time())}]}
    if "id" in asked:
        answer = answers.get(asked["method"])
        about = {"result": answer} if answer else {"error": {"code": -32601, "message": "unknown"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **about}), flush=True)
"""
OLD = {"command": sys.executable, "args": ["-c", OLD_SERVER]}
"""A server of an earlier version of the protocol, written by hand: it starts in no time."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("server") / "echo.py"
    file.write_text(SERVER)
    return file


@pytest.fixture(scope="module")
def url(program: Path) -> Iterator[str]:
    """A server that runs already; it has the tools of the other one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(program), str(port)], stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def stdio(program: Path, url: str) -> Iterator[McpServers]:
    host = start(calc={"command": sys.executable, "args": [str(program)]})
    yield host
    host.close()


@pytest.fixture(scope="module")
def http(url: str, stdio: McpServers) -> Iterator[McpServers]:
    deadline, address = time.monotonic() + 20, ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    while True:
        try:
            socket.create_connection(address).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    host = start(web={"url": url})
    yield host
    host.close()


def start(taken: dict[str, str] | None = None, **servers: Any) -> McpServers:
    return McpServers(servers, 10.0, taken or {})


def run(host: McpServers, *turns: Sequence[tuple[str, dict[str, Any]]]) -> list[list[ToolResult]]:
    """The results of each conversation's turn."""
    calls = [[ToolCall(*call) for call in turn] for turn in turns]
    return results(host, dict(zip(opened(host, *[{}] * len(turns)), calls, strict=True)))


ERROR = "{'error': '%s'}"


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_of_a_server_are_listed_and_called(transport: str, request: pytest.FixtureRequest) -> None:
    host: McpServers = request.getfixturevalue(transport)
    schema = host.schemas.of()[0]
    assert schema["type"] == "function" and schema["function"]["name"] == "echo"
    assert schema["function"]["description"] == "Repeat a text.\n\nArgs:\n    text: What to repeat."
    assert schema["function"]["parameters"]["properties"]["times"]["type"] == "integer"
    both, wrong_ones, last = run(
        host,
        [("wait", {"seconds": 0.1}), ("echo", {"text": "ab", "times": 2})],
        [("refuse", {"why": "full"}), ("nope", {})],
        [("picture", {}), ("echo", {"times": 2})],
    )
    assert [(result.content, result.failed) for result in both] == [("waited 0.1", False), ("abab", False)]
    assert [(result.content, result.failed) for result in wrong_ones] == [
        (ERROR % "Error executing tool refuse: full", True),
        (ERROR % "Tool nope not found.", True),
    ]
    picture, wrong = last
    assert picture.failed and "content of type image, and the model reads only text" in picture.content
    assert wrong.failed and wrong.content.startswith("{'error': ") and "text" in wrong.content
    assert both[0].seconds >= 0.1 and host.finished(5, wait_on) == []


def test_slow_calls_end_and_conversations_run_side_by_side(stdio: McpServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "_timeout_s", 1.0)
    began = time.monotonic()
    first, *_, last = run(stdio, *[[("wait", {"seconds": 20})]] * 8, [("echo", {"text": "a"})])
    assert time.monotonic() - began < 6 and last[0].content == "a"
    assert first[0].content == ERROR % "wait was still running after 1 s (tool_timeout)"


def test_stopped_rollout_gives_no_results_to_the_next(stdio: McpServers) -> None:
    ((number, text),) = stdio.begin([{}], wait_on)
    stdio.submit(number, [ToolCall("echo", {"text": "late"})], wait_on)
    time.sleep(0.1)
    assert text is None and run(stdio, [("echo", {"text": "a"})])[0][0].content == "a"
    assert stdio.finished(0.1, wait_on) == []


def test_server_that_ends_fails_its_calls_and_starts_again(request: pytest.FixtureRequest) -> None:
    host = start(old=OLD)
    request.addfinalizer(host.close)
    turns = run(host, [("wait", {})], [("die", {}), ("time", {})])
    assert {(result.content, result.failed) for turn in turns for result in turn} == {
        (ERROR % "The MCP server old has ended.", True)
    }
    assert not run(host, [("time", {})])[0][0].failed
    assert run(host, [("die", {})])[0][0].failed and not run(host, [("time", {})])[0][0].failed
    assert host.new_notes() == [
        "The MCP server old ended; the last line that it printed is: out of luck. Its calls fail until the next "
        "rollout, which starts it again. Later ends have no note."
    ]


def test_server_over_http_that_ends_is_tried_once_more(http: McpServers, caplog: pytest.LogCaptureFixture) -> None:
    assert all(result.failed for result in run(http, [("die", {}), ("echo", {"text": "a"})])[0])
    for _ in range(2):
        assert run(http, [("echo", {"text": "a"})])[0][0].content == ERROR % "The MCP server web has ended."
    ended, *notes = http.new_notes()
    assert ended.startswith("The MCP server web ended. Its calls fail until") and len(notes) == 1
    assert notes[0].startswith("The MCP server web could not be started: ")
    assert notes[0].endswith(" It is not tried again: its calls fail for the rest of the run.")
    gc.collect()  # asyncio complains of an error that nobody has asked for
    assert caplog.text == ""


def test_names_that_clash_are_refused() -> None:
    with pytest.raises(UserError, match="The tool time is in the tools file and the MCP server a; leave one of them"):
        start(taken={"time": "the tools file"}, a=OLD)
    with pytest.raises(UserError, match="The tool die is in the MCP server a and the MCP server b"):
        start(a=OLD, b=OLD)


def test_servers_that_do_not_start_are_named_with_their_last_line() -> None:
    code = "import sys; sys.exit('no licence')"
    with pytest.raises(UserError) as caught:
        start(
            a={"command": sys.executable, "args": ["-c", code]},
            b={"command": "no-such-program"},
            c={"command": "sh", "cwd": "/no/such/folder"},
            d={"url": "http://127.0.0.1:9/mcp"},
        )
    sentences = [fault.sentence for fault in caught.value.faults]
    parts = ["printed is: no licence", "no-such-program: No such file", "/no/such/folder", "connect"]
    assert [part in sentence for part, sentence in zip(parts, sentences, strict=True)] == [True] * 4, sentences
    assert "The MCP server a could not be started: " in sentences[0]


def test_missing_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.tools.load.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install 'grpo-studio\[mcp\]'"):
        start(a=OLD)


@cases(
    ("about", "sentence"),
    [
        ("npx", "a needs either command, with args, env and cwd if it takes them, or url."),
        ({}, "a needs either command, with args, env and cwd if it takes them, or url."),
        ({"command": "npx", "url": "http://localhost"}, "a needs either command"),
        ({"command": "npx", "args": ["-p", 80]}, "a: args.1: input should be a valid string."),
        ({"command": "npx", "arg": []}, "a: arg: extra inputs are not permitted."),
        ({"url": "http://example.org/mcp"}, "a is on example.org. Calls contain what the model wrote"),
        ({"url": "http://127.0.0.1.example.org/mcp"}, "a is on 127.0.0.1.example.org."),
        ({"url": "http://[::1]:8000/mcp"}, ""),
        ({"url": "https://localhost/mcp"}, ""),
        ({"url": "file://localhost/mcp"}, "a: file://localhost/mcp is not a URL such as"),
        ({"url": "http://[::1/mcp"}, "a: http://[::1/mcp is not a URL"),
    ],
)
def test_setting_is_checked(about: Any, sentence: str) -> None:
    found = [fault.sentence for fault in cross_setting_faults({"mcp_servers": {"a": about}})]
    assert len(found) == bool(sentence) and all(f"The MCP server {sentence}" in each for each in found), found


def test_files_beside_the_settings_get_absolute_paths(tmp_path: Path) -> None:
    for name in ("server.py", "run/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    about = {"command": "python", "args": ["run", "server.py", "other.py"], "cwd": "run"}
    resolved = resolve_paths(tmp_path, {"mcp_servers": {"a": about, "b": {"url": "http://localhost"}, "c": 1}})
    args = ["run", str(tmp_path / "server.py"), "other.py"]
    expected = {"command": "python", "args": args, "cwd": str(tmp_path / "run")}
    assert resolved["mcp_servers"] == {"a": expected, "b": {"url": "http://localhost"}, "c": 1}


def test_command_ends_with_its_children_when_its_stdin_closes(tmp_path: Path) -> None:
    """As it does when the trainer is killed, though it never reads."""
    process = subprocess.Popen(
        [*module_command("backend.rewards.confinement.guard"), "sh", "-c", "sleep 60 & echo $! ,$PYTHONPATH,; wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=backend_environment({**os.environ, "PYTHONPATH": "/theirs"}),
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    child, path = process.stdout.readline().split()
    assert path == ",/theirs,", "the variables that the user gave"
    process.stdin.close()
    assert process.wait(5) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)
