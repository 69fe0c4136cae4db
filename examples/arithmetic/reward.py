"""The reward of the arithmetic example."""

import re

Message = dict[str, str]


def reward(completions: list[list[Message]], answer: list[str]) -> list[float]:
    """1 if the last whole number of the reply is the answer, else 0. The way there is the model's own business."""
    return [
        float(last_number(completion[-1]["content"]) == int(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def last_number(text: str) -> int | None:
    """The last number in the text, `None` if there is none. A number that goes on after a point is not whole."""
    numbers = re.findall(r"(?<![\d.])-?\d+(?:\.\d+)?", text)
    return int(numbers[-1]) if numbers and "." not in numbers[-1] else None
