"""The built-in text: three public-domain books (see text/README.md), so that everything runs without a download.

`builtin_dataset` gives them as token shards, made once into a cache. `unigram_entropy` is the yardstick for a first run: a
model that knows nothing but how often each token occurs has that loss.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np

from .shards import VERSION, TokenDataset

Split = Literal["train", "validation"]


def builtin_text(split: Split) -> Path:
    """The file that holds a split, xz-compressed, books separated by a line with a form feed."""
    if split not in ("train", "validation"):
        raise ValueError(f"split: expected 'train' or 'validation'; got {split!r}")
    return Path(__file__).with_name("text") / f"{split}.txt.xz"


def builtin_dataset(
    split: Split, tokenizer: str | os.PathLike[str] = "bytes", cache: str | os.PathLike[str] | None = None
) -> TokenDataset:
    """The built-in text as tokens; `cache` is where it is kept (default: rla in the user's cache folder)."""
    from .prepare import prepare
    from .tokenizer import fingerprint, load_tokenizer

    text = builtin_text(split)
    content = [str(VERSION).encode(), text.read_bytes(), fingerprint(load_tokenizer(tokenizer)).encode()]
    key = hashlib.sha256(b"\0".join(content)).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rla" if cache is None else Path(cache)
    folder = base / f"builtin-{split}-{key}"
    if not folder.exists():
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=base) as scratch:
            made = Path(scratch) / "data"
            prepare([text], made, tokenizer=tokenizer)
            try:
                os.rename(made, folder)
            except OSError:  # another process was first, with the same bytes
                if not folder.exists():
                    raise
    try:
        return TokenDataset.open(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; {str(folder)!r} is a cache: remove it, and it is made again") from error


def unigram_entropy(dataset: TokenDataset) -> float:
    """Nats per token of the distribution of single tokens."""
    counts = np.zeros(dataset.vocab_size, np.int64)
    for tokens in dataset.chunks():
        counts += np.bincount(tokens, minlength=dataset.vocab_size)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
