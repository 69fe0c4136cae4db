"""Dataset rows, from wherever the user keeps them.

Nothing here imports torch or transformers, and each format's reader is imported when it is needed, so that a config
can be checked quickly.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.config_source import is_hub_name
from laminar.errors import DataError
from laminar.user_code import resolve

Row = dict[str, Any]

FORMS = (
    "a `.jsonl` or `.parquet` file, the folder of a saved Hugging Face dataset, its name on the hub, or `file.py:name`"
)
DEFAULT_SPLIT = "train"


def load_rows(spec: str, base_folder: Path) -> Sequence[Row]:
    """All rows of a dataset.

    `spec` is a `.jsonl` or `.parquet` file, `folder[:split]` of a dataset that `save_to_disk` has written,
    `owner/name[/config][:split]` of one on the Hugging Face hub, or a list or callable named as in `resolve`.
    Nulls become None; blank lines of a JSONL file are skipped.
    Raises DataError: not there, not readable (with the line), no rows, or a row that has no columns.
    """
    rows = list(_iterate(spec, base_folder))
    if not rows:
        raise DataError("the dataset has no rows", where=f"`{spec}`")
    return rows


def first_row(spec: str, base_folder: Path) -> Row:
    """The first row, without reading the others. Raises DataError as `load_rows` does."""
    row = next(_iterate(spec, base_folder), None)
    if row is None:
        raise DataError("the dataset has no rows", where=f"`{spec}`")
    return row


def _iterate(spec: str, base_folder: Path) -> Iterator[Row]:
    source, _, split = spec.partition(":")
    path = (base_folder / source).resolve()
    if path.is_dir():
        return _saved_rows(path, split)
    if is_hub_name(source):
        return _hub_rows(source, split or DEFAULT_SPLIT)
    if ":" in spec:
        return _object_rows(resolve(spec, base_folder, error=DataError), spec)
    if not path.is_file():
        raise _missing_file(path)
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise DataError("not a kind of file that is read", where=str(path), expected=FORMS)


def _missing_file(path: Path) -> DataError:
    makers = [folder / "prepare.py" for folder in (path.parent, path.parent.parent)]
    maker = next((maker for maker in makers if maker.is_file()), None)
    return DataError(
        "the dataset is not there",
        where=str(path),
        expected=FORMS,
        fix="correct the path" if maker is None else f"run `python {maker}`, which makes it",
    )


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where, expected = f"{path}:{number}", "one JSON object a line"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as cause:
                raise DataError("not UTF-8", where=where, expected=expected, got=str(cause)) from cause
            except json.JSONDecodeError as cause:
                what = f"not valid JSON: {cause.msg} at column {cause.colno}"
                raise DataError(what, where=where, expected=expected, got=repr(cause.doc.strip()[:80])) from cause
            yield _checked_row(row, where)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as cause:
        raise DataError("not a readable parquet file", where=str(path), got=str(cause)) from cause


def _saved_rows(folder: Path, split: str) -> Iterator[Row]:
    """Rows of what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` has written, without their package."""
    import pyarrow

    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            _check_split(split or DEFAULT_SPLIT, splits, folder)
            folder /= split or DEFAULT_SPLIT
        elif split:
            _check_split(split, [], folder)
        files = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        for name in [file["filename"] for file in files]:
            with pyarrow.OSFile(str(folder / name)) as file, pyarrow.ipc.open_stream(file) as batches:
                for batch in batches:
                    yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(
            "the folder holds no readable dataset",
            where=str(folder),
            expected="what `save_to_disk` of a Hugging Face dataset writes",
            got=f"{type(cause).__name__}: {cause}",
        ) from cause


def _check_split(split: str, splits: Sequence[str], folder: Path) -> None:
    if split not in splits:
        raise DataError(
            f"the dataset has no split `{split}`",
            where=str(folder),
            expected=f"one of {', '.join(splits)}, as in `{folder.name}:{splits[0]}`" if splits else "no split",
        )


def _hub_rows(name: str, split: str) -> Iterator[Row]:
    """Rows of `owner/name[/config]`: from the cache of the `datasets` package, else downloaded into it."""
    owner, title, *config = name.split("/")
    where = f"`{name}:{split}`"
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            "datasets of the Hugging Face hub need the package `datasets`",
            where=where,
            fix="pip install 'laminar-rl[datasets]'; or correct the path, if it should be a folder",
        ) from None
    try:
        rows = load_dataset(f"{owner}/{title}", *config, split=split)
    except Exception as cause:  # a download, a builder and a parser: whatever that is, it is why there are no rows
        raise DataError(
            "neither a folder nor a dataset that the Hugging Face hub gives",
            where=where,
            expected="owner/name or owner/name/config, and a split after a colon",
            got=f"{type(cause).__name__}: {cause}",
            fix="correct the name; or load it where there is a network, `save_to_disk` it, and give the folder",
        ) from cause
    for row in rows:
        yield dict(row)


def _object_rows(found: object, spec: str) -> Iterator[Row]:
    if callable(found):
        try:
            found = found()
        except Exception as cause:  # the user's code, run once
            raise DataError(
                "the dataset's function failed", where=f"`{spec}`", got=f"{type(cause).__name__}: {cause}"
            ) from cause
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping)):
        raise DataError(
            "not a dataset",
            where=f"`{spec}`",
            expected="a list of rows, or a callable that returns an iterable of rows",
            got=type(found).__name__,
        )
    for number, row in enumerate(found, start=1):
        yield _checked_row(row, f"`{spec}`, row {number}")


def _checked_row(row: object, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError("a row must have named columns", where=where, expected="an object", got=type(row).__name__)
    return dict(row)


def row_to_json(row: Row, where: str) -> str:
    """The row as JSON; numpy values become numbers and lists, dates ISO text. Raises DataError."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=_plain)
        text.encode()
        return text
    except (TypeError, ValueError) as cause:
        raise DataError("a column can't be stored as JSON", where=where, got=str(cause)) from cause


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")
