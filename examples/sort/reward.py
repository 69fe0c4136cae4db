"""The reward of the sort example."""


def reward(completions: list[str], answer: list[str]) -> list[float]:
    """Share of places that are right, over the longer of response and answer: between 0 and 1.

    Dividing by the longer one puts a price on length; without it the policy soon learns to go on for ever.
    """
    return [
        sum(given == right for given, right in zip(completion, expected, strict=False))
        / max(len(completion), len(expected), 1)
        for completion, expected in zip(completions, answer, strict=True)
    ]
