"""`rla prepare`: inputs, splits, processes, interruptions."""

import gzip
import itertools
import json
import lzma
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from rla.data import TokenDataset, load_tokenizer
from rla.data import sources as data_sources
from rla.data.prepare import held_out_documents, main, parse_count, prepare
from rla.data.sources import blocks, documents

TEXTS = ["one", "zwei — drei", "", "  four\r\nlines \x85 \u2028 of\x0bit\n", "日本語 😀", "<|endoftext|> is text"]


def write_jsonl(path, texts=TEXTS, field="text"):
    lines = [json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    data = ("\n".join(lines) + "\n").encode()
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        file.write(data)
    return str(path)


def read_back(folder):
    """The documents of a folder of byte tokens."""
    data = TokenDataset.open(folder, verify="sha256")
    bounds = [*data.starts(0, data.tokens), data.tokens]
    out = []
    for a, b in itertools.pairwise(bounds):
        tokens = data.read(a, b)
        assert tokens[-1] == 256
        out.append(bytes(tokens[:-1].astype(np.uint8)).decode())
    assert data.bytes == sum(len(text.encode()) for text in out)
    return out


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def corpus(path, count=300, seed=0):
    generator = np.random.default_rng(seed)
    texts = ["".join(map(chr, generator.integers(32, 400, generator.integers(0, 200)))) for _ in range(count)]
    return write_jsonl(path, texts), texts


# Inputs


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
@pytest.mark.parametrize("size", [1, 40, 1 << 20])
def test_jsonl(tmp_path, name, size):
    path = write_jsonl(tmp_path / name)
    made = list(blocks([path, path], size=size))
    assert [text for block in made for text in block.texts()] == TEXTS * 2
    assert made[-1].consumed == 2 * os.stat(path).st_size
    assert (len(made) > 2) == (size < 1000)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_plain_text(tmp_path, suffix):
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(suffix, open)
    path = tmp_path / f"a.txt{suffix}"
    with opener(path, "wb") as file:
        file.write("é first\r\nline\n\f\nsecond \f not a separator\n\f\n\f\r\nthird".encode())
    assert list(documents([str(path)])) == ["é first\r\nline\n", "second \f not a separator\n", "third"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    texts = [f"{i} {text}" for i in range(600) for text in TEXTS]
    parquet.write_table(pyarrow.table({"n": list(range(len(texts))), "body": texts}), path, row_group_size=1000)
    assert list(documents([path], field="body")) == texts
    with pytest.raises(ValueError, match=r"a.parquet: no column 'text'; it has n, body \(see --text-field\)"):
        list(documents([path]))
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match=r"a.parquet, row 2: expected text in 'text'; got NoneType"):
        list(documents([path]))
    Path(path).write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"a.parquet: not a Parquet file"):
        list(documents([path]))


