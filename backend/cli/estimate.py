"""The verb `estimate`: the memory that a run needs, phase by phase, before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.cli.common import tell, tell_json, verb
from backend.config.config import Config
from backend.distributed.machine_report import LinkSpeed
from backend.trainer.memory.estimate import Estimate
from backend.trainer.memory.model_shape import ModelShape
from backend.trainer.memory.phases import MemoryModel
from backend.utils.disk_faults import gigabytes
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import exists, possible_path
from backend.utils.machine import has_gpu

# What the network costs a step on several machines: bytes, and seconds on a link of a known latency and rate.

GATHERS_PER_UPDATE = 2
"""Barriers: before the gradient is summed, and the losses after it."""
GATHERS_PER_STEP = 4
"""Checksum of the weights, old log-probabilities, metrics, and the end of the step."""
TOKEN_BYTES = 8
"""A token id and its log-probability, four bytes each."""
FILTERED_BYTES = 8
"""Two more numbers per token when sampling is filtered."""
TEXT_BYTES = 5
"""Bytes of a token's text in messages to the leader."""
ETHERNET_SHARE = 0.94
"""Payload share of full Ethernet frames over TCP: 1,448 of 1,538 bytes."""


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A rank's connection: one-way seconds of the smallest message, and payload bytes per second each way."""

    latency_s: float
    bytes_per_second: float

    @classmethod
    def of(cls, speed: LinkSpeed) -> NetworkLink:
        messages = 2 * (speed.ranks - 1)
        return cls(speed.latency_s / messages, speed.bytes_per_second * messages / speed.ranks)

    def sum_s(self, size: int, ranks: int) -> float:
        """Seconds to sum `size` bytes over the ranks."""
        return 2 * (ranks - 1) * (self.latency_s + size / ranks / self.bytes_per_second)

    def gather_s(self, ranks: int) -> float:
        return (ranks - 1) * self.latency_s


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes that a step sends over the network with the longest prompts and completions."""

    ranks: int
    updates: int
    gradient: int
    """One float32 vector with all trained parameters."""
    groups_in: int
    """Sampled groups with texts, from other ranks to the leader."""
    groups_out: int
    """All groups without texts, from the leader to each rank."""

    @property
    def sent_by_rank(self) -> int:
        """Bytes each rank sends in sums."""
        return round(self.updates * 2 * (self.ranks - 1) / self.ranks * self.gradient)


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """Seconds of network time per step, none of it overlapped with computation."""

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
    """`completion` is the mean completion length; the maximum by default."""
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


# ── network estimate ─────────────────────────────────────────────────────────────────────────────────────────────────

# What the network will cost a step, for `estimate --hosts`: the machines are checked, their connection measured, and
# the rest computed.


def measured_cost(config: Config, shape: ModelShape, file: Path) -> NetworkCost:
    """Measure the cost of a step on the machines of a hosts file. Raises UserError if they cannot train together."""
    from backend.distributed.hosts_file import read_hosts
    from backend.distributed.machine_check import Wanted, check_machines

    hosts = read_hosts(file)
    ranks = len(hosts.hosts)
    if ranks < 2:
        raise UserError("hosts", f"{file.name} lists one machine: nothing goes over a network.")
    report = check_machines(hosts, file.name, Wanted(config.distributed_backend))
    if report.refusals or report.link is None:
        told = [finding.sentence for finding in report.refusals] or ["The machines' connection could not be measured."]
        raise UserError([ConfigProblem("hosts", sentence) for sentence in dict.fromkeys(told)])
    return network_cost(step_traffic(config, shape, ranks), NetworkLink.of(report.link))


def sentences(cost: NetworkCost) -> str:
    traffic = cost.traffic
    sums = f"each machine sends {gigabytes(traffic.sent_by_rank)} in sums of gradients"
    groups_in, groups_out = gigabytes(traffic.groups_in), gigabytes(traffic.groups_out)
    groups = f"{groups_in} of completions go to this one and {groups_out} from it to each"
    sums_s, groups_s, gathers_s = map(_seconds, (cost.sums_s, cost.groups_s, cost.gathers_s))
    parts = f"sums {sums_s}, completions {groups_s}, small messages {gathers_s}"
    return (
        f"On {traffic.ranks} machines, as their connection measured now: a step loses {_seconds(cost.total_s)} to the "
        f"network ({parts}), where "
        f"completions reach their limit; {sums}, {groups}."
    )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s" if value >= 0.1 else f"{1000 * value:.2g} ms"


# ── estimate ─────────────────────────────────────────────────────────────────────────────────────────────────────────

ROWS = 20_000
"""Rows to search for the longest prompt."""

LONGEST = 8
"""Number of longest texts to tokenise: the longest text may not have the most tokens."""

TEMPLATE = 32
"""Tokens that a chat template may add."""

MEANINGS = {
    "weights": "the model",
    "adapters": "what LoRA or DoRA adds",
    "optimizer": "what it remembers of each weight",
    "reference": "its own weights",
    "decoding weights": "adapters inside the weights",
    "KV cache": "keys and values of the completions",
    "activations": "what the backward pass needs",
    "logits": "a number for each word there is",
    "gradients": "one number for each that learns",
    "in flight": "what MLX has prepared ahead of the device",
}


@verb
def estimate(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, in bytes.")] = False,
    prompt: Annotated[int | None, typer.Option("--prompt", help="Tokens of the longest prompt.", min=1)] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            "--hosts", metavar="FILE", help="Also measure what connects these machines, and what a step loses to it."
        ),
    ] = None,
) -> None:
    """Estimate a run's memory, phase by phase; loads no weights. With --hosts, estimate the network time of a step."""
    from backend.config.config import parse, read
    from backend.config.model_and_data_names import model_source
    from backend.runs.saved_weights import with_adapter
    from backend.trainer.memory.estimate import estimate_run, machines_note
    from backend.trainer.memory.model_shape import shape_of
    from backend.utils.hub_cache import local_folder
    from backend.utils.machine import machine_bytes

    settings = parse(with_adapter(read(config)))
    model_source(settings.model, "model")
    folder = local_folder(settings.model)
    shape = shape_of(folder) if folder is not None else None
    if folder is None or shape is None:
        why = "is not on this machine" if folder is None else "has no config.json that tells its sizes"
        raise UserError("model", f"The model {settings.model} {why}, so its memory cannot be told.")
    result = estimate_run(settings, shape, machine_bytes(), prompt or longest_prompt(settings, folder))
    network = measured_cost(settings, shape, hosts) if hosts is not None else None
    if as_json:
        told = {} if network is None else {"network": network.to_dict()}
        tell_json(result.to_dict() | told)
    else:
        _print_table(result, machines_note(settings))
        if network is not None:
            tell(sentences(network))


