"""Line charts as SVG: panels with axes, ticks and a legend, for the pictures that commands and examples draw.

A chart is text made from numbers alone, so the same numbers give the same file, and nothing has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Told apart by colour-blind people too (Okabe and Ito)."""
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
"""Margins of a panel in pixels."""
CHARACTER, GAP = 7.0, 18
"""Width of a character of 12 pixels, about; between two names of a legend."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    points: Sequence[Point]
    """In the order of x."""
    name: str = ""
    """In the legend, if there is one."""
    dashed: bool = False
    colour: int | None = None
    """Index into `COLOURS`; None: its place among the lines of the panel."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: Sequence[Line]
    x_label: str = ""
    x_ticks: Sequence[tuple[float, str]] | None = None
    """(x, label); None: round numbers."""
    steps: bool = False
    """A value holds until the next one."""


def chart(panels: Sequence[Panel], columns: int = 1, width: int = 480, height: int = 240) -> str:
    """An SVG file with the panels row by row, each `width` x `height` pixels. Raises ValueError without a point."""
    rows = ceil(len(panels) / columns)
    size = f'width="{width * columns}" height="{height * rows}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width * columns} {height * rows}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        out += [f'<g transform="translate({column * width} {row * height})">', *_panel(panel, width, height), "</g>"]
    return "\n".join([*out, "</svg>\n"])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that enclose `low` … `high`."""
    span = (high - low) or abs(high) or 1.0
    rough = span / count
    power = 10.0 ** floor(log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def label(value: float) -> str:
    """`1500000` is 1.5M, `0.25` is 0.25."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _panel(panel: Panel, width: int, height: int) -> Iterator[str]:
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    if not xs:
        raise ValueError(f"nothing to draw in {panel.title!r}")
    y_marks = ticks(min(0.0, *ys), max(0.0, *ys))
    x_low, x_high = min(xs if panel.x_ticks is not None else (0.0, *xs)), max(xs)
    marks = [(x, label(x)) for x in ticks(x_low, x_high) if x_low <= x <= x_high]
    x_marks = marks if panel.x_ticks is None else panel.x_ticks

    def at(x: float, y: float) -> Point:
        across = (x - x_low) / ((x_high - x_low) or 1.0)
        up = (y - y_marks[0]) / (y_marks[-1] - y_marks[0])
        return LEFT + across * (width - LEFT - RIGHT), height - BOTTOM - up * (height - TOP - BOTTOM)

    yield f'<text x="{LEFT}" y="18" font-weight="bold">{escape(panel.title)}</text>'
    for y in y_marks:
        _, down = at(x_low, y)
        yield f'<path d="M{LEFT} {down:.1f}H{width - RIGHT}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{label(y)}</text>'
    for x, name in x_marks:
        across, _ = at(x, 0)
        yield f'<path d="M{across:.1f} {height - BOTTOM}v4" stroke="#888"/>'
        yield f'<text x="{across:.1f}" y="{height - BOTTOM + 17}" text-anchor="middle">{escape(name)}</text>'
    middle = (LEFT + width - RIGHT) / 2
    yield f'<text x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{escape(panel.x_label)}</text>'
    for number, line in enumerate(panel.lines):
        points = [at(x, y) for x, y in line.points]
        yield f'<path d="{_path(points, panel.steps)}" fill="none" {_stroke(line, number)}/>'
    yield from _legend(panel, width)


def _path(points: Sequence[Point], steps: bool) -> str:
    (x, y), *rest = points or [(0.0, 0.0)]
    to = "".join(f"H{a:.1f}V{b:.1f}" if steps else f"L{a:.1f} {b:.1f}" for a, b in rest)
    return f"M{x:.1f} {y:.1f}{to}"


def _stroke(line: Line, number: int) -> str:
    colour = COLOURS[(number if line.colour is None else line.colour) % len(COLOURS)]
    return f'stroke="{colour}" stroke-width="2" stroke-linejoin="round"' + ' stroke-dasharray="5 4"' * line.dashed


def _legend(panel: Panel, width: int) -> Iterator[str]:
    """Names in one row, right of the title."""
    named = [(number, line) for number, line in enumerate(panel.lines) if line.name]
    x = width - RIGHT - sum(24 + CHARACTER * len(line.name) + GAP for _, line in named) + GAP
    for number, line in named:
        yield f'<path d="M{x:.1f} 14h18" fill="none" {_stroke(line, number)}/>'
        yield f'<text x="{x + 24:.1f}" y="18">{escape(line.name)}</text>'
        x += 24 + CHARACTER * len(line.name) + GAP
