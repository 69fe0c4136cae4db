"""Make the sort example's data and its start model: a character model that half knows how to sort digits.

Everything goes to `build/` beside this file, `build/.done` last: without that file the output is not complete.
Takes under half a minute on one core. With `--long-tail`: the same for `long_tail.toml`, in `build/long_tail/`, with
lists of all lengths; takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BUILD = Path(__file__).parent / "build"
SEED = 0
NUM_DIGITS = 8
MEDIAN_DIGITS, MAX_DIGITS, SPREAD = 6, 48, 0.9  # of the long tail: one list in twenty has more than 25 digits
NUM_TRAIN, NUM_EVAL = 20_000, 100
WARM_UP_STEPS, WARM_UP_BATCH, WARM_UP_LR = 130, 64, 5e-4
LONG_TAIL_WARM_UP_STEPS = 400
LABEL_SMOOTHING = 0.27  # keeps the start model unsure: it sorts when greedy, and often errs when sampled
VOCABULARY = ["<pad>", "<bos>", "<eos>", *"0123456789="]

NO_TARGET = -100  # what cross_entropy passes over

Row = dict[str, str]


def same_length(rng: random.Random) -> int:
    return NUM_DIGITS


def long_tail(rng: random.Random) -> int:
    """Most lists are short, some are very long: log-normal."""
    return min(MAX_DIGITS, max(2, round(rng.lognormvariate(math.log(MEDIAN_DIGITS), SPREAD))))


def make_rows(num_rows: int, seed: int, num_digits: Callable[[random.Random], int] = same_length) -> list[Row]:
    """Distinct rows `{"prompt": "31420675=", "answer": "01234567"}`; digits may repeat."""
    rng = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < num_rows:
        prompts["".join(rng.choices("0123456789", k=num_digits(rng)))] = None
    return [{"prompt": f"{digits}=", "answer": "".join(sorted(digits))} for digits in prompts]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; nothing is added around a prompt."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def make_model(max_tokens: int = 64) -> LlamaForCausalLM:
    """A Llama of 0.85 million parameters with random weights."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=max_tokens,
            tie_word_embeddings=True,
            pad_token_id=VOCABULARY.index("<pad>"),
            bos_token_id=VOCABULARY.index("<bos>"),
            eos_token_id=VOCABULARY.index("<eos>"),
        )
    )


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row], num_steps: int) -> float:
    """Supervised steps on the answers, few and smoothed. Returns the last loss."""
    encoded = tokenizer([row["prompt"] + row["answer"] + "<eos>" for row in rows])["input_ids"]
    ids = pad_sequence([torch.tensor(row) for row in encoded], batch_first=True)
    place = torch.arange(ids.shape[1])
    prompts = torch.tensor([[len(row["prompt"])] for row in rows])
    lengths = torch.tensor([[len(row)] for row in encoded])
    targets = ids.masked_fill((place < prompts) | (place >= lengths), NO_TARGET)
    first = int(prompts.min())
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LR)
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    loss = torch.tensor(0.0)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = WARM_UP_LR * min(1.0, (step + 1) / 20)
        picked = torch.randint(len(ids), (WARM_UP_BATCH,), generator=generator)
        logits = model(input_ids=ids[picked, :-1]).logits[:, first - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[picked, first:].flatten(), label_smoothing=LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path, rows: list[Row], model: LlamaForCausalLM, num_steps: int) -> None:
    """Data, start model and tokenizer in `folder`."""
    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_jsonl(folder / "train.jsonl", rows[:NUM_TRAIN])
    write_jsonl(folder / "eval.jsonl", rows[NUM_TRAIN:])
    print(f"sort: {NUM_TRAIN} training and {NUM_EVAL} evaluation rows")
    tokenizer = make_tokenizer()
    loss = warm_up(model, tokenizer, rows[:NUM_TRAIN], num_steps)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / ".done").touch()
    print(f"sort: a model of {model.num_parameters():,} parameters, loss {loss:.2f} after {num_steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long-tail", action="store_true", help="for long_tail.toml")
    rows = partial(make_rows, NUM_TRAIN + NUM_EVAL, SEED)
    if parser.parse_args().long_tail:
        make(BUILD / "long_tail", rows(long_tail), make_model(128), LONG_TAIL_WARM_UP_STEPS)
    else:
        make(BUILD, rows(), make_model(), WARM_UP_STEPS)


if __name__ == "__main__":
    main()
