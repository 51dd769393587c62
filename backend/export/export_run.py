"""Export a run: check the target, compute reference logits, write the model, verify it, move it into place."""

import contextlib
import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import check_columns
from backend.export import exports, gguf_file, lm_studio_rules, verify, writer
from backend.export.exports import Export, ExportFormat, Progress
from backend.export.originals import OriginalFiles, fetch_original, trained_on_original, write_merged
from backend.export.peft_files import merged_model, read_peft_adapter, write_peft_adapter
from backend.export.trained_weights import AdapterFiles, TrainedWeights, open_model
from backend.export.verify import TOLERANCE, AnsweredPrompt, NotFiniteError, OpenModel, Verification
from backend.models.architectures import is_text_part
from backend.models.model_folder import check_adapter_config, header_of
from backend.models.policy import is_quantised, load_policy
from backend.models.tokenizers import load_tokenizer, tokenizer_folder
from backend.runs.completion_rows import parse_group_row
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints, find_checkpoint, has_end
from backend.runs.steering import run_config
from backend.sampling.conversations import Tools
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluate import scored_groups
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.run_inputs import RunInputs, read_inputs
from backend.trainer.scoring import ScoringStages
from backend.trainer.trial_sampling import SMALLEST_MODEL, WITHOUT_REFERENCE
from backend.utils.disk import cause, require_room, writing
from backend.utils.errors import UserError
from backend.utils.files import last_lines, require_plain_files
from backend.utils.hub_cache import local_folder
from backend.utils.text import quote

BATCH = 16  # held-out prompts per batch
READ_BYTES = 1 << 20  # bytes to read from the end of completions.jsonl
GGUF_FILE = "model.gguf"
SLACK = 16 << 20  # bytes for tokenizer files and headers
NOTICEABLE_LOSS = 0.1  # share of the training effect lost above which a warning appears


@dataclass(frozen=True, slots=True)
class HeldOutDifference:
    """Mean held-out rewards, one completion per prompt. `error`: standard error of the difference, or None."""

    split: str
    prompts: int
    trained: float
    exported: float
    error: float | None
    difference: float


@dataclass(frozen=True, slots=True)
class ExportedModel:
    place: str
    path: Path
    format: str
    bytes: int
    verification: Verification
    held_out: HeldOutDifference | None
    notes: tuple[str, ...] = ()
    original: str | None = None  # the model that the weights are of, where it is not the run's own

    @property
    def rounding(self) -> str:
        """A warning where rounding has removed much of what training did, or ""."""
        lost = self.verification.lost or 0.0
        moved = f"Rounding has moved its logits by {lost:.0%} of what training did; more bits keep more."
        return moved if lost > NOTICEABLE_LOSS else ""

    def sentences(self) -> list[str]:
        checked, sentences = self.verification, list[str]()
        if not checked.max_error:
            sentences.append("Loaded back, it gives exactly the logits of the trained model.")
        else:
            sentences.append(
                f"Loaded back, its logits differ from the trained model's by {checked.max_error:.2g} at most, and the "
                f"log-probability of a token of the run's completions by {checked.nats:.2g} nats on average."
            )
        sentences += filter(None, [self.rounding, *self.notes])
        if (found := self.held_out) is not None:
            error = f" ± {found.error:.2g}" if found.error else ""
            prompts = f"{found.prompts} prompt{'s' * (found.prompts != 1)} of the {found.split} split"
            rewards = f"its reward is {found.exported:.3g}, and the trained model's {found.trained:.3g}"
            difference = f"{found.difference:+.2g}".replace("-", "−") if found.difference else "0"
            sentences.append(f"On {prompts} {rewards}: a difference of {difference}{error}.")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "path": str(self.path),
            "format": self.format,
            "bytes": self.bytes,
            **asdict(self.verification),
            "held_out": asdict(self.held_out) if self.held_out else None,
            "sentences": self.sentences(),
        }