def longest_prompt(config: Config, folder: Path) -> int | None:
    """Approximate tokens of the longest prompt, if data and tokenizer are local."""
    vocabulary = folder / "tokenizer.json"
    data = possible_path(config.data)
    if data is None or not exists(data) or not vocabulary.is_file():
        return None
    from tokenizers import Tokenizer

    texts = sorted(_texts(config), key=len)[-LONGEST:]
    if not texts:
        return None
    encoded = Tokenizer.from_file(str(vocabulary)).encode_batch(texts)
    return TEMPLATE + max(len(encoding.ids) for encoding in encoded)


def _texts(config: Config) -> Iterator[str]:
    from backend.data.problems import PromptFormat, messages_of
    from backend.data.rows import read_splits

    prompt_format = PromptFormat.of(config)
    for row in islice(read_splits(config, head=True).train, ROWS):
        yield "\n".join(str(message["content"]) for message in messages_of(row, prompt_format, "a row"))


def _print_table(result: Estimate, note: str) -> None:
    from rich.table import Table

    from backend.cli.consoles import new_console
    from backend.trainer.memory.estimate import format_bytes

    phases: dict[str, dict[str, Any]] = {"sampling": result.rollout.to_dict(), "learning": result.training.to_dict()}
    table = Table("", *phases, "", box=None)
    for column in table.columns[1:3]:
        column.justify = "right"
    names = dict.fromkeys(name for phase in phases.values() for name in phase if name != "total")
    for name in [*names, "total"]:
        sizes = [format_bytes(phase[name]) if name in phase else "–" for phase in phases.values()]
        table.add_row(name, *sizes, MEANINGS.get(name, ""), style="bold" if name == "total" else None)
    console = new_console()
    console.print(table)
    console.print(" ".join(filter(None, [result.sentence, note, result.advice, result.row_tip])), highlight=False)
