"""`rla prepare`: text to token shards, in parallel, resumable, finished in one step.

    inputs -> blocks of documents -> encoded by processes -> in order -> shards

Everything is made in FOLDER.partial, whose journal says how many blocks are safely on the disk; after a crash or Ctrl-C the
same command goes on from there. The finished folder gets its name at the very end. Its bytes do not depend on the number of
processes nor on interruptions.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .encode import Encoded, encode_all
from .order import stream
from .shards import VERSION, Index
from .sources import BLOCK_BYTES, HUB, blocks, check_inputs
from .tokenizer import end_of_text, fingerprint, load_tokenizer
from .writer import ShardWriter, sync, write_durably

JOURNAL = "journal.json"
JOURNAL_SECONDS = 10.0  # work that a crash may cost


class Counts(NamedTuple):
    """How far a preparation is."""

    consumed: int = 0  # bytes of the inputs
    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of text


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] = "bytes",
    shard_tokens: int = 100_000_000,
    processes: int = 1,
    text_field: str = "text",
    split: str = "train",
    validation: float = 0.0,
    seed: int = 0,
    report: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Turn inputs (see `rla.data.sources`) into the folder `out` of token shards, or go on where an earlier call was stopped.

    Args:
        inputs: files (.txt, .jsonl, .parquet; the first two compressed too) and `hf:owner/name[:config]`.
        out: the folder to make; one that exists is an error.
        tokenizer: `bytes`, a `tokenizer.json`, a folder with one, or a name on the hub.
        shard_tokens: tokens of a shard at most; a longer document has one for itself.
        processes: how many encode. More than one need a main module that can be imported (`if __name__ == "__main__":`).
        text_field: the field of JSONL and Parquet that holds the text.
        split: of datasets from the hub.
        validation: the share of documents that goes to `out`/validation; the others go to `out`/train then.
        seed: chooses those documents.
        report: called with the counts after every block of text.
    """
    names, out = [os.fspath(name) for name in inputs], Path(out)
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens: expected at least 1; got {shard_tokens}")
    if processes < 1:
        raise ValueError(f"processes: expected at least 1; got {processes}")
    if not 0 <= validation < 1:
        raise ValueError(f"validation: expected a share from 0 to below 1; got {validation}")
    _check_absent(out)
    check_inputs(names)
    loaded = load_tokenizer(tokenizer)
    settings = {
        "version": VERSION,
        "inputs": [[name, *_identity(name)] for name in names],
        "tokenizer": fingerprint(loaded),
        "shard_tokens": shard_tokens,
        "text_field": text_field,
        "split": split,
        "validation": validation,
        "seed": seed,
        "block_bytes": BLOCK_BYTES,
    }
    partial = out.with_name(out.name + ".partial")
    with _locked(partial):
        _check_absent(out)  # another process may have finished it by now
        work = _Work(partial, settings, max(loaded.get_vocab().values()) + 1, end_of_text(loaded))
        for folder in work.writers:
            loaded.save_pretrained(str(folder / "tokenizer"))
        encoded = encode_all(
            itertools.islice(blocks(names, field=text_field, split=split, size=BLOCK_BYTES), work.blocks, None),
            next(iter(work.writers)) / "tokenizer",
            work.end_of_text,
            processes,
        )
        with contextlib.closing(work), contextlib.closing(encoded):
            report(work.counts)
            for block in encoded:
                work.add(block)
                report(work.counts)
            work.finish()
        for path in (partial / "data").rglob("*"):
            sync(path)
        os.rename(partial / "data", out)
        sync(out.parent)
        (partial / JOURNAL).unlink()
    return work.counts


