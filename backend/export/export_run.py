"""Export a run: its end or a checkpoint, in a format, to a target; compared with what was trained, and told in plain sentences."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.row_views import Rows
from backend.data.rows import Splits, check_columns
from backend.export.build import GGUF_FILE, Progress, build, check_kind, silent
from backend.export.destinations import DESTINATIONS, OnDisk, Place
from backend.export.exports import DEFAULT_FORMAT, format_named, target_for
from backend.export.gguf.modelfile import ChatFormat, Message, chat_format, modelfile
from backend.export.gguf.ollama import MODELFILE
from backend.export.original.fetching import fetch_original
from backend.export.trained_weights import AdapterFiles, TrainedWeights, open_tokenizer
from backend.export.verify import SAMPLES, AnsweredPrompt, Verification
from backend.models.own_tokenizer import tokenizer_folder
from backend.models.policy import Policy, load_policy
from backend.runs.completion_rows import parse_group_row
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import find_checkpoint, has_end, saved_weights
from backend.runs.steering import run_config
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluate import held_out_rewards
from backend.trainer.run_inputs import RunInputs, read_inputs
from backend.trainer.scoring import ScoringStages
from backend.trainer.trial_sampling import SMALLEST_MODEL, WITHOUT_REFERENCE
from backend.types import Group, Problem
from backend.utils.errors import UserError
from backend.utils.files import open_regular, require_plain_files
from backend.utils.hub_cache import local_folder

# The held-out reward of an exported model beside that of base and adapters: same prompts, same random numbers.

BATCH = 16
"""Prompts sampled together."""

Poll = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class HeldOutDifference:
    """Mean rewards of base and adapters, and of the exported model, on `prompts` prompts with one completion each. `error` is the
    standard error of the mean difference by prompt; None for a single prompt."""

    split: str
    prompts: int
    trained: float
    exported: float
    error: float | None

    @property
    def difference(self) -> float:
        return self.exported - self.trained

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference}


class HeldOutComparison:
    """Prompts and reward functions of a run, read before an export begins. Call `compare` once the model is written."""

    def __init__(self, config: Config, inputs: RunInputs, count: int) -> None:
        """Raises UserError without a split that the run did not train on, or for `count` below 1."""
        if count < 1:
            raise UserError("held_out", f"The number of held-out prompts must be at least 1, not {count}.")
        self.config, self.count = config, count
        self.split = held_out_split(inputs.splits)
        if not self.split:
            raise UserError("held_out", f"{config.data} has no valid or test split, so there are no held-out prompts.")
        self._rows, self._source = inputs.splits.rows(self.split), inputs.splits.source.get(self.split, config.data)
        if faults := check_columns(self._rows, config, self._source):
            raise UserError(faults)
        self._scoring = ScoringStages(config, inputs.scorer, config.iters)

    def compare(self, trained: TrainedWeights, exported: Path, poll: Poll = lambda done: None) -> HeldOutDifference:
        before = self._rewards(lambda: _trained_policy(self.config, trained), lambda done: poll(done / 2))
        after = self._rewards(lambda: _exported_policy(self.config, exported), lambda done: poll((1 + done) / 2))
        pairs = [pair for pair in zip(before, after, strict=True) if not any(map(math.isnan, pair))]
        if not pairs:
            raise UserError("held_out", "No reward function had an opinion on any held-out completion.")
        differences = [b - a for a, b in pairs]
        error = stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
        mean_before, mean_after = (fmean(rewards) for rewards in zip(*pairs, strict=True))
        return HeldOutDifference(self.split, len(pairs), mean_before, mean_after, error)

    def _rewards(self, load: Callable[[], Policy], poll: Poll) -> list[float]:
        """The reward of one completion for each prompt, in the order of the file; NaN where no function had an opinion."""
        policy, config = load(), self.config
        problems = _problems(self._rows, policy, config, self._source, self.count)
        stage, step = self._scoring.stage(config.iters), config.iters
        rewards: list[float] = []

        def score(groups: list[Group], wait: Callable[[], None]) -> None:
            self._scoring.score(groups, step, poll=wait)
            rewards.extend(
                math.nan if (r := completion.reward) is None else r
                for group in groups
                for completion in group.completions
            )

        held_out_rewards(
            Sampler(policy, config.max_completion_length, stop=config.stop), problems, score, stage.names,
            stage.weights.at(step), sampling=Sampling.of(config),
            group_size=1, batch_size=BATCH, count=-1, poll=poll, overlap_scoring=False,
        )  # fmt: skip
        del policy, load
        gc.collect()  # mlx modules are in reference cycles, and the next model is loaded now
        mx.clear_cache()
        return rewards


def held_out_split(splits: Splits) -> str:
    """The split that an export is compared on: test, else valid; "" where there is neither."""
    return next((split for split in ("test", "valid") if splits.rows(split)), "")


def _problems(rows: Rows, policy: Policy, config: Config, source: str, count: int) -> list[Problem]:
    problems = TokenizedPrompts(rows, policy.tokenizer, PromptFormat.of(config), source).first(count)
    if not problems:
        raise UserError("max_seq_length", f"No prompt of {source} leaves room for a completion.")
    return problems


def _trained_policy(config: Config, trained: TrainedWeights) -> Policy:
    """Base and adapters as the run trained them; under full fine-tuning the trained model."""
    policy = load_policy(config.model_copy(update=WITHOUT_REFERENCE | {"model": str(trained.base)}))
    arrays: Any = trained.adapters.arrays if trained.adapters else trained.arrays
    if arrays is not None:
        policy.assign(mx.load(str(arrays)))  # pyright: ignore
    return policy


def _exported_policy(config: Config, folder: Path) -> Policy:
    """The exported model with one fresh adapter, which changes no output: a policy has something to train."""
    as_it_is = SMALLEST_MODEL | {"model": str(folder), "quantization": "none", "dtype": "auto"}
    return load_policy(config.model_copy(update=as_it_is))


# ── run weights ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Which weights of a run are exported, and the completions they are compared on.

READ_BYTES = 1 << 20
"""How much of the end of completions.jsonl is read for samples."""


def run_weights(run: RunFolder, config: Config, checkpoint: str = "") -> TrainedWeights:
    """The weights at the end of a run, or of a `checkpoint`: "best", "last" or a step. Raises UserError when there are none, or when the
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
        raise UserError("model", f"The base model {config.model} is not on this disk any more, and an export needs it.")
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
    raise UserError("run", f"The run {run.name} has no trained weights{instead}.")


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


