"""MQAR: what an example is, and that it is a function of (seed, step, row)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rla.data import MQAR, MQARBatches
from rla.data.batches import IGNORE
from rla.data.order import stream


@st.composite
def tasks(draw):
    pairs = draw(st.integers(1, 20))
    length = 2 * draw(st.integers(2 * pairs, 2 * pairs + 60))
    vocab_size = draw(st.integers(length + 3, 9000))
    return MQAR(vocab_size, length, pairs, draw(st.sampled_from([0.01, 0.3, 1.0])), draw(st.sampled_from(["random", "zero"])))


@settings(deadline=None)
@given(task=tasks(), seed=st.integers(0, 2**40))
def test_every_question_can_be_answered(task, seed):
    inputs, labels, bounds = task.examples(stream(seed, range(5)))
    assert bounds is None
    assert inputs.shape == labels.shape == (5, task.length)
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.min() >= 0
    assert inputs.max() < task.vocab_size
    context, half = 2 * task.pairs, task.vocab_size // 2
    for row, label in zip(inputs.tolist(), labels.tolist(), strict=True):
        shown = dict(zip(row[0:context:2], row[1:context:2], strict=True))
        assert len(shown) == len(set(shown.values())) == task.pairs  # no key and no value twice
        assert all(0 < key < half for key in shown)
        assert all(half <= value < task.vocab_size for value in shown.values())
        asked = [t for t, x in enumerate(label) if x != IGNORE]
        assert sorted(row[t] for t in asked) == sorted(shown)  # every key once
        assert all(label[t] == shown[row[t]] for t in asked)
        assert all(t >= context and t % 2 == 0 for t in asked)
        if task.fill == "zero":
            assert all(x == 0 for t, x in enumerate(row) if t >= context and t not in asked)


@settings(deadline=None)
@given(cut=st.integers(0, 8), step=st.integers(0, 10**9), seed=st.integers(0, 2**40))
def test_rows_do_not_depend_on_who_asks(cut, step, seed):
    batches = MQARBatches([MQAR(length=64), (MQAR(length=128, pairs=8), 2.0)], batch=8, seed=seed)
    whole = batches.batch_at(step, range(8))
    parts = [batches.batch_at(step, rows) for rows in (range(cut), range(cut, 8))]
    assert torch.equal(torch.cat([p.input_ids for p in parts]), whole.input_ids)
    assert torch.equal(torch.cat([p.labels for p in parts]), whole.labels)


def test_distributions():
    """As zoology's: keys, values and fillers uniform, questions by the power law, drawn as numpy's choice draws them."""
    task = MQAR(vocab_size=40, length=32, pairs=3, power=0.2)
    inputs, labels, _ = (x if x is None else x.numpy() for x in task.examples(stream(0, range(20_000))))
    for column, values in ((0, range(1, 20)), (4, range(1, 20)), (1, range(20, 40)), (5, range(20, 40))):
        counts = np.bincount(inputs[:, column], minlength=40)[list(values)]
        assert counts.sum() == 20_000
        expected = 20_000 / len(values)
        assert ((counts - expected) ** 2 / expected).sum() < 60
    filler = inputs[:, 7::2].ravel()  # odd places hold no question
    counts, expected = np.bincount(filler, minlength=40), filler.size / 40
    assert ((counts - expected) ** 2 / expected).sum() < 90

    slots = np.stack([(labels == inputs[:, [2 * i + 1]]).argmax(1) for i in range(3)], 1) // 2 - 3
    p = np.arange(1, 14) ** (0.2 - 1)
    generator = np.random.default_rng(0)
    theirs = np.stack([generator.choice(13, 3, replace=False, p=p / p.sum()) for _ in range(20_000)])
    for i in range(3):  # the i-th key's slot
        ours, other = (np.bincount(x[:, i], minlength=13) for x in (slots, theirs))
        assert ((ours - other) ** 2 / (ours + other)).sum() < 45


def test_examples_are_all_different():
    batches = MQARBatches(MQAR(), batch=64, seed=0)
    seen = {row.numpy().tobytes() for step in range(50) for row in batches.batch_at(step, range(64)).input_ids}
    assert len(seen) == 3200
    evaluation = batches.evaluation(500)
    assert [len(b.input_ids) for b in evaluation] == [64] * 7 + [52]
    held = {row.numpy().tobytes() for b in evaluation for row in b.input_ids}
    assert len(held) == 500
    assert not held & seen
    other = {row.numpy().tobytes() for b in batches.evaluation(500, seed=1) for row in b.input_ids}
    assert not held & other
    again = MQARBatches(MQAR(), batch=64, seed=9).evaluation(500)  # the same whatever the training seed
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(evaluation, again, strict=True))


def test_mixtures():
    short, long = MQAR(length=64, pairs=4), MQAR(length=128, pairs=16)
    batches = MQARBatches([(short, 1), (long, 3)], batch=4, seed=0)
    lengths = [batches.batch_at(step, range(4)).input_ids.shape[1] for step in range(400)]
    assert 60 < lengths.count(64) < 140
    assert lengths == [batches.task_of(step).length for step in range(400)]
    assert batches.tokens_per_step == 4 * 112
    assert batches.vocab_size == 8192
    assert [b.input_ids.shape for b in batches.evaluation(6)] == [(4, 64), (2, 64), (4, 128), (2, 128)]
    assert "step 3, row 1: MQAR(vocab_size=8192" in batches.describe(3, 1)


def test_fingerprint():
    prints = {
        MQARBatches(MQAR(), batch=4, seed=0).fingerprint,
        MQARBatches(MQAR(), batch=8, seed=0).fingerprint,
        MQARBatches([MQAR()], batch=4, seed=0).fingerprint,
    }
    assert len(prints) == 1
    for other in (MQARBatches(MQAR(), batch=4, seed=1), MQARBatches(MQAR(pairs=5), batch=4, seed=0)):
        prints.add(other.fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 63}, "length: expected an even number; got 63"),
        ({"pairs": 17}, "pairs: expected 1 to length / 4 = 16; got 17"),
        ({"pairs": 0}, "pairs: expected 1 to"),
        ({"vocab_size": 64}, "vocab_size: expected more than the length, 64; got 64"),
        ({"power": 0.0}, r"power: expected a number above 0; got 0.0"),
        ({"fill": "noise"}, "fill: expected 'random' or 'zero'; got 'noise'"),
    ],
)
def test_tasks_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        MQAR(**arguments)


@pytest.mark.parametrize(
    ("tasks", "batch", "message"),
    [
        ([], 4, "tasks: expected at least one"),
        ([(MQAR(), 0.0)], 4, "weights above 0"),
        ([MQAR(), MQAR(vocab_size=100)], 4, r"tasks: expected one vocab_size; got \[100, 8192\]"),
        (MQAR(), 0, "batch: expected at least 1; got 0"),
    ],
)
def test_batches_that_make_no_sense(tasks, batch, message):
    with pytest.raises(ValueError, match=message):
        MQARBatches(tasks, batch=batch, seed=0)


def test_misuse_of_batch_at():
    batches = MQARBatches(MQAR(), batch=4, seed=0)
    with pytest.raises(ValueError, match=r"rows: expected a range within 0..4 by ones; got range\(0, 5\)"):
        batches.batch_at(0, range(5))
    with pytest.raises(ValueError, match="step: expected 0 or more; got -1"):
        batches.batch_at(-1, range(4))
