"""RLAForCausalLM: sizes, and that however a sequence is cut, padded or packed, the logits are those of the whole."""

import re

import pytest
import torch

import rla
from model_common import FEW, MIXERS, VOCAB, padded, ratio, tiny, tiny_config, tokens
from rla.models import RLACache, RLAConfig, RLAForCausalLM
from rla.models.configuration_rla import PAPER, SIZES

LIMIT = 1e-5


def count(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in RLAForCausalLM(config).parameters())


def test_parameters_of_the_papers_models():
    assert count(RLAConfig.paper("transformer")) == pytest.approx(1.51e9, rel=0.01)
    for name in (*PAPER[1:], "rla-tied", "rdn-nofit"):
        assert count(RLAConfig.paper(name)) == pytest.approx(1.55e9, rel=0.01), name


def test_sizes_grow():
    counts = [count(RLAConfig.preset(size)) for size in SIZES]
    assert counts == sorted(counts)
    assert counts[0] < 4e6
    assert counts[2] == pytest.approx(340e6, rel=0.05)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_any_split_and_decoding_equal_the_whole(mixer):
    model, ids = tiny(mixer), tokens(2, 23)
    want = model(ids, use_cache=False).logits
    cache, got, at = RLACache(model.config), [], 0
    for n in (5, 1, 7, 3, 1, 1, 1, 4):  # a prompt in pieces, then token by token, then a piece again
        got.append(model(ids[:, at : at + n], past_key_values=cache).logits)
        at += n
    assert cache.get_seq_length() == at == ids.shape[1]
    assert ratio(torch.cat(got, 1), want) < LIMIT


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 21, 22])
@torch.no_grad()
def test_split_anywhere(cut):
    model, ids = tiny("rdn+softmax"), tokens(1, 23)
    cache = RLACache(model.config)
    got = [model(part, past_key_values=cache).logits for part in (ids[:, :cut], ids[:, cut:])]
    assert ratio(torch.cat(got, 1), model(ids).logits) < LIMIT


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_padded_rows_equal_each_row_alone(mixer, side):
    model = tiny(mixer)
    rows, ids, mask = padded([11, 3, 7], side)
    logits = model(ids, attention_mask=mask).logits
    for i, row in enumerate(rows):
        assert ratio(logits[i : i + 1, mask[i].bool()], model(row).logits) < LIMIT


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_left_padding_in_pieces_and_decoding_equal_each_row_alone(mixer):
    model = tiny(mixer)
    rows, ids, mask = padded([11, 3, 7], "left")
    ids, mask = torch.cat((ids, tokens(3, 4, seed=9)), 1), torch.cat((mask, torch.ones(3, 4, dtype=mask.dtype)), 1)
    cache, got, at = RLACache(model.config), [], 0
    for n in (2, 1, 3, 5, 1, 1, 2):  # the first pieces hold rows of padding alone
        at += n
        got.append(model(ids[:, at - n : at], attention_mask=mask[:, :at], past_key_values=cache).logits)
    logits = torch.cat(got, 1)
    for i, row in enumerate(rows):
        whole = torch.cat((row, ids[i : i + 1, 11:]), 1)
        assert ratio(logits[i : i + 1, mask[i].bool()], model(whole).logits) < LIMIT


@torch.no_grad()
def test_a_piece_of_padding_alone():
    model = tiny("rdn+softmax")
    _, ids, mask = padded([5, 4], "left")
    ids = torch.cat((torch.zeros(2, 3, dtype=ids.dtype), ids), 1)
    mask = torch.cat((torch.zeros(2, 3, dtype=mask.dtype), mask), 1)
    cache = RLACache(model.config)
    model(ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)
    got = model(ids[:, 3:], attention_mask=mask, past_key_values=cache).logits
    want = model(ids, attention_mask=mask).logits[:, 3:]
    assert ratio(got[mask[:, 3:].bool()], want[mask[:, 3:].bool()]) < LIMIT


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_packed_documents_equal_each_document_alone(mixer):
    model = tiny(mixer)
    lengths = [5, 1, 9, 2]
    documents = [tokens(1, n, seed=n) for n in lengths]
    ids, want = torch.cat(documents, 1), torch.cat([model(d).logits for d in documents], 1)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    assert ratio(model(ids, cu_seqlens=bounds).logits, want) < LIMIT
    assert ratio(model(ids, cu_seqlens=torch.cat((bounds, bounds[-1:])).int()).logits, want) < LIMIT  # an empty one
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    assert ratio(model(ids, position_ids=position_ids).logits, want) < LIMIT


@pytest.mark.parametrize("mixer", FEW)
@torch.no_grad()
def test_packed_rows_of_a_batch(mixer):
    model, ids = tiny(mixer), tokens(2, 10)
    position_ids = torch.tensor([[*range(4), *range(6)], [*range(7), *range(3)]])
    got = model(ids, position_ids=position_ids).logits
    for row, cut in enumerate((4, 7)):
        want = torch.cat([model(ids[row : row + 1, s]).logits for s in (slice(cut), slice(cut, 10))], 1)
        assert ratio(got[row : row + 1], want) < LIMIT


@torch.no_grad()
def test_logits_to_keep():
    model, ids = tiny(), tokens(2, 9)
    logits = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=3).logits.argmax(-1), logits[:, -3:].argmax(-1))
    assert model(ids, logits_to_keep=torch.tensor([0, 4])).logits.shape == (2, 2, VOCAB)


@torch.no_grad()
def test_hidden_states_and_embeddings_and_tuples():
    model, ids = tiny(num_hidden_layers=3), tokens(2, 9)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    assert torch.equal(out.hidden_states[-1], model.model(ids).last_hidden_state)
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, out.logits)
    assert torch.equal(model(ids, return_dict=False)[0], out.logits)