@pytest.mark.slow
def test_hugging_face_dataset(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "owner").mkdir()
    write_jsonl(tmp_path / "owner" / "train.jsonl")
    write_jsonl(tmp_path / "owner" / "test.jsonl", ["other"])
    name = f"hf:{tmp_path / 'owner'}"
    code = f"""
        from rla.data.sources import documents
        assert list(documents([{name!r}])) == {TEXTS!r}
        assert list(documents([{name!r}], split="test")) == ["other"]
        for field, split in (("text", "no"), ("body", "test")):
            try:
                list(documents([{name!r}], field=field, split=split))
            except ValueError as error:
                print(error)
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{name}: can't be opened with split 'no'")
    assert second == f"{name}, row 1: no field 'body'; it has id, text (see --text-field)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a.jsonl, line 3: not JSON"),
        (b'{"text": "\xff"}', r"a.jsonl, line 3: not JSON"),
        (b'{"body": "a", "n": 1}', r"a.jsonl, line 3: no field 'text'; it has body, n \(see --text-field\)"),
        (b"{}", r"a.jsonl, line 3: no field 'text'; it has none"),
        (b'{"text": 3}', r"a.jsonl, line 3: expected text in 'text'; got int"),
        (b'["text"]', r"a.jsonl, line 3: expected an object; got list"),
        (b'{"text": "\\ud800"}', r"a.jsonl, line 3: the text in 'text' holds half a surrogate pair"),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_bad_line_is_named(tmp_path, line, message, size):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")  # the blank line counts as a line, not as a document
    with pytest.raises(ValueError, match=message):
        [list(block.texts()) for block in blocks([str(path)], size=size)]


def test_damaged_files_are_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl.gz", TEXTS * 100)
    os.truncate(path, os.stat(path).st_size // 2)
    with pytest.raises(ValueError, match=r"a.jsonl.gz: damaged or cut short"):
        list(documents([path]))
    (tmp_path / "b.txt.xz").write_bytes(b"not xz")
    with pytest.raises(ValueError, match=r"b.txt.xz: damaged or cut short"):
        list(documents([str(tmp_path / "b.txt.xz")]))
    (tmp_path / "c.txt").write_bytes(b"fine\n\f\none\ntwo \xe9")
    with pytest.raises(ValueError, match=r"c.txt: not UTF-8: byte 0xe9 in line 2 of a document"):
        list(documents([str(tmp_path / "c.txt")]))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs: expected at least one file"),
        (["missing.txt"], "inputs: no file 'missing.txt'"),
        (["."], r"inputs: '.' is a folder; name its files"),
        ([__file__], "expected a name that ends in .txt, .jsonl, .parquet"),
    ],
)
def test_inputs_that_cannot_be(tmp_path, inputs, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(inputs, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# Results


def test_documents_come_back(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    counts = prepare([path], tmp_path / "out")
    assert read_back(tmp_path / "out") == TEXTS
    assert counts.documents == len(TEXTS)
    assert counts.tokens == counts.bytes + len(TEXTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out"]
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["index.json", "shard-00000.starts", "shard-00000.tokens", "tokenizer"]
    data = TokenDataset.open(tmp_path / "out")
    assert data.tokenizer().decode(data.read(0, 4)) == "one<|endoftext|>"


def test_shards_and_splits(tmp_path, monkeypatch):
    monkeypatch.setattr("rla.data.prepare.BLOCK_BYTES", 500)
    path, texts = corpus(tmp_path / "a.jsonl")
    prepare([path], tmp_path / "out", shard_tokens=5000, validation=0.1, seed=3)
    held_out = held_out_documents(range(300), 0.1, 3)
    assert read_back(tmp_path / "out" / "train") == [t for t, h in zip(texts, held_out, strict=True) if not h]
    assert read_back(tmp_path / "out" / "validation") == [t for t, h in zip(texts, held_out, strict=True) if h]
    assert len(TokenDataset.open(tmp_path / "out" / "train").index.shards) > 3
    assert sum(held_out) == 30


@pytest.mark.parametrize("share", [0.001, 0.01, 1 / 3, 0.37, 0.5, 0.9])
def test_held_out_documents(share):
    chosen = held_out_documents(range(10_000), share, 5)
    assert abs(chosen.sum() - 10_000 * share) <= 2
    parts = [held_out_documents(range(i, i + 100), share, 5) for i in range(0, 10_000, 100)]
    assert np.array_equal(np.concatenate(parts), chosen)
    assert share > 0.6 or not np.array_equal(held_out_documents(range(10_000), share, 6), chosen)
    assert held_out_documents(range(int(2 / share)), share, 5).any()
    assert not held_out_documents(range(100), 0.0, 5).any()


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("rla.data.prepare.BLOCK_BYTES", 700)
    path, _ = corpus(tmp_path / "a.jsonl")
    for n in (1, 2, 3):
        prepare([path], tmp_path / f"out{n}", shard_tokens=4000, validation=0.2, processes=n)
    assert tree(tmp_path / "out1") == tree(tmp_path / "out2") == tree(tmp_path / "out3")
    broken = Path(path).read_bytes().replace(b'{"id": 250', b'["id", 250')
    Path(path).write_bytes(broken)
    with pytest.raises(ValueError, match=r"a.jsonl, line 251: not JSON"):
        prepare([path], tmp_path / "out4", processes=2)
    assert not (tmp_path / "out4").exists()


# Interruptions

KILLED = """
    import os, shutil, signal, sys
    import rla.data.prepare as p
    p.BLOCK_BYTES, p.JOURNAL_SECONDS = 700, 0.0
    path, out, count = sys.argv[1], sys.argv[2], 0
    p.load_tokenizer("bytes")  # imports once for all children

    def attempt(at):
        # Whether a child that dies at the at-th durable step was killed.
        child = os.fork()
        if child == 0:
            for name in ("fsync", "replace", "rename"):
                setattr(os, name, dying(getattr(os, name), at))
            p.prepare([path], out, shard_tokens=4000, validation=0.2)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        return status != 0

    def dying(function, at):
        def call(*args, **kwargs):
            global count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
