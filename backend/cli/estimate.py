"""The verb `estimate`: the memory that a run needs."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from backend.cli.common import Hosts, tell_error, tell_json, verb
from backend.cli.completions import Changes
from backend.cli.display import new_console, new_table
from backend.cli.training import hosts_setting, read_settings
from backend.config.config import Config, parse
from backend.config.model_and_data_names import model_source
from backend.distributed.hosts_file import read_hosts
from backend.rewards.catalogue import read_call
from backend.runs.saved_weights import with_adapter
from backend.trainer.memory.estimate import PARTS, estimate_run, format_bytes, machines_note
from backend.trainer.memory.model_shape import shape_of
from backend.types import content_text, image_paths
from backend.utils.errors import UserError
from backend.utils.files import exists, possible_path
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes

ROWS = 20_000  # to search for the longest prompt
LONGEST = 8  # texts to tokenise: the longest text may not have the most tokens
TEMPLATE = 32  # tokens that a chat template may add


@verb
def estimate(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    changes: Changes = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, in bytes.")] = False,
    prompt: Annotated[int | None, typer.Option("--prompt", help="Tokens of the longest prompt.", min=1)] = None,
    hosts: Hosts = None,
) -> None:
    """Estimate a run's memory, phase by phase; loads no weights."""
    settings = parse(with_adapter(read_settings(config, changes)[0] | hosts_setting(hosts)))
    if settings.hosts:
        read_hosts(settings.hosts)
    for entry in settings.reward_functions:
        read_call(entry)  # else a model that it should name would not count
    model_source(settings.model, "model")
    folder = local_folder(settings.model)
    shape = shape_of(folder)
    if folder is None or shape is None:
        why = "is not on this machine" if folder is None else "has no config.json that tells its sizes"
        raise UserError("model", f"The model {settings.model} {why}, so its memory cannot be told.")
    longest, images = longest_prompt(settings, folder)
    result = estimate_run(settings, shape.reading(images), machine_bytes(), prompt or longest)
    if as_json:
        tell_json(result.to_dict())
    else:
        phases = {"sampling": result.rollout.to_dict(), "learning": result.training.to_dict()}
        table = new_table("", *phases, "", right=slice(1, 3))
        names = dict.fromkeys(name for phase in phases.values() for name in phase if name != "total")
        for name in [*names, "total"]:
            sizes = [format_bytes(phase[name]) if name in phase else "–" for phase in phases.values()]
            table.add_row(name, *sizes, "" if name == "total" else PARTS[name][1], style="bold" * (name == "total"))
        console = new_console()
        console.print(table)
        sentences = [result.sentence, machines_note(settings), result.advice, result.speed_note]
        console.print(" ".join(filter(None, sentences)), highlight=False)


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
