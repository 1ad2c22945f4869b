"""generate: with a cache as without one, in batches, in pieces, assisted; and what the cache can do."""

import copy
import re
import subprocess
import sys

import pytest
import torch

from model_common import FEW, MIXERS, VOCAB, character_tokenizer, padded, ratio, tiny, tokens
from rla.models import RLACache
from rla.models.generate import main as generate_main

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_with_a_cache_equals_without(mixer):
    model, ids = tiny(mixer), tokens(2, 7)
    want = model.generate(ids, use_cache=False, **GREEDY)
    assert want.shape == (2, 15)
    assert torch.equal(model.generate(ids, **GREEDY), want)


@pytest.mark.parametrize("mixer", FEW)
def test_beams_with_a_cache_equal_without(mixer):
    model, ids = tiny(mixer), tokens(2, 7)
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
    want = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), want)


@pytest.mark.parametrize("mixer", FEW)
def test_prompts_of_unequal_length(mixer):
    model = tiny(mixer)
    rows, ids, mask = padded([9, 2, 6], "left")
    batch = model.generate(ids, attention_mask=mask, **GREEDY)
    for i, row in enumerate(rows):
        assert torch.equal(batch[i, 9:], model.generate(row, **GREEDY)[0, row.shape[1] :])


def test_sampling_is_repeatable():
    model, ids = tiny(), tokens(2, 5)
    draws = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        draws.append(model.generate(ids, use_cache=use_cache, do_sample=True, top_k=5, max_new_tokens=6, pad_token_id=0))
    assert torch.equal(*draws)


@pytest.mark.parametrize("mixer", FEW)
def test_prefill_in_pieces_and_continued_from_a_cache(mixer):
    model, ids = tiny(mixer), tokens(1, 10)
    want = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, prefill_chunk_size=3, **GREEDY), want)
    cache = RLACache(model.config)
    model.generate(ids[:, :6], past_key_values=cache, **{**GREEDY, "max_new_tokens": 1})
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), want)


@pytest.mark.parametrize("mixer", FEW)
def test_assisted_decoding_and_prompt_lookup_equal_greedy(mixer):
    model, ids = tiny(mixer), tokens(1, 10)
    # The assistant is called without a mask, and one is guessed from the padding token: let that be no token.
    options = {**GREEDY, "pad_token_id": VOCAB}
    want = model.generate(ids, **options)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for p in assistant.parameters():
            p.add_(0.03 * torch.randn_like(p))
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), want)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), want)


@pytest.mark.parametrize("mixer", FEW)
@torch.no_grad()
def test_snapshots_and_reset(mixer):
    model, ids = tiny(mixer), tokens(2, 9)
    cache = RLACache(model.config)
    model(ids[:, :5], past_key_values=cache)
    for snapshot in (cache.copy(), copy.deepcopy(cache)):
        want = [model(ids[:, 5:6], past_key_values=snapshot).logits, model(ids[:, 6:], past_key_values=snapshot).logits]
        again = cache.copy()
        got = [model(ids[:, 5:6], past_key_values=again).logits, model(ids[:, 6:], past_key_values=again).logits]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert cache.get_seq_length() == 5
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.nbytes) == (0, -1, 0)
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


