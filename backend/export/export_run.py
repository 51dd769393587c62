"""Export a run, its end or a checkpoint, and compare the result with the trained model."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import check_columns
from backend.export.build import GGUF_FILE, ExportedModel, HeldOutDifference, build, check_kind
from backend.export.destinations import Destination, destination_of
from backend.export.exports import DEFAULT_FORMAT, Progress, format_named, silent, target_for
from backend.export.modelfile import write_modelfile
from backend.export.original_files import fetch_original
from backend.export.trained_weights import AdapterFiles, TrainedWeights
from backend.export.verify import SAMPLES, AnsweredPrompt
from backend.models.policy import Policy, load_policy
from backend.models.tokenizers import tokenizer_folder
from backend.runs.completion_rows import parse_group_row
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import find_checkpoint, has_end, saved_weights
from backend.runs.steering import run_config
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluate import scored_groups
from backend.trainer.run_inputs import RunInputs, read_inputs
from backend.trainer.scoring import ScoringStages
from backend.trainer.trial_sampling import SMALLEST_MODEL, WITHOUT_REFERENCE
from backend.utils.errors import UserError
from backend.utils.files import require_plain_files
from backend.utils.hub_cache import local_folder

BATCH = 16
"""Held-out prompts per batch."""
READ_BYTES = 1 << 20
"""Bytes to read from the end of completions.jsonl."""

Poll = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Export:
    """An export request; keys as on the command line."""

    to: str
    name: str
    folder: Path | None = None
    format: str = DEFAULT_FORMAT
    checkpoint: str = ""
    """"best", "last", a step, or "" for the end of the run."""
    held_out: int = 0
    """Held-out prompts for comparing rewards; 0 skips the comparison."""
    overwrite: bool = False
    fetch: bool = False
    """Download missing original weights."""


def export_run(run: RunFolder, export: Export, progress: Progress = silent) -> ExportedModel:
    """Export a run's weights; on any error an existing model stays.

    Raises UserError for problems with settings, target, disk or model; RuntimeError if the written model differs.
    """
    format_ = format_named(export.format)
    target_for(export.to, format_)
    destination = destination_of(run, export.to, export.name, export.folder, export.overwrite)
    require_plain_files(run.path)  # a copy would follow links, and an upload publish their targets
    config = run_config(run, find_checkpoint(run, export.checkpoint).step if export.checkpoint else None)
    trained = run_weights(run, config, export.checkpoint)
    check_kind(trained, format_)
    if export.held_out and format_.kind == "gguf":
        raise UserError("held_out", "mlx does not run GGUF files, so their rewards are not compared here.")
    destination.check()
    comparison = HeldOutComparison(config, read_inputs(config), export.held_out) if export.held_out else None

    def also(trained: TrainedWeights, built: Path) -> tuple[HeldOutDifference | None, tuple[str, ...]]:
        notes = write_modelfile(config, trained.tokenizer, built / GGUF_FILE) if format_.kind == "gguf" else ()
        if comparison is None or format_.kind == "adapter":  # the same adapters: the same completions
            return None, notes
        doing = "Comparing rewards on held-out prompts."
        progress(doing, 0.0)
        return comparison.compare(trained, built, lambda done: progress(doing, done)), notes

    fetch = (lambda name: fetch_original(name, progress)) if export.fetch else None
    return build(trained, format_, destination, run_samples(run, config), also=also, progress=progress, fetch=fetch)


def fuse_run(run: RunFolder, progress: Progress = silent) -> Path:
    """Write the full-precision model into the run's fused/. Raises as `export_run`.

    Free the policy first, or its arrays are in memory twice.
    """
    config = run_config(run)
    destination = Destination(run.fused, run.path, overwrite=True)
    trained, samples = run_weights(run, config), run_samples(run, config)
    return build(trained, format_named(DEFAULT_FORMAT), destination, samples, progress=progress).path


# At the end of a run


def exports(config: Config) -> bool:
    """True if a run with these settings exports when it finishes."""
    return _fuses(config) or bool(config.lm_studio_name)


def _fuses(config: Config) -> bool:
    return config.fuse and config.train_type != "full"


def export_finished(config: Config, run: RunFolder, event_log: EventLog) -> None:
    """Export a finished run as configured. A problem with LM Studio is only noted."""
    if _fuses(config):
        fuse_run(run)
    if not config.lm_studio_name:
        return
    try:
        exported = export_run(run, Export("lmstudio", config.lm_studio_name))
    except UserError as error:
        sentence = " ".join(fault.sentence for fault in error.faults)
        event_log.write("note", level="warning", sentence=f"The model was not put into LM Studio. {sentence}")
    else:
        sentence = f"The model is in LM Studio as {config.lm_studio_name} ({exported.path})."
        event_log.write("note", level="info", sentence=sentence)


# The weights of a run, and the completions to compare them on


def run_weights(run: RunFolder, config: Config, checkpoint: str = "") -> TrainedWeights:
    """Weights at the end of a run or at `checkpoint`. Raises UserError if they or the base are missing."""
    arrays = find_checkpoint(run, checkpoint).arrays if checkpoint else run.adapters / "adapters.safetensors"
    if not checkpoint and not has_end(run):
        instead = " of its end; name a checkpoint" if saved_weights(run) else " yet, so there is nothing to export"
        raise UserError("run", f"The run {run.name} has no trained weights{instead}.")
    base, is_full = local_folder(config.model), config.train_type == "full"
    if is_full and not checkpoint:
        # Complete by itself: the base is needed only for its tokenizer files, and to compare with. With a tokenizer of
        # the user's choice the run's model has that one's files already.
        tokenizer = run.model if config.tokenizer or base is None else base
        return TrainedWeights(run.model, config.model, tokenizer=tokenizer, untrained=base)
    if base is None:
        raise UserError("model", f"The base model {config.model} is not on this disk any more, and an export needs it.")
    return TrainedWeights(
        base,
        config.model,
        tokenizer=tokenizer_folder(config.tokenizer) if config.tokenizer else base,
        adapters=None if is_full else AdapterFiles(arrays, run.adapters / "adapter_config.json"),
        arrays=arrays if is_full else None,
        quantization="none" if is_full else config.quantization,
        untrained=base,
        has_own_tokenizer=bool(config.tokenizer),
    )


def run_samples(run: RunFolder, config: Config) -> list[AnsweredPrompt]:
    """First completions of the run's last four prompts, or SAMPLES."""
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    samples: list[AnsweredPrompt] = []
    for line in _last_lines(run.completions):
        # The seek may have cut the first line, and the trainer may still be writing the last.
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            if (group := parse_group_row(line)) is not None:
                messages = [*system, {"role": "user", "content": group["prompt"]}]
                answer = group["completions"][0]["text"]
                samples.append(AnsweredPrompt(messages, answer, config.chat_template_kwargs))
    return samples[-4:] or SAMPLES


