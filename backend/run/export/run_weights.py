"""Which weights of a run are exported, and the completions they are compared on."""

from __future__ import annotations

import contextlib
from pathlib import Path

from backend.models.export.trained_weights import AdapterFiles, TrainedWeights
from backend.models.export.verify import SAMPLES, AnsweredPrompt
from backend.models.own_tokenizer import tokenizer_folder
from backend.spec.completion_rows import parse_group_row
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.hub_cache import local_folder
from backend.spec.run_folder import RunFolder
from backend.spec.runs.saved_weights import find_checkpoint, has_end, saved_weights

READ_BYTES = 1 << 20
"""How much of the end of completions.jsonl is read for samples."""


def run_weights(run: RunFolder, config: Config, checkpoint: str = "") -> TrainedWeights:
    """The weights at the end of a run, or of a `checkpoint`: "best", "last" or a step. Raises Mistake when there are none, or when the
    base model is not on this disk."""
    if config.train_type == "full" and not checkpoint:
        _check_has_end(run)
        # Complete by itself: the base is needed only for its tokenizer files, and to tell what training changed.
        base = local_folder(config.model)
        # With a tokenizer of its own the run's model has that one's files already.
        tokenizer = run.model if config.tokenizer or base is None else base
        return TrainedWeights(run.model, config.model, tokenizer=tokenizer, untrained=base)
    arrays = find_checkpoint(run, checkpoint).arrays if checkpoint else run.adapters / "adapters.safetensors"
    if not checkpoint:
        _check_has_end(run)
    base = local_folder(config.model)
    if base is None:
        raise Mistake("model", f"The base model {config.model} is not on this disk any more, and an export needs it.")
    tokenizer, is_own = (tokenizer_folder(config.tokenizer), True) if config.tokenizer else (base, False)
    if config.train_type == "full":
        return TrainedWeights(
            base, config.model, tokenizer=tokenizer, arrays=arrays, untrained=base, has_own_tokenizer=is_own
        )
    adapters = AdapterFiles(arrays, run.adapters / "adapter_config.json")
    return TrainedWeights(
        base, config.model, tokenizer=tokenizer, adapters=adapters, quantization=config.quantization, untrained=base,
        has_own_tokenizer=is_own,
    )  # fmt: skip


def _check_has_end(run: RunFolder) -> None:
    if has_end(run):
        return
    instead = " of its end; name a checkpoint" if saved_weights(run) else " yet, so there is nothing to export"
    raise Mistake("run", f"The run {run.name} has no trained weights{instead}.")


def run_samples(run: RunFolder, config: Config) -> list[AnsweredPrompt]:
    """The run's last four prompts, as it put them, each with its first completion; SAMPLES when it has none."""
    samples: list[AnsweredPrompt] = []
    for line in _last_lines(run.completions):
        # The seek may have cut the first line, and the trainer may still be writing the last.
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            if (group := parse_group_row(line)) is not None:
                samples.append(_sample(group["prompt"], group["completions"][0]["text"], config))
    return samples[-4:] or SAMPLES


def _last_lines(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - READ_BYTES))
            return stream.read().split(b"\n")
    except FileNotFoundError:
        return []


def _sample(prompt: str, answer: str, config: Config) -> AnsweredPrompt:
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    return AnsweredPrompt([*system, {"role": "user", "content": prompt}], answer, config.chat_template_kwargs)
