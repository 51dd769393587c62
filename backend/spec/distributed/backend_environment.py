"""The environment in which MLX's backends find the other ranks: what `mlx.launch` sets, for the process of one rank.

MPI has none: `mpirun` tells its processes who they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from backend.spec.distributed.hosts_file import HostsFile

FIRST_PORT, PORTS = 20_000, 10_000
"""The ports that a run chooses from: below those that systems hand out by themselves (from 32768 on Linux, 49152 on macOS)."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    variables: dict[str, str]
    files: dict[str, str]
    """Name of a variable → the content of the file that it names. The file is made on the rank's machine."""


def rank_environment_of(hosts: HostsFile, backend: str, rank: int, port: int) -> RankEnvironment:
    """`port`: the first of the ports that the ranks listen on; the ring takes one for each address, the others one on the first host."""
    variables = {name: value for name, _, value in (entry.partition("=") for entry in hosts.envs)}
    if backend != "mpi":
        variables["MLX_RANK"] = str(rank)
    first = hosts.hosts[0].ips[0] if hosts.hosts[0].ips else "127.0.0.1"
    if backend == "ring":
        return RankEnvironment(variables, {"MLX_HOSTFILE": json.dumps(_ring_addresses(hosts, port))})
    if backend in ("jaccl", "jaccl-ring"):
        devices = json.dumps([host.to_json()["rdma"] for host in hosts.hosts])
        ring = {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
        of_jaccl = {"MLX_JACCL_COORDINATOR": f"{first}:{port}"} | ring
        return RankEnvironment(variables | of_jaccl, {"MLX_IBV_DEVICES": devices})
    if backend == "nccl":
        before = sum(host.ssh == hosts.hosts[rank].ssh for host in hosts.hosts[:rank])
        of_nccl = {
            "NCCL_HOST_IP": first,
            "NCCL_PORT": str(port),
            "MLX_WORLD_SIZE": str(len(hosts.hosts)),
            "CUDA_VISIBLE_DEVICES": str(before),
        }
        return RankEnvironment(variables | of_nccl, {})
    return RankEnvironment(variables, {})


def _ring_addresses(hosts: HostsFile, port: int) -> list[list[str]]:
    """Of each rank, the addresses that it listens on; the ports are different also where ranks share a machine."""
    rows: list[list[str]] = []
    for host in hosts.hosts:
        rows.append([f"{address}:{port + index}" for index, address in enumerate(host.ips)])
        port += len(host.ips)
    return rows