def export_run(run: RunFolder, export: Export, progress: Progress = exports.silent) -> ExportedModel:
    """Export a run's weights; on any error an old model stays. Raises UserError, RuntimeError if the result differs."""
    format_ = exports.format_named(export.format)
    destination = exports.destination_of(run, export, format_)
    require_plain_files(run.path)  # a copy would follow links, and an upload publish their targets
    config = run_config(run, find_checkpoint(run, export.checkpoint).step if export.checkpoint else None)
    trained, held_out = run_weights(run, config, export.checkpoint), export.held_out
    if format_.kind == "adapter" and trained.adapters is None:
        every = "Full fine-tuning changed every weight, so there is no adapter to export"
        raise UserError("format", f"{every}; choose another format.")
    if format_.key == "adapter" and (whole := trained.whole_modules()):
        modules = f"{quote(', '.join(whole), 60)} {'are' if len(whole) > 1 else 'is'} trained in full"
        raise UserError("format", f"{modules}, which mlx-lm does not load with an adapter; export full or peft.")
    if format_.kind != "adapter":
        writer.kept_files(trained.tokenizer)  # for its UserError
    if held_out and format_.kind == "gguf":
        raise UserError("held_out", "mlx does not run GGUF files, so their rewards are not compared here.")
    destination.check()
    comparison = HeldOutComparison(config, read_inputs(config), held_out) if held_out else None
    requested, original, samples = trained, None, run_samples(run, config)
    notes: tuple[str, ...] = ()
    if format_.names == "original":
        fetch = (lambda name: fetch_original(name, progress)) if export.fetch else None
        trained, original = trained_on_original(trained, fetch)
        if (trained.base, trained.quantization) != (requested.base, requested.quantization):
            now = f"The adapters were trained on quantised weights and are now on the original ones of {trained.name}"
            differs = "in use, its answers differ from the run's by what quantisation had changed"
            notes = (f"{now}, with which these logits were compared: {differs}.",)
        if format_.kind == "gguf":
            gguf_file.check(original, trained.tokenizer)
    require_room(destination.workshop, _needed_bytes(trained, format_), "The model")
    target = destination.target
    with writing(target, also_computes=True), exports.staging_folder(destination.workshop, target) as staging:
        if trained.adapters:  # a running trainer replaces its own
            trained = replace(trained, adapters=trained.adapters.copied_to(staging / "adapters"))
        progress("Computing what the trained model answers.")
        tokenizer, tolerance = load_tokenizer(trained.tokenizer), _tolerance(trained, format_)
        reference = verify.make_reference(trained, tokenizer, samples, tolerance)
        built = staging / "new"
        lost, reopened = write_in_format(trained, format_, original, built, progress)
        notes += lost
        for hidden in built.glob(".*"):  # the ._ files and .DS_Store that macOS adds
            hidden.unlink()
        progress("Loading it back and comparing.")
        try:
            if format_.kind == "model":
                verification = verify.verify_folder(built, load_tokenizer(built), reference, reopened)
            else:
                verification = verify.compare(built, reference, reopened)
        except NotFiniteError:
            if format_.dtype != "float16":
                raise
            beyond = "Numbers of this model are beyond the range of float16 (65,504)"
            raise UserError("format", f"{beyond}; choose bf16, or full precision.") from None
        if format_.kind == "gguf":
            notes += gguf_file.write_modelfile(config, trained.tokenizer, built / GGUF_FILE)
        for warning in lm_studio_rules.warnings(built) if format_.kind == "model" else ():
            progress(warning.sentence)
        difference = None
        if comparison is not None and format_.kind != "adapter":  # the same adapters: the same completions
            compared = partial(progress, "Comparing rewards on held-out prompts.")
            compared(0.0)
            difference = comparison.compare(replace(requested, adapters=trained.adapters), built, compared)
        size = exports.folder_bytes(built)
        place = destination.deliver(built)
    of = original.name if original is not None else None
    return ExportedModel(place, target, format_.key, size, verification, difference, notes, of)


def _needed_bytes(trained: TrainedWeights, format_: ExportFormat) -> int:
    adapters = 2 * trained.adapters.arrays.stat().st_size if trained.adapters else 0
    if format_.kind == "adapter":
        return adapters
    size = exports.exported_bytes(trained.base, format_, trained.quantization)
    if size is None:  # unknown from the files: as large as the base, or as 4 bits in 16
        shape = shape_of(trained.base)
        is_packed = shape is not None and shape.quantised
        size = sum(file.stat().st_size for file in trained.base.glob("model*.safetensors")) * (4 if is_packed else 1)
    return int(1.02 * size) + SLACK + adapters


