"""Documents from text, JSONL and Parquet files and from Hugging Face datasets, in blocks that worker processes can take.

    .txt             one document a file, or several with a line between them that holds a form feed alone
    .jsonl           one object a line, the text in one of its fields; blank lines count for nothing
    .parquet         the text in one of its columns
    hf:owner/name    a Hugging Face dataset, streamed; hf:owner/name:config

Text and JSONL files may end in .gz or .xz too. Which documents a block holds is a function of the inputs alone. A line that
can't be read is an error which names the file and the line; nothing is skipped.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BLOCK_BYTES = 1 << 20  # of text in a block, unless one document alone has more
HUB = "hf:"
SUFFIXES = (".txt", ".jsonl", ".parquet")
SEPARATOR = b"\f"


@dataclass(frozen=True)
class Block:
    """Some consecutive documents of one input, as they were read."""

    source: str
    first: int  # line of the first of `items` in a JSONL file, from 1
    items: Sequence[str | bytes]  # texts, or lines of a JSONL file
    consumed: int  # bytes of all inputs that have been read so far
    field: str | None = None  # for lines of a JSONL file

    def texts(self) -> Iterator[str]:
        """The documents."""
        for number, item in enumerate(self.items, self.first):
            if isinstance(item, str):
                yield item
            elif item.strip():
                yield self._parse(item, number)

    def _parse(self, line: bytes, number: int) -> str:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.source}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.source}, line {number}: expected an object; got {type(row).__name__}")
        return _text_of(row, self.field or "", f"{self.source}, line {number}")


def check_inputs(inputs: Sequence[str]) -> int:
    """The bytes of all files together; ValueError or FileNotFoundError if one can't be an input."""
    if not inputs:
        raise ValueError("inputs: expected at least one file or hf:owner/name")
    total = 0
    for name in inputs:
        if name.startswith(HUB):
            continue
        path = Path(name)
        if path.is_dir():
            raise ValueError(f"inputs: {name!r} is a folder; name its files (such as {name.rstrip('/')}/*.jsonl)")
        if not path.is_file():
            raise FileNotFoundError(f"inputs: no file {name!r}")
        if kind_of(path) not in SUFFIXES:
            raise ValueError(
                f"inputs: {name!r}: expected a name that ends in {', '.join(SUFFIXES)} (text and JSONL also with .gz or .xz), "
                "or hf:owner/name"
            )
        total += path.stat().st_size
    return total


def kind_of(path: Path) -> str:
    """The suffix that tells the format, without .gz or .xz."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".xz"):
        kind = suffixes[-2] if len(suffixes) > 1 else ""
        return kind if kind != ".parquet" else ""
    return suffixes[-1] if suffixes else ""


def documents(inputs: Sequence[str], *, field: str = "text", split: str = "train") -> Iterator[str]:
    """Every document of the inputs, in order."""
    for block in blocks(inputs, field=field, split=split):
        yield from block.texts()


def blocks(inputs: Sequence[str], *, field: str = "text", split: str = "train", size: int = BLOCK_BYTES) -> Iterator[Block]:
    """The documents of the inputs in blocks of about `size` bytes; `split` is for Hugging Face datasets."""
    before = 0
    for name in inputs:
        if name.startswith(HUB):
            yield from _gather(name, _hub_texts(name, field, split), before, size)
            continue
        path = Path(name)
        try:
            if kind_of(path) == ".parquet":
                yield from _gather(name, _parquet_texts(path, field), before, size)
            elif kind_of(path) == ".jsonl":
                yield from _line_blocks(path, field, before, size)
            else:
                yield from _gather(name, _plain_texts(path), before, size)
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
            raise ValueError(f"{name}: damaged or cut short: {error}") from error
        before += path.stat().st_size


def _gather(name: str, texts: Iterator[tuple[str, int]], before: int, size: int) -> Iterator[Block]:
    """Blocks of texts; each text comes with the bytes of its file that were read by then."""
    items: list[str] = []
    held = read = 0
    for text, read in texts:
        items.append(text)
        held += len(text)
        if held >= size:
            yield Block(name, 1, items, before + read)
            items, held = [], 0
    if items:
        yield Block(name, 1, items, before + read)


def _line_blocks(path: Path, field: str, before: int, size: int) -> Iterator[Block]:
    first = 1
    with _open(path) as (file, raw):
        while lines := file.readlines(size):
            yield Block(str(path), first, lines, before + raw.tell(), field)
            first += len(lines)


def _plain_texts(path: Path) -> Iterator[tuple[str, int]]:
    with _open(path) as (file, raw):
        held: list[bytes] = []
        for line in file:
            if line.rstrip(b"\r\n") == SEPARATOR:
                if held:
                    yield _decode(held, path), raw.tell()
                held = []
            else:
                held.append(line)
        if held:
            yield _decode(held, path), raw.tell()


def _decode(lines: list[bytes], path: Path) -> str:
    data = b"".join(lines)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: not UTF-8: byte {data[error.start]:#04x} in line {line} of a document") from None


def _parquet_texts(path: Path, field: str) -> Iterator[tuple[str, int]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    with file:
        if field not in file.schema_arrow.names:
            raise ValueError(f"{path}: no column {field!r}; it has {', '.join(file.schema_arrow.names)} (see --text-field)")
        size, rows, number = path.stat().st_size, max(1, file.metadata.num_rows), 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield _text_of({field: value}, field, f"{path}, row {number}"), size * number // rows


def _hub_texts(name: str, field: str, split: str) -> Iterator[tuple[str, int]]:
    import datasets

    repository, _, config = name.removeprefix(HUB).partition(":")
    try:
        rows: Any = datasets.load_dataset(repository, config or None, split=split, streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{name}: can't be opened with split {split!r}: {error}") from error
    for number, row in enumerate(rows, 1):
        yield _text_of(row, field, f"{name}, row {number}"), 0


def _text_of(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise ValueError(f"{where}: no field {field!r}; it has {', '.join(map(str, row)) or 'none'} (see --text-field)")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected text in {field!r}; got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        raise ValueError(f"{where}: the text in {field!r} holds half a surrogate pair, which is no character") from None
    return text


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file as it reads and as it lies on the disk, which tells how far the reading is."""
    with path.open("rb") as raw:
        if path.suffix.lower() == ".gz":
            with gzip.open(raw) as file:
                yield file, raw  # type: ignore[misc]
        elif path.suffix.lower() == ".xz":
            with lzma.open(raw) as file:
                yield file, raw
        else:
            yield raw, raw
