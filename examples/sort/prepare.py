"""Make the sort example's data and its start model: a character model that half knows how to sort digits.

Everything goes to `build/` beside this file, `build/.done` last: without that file the output is not complete.
Takes under half a minute on one core.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BUILD = Path(__file__).parent / "build"
SEED = 0
NUM_DIGITS = 8
NUM_TRAIN, NUM_EVAL = 20_000, 100
WARM_UP_STEPS, WARM_UP_BATCH, WARM_UP_LR = 130, 64, 5e-4
LABEL_SMOOTHING = 0.27  # keeps the start model unsure: it sorts when greedy, and often errs when sampled
VOCABULARY = ["<pad>", "<bos>", "<eos>", *"0123456789="]

Row = dict[str, str]


def make_rows(num_rows: int, seed: int) -> list[Row]:
    """Distinct rows `{"prompt": "31420675=", "answer": "01234567"}`; digits may repeat."""
    rng = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < num_rows:
        prompts["".join(rng.choices("0123456789", k=NUM_DIGITS))] = None
    return [{"prompt": f"{digits}=", "answer": "".join(sorted(digits))} for digits in prompts]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; nothing is added around a prompt."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def make_model() -> LlamaForCausalLM:
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
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=VOCABULARY.index("<pad>"),
            bos_token_id=VOCABULARY.index("<bos>"),
            eos_token_id=VOCABULARY.index("<eos>"),
        )
    )


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> float:
    """Supervised steps on the answers, few and smoothed. Returns the last loss."""
    ids = torch.tensor(tokenizer([row["prompt"] + row["answer"] + "<eos>" for row in rows])["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LR)
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    loss = torch.tensor(0.0)
    for step in range(WARM_UP_STEPS):
        optimizer.param_groups[0]["lr"] = WARM_UP_LR * min(1.0, (step + 1) / 20)
        picked = torch.randint(len(ids), (WARM_UP_BATCH,), generator=generator)
        logits = model(input_ids=ids[picked, :-1]).logits[:, NUM_DIGITS:]
        loss = F.cross_entropy(
            logits.flatten(0, 1), ids[picked, NUM_DIGITS + 1 :].flatten(), label_smoothing=LABEL_SMOOTHING
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    torch.set_num_threads(1)
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir()
    rows = make_rows(NUM_TRAIN + NUM_EVAL, SEED)
    write_jsonl(BUILD / "train.jsonl", rows[:NUM_TRAIN])
    write_jsonl(BUILD / "eval.jsonl", rows[NUM_TRAIN:])
    print(f"sort: {NUM_TRAIN} training and {NUM_EVAL} evaluation rows")
    model, tokenizer = make_model(), make_tokenizer()
    loss = warm_up(model, tokenizer, rows[:NUM_TRAIN])
    model.save_pretrained(BUILD / "model")
    tokenizer.save_pretrained(BUILD / "model")
    (BUILD / ".done").touch()
    print(f"sort: a model of {model.num_parameters():,} parameters, loss {loss:.2f} after {WARM_UP_STEPS} steps")


if __name__ == "__main__":
    main()
