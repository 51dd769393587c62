"""The example environment for an OpenEnv server, spoken to as its protocol has it."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.tools.toolbox import EnvironmentKind, Toolbox

server = pytest.importorskip("websockets.sync.server")
EXAMPLE = Path(__file__).parents[2] / "resources/examples/openenv_env.py"


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Iterator[type]:
    """The class, at a server with room for two sessions."""
    rooms = threading.BoundedSemaphore(2)

    def session(socket: Any) -> None:
        if not rooms.acquire(blocking=False):
            return socket.send(json.dumps({"type": "error", "data": {"message": "Server at capacity: 2/2 sessions"}}))
        for asked in map(json.loads, socket):
            said = asked["data"].get("message", asked["data"].get("prompt"))
            data = {"observation": {"text": said}, "reward": 0.5 if asked["type"] == "step" else None, "done": False}
            wrong = asked["type"] == "step" and not said
            answer = {"type": "error", "data": {"message": "Invalid message"}} if wrong else {"data": data}
            socket.send(json.dumps({"type": "observation"} | answer))
        rooms.release()

    with server.serve(session, "127.0.0.1", 0) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        example = runpy.run_path(str(EXAMPLE))["OpenEnv"]
        example.reset.__globals__["URL"] = f"ws://127.0.0.1:{listening.socket.getsockname()[1]}/ws"
        yield example
        listening.shutdown()
        thread.join()


def test_session_has_its_observations_and_reward(environment: type) -> None:
    kind = EnvironmentKind("", environment, EXAMPLE)
    (schema,) = Toolbox([], [kind]).environment_schemas[""]
    assert schema["function"]["name"] == "step" and "message" in schema["function"]["parameters"]["properties"]
    one, other, third = kind.pool[0], kind.make(), kind.make()
    assert [each.reset(prompt="hi", answer="4") for each in (one, other)] == ['{"text": "hi"}'] * 2
    assert one.step("ab") == '{"text": "ab"}' and one.step("c") and (one.get_reward(), other.get_reward()) == (1.0, 0.0)
    with pytest.raises(RuntimeError, match="Invalid message"):
        one.step("")
    assert one.reset(prompt="yo") == '{"text": "yo"}' and one.get_reward() == 0.0
    with pytest.raises(RuntimeError, match="Server at capacity"):
        third.reset()
    for each in kind.pool:
        each.close()
