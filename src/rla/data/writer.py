"""Writing token shards: append-only files whose state can be noted at any time and taken up again after a crash.

`state()` makes everything so far durable and tells it as plain data; `ShardWriter(..., state)` cuts off what came later and
goes on. The bytes written do not depend on how often that happens.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .shards import INDEX, STARTS, Index, Shard, file_sha256


class ShardWriter:
    """The shards of one folder; each is closed where the next document would make it exceed `shard_tokens`."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], shard_tokens: int, state: dict[str, Any] | None = None):
        """Begin, or take up `state`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_tokens = folder, shard_tokens
        state = state or {"shards": [], "tokens": 0, "documents": 0, "bytes": 0}
        self.shards = [Shard(**shard) for shard in state["shards"]]
        self.tokens, self.documents, self.bytes = state["tokens"], state["documents"], state["bytes"]  # of the open shard
        self._dtype = dtype
        self._files = self._open()

    def add(self, tokens: NDArray[Any], lengths: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Documents end to end: their ids (end-of-text included), how many each has, and the bytes of each one's text."""
        ends = np.cumsum(lengths)
        document = 0
        while document < len(lengths):
            begin = int(ends[document] - lengths[document])
            fitting = int(np.searchsorted(ends, begin + self.shard_tokens - self.tokens, side="right"))
            if fitting <= document and self.tokens:
                self._close()
                continue
            until = max(fitting, document + 1)  # a document longer than a shard has one for itself
            starts = self.tokens + ends[document:until] - lengths[document:until] - begin
            self._files[0].write(tokens[begin : ends[until - 1]].astype(self._dtype))
            self._files[1].write(starts.astype(STARTS))
            self.tokens += int(ends[until - 1]) - begin
            self.documents += until - document
            self.bytes += int(sizes[document:until].sum())
            document = until

    def state(self) -> dict[str, Any]:
        """What there is, once it is safely on the disk."""
        for file in self._files:
            file.sync()
        shards = [asdict(shard) for shard in self.shards]
        return {"shards": shards, "tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}

    def finish(self, *, vocab_size: int, end_of_text: int, tokenizer: str) -> None:
        """Close the last shard and write the index."""
        if self.documents:
            self._close()
        self.close()
        for suffix in ("tokens", "starts"):  # of the shard after the last, which was opened and has nothing in it
            (self.folder / f"{self._name}.{suffix}").unlink(missing_ok=True)
        write_durably(self.folder / INDEX, Index(vocab_size, end_of_text, tokenizer, tuple(self.shards)).to_json())

    def close(self) -> None:
        """Let the files go, as they are."""
        for file in self._files:
            file.close()

    @property
    def _name(self) -> str:
        return f"shard-{len(self.shards):05d}"

    def _open(self) -> tuple[_Appended, _Appended]:
        return (
            _Appended(self.folder / f"{self._name}.tokens", self.tokens * self._dtype.itemsize),
            _Appended(self.folder / f"{self._name}.starts", self.documents * STARTS.itemsize),
        )

    def _close(self) -> None:
        for file in self._files:
            file.sync()
        self.close()
        hashes = [file.hash.hexdigest() for file in self._files]
        self.shards.append(Shard(self._name, self.tokens, self.documents, self.bytes, *hashes))
        self.tokens = self.documents = self.bytes = 0
        self._files = self._open()


class _Appended:
    """A file that grows, and the hash of all of it."""

    def __init__(self, path: Path, size: int):
        self.hash = hashlib.sha256()
        if size and (found := path.stat().st_size) < size:
            raise ValueError(f"{path} has {found} bytes; expected at least {size}: remove the unfinished folder to begin again")
        self._file: IO[bytes] = path.open("r+b" if size else "wb")
        if size:
            self._file.truncate(size)
            file_sha256(self._file, self.hash)

    def write(self, data: NDArray[Any]) -> None:
        self._file.write(data.data)
        self.hash.update(data.data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def write_durably(path: Path, text: str) -> None:
    """The whole file or, after a crash, none or the one before."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
