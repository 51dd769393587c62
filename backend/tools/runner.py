"""Run the calls of conversations: those of a turn in order, conversations side by side in threads, and async tools on
one event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import inspect
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend.rewards.calls import CallError, ThreadCaller
from backend.rewards.errors import class_name, describe_error, text_of
from backend.rewards.scoring import ToolRequest
from backend.types import ToolCall, ToolResult
from backend.utils.errors import user_traceback

if TYPE_CHECKING:
    from backend.tools.toolbox import EnvironmentKind, Toolbox

LONGEST_RESULT = 1_000_000
"""Characters of one result."""
_MOST_AT_ONCE = 4  # turns in one answer, which has a limit of bytes
_CANCEL_S = 0.3  # for an async call to end after its cancellation
_IMAGES = ("image", "image_url", "video", "audio")


class _RefusedError(Exception):
    """We end a call, or refuse its result; the text completes “NAME …”."""


@dataclass(slots=True, eq=False)
class _Seat:
    """A conversation and its environment. `is_busy`: a call runs, perhaps for ever, and no other may."""

    kind: EnvironmentKind | None
    instance: Any = None
    is_busy: bool = False


class ToolRunner:
    """Answers the tool requests of one run. Conversations have numbers that the caller chooses."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self._seats: dict[int, _Seat] = {}
        self._ended: list[tuple[int, list[ToolResult]]] = []
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout_s = 0.0
        self._pid = os.getpid()

    def environment(self, conversation: int) -> Any:
        seat = self._seats.get(conversation)
        return seat.instance if seat else None

    def run(self, request: ToolRequest) -> list[tuple[int, list[ToolResult]]]:
        """Start what the request names. → conversations that have ended their turn, or their reset."""
        self._timeout_s = request.timeout_s
        if request.close:
            self._close()
        if request.begin is not None:
            self._begin(request.begin)
        for number, calls in request.submit.items():
            self._start(number, self._seats.setdefault(number, _Seat(None)), self._call, calls)
        with self._changed:
            self._changed.wait_for(lambda: self._ended, request.wait_s)
            taken, self._ended = self._ended[:_MOST_AT_ONCE], self._ended[_MOST_AT_ONCE:]
        return taken

    def _begin(self, rows: Sequence[tuple[int, str, Mapping[str, Any]]]) -> None:
        for seat in self._seats.values():
            if seat.is_busy and seat.kind:
                seat.kind.pool[:] = [each for each in seat.kind.pool if each is not seat.instance]
        with self._changed:
            self._seats, self._ended = {}, []
        used = Counter[str]()
        for number, name, row in rows:
            kind = self.toolbox.kinds[name]
            free = kind.pool[used[name] : used[name] + 1]
            used[name] += 1
            seat = self._seats[number] = _Seat(kind, *free)
            self._start(number, seat, self._reset, [row])

    def _start(self, number: int, seat: _Seat, work: Callable[[_Seat, Any], ToolResult], each: Sequence[Any]) -> None:
        def run() -> None:
            results = [work(seat, one) for one in each]
            with self._changed:
                if self._seats.get(number) is seat:
                    self._ended.append((number, results))
                    self._changed.notify_all()

        threading.Thread(target=run, name=f"tools of {number}", daemon=True).start()

    def _reset(self, seat: _Seat, row: Mapping[str, Any]) -> ToolResult:
        assert seat.kind
        kind, start = seat.kind, time.perf_counter()

        def reset() -> str:
            seat.instance = kind.make() if seat.instance is None else seat.instance
            text = seat.instance.reset(**copy.deepcopy(dict(row)))
            if not isinstance(text, str | None):
                advice = "; images are not supported yet" if isinstance(text, list) else ""
                raise _RefusedError(f"returned {class_name(text)}, not text or None{advice}")
            return text or ""

        text, error = self._limited(seat, reset)
        if isinstance(error, _RefusedError):
            text = str(error)
        elif error is not None:
            text = f"raised {describe_error(error, kind.file)}"
            sys.stderr.write(user_traceback(error, kind.file))
        return _result("reset", text, error, start)

    def _call(self, seat: _Seat, call: ToolCall) -> ToolResult:
        start = time.perf_counter()
        method = seat.kind is not None and call.name in seat.kind.methods
        function = getattr(seat.instance, call.name) if method else self.toolbox.tools.get(call.name)
        if function is None:
            text, error = "", ValueError(f"Tool {call.name} not found.")
        elif method and seat.is_busy:
            text, error = "", _RefusedError("cannot run: an earlier call of this environment has not ended")
        else:
            used = seat if method else _Seat(None)
            limited = self._awaited if inspect.iscoroutinefunction(function) else self._limited
            text, error = limited(used, functools.partial(function, **copy.deepcopy(call.arguments)))
        if error is not None:
            what = text_of(error)
            if isinstance(error, _RefusedError) or not isinstance(error, Exception):  # TRL has the bare text of others
                what = f"{call.name if isinstance(error, _RefusedError) else type(error).__name__ + ':'} {what}"
            text = str({"error": what})
        reward = getattr(seat.instance, "_step_reward", 0.0) if method and not error else 0.0  # of `OpenEnvSession`
        return _result(call.name, text, error, start, reward)

    def _limited(self, seat: _Seat, work: Callable[[], Any]) -> tuple[str, BaseException | None]:
        """The result as text, or why there is none."""
        seat.is_busy, runs_on = True, False
        try:
            return ThreadCaller().call(0, self._timeout_s, lambda: _as_text(work())), None
        except CallError as call:
            runs_on = call.runs_on
            return "", call.error or self._too_long()
        except RuntimeError as error:  # the system has no more threads
            return "", error
        finally:
            seat.is_busy = runs_on

    def _awaited(self, seat: _Seat, work: Callable[[], Any]) -> tuple[str, BaseException | None]:
        ended = threading.Event()

        async def run() -> tuple[str, BaseException | None]:
            try:
                return _as_text(await work()), None
            except GeneratorExit:
                raise
            except BaseException as error:  # SystemExit would end the loop, and a cancellation may be the tool's own
                return "", error
            finally:
                if os.getpid() != self._pid:  # a fork of a sync tool has no thread that could go on
                    os._exit(0)
                ended.set()

        seat.is_busy = True
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async tools", daemon=True).start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(run(), loop)
        if concurrent.futures.wait([future], self._timeout_s).done:
            seat.is_busy = False
            return future.result()
        future.cancel()
        seat.is_busy = not ended.wait(_CANCEL_S)
        if seat.is_busy and self._loop is loop:  # something blocks it
            self._loop = None
        return "", self._too_long()

    def _too_long(self) -> Exception:
        return _RefusedError(f"was still running after {self._timeout_s:g} s (tool_timeout)")

    def _close(self) -> None:
        threads, end = list[threading.Thread](), time.monotonic() + self._timeout_s
        for kind in self.toolbox.kinds.values():
            pool, kind.pool = kind.pool, []
            for instance in pool if hasattr(kind.type, "close") else ():
                limited = self._awaited if inspect.iscoroutinefunction(instance.close) else self._limited
                threads.append(threading.Thread(target=limited, args=(_Seat(None), instance.close), daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))


def _as_text(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(part, Mapping) and part.get("type") in _IMAGES for part in value):
        raise _RefusedError("returned images, which are not supported yet")
    return str(value)


def _result(name: str, text: str, error: BaseException | None, start: float, reward: float = 0.0) -> ToolResult:
    text = text[:LONGEST_RESULT].encode(errors="replace").decode()  # without lone surrogates, which no tokenizer reads
    return ToolResult(name, text, error is not None, time.perf_counter() - start, reward)
