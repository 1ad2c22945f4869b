"""What the models' tests share: tiny models with lively weights, and the mixers and hybrids they are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rla
from rla.models import RLAConfig, RLAForCausalLM

VOCAB = 61
HYBRIDS = {
    "rdn+softmax": ["rdn", "softmax"],
    "retnet+softmax": ["retnet", "softmax"],
    "mamba2+gla": ["mamba2", "gla"],
}
MIXERS: dict[str, str | list[str]] = {**{name: name for name in rla.METHODS}, "softmax": "softmax", **HYBRIDS}
FEW = {name: MIXERS[name] for name in ("rdn", "rla", "retnet", "softmax", "rdn+softmax")}


def tiny_config(mixer: Any = "rdn", **changes) -> RLAConfig:
    mixer = MIXERS.get(mixer, mixer) if isinstance(mixer, str) else mixer
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
    # 0.006 would give logits that hardly depend on the input.
    return RLAConfig(**{**sizes, "head_dim": 8, "mixer": mixer, "initializer_range": 0.4, **changes})


def tiny(mixer: str = "rdn", seed: int = 0, **changes) -> Any:
    torch.manual_seed(seed)
    return RLAForCausalLM(tiny_config(mixer, **changes)).eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def ratio(got: Tensor, want: Tensor) -> float:
    """Root mean square error over root mean square."""
    assert got.shape == want.shape
    return ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


def padded(lengths: list[int], side: str, seed: int = 1) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows of those lengths, [1, n] each, the batch of them padded with token 0, and its mask."""
    rows = [tokens(1, n, seed=seed + i) for i, n in enumerate(lengths)]
    T = max(lengths)
    ids, mask = torch.zeros(len(rows), T, dtype=torch.int64), torch.zeros(len(rows), T, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(T - row.shape[1], T) if side == "left" else slice(0, row.shape[1])
        ids[i, place], mask[i, place] = row[0], 1
    return rows, ids, mask


def character_tokenizer():
    """A tokenizer of single characters, made here: tests need no network."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyz .,!?'-ABCDEFGHIJKLMNOPQRSTUV"
    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(characters)}}
    assert len(vocab) <= VOCAB
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left")
