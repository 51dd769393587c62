"""Verbs about settings files and model folders, `check`, `estimate`, `validate` and `import`: they load no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend.cli.common import USER_ERROR, AsJson, Hosts, print_problems, tell, tell_error, tell_file, tell_json, verb
from backend.cli.completions import Changes
from backend.config.config import Config, parse
from backend.runs.saved_weights import imported_folder, with_adapter
from backend.utils.disk import save_as
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import exists, is_folder, possible_path, user_path
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.data.rows import Rows
    from backend.tools.host import ToolSchemas

Prompts = Annotated[bool, typer.Option("--prompts", help="Say also how varied the prompts are, and how long.")]


@verb
def check(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    changes: Changes = None,
    as_json: AsJson = False,
    prompts: Prompts = False,
) -> None:
    """List problems and unusual values of settings, model, dataset, columns and rewards; loads no weights.

    For a file of TRL, mlx-lm-lora or mlx-grpo, show how each of its keys is converted.
    """
    from backend.cli.training import read_settings
    from backend.config.notes import unusual

    raw, faults, report = dict[str, Any](), list[ConfigProblem](), dict[str, Any]()
    try:
        raw = with_adapter(read_settings(config, changes, explain=True)[0])
        report = _checked(raw, with_lengths=prompts)
    except UserError as error:
        faults = error.faults
    if as_json:
        listed = [fault.to_dict() for fault in faults]
        tell_json({"faults": listed, "prompts": report} if prompts else listed)
    else:
        print_problems(UserError(faults))
    if faults:
        raise typer.Exit(USER_ERROR)
    if as_json:
        return
    tell("Nothing is wrong with these settings.")
    for remark in unusual(parse(raw)):
        tell(f"{remark.setting}: {remark.sentence}")
    if prompts:
        rows, total = report["rows"], report["total"]
        tell(f"Prompts: {rows:,} rows" + ("" if rows == total else f", drawn from {total:,}"))
        for name, value, _ in [("Repeated", f"{report['repeated']:,}", ""), *report["figures"], report["tokens"]]:
            tell(f"  {name:<14} {value}")
        tell(report["verdict"])
    elif report["level"] == "poor":
        tell(f"data: {report['verdict']}")


def _checked(raw: Mapping[str, Any], *, with_lengths: bool) -> dict[str, Any]:
    """The report on the training prompts; `with_lengths` adds `tokens` as (name, value, help). Raises UserError."""
    from backend.data.preview import SAMPLE
    from backend.data.prompt_variety import prompt_variety
    from backend.data.rows import compares_answers
    from backend.runs.start_progress import progress_listener
    from backend.trainer import preflight

    with progress_listener(tell_error):
        config = parse(raw)
        inputs = preflight.preflight(config)
    try:
        splits = inputs.splits
        rows, source = splits.train, splits.source["train"]
        report = prompt_variety(rows, config, source).to_dict()
        if not report["answers"] and compares_answers(config):
            empty = f"No row has an answer in the column {quote(config.answer_feature, 24)}"
            report |= {"level": "poor", "verdict": f"{empty}, with which a reward function compares completions."}
        if with_lengths:
            meaning = f"Lengths of up to {SAMPLE:,} prompts: percentiles, and the longest."
            report["tokens"] = ("Tokens", _lengths(rows, config, inputs.schemas, source), meaning)
        return report
    finally:  # not before: a map function of streamed rows is called there
        inputs.scorer.close()


def _lengths(rows: Rows, config: Config, tools: ToolSchemas, source: str) -> str:
    from backend.data.preview import SAMPLE, PromptLengths, preview_order, tokenizer_for
    from backend.data.problems import PromptFormat

    try:
        tokenizer = tokenizer_for(config)
    except UserError as error:
        return error.faults[0].sentence
    lengths = PromptLengths(rows, PromptFormat.of(config, tools), source)
    lengths.measure(list(islice(preview_order(len(rows)), SAMPLE)), tokenizer)
    tokens = sorted(lengths.by_length.elements())
    if not tokens:
        return "–"
    shares = ", ".join(
        f"{percent}% up to {tokens[max(0, math.ceil(len(tokens) * percent / 100) - 1)]:,}" for percent in (5, 50, 95)
    )
    return f"{shares}, longest {tokens[-1]:,} (of {lengths.measured:,} rows)"


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
    from backend.cli.display import new_console, new_table
    from backend.cli.training import hosts_setting, read_settings
    from backend.config.model_and_data_names import model_source
    from backend.distributed.hosts_file import read_hosts
    from backend.rewards.catalogue import read_call
    from backend.trainer.memory.estimate import PARTS, estimate_run, format_bytes, machines_note
    from backend.trainer.memory.model_shape import shape_of
    from backend.utils.hub_cache import local_folder
    from backend.utils.machine import machine_bytes

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
    from backend.types import content_text, image_paths
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


@verb
def validate(
    folder: Annotated[Path, typer.Argument(help="A folder with a model, of any origin.")], as_json: AsJson = False
) -> None:
    """Find what would keep LM Studio or mlx-lm from opening a model folder; loads no weights."""
    from backend.export import lm_studio_rules

    folder = user_path(str(folder), "folder")
    faults, warnings = lm_studio_rules.faults(folder), lm_studio_rules.warnings(folder)
    if as_json:
        found = {"faults": faults, "warnings": warnings}
        tell_json({key: [fault.to_dict() for fault in rows] for key, rows in found.items()})
    else:
        for fault in [*faults, *warnings]:
            tell(fault)
    if faults:
        raise typer.Exit(USER_ERROR)
    if not as_json:
        tell(f"{folder} is a model that LM Studio and mlx-lm open.")


@verb
def import_settings(
    file: Annotated[
        Path, typer.Argument(metavar="FILE|FOLDER", help="Settings in YAML or JSON; or the folder of a PEFT adapter.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Instead of printing, or of FOLDER-mlx for an adapter."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    our_defaults: Annotated[bool, typer.Option("--our-defaults", help="Leave the rest to our defaults.")] = False,
    model: Annotated[str, typer.Option("--model", metavar="M", help="Adapters: put it on this model.")] = "",
    fetch: Annotated[bool, typer.Option("--fetch", help="Adapters: download the original of a model.")] = False,
) -> None:
    """Convert a TRL, mlx-lm-lora or mlx-grpo file to our format, with that program's defaults; or a PEFT LoRA or DoRA
    adapter to mlx-lm, for chat, evaluation, export and training.
    """
    source = user_path(str(file), "file")
    target = None if output is None else user_path(str(output), "output")
    if is_folder(source):
        if our_defaults:
            sentence = f"{quote(source)} is a folder with an adapter, which has no settings to leave out."
            raise UserError("our_defaults", sentence)
        from backend.export.originals import fetch_original
        from backend.export.peft_files import import_adapter

        def report(sentence: str, done: float | None = None) -> None:
            tell_error(sentence)

        adapter = import_adapter(
            source.resolve(),
            model,
            target or imported_folder(source),
            overwrite=overwrite,
            fetch=(lambda name: fetch_original(name, report)) if fetch else None,
            progress=report,
        )
        for sentence in adapter.sentences:
            tell_error(sentence)
        tell(adapter.path)
        return
    if model or fetch:
        sentence = f"--model and --fetch are for the folder of an adapter, and {quote(source, 60)} is a file."
        raise UserError("model", sentence)
    if target is not None and target.exists() and not overwrite:
        raise UserError("output", f"{quote(target)} is there already; take another name, or --overwrite.")
    from backend.config.other_programs.files import import_file

    text, program, missing = import_file(source, their_defaults=not our_defaults)
    if target is None:
        tell_file(text)
    else:
        save_as(target, text)
        tell(f"{quote(source)} is a file for {program.name}; written to {quote(target)}.")
    if missing:
        tell_error("Give or check these before training:")
        print_problems(UserError(missing))
