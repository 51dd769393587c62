"""Machines that are none: network namespaces on a switch, each with a cable of a given rate. Linux, root, `ip` and `tc`.

The rate is tc's token bucket on both ends of a cable, so that it holds in both directions. The latency is that of the kernel, some 20 µs; a
longer one is made by `backend.bench.network.delay`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BURST_S = 0.002
"""Seconds of the rate that a bucket may send at once. What is not many times larger than a burst is measured too fast; with a tenth of it the
kernel's large segments kept a link of 1 Gb/s below 200 Mb/s."""
SMALLEST_BURST = 16_384
DEVICE = "link0"


@dataclass(frozen=True, slots=True)
class NamedMachine:
    """A network namespace and its address."""

    namespace: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """The command, run there."""
        return ["ip", "netns", "exec", self.namespace, *words]


def can_shape() -> bool:
    """Whether this system lets us make namespaces and shape links."""
    return sys.platform == "linux" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


@contextlib.contextmanager
def machines_on_a_switch(count: int, bits_per_second: float | None) -> Iterator[list[NamedMachine]]:
    """`count` namespaces on one switch; None leaves their cables as fast as they are. They are gone afterwards."""
    switch = f"grpo-switch-{os.getpid()}"
    machines = [NamedMachine(f"grpo-{os.getpid()}-{at}", f"10.78.0.{at + 1}") for at in range(count)]
    try:
        system("ip", "netns", "add", switch)
        system("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        system("ip", "-n", switch, "link", "set", "br0", "up")
        for at, machine in enumerate(machines):
            _connect(machine, switch, f"port{at}", bits_per_second)
        yield machines
    finally:
        for name in (switch, *(machine.namespace for machine in machines)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _connect(machine: NamedMachine, switch: str, port: str, bits_per_second: float | None) -> None:
    system("ip", "netns", "add", machine.namespace)
    system("ip", "-n", machine.namespace, "link", "set", "lo", "up")
    system("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", machine.namespace)
    system("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    system("ip", "-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", DEVICE)
    system("ip", "-n", machine.namespace, "link", "set", DEVICE, "up")
    if bits_per_second is not None:
        shape(machine.namespace, DEVICE, bits_per_second)
        shape(switch, port, bits_per_second)


def shape(namespace: str, device: str, bits_per_second: float) -> None:
    """Let the device send no faster than this."""
    burst = max(SMALLEST_BURST, int(bits_per_second / 8 * BURST_S))
    bucket = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", f"{burst}b", "latency", "400ms")
    system("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


def system(*words: str) -> None:
    """Run a command. Raises CalledProcessError."""
    subprocess.run(words, check=True, capture_output=True)
