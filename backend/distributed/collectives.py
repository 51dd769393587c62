"""`Collectives` over `mlx.core.distributed` (ring, MPI, JACCL, NCCL), and the weights that they keep equal to rank 0's.
With a lost peer a collective of mlx may hang. So a communication thread makes the calls, the caller waits in short
turns, and `check` may raise between them. The process must end with `os._exit` then. The calls run on the CPU: Metal
ends a command buffer that waits 5 s for another rank (mlx#4475). Only NCCL sums on the GPU."""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from backend.config.config import Config
from backend.distributed.ranks import FILES_VARIABLE, RankInfo
from backend.training.collectives import Collectives
from backend.utils.errors import UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.models.policy import Policy
    from backend.training.learner import Learner

T = TypeVar("T")

POLL_S = 0.1  # seconds between two calls of `check`
REASON_WITHIN_S = 30.0  # seconds in which `check` may find the reason of an error
FIRST_BYTES = 1016  # bytes that travel with the length; a longer value takes a second round
TOLERANCE = 1e-3  # relative tolerance for weights that each machine has quantised
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}


def do_nothing(*_: object) -> None: ...


class CallThread:
    """Makes calls that may never return, one by one. A daemon: joining it at exit could hang or abort."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        self._calls.put((call, result))
        return result

    def _work(self) -> None:
        while True:
            call, result = self._calls.get()
            try:
                value = call()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)
                del value
            del call, result  # they hold arrays


def wait_for(
    result: Future[T],
    check: Callable[[], None],
    is_of_link: Callable[[BaseException], object],
    waiting: Callable[[float], None] = do_nothing,
) -> T:
    """The result of a call in another thread, which may never return. Meanwhile calls `check`, which raises for a lost
    rank, and `waiting` with the seconds so far. After an error for which `is_of_link`, lets `check` raise what becomes
    known of the rank whose link has failed."""
    began = time.monotonic()
    while True:
        try:
            error = result.exception(POLL_S)
            break
        except TimeoutError:
            check()
            waiting(time.monotonic() - began)
    if error is not None and is_of_link(error):
        ends = time.monotonic() + REASON_WITHIN_S
        while time.monotonic() < ends:
            check()
            time.sleep(POLL_S)
    return result.result()


class FlatCollectives(Collectives):
    """Collectives of any shape on top of two of flat vectors. Heartbeats report the number `entered` and `left`."""

    entered = left = 0
    waited_s = summed_s = 0.0  # seconds of waiting for slower ranks, and of transfers

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.waiting: Callable[[float], None] = do_nothing  # called during a collective, with its seconds so far

    def all_sum(self, x_N: mx.array) -> mx.array:
        """The sum over the ranks, evaluated."""
        raise NotImplementedError

    def all_gather(self, x_N: mx.array) -> mx.array:
        """Every rank's vector of the same length, one behind the other, evaluated."""
        raise NotImplementedError

    def pulse(self) -> dict[str, int]:
        return {"entered": self.entered, "left": self.left}

    def sum(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        began = time.perf_counter()
        total = self.all_sum(mx.concatenate([x.astype(mx.float32).reshape(-1) for x in arrays]))
        self.summed_s += time.perf_counter() - began
        parts = mx.split(total, [*accumulate(x.size for x in arrays)][:-1])
        return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def broadcast(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        began = time.perf_counter()
        # As whole numbers, because −0 + 0 is 0 in floating point; 0 from everybody else.
        own = mx.concatenate([mx.contiguous(x.reshape(-1)).view(mx.uint8) for x in arrays])
        words = mx.pad(own, (0, -own.size % 4)).view(mx.uint32)
        sent = self.all_sum(words if self.rank == 0 else mx.zeros_like(words)).view(mx.uint8)
        self.summed_s += time.perf_counter() - began
        parts = mx.split(sent[: own.size], [*accumulate(x.nbytes for x in arrays)][:-1])
        return [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        began, own = time.perf_counter(), json.dumps(value).encode()
        first = self._gather_equal(len(own).to_bytes(8, "little") + own[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"))
        lengths = [int.from_bytes(each[:8], "little") for each in first]
        parts = [each[8:] for each in first]
        if (rest := max(lengths) - FIRST_BYTES) > 0:
            tails = self._gather_equal(own[FIRST_BYTES:].ljust(rest, b"\0"))
            parts = [head + tail for head, tail in zip(parts, tails, strict=True)]
        self.waited_s += time.perf_counter() - began
        return [json.loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def concatenate(self, x_N: mx.array) -> mx.array:
        lengths: list[int] = self.gather(x_N.size)
        if not (longest := max(lengths)):
            return mx.zeros(0)
        began = time.perf_counter()
        rows = self.all_gather(mx.pad(x_N.astype(mx.float32), (0, longest - x_N.size))).reshape(self.size, longest)
        self.waited_s += time.perf_counter() - began
        return mx.concatenate([row[:length] for row, length in zip(rows, lengths, strict=True)])

    def _gather_equal(self, own: bytes) -> list[bytes]:
        gathered = np.array(self.all_gather(mx.array(np.frombuffer(own, np.uint8)))).tobytes()
        return [gathered[i : i + len(own)] for i in range(0, len(gathered), len(own))]


class MlxCollectives(FlatCollectives):
    """Over a group of mlx."""

    def __init__(self, group: mx.distributed.Group, device: mx.DeviceType = mx.cpu) -> None:
        super().__init__(group.rank(), group.size())
        self.check: Callable[[], None] = do_nothing  # raises for a lost rank; called while waiting
        self.group = group
        self._device = device
        self._thread = CallThread("collectives")

    def all_sum(self, x_N: mx.array) -> mx.array:
        return self._call(mx.distributed.all_sum, x_N)

    def all_gather(self, x_N: mx.array) -> mx.array:
        return self._call(mx.distributed.all_gather, x_N)

    def _call(self, collective: Callable[..., mx.array], x_N: mx.array) -> mx.array:
        def call() -> mx.array:
            self.entered += 1
            value = collective(x_N, group=self.group, stream=self._device)
            mx.eval(value)
            self.left += 1  # not after an error: this collective has not returned on every rank
            return value

        mx.eval(x_N)
        try:
            return wait_for(self._thread.submit(call), self.check, lambda error: True, self.waiting)
        except UserError:  # of `check`
            raise
        except Exception as error:
            raise UserError("hosts", f"The ranks' link has failed: {error}") from error


def init_collectives(backend: str) -> MlxCollectives:
    """Join the other ranks that the environment names. Raises UserError."""
    files: dict[str, str] = json.loads(os.environ.get(FILES_VARIABLE, "{}"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                Path(folder, name).write_text(content, encoding="utf-8")
                os.environ[name] = str(Path(folder, name))
            group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise UserError("distributed_backend", f"The ranks cannot be joined over {backend}: {error}") from error
    return MlxCollectives(group, mx.gpu if backend == "nccl" else mx.cpu)


def follow_leader(learner: Learner, config: Config, ranks: Collectives) -> None:
    """Take over rank 0's trained arrays, optimizer state and moving reference, bit for bit."""
    own = StepSnapshot.of(learner, config)
    groups = own.trained, own.moments, own.reference
    arrays = iter(ranks.broadcast([x for group in groups for x in group.values()]))
    if ranks.rank:
        trained, moments, reference = ({name: next(arrays) for name in group} for group in groups)
        replace(own, trained=trained, moments=moments, reference=reference).restore(learner)


def keep_together(learner: Learner, config: Config, ranks: Collectives) -> None:
    """Follow the leader where any trained bit differs between ranks."""
    if len(set(ranks.gather(_bit_sum(learner.policy.trainable())))) > 1:
        follow_leader(learner, config, ranks)


def check_same_base(policy: Policy, config: Config, ranks: Collectives, machines: Sequence[RankInfo]) -> None:
    """Raise UserError on the leader where a rank has loaded other weights."""
    trained = policy.trainable()
    everything: Any = tree_flatten(policy.model.parameters())
    frozen: dict[str, mx.array] = {name: x for name, x in everything if name not in trained}
    own: dict[str, Any] = {"arrays": sorted(f"{name} {x.shape} {x.dtype}" for name, x in frozen.items())}
    if config.quantization == "none":
        own |= {"bits": _bit_sum(frozen), "sizes": []}
    else:  # made here from the model's own weights, which another chip may round to other codes
        sizes = [float(mx.abs(frozen[name]).astype(mx.float32).sum()) for name in sorted(frozen)]
        own |= {"bits": 0, "sizes": sizes}
    gathered = ranks.gather(own)
    if ranks.rank != 0:
        return
    for rank, other in enumerate(gathered):
        is_same = (other["arrays"], other["bits"]) == (own["arrays"], own["bits"]) and all(
            abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1.0)
            for a, b in zip(own["sizes"], other["sizes"], strict=True)
        )
        if not is_same:
            weights = f"The model {quote(config.model, 60)} on {machines[rank]} has other weights than here"
            raise UserError("model", f"{weights}; copy it there, or name a revision.")


def _bit_sum(arrays: dict[str, mx.array]) -> int:
    sums = [x.reshape(-1).view(_WORDS[x.itemsize]).astype(mx.uint32).sum() for x in arrays.values() if x.size]
    return int(mx.stack(sums).sum()) if sums else 0


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The state before a step's updates, to take the step back when a machine is lost: references, which keep a second
    copy of trained arrays and optimizer state while a step learns."""

    trained: dict[str, mx.array]
    moments: dict[str, mx.array]
    reference: dict[str, mx.array]
    updates: int
    algorithm: list[float | None]

    @classmethod
    def of(cls, learner: Learner, config: Config) -> StepSnapshot:
        policy, state = learner.policy, list(learner.algorithm.state())
        reference = policy.reference_arrays() if config.moves_reference else {}
        return cls(policy.trainable(), learner.state_arrays(), reference, learner.updates, state)

    def restore(self, learner: Learner) -> None:
        policy = learner.policy
        policy.assign(self.trained)
        if self.reference:
            policy.restore_reference(self.reference)
        learner.restore(self.moments, self.updates, self.algorithm)
        learner.is_whole = True
        mx.eval(policy.arrays(), learner.optimizer.state)
