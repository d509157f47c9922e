"""A picture made of a few shapes, written as SVG or, through Pillow, as PNG. Sizes are pixels, y grows downwards."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from services.common.settings import SettingsError

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, sans-serif"
_SCALE = 3  # a PNG is drawn larger than it will be, and made smaller: that smooths its edges
_SHARPNESS = 2  # pixels of the PNG per pixel of the picture
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PILLOW_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


@dataclass(slots=True, frozen=True)
class Area:
    """A filled outline."""

    points: Sequence[Point]
    fill: str


@dataclass(slots=True, frozen=True)
class Line:
    """Straight strokes from point to point."""

    points: Sequence[Point]
    stroke: str
    width: float
    dashed: bool


@dataclass(slots=True, frozen=True)
class Label:
    """One line of text; `at` is on its base line."""

    at: Point
    text: str
    size: float
    fill: str
    anchor: Anchor
    bold: bool


class Canvas:
    """Shapes in the order in which they are drawn, on white."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._shapes: list[Area | Line | Label] = []

    def area(self, points: Sequence[Point], fill: str) -> None:
        """Fills an outline."""
        self._shapes.append(Area(points, fill))

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Fills a rectangle."""
        self.area([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], fill)

    def line(self, points: Sequence[Point], stroke: str, width: float = 1.0, dashed: bool = False) -> None:
        """Draws strokes."""
        self._shapes.append(Line(points, stroke, width, dashed))

    def label(
        self, at: Point, text: str, fill: str, *, size: float = 12, anchor: Anchor = "start", bold: bool = False
    ) -> None:
        """Writes text; `at` is on its base line."""
        self._shapes.append(Label(at, text, size, fill, anchor, bold))

    def write(self, path: Path) -> None:
        """Writes the file, of the kind that its ending says."""
        if path.suffix.lower() == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
        else:
            self._write_png(path)

    def svg(self) -> str:
        """The picture as an SVG document."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        shapes = [_svg(shape) for shape in self._shapes]
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}">'
        return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *shapes, "</svg>", ""])

    def _write_png(self, path: Path) -> None:
        from PIL import Image, ImageDraw, ImageFont

        def scaled(points: Sequence[Point]) -> list[Point]:
            return [(x * zoom, y * zoom) for x, y in points]

        zoom = _SCALE * _SHARPNESS
        image = Image.new("RGB", (self.width * zoom, self.height * zoom), "#ffffff")
        draw = ImageDraw.Draw(image)
        for shape in self._shapes:
            if isinstance(shape, Area):
                draw.polygon(scaled(shape.points), fill=shape.fill)
            elif isinstance(shape, Line):
                for stroke in _dashes(shape.points) if shape.dashed else [shape.points]:
                    draw.line(scaled(stroke), fill=shape.stroke, width=round(shape.width * zoom), joint="curve")
            else:
                font = ImageFont.load_default(shape.size * zoom)
                weight = round(0.03 * shape.size * zoom) if shape.bold else 0
                draw.text(
                    scaled([shape.at])[0],
                    shape.text,
                    fill=shape.fill,
                    font=font,
                    anchor=_PILLOW_ANCHORS[shape.anchor],
                    stroke_width=weight,
                )
        image.resize((self.width * _SHARPNESS, self.height * _SHARPNESS), Image.Resampling.BOX).save(
            path, optimize=True
        )


def check_target(path: Path, option: str) -> None:
    """Refuses, before any work is done, a file that a picture could not be written to."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise SettingsError(f"{option}: {path} ends neither in .svg nor in .png")
    if kind == ".png" and importlib.util.find_spec("PIL") is None:
        raise SettingsError(f"{option}: a PNG needs Pillow (pip install 'triptych[cli]'); an SVG needs nothing")
    if not path.parent.is_dir():
        raise SettingsError(f"{option}: there is no folder {path.parent}")
    if path.is_dir():
        raise SettingsError(f"{option}: {path} is a folder")


def _svg(shape: Area | Line | Label) -> str:
    if isinstance(shape, Area):
        return f'<polygon points="{_points(shape.points)}" fill="{shape.fill}"/>'
    if isinstance(shape, Line):
        dashes = ' stroke-dasharray="5 4"' if shape.dashed else ""
        return (
            f'<polyline points="{_points(shape.points)}" fill="none" stroke="{shape.stroke}" '
            f'stroke-width="{shape.width:g}" stroke-linejoin="round"{dashes}/>'
        )
    weight = ' font-weight="600"' if shape.bold else ""
    text = _NO_XML.sub("\N{REPLACEMENT CHARACTER}", shape.text)
    return (
        f'<text x="{shape.at[0]:.1f}" y="{shape.at[1]:.1f}" font-size="{shape.size:g}" fill={quoteattr(shape.fill)} '
        f'text-anchor="{shape.anchor}"{weight}>{escape(text)}</text>'
    )


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _dashes(points: Sequence[Point]) -> list[list[Point]]:
    """A level line cut in dashes, as SVG does by itself."""
    (x, y), (end, _) = points[0], points[-1]
    starts = range(round(x), round(end), 9)
    return [[(start, y), (min(start + 5, end), y)] for start in starts]
