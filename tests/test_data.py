"""Token shards and the order of their windows."""

import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rla.data import TokenBatches, TokenDataset, builtin_dataset, builtin_text, check_tokenizer, unigram_entropy
from rla.data.batches import IGNORE
from rla.data.order import below, mix, permute, stream, uniform
from rla.data.shards import Index
from rla.data.writer import ShardWriter

END = 256


def make_dataset(folder, lengths, shard_tokens=50, vocab_size=257, seed=0):
    """Documents of random bytes, `lengths` bytes long; the stream they make, and where they start in it."""
    generator = np.random.default_rng(seed)
    documents = [np.append(generator.integers(0, END, n), END) for n in lengths]
    writer = ShardWriter(folder, Index(vocab_size, END, "", ()).dtype, shard_tokens)
    for document in documents:
        writer.add(document, np.array([len(document)]), np.array([len(document) - 1]))
    writer.finish(vocab_size=vocab_size, end_of_text=END, tokenizer="f" * 64)
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    return TokenDataset.open(folder, verify="sha256"), np.concatenate(documents), starts


@pytest.fixture
def dataset(tmp_path):
    return make_dataset(tmp_path / "data", [10, 0, 3, 70, 1, 25, 25, 25, 4])[0]


# Order


@given(n=st.integers(1, 3000), key=st.integers(-(2**63), 2**63 - 1))
def test_permutation_is_a_bijection(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(
    n=st.integers(2**33, 2**60), key=st.integers(0, 2**62), index=st.lists(st.integers(0, 2**33 - 1), min_size=1, unique=True)
)
def test_permutation_of_a_huge_range_needs_no_table(n, key, index):
    out = permute(index, n, key)
    assert len(set(out.tolist())) == len(index)
    assert out.min() >= 0
    assert out.max() < n


def test_permutations_are_like_random_ones():
    n, keys = 12, np.arange(20_000)
    where = permute(np.arange(n)[None], n, stream(7, keys)[:, None])  # [keys, n]
    counts = np.stack([np.bincount(where[:, i], minlength=n) for i in range(n)])
    expected = len(keys) / n
    assert ((counts - expected) ** 2 / expected).sum() < 121 + 5 * math.sqrt(2 * 121)  # chi-squared, 11 x 11 degrees of freedom
    fixed = (where == np.arange(n)).sum(1)
    assert abs(fixed.mean() - 1) < 0.05
    assert abs(fixed.var() - 1) < 0.1
    neighbours = (np.diff(where, axis=1) == 1).mean()  # of n (n - 1) ordered pairs n - 1 go up by one
    assert abs(neighbours - 1 / n) < 0.005


def test_hashes_of_counters():
    draws = uniform(stream(3, np.arange(1000)[:, None], np.arange(100)[None]))
    assert draws.min() > 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.005
    assert abs(draws.var() - 1 / 12) < 0.002
    assert len({int(stream(a, b)[0]) for a in range(30) for b in range(30)}) == 900
    numbers = below(mix(np.arange(70_000, dtype=np.uint64)), 7)
    assert np.abs(np.bincount(numbers, minlength=7) - 10_000).max() < 500


def test_permute_refuses_an_index_out_of_range():
    with pytest.raises(ValueError, match="below n = 5; got 5"):
        permute([5], 5, 0)


# Shards


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    shard_tokens=st.integers(1, 200),
    grouping=st.integers(1, 7),
    wide=st.booleans(),
)
def test_what_is_written_is_read(tmp_path_factory, lengths, shard_tokens, grouping, wide):
    generator = np.random.default_rng(len(lengths))
    documents = [np.append(generator.integers(0, END, n), END) for n in lengths]
    folder, vocab_size = tmp_path_factory.mktemp("shards"), 100_000 if wide else 257
    writer = ShardWriter(folder, Index(vocab_size, END, "", ()).dtype, shard_tokens)
    for i in range(0, len(documents), grouping):  # grouping and interruptions change nothing
        part = documents[i : i + grouping]
        sizes = np.array([len(d) for d in part])
        writer.add(np.concatenate(part), sizes, sizes - 1)
        if i % 2:
            state = json.loads(json.dumps(writer.state()))
            writer.add(np.full(9, 1), np.array([4, 5]), np.array([3, 4]))  # lost
            writer.close()
            writer = ShardWriter(folder, Index(vocab_size, END, "", ()).dtype, shard_tokens, state)
    writer.finish(vocab_size=vocab_size, end_of_text=END, tokenizer="x")
    data = TokenDataset.open(folder, verify="sha256")
    flat, starts = np.concatenate(documents), np.cumsum([0, *map(len, documents)])[:-1]
    assert (data.tokens, data.documents, data.bytes) == (len(flat), len(documents), len(flat) - len(documents))
    assert np.array_equal(data.read(0, data.tokens), flat)
    assert np.array_equal(data.starts(0, data.tokens), starts)
    for start in range(0, data.tokens, 7):
        stop = min(start + 11, data.tokens)
        assert np.array_equal(data.read(start, stop), flat[start:stop])
        assert np.array_equal(data.starts(start, stop), starts[(starts >= start) & (starts < stop)])
    for shard in data.index.shards:  # as full as whole documents allow
        assert shard.tokens <= shard_tokens or shard.documents == 1
    for one, two in itertools.pairwise(data.index.shards):
        following = len(documents[sum(s.documents for s in data.index.shards[: data.index.shards.index(two)])])
        assert one.tokens + following > shard_tokens