@torch.no_grad()
def test_bfloat16_stays_near_float32():
    model, ids = tiny("rdn+softmax", initializer_range=0.1), tokens(2, 20)
    want = model(ids).logits
    model = model.to(torch.bfloat16)
    cache = RLACache(model.config)
    got = torch.cat([model(ids[:, :13], past_key_values=cache).logits, model(ids[:, 13:], past_key_values=cache).logits], 1)
    assert cache.layers[0].tensors()[1].dtype == torch.float32  # S
    assert ratio(got.float(), want) < 0.05


MISUSE = {
    "unknown mixer": (lambda: tiny_config("rdnn"), "mixer: unknown name 'rdnn'. Did you mean 'rdn'?"),
    "unknown mixer in a list": (lambda: tiny_config(["rdn", "soft"]), "mixer: unknown name 'soft'. Did you mean 'softmax'?"),
    "list too short": (lambda: tiny_config(["rdn"]), "num_hidden_layers = 2 names; got a list of 1"),
    "list too long": (lambda: tiny_config(["rdn"] * 3), "num_hidden_layers = 2 names; got a list of 3"),
    "head_dim": (lambda: tiny_config(head_dim=None, num_attention_heads=5), "head_dim: hidden_size = 24 is not a multiple of"),
    "head_dim 0": (lambda: tiny_config(head_dim=0), "head_dim: expected at least 1; got 0"),
    "odd rotary": (lambda: tiny_config("softmax", head_dim=7), "expected an even number; got 7"),
    "odd rotary of retnet": (lambda: tiny_config("retnet", head_dim=7), "expected an even number; got 7"),
    "kv heads": (lambda: tiny_config("softmax", num_key_value_heads=3), "num_key_value_heads: expected a divisor of"),
    "conv_size": (lambda: tiny_config(conv_size=1), "conv_size: expected 0 (none), 2 or more, or None; got 1"),
    "backend": (lambda: tiny_config(backend="cuda"), "backend: expected one of"),
    "a newer config": (lambda: tiny_config(config_version=99), "config_version: this config has version 99, newer"),
    "changed since": (lambda: _changed(), "mixer: unknown name 'rnn'"),
    "preset": (lambda: RLAConfig.preset("huge"), "size: expected one of tiny, small, 340m, 1.5b; got 'huge'"),
    "paper": (lambda: RLAConfig.paper("mamba3"), "name: expected one of transformer, retnet"),
    "padding in the middle": (
        lambda: tiny()(tokens(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]])),
        "attention_mask: padding in the middle of row 1; expected all padding on its left or all on its right",
    ),
    "padding between prompt and decoding": (lambda: _decode_after_right_padding(), "padding in the middle of row 0"),
    "mask of another length": (lambda: tiny()(tokens(1, 4), attention_mask=torch.ones(1, 3)), "= [1, 4]; got [1, 3]"),
    "4D mask": (lambda: tiny()(tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4)), "expected a padding mask [B, T]"),
    "positions": (lambda: tiny()(tokens(1, 4), position_ids=torch.arange(4)), "expected shape [1 or 1, 4]; got [4]"),
    "packed batch": (lambda: tiny()(tokens(2, 4), cu_seqlens=torch.tensor([0, 4])), "expected a batch of 1; got 2"),
    "packed and padded": (
        lambda: tiny()(tokens(1, 4), cu_seqlens=torch.tensor([0, 4]), attention_mask=torch.tensor([[0, 1, 1, 1]])),
        "cu_seqlens: packed rows have no padding",
    ),
    "packed with a cache": (
        lambda: tiny()(tokens(1, 4), cu_seqlens=torch.tensor([0, 1, 4]), use_cache=True),
        "packed documents leave no cache",
    ),
    "cache of another model": (lambda: tiny()(tokens(1, 4), past_key_values=_filled("rla")), "another model (2 layers of rla"),
    "cache of another size": (lambda: tiny()(tokens(1, 4), past_key_values=_filled(head_dim=4)), "belongs to another model"),
    "cache of another batch": (lambda: tiny()(tokens(1, 4), past_key_values=_filled()), "holds 2 rows, the input 1"),
    "no input": (lambda: tiny()(), "expected either input_ids or inputs_embeds; got none"),
}  # fmt: skip


def _changed():
    config = tiny_config()
    config.mixer = "rnn"
    return RLAForCausalLM(config)


def _filled(mixer="rdn", **changes):
    model = tiny(mixer, **changes)
    return model(tokens(2, 3), use_cache=True).past_key_values


def _decode_after_right_padding():
    model = tiny()
    cache = model(tokens(1, 3), attention_mask=torch.tensor([[1, 1, 0]]), use_cache=True).past_key_values
    return model(tokens(1, 1), attention_mask=torch.tensor([[1, 1, 0, 1]]), past_key_values=cache)


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(case):
    call, message = MISUSE[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_foreign_cache_and_unknown_fields():
    from transformers import DynamicCache

    with pytest.raises(
        TypeError, match=re.escape("past_key_values: expected an RLACache, RLACache(model.config); got DynamicCache")
    ):
        tiny()(tokens(1, 3), past_key_values=DynamicCache())
    with pytest.raises(TypeError, match="unknown field 'hiden_size'"):
        RLAConfig.preset("tiny", hiden_size=3)


def test_import_rla_stays_cheap():
    import subprocess
    import sys

    code = "import sys, rla; assert not {'transformers', 'rla.nn', 'rla.models'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert rla.__version__
