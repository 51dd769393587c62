"""Which machines a run's settings name, checked as far as this machine can tell; and whether they answer, right before a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from backend.run.distributed.check.machine_check import Wanted, require_machines
from backend.run.distributed.check.probe import has_cuda
from backend.spec.config import Config
from backend.spec.distributed.backend_choice import BackendChoice, choose_backend
from backend.spec.distributed.hosts_file import HostsFile, fault_of_first, read_hosts
from backend.spec.distributed.open_mpi import mpirun
from backend.spec.faults import Mistake


@dataclass(frozen=True, slots=True)
class PlannedMachines:
    """The machines of a hosts file in the order of their ranks, and how they communicate."""

    hosts: HostsFile
    choice: BackendChoice
    file: Path

    @property
    def notes(self) -> list[str]:
        """Sentences for the diary."""
        return [self.choice.why] if len(self.hosts.hosts) > 1 else []


def plan_machines(config: Config) -> PlannedMachines:
    """The machines of a run, without asking any of them. Raises Mistake for a hosts file that cannot be used, and for a backend that the
    file or this machine lacks something for."""
    file = Path(config.hosts)
    hosts = read_hosts(file)
    if fault := fault_of_first(hosts, file.name):
        raise Mistake([fault])
    choice = choose_backend(hosts, config.distributed_backend, has_mpi=mpirun() is not None, has_cuda=has_cuda())
    return PlannedMachines(_by_machine(hosts) if choice.backend == "mpi" else hosts, choice, file)


def check_machines_answer(planned: PlannedMachines, config: Config) -> list[str]:
    """Reach every machine, and look for the program, its version and the model there. → sentences for the diary. Raises Mistake with
    everything that would keep the run from starting."""
    wanted = Wanted(planned.choice.backend, config.model, config.reward_functions_file)
    report = require_machines(planned.hosts, planned.file.name, wanted)
    return [finding.sentence for finding in report.findings if finding.level == "warn"]


def require_one_machine(config: Config, what: str) -> None:
    """Raise Mistake where a hosts file is set for something that runs on one machine. `what` begins the sentence."""
    if config.hosts:
        raise Mistake("hosts", f"{what} trains on this machine alone; take the hosts file out of the settings.")


def _by_machine(hosts: HostsFile) -> HostsFile:
    """With the entries of each machine together, as mpirun numbers its ranks."""
    places = ["" if hosts.is_here(rank) else host.ssh for rank, host in enumerate(hosts.hosts)]
    order = sorted(range(len(places)), key=lambda rank: places.index(places[rank]))
    return replace(hosts, hosts=tuple(hosts.hosts[rank] for rank in order))
