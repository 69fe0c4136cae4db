"""What benchmarks/against_trl.py runs in TRL's own environment: GRPOTrainer, a line of JSON a step.

python trl_script.py OUT MODEL ROWS REWARD_FILE OPTIONS; OPTIONS are GRPOConfig's, as JSON.
"""

import importlib.util
import json
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Log(TrainerCallback):
    """Appends the mean reward of each step."""

    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in (logs or {}):
            with self.path.open("a") as file:
                file.write(json.dumps({"reward_mean": logs["reward"]}) + "\n")


def main():
    out, model, rows, reward_file, options = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("reward", reward_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(completions, answer, **kwargs):
        return module.reward(completions, answer)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(Path(out) / "trl"),
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **json.loads(options),
        ),
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        callbacks=[Log(Path(out) / "steps.jsonl")],
    )
    trainer.train()


if __name__ == "__main__":
    main()