def _last_lines(file: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - READ_BYTES))
        yield from stream.read().split(b"\n")


# Rewards on held-out prompts


class HeldOutComparison:
    """Compares held-out rewards before and after the export, with the same prompts and random numbers.

    Create it before the export; call `compare` once the model is written.
    """

    def __init__(self, config: Config, inputs: RunInputs, count: int) -> None:
        if count < 1:
            raise UserError("held_out", f"The number of held-out prompts must be at least 1, not {count}.")
        self.config, self.count = config, count
        self.split = next((split for split in ("test", "valid") if inputs.splits.rows(split)), "")
        if not self.split:
            raise UserError("held_out", f"{config.data} has no valid or test split, so there are no held-out prompts.")
        self._rows, self._source = inputs.splits.rows(self.split), inputs.splits.source.get(self.split, config.data)
        if faults := check_columns(self._rows, config, self._source):
            raise UserError(faults)
        self._scoring = ScoringStages(config, inputs.scorer, config.iters)

    def compare(self, trained: TrainedWeights, exported: Path, poll: Poll = lambda done: None) -> HeldOutDifference:
        config = self.config

        def trained_policy() -> Policy:
            policy = load_policy(config.model_copy(update=WITHOUT_REFERENCE | {"model": str(trained.base)}))
            arrays: Any = trained.adapters.arrays if trained.adapters else trained.arrays
            if arrays is not None:
                policy.assign(mx.load(str(arrays)))  # pyright: ignore
            return policy

        def exported_policy() -> Policy:
            # One fresh adapter changes no output: a policy has something to train.
            as_it_is = SMALLEST_MODEL | {"model": str(exported), "quantization": "none", "dtype": "auto"}
            return load_policy(config.model_copy(update=as_it_is))

        before = self._rewards(trained_policy, lambda done: poll(done / 2))
        after = self._rewards(exported_policy, lambda done: poll((1 + done) / 2))
        pairs = [pair for pair in zip(before, after, strict=True) if not any(map(math.isnan, pair))]
        if not pairs:
            raise UserError("held_out", "No reward function had an opinion on any held-out completion.")
        differences = [b - a for a, b in pairs]
        error = stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
        mean_before, mean_after = (fmean(rewards) for rewards in zip(*pairs, strict=True))
        return HeldOutDifference(self.split, len(pairs), mean_before, mean_after, error)

    def _rewards(self, load: Callable[[], Policy], poll: Poll) -> list[float]:
        policy, config = load(), self.config
        prompts = TokenizedPrompts(self._rows, policy.tokenizer, PromptFormat.of(config), self._source)
        problems = prompts.first(self.count)
        if not problems:
            raise UserError("max_seq_length", f"No prompt of {self._source} leaves room for a completion.")
        groups = scored_groups(
            Sampler(policy, config.max_completion_length, stop=config.stop),
            problems,
            lambda groups, wait: self._scoring.score(groups, config.iters, poll=wait),
            sampling=Sampling.of(config),
            group_size=1,
            batch_size=BATCH,
            poll=poll,
            overlap_scoring=False,
        )
        completions = [completion for group in groups for completion in group.completions]
        rewards = [math.nan if completion.reward is None else completion.reward for completion in completions]
        del policy, load, prompts
        gc.collect()  # mlx modules are in reference cycles, and the next model is loaded now
        mx.clear_cache()
        return rewards
