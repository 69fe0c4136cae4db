"""Training from Python: a list of prompts, a function that scores replies. First: python examples/sort/prepare.py"""

import random
from pathlib import Path

import laminar

SORT = Path(__file__).parent / "sort"


def make_rows(num_rows: int) -> list[dict[str, str]]:
    rng = random.Random(1)
    numbers = ["".join(rng.choices("0123456789", k=8)) for _ in range(num_rows)]
    return [{"prompt": f"{digits}=", "answer": "".join(sorted(digits))} for digits in numbers]


def right_places(completions: list[str], answer: list[str]) -> list[float]:
    """Share of places that are right, over the longer of response and answer."""
    return [
        sum(a == b for a, b in zip(given, right, strict=False)) / max(len(given), len(right))
        for given, right in zip(completions, answer, strict=True)
    ]


if __name__ == "__main__":
    laminar.Trainer(
        model=SORT / "build" / "model",
        reward_funcs=right_places,
        train_dataset=make_rows(1_000),
        config={"iterations": 20, "rollout": {"max_new_tokens": 12}, "train": {"lr": 2e-4, "warmup_steps": 20}},
    ).train()
