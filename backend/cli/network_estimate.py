"""What the network will cost a step, for `estimate --hosts`: the machines are checked, their connection measured, and the rest computed."""

from __future__ import annotations

from pathlib import Path

from backend.spec.config import Config
from backend.spec.disk_space import gigabytes
from backend.spec.distributed.network_cost import NetworkCost, NetworkLink, network_cost, step_traffic
from backend.spec.faults import Fault, Mistake
from backend.spec.memory.model_shape import ModelShape


def measured_cost(config: Config, shape: ModelShape, file: Path) -> NetworkCost:
    """Of a step of these settings on the machines of a hosts file. Raises Mistake where they cannot train together."""
    from backend.run.distributed.check.machine_check import Wanted, check_machines
    from backend.spec.distributed.hosts_file import read_hosts

    hosts = read_hosts(file)
    ranks = len(hosts.hosts)
    if ranks < 2:
        raise Mistake("hosts", f"{file.name} lists one machine: nothing goes over a network.")
    report = check_machines(hosts, file.name, Wanted(config.distributed_backend))
    if report.refusals or report.link is None:
        told = [finding.sentence for finding in report.refusals] or ["The machines' connection could not be measured."]
        raise Mistake([Fault("hosts", sentence) for sentence in dict.fromkeys(told)])
    return network_cost(step_traffic(config, shape, ranks), NetworkLink.of(report.link, ranks))


def sentences(cost: NetworkCost) -> str:
    traffic = cost.traffic
    sums = f"each machine sends {gigabytes(traffic.sent_by_rank)} in sums of gradients"
    groups = f"{gigabytes(traffic.groups_in)} of completions go to this one and {gigabytes(traffic.groups_out)} from it to each"
    parts = f"sums {_seconds(cost.sums_s)}, completions {_seconds(cost.groups_s)}, small messages {_seconds(cost.gathers_s)}"
    return (
        f"On {traffic.ranks} machines, as their connection measured now: a step loses {_seconds(cost.total_s)} to the network ({parts}), where "
        f"completions reach their limit; {sums}, {groups}."
    )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s" if value >= 0.1 else f"{1000 * value:.2g} ms"
