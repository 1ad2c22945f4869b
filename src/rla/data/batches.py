"""Batches of a token stream, in an order that is a function of (seed, step) alone.

The stream is cut into windows of length + 1 tokens at a stride of length, so that the last label of a window is the first input
of the next:

    stream   t0 t1 t2 t3 t4 t5 t6 ...          length 3
    window 0    inputs t0 t1 t2    labels t1 t2 t3
    window 1    inputs t3 t4 t5    labels t4 t5 t6

Row i of step s is window `permutation[(s * batch + i) % n]` of epoch `(s * batch + i) // n`. Whoever asks for some rows of a
step gets the same rows, however many processes share the batch. There is no state to save but the step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .order import permute, stream
from .shards import TokenDataset

IGNORE = -100  # a label that predicts nothing


class Batch(NamedTuple):
    """Rows of tokens and what follows each token."""

    input_ids: Tensor  # [rows, length] int64
    labels: Tensor  # [rows, length] int64: the next token, or -100 where nothing is predicted
    cu_seqlens: Tensor | None = None  # [N + 1] int64: bounds of documents in the rows laid end to end, or None: rows are whole


class TokenBatches:
    """Shuffled batches for training, and windows in order for evaluation, of one dataset."""

    def __init__(self, dataset: TokenDataset, *, length: int, batch: int, seed: int, cross_documents: bool = True):
        """`batch` rows of `length` tokens a step; without `cross_documents`, no document sees or predicts another."""
        for name, value in (("length", length), ("batch", batch)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1; got {value}")
        self.dataset, self.length, self.batch, self.seed, self.cross_documents = dataset, length, batch, seed, cross_documents
        self.examples = (dataset.tokens - 1) // length
        if self.examples < 1:
            raise ValueError(f"length: expected fewer than the dataset's {dataset.tokens} tokens; got {length}")

    @property
    def vocab_size(self) -> int:
        """Of the dataset's tokenizer."""
        return self.dataset.vocab_size

    @property
    def tokens_per_step(self) -> int:
        """Predicted positions of a step, document ends included."""
        return self.batch * self.length

    @property
    def fingerprint(self) -> str:
        """A hash of the data and of all that decides the order of examples; the batch size is not part of it."""
        parts = [self.dataset.content, self.dataset.fingerprint, self.length, self.seed, self.cross_documents]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def epoch_of(self, step: int) -> int:
        """The epoch of a step's first row."""
        return step * self.batch // self.examples

    def batch_at(self, step: int, rows: range) -> Batch:
        """Rows `rows` of step `step`, both counted from 0."""
        return self._make([int(window) * self.length for window in self._windows(step, rows)])

    def describe(self, step: int, row: int) -> str:
        """Where a row comes from, for messages."""
        window = int(self._windows(step, range(row, row + 1))[0])
        number, place = self.dataset.locate(window * self.length)
        epoch = (step * self.batch + row) // self.examples
        shard = self.dataset.index.shards[number]
        return (
            f"step {step}, row {row}: window {window} of {self.examples} in epoch {epoch}, "
            f"{self.length + 1} tokens from token {place} of {self.dataset.folder / shard.name}.tokens"
        )

    def sequential(self, limit_tokens: int | None = None) -> Iterator[Batch]:
        """All windows in order, `batch` rows at a time: every token but the first is predicted once.

        The last row is filled up with end-of-text and labels of -100. `limit_tokens` stops after that many predictions.
        """
        predicted = self.dataset.tokens - 1 if limit_tokens is None else min(limit_tokens, self.dataset.tokens - 1)
        places = range(0, predicted, self.length)
        for first in range(0, len(places), self.batch):
            yield self._make(list(places[first : first + self.batch]), end=predicted + 1)

    def _windows(self, step: int, rows: range) -> NDArray[np.int64]:
        if step < 0:
            raise ValueError(f"step: expected 0 or more; got {step}")
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self.batch:
            raise ValueError(f"rows: expected a range within 0..{self.batch} by ones; got {rows}")
        count = step * self.batch + np.arange(rows.start, rows.stop, dtype=np.int64)
        return permute(count % self.examples, self.examples, stream(self.seed, count // self.examples))

    def _make(self, places: list[int], end: int | None = None) -> Batch:
        """The windows at these places of the stream, of which the last alone may reach beyond `end`: that is not predicted."""
        end = self.dataset.tokens if end is None else end
        tokens = np.full((len(places), self.length + 1), self.dataset.end_of_text, np.int64)
        for row, place in zip(tokens, places, strict=True):
            stop = min(place + self.length + 1, end)
            row[: stop - place] = self.dataset.read(place, stop)
        inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if places and places[-1] + self.length >= end:
            labels[-1, end - places[-1] - 1 :] = IGNORE
        bounds = None if self.cross_documents else self._separate(places, labels, end)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), bounds)

    def _separate(self, places: list[int], labels: NDArray[np.int64], end: int) -> Tensor:
        """Take out the predictions of a document's first token; the bounds of documents in the rows laid end to end."""
        bounds = []
        for number, place in enumerate(places):
            starts = self.dataset.starts(place + 1, min(place + self.length + 1, end)) - place
            labels[number, starts - 1] = IGNORE
            row = number * self.length
            bounds += [np.array([row]), starts[starts < self.length] + row]
        bounds.append(np.array([len(places) * self.length]))
        return torch.from_numpy(np.concatenate(bounds).astype(np.int64))
