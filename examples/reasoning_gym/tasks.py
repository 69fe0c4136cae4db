"""A reasoning-gym task as the training set, and its own scorer as the reward."""

from typing import Any

import reasoning_gym

Rows = list[dict[str, Any]]


def make_task(size: int, seed: int) -> Any:
    """Sums and differences of two numbers. Question i is made from seed + i, so seeds have to lie apart."""
    return reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )


TRAIN, EVAL = make_task(4_000, seed=0), make_task(64, seed=1_000_000)


def train() -> Rows:
    return [{"prompt": entry["question"], "entry": entry} for entry in TRAIN]


def evaluation() -> Rows:
    """Other questions than those of the training set."""
    known = {entry["question"] for entry in TRAIN}
    return [{"prompt": entry["question"], "entry": entry} for entry in EVAL if entry["question"] not in known]


def score(completions: list[str], entry: Rows) -> list[float]:
    """1 for the right answer alone, a part of it if it stands among other words."""
    return [TRAIN.score_answer(answer.strip(), right) for answer, right in zip(completions, entry, strict=True)]
