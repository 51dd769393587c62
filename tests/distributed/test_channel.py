"""The control channel in one process: ranks are threads, and a dead rank is a closed or unread socket."""

import io
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from backend.distributed import channel, messages
from backend.distributed.channel import LeaderChannel, WorkerChannel, open_channel
from backend.distributed.collectives import FlatCollectives
from backend.distributed.ranks import ADDRESSES_VARIABLE, LostRankError, WorkerError
from backend.utils.errors import UserError

SECRET = b"s" * 32


class ThreadGroup(FlatCollectives):
    """Stands for the collectives of one rank: a gather over the threads of this process."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, told: dict[int, Any]) -> None:
        super().__init__(rank, size)
        self._meeting, self._told = meeting, told

    def gather(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._meeting.wait(10)
        return [self._told[rank] for rank in range(self.size)]


class Ranks:
    """A leader and its workers, whose processes cannot be ended here: `ended` notes who would have been."""

    def __init__(self, size: int, ended: list[str]) -> None:
        meeting, told, opened = threading.Barrier(size), dict[int, Any](), dict[int, Any]()
        self.groups = [ThreadGroup(rank, size, meeting, told) for rank in range(size)]
        threads = [
            threading.Thread(target=lambda group=group: opened.update({group.rank: open_channel(group)}))
            for group in self.groups
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
        self.leader: LeaderChannel = opened[0]
        self.workers: list[WorkerChannel] = [opened[rank] for rank in range(1, size)]
        self.ended = ended

    def kill(self, rank: int) -> None:
        """As SIGKILL: the kernel closes the socket without a word."""
        self.workers[rank - 1]._connection.hang_up()

    def lost(self, within_s: float = 3.0) -> LostRankError:
        error = raised(self.leader.check, within_s)
        assert isinstance(error, LostRankError)
        return error


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ranks]]:
    """Opens a channel of so many ranks. Time runs ten times faster in it."""
    monkeypatch.setenv(ADDRESSES_VARIABLE, "127.0.0.1")
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(channel, "LOST_AFTER_S", 1.0)
    made: list[Ranks] = []
    ended: list[str] = []
    monkeypatch.setattr(WorkerChannel, "_end_process", lambda self, why: ended.append(f"rank {self._rank}: {why}"))

    def make(size: int) -> Ranks:
        made.append(Ranks(size, ended))
        return made[-1]

    yield make
    for each in made:
        each.leader.close()
        for worker in each.workers:
            worker.close()


def raised(work: Callable[[], Any], within_s: float = 3.0) -> UserError:
    """The UserError that `work`, called over and over, raises in the end."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            work()
        except UserError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def wait_for(found: Callable[[], Any]) -> None:
    until = time.monotonic() + 3
    while not found() and time.monotonic() < until:
        time.sleep(0.01)
    assert found()


