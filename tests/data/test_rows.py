"""Dataset rows: every form gives the same ones, and what can't be read says so in one message."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from laminar.data.rows import first_row, load_rows, row_to_json
from laminar.errors import DataError

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": None}]


def write_jsonl(path: Path) -> str:
    path.write_text("\n" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n  \n", encoding="utf-8")
    return path.name


def write_parquet(path: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path.name


def write_list(path: Path) -> str:
    path.write_text(f"rows = {ROWS!r}\n")
    return f"{path.name}:rows"


def write_generator(path: Path) -> str:
    path.write_text(f"def rows():\n    yield from {ROWS!r}\n")
    return f"{path.name}:rows"


def saved(rows: list[dict[str, Any]]) -> Any:
    """A Hugging Face dataset in memory."""
    from datasets import Dataset

    return Dataset.from_list(rows)


def write_saved(path: Path) -> str:
    saved(ROWS).save_to_disk(path)
    return path.name


def write_saved_splits(path: Path) -> str:
    from datasets import DatasetDict

    DatasetDict({"train": saved([{"prompt": "t"}]), "test": saved(ROWS)}).save_to_disk(path)
    return f"{path.name}:test"


def write_object(path: Path) -> str:
    path.write_text(f"from datasets import Dataset\nrows = Dataset.from_list({ROWS!r})\n")
    return f"{path.name}:rows"


def write_stream(path: Path) -> str:
    path.write_text(f"from datasets import Dataset\nrows = Dataset.from_list({ROWS!r}).to_iterable_dataset()\n")
    return f"{path.name}:rows"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("r.jsonl", write_jsonl),
        ("r.parquet", write_parquet),
        ("list.py", write_list),
        ("gen.py", write_generator),
        ("saved", write_saved),
        ("splits", write_saved_splits),
        ("dataset.py", write_object),
        ("stream.py", write_stream),
    ],
)
def test_every_form_of_dataset_gives_the_same_rows(tmp_path: Path, name: str, write: Callable[[Path], str]) -> None:
    spec = write(tmp_path / name)
    assert load_rows(spec, tmp_path) == ROWS
    assert first_row(spec, tmp_path) == ROWS[0]


def test_first_row_reads_no_further(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    (tmp_path / "endless.py").write_text(
        "import itertools\ndef rows():\n    return ({'prompt': n} for n in itertools.count())\n"
    )
    assert first_row("r.jsonl", tmp_path) == {"prompt": "a"}
    assert first_row("endless.py:rows", tmp_path) == {"prompt": 0}


def test_the_split_is_train_if_none_is_named(tmp_path: Path) -> None:
    write_saved_splits(tmp_path / "splits")
    assert load_rows("splits", tmp_path) == [{"prompt": "t"}]


def test_a_saved_dataset_needs_no_package_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_saved(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert load_rows("saved", tmp_path) == ROWS


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("openai/gsm8k", (("openai/gsm8k",), "train")),
        ("openai/gsm8k:test", (("openai/gsm8k",), "test")),
        ("openai/gsm8k/main:train[:10%]", (("openai/gsm8k", "main"), "train[:10%]")),
    ],
)
def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, expected: object) -> None:
    asked = []

    def load_dataset(*names: str, split: str) -> list[dict[str, Any]]:
        asked.append((names, split))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_rows(spec, tmp_path) == ROWS
    assert asked == [expected]


def test_the_hub_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    for config in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="`nobody/nothing:train`: neither a folder nor a dataset") as failure:
        load_rows("nobody/nothing", tmp_path)
    assert "save_to_disk" in str(failure.value)


def test_the_hub_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"need the package `datasets`\n  fix: pip install 'laminar-rl\[datasets\]'"):
        load_rows("openai/gsm8k", tmp_path)


def test_first_row_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Fault 39: a check of the config is quick."""
    write_jsonl(tmp_path / "r.jsonl")
    code = (
        "import sys; from pathlib import Path; from laminar.data.rows import first_row;"
        "first_row('r.jsonl', Path(sys.argv[1])); print({'torch', 'transformers', 'ray', 'pyarrow'} & set(sys.modules))"
    )
    package = Path(load_rows.__code__.co_filename).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env={"PYTHONPATH": str(package)}
    )
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