@pytest.mark.parametrize("mixer", FEW)
@torch.no_grad()
def test_rows_are_selected_reordered_and_repeated(mixer):
    model, ids, new = tiny(mixer), tokens(3, 5), tokens(4, 2, seed=5)

    def after(rows, change):
        cache = RLACache(model.config)
        model(ids, past_key_values=cache)
        change(cache)
        assert cache.batch_size == len(rows)
        got = model(new[: len(rows)], past_key_values=cache).logits
        want = model(torch.cat((ids[rows], new[: len(rows)]), 1)).logits[:, -2:]
        assert ratio(got, want) < 1e-5

    after([2, 0, 0], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    after([1, 2], lambda cache: cache.batch_select_indices(torch.tensor([1, 2])))
    after([0, 2], lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])))
    cache = RLACache(model.config)
    model(ids[:2], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    got = model(new, past_key_values=cache).logits
    assert ratio(got, model(torch.cat((ids[[0, 0, 1, 1]], new), 1)).logits[:, -2:]) < 1e-5


@pytest.mark.parametrize("mixer", FEW)
@torch.no_grad()
def test_crop_goes_back_while_recording(mixer):
    model, ids = tiny(mixer), tokens(1, 12)
    cache = RLACache(model.config)
    cache.activate_past_recording()
    model(ids[:, :4], past_key_values=cache)
    cache.crop(0)
    for n in (3, 1, 1):
        model(tokens(1, n, seed=7), past_key_values=cache)
    cache.crop(torch.tensor(-4))  # one token of the three stays
    kept = torch.cat((ids[:, :4], tokens(1, 3, seed=7)[:, :1], ids[:, 5:]), 1)
    assert cache.get_seq_length() == 5
    assert ratio(model(ids[:, 5:], past_key_values=cache).logits, model(kept).logits[:, 5:]) < 1e-5


@torch.no_grad()
def test_crop_refuses_what_it_cannot_do():
    model = tiny()
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    cache.crop(0)
    with pytest.raises(ValueError, match=re.escape("can't take 2 of them back; call cache.activate_past_recording()")):
        cache.crop(-2)
    with pytest.raises(ValueError, match="crop: expected 0 or a negative number"):
        cache.crop(2)
    with pytest.raises(ValueError, match="crop: the cache holds 5 tokens; can't take 6 back"):
        cache.crop(-6)
    softmax = tiny("softmax")
    cache, ids = RLACache(softmax.config), tokens(1, 5)
    softmax(ids, past_key_values=cache)
    cache.crop(-2)
    assert ratio(softmax(ids[:, 3:], past_key_values=cache).logits, softmax(ids).logits[:, 3:]) < 1e-5


@pytest.mark.parametrize("mixer", ["rdn", "rla", "mamba2"])
@torch.no_grad()
def test_cache_bytes_do_not_depend_on_length(mixer):
    model = tiny(mixer, num_hidden_layers=1)
    sizes = []
    for length in (128, 32768):
        cache = RLACache(model.config)
        for _ in range(0, length, 4096):
            model(tokens(1, min(length, 4096)), past_key_values=cache, logits_to_keep=1)
        model(tokens(1, 1), past_key_values=cache)
        assert cache.get_seq_length() == length + 1
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in cache.layers[0].tensors()}
        sizes.append((cache.nbytes, sum(held.values())))
    assert sizes[0] == sizes[1]


def test_one_token_steps_use_the_step_kernel(monkeypatch):
    import rla.nn.attention as attention

    calls = []
    step = attention.step

    def counted(*args, **kwargs):
        calls.append(1)
        return step(*args, **kwargs)

    monkeypatch.setattr(attention, "step", counted)
    model = tiny()
    model.generate(tokens(1, 5), **GREEDY)
    assert len(calls) == 2 * 7  # layers, tokens after the first


def test_pipeline(tmp_path):
    from transformers import pipeline

    pipe = pipeline("text-generation", model=tiny("rdn+softmax"), tokenizer=character_tokenizer())
    text = pipe("the cat ", max_new_tokens=6, do_sample=False)[0]["generated_text"]
    assert text.startswith("the cat ")
    batch = pipe(["the cat ", "a "], max_new_tokens=6, do_sample=False, batch_size=2)
    assert batch[0][0]["generated_text"] == text


def saved(tmp_path, **changes):
    tiny("rla", **changes).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_command_streams_text(tmp_path, capsys):
    folder = saved(tmp_path)
    capsys.readouterr()
    assert generate_main(folder, prompt="the cat", max_new_tokens=5, temperature=0) == 0
    greedy = capsys.readouterr().out
    assert greedy.startswith("the cat")
    assert len(greedy.strip()) > len("the cat")
    texts = []
    for _ in range(2):
        assert generate_main(folder, prompt="the cat", max_new_tokens=5, seed=7) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_command_says_what_is_wrong(tmp_path, capsys):
    for options, message in (
        ({"model": str(tmp_path / "none")}, "there is no folder"),
        ({"max_new_tokens": 0}, "--max-new-tokens: expected at least 1; got 0"),
        ({"temperature": -1.0}, "--temperature: expected 0 or more; got -1.0"),
        ({"top_p": 0.0}, "--top-p: expected a number above 0 and up to 1; got 0.0"),
    ):
        assert generate_main(**{"model": "x", "prompt": "a", **options}) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_command_line(tmp_path):
    command = [sys.executable, "-m", "rla", "generate", saved(tmp_path), "--prompt", "the cat", "--max-new-tokens", "5"]
    run = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("the cat")
