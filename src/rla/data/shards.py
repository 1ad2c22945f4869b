"""Token shards: the format, and reading it memory-mapped as one long stream.

A folder holds

    index.json           format, dtype, vocabulary, end-of-text id, tokenizer's fingerprint, counts and sha256 of every file
    shard-00000.tokens   token ids, raw little-endian; every document is followed by the end-of-text id
    shard-00000.starts   int64, the place of each document's first token within its shard
    tokenizer/           the tokenizer, as save_pretrained writes it

A document never crosses from one shard into the next.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT, VERSION = "rla-tokens", 1
INDEX = "index.json"
STARTS = np.dtype("<i8")


@dataclass(frozen=True)
class Shard:
    """One line of the index; `name` without the suffixes .tokens and .starts."""

    name: str
    tokens: int
    documents: int
    bytes: int  # of UTF-8 text
    tokens_sha256: str
    starts_sha256: str


@dataclass(frozen=True)
class Index:
    """What index.json says."""

    vocab_size: int
    end_of_text: int
    tokenizer: str  # its fingerprint
    shards: tuple[Shard, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the token ids: two bytes where they suffice."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def to_json(self) -> str:
        """With the totals, for whoever reads the file."""
        totals = {key: sum(getattr(shard, key) for shard in self.shards) for key in ("tokens", "documents", "bytes")}
        content = {"format": FORMAT, "version": VERSION, "dtype": self.dtype.name, **totals, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a folder; ValueError or FileNotFoundError if there is none that can be used."""
        path = folder / INDEX
        if not path.is_file():
            inside = [name for name in ("train", "validation") if (folder / name / INDEX).is_file()]
            hint = f"; it holds {' and '.join(inside)}: open one of them" if inside else "; `rla prepare` makes one"
            raise FileNotFoundError(f"no token shards in {str(folder)!r}: {INDEX} is missing{hint}")
        try:
            content = json.loads(path.read_text())
            found = content["format"], content["version"]
            if found != (FORMAT, VERSION):
                raise ValueError(f"format {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version {VERSION}")
            shards = tuple(Shard(**shard) for shard in content["shards"])
            return cls(content["vocab_size"], content["end_of_text"], content["tokenizer"], shards)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} can't be read: {error}") from error


class TokenDataset:
    """A folder of token shards as one stream of `tokens` ids. Made by `TokenDataset.open`."""

    def __init__(self, folder: Path, index: Index):
        """Trusts that the files are there: `open` checks."""
        self.folder, self.index = folder, index
        self.vocab_size, self.end_of_text, self.fingerprint = index.vocab_size, index.end_of_text, index.tokenizer
        self._bounds = np.cumsum([0, *(shard.tokens for shard in index.shards)])  # of the shards in the stream
        self.tokens = int(self._bounds[-1])
        self.documents = sum(shard.documents for shard in index.shards)
        self.bytes = sum(shard.bytes for shard in index.shards)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: Literal["size", "sha256"] = "size") -> TokenDataset:
        """Open a folder that `rla prepare` made; every file must be there and have its size, or its very bytes."""
        if verify not in ("size", "sha256"):
            raise ValueError(f"verify: expected 'size' or 'sha256'; got {verify!r}")
        folder = Path(folder)
        dataset = cls(folder, Index.read(folder))
        for shard in dataset.index.shards:
            _check_file(
                folder / f"{shard.name}.tokens", shard.tokens * dataset.index.dtype.itemsize, shard.tokens_sha256, verify
            )
            _check_file(folder / f"{shard.name}.starts", shard.documents * STARTS.itemsize, shard.starts_sha256, verify)
        return dataset

    def __repr__(self) -> str:
        return f"TokenDataset({str(self.folder)!r}: {self.tokens:,} tokens, {self.documents:,} documents)"

    @cached_property
    def content(self) -> str:
        """A hash of the token ids and document bounds, in order; the same for the same data in another place."""
        lines = [f"{shard.tokens_sha256} {shard.starts_sha256}" for shard in self.index.shards]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that made the ids, from the folder itself."""
        from .tokenizer import load_tokenizer

        return load_tokenizer(self.folder / "tokenizer")

    def locate(self, position: int) -> tuple[int, int]:
        """The shard that holds a place in the stream, and the place within that shard."""
        if not 0 <= position < self.tokens:
            raise ValueError(f"position: expected 0 to {self.tokens - 1}; got {position}")
        number = int(np.searchsorted(self._bounds, position, side="right")) - 1
        return number, position - int(self._bounds[number])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start..stop-1 of the stream."""
        parts = self._parts(start, stop)
        out = np.empty(stop - start, np.int64)
        for number, first, last, at in parts:
            out[at : at + last - first] = self._tokens[number][first:last]
        return out

    def starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Places of the stream in start..stop-1 where a document begins."""
        found = [np.empty(0, np.int64)]
        for number, first, last, _ in self._parts(start, stop):
            starts = self._starts[number]
            low, high = np.searchsorted(starts, (first, last))
            found.append(starts[low:high] + self._bounds[number])
        return np.concatenate(found)

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Each shard's tokens, memory-mapped, in order."""
        yield from self._tokens

    @cached_property
    def _tokens(self) -> list[NDArray[Any]]:
        return [_map(self.folder / f"{shard.name}.tokens", self.index.dtype, shard.tokens) for shard in self.index.shards]

    @cached_property
    def _starts(self) -> list[NDArray[Any]]:
        return [_map(self.folder / f"{shard.name}.starts", STARTS, shard.documents) for shard in self.index.shards]

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """(shard, first, last + 1 within it, where that is in start..stop) for a range of the stream."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"start, stop: expected a range within the {self.tokens} tokens; got {start}, {stop}")
        parts, at = [], start
        while at < stop:
            number, first = self.locate(at)
            last = min(first + stop - at, self.index.shards[number].tokens)
            parts.append((number, first, last, at - start))
            at += last - first
        return parts


def check_tokenizer(dataset: TokenDataset, fingerprint: str) -> None:
    """ValueError unless the dataset was made with the tokenizer of that fingerprint."""
    if dataset.fingerprint != fingerprint:
        raise ValueError(
            f"{str(dataset.folder)!r} was made with another tokenizer: its fingerprint is {dataset.fingerprint[:12]}..., "
            f"expected {fingerprint[:12]}...; prepare the text again with the right tokenizer (rla prepare --tokenizer)"
        )


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    # A plain view: slices of np.memmap itself cost several times as much.
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,))) if count else np.empty(0, dtype)


def _check_file(path: Path, size: int, sha256: str, verify: str) -> None:
    remedy = "restore it from a copy, or prepare the text again (rla prepare)"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; expected {size} bytes; {remedy}")
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; expected {size}: it is damaged; {remedy}")
    if verify == "sha256":
        with path.open("rb") as file:
            found = file_sha256(file)
        if found != sha256:
            raise ValueError(f"{path} has sha256 {found[:12]}...; expected {sha256[:12]}...: it is damaged; {remedy}")


def file_sha256(file: Any, hash: Any = None) -> str:
    """Of a binary file from where it stands to its end."""
    hash = hashlib.sha256() if hash is None else hash
    while block := file.read(1 << 20):
        hash.update(block)
    return hash.hexdigest()
