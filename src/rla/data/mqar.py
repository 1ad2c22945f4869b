"""MQAR, multi-query associative recall (Arora, Eyuboglu et al., "Zoology", arXiv 2312.04927), as the zoology project makes it.

Pairs of a key and a value are shown; later each key comes once more, and its value is to be said. Twelve tokens of vocabulary,
two pairs, fillers shown as dots:

    inputs    2    8    4    7    .    .    4    .    .    .    2    .
    labels  -100 -100 -100 -100 -100 -100   7  -100 -100 -100   8  -100

Keys are distinct tokens of 1..vocab_size/2 - 1, values distinct tokens of the upper half. After the pairs there are slots two
tokens wide; key i takes the i-th slot of a draw without replacement with probabilities proportional to slot**(power - 1), so
that most questions come soon. Fillers are uniform over the whole vocabulary ("random") or 0.

Where this differs: zoology draws a fixed set of examples with numpy's global generator; here an example is a function of
(seed, step, row), computed by hashes, so that there is no end to them, nothing to store and no order to remember. The pairs
come once (zoology's num_passes = 1). The distributions are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .batches import IGNORE, Batch
from .order import GOLDEN, Words, below, mix, permute, stream, uniform, words

TRAINING, EVALUATION, CHOICE = range(3)  # streams of random numbers that never meet


@dataclass(frozen=True)
class MQAR:
    """One setting of the task."""

    vocab_size: int = 8192
    length: int = 64
    pairs: int = 4
    power: float = 0.01  # 1: questions come anywhere alike
    fill: Literal["random", "zero"] = "random"

    def __post_init__(self) -> None:
        if self.length < 2 or self.length % 2:
            raise ValueError(f"length: expected an even number; got {self.length}")
        if self.pairs < 1 or 4 * self.pairs > self.length:
            raise ValueError(f"pairs: expected 1 to length / 4 = {self.length // 4}; got {self.pairs}")
        if self.vocab_size <= max(self.length, 2 * self.pairs + 1):
            raise ValueError(f"vocab_size: expected more than the length, {self.length}; got {self.vocab_size}")
        if self.power <= 0:
            raise ValueError(f"power: expected a number above 0; got {self.power}")
        if self.fill not in ("random", "zero"):
            raise ValueError(f"fill: expected 'random' or 'zero'; got {self.fill!r}")

    def examples(self, keys: Words) -> Batch:
        """One example for each word of `keys` [rows], a pure function of it."""
        rows, context, half = len(keys), 2 * self.pairs, self.vocab_size // 2
        pair = np.arange(self.pairs)[None]  # [1, pairs]
        shown = 1 + permute(pair, half - 1, _branch(keys, 0))  # [rows, pairs]
        values = half + permute(pair, self.vocab_size - half, _branch(keys, 1))
        asked = context + 2 * self._slots(_branch(keys, 2))
        row = np.arange(rows)[:, None]

        if self.fill == "random":
            inputs = below(_numbers(_branch(keys, 3), self.length), self.vocab_size)
        else:
            inputs = np.zeros((rows, self.length), np.int64)
        inputs[:, 0:context:2], inputs[:, 1:context:2] = shown, values
        inputs[row, asked] = shown
        labels = np.full((rows, self.length), IGNORE, np.int64)
        labels[row, asked] = values
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))

    def _slots(self, keys: Words) -> NDArray[np.int64]:
        """The slot of each pair's question, [rows, pairs]. The largest of log p + Gumbel noise: a draw without replacement."""
        count = (self.length - 2 * self.pairs) // 2
        log_p = (self.power - 1) * np.log(np.arange(1, count + 1))
        return np.argsort(np.log(-np.log(uniform(_numbers(keys, count)))) - log_p, axis=1)[:, : self.pairs]


class MQARBatches:
    """Batches of one task or of a mixture, of which every step takes one by weight; used as `TokenBatches` is."""

    def __init__(self, tasks: MQAR | Sequence[MQAR | tuple[MQAR, float]], *, batch: int, seed: int):
        """`tasks`: a task, or several, alone (equal weights) or each with its weight."""
        if batch < 1:
            raise ValueError(f"batch: expected at least 1; got {batch}")
        listed = [tasks] if isinstance(tasks, MQAR) else tasks
        pairs = [(item, 1.0) if isinstance(item, MQAR) else item for item in listed]
        if not pairs or any(not weight > 0 for _, weight in pairs):
            raise ValueError(f"tasks: expected at least one, with weights above 0; got {pairs}")
        self.tasks = tuple(task for task, _ in pairs)
        if len({task.vocab_size for task in self.tasks}) > 1:
            raise ValueError(f"tasks: expected one vocab_size; got {sorted({task.vocab_size for task in self.tasks})}")
        weights = np.array([weight for _, weight in pairs], np.float64)
        self.weights = tuple(weights / weights.sum())
        self.batch, self.seed = batch, seed

    @property
    def vocab_size(self) -> int:
        """Keys, values and fillers."""
        return self.tasks[0].vocab_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step; of the mean step where the tasks differ in length."""
        return round(self.batch * sum(w * task.length for task, w in zip(self.tasks, self.weights, strict=True)))

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides which examples come; the batch size is not part of it."""
        parts = [self.seed, self.weights, [sorted(asdict(task).items()) for task in self.tasks]]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def task_of(self, step: int) -> MQAR:
        """The task that step `step` is of."""
        if step < 0:
            raise ValueError(f"step: expected 0 or more; got {step}")
        draw = uniform(stream(CHOICE, self.seed, step))[0]
        chosen = int(np.searchsorted(np.cumsum(self.weights), draw, side="right"))
        return self.tasks[min(chosen, len(self.tasks) - 1)]

    def batch_at(self, step: int, rows: range) -> Batch:
        """Rows `rows` of step `step`, both counted from 0."""
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self.batch:
            raise ValueError(f"rows: expected a range within 0..{self.batch} by ones; got {rows}")
        return self.task_of(step).examples(stream(TRAINING, self.seed, step, rows))

    def describe(self, step: int, row: int) -> str:
        """Where a row comes from, for messages."""
        return f"step {step}, row {row}: {self.task_of(step)} with seed {self.seed}"

    def evaluation(self, examples: int, seed: int = 0) -> list[Batch]:
        """`examples` examples of each task, task after task, `batch` at a time; none is ever a training example's stream."""
        out = []
        for number, task in enumerate(self.tasks):
            for first in range(0, examples, self.batch):
                rows = range(first, min(first + self.batch, examples))
                out.append(task.examples(stream(EVALUATION, seed, number, rows)))
        return out


def _branch(keys: Words, number: int) -> Words:
    """An independent key for one of an example's draws, [rows, 1]."""
    return mix(keys + words(number + 1) * GOLDEN)[:, None]


def _numbers(keys: Words, count: int) -> Words:
    """`count` random words for each row, [rows, count]: splitmix64 from each key."""
    return mix(keys + words(np.arange(1, count + 1)) * GOLDEN)
