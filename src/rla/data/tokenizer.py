"""Tokenizers: built-in bytes, any `tokenizer.json`, folder or Hugging Face name, and `rla tokenizer train` for a new BPE.

The built-in one, "bytes", has the 256 byte values as tokens 0..255 and `<|endoftext|>` as 256. It is an ordinary Transformers
tokenizer: it saves, opens with AutoTokenizer, and gives any text back exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")  # for a tokenizer.json without a configuration

# Pieces that merges never cross: a word with the space before it, up to three digits, a run of punctuation, line ends with the
# white space before them, other white space, whose last character is left to the next word.
SPLIT = r" ?\p{L}[\p{L}\p{M}]*(?:'\p{L}+)?| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of that name: "bytes", a tokenizer.json, a folder that holds one, or a name on the Hugging Face Hub."""
    from transformers import AutoTokenizer

    if name == BYTES:
        return _wrap(bytes_backend(), END_OF_TEXT)
    path = Path(name)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(f"tokenizer: the folder {str(path)!r} holds no tokenizer.json")
        path = path / "tokenizer.json"
    if path.is_file():
        if (path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json":
            return _fast(AutoTokenizer.from_pretrained(str(path.parent)), name)
        return _from_file(path)
    if path.suffix == ".json" or path.is_absolute() or str(name).startswith("."):
        raise FileNotFoundError(f"tokenizer: no file or folder {str(name)!r}")
    try:
        return _fast(AutoTokenizer.from_pretrained(str(name)), name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer: can't open {str(name)!r}; expected {BYTES!r}, a tokenizer.json, a folder with one, or a name on the "
            f"Hugging Face Hub ({str(error).splitlines()[0]})"
        ) from error


def end_of_text(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id that ends a document."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "tokenizer: has no end-of-text token (eos_token), which must follow every document; set one and save it"
        )
    return int(tokenizer.eos_token_id)


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of all that decides which ids a text becomes; saving and loading leave it as it is."""
    content = {**deciding(tokenizer.backend_tokenizer), "end_of_text": end_of_text(tokenizer)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def main_train(files: tuple[str, ...], /, *, out: Path, size: int = 16384, text_field: str = "text") -> int:
    """Train a byte-level BPE on text, JSONL or Parquet files, and save it where AutoTokenizer and `rla prepare` open it.

    Example: rla tokenizer train books/*.txt --size 16384 --out my-tokenizer

    Args:
        files: .txt, .jsonl (also .gz, .xz) or .parquet files, or hf:owner/name.
        out: the folder to write; it must not exist.
        size: tokens in all, the 256 bytes and end-of-text included.
        text_field: field or column that holds the text.
    """
    from .sources import check_inputs, documents

    try:
        if size < 257:
            raise ValueError(f"--size: expected at least 257 (the bytes and end-of-text); got {size}")
        if out.exists():
            raise ValueError(f"--out: {str(out)!r} exists; nothing is overwritten")
        check_inputs(files)
        tokenizer = train_bpe(documents(files, field=text_field), size, progress=sys.stderr.isatty())
    except (OSError, ValueError) as error:
        print(f"rla tokenizer train: {error}", file=sys.stderr)
        return 2
    tokenizer.save_pretrained(str(out))
    if len(tokenizer) < size:
        print(f"rla tokenizer train: the text gives {len(tokenizer)} tokens only, not {size}", file=sys.stderr)
    print(f"written: {out} ({len(tokenizer)} tokens)")
    return 0


def train_bpe(texts: Iterator[str], size: int, *, progress: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens; no normalisation, any text comes back exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=progress
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer, END_OF_TEXT)


def bytes_backend() -> Any:
    """The `tokenizers.Tokenizer` behind "bytes"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet writes a byte as itself where Latin-1 has a visible character, else as one from 256 on.
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    vocab = {chr(byte if byte in visible else next(hidden)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def deciding(backend: Any) -> dict[str, Any]:
    """The parts of a serialised tokenizer that decide which ids a text becomes."""
    content = json.loads(backend.to_str())
    return {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"tokenizer: {str(path)!r} is not a tokenizer.json ({error})") from error
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    return _wrap(backend, next((end for end in KNOWN_ENDS if end in special), None))


def _wrap(backend: Any, end: str | None) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, clean_up_tokenization_spaces=False)


def _fast(tokenizer: Any, name: object) -> PreTrainedTokenizerFast:
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer: {str(name)!r} has no fast version (tokenizer.json); expected one")
    return tokenizer
