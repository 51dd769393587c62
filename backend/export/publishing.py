"""Publish a run on Hugging Face in two steps: prepare a folder in the run's uploads/, then send it.

A record written last says what the folder was made from; until that changes the folder is reused, edits of the card
included.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from PIL import Image, ImageColor, ImageDraw, ImageFont

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

WIDTH, HEIGHT, GAP, EDGE = 560, 400, 44, 28
FINER = 3  # supersampling factor, for smooth edges
BACKGROUND, TEXT, MUTED, GRID = "#ffffff", "#1c1c21", "#65656d", "#e6e6ea"
COLOURS = {"reward": "#4453d0", "kl": "#b3541e", "completions/mean_length": "#2e7d5b"}
"""Colours of the window's light theme."""
PALE = 0.35  # opacity of single steps
RUNNING = 0.08  # window of the running mean, as a share of the steps


def draw_curves(curves: Mapping[str, Curve], titles: Mapping[str, str], to: Path) -> None:
    """Draw the curves, each of two steps or more, as a PNG; nothing without one."""
    if not curves:
        return
    width, height = 2 * EDGE + len(curves) * WIDTH + (len(curves) - 1) * GAP, HEIGHT + 2 * EDGE
    image = Image.new("RGB", (width * FINER, height * FINER), BACKGROUND)
    for place, (name, curve) in enumerate(curves.items()):
        left = EDGE + place * (WIDTH + GAP)
        _draw_plot(ImageDraw.Draw(image), left, curve, COLOURS.get(name, COLOURS["reward"]), titles[name])
    image.resize((width, height), Image.Resampling.LANCZOS).save(to, optimize=True)


def _draw_plot(pen: ImageDraw.ImageDraw, left: int, curve: Curve, colour: str, title: str) -> None:
    small, large = (ImageFont.load_default(size * FINER) for size in (22, 26))
    ticks = round_numbers(min(value for _, value in curve), max(value for _, value in curve))
    labels = [f"{tick + 0.0:,.6g}" for tick in ticks]  # with a hyphen: the font has no minus sign
    first, last = curve[0][0], curve[-1][0]
    x0, x1 = left + max(pen.textlength(label, small) for label in labels) / FINER + 14, left + WIDTH
    y0, y1 = EDGE + HEIGHT - 38, EDGE + 58

    def at(step: float, value: float) -> tuple[float, float]:
        across, up = (step - first) / max(last - first, 1), (value - ticks[0]) / (ticks[-1] - ticks[0])
        return (x0 + across * (x1 - x0)) * FINER, (y0 + up * (y1 - y0)) * FINER

    pen.text((left * FINER, EDGE * FINER), title, TEXT, large, anchor="lt")
    for tick, label in zip(ticks, labels, strict=True):
        y = at(first, tick)[1]
        pen.line([(x0 * FINER, y), (x1 * FINER, y)], GRID, FINER)
        pen.text(((x0 - 10) * FINER, y), label, MUTED, small, anchor="rm")
    for step, anchor in ((first, "lt"), (last, "rt")):
        pen.text((at(step, 0)[0], (y0 + 10) * FINER), f"step {step:,}", MUTED, small, anchor=anchor)
    # Every step, pale, and their centred running mean, with a smaller window near the ends
    strong, white = ImageColor.getrgb(colour), ImageColor.getrgb(BACKGROUND)
    pale = tuple(round(PALE * one + (1 - PALE) * two) for one, two in zip(strong, white, strict=True))
    values, reach = [value for _, value in curve], round(RUNNING * len(curve) / 2) or 1
    smooth: list[tuple[float, float]] = []
    for place, (step, _) in enumerate(curve):
        near = min(reach, place, len(curve) - 1 - place)
        smooth.append(at(step, fmean(values[place - near : place + near + 1])))
    pen.line([at(*point) for point in curve], pale, 2 * FINER, joint="curve")
    pen.line(smooth, colour, 3 * FINER, joint="curve")


def round_numbers(low: float, high: float) -> list[float]:
    """About four evenly spaced round numbers that cover low … high."""
    if high - low < 1e-12 * max(abs(high), 1):
        low, high = low - 0.5 * max(abs(low), 1), high + 0.5 * max(abs(high), 1)
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    gap = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [gap * at for at in range(math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9) + 1)]