class _Work:
    """The unfinished folder: a writer for each split, and the journal of what they have on the disk."""

    def __init__(self, partial: Path, settings: dict[str, Any], vocab_size: int, end: int):
        self.settings, self.vocab_size, self.end_of_text = settings, vocab_size, end
        self._journal = partial / JOURNAL
        state = self._read_journal()
        if state is None:
            shutil.rmtree(partial / "data", ignore_errors=True)
        self.blocks: int = state["blocks"] if state else 0
        self.counts = Counts(*state["counts"]) if state else Counts()
        dtype, data = Index(vocab_size, end, "", ()).dtype, partial / "data"
        folders = [data / "train", data / "validation"] if settings["validation"] else [data]
        states = state["writers"] if state else [None] * len(folders)
        self.writers = {f: ShardWriter(f, dtype, settings["shard_tokens"], s) for f, s in zip(folders, states, strict=True)}
        self._noted_at, self._noted_shards = time.monotonic(), self._closed_shards()

    def add(self, block: Encoded) -> None:
        """Write a block; note it now and then, and whenever a shard is finished."""
        held_out = held_out_documents(
            range(self.counts.documents, self.counts.documents + len(block.lengths)),
            self.settings["validation"],
            self.settings["seed"],
        )
        for writer, chosen in zip(self.writers.values(), (~held_out, held_out), strict=False):
            writer.add(block.tokens[np.repeat(chosen, block.lengths)], block.lengths[chosen], block.sizes[chosen])
        self.blocks += 1
        self.counts = Counts(
            block.consumed,
            self.counts.documents + len(block.lengths),
            self.counts.tokens + int(block.lengths.sum()),
            self.counts.bytes + int(block.sizes.sum()),
        )
        if self._closed_shards() > self._noted_shards or time.monotonic() - self._noted_at > JOURNAL_SECONDS:
            self._note()

    def finish(self) -> None:
        """Close the shards and write the indices."""
        for folder, writer in self.writers.items():
            if not writer.shards and not writer.documents:
                self._journal.unlink(missing_ok=True)  # there is nothing to go on with
                if not self.counts.documents:
                    raise ValueError("inputs: no document in them")
                raise ValueError(
                    f"validation: {self.settings['validation']} of {self.counts.documents} documents leaves none for "
                    f"{folder.name}; expected a share that gives each split one, or prepare the two apart"
                )
        self._note()
        for writer in self.writers.values():
            writer.finish(vocab_size=self.vocab_size, end_of_text=self.end_of_text, tokenizer=self.settings["tokenizer"])

    def close(self) -> None:
        """Let the files go; what came after the last note is made again by the next call."""
        for writer in self.writers.values():
            writer.close()

    def _closed_shards(self) -> int:
        return sum(len(writer.shards) for writer in self.writers.values())

    def _note(self) -> None:
        writers = [writer.state() for writer in self.writers.values()]
        journal = {"settings": self.settings, "blocks": self.blocks, "counts": self.counts, "writers": writers}
        write_durably(self._journal, json.dumps(journal))
        self._noted_at, self._noted_shards = time.monotonic(), self._closed_shards()

    def _read_journal(self) -> dict[str, Any] | None:
        """What an earlier call left, or None; ValueError if that had other settings."""
        if not self._journal.exists():
            return None
        state = json.loads(self._journal.read_text())
        if not state["blocks"]:
            return None
        then, now = state["settings"], json.loads(json.dumps(self.settings))
        changed = [key for key in now if then.get(key) != now[key]]
        if changed:
            told = "; ".join(f"{key}: then {_brief(then.get(key))}, now {_brief(now[key])}" for key in changed)
            raise ValueError(
                f"{str(self._journal.parent)!r} was begun with other settings ({told}); use those to go on, or "
                "remove that folder to begin again"
            )
        return state


def held_out_documents(numbers: range, share: float, seed: int) -> NDArray[np.bool_]:
    """Which documents are for validation: one of every 1 / share in a row, chosen by a hash of the seed."""
    document = np.arange(numbers.start, numbers.stop)
    if not share:
        return np.zeros(len(document), bool)
    group = np.floor(document * share).astype(np.int64)
    first, after = np.ceil(group / share).astype(np.int64), np.ceil((group + 1) / share).astype(np.int64)
    place = (stream(seed, group) >> np.uint64(1)).astype(np.int64) % np.maximum(after - first, 1)
    return document == first + place


def _check_absent(out: Path) -> None:
    if out.exists():
        raise FileExistsError(f"out: {str(out)!r} exists; nothing is overwritten: remove it, or name another folder")


def _identity(name: str) -> list[int]:
    """What changes when a file does: its size and time of change."""
    if name.startswith(HUB):
        return []
    status = os.stat(name)
    return [status.st_size, status.st_mtime_ns]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however it ends. What has no journal is removed at the end."""
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at work in {str(partial)!r}") from None
        try:
            yield
        finally:
            if not (partial / JOURNAL).exists():
                shutil.rmtree(partial)


def main(
    inputs: tuple[str, ...],
    /,
    *,
    out: Path,
    tokenizer: str = "bytes",
    shard_tokens: str = "100M",
    processes: int | None = None,
    text_field: str = "text",
    split: str = "train",
    validation: float = 0.0,
    seed: int = 0,
) -> int:
    """Turn text, JSONL or Parquet files or a Hugging Face dataset into token shards for training.

    Works in OUT.partial until all is done. Stopped by Ctrl-C, a crash or a full disk, the same command goes on.

    Example: rla prepare books/*.txt --out data/books --tokenizer bytes --validation 0.01

    Args:
        inputs: .txt, .jsonl (also .gz, .xz) or .parquet files, or hf:owner/name or hf:owner/name:config.
        out: the folder to make; it must not exist.
        tokenizer: bytes, a tokenizer.json, a folder with one, or a name on the Hugging Face Hub.
        shard_tokens: tokens in a shard, at most (a longer document has one for itself); K, M and B stand for thousands and up.
        processes: how many encode at the same time. Default: one for each core that may be used.
        text_field: the field or column that holds the text.
        split: of a Hugging Face dataset.
        validation: share of the documents to hold out, in OUT/validation beside OUT/train. 0: no split.
        seed: chooses which documents are held out.
    """
    from .progress import Progress

    names = list(inputs)
    try:
        shard = parse_count(shard_tokens, "--shard-tokens")
        with Progress(check_inputs(names)) as progress:
            prepare(
                names,
                out,
                tokenizer=tokenizer,
                shard_tokens=shard,
                processes=usable_cores() if processes is None else processes,
                text_field=text_field,
                split=split,
                validation=validation,
                seed=seed,
                report=progress.show,
            )
    except KeyboardInterrupt:
        print(f"\nrla prepare: interrupted; the same command goes on from what is safe in {out}.partial", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"rla prepare: {error}", file=sys.stderr)
        return 2
    print(f"written: {out} ({progress.summary()})")
    return 0


def parse_count(text: str, name: str) -> int:
    """What the option `name` says: 100M is 100,000,000; K, M and B (thousand millions), also with a fraction such as 1.5B."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{name}: expected a whole number such as 250000, 100M or 1.5B; got {text!r}") from None
    return int(number)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