"""
ALL_ALONG = """
    kills = 0  # each attempt dies a little later, somewhere between any two steps
    while not os.path.exists(out):
        kills += attempt(10 + 2 * kills)
    print(kills)
"""
NEAR_THE_END = """
    partial, saved, kills = out + ".partial", out + ".saved", 0
    stop = int(sys.argv[3])

    def stopping(counts):
        if counts.documents >= stop:
            os._exit(0)

    if os.fork() == 0:
        p.prepare([path], out, shard_tokens=4000, validation=0.2, report=stopping)
    os.wait()
    os.rename(partial, saved)
    while True:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(saved, partial)
        if not attempt(kills + 1):
            break
        kills += 1
        if not os.path.exists(out):
            attempt(-1)
        assert sorted(os.listdir(out)) == ["train", "validation"]
        for folder in ("train", "validation"):
            p.Index.read(p.Path(out, folder))
            assert sorted(os.listdir(p.Path(out, folder))) == sorted(os.listdir(p.Path(sys.argv[4], folder)))
            for name in os.listdir(p.Path(sys.argv[4], folder)):
                one, two = p.Path(out, folder, name), p.Path(sys.argv[4], folder, name)
                assert one.is_dir() or one.read_bytes() == two.read_bytes(), (kills, name)
    print(kills)
