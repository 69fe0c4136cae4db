"""The golden prompt: the witness that an engine uses the weights it loaded.

Trainer and engine both compute, at temperature 1, the log-probs of `golden_ids(...)[1:]`, each given the ids
before it (63 numbers for 64 ids). The trainer's numbers travel with each version; the engine compares after
every load.
"""

from __future__ import annotations

GOLDEN_LENGTH = 64


def golden_ids(vocab_size: int, max_length: int = GOLDEN_LENGTH) -> list[int]:
    """Fixed ids spread over the vocabulary: floor(i * vocab_size / 64) for i in 0..63.

    Args:
        vocab_size: rows of the model's output layer.
        max_length: the model's longest context; the list is cut there, so that both sides can run it.
    """
    return [i * vocab_size // GOLDEN_LENGTH for i in range(min(GOLDEN_LENGTH, max_length))]
