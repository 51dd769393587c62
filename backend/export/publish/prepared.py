"""What is about to be uploaded: the model's files, its card, curves and settings in a folder, looked at before anything leaves.

It lies in the run, under uploads/OWNER--NAME. The record beside it is written last and says what it was made from: while that has not
changed, the folder is sent as it is, so a card that a person has edited there stays edited.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from PIL import Image, ImageDraw, ImageFont

from backend.export.publish.card import CURVES_FILE, SETTINGS_FILE, model_card
from backend.export.publish.card_facts import CURVES, CardFacts
from backend.export.publish.privacy import clean_json_files, refuse_leaks
from backend.export.publish.upload import files_of
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from backend.utils.whole_file import replace_file

# Training curves as a PNG for the model card: one small plot beside the other, without the window.

Curve = list[tuple[int, float]]
"""(step, value) pairs."""

WIDTH, HEIGHT, GAP, EDGE = 560, 400, 44, 28
"""Pixels of one plot, between two plots, and around all. The Hub shows the picture at about half its size."""
FINER = 3
"""Everything is drawn this many times as large and reduced: lines get smooth edges."""
BACKGROUND, TEXT, MUTED, GRID = "#ffffff", "#1c1c21", "#65656d", "#e6e6ea"
COLOURS = {"reward": "#4453d0", "kl": "#b3541e", "completions/mean_length": "#2e7d5b"}
"""Those of the window's charts in its light theme, or near."""
PALE = 0.35
"""Opacity of single steps behind their running mean."""
RUNNING = 0.08
"""Share of the steps in a running mean."""


def draw_curves(curves: Mapping[str, Curve], titles: Mapping[str, str], to: Path) -> None:
    """Draw the curves, each by its key of COLOURS, and write the PNG."""
    shown = [(name, curve) for name, curve in curves.items() if len(curve) > 1]
    if not shown:
        return
    width = 2 * EDGE + len(shown) * WIDTH + (len(shown) - 1) * GAP
    image = Image.new("RGB", (width * FINER, (HEIGHT + 2 * EDGE) * FINER), BACKGROUND)
    for number, (name, curve) in enumerate(shown):
        left = EDGE + number * (WIDTH + GAP)
        _Plot(image, left, EDGE, curve, COLOURS.get(name, COLOURS["reward"]), titles[name]).draw()
    image.resize((width, HEIGHT + 2 * EDGE), Image.Resampling.LANCZOS).save(to, optimize=True)


class _Plot:
    """One plot: title, grid, single steps and their running mean. Coordinates are in final pixels until `_at`."""

    def __init__(self, image: Image.Image, left: int, top: int, curve: Curve, colour: str, title: str) -> None:
        self.pen = ImageDraw.Draw(image)
        self.curve, self.colour, self.title = curve, colour, title
        self.small, self.large = (ImageFont.load_default(size * FINER) for size in (22, 26))
        self.y_ticks = ticks(min(value for _, value in curve), max(value for _, value in curve))
        self.first, self.last = curve[0][0], curve[-1][0]
        self.left, self.top = left, top
        self.labels = [number(tick, self.y_ticks) for tick in self.y_ticks]
        widest = max(self.pen.textlength(label, self.small) for label in self.labels) / FINER
        self.x0, self.x1 = left + widest + 14, left + WIDTH
        self.y0, self.y1 = top + HEIGHT - 38, top + 58

    def draw(self) -> None:
        self.pen.text((self.left * FINER, self.top * FINER), self.title, TEXT, self.large, anchor="lt")
        for tick, label in zip(self.y_ticks, self.labels, strict=True):
            y = self._at(self.first, tick)[1]
            self.pen.line([(self.x0 * FINER, y), (self.x1 * FINER, y)], GRID, FINER)
            self.pen.text(((self.x0 - 10) * FINER, y), label, MUTED, self.small, anchor="rm")
        for step, anchor in ((self.first, "lt"), (self.last, "rt")):
            words = f"step {step:,}"
            self.pen.text((self._at(step, 0)[0], (self.y0 + 10) * FINER), words, MUTED, self.small, anchor=anchor)
        pale = _mixed(self.colour, BACKGROUND, PALE)
        self.pen.line([self._at(*point) for point in self.curve], pale, 2 * FINER, joint="curve")
        self.pen.line([self._at(*point) for point in smoothed(self.curve)], self.colour, 3 * FINER, joint="curve")

    def _at(self, step: float, value: float) -> tuple[float, float]:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        across = (step - self.first) / max(self.last - self.first, 1)
        up = (value - low) / (high - low)
        return (self.x0 + across * (self.x1 - self.x0)) * FINER, (self.y0 + up * (self.y1 - self.y0)) * FINER


