"""Reading a task's data from files instead of the hub.

A folder DIR holds `DIR/hub/<dataset id>/data/<config>/<split>.jsonl.gz` (or .jsonl, or .parquet; `data/` or the config's folder
may be missing, as in the datasets' own repositories; shards are named `<split>-00000-of-00002.parquet`) and
`DIR/recall/<name>.jsonl.gz`. Files are read whole and checked: a line that is not a JSON object with the columns of the first
one is an error that names file and line; nothing but blank lines is skipped.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXTENSIONS = (".jsonl", ".jsonl.gz", ".parquet")


class MissingData(Exception):
    """No file of a split; the message says where it was looked for and what to put there."""


class BrokenData(Exception):
    """A file that can't be read as a table; the message names the file and the line."""


@dataclass(frozen=True)
class Source:
    """A split of a dataset on the hub, or of a file under recall/."""

    dataset: str  # hub id; or "recall/<name>"
    config: str | None = None
    split: str = "test"
    columns: tuple[str, ...] = ()  # that its rows must have

    @property
    def is_local(self) -> bool:
        """Whether it exists as a file alone."""
        return self.dataset.startswith("recall/")

    def with_split(self, split: str) -> Source:
        return Source(self.dataset, self.config, split, self.columns)


def find(data: Path, source: Source) -> list[Path]:
    """The files of a source, in order; MissingData if there is none."""
    if source.is_local:
        folders, stem = [data / "recall"], source.dataset.removeprefix("recall/")
    else:
        base, stem = data / "hub" / source.dataset, source.split
        config = source.config or "default"
        folders = [base / "data" / config, base / config]
        if config == "default":
            folders += [base / "data", base]
    for folder in folders:
        for extension in EXTENSIONS:
            whole = folder / f"{stem}{extension}"
            if whole.is_file():
                return [whole]
            shards = sorted(folder.glob(f"{stem}-*-of-*{extension}")) if folder.is_dir() else []
            if shards:
                return shards
    usual = folders[2 if len(folders) > 2 else 0] / f"{stem}.jsonl.gz"
    what = f"the {source.split} split of {source.dataset}" + (f", configuration {source.config}" if source.config else "")
    columns = f" with {', '.join(source.columns)}" if source.columns else ""
    kinds = "a JSON object a line (.jsonl, .jsonl.gz) or .parquet"
    raise MissingData(f"no {usual}: put {'that file' if source.is_local else what} there, {kinds}{columns}")


def read(paths: Sequence[Path], columns: Iterable[str] = ()) -> Any:
    """The rows of some files as a `datasets.Dataset`."""
    import datasets
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    for path in paths:
        for place, row in _parquet(path) if path.suffix == ".parquet" else _lines(path):
            expected = rows[0].keys() if rows else dict.fromkeys(columns).keys()
            lacking = sorted(expected - row.keys())
            if lacking:
                raise BrokenData(f"{place}: no {', '.join(map(repr, lacking))}; got the columns {', '.join(row)}")
            if rows and row.keys() - expected:
                extra = ", ".join(map(repr, sorted(row.keys() - expected)))
                raise BrokenData(f"{place}: {extra} is in no line before it; expected the same columns in every line")
            rows.append(row)
    if not rows:
        raise BrokenData(f"{paths[0]}: no rows")
    try:
        return datasets.Dataset.from_list(rows)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise BrokenData(f"{paths[0]}: columns of mixed types: {error}") from error


def load(data: Path, source: Source) -> Any:
    return read(find(data, source), source.columns)


def splits(data: Path, source: Source, others: Iterable[str | None]) -> dict[str, Any]:
    """The source's split, which must be there, and those others that are."""
    found = {source.split: load(data, source)}
    for split in others:
        if split is not None and split not in found:
            try:
                paths = find(data, source.with_split(split))
            except MissingData:
                continue
            found[split] = read(paths, source.columns)
    return found


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and content of each line."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise BrokenData(f"{place}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise BrokenData(f"{place}: expected a JSON object; got {type(row).__name__}")
                yield place, row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BrokenData(f"{path}: not a whole gzip file: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise BrokenData(f"{path}: not a whole parquet file: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row