FILES = {
    "broken.jsonl": '{"prompt": "a"}\n\n{"prompt": "b"\n',
    "lists.jsonl": '{"prompt": "a"}\n["b"]\n',
    "empty.jsonl": "\n",
    "bad.parquet": "not parquet",
    "rows.csv": "prompt\na\n",
    "things.py": (
        "number = 3\ntext = 'rows'\nrows = [{'prompt': 'a'}, 'b']\nnone = []\n"
        "def fails():\n    raise OSError('no disk')\n"
    ),
}


def write_latin_parquet(path: Path) -> None:
    """Text that is not UTF-8, as some writers leave it."""
    column = pyarrow.array(["é".encode("latin-1")]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "bom.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert load_rows("bom.jsonl", tmp_path) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("broken.jsonl", ["broken.jsonl:3: not valid JSON", "expected: one JSON object a line", '{"prompt": "b"']),
        ("lists.jsonl", ["lists.jsonl:2: a row must have named columns", "got: list"]),
        ("latin.jsonl", ["latin.jsonl:2: not UTF-8", "got: 'utf-8' codec can't decode byte 0xe9"]),
        ("empty.jsonl", ["the dataset has no rows"]),
        ("latin.parquet", ["latin.parquet: not a readable parquet file", "can't decode byte 0xe9"]),
        ("rows.csv", ["rows.csv: not a kind of file that is read", "a `.jsonl` or `.parquet` file"]),
        ("folder", ["folder: the folder holds no readable dataset", "expected: what `save_to_disk`", "state.json"]),
        ("saved:test", ["saved: the dataset has no split `test`", "expected: no split"]),
        ("splits:dev", ["splits: the dataset has no split `dev`", "one of train, test, as in `splits:train`"]),
        ("bad.parquet", ["bad.parquet: not a readable parquet file"]),
        ("things.py:number", ["not a dataset", "got: int"]),
        ("things.py:text", ["not a dataset", "got: str"]),
        ("things.py:rows", ["`things.py:rows`, row 2: a row must have named columns"]),
        ("things.py:none", ["the dataset has no rows"]),
        ("things.py:fails", ["the dataset's function failed", "OSError: no disk"]),
        ("things.py:absent", ["there is no `absent` in it"]),
        ("absent.jsonl", ["absent.jsonl: the dataset is not there", "fix: correct the path"]),
        ("made.jsonl", ["the dataset is not there", "fix: correct the path"]),
    ],
)
def test_bad_datasets(tmp_path: Path, spec: str, expected: list[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "e"}\n{"prompt": "é"}\n'.encode("latin-1"))
    write_latin_parquet(tmp_path / "latin.parquet")
    (tmp_path / "folder").mkdir()
    write_saved(tmp_path / "saved")
    write_saved_splits(tmp_path / "splits")
    with pytest.raises(DataError) as failure:
        load_rows(spec, tmp_path)
    for text in expected:
        assert text in str(failure.value)


@pytest.mark.parametrize("place", ["rows.jsonl", "data/rows.jsonl"])
def test_a_missing_dataset_names_the_script_that_makes_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "prepare.py").write_text("")
    for read in (load_rows, first_row):
        with pytest.raises(DataError, match=f"fix: run `python {tmp_path}/prepare.py`"):
            read(place, tmp_path)


def test_rows_become_json() -> None:
    row = {"a": np.float32(0.5), "b": np.array([1, 2]), "c": datetime.date(2026, 1, 2), "d": "é"}
    assert json.loads(row_to_json(row, "row 1")) == {"a": 0.5, "b": [1, 2], "c": "2026-01-02", "d": "é"}
    with pytest.raises(DataError, match="row 1: a column can't be stored as JSON\n  got: a bytes"):
        row_to_json({"a": b"x"}, "row 1")
    with pytest.raises(DataError, match="row 1: a column can't be stored as JSON\n  got: 'utf-8' codec can't encode"):
        row_to_json({"a": "\ud800"}, "row 1")
