"""Export a run: its end or a checkpoint, in a format, to a target; compared with what was trained, and told in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.models.export.build import GGUF_FILE, Progress, build, check_kind, silent
from backend.models.export.destinations import DESTINATIONS, OnDisk, Place
from backend.models.export.original.fetching import fetch_original
from backend.models.export.trained_weights import TrainedWeights
from backend.models.export.verify import Verification
from backend.run.export.held_out import HeldOutComparison, HeldOutDifference
from backend.run.export.run_modelfile import write_modelfile
from backend.run.export.run_weights import run_samples, run_weights
from backend.run.run_inputs import read_inputs
from backend.spec.exports import DEFAULT_FORMAT, format_named, target_for
from backend.spec.faults import Mistake
from backend.spec.regular_file import require_plain_files
from backend.spec.run_folder import RunFolder
from backend.spec.runs.saved_weights import find_checkpoint
from backend.spec.runs.steering import run_config

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
    """Export a run's weights. Raises Mistake for anything that the user can mend: settings, target, disk, model; RuntimeError when the
    written model does not answer as the trained one does. In either case nothing new is left behind, and an existing model stays."""
    format_ = format_named(export.format)
    target_for(export.to, format_)
    destination = DESTINATIONS[export.to](Place(run, export.name, export.folder, export.overwrite, export.keeps_equal))
    require_plain_files(run.path)  # a copy would take what they lead to, and an upload publish it
    config = run_config(run, find_checkpoint(run, export.checkpoint).step if export.checkpoint else None)
    trained = run_weights(run, config, export.checkpoint)
    check_kind(trained, format_)
    if export.held_out and format_.kind == "gguf":
        raise Mistake("held_out", "mlx does not run GGUF files, so their rewards are not compared here.")
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
