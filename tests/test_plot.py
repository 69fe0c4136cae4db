"""Line charts as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from laminar.plot import Line, Panel, chart, label, ticks

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 84_300, [0, 20_000, 40_000, 60_000, 80_000, 100_000]),
        (0, 0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3, 3, [-4, -2, 0, 2, 4]),
        (0, 0, [0, 0.2]),
        (5, 5, [5, 6]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (0.25, "0.25"), (1500, "1.5k"), (2e6, "2M"), (3e9, "3G"), (-2000, "-2k")]
)
def test_labels(value: float, expected: str) -> None:
    assert label(value) == expected


def test_a_panel_has_title_names_and_places_its_points() -> None:
    lines = [Line([(0, 0), (10, 100)], "a < b"), Line([(0, 50), (10, 50)], "c", dashed=True)]
    svg = chart([Panel("title", lines, "x")], width=480, height=240)
    assert {"title", "x", "a < b", "c", "100", "10"} <= set(texts(svg))
    paths = [element.get("d") for element in ElementTree.fromstring(svg).iter(f"{SVG}path")]
    assert "M64.0 196.0L464.0 34.0" in paths, "from the lower left corner to the upper right one"
    assert "M64.0 115.0L464.0 115.0" in paths
    assert svg.count("stroke-dasharray") == 2, "the line and its name"


def test_steps_hold_their_value() -> None:
    svg = chart([Panel("t", [Line([(0, 0), (10, 100)])], steps=True)])
    assert "M64.0 196.0H464.0V34.0" in svg


def test_places_of_ones_own_are_not_filled_up_to_zero() -> None:
    svg = chart([Panel("t", [Line([(1, 1), (2, 2)])], x_ticks=[(1, "64"), (2, "128")])])
    assert {"64", "128"} <= set(texts(svg)) and "M64.0 115.0L464.0 34.0" in svg


def test_panels_stand_in_columns() -> None:
    panel = Panel("t", [Line([(0, 1)])])
    root = ElementTree.fromstring(chart([panel] * 3, columns=2, width=100, height=90))
    assert (root.get("width"), root.get("height")) == ("200", "180")
    assert [g.get("transform") for g in root.iter(f"{SVG}g")] == [
        "translate(0 0)", "translate(100 0)", "translate(0 90)",
    ]  # fmt: skip


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to draw in 'empty'"):
        chart([Panel("empty", [Line([])])])
