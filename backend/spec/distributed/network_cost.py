"""What the network costs a step on several machines: bytes, and seconds on a link of a known latency and rate.

The model is the usual one of latency and rate (α + n β; Hockney 1994). A sum over N ranks is made in a ring, 2 (N − 1) messages after each
other, each of 1/N of the bytes (Patarasuk and Yuan 2009), which mlx's ring does and which comes within 6 % of what Open MPI sends:

    sum     = 2 (N − 1) (latency + bytes / N / rate)
    gather  =   (N − 1) (latency + bytes / rate)          the trainer's are below a packet, so latency is all
    step    = updates · (sum of the gradient + GATHERS_PER_UPDATE gathers) + GATHERS_PER_STEP gathers + what the channel carries

Nothing here measures or contacts a machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from backend.spec.config import Config
from backend.spec.distributed.machine_report import LinkSpeed
from backend.spec.machine import has_gpu
from backend.spec.memory.model_shape import ModelShape
from backend.spec.memory.phases import MemoryModel

GATHERS_PER_UPDATE = 2
"""That all have their gradient, before it is summed; and the losses and tallies, after it."""
GATHERS_PER_STEP = 4
"""That the weights are the same bits, the old log-probabilities of batch-wide thresholds, the step's numbers, its end."""
TOKEN_BYTES = 8
"""Of a completion's token on its way to another rank: its id and its log-probability, four bytes each."""
FILTERED_BYTES = 8
"""More where sampling was cut to likely tokens: the two numbers that correct for it."""
TEXT_BYTES = 5
"""Of a token's text, in the messages that bring a group to the leader."""
ETHERNET_SHARE = 0.94
"""Payload of full Ethernet frames over TCP: 1,448 of 1,538 bytes."""


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A connection as one rank has it: seconds of the smallest message one way, software included, and payload bytes a second each way."""

    latency_s: float
    bytes_per_second: float

    @classmethod
    def of(cls, speed: LinkSpeed, ranks: int) -> NetworkLink:
        """From what sums over `ranks` ranks were measured to take."""
        messages = 2 * (ranks - 1)
        return cls(speed.latency_s / messages, speed.bytes_per_second * messages / ranks)

    def sum_s(self, size: int, ranks: int) -> float:
        """Seconds of the sum of `size` bytes over the ranks."""
        return 2 * (ranks - 1) * (self.latency_s + size / ranks / self.bytes_per_second)

    def gather_s(self, ranks: int) -> float:
        return (ranks - 1) * self.latency_s


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """What a step sends over the network, in bytes, at the greatest length of prompts and completions."""

    ranks: int
    updates: int
    gradient: int
    """One vector, float32: as large as what is trained."""
    groups_in: int
    """From the other ranks to the leader: the groups that they have sampled, with texts."""
    groups_out: int
    """From the leader to each of the other ranks: all groups of the step, without texts."""

    @property
    def sent_by_rank(self) -> int:
        """By each rank in sums."""
        return round(self.updates * 2 * (self.ranks - 1) / self.ranks * self.gradient)


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """Seconds of a step that the network takes, nothing of which is overlapped with computing."""

    traffic: StepTraffic
    sums_s: float
    gathers_s: float
    groups_s: float

    @property
    def total_s(self) -> float:
        return self.sums_s + self.gathers_s + self.groups_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s}


def step_traffic(config: Config, shape: ModelShape, ranks: int, completion: int | None = None) -> StepTraffic:
    """Of a run with these settings; `completion` is the mean length of completions, the greatest one if left out."""
    memory = MemoryModel(config, shape, 1, gpu=has_gpu() and config.device != "cpu")
    tokens = memory.completions * (completion or config.max_completion_length)
    cut = FILTERED_BYTES if config.top_k > 0 or config.top_p < 1 or config.min_p > 0 else 0
    return StepTraffic(
        ranks=ranks,
        updates=config.updates_per_step,
        gradient=memory.trainable(),
        groups_in=round(tokens * (TOKEN_BYTES + cut + TEXT_BYTES) * (ranks - 1) / ranks),
        groups_out=tokens * (TOKEN_BYTES + cut),
    )


def network_cost(traffic: StepTraffic, link: NetworkLink) -> NetworkCost:
    ranks = traffic.ranks
    gathers = traffic.updates * GATHERS_PER_UPDATE + GATHERS_PER_STEP
    carried = traffic.groups_in + (ranks - 1) * traffic.groups_out
    return NetworkCost(
        traffic,
        sums_s=traffic.updates * link.sum_s(traffic.gradient, ranks),
        gathers_s=gathers * link.gather_s(ranks),
        groups_s=carried / link.bytes_per_second + 2 * link.latency_s,
    )
