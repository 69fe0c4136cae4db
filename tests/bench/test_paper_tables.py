"""`benchmarks/paper_tables.py` in small: one cell is simulated, and the bounds find what is out of them."""

from __future__ import annotations

from benchmarks.paper_tables import (
    BASELINES,
    CELL_BOUND,
    GPUS,
    THROUGHPUT,
    Cell,
    Tables,
    broken_bounds,
    cell_of,
    speed_up_over,
)


def tables(errors: dict[tuple[str, str, int], float]) -> Tables:
    """As if the simulator were right but for these errors by model, schedule and GPUs."""
    return {
        (model, schedule): [
            Cell(paper * (1 + errors.get((model, schedule, gpus), 0.0)), paper)
            for gpus, paper in zip(GPUS[model], papers, strict=True)
        ]
        for (model, schedule), papers in THROUGHPUT.items()
    }


def broken(errors: dict[tuple[str, str, int], float], gain: float = 0.26) -> list[str]:
    wrong = tables(errors)
    speed_ups = {name: speed_up_over(name, wrong) for name in BASELINES}
    return list(broken_bounds(wrong, speed_ups, Cell(gain, 0.26)))


def test_a_cell_that_is_not_fitted_is_within_the_bound() -> None:
    cell = cell_of("72b", "laminar", GPUS["72b"].index(1024))
    assert cell.paper == 149.2
    assert abs(cell.error) < CELL_BOUND


def test_nothing_is_broken_if_all_is_as_in_the_paper() -> None:
    assert broken({}) == []
    assert broken({(m, "partial", gpus): 1.0 for m in GPUS for gpus in GPUS[m]}) == [], "partial has no bound"


def test_a_cell_a_row_an_average_and_the_gain_of_repack_have_bounds() -> None:
    assert broken({("72b", "sync", 512): -0.26}) == ["72b sync on 512: -26.0%"]
    row = broken({("32b", "stream", gpus): (-1) ** i * 0.11 for i, gpus in enumerate(GPUS["32b"])})
    assert row == ["32b stream: mean error 11.0%"]
    average = broken({(m, "one_step", gpus): -0.095 for m in GPUS for gpus in GPUS[m]})
    assert average == ["speed-up over one_step: +10.5%"]
    assert broken({}, gain=0.2) == ["repack gains 20.0% in generation"]
