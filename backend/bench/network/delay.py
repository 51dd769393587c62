"""A link with a latency and a rate between two network namespaces, for kernels without netem: a relay in a process of its own.

`python -m backend.bench.network.delay NAMESPACE=ADDRESS NAMESPACE=ADDRESS LATENCY_S BITS_PER_SECOND` makes a tunnel device in each of two
namespaces and carries packets from one to the other, each no sooner than the rate allows plus the latency. It prints `ready` and runs until
it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from backend.bench.network.links import DEVICE, NamedMachine, system

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""linux/if_tun.h."""
PR_SET_TIMERSLACK = 29
MTU = 9000
QUEUE_S = 0.4
"""Seconds of the rate that may wait in the link; more is dropped, as by a switch."""


@dataclass(slots=True)
class Direction:
    """Packets on their way into the tunnel `to`: (when they arrive, the packet). `free_at`: when the link has sent what it has."""

    to: int
    latency_s: float
    bytes_per_second: float
    packets: deque[tuple[float, bytes]] = field(default_factory=deque[tuple[float, bytes]])
    free_at: float = 0.0

    def take(self, packet: bytes, now: float) -> None:
        if self.free_at > now + QUEUE_S:
            return
        self.free_at = max(self.free_at, now) + len(packet) / self.bytes_per_second
        self.packets.append((self.free_at + self.latency_s, packet))

    def deliver(self, now: float) -> None:
        while self.packets and self.packets[0][0] <= now:
            with contextlib.suppress(BlockingIOError):
                os.write(self.to, self.packets.popleft()[1])


def relay(first: int, second: int, latency_s: float, bits_per_second: float) -> None:
    """Carry packets between two tunnels for ever."""
    # The kernel wakes a process up to 50 µs late by default, and on busy cores milliseconds, which would be added to every latency.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    ways = {
        first: Direction(second, latency_s, bits_per_second / 8),
        second: Direction(first, latency_s, bits_per_second / 8),
    }
    while True:
        waiting = [way.packets[0][0] for way in ways.values() if way.packets]
        pause = None if not waiting else max(min(waiting) - time.monotonic(), 0)
        readable, _, _ = select.select(list(ways), [], [], pause)
        now = time.monotonic()
        for tunnel in readable:
            with contextlib.suppress(BlockingIOError):
                while True:
                    ways[tunnel].take(os.read(tunnel, MTU + 64), now)
        for way in ways.values():
            way.deliver(time.monotonic())


def open_tunnel(machine: NamedMachine) -> int:
    """A tunnel device in the namespace, called DEVICE, with the address; → its end here."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"grpo{os.getpid() % 100_000}{machine.address[-1]}"
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    # The device moves into the namespace, and the handle stays its other end.
    system("ip", "link", "set", name, "netns", machine.namespace, "name", DEVICE)
    system("ip", "-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", DEVICE)
    system("ip", "-n", machine.namespace, "link", "set", DEVICE, "mtu", str(MTU), "up")
    return handle


@contextlib.contextmanager
def two_machines_apart(latency_s: float, bits_per_second: float) -> Iterator[list[NamedMachine]]:
    """Two namespaces with a link of this latency, one way, and rate between them. They are gone afterwards."""
    machines = [NamedMachine(f"grpo-{os.getpid()}-{at}", f"10.78.0.{at + 1}") for at in range(2)]
    process: subprocess.Popen[str] | None = None
    try:
        for machine in machines:
            system("ip", "netns", "add", machine.namespace)
            system("ip", "-n", machine.namespace, "link", "set", "lo", "up")
        ends = [f"{machine.namespace}={machine.address}" for machine in machines]
        command = [sys.executable, "-m", "backend.bench.network.delay", *ends, str(latency_s), str(bits_per_second)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        yield machines
    finally:
        if process is not None:
            process.kill()
            process.wait()
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True)


def main(words: Sequence[str]) -> None:
    first, second = (open_tunnel(NamedMachine(*end.split("="))) for end in words[:2])
    print("ready", flush=True)
    relay(first, second, float(words[2]), float(words[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