def _tolerance(trained: TrainedWeights, format_: ExportFormat) -> float | None:
    if format_.kind == "adapter":
        return TOLERANCE["float32"]
    if format_.gguf_type:
        return None if format_.gguf_type == "q8_0" else TOLERANCE["float16"]
    model = trained.open()
    if format_.quantization or (format_.keeps_bits and is_quantised(model)):
        return None
    return TOLERANCE[format_.dtype or str(writer.float_type(model)).rpartition(".")[2]]


def write_in_format(
    trained: TrainedWeights, format_: ExportFormat, original: OriginalFiles | None, to: Path, progress: Progress
) -> tuple[tuple[str, ...], OpenModel]:
    """→ (what the user should know, a function that opens what was written). Raises UserError for the format."""
    merging = "Merging the adapters and writing the model." if trained.adapters else "Writing the model."
    done = partial(progress, "Writing the adapter." if format_.kind == "adapter" else merging)
    done(None if format_.kind == "adapter" else 0.0)
    try:
        if original is None and format_.kind == "adapter":
            return (), replace(trained, adapters=writer.write_adapter(trained, to)).open
        if original is None:
            model, config = writer.in_format(*trained.open_with_config(), format_)
            vision, left_out = writer.open_vision_part(trained.untrained or trained.base, config)
            if left_out and is_text_part(config):
                raise UserError("model", left_out)
            writer.write_model(model, config, trained.tokenizer, to, done, vision)
            return (left_out,) if left_out else (), lambda: open_model(to)[0].eval()
        if format_.kind == "adapter":
            write_peft_adapter(trained, original, to)
            return (), lambda: merged_model(read_peft_adapter(to), original)
        if format_.kind == "gguf":
            gguf_file.write_gguf(trained, original, format_.gguf_type, to / GGUF_FILE, done)
            return (), lambda: gguf_file.open_gguf(to / GGUF_FILE, original)
        write_merged(trained, original, to, done)
        return (), lambda: open_model(to)[0].eval()
    except OSError as error:
        raise UserError("export", f"The model cannot be written to {to.parent}: {cause(error)}.") from error
    finally:
        # mlx modules are in reference cycles, hence the explicit collection: the written model is loaded next.
        gc.collect()
        mx.clear_cache()


def exports_at_end(config: Config) -> bool:
    """True if a run with these settings exports when it finishes."""
    return (config.fuse and config.train_type != "full") or bool(config.lm_studio_name)


def export_finished(config: Config, run: RunFolder, event_log: EventLog) -> None:
    """Export a finished run as configured; LM Studio's problems are only noted. Free the policy first, for memory."""
    if config.fuse and config.train_type != "full":
        fused = export_run(run, Export("folder", run.name, overwrite=True))
        if fused.rounding:
            event_log.write("note", level="warning", sentence=f"The model is in fused/. {fused.rounding}")
    if not config.lm_studio_name:
        return
    try:
        path = export_run(run, Export("lmstudio", config.lm_studio_name)).path
        level, sentence = "info", f"The model is in LM Studio as {config.lm_studio_name} ({path})."
    except UserError as error:
        problems = " ".join(fault.sentence for fault in error.faults)
        level, sentence = "warning", f"The model was not put into LM Studio. {problems}"
    event_log.write("note", level=level, sentence=sentence)


def run_weights(run: RunFolder, config: Config, checkpoint: str = "") -> TrainedWeights:
    """Weights at the end of a run or at `checkpoint`. Raises UserError if they or the base are missing or damaged."""
    arrays = find_checkpoint(run, checkpoint).weights_file if checkpoint else run.adapters / "adapters.safetensors"
    if not checkpoint and not has_end(run):
        instead = " of its end; name a checkpoint" if all_checkpoints(run) else " yet, so there is nothing to export"
        raise UserError("run", f"The run {run.name} has no trained weights{instead}.")
    base, is_full = local_folder(config.model), config.train_type == "full"
    if is_full and not checkpoint:
        # Complete by itself: the base is needed only for its tokenizer files, and to compare with. With a tokenizer of
        # the user's choice the run's model has that one's files already.
        own = bool(config.tokenizer)
        tokenizer = run.model if own or base is None else base
        return TrainedWeights(run.model, config.model, tokenizer=tokenizer, untrained=base, has_own_tokenizer=own)
    if base is None:
        raise UserError("model", f"The base model {config.model} is not on this disk any more, and an export needs it.")
    adapters = None if is_full else AdapterFiles(arrays, run.adapters / "adapter_config.json")
    header_of(arrays, "run")
    if adapters is not None:
        check_adapter_config(adapters.config, "run")
    return TrainedWeights(
        base,
        config.model,
        tokenizer=tokenizer_folder(config.tokenizer) if config.tokenizer else base,
        adapters=adapters,
        arrays=arrays if is_full else None,
        quantization="none" if is_full else config.quantization,
        untrained=base,
        has_own_tokenizer=bool(config.tokenizer),
    )


