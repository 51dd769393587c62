"""Where rank 0 can be reached by the other ranks: the addresses that its launcher, or mlx's environment, names, else all it has."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import psutil

ADDRESSES_VARIABLE = "GRPO_STUDIO_ADDRESSES"
"""Environment variable of rank 0 with its addresses in the hosts file, separated by commas."""


class Address(NamedTuple):
    """Where a process listens: an address in numbers, IPv4 or IPv6, and a port."""

    host: str
    port: int


def own_addresses(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Addresses of this machine at which the other ranks may reach it, the likeliest first.

    Those of the hosts file, from our launcher or from `mlx.launch`. Where neither has named any, as under MPI's own launcher, every
    address of an interface that is up; the local ones last.
    """
    for named in (
        environment.get(ADDRESSES_VARIABLE, "").split(","),
        _of_ring(environment),
        _of_coordinator(environment),
    ):
        if addresses := [address for address in named if address]:
            return addresses
    return interface_addresses()


def interface_addresses() -> list[str]:
    """Every address of an interface that is up; link-local IPv6 is left out, which needs the other machine's name of the interface."""
    up = {name for name, about in psutil.net_if_stats().items() if about.isup}
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    ]
    found = [address for address in dict.fromkeys(found) if not address.startswith("fe80:")]
    return sorted(found, key=lambda address: address == "::1" or address.startswith("127."))


def _of_ring(environment: Mapping[str, str]) -> list[str]:
    """The addresses of rank 0 in the file that MLX's ring reads: a list of ip:port for each rank."""
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
        with open(environment["MLX_HOSTFILE"], encoding="utf-8") as file:
            ranks = cast("list[list[Any]]", json.load(file))
        return [str(entry).rpartition(":")[0] for entry in ranks[0]]
    return []


def _of_coordinator(environment: Mapping[str, str]) -> list[str]:
    """Rank 0's address as JACCL and NCCL are told it."""
    named = environment.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0] or environment.get("NCCL_HOST_IP", "")
    return [named] if named else []