# ── run modelfile ────────────────────────────────────────────────────────────────────────────────────────────────────

# The Modelfile of a run's GGUF file: the prompt as the run put it, sampled as in training.

LONGEST_LICENCE = 2**20
"""Bytes. The GPL has 35,000."""
NO_TEMPLATE = (
    "The chat template does more than a Modelfile was found to say, so the Modelfile leaves it to Ollama, which knows those of many models; "
    "compare an answer with the run's before you rely on it."
)


def write_modelfile(config: Config, tokenizer_from: Path, weights: Path) -> tuple[str, ...]:
    """Write the Modelfile beside the GGUF file `weights`; → what is to be said of it, in sentences."""
    tokenizer = open_tokenizer(tokenizer_from)
    chat = _chat_format(tokenizer, config)
    parameters: dict[str, Any] = {
        "temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p,
        **_penalties(config),
        "stop": sorted({*_ends(tokenizer), *config.stop}),
    }  # fmt: skip
    licence = next(map(_text_of, sorted(tokenizer_from.glob("LICENSE*"))), "")
    text = modelfile(weights.name, chat, parameters, config.system_prompt, licence)
    (weights.parent / MODELFILE).write_text(text, encoding="utf-8")
    return (NO_TEMPLATE,) if chat is None and tokenizer.has_chat_template else ()


def _penalties(config: Config) -> dict[str, float]:
    """Those that are on, by Ollama's names."""
    names = ("repeat_penalty", "presence_penalty", "frequency_penalty")
    neutral = (1.0, 0.0, 0.0)
    return {name: now for name, now, off in zip(names, config.penalties, neutral, strict=True) if now != off}


def _text_of(licence: Path) -> str:
    """The text of a licence that came with the model; "" for what is no file, or cannot be read."""
    try:
        with open_regular(licence) as file:
            return file.read(LONGEST_LICENCE).decode(errors="replace")
    except OSError:
        return ""


def _chat_format(tokenizer: Any, config: Config) -> ChatFormat | None:
    if not tokenizer.has_chat_template:
        return None

    def render(messages: list[Message]) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **config.chat_template_kwargs
        )

    return chat_format(render, tokenizer.bos_token or "")


def _ends(tokenizer: Any) -> list[str]:
    """The tokens that end an answer, as text."""
    return [tokenizer.convert_ids_to_tokens(number) for number in tokenizer.eos_token_ids]


# ── export run ───────────────────────────────────────────────────────────────────────────────────────────────────────

NOTICEABLE_LOSS = 0.1
"""Share of training's effect on the logits from which a loss is advised against."""


