"""What runs in the scoring process: it executes reward files, calls functions, and answers. Its parent is
`backend.rewards.sandbox.process`.

Requests, each with the number under which it is answered ("id"):
    {"load": key, "stages": names of each, "file", "base"}
        → {"stages": [[a function's description]], "confined": sentences} or {"faults": […], "user_error": {…}}
    {"score": key, "stage", "functions": indices, "groups", "timeout", "state", "captures": bool}
        → {"scores", "seconds", "columns", "metrics", "printed"} or {"failure": {…}, "printed"}
    {"map": key, "function", "rows", "timeout"}
        → {"rows": [a row or null]} or {"row": index, "what"} or {"unknown": names of the map functions that there are}
What user code prints goes to the parent's log, or with "captures" into the answer. The working directory is a folder for this
process alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from backend.rewards.catalogue.catalog import locate_reward_file
from backend.rewards.confinement import confine, guard, tell_children
from backend.rewards.mlx_lm_lora_shim import stand_in_library
from backend.rewards.resolve import FunctionDescription, RewardFunction, resolve_stages
from backend.rewards.runner.error_text import describe_error
from backend.rewards.runner.row_mapping import RowFailed, map_each
from backend.rewards.runner.score import samples_of
from backend.rewards.runner.step_calls import CallFailed, FunctionFailed, ScoringStep
from backend.rewards.runner.user_traceback import UserCodeError
from backend.rewards.sandbox.main_thread_calls import MainThreadCaller
from backend.rewards.sandbox.wire import (
    IDLE,
    LOADING,
    LONGEST_TEXT,
    LOST_CHANNEL,
    SPOILED,
    Channel,
    ChannelLost,
    StatusPage,
    unpacked,
)
from backend.rewards.user_files import RewardFile
from backend.utils.errors import UserError
from backend.utils.text import quote

_exit, _write = os._exit, os.write  # bound before a user's code can replace them


class ScoringServer:
    """State of the process between two requests: the functions that were loaded, by key and stage."""

    def __init__(self, page: StatusPage, confined: list[str]) -> None:
        """`confined`: sentences on what this process could not be kept from."""
        self._page = page
        self._loaded: dict[int, list[list[RewardFunction]]] = {}
        self._files: dict[int, RewardFile] = {}
        """The file of `reward_functions_file` by key: its map functions are called."""
        self._confined = confined
        self._caller = MainThreadCaller(self._mark)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "load" in request:
            return self._load(request)
        if "map" in request:
            return self._map(request)
        return self._score(request)

    def close(self) -> None:
        """At the run's end."""
        self._caller.close()

    def _mark(self, mark: int) -> None:
        self._page.mark = mark

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        file = Path(request["file"]) if request["file"] else None
        linecache.checkcache()
        self._mark(LOADING)
        executed: dict[Path, RewardFile] = {}
        try:
            stages = resolve_stages(request["stages"], file, Path(request["base"]), executed)
        except UserError as mistake:
            return _load_failure(mistake, file, request)
        finally:
            self._mark(IDLE)
        self._loaded[request["load"]] = stages
        if file is not None:
            self._files[request["load"]] = executed[locate_reward_file(file).resolve()]
        described = [[_description(function.description) for function in stage] for stage in stages]
        return {"stages": described, "confined": self._confined}

    # ── mapping rows ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _map(self, request: dict[str, Any]) -> dict[str, Any]:
        file = self._files.get(request["map"])
        functions = file.map_functions if file is not None else {}
        call = functions.get(request["function"])
        if file is None or call is None:
            return {"unknown": [_cut(name) for name in functions if isinstance(name, str)][:100]}
        with stand_in_library(file.functions):
            try:
                rows = self._caller.call(
                    0, request["timeout"], lambda: map_each(call, request["rows"], file.path), lambda rows: rows
                )
            except CallFailed as failed:
                cause = failed.__cause__
                if not isinstance(cause, RowFailed):
                    raise cause or failed from None
                return {"row": cause.index, "what": _cut(cause.what)}
            finally:
                self._mark(IDLE)
        return {"rows": rows}

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _score(self, request: dict[str, Any]) -> dict[str, Any]:
        stage = self._loaded[request["score"]][request["stage"]]
        functions = [stage[index] for index in request["functions"]]
        samples = samples_of(unpacked(request["groups"]))
        step = ScoringStep(functions, samples, request["timeout"], request["state"], self._caller)
        with _captured_prints() if request["captures"] else contextlib.nullcontext(io.StringIO()) as printed:
            try:
                outcomes = step.outcomes()
            except FunctionFailed as failed:
                return {"failure": _failure(failed, functions), "printed": printed.getvalue()[-LONGEST_TEXT:]}
            finally:
                self._mark(IDLE)
        return {
            "scores": [scores for scores, _ in outcomes],
            "seconds": [seconds for _, seconds in outcomes],
            "columns": step.logs.columns,
            "metrics": step.logs.metrics,
            "printed": printed.getvalue()[-LONGEST_TEXT:],
        }


