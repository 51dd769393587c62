"""The verb `estimate`: the memory that a run needs, and the network time of a step on several machines."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.cli.common import tell, tell_error, tell_json, verb
from backend.cli.completions import Changes
from backend.cli.display import new_console, new_table
from backend.cli.training import read_settings
from backend.config.config import Config, parse
from backend.config.model_and_data_names import model_source
from backend.distributed.machine_report import LinkSpeed
from backend.runs.saved_weights import with_adapter
from backend.trainer.memory.estimate import estimate_run, format_bytes, machines_note
from backend.trainer.memory.model_shape import ModelShape, shape_of
from backend.trainer.memory.phases import MemoryModel
from backend.types import content_text, image_paths
from backend.utils.disk import gigabytes
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import exists, possible_path
from backend.utils.hub_cache import local_folder
from backend.utils.machine import has_gpu, machine_bytes

ROWS = 20_000  # to search for the longest prompt
LONGEST = 8  # texts to tokenise: the longest text may not have the most tokens
TEMPLATE = 32  # tokens that a chat template may add

MEANINGS = {
    "weights": "the model",
    "adapters": "what LoRA or DoRA adds",
    "optimizer": "what it remembers of each weight",
    "reference": "its own weights",
    "draft model": "what drafts for the model",
    "teacher": "its weights",
    "vision": "the part that reads images, and what it read",
    "reward models": "their weights",
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
    changes: Changes = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, in bytes.")] = False,
    prompt: Annotated[int | None, typer.Option("--prompt", help="Tokens of the longest prompt.", min=1)] = None,
    hosts: Annotated[Path | None, typer.Option(metavar="FILE", help="Also the network time on these machines.")] = None,
) -> None:
    """Estimate a run's memory, phase by phase; loads no weights. With --hosts, estimate the network time of a step."""
    settings = parse(with_adapter(read_settings(config, changes)[0]))
    model_source(settings.model, "model")
    folder = local_folder(settings.model)
    shape = shape_of(folder) if folder is not None else None
    if folder is None or shape is None:
        why = "is not on this machine" if folder is None else "has no config.json that tells its sizes"
        raise UserError("model", f"The model {settings.model} {why}, so its memory cannot be told.")
    longest, images = longest_prompt(settings, folder)
    result = estimate_run(settings, shape.reading(images), machine_bytes(), prompt or longest)
    network = network_cost(settings, shape, measured_link(settings, hosts)) if hosts is not None else None
    if as_json:
        tell_json(result.to_dict() | ({} if network is None else {"network": network}))
    else:
        phases = {"sampling": result.rollout.to_dict(), "learning": result.training.to_dict()}
        table = new_table("", *phases, "", right=slice(1, 3))
        names = dict.fromkeys(name for phase in phases.values() for name in phase if name != "total")
        for name in [*names, "total"]:
            sizes = [format_bytes(phase[name]) if name in phase else "–" for phase in phases.values()]
            table.add_row(name, *sizes, MEANINGS.get(name, ""), style="bold" if name == "total" else None)
        console = new_console()
        console.print(table)
        sentences = [result.sentence, machines_note(settings), result.advice, result.speed_note]
        console.print(" ".join(filter(None, sentences)), highlight=False)
        if network is not None:
            tell(_network_sentence(network))


def longest_prompt(config: Config, folder: Path) -> tuple[int | None, int]:
    """(approximate tokens of the longest prompt, or labelled row, if data and tokenizer are local; most of images)."""
    vocabulary = folder / "tokenizer.json"
    data = possible_path(config.data)
    if data is None or not exists(data) or not vocabulary.is_file():
        return None, 0
    from tokenizers import Tokenizer

    from backend.data.images import with_paths
    from backend.data.labels import whole_chat
    from backend.data.problems import PromptFormat, messages_of
    from backend.data.rows import read_splits
    from backend.models.tokenizers import load_tokenizer
    from backend.tools.load import shown_tools
    from backend.vision.tokenizer import VisionTokenizer

    schemas, why_not = shown_tools(config)
    if why_not:
        tell_error(why_not)
    prompt_format = PromptFormat.of(config, schemas, labelled=config.learns_labels)
    chat_of = whole_chat if config.learns_labels else messages_of
    splits, texts, images = read_splits(config, head=True), list[str](), list[str]()
    for row in islice(splits.train, ROWS):
        chat = chat_of(with_paths(row, splits.source["train"], "a row"), prompt_format, "a row")
        texts.append("\n".join(content_text(message["content"]) for message in chat))
        texts[-1] += str(prompt_format.variables_of(row).get("tools", ""))
        images = max(images, image_paths(chat), key=len)
    if not texts:
        return None, 0
    reader = VisionTokenizer(load_tokenizer(folder), folder, config.image_max_pixels) if images else None
    of_images = sum(map(reader.tokens_of, images)) if reader else 0
    encoded = Tokenizer.from_file(str(vocabulary)).encode_batch(sorted(texts, key=len)[-LONGEST:])
    return TEMPLATE + of_images + max(len(encoding.ids) for encoding in encoded), of_images


