"""What a program prints under two hash seeds: the same, if it walks over no set and orders nothing by identity."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def printed_under_two_hash_seeds(code: str) -> tuple[str, str]:
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    return first, second
