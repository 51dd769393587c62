"""`mcp`: an assistant reads runs, and trains only with permission."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from backend.cli.mcp import CHANGING, READING, RunTools, server_of
from tests.support import small_run
from tests.support.diaries import recording


class Assistant:
    def __init__(self, runs: Path, *, allow_training: bool) -> None:
        self._server = server_of(RunTools(runs), allow_training=allow_training)

    def _request(self, name: str, *arguments: Any) -> Any:
        from mcp import Client  # takes a second, in each worker of the suite

        async def request() -> Any:
            async with Client(self._server) as client:
                return await getattr(client, name)(*arguments)

        return asyncio.run(request())

    def tools(self) -> list[str]:
        return [tool.name for tool in self._request("list_tools").tools]

    def ask(self, tool: str, fails: bool = False, **arguments: Any) -> Any:
        answer = self._request("call_tool", tool, arguments)
        text = "".join(getattr(part, "text", "") for part in answer.content)
        assert answer.is_error is fails, text
        return text if fails or not text.startswith(("{", "[")) else json.loads(text)


def test_an_assistant_reads_and_starts_nothing(tmp_path: Path) -> None:
    name = recording("healthy-grpo").unpack(tmp_path / "runs" / "healthy").path.name
    assistant = Assistant(tmp_path / "runs", allow_training=False)
    assert assistant.tools() == [*READING]
    (run,) = assistant.ask("list_runs", query="state:finished")
    assert (run["name"], run["state"]) == (name, "finished") and assistant.ask("list_runs", query="tag:none") == []
    status = assistant.ask("run_status", run=name, steps=2)
    assert [step["step"] for step in status["steps"]] == [status["step"] - 1, status["step"]]
    assert "reward" in status["steps"][0] and status["settings"]
    assert assistant.ask("doctor", run=name)["run"] == name
    assert len(assistant.ask("compare_runs", runs=[name, name])["results"]) == 2
    assert "There is no run missing" in assistant.ask("run_status", fails=True, run="missing")
    assert "Did you mean model" in assistant.ask("check_settings", fails=True, settings={"modl": "x"})
    for tool in CHANGING:
        assert "Unknown tool" in assistant.ask(tool, fails=True, run=name)
    trainer = Assistant(tmp_path / "runs", allow_training=True)
    assert trainer.tools() == [*READING, *CHANGING]
    assert "is not training" in trainer.ask("control_run", fails=True, run=name, word="stop")


@pytest.mark.proof
def test_an_assistant_trains_with_permission(tmp_path: Path) -> None:
    settings = small_run.settings_for(tmp_path) | {"iters": 1, "fuse": False}
    assistant = Assistant(tmp_path / "runs", allow_training=True)
    assert assistant.ask("check_settings", settings=settings) is not None
    assert assistant.ask("estimate_memory", settings=settings)["total"] > 0
    assert "x.jsonl" in assistant.ask("start_run", fails=True, settings=settings | {"data": str(tmp_path / "x.jsonl")})
    assistant.ask("start_run", settings=settings, name="asked")
    deadline = time.monotonic() + 600
    while (status := assistant.ask("run_status", run="asked"))["state"] != "finished" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (status["state"], status["step"]) == ("finished", 1)
    (row, *_) = assistant.ask("completions", run="asked", limit=1)
    assert row["step"] == 1 and row["completions"]
    printed = assistant.ask("export_run", run="asked", to="trl", folder=str(tmp_path))
    assert Path(printed.strip()).joinpath("train.py").is_file()


@pytest.mark.proof
def test_an_assistant_stops_resumes_and_evaluates(tmp_path: Path) -> None:
    settings = small_run.settings_for(tmp_path) | {"iters": 400, "fuse": False}
    assistant = Assistant(tmp_path / "runs", allow_training=True)
    assistant.ask("start_run", settings=settings, name="long")
    for begun in (1, 2):
        while not assistant.ask("run_status", run="long")["steps"]:
            time.sleep(0.2)
        assistant.ask("control_run", run="long", word="stop")
        while assistant.ask("run_status", run="long")["state"] != "stopped":
            time.sleep(0.2)
        if begun == 1:
            assert assistant.ask("resume_run", run="long")["state"] in ("starting", "running")
    assert assistant.ask("evaluate_run", run="long", limit=2, split="train")["rewards"]