def smoothed(curve: Curve) -> Curve:
    """The mean of each step and its neighbours, a share RUNNING of all; fewer neighbours near the ends, evenly on both sides."""
    reach = round(RUNNING * len(curve) / 2) or 1
    result: Curve = []
    for at, (step, _) in enumerate(curve):
        near = min(reach, at, len(curve) - 1 - at)
        values = [value for _, value in curve[at - near : at + near + 1]]
        result.append((step, sum(values) / len(values)))
    return result


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers, evenly spaced, that cover low … high."""
    if high - low < 1e-12 * max(abs(high), 1):
        low, high = low - 0.5 * max(abs(low), 1), high + 0.5 * max(abs(high), 1)
    rough = (high - low) / about
    unit = 10 ** math.floor(math.log10(rough))
    gap = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first = math.floor(low / gap + 1e-9)
    last = math.ceil(high / gap - 1e-9)
    return [gap * at for at in range(first, last + 1)]


def number(value: float, all_ticks: list[float]) -> str:
    """A tick's label, with the digits that tell it from its neighbours."""
    gap = all_ticks[1] - all_ticks[0]
    digits = max(0, next(d for d in range(12) if abs(round(gap, d) - gap) < 1e-6 * gap))
    return f"{value + 0.0:,.{digits}f}".replace("-", "−")


def _mixed(colour: str, with_: str, share: float) -> tuple[int, ...]:
    one, two = ([int(text[at : at + 2], 16) for at in (1, 3, 5)] for text in (colour, with_))
    return tuple(round(share * a + (1 - share) * b) for a, b in zip(one, two, strict=True))


# ── prepared ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CARD = "README.md"


@dataclass(frozen=True, slots=True)
class PreparedUpload:
    """A complete folder, ready to be sent."""

    repo_id: str
    folder: Path

    @property
    def card(self) -> str:
        return (self.folder / CARD).read_text(encoding="utf-8")

    def files(self) -> list[tuple[str, int]]:
        """(name, bytes) of each file, largest first."""
        found = ((path.relative_to(self.folder).as_posix(), path.stat().st_size) for path in files_of(self.folder))
        return sorted(found, key=lambda row: (-row[1], row[0]))

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.files())

    def to_dict(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files()]
        return {
            "repo": self.repo_id,
            "folder": str(self.folder),
            "bytes": self.bytes,
            "files": files,
            "card": self.card,
        }

    def discard(self) -> None:
        """Delete it, once it was sent or another takes its place."""
        _record(self.folder).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def check_repo_id(repo_id: str) -> None:
    """Raise UserError for what cannot be the name of a repository."""
    try:
        validate_repo_id(repo_id)
        is_valid = repo_id.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(
            "repo",
            f"{repo_id or 'Nothing'} cannot be the name of a repository: write owner/name, of letters, digits, -, _ and full stops.",
        )


def folder_for(run: RunFolder, repo_id: str) -> Path:
    return run.uploads / repo_id.replace("/", "--")


def find_prepared(run: RunFolder, repo_id: str, made_from: Mapping[str, Any]) -> PreparedUpload | None:
    """The folder that was prepared from the same things; None where there is none."""
    folder = folder_for(run, repo_id)
    try:
        record = json.loads(_record(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return PreparedUpload(repo_id, folder) if record == dict(made_from) and (folder / CARD).is_file() else None


def finish_preparing(folder: Path, facts: CardFacts, made_from: Mapping[str, Any]) -> PreparedUpload:
    """Add card, curves and settings to a folder with the model's files, and clean it of this machine's paths. Raises UserError where
    something is left that must not leave."""
    clean_json_files(folder, facts.base)
    draw_curves(facts.curves, CURVES, folder / CURVES_FILE)
    (folder / SETTINGS_FILE).write_text(facts.settings, encoding="utf-8")
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")
    refuse_leaks(folder)
    replace_file(_record(folder), json.dumps(dict(made_from)))
    return PreparedUpload(facts.repo_id, folder)


def _record(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")
