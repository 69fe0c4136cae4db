"""`laminar train` as a user runs it, seen from outside through its run folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from laminar.run_folder import NODE, RunFolder, read_jsonl
from laminar.runtime import guard

LAMINAR = Path(sys.executable).with_name("laminar")


@dataclass
class Command:
    """A run in a process group of its own, which may be started again to go on."""

    folder: RunFolder
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def output(self) -> Path:
        """What it has printed."""
        return self.folder.path.parent / "output"

    def start(self, *arguments: str | Path, **environment: str) -> None:
        self.output.parent.mkdir(exist_ok=True)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [LAMINAR, "train", *arguments],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **environment},
            )

    @property
    def goes_on(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def num_rows(self) -> int:
        return sum(1 for _ in read_jsonl(self.folder.metrics))

    def end(self) -> None:
        """Leave nothing, whatever has happened."""
        if self.process is not None and self.goes_on:
            self.process.kill()
            self.process.wait()
        guard.kill_marked(self.folder.tag)
        shutil.rmtree(self.folder.slots(NODE), ignore_errors=True)