@dataclass(frozen=True, slots=True)
class Export:
    """What to export of a run, and where to. Keys as on the command line."""

    to: str
    name: str
    folder: Path | None = None
    format: str = DEFAULT_FORMAT
    checkpoint: str = ""
    """"best", "last" or a step; "" for the run's end."""
    held_out: int = 0
    """How many held-out prompts to compare rewards on; 0 for no comparison."""
    overwrite: bool = False
    fetch: bool = False
    """Download original weights that a format needs and that are not on this disk."""
    keeps_equal: bool = False
    """A model of that name that is byte for byte the same counts as exported: an earlier process was killed after it had exported."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An export that is in its place."""

    place: str
    path: Path
    format: str
    bytes: int
    verification: Verification
    held_out: HeldOutDifference | None
    notes: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """What the comparison found, in plain words."""
        return list(_findings(self))

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": self.place, "path": str(self.path), "format": self.format, "bytes": self.bytes,
            **asdict(self.verification), "held_out": self.held_out.to_dict() if self.held_out else None,
            "sentences": self.sentences(),
        }  # fmt: skip


def export_run(run: RunFolder, export: Export, progress: Progress = silent) -> ExportedModel:
    """Export a run's weights. Raises UserError for anything that the user can mend: settings, target, disk, model; RuntimeError when the
    written model does not answer as the trained one does. In either case nothing new is left behind, and an existing model stays."""
    format_ = format_named(export.format)
    target_for(export.to, format_)
    destination = DESTINATIONS[export.to](Place(run, export.name, export.folder, export.overwrite, export.keeps_equal))
    require_plain_files(run.path)  # a copy would take what they lead to, and an upload publish it
    config = run_config(run, find_checkpoint(run, export.checkpoint).step if export.checkpoint else None)
    trained = run_weights(run, config, export.checkpoint)
    check_kind(trained, format_)
    if export.held_out and format_.kind == "gguf":
        raise UserError("held_out", "mlx does not run GGUF files, so their rewards are not compared here.")
    destination.check()
    comparison = HeldOutComparison(config, read_inputs(config), export.held_out) if export.held_out else None

    notes: list[str] = []

    def also(trained: TrainedWeights, built: Path) -> HeldOutDifference | None:
        if format_.kind == "gguf":
            notes.extend(write_modelfile(config, trained.tokenizer, built / GGUF_FILE))
        return held_out(trained, built)

    def held_out(trained: TrainedWeights, built: Path) -> HeldOutDifference | None:
        if comparison is None or format_.kind == "adapter":  # the same adapters: the same completions
            return None
        doing = "Comparing rewards on held-out prompts."
        progress(doing, 0.0)
        return comparison.compare(trained, built, lambda done: progress(doing, done))

    samples = run_samples(run, config)
    fetch = (lambda name: fetch_original(name, progress)) if export.fetch else None
    built = build(trained, format_, destination, samples, also=also, progress=progress, fetch=fetch)
    return ExportedModel(
        built.place, built.path, format_.key, built.bytes, built.verification, built.extra, (*built.notes, *notes)
    )


def fuse_run(run: RunFolder, progress: Progress = silent) -> Path:
    """Write the run's model in full precision into its fused/, replacing an older one, and return that folder. Raises as `export_run`.

    A trainer drops its policy first, or the arrays that both read are in memory twice.
    """
    config = run_config(run)
    destination = OnDisk(run.fused, run.path, overwrite=True)
    trained, samples = run_weights(run, config), run_samples(run, config)
    return build(trained, format_named(DEFAULT_FORMAT), destination, samples, progress=progress).path


# ── in words ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _findings(exported: ExportedModel) -> Iterator[str]:
    checked = exported.verification
    if not checked.max_error:
        yield "Loaded back, it gives exactly the logits of the trained model."
    else:
        yield (
            f"Loaded back, its logits differ from the trained model's by {_short(checked.max_error)} at most, and the "
            f"log-probability of a token of the run's completions by {_short(checked.nats)} nats on average."
        )
    if checked.lost is not None and checked.lost > NOTICEABLE_LOSS:
        yield f"Rounding has moved its logits by {checked.lost:.0%} of what training did; more bits keep more."
    yield from exported.notes
    if exported.held_out is not None:
        yield _held_out_sentence(exported.held_out)


def _held_out_sentence(found: HeldOutDifference) -> str:
    error = f" ± {_short(found.error)}" if found.error else ""
    prompts = f"{found.prompts} prompt{'s' * (found.prompts != 1)}"
    return (
        f"On {prompts} of the {found.split} split its reward is {found.exported:.3g}, and the trained model's "
        f"{found.trained:.3g}: a difference of {_signed(found.difference)}{error}."
    )


def _short(number: float) -> str:
    return f"{number:.2g}"


def _signed(number: float) -> str:
    return f"{number:+.2g}".replace("-", "−") if number else "0"