def _description(function: FunctionDescription) -> dict[str, Any]:
    return {
        "name": function.name, "file": str(function.file or ""), "line": function.line, "note": function.note,
        "is_async": function.is_async,
    }  # fmt: skip


def _load_failure(mistake: UserError, file: Path | None, request: dict[str, Any]) -> dict[str, Any]:
    at = file or _only_named_file([name for names in request["stages"] for name in names], Path(request["base"]))
    error = UserCodeError.of(mistake.faults[0].sentence, mistake.__cause__, at)
    faults = [{"setting": fault.setting, "sentence": _cut(fault.sentence)} for fault in mistake.faults]
    return {"faults": faults, "user_error": _error_fields(error)}


def _only_named_file(names: Sequence[str], base: Path) -> Path | None:
    """The file before `::`, where the entries name just one."""
    files = {name.partition("::")[0].strip() for name in names if "::" in name}
    return locate_reward_file(files.pop(), base).resolve() if len(files) == 1 else None


def _failure(failed: FunctionFailed, functions: Sequence[RewardFunction]) -> dict[str, Any]:
    function = functions[failed.function]
    error = UserCodeError.of("", failed.__cause__, function.file, function.line or 0)
    return {
        "function": failed.function, "what": _cut(failed.what), "completion": failed.completion,
        "has_line": failed.has_line, "is_timeout": failed.is_timeout, "error": _error_fields(error),
        "traceback": failed.traceback,
    }  # fmt: skip


def _error_fields(error: UserCodeError) -> dict[str, Any]:
    frames = [
        {"line": frame.line, "function": _cut(frame.function), "code": _cut(frame.code)} for frame in error.frames
    ]
    return {"sentence": _cut(error.sentence), "file": error.file, "line": error.line, "frames": frames[-100:]}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else quote(text, LONGEST_TEXT)


@contextlib.contextmanager
def _captured_prints() -> Iterator[io.StringIO]:
    printed = io.StringIO()  # for Python's prints only; what C code writes to descriptor 1 goes to the parent's log
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────


def serve(channel: Channel, server: ScoringServer) -> NoReturn:
    """Answer until the parent closes its end. Whatever a user's code has left behind, one request gets at most one answer."""
    try:
        while True:
            request = channel.receive()
            answer = server.answer(request)
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            channel.send({**answer, "id": request["id"]})
    except EOFError:
        server.close()
        sys.exit()  # a user's `atexit` functions run now, and files are flushed
    except ChannelLost:
        _exit(LOST_CHANNEL)
    except BaseException as error:
        _give_up(error)


def _give_up(error: BaseException) -> NoReturn:
    """End after an error of our own code, which a user's must have caused, with one line for log.txt that says where."""
    try:
        _write(2, f"The process of the reward functions gave up: {describe_error(error, None)}.\n".encode())
    finally:
        _exit(SPOILED)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`arguments`: the descriptors of requests, answers and the shared page, and whether the network may be used (1 or 0)."""
    requests, answers, page, network = map(int, sys.argv[1:] if arguments is None else arguments)
    guard(requests)  # returns in the process that is guarded; both end with the parent, and so does what they start
    status = StatusPage(page)
    os.close(page)
    channel = Channel(requests, answers)
    confined = confine([Path.cwd()], bool(network))
    tell_children(confined)
    faulthandler.enable()  # a crash leaves the line of Python in log.txt
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    serve(channel, ScoringServer(status, confined.sentences()))


if __name__ == "__main__":
    main()
