"""The verb `mcp`: an assistant's tools about the runs of this machine (Model Context Protocol on stdin and stdout)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from backend.cli.common import RunsDir, verb
from backend.cli.training import read_settings
from backend.config.config import Config, dump, parse, problems, resolve_paths
from backend.config.other_programs.translation import read_file
from backend.runs.completion_rows import CompletionIndex
from backend.runs.events import Follower, read_events
from backend.runs.queue import start_training
from backend.runs.run_folder import RunFolder, all_runs, default_run_name, find_run, make_run_folder
from backend.runs.run_record import read_record
from backend.runs.run_search import all_keys, search
from backend.utils.child_process import POLL_S
from backend.utils.command import backend_command, backend_environment
from backend.utils.disk import replace_file
from backend.utils.errors import UserError

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

GUIDE = """GRPO Studio trains language models with GRPO on this machine. A run is a folder; tools take its name.
Settings are a mapping of the keys of a run's config.yaml, or a YAML file. Check them, estimate their memory, then
start. A started run goes on by itself: follow it with run_status, and read completions to see what it learns."""
FIRST_SIGN_S = 30.0  # a started run that has neither begun nor failed by then loads a model
Settings = Mapping[str, Any]


@dataclass
class RunTools:
    """The tools: each public method. `runs_dir`: the folder of runs, None for the usual one."""

    runs_dir: Path | None = None

    def list_runs(self, query: str = "", limit: int = 20) -> list[dict[str, Any]]:
        """Runs, newest first: state, step, reward, model. `query` as in `reward>0.5 state:running tag:math`."""
        records = [read_record(run) for run in all_runs(self.runs_dir)]
        passes = search(query, all_keys(records))
        keys = ("name", "state", "step", "iterations", "reward", "model", "title", "tags")
        found = (record.to_dict() for record in records if passes(record) and not record.notes.archived)
        return [{key: record.get(key) for key in keys} for record in islice(found, limit)]

    def run_status(self, run: str, steps: int = 5) -> dict[str, Any]:
        """How far a run is, with the metrics of its last `steps` steps, its newest evaluation, and its last message."""
        folder = self._run(run)
        record, last = read_record(folder), deque[dict[str, Any]](maxlen=max(1, steps))
        last.extend(event for event in read_events(folder.events) if event["kind"] == "step")
        return {
            **{key: record.to_dict()[key] for key in ("name", "state", "step", "iterations", "sentence", "settings")},
            "steps": [{"step": event["step"], **event["metrics"]} for event in last],
            "held_out": dict(record.held_out),
        }

    def completions(self, run: str, step: int | None = None, limit: int = 4) -> list[dict[str, Any]]:
        """What the model wrote to `limit` prompts of a step (None: the newest), with each completion's rewards."""
        index = CompletionIndex(self._run(run).completions)
        while index.advance():
            pass
        return [dict(row) for row in index.rows(step)[:limit]]

    async def doctor(self, run: str) -> Any:
        """What is wrong with a run, since which step, and what to do about it."""
        return await self._verb("doctor", str(self._run(run).path), "--json")

    async def compare_runs(self, runs: list[str]) -> Any:
        """The settings in which runs differ, and their results."""
        return await self._verb("compare", *(str(self._run(run).path) for run in runs), "--json")

    async def check_settings(self, settings: Settings | None = None, file: str = "") -> Any:
        """Problems and unusual values of the settings of a new run, with their model, dataset and rewards."""
        return await self._on_settings("check", settings, file)

    async def estimate_memory(self, settings: Settings | None = None, file: str = "") -> Any:
        """Memory that a run with these settings takes, in bytes, by phase."""
        return await self._on_settings("estimate", settings, file)

    async def start_run(self, settings: Settings | None = None, file: str = "", name: str = "") -> dict[str, Any]:
        """Start to train, and return the run as `run_status` does. Reward files must have been allowed before."""
        config, origin = self._config(settings, file)
        kind = config.model, config.train_type, config.train_mode
        folder = make_run_folder(name or config.run_name or default_run_name(*kind), self.runs_dir)
        replace_file(folder.config, dump(config, origin))
        return await self._begun(folder)

    async def resume_run(self, run: str) -> dict[str, Any]:
        """Continue a run that was stopped or has crashed, from its newest checkpoint."""
        return await self._begun(self._run(run))

    def control_run(self, run: str, word: Literal["pause", "resume", "save", "stop"]) -> str:
        """Pause a training run, let it go on, save a checkpoint, or save and stop it, after the present step."""
        folder = self._run(run)
        if not folder.is_locked():
            raise UserError("run", f"The run {folder.name} is not training.")
        folder.say(word)
        return f"{folder.name} was told to {word}; run_status shows when it has."

    async def evaluate_run(self, run: str, limit: int = 50, split: str = "") -> Any:
        """Score a run's model before and after training on held-out prompts. Takes minutes."""
        options = ["--split", split] if split else []
        return await self._verb("evaluate", str(self._run(run).path), "--limit", str(limit), *options, "--json")

    async def export_run(
        self, run: str, to: Literal["lmstudio", "folder", "ollama", "trl"], name: str = "", folder: str = ""
    ) -> Any:
        """Write a run's model where a program finds it, and verify it; `folder` is the parent for folder and trl. Takes
        minutes."""
        options = [*(["--name", name] if name else []), *(["--folder", folder] if folder else [])]
        return await self._verb("export", str(self._run(run).path), "--to", to, *options)

    def _run(self, name: str) -> RunFolder:
        return find_run(name, self.runs_dir)

    def _config(self, settings: Settings | None, file: str) -> tuple[Config, str]:
        """(settings, what was made of a file for another program). Raises UserError."""
        if file:
            raw, origin = read_settings(file)
            raw |= settings or {}
        else:
            translation = read_file(settings or {})
            if translation.faults:
                raise UserError(problems(settings or {}) or translation.faults)
            raw, origin = resolve_paths(Path.cwd(), translation.values), ""
        return parse(raw), origin

    async def _on_settings(self, name: str, settings: Settings | None, file: str) -> Any:
        config, _ = self._config(settings, file)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as written:
            written.write(dump(config))
            written.flush()
            return await self._verb(name, written.name, "--json")

    async def _begun(self, folder: RunFolder) -> dict[str, Any]:
        """Start a trainer that outlives this server, and wait for its first sign. Raises UserError."""
        follower = Follower(folder.events)
        while follower.read():  # what was there before
            pass
        process = start_training(folder)
        for _ in range(int(FIRST_SIGN_S / POLL_S)):
            await asyncio.sleep(POLL_S)
            new = follower.read()
            if new and new[-1]["kind"] in ("failed", "crashed"):
                raise UserError("run", str(new[-1].get("sentence")))
            if new or process.poll() is not None:
                break
        if process.poll() not in (None, 0):
            raise UserError("run", folder.log.read_text(encoding="utf-8")[-2000:])
        return self.run_status(str(folder.path), 1)

    async def _verb(self, *arguments: str) -> Any:
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        command, environment = backend_command(*arguments), backend_environment()
        process = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=pipe, stderr=pipe, env=environment)
        try:
            printed, told = await process.communicate()
        except asyncio.CancelledError:
            process.terminate()
            raise
        text = printed.decode().strip()
        if process.returncode:
            raise UserError(arguments[0], told.decode().strip()[-2000:] or text[-2000:])
        return json.loads(text.splitlines()[-1]) if "--json" in arguments else text


