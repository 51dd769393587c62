"""mlx's lazy graph: compiled functions with a bounded number of traces, and an order of evaluation."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache, wraps
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

from backend.engine.device import on_cpu

MOST_TRACES = 64


def compiled_by_shape(function: Callable[..., Any], inputs: list[Any] | None = None) -> Callable[..., Any]:
    """`function` of arrays under `mx.compile`, with the traces of the last MOST_TRACES combinations of shapes and
    types. mlx would keep all, and on Metal end at its limit of buffers (ml-explore/mlx#4464). Arrays in lists must
    follow the other arguments in shape."""

    @lru_cache(maxsize=MOST_TRACES)
    def compiled(_shapes: tuple[Any, ...]) -> Callable[..., Any]:
        # mlx ties traces to the function object and drops them with it: a new lambda for each combination.
        return mx.compile(lambda *arguments: function(*arguments), inputs=inputs)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        shapes = tuple((x.shape, x.dtype) for x in arguments if isinstance(x, mx.array))
        here = _this_thread
        return here.answer(lambda: compiled(shapes)(*arguments)) if here.learns else compiled(shapes)(*arguments)

    return call


class _ThisThread(threading.local):
    calls: SimpleQueue[Callable[[], None]] | None = None  # to another thread, for this one
    learns = False

    def answer(self, function: Callable[[], Any]) -> Any:
        """The other thread's result of `function`."""
        done: Future[Any] = Future()

        def call() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        assert self.calls is not None
        self.calls.put(call)
        return done.result()


_this_thread = _ThisThread()


def learns() -> bool:
    """True inside `compiled_in_gradients` on a CPU."""
    return _this_thread.learns


@contextmanager
def compiled_in_gradients() -> Iterator[None]:
    """Inside, on a CPU, functions under `compiled_by_shape` stay compiled while a gradient is traced. In a thread that
    traces, mlx runs their operations one by one (20 for an exponential), so another thread calls them. Only inside
    custom functions, which define their own gradient."""
    here = _this_thread
    if on_cpu() and here.calls is None:
        here.calls = SimpleQueue()
        arguments = here.calls, mx.default_stream(mx.default_device())
        # A daemon, which never ends: mlx aborts if a thread that has compiled ends while the process does.
        threading.Thread(target=_call_all, args=arguments, name="compiled functions", daemon=True).start()
    here.learns = on_cpu()
    try:
        yield
    finally:
        here.learns = False


def _call_all(calls: SimpleQueue[Callable[[], None]], stream: mx.Stream) -> None:
    mx.set_default_stream(stream)
    while True:
        calls.get()()


def evaluate_after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """`x`, whose users are evaluated after `earlier`. mlx starts every operation whose inputs are ready,
    so independent chunks would all be in memory."""
    return mx.depends([x], list(earlier))[0] if earlier else x
