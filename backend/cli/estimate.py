"""The verb `estimate`: the memory that a run needs, phase by phase, before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.cli.exit_codes import verb
from backend.cli.network_estimate import measured_cost, sentences
from backend.cli.output import tell, tell_json
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.memory.estimate import Estimate
from backend.spec.user_input.files import exists
from backend.spec.user_input.paths import possible_path

ROWS = 20_000
"""Rows that are read to find the longest prompt."""

LONGEST = 8
"""The longest texts that are tokenised: the very longest need not have the most tokens."""

TEMPLATE = 32
"""Tokens that a chat template may add to a prompt."""

MEANINGS = {
    "weights": "the model", "adapters": "what LoRA or DoRA adds", "optimizer": "what it remembers of each weight",
    "reference": "its own weights", "decoding weights": "adapters inside the weights",
    "KV cache": "keys and values of the completions", "activations": "what the backward pass needs",
    "logits": "a number for each word there is", "gradients": "one number for each that learns",
    "in flight": "what MLX has prepared ahead of the device",
}  # fmt: skip


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
    """Say what memory a run needs, phase by phase; loads no weights. With --hosts, what a step on several machines loses to the network."""
    from backend.spec.config import parse, read
    from backend.spec.hub_cache import local_folder
    from backend.spec.machine import machine_bytes
    from backend.spec.memory.model_shape import shape_of
    from backend.spec.memory.worst_stage import estimate_run, machines_note
    from backend.spec.model_and_data_names import model_source
    from backend.spec.runs.adapter_source import with_adapter

    settings = parse(with_adapter(read(config)))
    model_source(settings.model, "model")
    folder = local_folder(settings.model)
    shape = shape_of(folder) if folder is not None else None
    if folder is None or shape is None:
        why = "is not on this machine" if folder is None else "has no config.json that tells its sizes"
        raise Mistake("model", f"The model {settings.model} {why}, so its memory cannot be told.")
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
    """About how many tokens the longest prompt has, where data and tokenizer are files on this machine."""
    vocabulary = folder / "tokenizer.json"
    data = possible_path(config.data)
    if data is None or not exists(data) or not vocabulary.is_file():
        return None
    from tokenizers import Tokenizer

    from backend.models.tokenizer_limits import check_growth

    check_growth(folder, "model")
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
    from backend.spec.memory.estimate import format_bytes

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
