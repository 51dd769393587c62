"""The control channel, in one process: ranks are threads, and a rank that dies is a socket that is closed or read no more."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from backend.distributed import channel, frames, handshake
from backend.distributed import channel as channels
from backend.distributed import connection as wire
from backend.distributed.addresses import ADDRESSES_VARIABLE, Address, own_addresses
from backend.distributed.channel import CollectiveWatch, LeaderChannel, WorkerChannel, open_channel
from backend.distributed.faults import LostRank, WorkerFault
from backend.distributed.frames import BadFrame
from backend.distributed.handshake import HandshakeError, Listeners
from backend.utils.errors import UserError

SECRET = b"s" * 32


class ThreadGroup:
    """Stands for the collectives of one rank: a gather over the threads of this process."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, told: dict[int, Any]) -> None:
        self.rank, self.size = rank, size
        self.entered = self.left = self.pending_bytes = 0
        self.failure, self.bandwidth = "", 0.0
        self._meeting, self._told = meeting, told

    def gather(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._meeting.wait(10)
        return [self._told[rank] for rank in range(self.size)]


class Ranks:
    """A leader and its workers, whose processes cannot be ended here: `ended` notes who would have been."""

    def __init__(self, leader: LeaderChannel, workers: list[WorkerChannel], groups: list[ThreadGroup]) -> None:
        self.leader, self.workers, self.groups = leader, workers, groups
        self.ended: list[str] = []

    def kill(self, rank: int) -> None:
        """As SIGKILL: the kernel closes the socket without a word."""
        self.workers[rank - 1]._connection.hang_up()


def opened(size: int) -> Ranks:
    meeting, told = threading.Barrier(size), dict[int, Any]()
    groups = [ThreadGroup(rank, size, meeting, told) for rank in range(size)]
    channels_by_rank: dict[int, Any] = {}

    def open_one(group: ThreadGroup) -> None:
        channels_by_rank[group.rank] = open_channel(group)

    threads = [threading.Thread(target=open_one, args=(group,)) for group in groups]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return Ranks(channels_by_rank[0], [channels_by_rank[rank] for rank in range(1, size)], groups)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ranks]]:
    """Opens a channel of so many ranks. Time runs ten times faster in it."""
    monkeypatch.setenv(ADDRESSES_VARIABLE, "127.0.0.1")
    monkeypatch.setattr(wire, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(wire, "LOST_AFTER_S", 1.0)
    monkeypatch.setattr(channel, "SUSPICION_S", 0.3)
    made: list[Ranks] = []
    ended: list[str] = []
    monkeypatch.setattr(WorkerChannel, "_end_process", lambda self, why: ended.append(f"rank {self._rank}: {why}"))

    def make(size: int) -> Ranks:
        made.append(opened(size))
        made[-1].ended = ended
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
        except UserError as mistake:
            return mistake
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_messages_go_both_ways_with_their_arrays(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    arrays = {
        "tokens": np.arange(7, dtype=np.int32),
        "logps": np.full((2, 3), np.nan, np.float32),
        "none": np.empty((0, 4), bool),
    }
    three.leader.send_to_all("work", {"problems": ["é", {"deep": [1, None, 0.5]}]}, arrays)
    for worker in three.workers:
        message = worker.receive()
        assert message is not None and (message.rank, message.kind) == (0, "work")
        assert message.body == {"problems": ["é", {"deep": [1, None, 0.5]}]}
        for name, array in arrays.items():
            assert message.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(message.arrays[name], array)
        message.arrays["tokens"][0] = 9  # its receiver's own
        worker.send("groups", {"of": three.workers.index(worker) + 1})
    answers = [three.leader.receive(5), three.leader.receive(5)]
    assert sorted((answer.rank, answer.body["of"]) for answer in answers if answer) == [(1, 1), (2, 2)]
    assert three.leader.receive(0.01) is None


def test_a_long_message_comes_whole_and_in_order(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    large = np.random.default_rng(0).integers(0, 255, 9 << 20).astype(np.uint8)
    two.leader.send(1, "large", {}, {"x": large})
    two.leader.send(1, "small")
    first, second = two.workers[0].receive(10), two.workers[0].receive(10)
    assert first is not None and second is not None and second.kind == "small"
    np.testing.assert_array_equal(first.arrays["x"], large)


def test_every_rank_introduces_itself(ranks: Callable[[int], Ranks]) -> None:
    machines = ranks(3).leader.machines
    assert [info.rank for info in machines] == [0, 1, 2]
    assert {info.pid for info in machines} == {os.getpid()}
    assert [info.address for info in machines] == ["", "127.0.0.1", "127.0.0.1"]
    assert all(info.machine and info.chip and info.mlx and info.python and info.memory_gb > 0 for info in machines)


def test_heartbeats_tell_how_far_the_sums_are(ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LEAST_LIMIT_S", 0.3)
    two = ranks(2)
    for group in two.groups:
        group.entered, group.left = 5, 4
    lost = raised(two.leader.check)
    assert isinstance(lost, LostRank) and "a sum over all ranks did not end" in lost.why


# ── who is lost ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_that_dies_is_named_at_once(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    began = time.monotonic()
    three.kill(2)
    lost = raised(three.leader.check)
    assert time.monotonic() - began < 0.5
    assert isinstance(lost, LostRank) and lost.rank == 2 and "hung up" in lost.why
    assert f"{lost.machine} (rank 2) hung up" in str(lost) and lost.faults[0].setting == "hosts"
    with pytest.raises(LostRank):
        three.leader.receive(None)


def test_a_waiting_leader_is_woken(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    threading.Timer(0.2, two.kill, [1]).start()
    with pytest.raises(LostRank):
        two.leader.receive(None)


def test_a_rank_that_is_silent_is_lost_and_one_that_is_busy_is_not(
    ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ranks(2)
    time.sleep(1.5)  # longer than LOST_AFTER_S, and its main thread says nothing
    two.leader.check()
    stopped = threading.Event()
    monkeypatch.setattr(two.workers[0]._connection, "_send_all", lambda data: stopped.wait(5))  # as by SIGSTOP
    lost = raised(two.leader.check)
    stopped.set()
    assert isinstance(lost, LostRank) and "has not answered for 1 seconds" in lost.why


def test_a_leader_that_was_stopped_itself_takes_nobody_for_lost(
    ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock has gone on meanwhile, and so would a deadline have."""
    two = ranks(2)
    resumed = threading.Event()
    connection = two.leader._connections[1]
    take = connection._take

    def stopped(*message: Any) -> None:
        resumed.wait(5)
        take(*message)

    connection._take = stopped
    time.sleep(1.5)
    resumed.set()
    time.sleep(0.3)
    two.leader.check()


def test_a_worker_ends_with_its_leader(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    two.leader._connections[1].hang_up()
    until = time.monotonic() + 2
    while not two.ended and time.monotonic() < until:
        time.sleep(0.01)
    assert two.ended == ["rank 1: hung up: its process has ended"]


def test_a_channel_that_is_closed_loses_nobody(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    two.leader.close()
    message = two.workers[0].receive(3)
    assert message is not None and message.kind == channels.GOODBYE
    two.workers[0].close()
    time.sleep(0.2)
    assert not two.ended
    two.leader.check()


def test_a_worker_that_stays_after_the_goodbye_is_ended(
    ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread hangs in a sum, and nothing else would end it."""
    monkeypatch.setattr(channels, "GOODBYE_PATIENCE_S", 0.2)
    two = ranks(2)
    two.leader.close()
    until = time.monotonic() + 3
    while not two.ended and time.monotonic() < until:
        time.sleep(0.01)
    assert two.ended == ["rank 1: has closed the channel"]


# ── what workers report ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "sentence", "exit_code", "gpu"),
    [
        (UserError("reward_functions_file", "rewards.py cannot be read."), "rewards.py cannot be read.", 2, False),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", 1, False),
        (RuntimeError("[malloc] Unable to allocate 9999 bytes."), "There was not enough memory for the arrays", 2, True),
        (RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity"), "macOS stopped the GPU's work", 2, True),
    ],
)  # fmt: skip
def test_a_fault_of_a_worker_reaches_the_leader_with_its_machine(
    ranks: Callable[[int], Ranks], error: Exception, sentence: str, exit_code: int, gpu: bool
) -> None:
    two = ranks(2)
    two.workers[0].fault(error)
    told = raised(lambda: two.leader.receive(0.05))
    machine = two.leader.machines[1].machine
    assert isinstance(told, WorkerFault) and f"On {machine} (rank 1): {sentence}" in str(told)
    assert (told.exit_code, bool(told.gpu_text)) == (exit_code, gpu)
    assert ("ZeroDivisionError" in told.traceback) == (exit_code == 1)


def test_of_a_broken_sum_the_rank_that_is_gone_is_blamed_and_not_its_neighbour(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    three.groups[1].failure = "[ring] send failed"
    time.sleep(0.15)
    three.leader.check()
    three.kill(2)
    lost = raised(three.leader.check)
    assert isinstance(lost, LostRank) and lost.rank == 2 and "hung up" in lost.why


@pytest.mark.parametrize(("where", "blamed"), [(2, 2), (0, 2)])
def test_of_a_broken_sum_while_all_answer_who_reports_it_is_named(
    ranks: Callable[[int], Ranks], where: int, blamed: int
) -> None:
    three = ranks(3)
    three.groups[where].failure = "[ring] send failed"
    lost = raised(three.leader.check)
    assert isinstance(lost, LostRank) and lost.rank == blamed
    assert "could not add up the gradients with the others ([ring] send failed)" in lost.why


# ── sums that never end ──────────────────────────────────────────────────────────────────────────────────────────────


def watch_of(leader: ThreadGroup, *workers: tuple[int, int]) -> CollectiveWatch:
    watch = CollectiveWatch(leader)
    for rank, (entered, left) in enumerate(workers, 1):
        watch.take(rank, {"entered": entered, "left": left, "failure": ""})
    return watch


def group_at(entered: int, left: int, **about: Any) -> ThreadGroup:
    group = ThreadGroup(0, 3, threading.Barrier(1), {})
    group.entered, group.left = entered, left
    vars(group).update(about)
    return group


def test_a_sum_that_all_have_begun_and_one_has_not_ended_is_that_ones_fault() -> None:
    watch = watch_of(group_at(5, 5), (5, 5), (5, 4))
    assert watch.verdict(100.0) is None and watch.verdict(100.0 + channel.LEAST_LIMIT_S - 1) is None
    verdict = watch.verdict(100.0 + channel.LEAST_LIMIT_S)
    assert verdict is not None and verdict.rank == 2 and "did not end within 15 seconds" in verdict.why


def test_a_rank_that_has_not_begun_a_sum_is_merely_slow() -> None:
    watch = watch_of(group_at(5, 4), (5, 4), (4, 4))
    assert [watch.verdict(t) for t in (0.0, 1e3, 1e6)] == [None] * 3


def test_the_time_of_a_sum_counts_from_when_the_last_rank_began_it() -> None:
    watch = watch_of(group_at(5, 4), (5, 4), (4, 4))
    watch.verdict(0.0)
    watch.take(2, {"entered": 5, "left": 4})
    assert watch.verdict(1000.0) is None
    watch.take(2, {"entered": 6, "left": 5})  # it has ended that one, and waits for the next
    watch.take(1, {"entered": 5, "left": 5})
    watch._group.left = 5
    assert watch.verdict(2000.0) is None


@pytest.mark.parametrize(
    ("size", "bandwidth", "limit"), [(20e6, 0.0, 35), (20e6, 1e9, 35), (20e6, 0.5e6, 135), (0, 1e9, 15)]
)
def test_a_large_sum_over_a_slow_cable_may_take_its_time(size: float, bandwidth: float, limit: float) -> None:
    watch = watch_of(group_at(1, 0, pending_bytes=size, bandwidth=bandwidth), (1, 0))
    assert watch.verdict(0.0) is None and watch.verdict(limit - 0.1) is None
    assert watch.verdict(limit + 0.1) is not None


# ── strangers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def proofs(worker: Callable[[socket.socket], Any], secret: bytes = SECRET) -> int:
    """The rank that a worker at the other end proves. Raises HandshakeError or OSError."""
    here, there = socket.socketpair()
    here.settimeout(1), there.settimeout(1)

    def work() -> None:
        with suppress(HandshakeError, OSError):
            worker(there)
            there.recv(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        stranger = handshake.Stranger(here)
        while (rank := stranger.read(secret, {7})) is None:
            pass
        return rank
    finally:
        here.close()
        thread.join(3)
        there.close()


def test_only_who_knows_the_secret_is_admitted() -> None:
    assert proofs(lambda there: handshake.introduce(there, SECRET, 7)) == 7
    for other in (
        lambda there: handshake.introduce(there, b"x" * 32, 7),
        lambda there: there.close(),
        lambda there: there.sendall(bytes(68)),
    ):
        with pytest.raises((HandshakeError, OSError)):
            proofs(other)


def test_a_challenge_that_is_sent_back_proves_nothing() -> None:
    def reflecting(there: socket.socket) -> None:
        challenge = there.recv(32)
        there.sendall(struct.pack("<I", 1) + challenge + challenge)

    with pytest.raises(HandshakeError):
        proofs(reflecting)


def test_a_worker_does_not_talk_to_a_false_leader() -> None:
    here, there = socket.socketpair()
    here.settimeout(2), there.settimeout(2)

    def false_leader() -> None:
        there.sendall(bytes(32))
        there.recv(200)
        there.sendall(bytes(32))

    threading.Thread(target=false_leader).start()
    with pytest.raises(HandshakeError):
        handshake.introduce(here, SECRET, 1)
    here.close(), there.close()


def test_strangers_neither_take_a_place_nor_hold_it_up() -> None:
    """Some say nothing, some say rubbish, one comes with a rank that is taken; the worker is connected none the less, and then nobody."""
    listeners = Listeners.at(["127.0.0.1"])
    (address,) = listeners.addresses
    strangers = [socket.create_connection(address) for _ in range(20)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    connected: list[socket.socket] = []
    thread = threading.Thread(
        target=lambda: connected.append(handshake.connect([address], SECRET, 1, time.monotonic() + 5))
    )
    thread.start()
    proven = listeners.accept(SECRET, {1}, time.monotonic() + 5)
    thread.join(5)
    assert list(proven) == [1] and connected[0].getsockname() == proven[1].getpeername()
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=1)
    for each in (*strangers, *connected, *proven.values()):
        each.close()


def test_strangers_that_send_bytes_slowly_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are places came first, and each sends a byte again and again."""
    listeners = Listeners.at(["127.0.0.1"])
    (address,) = listeners.addresses
    monkeypatch.setattr(handshake, "MOST_STRANGERS", 8)
    strangers = [socket.create_connection(address) for _ in range(20)]
    is_over = threading.Event()

    def trickle() -> None:
        while not is_over.wait(0.05):
            for each in strangers:
                with suppress(OSError):
                    each.send(b"x")

    connected: list[socket.socket] = []
    threads = [
        threading.Thread(target=trickle),
        threading.Thread(
            target=lambda: connected.append(handshake.connect([address], SECRET, 1, time.monotonic() + 5))
        ),
    ]
    for each in threads:
        each.start()
    began = time.monotonic()
    proven = listeners.accept(SECRET, {1}, began + 5)
    is_over.set()
    for each in threads:
        each.join(6)
    assert list(proven) == [1] and time.monotonic() - began < 3
    for each in (*strangers, *connected, *proven.values()):
        each.close()


def test_a_proof_has_one_time_limit_however_its_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides: each byte comes long before the limit, and all of them long after it."""
    monkeypatch.setattr(handshake, "PROOF_PATIENCE_S", 0.5)
    listeners = Listeners.at(["127.0.0.1"])
    (address,) = listeners.addresses
    accepting = threading.Thread(target=lambda: listeners.accept(SECRET, {1}, time.monotonic() + 3))
    accepting.start()
    began = time.monotonic()
    with socket.create_connection(address) as slow, suppress(ConnectionError):
        while time.monotonic() - began < 2.5:
            slow.send(b"x")
            time.sleep(0.1)
    assert time.monotonic() - began < 2
    accepting.join(6)

    here, there = socket.socketpair()
    is_over = threading.Event()

    def trickle() -> None:
        while not is_over.wait(0.1):
            there.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        handshake.introduce(here, SECRET, 1)
    is_over.set()
    thread.join(3)
    here.close(), there.close()
    assert time.monotonic() - began < 2


def test_the_first_address_that_answers_is_taken() -> None:
    listeners = Listeners.at(["127.0.0.1", "::1", "203.0.113.7"])
    assert {address.host for address in listeners.addresses} == {"127.0.0.1", "::1"}, "not the one of another machine"
    nobody = Address("127.0.0.1", 1)
    v6 = next(address for address in listeners.addresses if address.host == "::1")
    made: list[socket.socket] = []
    thread = threading.Thread(
        target=lambda: made.append(handshake.connect([nobody, v6], SECRET, 1, time.monotonic() + 5))
    )
    thread.start()
    proven = listeners.accept(SECRET, {1}, time.monotonic() + 5)
    thread.join(5)
    assert made[0].family == socket.AF_INET6
    made[0].close(), proven[1].close()
    with pytest.raises(OSError, match="rank 0 cannot be reached"):
        handshake.connect([nobody], SECRET, 1, time.monotonic())


def test_the_addresses_are_those_of_the_launcher_or_of_mlx(tmp_path: Any) -> None:
    (tmp_path / "ring.json").write_text('[["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5002"]]')
    ring = {"MLX_HOSTFILE": str(tmp_path / "ring.json")}
    assert own_addresses(ring) == ["10.0.0.1", "10.0.1.1"]
    assert own_addresses(ring | {ADDRESSES_VARIABLE: "10.9.9.9,fd00::1"}) == ["10.9.9.9", "fd00::1"]
    assert own_addresses({"MLX_JACCL_COORDINATOR": "10.0.0.3:32323"}) == ["10.0.0.3"]
    assert "127.0.0.1" in own_addresses({})


# ── garbage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def reader(data: bytes) -> Callable[[int], bytearray]:
    view = memoryview(data)

    def read(count: int) -> bytearray:
        nonlocal view
        if count > len(view):
            raise EOFError(f"{count:,} bytes were asked for")
        piece, view = bytearray(view[:count]), view[count:]
        return piece

    return read


def frame(
    header: bytes, arrays: bytes = b"", magic: bytes = frames.MAGIC, lengths: tuple[int, int] | None = None
) -> bytes:
    return frames.PREFIX.pack(magic, *(lengths or (len(header), len(arrays)))) + header + arrays


@pytest.mark.parametrize(
    "data",
    [
        frame(b"{}", magic=b"HTTP"),
        frame(b"", lengths=(2**32 - 1, 0)),
        frame(b"", lengths=(2, 2**63)),
        frame(b"not json"),
        frame(b"\xff\xfe{}"),
        frame(b"[" * 100_000),
        frame(b"[]"),
        frame(b'{"kind": 1, "body": {}, "arrays": []}'),
        frame(b'{"kind": "x", "body": [], "arrays": []}'),
        frame(b'{"kind": "x", "body": {}, "arrays": [["a", "object", [1]]]}', bytes(16)),
        frame(b'{"kind": "x", "body": {}, "arrays": [["a", "float32", [-4]]]}', bytes(16)),
        frame(b'{"kind": "x", "body": {}, "arrays": [["a", "float32", [1, 2, 3, 4, 5, 6, 7, 8, 9]]]}', bytes(16)),
        frame(b'{"kind": "x", "body": {}, "arrays": [["a", "float32", [4000000000, 4000000000]]]}', bytes(16)),
        frame(b'{"kind": "x", "body": {}, "arrays": [["a", "float32", [true]]]}', bytes(16)),
        frame(b'{"kind": "x", "body": {}, "arrays": [["a", ["float32"], [1]]]}', bytes(16)),
        frame(b'{"kind": "x", "body": {}, "arrays": [7]}', bytes(16)),
        frame(b'{"kind": "x", "body": {}, "arrays": []}', bytes(16)),
    ],
)  # fmt: skip
def test_garbage_is_no_message(data: bytes) -> None:
    with pytest.raises(BadFrame):
        frames.decode(reader(data))


def test_an_announced_length_takes_no_memory_before_it_comes(ranks: Callable[[int], Ranks]) -> None:
    """A frame of 16 GB is announced, and one byte of it sent."""
    import resource

    two = ranks(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    header = b'{"kind": "x", "body": {}, "arrays": [["a", "uint8", [17000000000]]]}'
    two.workers[0]._connection.send_frame([frame(header, b"x", lengths=(len(header), 17_000_000_000))])
    time.sleep(0.3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    two.kill(1)
    assert isinstance(raised(two.leader.check), LostRank)


def test_a_rank_that_sends_garbage_is_lost(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    two.workers[0]._connection.send_frame([b"GET / HTTP/1.1\r\n\r\n"])
    lost = raised(two.leader.check)
    assert isinstance(lost, LostRank) and "sent what is no message: it does not begin as a message does" in lost.why


def test_what_no_array_holds_is_not_sent(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    with pytest.raises(TypeError, match="x is an array of object"):
        two.leader.send(1, "work", {}, {"x": np.array([{}], dtype=object)})
    with pytest.raises(TypeError):
        two.leader.send(1, "work", {"x": object()})