def _answering(tool: Callable[..., Any]) -> Callable[..., Any]:
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(tool)
    async def answering(*args: Any, **kwargs: Any) -> str:
        try:
            found = await tool(*args, **kwargs) if inspect.iscoroutinefunction(tool) else tool(*args, **kwargs)
        except UserError as error:
            raise ToolError(str(error)) from error
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    return answering


READING = ("list_runs", "run_status", "completions", "doctor", "compare_runs", "check_settings", "estimate_memory")
CHANGING = ("start_run", "resume_run", "control_run", "evaluate_run", "export_run")  # tools that compute or write


@verb
def mcp(
    allow_training: Annotated[
        bool, typer.Option("--allow-training", help="Also start, stop, evaluate and export runs.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Tools about runs for an assistant (Model Context Protocol, on stdin and stdout); read-only by default."""
    if find_spec("mcp") is None:
        raise UserError("mcp", "This needs a package that is not installed: pip install 'grpo-studio[mcp]'.")
    server_of(RunTools(runs_dir), allow_training=allow_training).run("stdio")


def server_of(tools: RunTools, *, allow_training: bool) -> MCPServer:
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    server = MCPServer("GRPO Studio", instructions=GUIDE, log_level="WARNING")
    for name in (*READING, *(CHANGING if allow_training else ())):
        about = ToolAnnotations(read_only_hint=name in READING, open_world_hint=False)
        server.add_tool(_answering(getattr(tools, name)), annotations=about, structured_output=False)
    return server
