#!/usr/bin/env python3
"""Draw the app's icon: a curve that rises through groups of points, those above it blue and those below orange.

    python packaging/icon.py        writes resources/icons/app/: app.svg, PNGs of 16 to 1024 pixels, and app.icns

It is what GRPO does: a group of completions, each better or worse than the mean of its group, and a mean that rises.
The body is Apple's grid for icons: 824 of 1024 units wide with corners of 185. Small sizes are drawn anew with fewer
and larger shapes, as a large drawing scaled down would blur. Needs PySide6 and Pillow (`pip install -e '.[release]'`);
the files are committed, so building needs neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "resources" / "icons" / "app"
SIZES = (16, 32, 48, 64, 128, 256, 512, 1024)

INDIGO, WHITE, BLUE, ORANGE = "#2e3aa5", "#ffffff", "#7fc8ff", "#ffb259"
SIDE, MARGIN, CORNER = 1024, 100, 185
CURVE = ((214, 642), (460, 642), (530, 392), (810, 378))
"""Cubic Bézier curve: start, two control points, end; y points down."""


@dataclass(frozen=True)
class Drawing:
    """How much is drawn at a size. `columns` are places on the curve, 0 … 1; `spread` the distances of a group's points
    from it, which shrink towards the end as a policy that learns grows sure."""

    line: float
    radius: float
    columns: tuple[float, ...]
    spread: tuple[float, ...]
    margin: float = MARGIN
    corner: float = CORNER


FULL = Drawing(line=52, radius=36, columns=(0.17, 0.5, 0.81), spread=(-208, -116, 116, 208))
MEDIUM = Drawing(line=68, radius=58, columns=(0.22, 0.76), spread=(-210, 210), margin=64, corner=200)
SMALL = Drawing(line=112, radius=92, columns=(0.2, 0.8), spread=(-250, 250), margin=32, corner=216)


def drawing(size: int) -> Drawing:
    """The drawing for an icon of `size` pixels."""
    return SMALL if size <= 16 else MEDIUM if size <= 48 else FULL


def svg(size: int) -> str:
    """The icon's source for `size` pixels; its own units are 1024 whatever the size."""
    how = drawing(size)
    start, first, second, end = (f"{x} {y}" for x, y in CURVE)
    width = SIDE - 2 * how.margin
    shapes = [
        f'<rect x="{how.margin}" y="{how.margin}" width="{width}" height="{width}" rx="{how.corner}" fill="{INDIGO}"/>',
        f'<path d="M{start} C{first} {second} {end}" fill="none" stroke="{WHITE}" '
        f'stroke-width="{how.line}" stroke-linecap="round"/>',
        *points(how),
    ]
    body = "\n".join(f"  {shape}" for shape in shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}">\n{body}\n</svg>\n'


def points(how: Drawing) -> Iterator[str]:
    """A circle for each point of each group."""
    for place in how.columns:
        x, y = on_curve(place)
        for distance in how.spread:
            above = distance < 0
            height = y + distance * (1.1 - 0.3 * place)
            yield f'<circle cx="{x:.0f}" cy="{height:.0f}" r="{how.radius}" fill="{BLUE if above else ORANGE}"/>'


def on_curve(t: float) -> tuple[float, float]:
    """The point of CURVE at parameter t, 0 … 1."""
    weights = ((1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3)
    x, y = (sum(weight * point[axis] for weight, point in zip(weights, CURVE, strict=True)) for axis in (0, 1))
    return x, y


def write_png(size: int) -> Path:
    from PySide6.QtCore import QByteArray, Qt
    from PySide6.QtGui import QImage, QPainter
    from PySide6.QtSvg import QSvgRenderer

    image = QImage(size, size, QImage.Format.Format_ARGB32)
    image.fill(Qt.GlobalColor.transparent)
    painter = QPainter(image)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    QSvgRenderer(QByteArray(svg(size).encode())).render(painter)
    painter.end()
    path = FOLDER / f"{size}.png"
    image.save(str(path), None, 0)  # the strongest compression
    return path


def write_icns(pngs: dict[int, Path]) -> None:
    """One file with every size that macOS asks for; where a size has no picture of its own Pillow would scale the
    largest."""
    from PIL import Image

    largest, *others = (Image.open(pngs[size]) for size in sorted(pngs, reverse=True))
    largest.save(FOLDER / "app.icns", append_images=others)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "app.svg").write_text(svg(max(SIZES)), encoding="utf-8")
    write_icns({size: write_png(size) for size in SIZES})


if __name__ == "__main__":
    main()