def measured_link(config: Config, file: Path) -> LinkSpeed:
    """Measure the connection of the machines of a hosts file. Raises UserError if they cannot train together."""
    from backend.distributed.hosts_file import read_hosts
    from backend.distributed.machine_check import Wanted, check_machines

    hosts = read_hosts(file)
    if len(hosts.hosts) < 2:
        raise UserError("hosts", f"{file.name} lists one machine: nothing goes over a network.")
    report = check_machines(hosts, file.name, Wanted(config.distributed_backend))
    if report.refusals or report.link is None:
        why = [finding.sentence for finding in report.refusals] or ["The machines' connection could not be measured."]
        raise UserError([ConfigProblem("hosts", sentence) for sentence in dict.fromkeys(why)])
    return report.link


def network_cost(config: Config, shape: ModelShape, link: LinkSpeed) -> dict[str, Any]:
    """Seconds of network time and bytes per step with the longest completions, none of it overlapped with computation.
    A sum over R ranks is a ring of 2 (R − 1) messages, of which `link` has the time of all."""
    ranks, updates = link.ranks, config.updates_per_step
    messages = 2 * (ranks - 1)
    latency_s, bytes_per_second = link.latency_s / messages, link.bytes_per_second * messages / ranks
    memory = MemoryModel(config, shape, 1, gpu=has_gpu() and config.device != "cpu")
    gradient, tokens = memory.trainable(), memory.completions * config.max_completion_length
    # Bytes of a token: its id and log-probability, two more numbers where sampling is filtered, and 5 of its text.
    token_bytes = 16 if config.top_k > 0 or config.top_p < 1 or config.min_p > 0 else 8
    groups_in, groups_out = round(tokens * (token_bytes + 5) * (ranks - 1) / ranks), tokens * token_bytes
    traffic = {"ranks": ranks, "updates": updates, "gradient": gradient}
    traffic |= {"groups_in": groups_in, "groups_out": groups_out}
    cost = {
        "sums_s": updates * messages * (latency_s + gradient / ranks / bytes_per_second),
        # Barriers around a sum; checksum, old log-probabilities, metrics and the end of the step.
        "gathers_s": (updates * 2 + 4) * (ranks - 1) * latency_s,
        "groups_s": (groups_in + (ranks - 1) * groups_out) / bytes_per_second + 2 * latency_s,
    }
    return {"traffic": traffic, **cost, "total_s": sum(cost.values())}


def _network_sentence(cost: dict[str, Any]) -> str:
    def seconds(name: str) -> str:
        value = cost[name]
        return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s" if value >= 0.1 else f"{1000 * value:.2g} ms"

    traffic = cost["traffic"]
    ranks = traffic["ranks"]
    sums = gigabytes(2 * (ranks - 1) / ranks * traffic["updates"] * traffic["gradient"])
    parts = f"sums {seconds('sums_s')}, completions {seconds('groups_s')}, small messages {seconds('gathers_s')}"
    return (
        f"On {ranks} machines, as their connection measured now: a step loses {seconds('total_s')} to the network "
        f"({parts}), where completions reach their limit; each machine sends {sums} "
        f"in sums of gradients, {gigabytes(traffic['groups_in'])} of completions go to this one and "
        f"{gigabytes(traffic['groups_out'])} from it to each."
    )
