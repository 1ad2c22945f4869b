"""Text to ids in worker processes, without Transformers; what comes out does not depend on how many there are.

The text of a document is only text here: a document that spells `<|endoftext|>` does not end there.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .sources import Block
from .tokenizer import bytes_backend, deciding


class Encoded(NamedTuple):
    """A block's documents as ids, end to end."""

    tokens: NDArray[Any]  # each document followed by end-of-text
    lengths: NDArray[np.int64]  # tokens of each, end-of-text included
    sizes: NDArray[np.int64]  # bytes of each one's text
    consumed: int  # bytes of the inputs read by then


class Encoder:
    """Text to ids with a saved tokenizer, by `tokenizers` alone; bytes by numpy."""

    def __init__(self, folder: str | os.PathLike[str]):
        """`folder` was written by `save_pretrained`."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._bytes = deciding(self._tokenizer) == deciding(bytes_backend())

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """One array of ids for each text, without any special token."""
        if self._bytes:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        return [np.asarray(e.ids, np.uint32) for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def encode_all(items: Iterable[Block], folder: Path, end: int, processes: int) -> Generator[Encoded]:
    """Blocks encoded by processes, in order, not far ahead of whoever takes them."""
    if processes == 1:
        encoder = Encoder(folder)
        for block in items:
            yield encode(block, encoder, end)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for block in items:
            waiting.append(pool.submit(_encode_in_worker, block, folder, end))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise OSError(
            "a worker process died (out of memory?); the same command goes on from what is safe; try fewer processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode(block: Block, encoder: Encoder, end: int) -> Encoded:
    """One block; `end` follows each of its documents."""
    texts = list(block.texts())
    ids = encoder.encode(texts)
    lengths = np.array([len(i) + 1 for i in ids], np.int64)
    tokens = np.full(int(lengths.sum()), end, np.uint32)
    for at, i in zip(np.cumsum(lengths) - lengths, ids, strict=True):
        tokens[at : at + len(i)] = i
    return Encoded(tokens, lengths, np.array([len(text.encode()) for text in texts], np.int64), block.consumed)


def _encode_in_worker(block: Block, folder: Path, end: int) -> Encoded:
    return encode(block, _worker_encoder(folder), end)


@lru_cache(maxsize=1)
def _worker_encoder(folder: Path) -> Encoder:
    return Encoder(folder)  # a worker serves one folder as long as it lives


def _start_worker() -> None:
    """Ctrl-C is for the main process; without it, end; one thread each, for the processes share the machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
