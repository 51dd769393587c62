"""Every problem that a user can fix before a run: settings, then model, dataset and reward files. Loads no weights."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from backend.config.config import Config
from backend.config.model_and_data_names import check_reference, check_weights, model_source
from backend.config.updates import require_no_program
from backend.data.problems import PromptFormat, fitting_problem, with_opening
from backend.distributed.hosts_file import read_hosts
from backend.distributed.machine_check import plan_machines
from backend.engine import device
from backend.engine.shared_weights import copy_sharing_arrays
from backend.export.export_run import exports_at_end
from backend.export.writer import kept_files
from backend.models.architectures import architecture_refusal, quantization_problems
from backend.models.hub import config_file
from backend.models.loading import check_opens
from backend.models.model_folder import check_adapter, check_config, read_object
from backend.models.policy import check_learns, check_same_tokens, check_start, quantized_as
from backend.models.sharded_policy import check_divides, sharding_refusal
from backend.models.tokenizers import load_tokenizer, run_tokenizer, tokenizer_folder
from backend.rewards.calls import wait_on
from backend.rewards.scorer import Scorer, SharedProcesses, begin_scorer
from backend.runs.guards import RESERVE, run_bytes
from backend.runs.steering import stage_configs
from backend.sampling.conversations import turn_format
from backend.sampling.grammar import check_grammar
from backend.trainer.memory.estimate import estimate_run
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.run_inputs import RunInputs, check_held_out, prompt_sets, read_rows
from backend.trainer.scoring import scoring_stages
from backend.trainer.trackers.targets import chosen, missing_fault
from backend.utils.disk import require_room
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes
from backend.utils.places import runs_folder
from backend.utils.text import quote
from backend.vision.tokenizer import with_vision

T = TypeVar("T")

WEIGHTS = "model*.safetensors"

OTHER_MODELS: dict[str, Callable[[Config], bool]] = {  # setting that names another model → true if a run needs it
    "reference_model_path": lambda config: config.needs_reference,
    "teacher_model": lambda config: config.train_mode == "distill",
    "draft_model_path": lambda config: config.use_speculative_decoding,
}


def preflight(
    config: Config,
    processes: SharedProcesses | None = None,
    runs_dir: Path | None = None,
    begin: Callable[[Config], Scorer] | None = None,
    *,
    of_program: bool = False,
) -> RunInputs:
    """Check model, reference, dataset, columns, prompts and rewards, each by itself. → the rows and
    reward functions that were read. Raises UserError with all problems. A reward file is executed.

    `processes` are shared with other runs. `runs_dir`: where the run will be; its disk must have room. `begin` makes
    the scorer, where functions are objects of a program; `of_program`: optimizer and schedule may be."""
    if not of_program:
        require_no_program(config)
    scorer = begin(config) if begin else begin_scorer(config, processes)
    try:
        problems: list[ConfigProblem] = []
        if config.hosts:
            _caught(problems, lambda: plan_machines(config))
        if config.hosts and config.environment and scorer.has_models:
            what = "Models score on the first machine, which has no environments of the others; train on one machine."
            problems.append(ConfigProblem("environment", what))
        tokenizer = _check_models(config, runs_dir or runs_folder(), problems)
        _caught(problems, lambda: check_grammar(config, tokenizer))
        inputs = _caught(problems, lambda: _read_data(config, tokenizer, scorer))
        steps = config.iters
        if inputs is not None and config.epochs:  # at most: rows that are too long are left out
            steps = -(-config.epochs * len(inputs.splits.train) // config.prompts_per_step)
        # Last: the process of the reward functions has been starting meanwhile.
        _caught(problems, lambda: scoring_stages(config, scorer.load(), steps))
        problems += filter(None, map(missing_fault, chosen(config.report_to)))
        if problems:
            raise UserError(list(dict.fromkeys(problems)))
    except BaseException:
        scorer.close()
        raise
    assert inputs is not None
    return inputs


def _caught(problems: list[ConfigProblem], check_part: Callable[[], T]) -> T | None:
    try:
        return check_part()
    except UserError as error:
        problems += error.faults
        return None


def _check_models(config: Config, runs_dir: Path, problems: list[ConfigProblem]) -> Any:
    _caught(problems, lambda: device.check(config.device))
    folder = _caught(problems, lambda: check_model(config.model, "model"))
    shape = None
    if folder is not None:
        problems += quantization_problems(config, read_object(folder / "config.json", "model"))
        shape = shape_of(folder)
        if shape is not None and not shape.is_transformer:
            shape = None
        if shape is not None and (too_large := estimate_run(config, shape, machine_bytes(), prompt=1).fault):
            problems.append(too_large)
    # Before the model is opened, which attaches the adapters of a reference: a broken file is one problem.
    others = {setting: _caught(problems, partial(_check_other, config, setting)) for setting in OTHER_MODELS}
    if folder is None:
        return None
    tokenizer = _check_learns(folder, config, problems)
    if tokenizer is None and config.tokenizer:  # as far as it shows without the model's files
        _caught(problems, lambda: tokenizer_folder(config.tokenizer))
    if shape is not None:
        _caught(problems, lambda: require_room(runs_dir, run_bytes(config, shape) + RESERVE, "The run"))
    if config.train_type == "full" or exports_at_end(config):  # a whole model is written, with files of the base
        _caught(problems, lambda: kept_files(tokenizer_folder(config.tokenizer) if config.tokenizer else folder))
    for setting, other in others.items():
        if tokenizer is not None and other is not None:
            _caught(problems, partial(check_same_tokens, other, tokenizer, config, setting))
    return tokenizer


def _check_learns(folder: Path, config: Config, problems: list[ConfigProblem]) -> Any:
    opened = _caught(problems, lambda: _opened(folder, config.model, "model"))
    if opened is None:
        return None if any(folder.glob(WEIGHTS)) else _tokenizer_here(folder, config)
    model, own, model_config = opened
    tokenizer = _caught(problems, lambda: run_tokenizer(config.tokenizer, own, model))
    if tokenizer is not None:
        tokenizer = with_vision(tokenizer, folder, config.image_max_pixels)
    if not problems and config.is_divided:
        size = len(read_hosts(config.hosts).hosts)
        if refusal := sharding_refusal(model_config):
            problems.append(ConfigProblem("parallelism", refusal))
        elif size > 1:
            copy = copy_sharing_arrays(model)  # the check divides it
            _caught(problems, lambda: check_divides(quantized_as(copy, model_config, config)[0], config, size))
    if not problems:
        _caught(problems, lambda: check_learns(model, model_config, config))
    if not problems and config.adapter:  # the model has the run's own adapters now
        adapters: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
        _caught(problems, lambda: check_start(adapters, config, config.adapter))
    return tokenizer


def _tokenizer_here(folder: Path, config: Config) -> Any:
    """The tokenizer of a model whose weights are still on the Hub, to find prompts that do not fit; None if it is not
    here either, or reads images, whose processor may be missing. Downloads nothing."""
    files = local_folder(config.tokenizer or config.model)
    if files is None or not (files / "tokenizer_config.json").is_file():
        return None
    ends = None if config.tokenizer else read_object(folder / "config.json", "model").get("eos_token_id")
    with suppress(UserError):  # its other files may be on the Hub
        tokenizer = load_tokenizer(files, eos_token_ids=ends)
        return tokenizer if with_vision(tokenizer, folder, config.image_max_pixels) is tokenizer else None
    return None


def _check_other(config: Config, setting: str) -> Any:
    name = getattr(config, setting)
    if not name or not OTHER_MODELS[setting](config):
        return None
    if setting == "reference_model_path":
        check_reference(name)
        folder = user_path(name, setting)
        if (folder / "adapter_config.json").is_file():
            check_adapter(folder, setting)
            return None
    opened = _opened(check_model(name, setting), name, setting)
    if opened is not None and setting == "teacher_model":
        quantized_as(opened[0], opened[2], config, "teacher_quantization")
    return opened and opened[1]


def _opened(folder: Path, name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]] | None:
    return check_opens(folder, name, setting) if any(folder.glob(WEIGHTS)) else None


def check_model(name: str, setting: str) -> Path:
    """The folder with the model's config.json, from the Hub for an id. Raises UserError."""
    source = Path(model_source(name, setting))
    file = source / "config.json" if source.is_dir() else config_file(name, setting)
    if refusal := architecture_refusal(check_config(file, name, setting)):
        raise UserError(setting, f"The model {quote(Path(name), 50)} cannot be used. {quote(refusal, 120)}")
    check_weights(str(source), setting)
    return file.parent


def _read_data(config: Config, tokenizer: Any, scorer: Scorer) -> RunInputs:
    inputs = read_rows(config, scorer)
    for each in prompt_sets(config, inputs, stage_configs(config)):
        each.check(tokenizer)
    check_held_out(inputs.splits, config)
    if inputs.tools and tokenizer is not None:
        turn_format(config, inputs.schemas, tokenizer)
    if inputs.tools is not None and config.environment:  # one reset finds what no signature says
        rows, source = inputs.splits.train[:1], inputs.splits.source_of("train")
        prompt_format = PromptFormat.of(config, inputs.schemas)
        for row, (_, text) in zip(rows, inputs.tools.begin(rows, wait_on), strict=True):
            if tokenizer is None or text is None:
                continue
            if (problem := fitting_problem(0, row, tokenizer, prompt_format, source)) is not None:
                with_opening(problem, text, tokenizer, prompt_format)
    return inputs
