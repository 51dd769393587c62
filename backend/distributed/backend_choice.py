"""How the machines of a run communicate: which of MLX's backends, and why that one.

Measured by others and tracked as mlx#4475: with three ranks or more, 3 to 4 % of the ring's sums on the CPU never end. So the ring
serves two, and MPI or JACCL more. JACCL is RDMA over Thunderbolt 5 (macOS 26.2 or later), NCCL is for NVIDIA's GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.distributed.hosts_file import HostsFile
from backend.utils.errors import UserError

AUTO = "auto"
WANTED = (AUTO, "ring", "mpi", "jaccl", "nccl")
"""What a person may ask for; jaccl-ring only a hosts file names."""
LARGEST_SOUND_RING = 2
"""Ranks up to which the ring's sums always end."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    backend: str
    """One of `backend.distributed.hosts_file.BACKENDS`."""
    why: str
    """A sentence for the event log."""


def choose_backend(hosts: HostsFile, wanted: str = AUTO, *, has_mpi: bool, has_cuda: bool = False) -> BackendChoice:
    """The backend for these machines. `wanted`: the setting `distributed_backend`; `auto` takes what the file names, or what suits it.

    Raises UserError("distributed_backend", …) where the file, or this machine, lacks what the backend needs.
    """
    if wanted != AUTO:
        choice = BackendChoice(wanted, f"The machines communicate over {wanted}, as the settings say.")
    elif hosts.backend:
        choice = BackendChoice(hosts.backend, f"The machines communicate over {hosts.backend}, as the hosts file says.")
    else:
        choice = _suited(hosts, has_mpi, has_cuda)
    _require(hosts, choice.backend, has_mpi, has_cuda)
    return choice


def _suited(hosts: HostsFile, has_mpi: bool, has_cuda: bool) -> BackendChoice:
    count = len(hosts.hosts)
    if has_cuda:
        return BackendChoice("nccl", "The machines communicate over nccl, since MLX computes on CUDA here.")
    if not _without_device(hosts):
        return BackendChoice(
            "jaccl", "The machines communicate over jaccl, since the hosts file has RDMA devices for all."
        )
    if count <= LARGEST_SOUND_RING:
        return BackendChoice(
            "ring", "The machines communicate over a ring, which suits two ranks without RDMA devices."
        )
    if has_mpi:
        why = f"The machines communicate over mpi: with {count} ranks some of the ring's sums never end (mlx#4475)."
        return BackendChoice("mpi", why)
    raise UserError(
        "distributed_backend",
        f"{count} ranks need MPI, since with more than two some of the ring's sums never end (mlx#4475), and mpirun is not "
        "installed here. Install Open MPI, or choose ring.",
    )


def _require(hosts: HostsFile, backend: str, has_mpi: bool, has_cuda: bool) -> None:
    if len(hosts.hosts) == 1:
        return
    without_address = [rank for rank, host in enumerate(hosts.hosts) if not host.ips]
    if backend == "ring" and without_address:
        _refuse(
            f"The ring needs an address of every host, and host {without_address[0] + 1} of the hosts file has no ips."
        )
    if backend in ("jaccl", "jaccl-ring", "nccl") and 0 in without_address:
        _refuse(f"{backend} needs an address of the first host, at which the others reach it; it has no ips.")
    if backend.startswith("jaccl") and (missing := _without_device(hosts, ring=backend == "jaccl-ring")):
        from_rank, to_rank = missing[0]
        _refuse(
            f"{backend} needs an RDMA device between machines, and the hosts file names none from host {from_rank + 1} to "
            f"host {to_rank + 1}."
        )
    if backend == "mpi" and not has_mpi:
        _refuse("MPI was chosen, and mpirun is not installed here. Install Open MPI, or choose another backend.")
    if backend == "nccl" and not has_cuda:
        _refuse("NCCL was chosen, and MLX computes on no CUDA device here. Choose another backend.")


def _without_device(hosts: HostsFile, ring: bool = False) -> list[tuple[int, int]]:
    """Pairs of ranks with no RDMA device from the first to the second; of a ring, neighbours only."""
    count = len(hosts.hosts)
    pairs = [
        (rank, other)
        for rank in range(count)
        for other in (dict.fromkeys(((rank - 1) % count, (rank + 1) % count)) if ring else range(count))
        if rank != other
    ]
    devices = [host.rdma or (None,) * count for host in hosts.hosts]
    return [(rank, other) for rank, other in pairs if not devices[rank][other]]


def _refuse(sentence: str) -> None:
    raise UserError("distributed_backend", sentence)
