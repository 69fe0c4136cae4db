"""What must hold for the numbers of real runs: who generated what, and what asynchrony must not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar import reports
from tests.runtime.conftest import Run, fingerprints, sort_config, write_rows

pytestmark = pytest.mark.timeout(900)
"""Real processes on a machine that may be busy: the deadlines inside say what did not come."""


@pytest.mark.parametrize(
    ("how", "replicas"),
    [
        ("max_staleness=0", 2),
        pytest.param("max_staleness=0", 1, marks=pytest.mark.slow),
        pytest.param("schedule=sync", 2, marks=pytest.mark.slow),
    ],
)
def test_no_staleness_is_sync_bit_for_bit(run: Run, how: str, replicas: int) -> None:
    """Invariant 8 and fault 31: `max_staleness=0` gives the weights of `schedule="sync"`, whatever the replicas."""
    runs = [
        run(sort_config("iterations=4", f"rollout.replicas={n}", rule), name=f"{rule}-{n}")
        for rule, n in (("schedule=sync", 1), (how, replicas))
    ]
    expected = fingerprints(runs[0])
    assert sorted(expected) == list(range(5)) and len(set(expected.values())) == 4 + (expected[0] != expected[1])
    for outcome in runs:
        assert fingerprints(outcome) == expected
        assert [row["staleness_use_max"] for row in outcome.metrics] == [0] * 4


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_engine_and_trainer_agree_on_log_probs(run: Run, temperature: float) -> None:
    """Fault 35: with lr 0 the gap between behaviour and trainer log-probs is at most 1e-5, in every iteration."""
    outcome = run(sort_config("iterations=20", "schedule=sync", "train.lr=0.0", f"rollout.temperature={temperature}"))
    gaps = [row["logprob_gap_max"] for row in outcome.metrics]
    assert len(gaps) == 20 and max(gaps) <= 1e-5 / temperature, "the logits are divided by it, and their errors too"


def test_staleness_stays_within_the_bound(run: Run) -> None:
    """Invariant 7: asynchronous runs are stale, but never beyond the bound, and every row says how much."""
    outcome = run(sort_config("iterations=12", "max_staleness=1", "rollout.replicas=2"))
    assert outcome.code == 0
    ages = [row["staleness_use_max"] for row in outcome.metrics]
    assert max(ages) == 1 and [row["version"] for row in outcome.metrics] == list(range(1, 13))


@pytest.mark.parametrize(("last_batch", "sizes", "dropped"), [("train", [16, 16, 8], 0), ("drop", [16, 16], 8)])
def test_data_that_ends_ends_the_run(run: Run, tmp_path: Path, last_batch: str, sizes: list[int], dropped: int) -> None:
    """Faults 3, 9 and 13: one epoch of 10 prompts in batches of 4 groups; the rest is trained or dropped, as asked."""
    rows = [{"prompt": f"{n:08d}=", "answer": "".join(sorted(f"{n:08d}"))} for n in range(10)]
    data = write_rows(tmp_path / "ten.jsonl", rows)
    outcome = run(
        sort_config(f"data.train={data}", "data.epochs=1", "iterations=none", f"data.last_batch={last_batch}")
    )
    assert outcome.code == 0
    assert [row["num_samples"] for row in outcome.metrics] == sizes
    assert reports.ledger(outcome.folder)["samples"]["dropped"] == ({"data_exhausted": dropped} if dropped else {})
