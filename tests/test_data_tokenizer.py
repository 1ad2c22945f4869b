"""Tokenizers: bytes, files, folders, a new BPE."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rla.data import end_of_text, fingerprint, load_tokenizer
from rla.data.encode import Encoder
from rla.data.tokenizer import END_OF_TEXT, main_train, train_bpe

SAMPLE = "  Hello , it 's n't\r\n\t\x00\x1f 漢字 é é 😀 12345 ' .\n\n"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def in_bytes():
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def trained():
    return train_bpe(iter(["the cat sat on the mat, don't you know? 2024 " * 20, SAMPLE]), 320)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request, in_bytes, trained):
    return in_bytes if request.param == "bytes" else trained


def test_bytes_are_their_values(in_bytes):
    assert len(in_bytes) == 257
    assert (end_of_text(in_bytes), in_bytes.eos_token) == (256, END_OF_TEXT)
    assert in_bytes(SAMPLE)["input_ids"] == list(SAMPLE.encode())
    assert in_bytes("a" + END_OF_TEXT)["input_ids"] == [97, 256]
    assert in_bytes.decode([97, 256], skip_special_tokens=True) == "a"


@given(text=TEXT)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace(END_OF_TEXT, "")


@given(data=st.binary(max_size=20))
def test_bytes_that_are_no_text_decode_to_replacements(in_bytes, data):
    assert in_bytes.decode(list(data)) == data.decode(errors="replace")


@settings(deadline=None)
@given(texts=st.lists(st.one_of(TEXT, st.just(f"a{END_OF_TEXT}b")), max_size=4))
def test_encoder_agrees_with_the_tokenizer(tokenizer, folders, texts):
    made = Encoder(folders[len(tokenizer)]).encode(texts)
    for text, ids in zip(texts, made, strict=True):
        assert ids.tolist() == tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        assert end_of_text(tokenizer) not in ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory, in_bytes, trained):
    out = {}
    for tokenizer in (in_bytes, trained):
        out[len(tokenizer)] = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(out[len(tokenizer)])
    return out


def test_a_saved_tokenizer_is_the_same(tokenizer, folders):
    from transformers import AutoTokenizer

    folder = folders[len(tokenizer)]
    print_of = fingerprint(tokenizer)
    for again in (
        load_tokenizer(folder),
        load_tokenizer(str(folder / "tokenizer.json")),
        AutoTokenizer.from_pretrained(folder),
    ):
        assert again(SAMPLE)["input_ids"] == tokenizer(SAMPLE)["input_ids"]
        assert again.decode(again(SAMPLE)["input_ids"]) == SAMPLE
        assert fingerprint(again) == print_of
        again(["a", "b c"], padding=False, truncation=True, max_length=1)  # settings of a call are no part of it
        assert fingerprint(again) == print_of


def test_fingerprints_differ(in_bytes, trained):
    other = train_bpe(iter(["other words altogether " * 20]), 320)
    assert len({fingerprint(in_bytes), fingerprint(trained), fingerprint(other)}) == 3
    assert fingerprint(in_bytes) == "ed3552c04360f62545c187a1fa8a30c59db3ad8b8b2d175f03478e66b438f8ac"


def test_a_lone_tokenizer_json(tmp_path, trained, folders):
    shutil.copy(folders[len(trained)] / "tokenizer.json", tmp_path / "mine.json")
    lone = load_tokenizer(tmp_path / "mine.json")
    assert fingerprint(lone) == fingerprint(trained)
    content = json.loads((tmp_path / "mine.json").read_text())
    content["added_tokens"] = []
    (tmp_path / "mine.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has no end-of-text token \(eos_token\)"):
        end_of_text(load_tokenizer(tmp_path / "mine.json"))


def test_names_that_cannot_be_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file or folder 'nothing/tokenizer.json'"):
        load_tokenizer("nothing/tokenizer.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json' is not a tokenizer.json"):
        load_tokenizer(tmp_path / "bad.json")


def test_command(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a rose is a rose is a rose. " * 50)
    (tmp_path / "b.jsonl").write_text('{"body": "roses and roses, 123456"}\n')
    files = (str(tmp_path / "a.txt"),)
    assert main_train(files, out=tmp_path / "out", size=262) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'out'} (262 tokens)\n"
    tokenizer = load_tokenizer(tmp_path / "out")
    assert len(tokenizer) == 262
    assert len(tokenizer("a rose is a rose")["input_ids"]) < 10
    assert main_train(files, out=tmp_path / "out", size=262) == 2
    assert "exists; nothing is overwritten" in capsys.readouterr().err
    assert main_train((), out=tmp_path / "new", size=262) == 2
    assert "inputs: expected at least one file" in capsys.readouterr().err
    assert main_train(files, out=tmp_path / "new", size=256) == 2
    assert "--size: expected at least 257 (the bytes and end-of-text); got 256" in capsys.readouterr().err
    assert main_train((str(tmp_path / "b.jsonl"),), out=tmp_path / "new", size=262) == 2
    assert "line 1: no field 'text'" in capsys.readouterr().err
    assert main_train((str(tmp_path / "b.jsonl"),), out=tmp_path / "small", size=900, text_field="body") == 0
    assert "tokens only, not 900" in capsys.readouterr().err


@pytest.mark.skipif("RLA_DATA" not in os.environ, reason="RLA_DATA names no folder with tokenizers")
def test_gpt2(tmp_path):
    folder = Path(os.environ["RLA_DATA"]) / "tokenizers" / "gpt2"
    gpt2 = load_tokenizer(folder)
    assert (len(gpt2), end_of_text(gpt2)) == (50257, 50256)
    gpt2.save_pretrained(tmp_path)
    assert fingerprint(load_tokenizer(tmp_path)) == fingerprint(gpt2) == fingerprint(load_tokenizer(folder / "tokenizer.json"))
    assert Encoder(tmp_path).encode([SAMPLE])[0].tolist() == gpt2(SAMPLE)["input_ids"]
