"""Two network namespaces of Linux joined by a cable, as two hosts: for proofs of what a slow or a cut cable does. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))),
    reason="needs root, ip and tc",
)

DEVICE = "grpo0"
"""The end of the cable in each namespace."""


@dataclass(frozen=True, slots=True)
class NetworkCable:
    """The names of the namespaces that it joins, and their IPv4 addresses."""

    here: str
    there: str
    address_here: str
    address_there: str

    def cut(self) -> None:
        _system(f"ip -n {self.there} link set {DEVICE} down")

    def mend(self) -> None:
        _system(f"ip -n {self.there} link set {DEVICE} up")

    def slow(self, rate: str, namespace: str) -> None:
        """Limit what `namespace` sends to `rate`, in units of tc(8), such as 8mbit."""
        _system(f"tc -n {namespace} qdisc add dev {DEVICE} root tbf rate {rate} burst 32kbit latency 400ms")


@contextmanager
def network_cable(number: int) -> Iterator[NetworkCable]:
    """A cable that is gone at the end. Cables of different numbers, below 256, may exist at the same time."""
    here, there = (f"grpo-{number}-{end}-{os.getpid()}" for end in "ab")
    cable = NetworkCable(here, there, f"10.{number}.0.1", f"10.{number}.0.2")
    try:
        for name in (here, there):
            _system(f"ip netns add {name}")
            _system(f"ip -n {name} link set lo up")
        _system(f"ip -n {here} link add {DEVICE} type veth peer name {DEVICE} netns {there}")
        for name, address in ((here, cable.address_here), (there, cable.address_there)):
            _system(f"ip -n {name} addr add {address}/24 dev {DEVICE}")
            _system(f"ip -n {name} link set {DEVICE} up")
        yield cable
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _system(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)