def test_counts_and_index(dataset):
    assert (dataset.tokens, dataset.documents, dataset.bytes) == (172, 9, 163)
    assert (dataset.vocab_size, dataset.end_of_text, dataset.fingerprint) == (257, END, "f" * 64)
    index = json.loads((dataset.folder / "index.json").read_text())
    assert (index["format"], index["version"], index["dtype"], index["tokens"]) == ("rla-tokens", 1, "uint16", 172)
    assert len(index["shards"]) > 2


@pytest.mark.parametrize("suffix", ["tokens", "starts"])
def test_a_removed_shard_is_named(dataset, suffix):
    (dataset.folder / f"shard-00001.{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"shard-00001.{suffix} is missing; expected \d+ bytes; restore it"):
        TokenDataset.open(dataset.folder)


def test_a_truncated_shard_is_named(dataset):
    path = dataset.folder / "shard-00001.tokens"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    with pytest.raises(ValueError, match=rf"shard-00001.tokens has {size - 2} bytes; expected {size}: it is damaged; restore"):
        TokenDataset.open(dataset.folder)


@pytest.mark.parametrize("suffix", ["tokens", "starts"])
def test_a_flipped_byte_shows_when_asked(dataset, suffix):
    path = dataset.folder / f"shard-00000.{suffix}"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    TokenDataset.open(dataset.folder)
    with pytest.raises(ValueError, match=rf"shard-00000.{suffix} has sha256"):
        TokenDataset.open(dataset.folder, verify="sha256")


def test_an_index_that_cannot_be_used(dataset, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"index.json is missing; `rla prepare` makes one"):
        TokenDataset.open(tmp_path)
    (tmp_path / "whole").mkdir()
    dataset.folder.rename(tmp_path / "whole" / "train")
    with pytest.raises(FileNotFoundError, match=r"it holds train: open one of them"):
        TokenDataset.open(tmp_path / "whole")
    path = tmp_path / "whole" / "train" / "index.json"
    text = path.read_text()
    for bad, message in (
        (text[:-9], "can't be read"),
        (text.replace('"version": 1', '"version": 2'), "version 2; expected 'rla-tokens', version 1"),
        (text.replace('"vocab_size"', '"vocabulary"'), "can't be read: 'vocab_size'"),
        ("[]", "can't be read"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            TokenDataset.open(path.parent)
    with pytest.raises(ValueError, match="verify: expected 'size' or 'sha256'; got 'md5'"):
        TokenDataset.open(path.parent, verify="md5")


def test_another_tokenizer_is_refused(dataset):
    check_tokenizer(dataset, "f" * 64)
    with pytest.raises(
        ValueError, match=r"made with another tokenizer: its fingerprint is ffffffffffff..., expected eeeeeeeeeeee"
    ):
        check_tokenizer(dataset, "e" * 64)


def test_ranges_outside_the_stream(dataset):
    for start, stop in ((-1, 3), (0, 173), (5, 4)):
        with pytest.raises(ValueError, match="expected a range within the 172 tokens"):
            dataset.read(start, stop)
    with pytest.raises(ValueError, match="expected 0 to 171; got 172"):
        dataset.locate(172)


# Batches


def test_windows_are_the_stream(dataset):
    batches = TokenBatches(dataset, length=7, batch=4, seed=0)
    flat = dataset.read(0, dataset.tokens)
    assert batches.examples == 171 // 7
    assert batches.tokens_per_step == 28
    seen = []
    for step in range(batches.examples // 4):
        batch = batches.batch_at(step, range(4))
        assert batch.cu_seqlens is None
        for row in range(4):
            window = int(batches._windows(step, range(row, row + 1))[0])
            place = window * 7
            assert batch.input_ids[row].tolist() == flat[place : place + 7].tolist()
            assert batch.labels[row].tolist() == flat[place + 1 : place + 8].tolist()
            seen.append(window)
    assert sorted(seen) == list(range(batches.examples))  # 24 windows, 6 steps: one epoch


@settings(deadline=None, max_examples=30)
@given(cut=st.lists(st.integers(0, 9), max_size=3), step=st.integers(0, 10**6), seed=st.integers(0, 2**40), cross=st.booleans())
def test_rows_do_not_depend_on_who_asks(tmp_path_factory, cut, step, seed, cross):
    dataset, _, _ = make_dataset(tmp_path_factory.mktemp("shards"), [30, 5, 90, 17])
    batches = TokenBatches(dataset, length=8, batch=9, seed=seed, cross_documents=cross)
    whole = batches.batch_at(step, range(9))
    bounds = [0, *sorted(cut), 9]
    parts = [batches.batch_at(step, range(a, b)) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat([p.input_ids for p in parts]), whole.input_ids)
    assert torch.equal(torch.cat([p.labels for p in parts]), whole.labels)
    if not cross:
        shifted = [p.cu_seqlens[:-1] + a * 8 for a, p in zip(bounds, parts, strict=False)]
        assert torch.equal(torch.cat([*shifted, torch.tensor([72])]), whole.cu_seqlens)


def test_every_epoch_has_every_window_in_another_order(dataset):
    batches = TokenBatches(dataset, length=9, batch=5, seed=3)  # 19 windows: epochs end within batches
    n = batches.examples
    order = np.concatenate([batches._windows(step, range(5)) for step in range(n)])
    epochs = order.reshape(5, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 5
    assert [batches.epoch_of(step) for step in (0, 3, 4, n - 1, n)] == [0, 0, 1, 4, 5]
    other = TokenBatches(dataset, length=9, batch=5, seed=4)
    assert not np.array_equal(np.concatenate([other._windows(step, range(5)) for step in range(n)]), order)
    wider = TokenBatches(dataset, length=9, batch=19, seed=3)  # the batch only cuts the same order
    assert np.array_equal(wider._windows(0, range(19)), epochs[0])


def test_the_order_is_a_fixed_function():
    """Checkpoints name no order, only a step: another order for the same seed would silently repeat and skip examples."""
    assert permute(np.arange(10), 10, stream(0, 0)).tolist() == [6, 5, 8, 7, 1, 0, 9, 3, 2, 4]
    assert permute([0, 1, 2], 10**12, stream(123, 45)).tolist() == [334903679270, 812980687946, 94027785043]


def test_documents_apart(tmp_path):
    dataset, flat, starts = make_dataset(tmp_path / "d", [3, 0, 20, 6, 1, 1, 9, 30])
    batches = TokenBatches(dataset, length=8, batch=3, seed=1, cross_documents=False)
    for step in range(20):
        batch = batches.batch_at(step, range(3))
        bounds = batch.cu_seqlens.tolist()
        assert bounds == sorted(set(bounds))
        assert {0, 8, 16, 24} <= set(bounds)
        for row, window in enumerate(batches._windows(step, range(3))):
            for t in range(8):
                place = int(window) * 8 + t
                assert batch.input_ids[row, t] == flat[place]
                assert batch.labels[row, t] == (IGNORE if place + 1 in starts else flat[place + 1])
                assert (row * 8 + t in bounds) == (t == 0 or place in starts)
                if batch.labels[row, t] == IGNORE:
                    assert flat[place] == END  # the end itself has been predicted


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize(
    ("length", "limit"), [(8, None), (9, None), (171, None), (500, None), (8, 1), (8, 8), (8, 21), (8, 999)]
)
def test_sequential_predicts_each_token_once(dataset, length, limit, cross):
    flat, starts = dataset.read(0, dataset.tokens), dataset.starts(0, dataset.tokens)
    if length < dataset.tokens:
        batches = TokenBatches(dataset, length=length, batch=4, seed=0, cross_documents=cross)
    else:
        with pytest.raises(ValueError, match="length: expected fewer than the dataset's 172 tokens; got 500"):
            TokenBatches(dataset, length=length, batch=4, seed=0)
        return
    made = list(batches.sequential(limit))
    inputs, labels = (torch.cat([b[i] for b in made]).flatten().numpy() for i in (0, 1))
    predicted = min(171, limit or 171)
    assert len(labels) == math.ceil(predicted / length) * length
    assert all(len(b.input_ids) == 4 for b in made[:-1])
    expected = flat[1 : predicted + 1].copy()
    if not cross:
        expected[starts[(starts > 0) & (starts <= predicted)] - 1] = IGNORE
    assert np.array_equal(labels[:predicted], expected)
    assert (labels[predicted:] == IGNORE).all()
    assert np.array_equal(inputs[:predicted], flat[:predicted])
    assert inputs.min() >= 0


def test_fingerprint_tells_what_decides_the_order(dataset, tmp_path):
    def print_of(data=dataset, **changed):
        return TokenBatches(data, **{"length": 8, "batch": 4, "seed": 0, "cross_documents": True, **changed}).fingerprint

    assert print_of() == print_of(batch=2)
    other = make_dataset(tmp_path / "other", [10, 0, 3, 70, 1, 25, 25, 25, 4], seed=1)[0]
    same = make_dataset(tmp_path / "same", [10, 0, 3, 70, 1, 25, 25, 25, 4])[0]
    assert print_of(same) == print_of()
    assert len({print_of(), print_of(other), print_of(length=9), print_of(seed=1), print_of(cross_documents=False)}) == 5


def test_describe_leads_to_the_tokens(dataset):
    batches = TokenBatches(dataset, length=8, batch=4, seed=0)
    text = batches.describe(7, 2)
    place, path = text.split("from token ")[1].split(" of ")
    tokens = np.fromfile(path, "<u2")[int(place) :][:5]
    assert text.startswith("step 7, row 2: window ")
    assert tokens.tolist() == batches.batch_at(7, range(2, 3)).input_ids[0, : len(tokens)].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length: expected at least 1; got 0"),
        ({"batch": 0}, "batch: expected at least 1; got 0"),
        ({"length": 172}, "length: expected fewer than the dataset's 172 tokens; got 172"),
    ],
)
def test_misuse_of_batches(dataset, arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenBatches(dataset, **{"length": 8, "batch": 4, "seed": 0, **arguments})


def test_misuse_of_batch_at(dataset):
    batches = TokenBatches(dataset, length=8, batch=4, seed=0)
    for rows in (range(5), range(-1, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match=r"rows: expected a range within 0..4 by ones"):
            batches.batch_at(0, rows)
    with pytest.raises(ValueError, match="step: expected 0 or more; got -1"):
        batches.batch_at(-1, range(4))


# The built-in text


def test_builtin_text(tmp_path):
    train, validation = builtin_dataset("train", cache=tmp_path), builtin_dataset("validation", cache=tmp_path)
    assert (train.documents, validation.documents) == (3, 3)
    assert 1_200_000 < train.bytes < 2_000_000
    assert 0.04 < validation.bytes / train.bytes < 0.06
    assert 2.5 < unigram_entropy(train) < 3.5
    text = bytes(train.read(0, 15).astype(np.uint8)).decode()
    assert text == "TREASURE ISLAND"
    assert builtin_dataset("train", cache=tmp_path).folder == train.folder
    assert sorted(os.listdir(tmp_path)) == sorted((train.folder.name, validation.folder.name))
    assert sum(builtin_text(split).stat().st_size for split in ("train", "validation")) < 700_000
    with pytest.raises(ValueError, match="split: expected 'train' or 'validation'; got 'test'"):
        builtin_dataset("test", cache=tmp_path)


def test_a_damaged_cache_is_told(tmp_path):
    folder = builtin_dataset("validation", cache=tmp_path).folder
    (folder / "shard-00000.starts").unlink()
    with pytest.raises(ValueError, match="is a cache: remove it, and it is made again"):
        builtin_dataset("validation", cache=tmp_path)


def test_unigram_entropy_of_equal_tokens(tmp_path):
    writer = ShardWriter(tmp_path, np.dtype("<u2"), 100)
    writer.add(np.arange(64), np.array([64]), np.array([63]))
    writer.finish(vocab_size=80, end_of_text=63, tokenizer="x")
    assert unigram_entropy(TokenDataset.open(tmp_path)) == pytest.approx(math.log(64))


@pytest.mark.slow
def test_builtin_by_several_processes_at_once(tmp_path):
    code = f"from rla.data import builtin_dataset; print(builtin_dataset('validation', cache={str(tmp_path)!r}).tokens)"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert all(process.returncode == 0 for process in running)
    assert len(os.listdir(tmp_path)) == 1


def test_import_needs_numpy_and_torch_alone():
    heavy = "transformers tokenizers datasets pyarrow rich tyro"
    code = f"import sys, rla.data; print([m for m in {heavy.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