def run_samples(run: RunFolder, config: Config) -> list[AnsweredPrompt]:
    """First completions of the run's last four prompts, or SAMPLES."""
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    samples: list[AnsweredPrompt] = []
    for line in last_lines(run.completions, READ_BYTES).split(b"\n"):
        # The trainer may still be writing the last line.
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            if (group := parse_group_row(line)) is not None:
                messages = [*system, {"role": "user", "content": group["prompt"]}]
                samples.append(AnsweredPrompt(messages, group["completions"][0]["text"], config.chat_template_kwargs))
    return samples[-4:] or verify.SAMPLES


class HeldOutComparison:
    """Compares held-out rewards with the same prompts and random numbers. Make it before the export."""

    def __init__(self, config: Config, inputs: RunInputs, count: int) -> None:
        if count < 1:
            raise UserError("held_out", f"The number of held-out prompts must be at least 1, not {count}.")
        self.config, self.count = config, count
        self.split = next((split for split in ("test", "valid") if inputs.splits.rows(split)), "")
        if not self.split:
            raise UserError("held_out", f"{config.data} has no valid or test split, so there are no held-out prompts.")
        self._rows, self._source = inputs.splits.rows(self.split), inputs.splits.source_of(self.split)
        if faults := check_columns(self._rows, config, self._source):
            raise UserError(faults)
        if not any(inputs.scorer.loaded.stages):
            raise UserError("held_out", "This run has no reward functions that could be compared.")
        self._scoring = ScoringStages(config, inputs.scorer, config.iters)
        self._format, self._tools = PromptFormat.of(config, inputs.schemas), inputs.tools

    def compare(self, trained: TrainedWeights, exported: Path, poll: Callable[[float], None]) -> HeldOutDifference:
        as_trained = WITHOUT_REFERENCE | {"model": str(trained.base)}
        arrays = trained.adapters.arrays if trained.adapters else trained.arrays
        before = self._rewards(as_trained, arrays, lambda done: poll(done / 2))
        gc.collect()  # mlx modules are in reference cycles, and the next model is loaded now
        mx.clear_cache()
        # One fresh adapter changes no output: a policy has something to train.
        as_it_is = SMALLEST_MODEL | {"model": str(exported), "quantization": "none", "dtype": "auto"}
        after = self._rewards(as_it_is, None, lambda done: poll((1 + done) / 2))
        pairs = [pair for pair in zip(before, after, strict=True) if not any(map(math.isnan, pair))]
        if not pairs:
            raise UserError("held_out", "No reward function had an opinion on any held-out completion.")
        error = stdev(b - a for a, b in pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
        mean_before, mean_after = (fmean(rewards) for rewards in zip(*pairs, strict=True))
        return HeldOutDifference(self.split, len(pairs), mean_before, mean_after, error, mean_after - mean_before)

    def _rewards(self, changes: dict[str, Any], arrays: Path | None, poll: Callable[[float], None]) -> list[float]:
        config = self.config
        policy = load_policy(config.model_copy(update=changes))
        if arrays is not None:
            policy.assign(mx.load(str(arrays)))  # pyright: ignore
        problems = TokenizedPrompts(self._rows, policy.tokenizer, self._format, self._source).first(self.count)
        if not problems:
            raise UserError("max_seq_length", f"No prompt of {self._source} leaves room for a completion.")
        tools = Tools.of(config, self._tools, policy.tokenizer)
        groups = scored_groups(
            Sampler(policy, config.max_completion_length, stop=config.stop, tools=tools),
            problems,
            lambda groups, wait: self._scoring.score(groups, config.iters, poll=wait),
            sampling=Sampling.of(config),
            group_size=1,
            batch_size=BATCH,
            poll=poll,
            overlap_scoring=False,
        )
        completions = [completion for group in groups for completion in group.completions]
        return [math.nan if completion.reward is None else completion.reward for completion in completions]