def test_messages_go_both_ways(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    body = {"problems": ["é", {"deep": [1, None, 0.5]}], "large": [*range(1 << 20)], "logps": [float("-inf"), -0.5] * 9}
    three.leader.send_to_all("work", **body)
    for rank, worker in enumerate(three.workers, 1):
        message = worker.receive()
        assert (message.rank, message.kind, message.body) == (0, "work", body)
        worker.send("groups", of=rank)
    answers = [three.leader.receive(5), three.leader.receive(5)]
    assert sorted((answer.rank, answer.body["of"]) for answer in answers if answer) == [(1, 1), (2, 2)]
    assert three.leader.receive(0.01) is None


def test_dead_rank_is_named_at_once(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    threading.Timer(0.2, three.kill, [2]).start()
    with pytest.raises(LostRankError):  # a waiting leader is woken
        three.leader.receive(None)
    lost = three.lost()
    assert lost.rank == 2 and f"{three.leader.machines[2]} hung up" in str(lost)
    assert lost.faults[0].setting == "hosts"


def test_silent_rank_is_lost_busy_one_is_not(ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    two = ranks(2)
    time.sleep(1.5)  # longer than LOST_AFTER_S, and its main thread says nothing
    two.leader.check()
    stopped = threading.Event()
    monkeypatch.setattr(two.workers[0]._connection, "_pulse", lambda: stopped.wait(5) or {})  # as by SIGSTOP
    assert "has not answered for 1 seconds" in str(two.lost())
    stopped.set()


@pytest.mark.parametrize(
    ("error", "sentence", "exit_code", "gpu"),
    [
        (UserError("reward_functions_file", "rewards.py cannot be read."), "rewards.py cannot be read.", 2, False),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", 1, False),
        (
            RuntimeError("[malloc] Unable to allocate 9999 bytes."),
            "There was not enough memory for the arrays",
            2,
            True,
        ),
    ],
)
def test_worker_error_reaches_the_leader(
    ranks: Callable[[int], Ranks], error: Exception, sentence: str, exit_code: int, gpu: bool
) -> None:
    two = ranks(2)
    two.workers[0].fault(error)
    told = raised(lambda: two.leader.receive(0.05))
    assert isinstance(told, WorkerError) and f"On {two.leader.machines[1]}: {sentence}" in str(told)
    assert (told.exit_code, bool(told.gpu_text)) == (exit_code, gpu)
    assert ("ZeroDivisionError" in told.traceback) == (exit_code == 1)


def test_the_slowest_rank_has_ended_the_fewest_collectives(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    three.groups[1].entered = three.groups[1].left = three.groups[2].entered = 2
    wait_for(lambda: len(three.leader._pulses) == 2 and three.leader._pulses[1]["left"] == 2)
    wait_for(lambda: three.leader.slowest() == 2)
    with pytest.raises(LostRankError, match=r"\(rank 2\) answers, but slowly"):
        three.leader.give_up(2, "answers, but slowly")


class Listening:
    """Rank 0, which awaits rank 1."""

    def __init__(self) -> None:
        self.listeners = channel.listen(["127.0.0.1"])
        self.address = self.listeners[0].getsockname()[:2]
        self.connected: list[socket.socket] = []

    def connect(self, secret: bytes = SECRET, within_s: float = 5) -> None:
        with suppress(OSError):
            self.connected.append(channel.connect([self.address], secret, 1, time.monotonic() + within_s))

    def accept(self, secret: bytes = SECRET, within_s: float = 5) -> dict[int, socket.socket]:
        """While rank 1 connects with this secret."""

        thread = threading.Thread(target=self.connect, args=(secret, within_s))
        thread.start()
        proven = channel.accept(self.listeners, SECRET, {1}, time.monotonic() + within_s)
        thread.join(6)
        return proven


def test_only_who_knows_the_secret_is_admitted() -> None:
    assert not Listening().accept(b"x" * 32, within_s=0.5)
    rank0 = Listening()
    proven = rank0.accept()
    assert list(proven) == [1] and rank0.connected[0].getsockname() == proven[1].getpeername()
    for each in (*rank0.connected, *proven.values()):
        each.close()


@pytest.mark.parametrize(
    "answer", [lambda challenge: bytes(68), lambda challenge: struct.pack("<I", 1) + challenge + challenge]
)
def test_no_answer_without_the_secret_is_a_proof(answer: Callable[[bytes], bytes]) -> None:
    """Zeros, and the challenge sent back."""
    rank0 = Listening()
    with socket.create_connection(rank0.address) as stranger:

        def work() -> None:
            stranger.sendall(answer(stranger.recv(32)))

        thread = threading.Thread(target=work)
        thread.start()
        assert not channel.accept(rank0.listeners, SECRET, {1}, time.monotonic() + 0.5)
        thread.join()
        assert not stranger.recv(100)


def test_strangers_neither_take_a_place_nor_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rank0 = Listening()
    monkeypatch.setattr(channel, "MOST_STRANGERS", 8)  # of 20, the oldest are hung up on
    strangers = [socket.create_connection(rank0.address) for _ in range(20)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    proven = rank0.accept()
    assert strangers[0].recv(100) and not strangers[0].recv(100)
    assert list(proven) == [1]
    with pytest.raises(OSError):  # nobody is admitted any more
        socket.create_connection(rank0.address, timeout=1)
    for each in (*strangers, *rank0.connected, *proven.values()):
        each.close()


STRANGERS = """
import select, socket, sys, threading, time
address, kept, ends = ("127.0.0.1", int(sys.argv[1])), [int(x) for x in sys.argv[2:]], time.monotonic() + 4
def keep(count, sent=b""):
    open_ones = []
    while time.monotonic() < ends:
        try:
            while len(open_ones) < count:
                open_ones.append(socket.create_connection(address, timeout=3))
            for each in select.select(open_ones, [], [], 0.05)[0]:
                if not each.recv(99):
                    open_ones.remove(each)
            for each in open_ones if sent else ():
                each.send(sent)
            if count == 1:
                open_ones.pop().close()
        except OSError:
            open_ones.clear()
slow, silent, flooding = kept
counts = [(slow, b"x"), (silent,), *[(1,)] * flooding]
[threading.Thread(target=keep, args=each).start() for each in counts if each[0]]
"""


@pytest.mark.proof
@pytest.mark.parametrize("counts", [(40, 0, 0), (0, 200, 0), (40, 200, 0), (0, 0, 40), (40, 200, 40)], ids=str)
def test_many_strangers_hold_up_nobody(counts: tuple[int, ...]) -> None:
    """Slow, silent and flooding ones, in a process of their own: each is back as soon as it is hung up on."""
    rank0 = Listening()
    command = [sys.executable, "-c", STRANGERS, str(rank0.address[1]), *map(str, counts)]
    with subprocess.Popen(command) as strangers:
        early = threading.Timer(2, rank0.connect)
        early.start()
        began = time.monotonic()
        proven = channel.accept(rank0.listeners, SECRET, {1}, began + 20)
        early.join()
        assert list(proven) == [1] and time.monotonic() - began < channel.PROOF_PATIENCE_S
        strangers.kill()
    for each in (*rank0.connected, *proven.values()):
        each.close()


def test_a_proof_must_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often another byte comes."""
    monkeypatch.setattr(channel, "PROOF_PATIENCE_S", 0.3)
    rank0 = Listening()
    hung_up: list[float] = []
    with socket.create_connection(rank0.address) as stranger:

        def drip() -> None:
            with suppress(OSError):
                while True:
                    stranger.sendall(b"x")
                    time.sleep(0.1)
            hung_up.append(time.monotonic())

        thread = threading.Thread(target=drip)
        thread.start()
        ends = time.monotonic() + 2
        channel.accept(rank0.listeners, SECRET, {1}, ends)
        thread.join()
        assert hung_up[0] < ends - 0.5


def frame(text: bytes, magic: bytes = messages.MAGIC, length: int | None = None) -> bytes:
    return messages.PREFIX.pack(magic, len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "data",
    [
        frame(b"{}", magic=b"HTTP"),
        frame(b"", length=2**63),
        frame(b"not json"),
        frame(b"\xff"),
        frame(b"[" * 100_000),
        frame(b"[]"),
        frame(b'{"kind": "x", "body": {"a": {"\\u0000type": "os", "\\u0000value": {}}}}'),
        frame(b'{"kind": "x", "body": {"a": {"\\u0000type": "Decimal", "\\u0000value": {}}}}'),
        frame(b'{"kind": "x", "body": {"a": {"\\u0000type": "Group", "\\u0000value": {"problems": 1}}}}'),
    ],
)
def test_garbage_is_no_message(data: bytes) -> None:
    stream = io.BytesIO(data)
    with pytest.raises(messages.MessageError):
        messages.decode(lambda count: bytearray(stream.read(count)))


def test_an_announced_length_takes_no_memory_before_it_comes(ranks: Callable[[int], Ranks]) -> None:
    """A frame of 4 GB is announced, and one byte of it sent."""
    two = ranks(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    two.workers[0]._connection.send(frame(b"x", length=4 << 30))
    time.sleep(0.3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    two.kill(1)
    two.lost()