"""


@pytest.mark.parametrize(
    ("where", "least"),
    [pytest.param(ALL_ALONG, 8, id="all along"), pytest.param(NEAR_THE_END, 30, id="near the end", marks=pytest.mark.slow)],
)
def test_kill_9_and_again_gives_the_same_bytes(tmp_path, monkeypatch, where, least):
    path, _ = corpus(tmp_path / "a.jsonl", count=120)
    monkeypatch.setattr("rla.data.prepare.BLOCK_BYTES", 700)
    prepare([path], tmp_path / "whole", shard_tokens=4000, validation=0.2)
    code = textwrap.dedent(KILLED) + textwrap.dedent(where)
    arguments = [path, str(tmp_path / "out"), "117", str(tmp_path / "whole")]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


class Stop(Exception):
    pass


def stop_after(number):
    def report(counts):
        if counts.documents >= number:
            raise Stop

    return report


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """Inputs, and a folder whose preparation was stopped half-way."""
    monkeypatch.setattr("rla.data.prepare.BLOCK_BYTES", 700)
    path, texts = corpus(tmp_path / "a.jsonl")
    with pytest.raises(Stop):
        prepare([path], tmp_path / "out", shard_tokens=2000, report=stop_after(150))
    assert (tmp_path / "out.partial" / "journal.json").exists()
    assert not (tmp_path / "out").exists()
    return path, texts, tmp_path / "out"


def test_finished_work_is_not_done_again(unfinished):
    path, texts, out = unfinished
    seen = []
    prepare([path], out, shard_tokens=2000, report=lambda counts: seen.append(counts.documents))
    assert 100 < seen[0] < 160
    assert read_back(out) == texts
    assert not out.with_name("out.partial").exists()


def test_other_settings_are_refused_on_an_unfinished_folder(unfinished):
    path, _, out = unfinished
    before = tree(out.with_name("out.partial"))
    with pytest.raises(
        ValueError, match=r"begun with other settings \(shard_tokens: then 2000, now 3000; seed: then 0, now 1\)"
    ):
        prepare([path], out, shard_tokens=3000, seed=1)
    with open(path, "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"begun with other settings \(inputs: then .*remove that folder to begin again"):
        prepare([path], out, shard_tokens=2000)
    assert tree(out.with_name("out.partial")) == before


def test_an_unfinished_shard_that_was_cut_is_refused(unfinished):
    path, _, out = unfinished
    journal = json.loads((out.with_name("out.partial") / "journal.json").read_text())
    writer = journal["writers"][0]
    shard = out.with_name("out.partial") / "data" / f"shard-{len(writer['shards']):05d}.tokens"
    assert writer["tokens"] > 10
    os.truncate(shard, 3)
    with pytest.raises(ValueError, match=r"has 3 bytes; expected at least \d+: remove the unfinished folder"):
        prepare([path], out, shard_tokens=2000)


def test_a_failure_at_the_start_leaves_nothing(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="line 1: no field 'body'"):
        prepare([path], tmp_path / "out", text_field="body")
    with pytest.raises(ValueError, match=r"validation: 0.01 of 6 documents leaves none for validation"):
        prepare([path], tmp_path / "out", validation=0.01, seed=1)
    (tmp_path / "b.txt").write_text("\f\n")
    with pytest.raises(ValueError, match="inputs: no document in them"):
        prepare([tmp_path / "b.txt"], tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.txt"]


def test_nothing_is_overwritten(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    prepare([path], tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists; nothing is overwritten"):
        prepare([path], tmp_path / "out", shard_tokens=5)
    assert tree(tmp_path / "out") == before


def test_one_process_at_a_time(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")

    def again(counts):
        prepare([path], tmp_path / "out")

    with pytest.raises(ValueError, match=r"another process is at work in .*out.partial"):
        prepare([path], tmp_path / "out", report=again)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc to look for processes in")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_command_stopped_and_started_again(tmp_path, how):
    path, texts = corpus(tmp_path / "a.jsonl", count=5000)
    code = """
        import sys, time
        import rla.data.prepare as p
        pause = float(sys.argv[3])
        p.BLOCK_BYTES, p.JOURNAL_SECONDS = 5000, 0.0 if pause else 10.0
        add = p._Work.add
        p._Work.add = lambda self, block: (time.sleep(pause), add(self, block))
        sys.exit(p.main((sys.argv[1],), out=p.Path(sys.argv[2]), processes=2))
    """

    def start(pause):
        command = [sys.executable, "-c", "if __name__ == '__main__':" + textwrap.indent(textwrap.dedent(code), "    ")]
        return subprocess.Popen([*command, path, str(tmp_path / "out"), pause], stderr=subprocess.PIPE, stdout=subprocess.PIPE)

    first = start("0.05")
    journal = tmp_path / "out.partial" / "journal.json"
    while not journal.exists():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.05)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    first.send_signal(how)
    _, errors = first.communicate(timeout=60)
    if how == signal.SIGINT:
        assert first.returncode == 130
        assert b"interrupted; the same command goes on" in errors
        assert b"Traceback" not in errors
    deadline = time.time() + 20
    while any(Path(f"/proc/{child}").exists() for child in children) and time.time() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]  # no worker outlives its parent
    again = start("0")
    assert again.wait(timeout=120) == 0, again.stderr.read()
    again.communicate()
    assert read_back(tmp_path / "out") == texts


# The command


def test_command(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", field="body")
    assert main((path,), out=tmp_path / "out", processes=1, text_field="body") == 0
    assert f"written: {tmp_path / 'out'} (6 documents, " in capsys.readouterr().out
    assert main((path,), out=tmp_path / "out", processes=1) == 2
    assert "rla prepare: out: " in capsys.readouterr().err
    for options, message in (
        ({"shard_tokens": "many"}, "--shard-tokens: expected a whole number such as 250000, 100M or 1.5B; got 'many'"),
        ({"tokenizer": str(tmp_path)}, "holds no tokenizer.json"),
        ({"validation": 1.5}, "validation: expected a share from 0 to below 1; got 1.5"),
        ({"processes": 0}, "processes: expected at least 1; got 0"),
        ({"shard_tokens": "0"}, "shard_tokens: expected at least 1; got 0"),
    ):
        assert main((path,), out=tmp_path / "new", **{"processes": 1, "text_field": "body", **options}) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def test_command_shows_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    path = write_jsonl(tmp_path / "a.jsonl")
    assert main((path,), out=tmp_path / "out", processes=1) == 0
    shown = capsys.readouterr().err
    assert "6 documents" in shown
    assert "100%" in shown


def test_parse_count():
    assert [parse_count(text, "n") for text in ("7", "2k", "100M", "1.5B", "1e3")] == [7, 2000, 10**8, 1_500_000_000, 1000]
    for text in ("", "M", "1.5", "-", "x", "inf", "nan", "1T"):
        with pytest.raises(ValueError, match="n: expected a whole number"):
            parse_count(text, "n")


def test_another_tokenizer(tmp_path):
    """A document that spells a special token holds no special token."""
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, "abcabc abc"] * 4)
    from rla.data.tokenizer import train_bpe

    train_bpe(data_sources.documents([path]), 280).save_pretrained(tmp_path / "bpe")
    prepare([path], tmp_path / "out", tokenizer=tmp_path / "bpe")
    data = TokenDataset.open(tmp_path / "out")
    tokens, starts = data.read(0, data.tokens), data.starts(0, data.tokens)
    assert (tokens == data.end_of_text).sum() == data.documents == len(starts)
    decode = load_tokenizer(tmp_path / "bpe").decode
    assert [decode(part[:-1]) for part in np.split(tokens, starts[1:])] == [*TEXTS, "abcabc abc"] * 4
    assert data.tokens < data.bytes
