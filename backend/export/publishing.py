"""Publish a run on Hugging Face in two steps: prepare a folder in the run's uploads/, then send it.

A record written last says what the folder was made from; until that changes the folder is reused, edits of the card
included.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from PIL import Image, ImageDraw, ImageFont

from backend.export.export_run import Export, export_run
from backend.export.exports import Progress, format_named, silent
from backend.export.hub_upload import HubToken, Uploaded, files_of, upload
from backend.export.model_card import CURVES, CURVES_FILE, SETTINGS_FILE, Curve, model_card, read_facts
from backend.export.privacy import clean_json_files, refuse_leaks
from backend.models.hub_client import hub_errors
from backend.models.model_folder import object_or_empty
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import END, find_choice
from backend.trainer.evaluation import evaluation_rows
from backend.utils.disk import replace_file

CARD = "README.md"


@dataclass(frozen=True, slots=True)
class PreparedUpload:
    repo_id: str
    folder: Path

    @property
    def card(self) -> str:
        return (self.folder / CARD).read_text(encoding="utf-8")

    def files(self) -> list[tuple[str, int]]:
        """(name, bytes), largest first."""
        found = ((path.relative_to(self.folder).as_posix(), path.stat().st_size) for path in files_of(self.folder))
        return sorted(found, key=lambda row: (-row[1], row[0]))

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.files())

    def to_dict(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files()]
        about = {"repo": self.repo_id, "folder": str(self.folder), "bytes": self.bytes}
        return about | {"files": files, "card": self.card}

    @property
    def record(self) -> Path:
        """File that says what the folder was made from."""
        return self.folder.with_name(f"{self.folder.name}.json")

    def discard(self) -> None:
        self.record.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def prepare_upload(run: RunFolder, repo_id: str, export: Export, progress: Progress = silent) -> PreparedUpload:
    """Prepare the folder, or reuse it. Asks the Hub for the licence only. Raises as `export_run`, and for a leak."""
    with hub_errors(repo_id or "Nothing", setting="repo"):
        validate_repo_id(repo_id)
        if repo_id.count("/") != 1:
            raise HFValidationError
    weights, newest = find_choice(run, export.checkpoint or END).path, evaluation_rows.evaluations_of(run)[:1]
    made_from = {"format": export.format, "weights": _stamp(weights), "evaluation": [_stamp(path) for path in newest]}
    prepared = PreparedUpload(repo_id, run.uploads / repo_id.replace("/", "--"))
    folder = prepared.folder
    if object_or_empty(prepared.record) == made_from and (folder / CARD).is_file():
        return prepared
    prepared.discard()
    run.uploads.mkdir(exist_ok=True)
    exported = export_run(run, replace(export, to="hub", name=folder.name), progress)
    progress("Writing the card.")
    facts = read_facts(run, repo_id, format_named(export.format), export.checkpoint, exported.original)
    clean_json_files(folder, facts.base)
    draw_curves(facts.curves, CURVES, folder / CURVES_FILE)
    (folder / SETTINGS_FILE).write_text(facts.settings, encoding="utf-8")
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")
    refuse_leaks(folder)
    replace_file(prepared.record, json.dumps(made_from))
    return prepared


def send(prepared: PreparedUpload, token: HubToken, progress: Progress, *, private: bool, overwrite: bool) -> Uploaded:
    """Upload a prepared folder, then delete it. Raises UserError; sending again continues."""
    refuse_leaks(prepared.folder, token.value)  # a person may have edited the card
    done = upload(prepared.repo_id, prepared.folder, token.value, progress, private=private, overwrite=overwrite)
    prepared.discard()
    return done


def _stamp(path: Path) -> list[Any]:
    about = path.stat()
    return [path.name, about.st_mtime_ns, about.st_size]


# Training curves as a PNG, one small plot beside the other

WIDTH, HEIGHT, GAP = 560, 340, 44  # pixels of a plot's lines, and around them
FINER = 3  # supersampling factor, for smooth edges
TEXT, MUTED, GRID, PALE, LINE = "#1c1c21", "#65656d", "#e6e6ea", "#c2c6ee", "#4453d0"
RUNNING = 0.08  # window of the running mean, as a share of the steps


def draw_curves(curves: Mapping[str, Curve], titles: Mapping[str, str], to: Path) -> None:
    """Draw the curves, each of two steps or more, as a PNG; nothing without one."""
    if not curves:
        return
    width, height = GAP + len(curves) * (WIDTH + GAP), HEIGHT + 3 * GAP
    image = Image.new("RGB", (width * FINER, height * FINER), "white")
    for place, (name, curve) in enumerate(curves.items()):
        _draw_plot(ImageDraw.Draw(image), GAP + place * (WIDTH + GAP), curve, titles[name])
    image.resize((width, height), Image.Resampling.LANCZOS).save(to, optimize=True)


def _draw_plot(pen: ImageDraw.ImageDraw, left: int, curve: Curve, title: str) -> None:
    """Every step, pale, and their centred running mean, between lines at the least and the largest value."""
    font = ImageFont.load_default(24 * FINER)
    steps, values = zip(*curve, strict=True)
    reach = round(RUNNING * len(curve) / 2) or 1
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(curve)))
    low, high, first, last = min(values), max(values), steps[0], steps[-1]

    def at(step: float, value: float) -> tuple[float, float]:
        across, up = (step - first) / (last - first or 1), (value - low) / (high - low or 1)
        return (left + across * WIDTH) * FINER, (2 * GAP + (1 - up) * HEIGHT) * FINER

    pen.text((left * FINER, GAP * FINER), title, TEXT, font)
    for value, top, text in ((high, 2 * GAP, GAP), (low, 2 * GAP + HEIGHT, 2 * GAP + HEIGHT + 8)):
        pen.line([(left * FINER, top * FINER), ((left + WIDTH) * FINER, top * FINER)], GRID, FINER)
        pen.text(((left + WIDTH) * FINER, text * FINER), f"{value + 0.0:,.4g}", MUTED, font, anchor="ra")
    pen.text((left * FINER, (2 * GAP + HEIGHT + 8) * FINER), f"steps {first:,} to {last:,}", MUTED, font)
    pen.line([at(*point) for point in curve], PALE, 2 * FINER, joint="curve")
    pen.line([at(*point) for point in zip(steps, map(fmean, windows), strict=True)], LINE, 3 * FINER, joint="curve")
