"""A script for TRL's GRPOTrainer: only the import has changed. First: python examples/sort/prepare.py"""

import re
from pathlib import Path

from datasets import load_dataset

from laminar.trl import GRPOConfig, GRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer

BUILD = Path(__file__).parent / "sort" / "build"


def places_reward(completions, answer, **kwargs):
    """Share of places that are right, over the longer of response and answer."""
    return [
        sum(a == b for a, b in zip(given, right, strict=False)) / max(len(given), len(right))
        for given, right in zip(completions, answer, strict=True)
    ]


def digits_reward(completions, **kwargs):
    return [1.0 if re.fullmatch(r"\d{8}", completion) else 0.0 for completion in completions]


def main():
    dataset = load_dataset("json", data_files=str(BUILD / "train.jsonl"), split="train")
    training_args = GRPOConfig(
        output_dir="sort-grpo",
        learning_rate=2e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=12,
        max_steps=20,
        reward_weights=[1.0, 0.1],
        logging_steps=1,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=str(BUILD / "model"),
        reward_funcs=[places_reward, digits_reward],
        args=training_args,
        train_dataset=dataset,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
