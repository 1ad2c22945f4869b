"""The prefix tree, and the engine against plain passes of the model: scores, continuations, counts of tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_common import VOCAB, tiny
from rla.eval.engine import Engine, join, take_row
from rla.eval.trie import Edge, build
from rla.models import RLACache

MIXERS = ("rdn", "retnet", "softmax", "rdn+softmax", "mamba2+gla")


def path(edge: Edge | None) -> list[int]:
    return [] if edge is None else [*path(edge.parent), *edge.tokens]


def everything(roots: list[Edge]) -> list[Edge]:
    return [edge for root in roots for edge in (root, *everything(root.children))]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_sequence_is_a_path_of_the_tree(sequences, worth, segment, reuse):
    roots, ends = build(sequences, reuse=reuse, worth=worth, segment=segment)
    edges = everything(roots)
    for i, (tokens, edge) in enumerate(zip(sequences, ends, strict=True)):
        assert path(edge) == tokens
        assert i in edge.ends
    assert sum(len(edge.ends) for edge in edges) == len(sequences)
    assert all(0 < len(edge.tokens) <= segment and edge.start == len(path(edge.parent)) for edge in edges)
    computed = sum(len(edge.tokens) for edge in edges)
    if not reuse:
        assert computed == sum(map(len, sequences))
    elif worth == 1:  # then every distinct prefix is computed once
        assert computed == len({tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)})


def test_a_short_shared_piece_is_not_worth_a_pass():
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert len(build(sequences, worth=3)[0]) == 1
    assert len(build(sequences, worth=4)[0]) == 2


def test_the_tree_refuses_an_empty_sequence():
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        build([[1], []])


def shared_requests(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Inputs with targets; two long prefixes, some inputs of one token, some that begin others, some twice."""
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    prefixes = [draw(23), draw(9), draw(1)]
    found = []
    for i in range(21):
        tokens = prefixes[i % 3] + draw(rng.randrange(8))
        found.append((tokens, draw(rng.randrange(1, len(tokens) + 1))))
    found += [(prefixes[0], draw(2)), found[3], (found[4][0], draw(1))]
    return found


@torch.no_grad()
def plain_score(model, tokens, targets):
    logits = model(torch.tensor([tokens])).logits[0, -len(targets) :].double().log_softmax(-1)
    values = logits[torch.arange(len(targets)), torch.tensor(targets)]
    return values.sum().item(), bool((logits.argmax(-1) == torch.tensor(targets)).all())


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("options", [{}, {"reuse": False}, {"segment": 5, "worth": 2}, {"batch_size": 1}, {"batch_size": 100}])
def test_scores_are_those_of_whole_passes(mixer, options):
    model = tiny(mixer)
    given = shared_requests()
    with torch.no_grad():  # some targets that are the likeliest, so that both answers occur
        given += [(t, [model(torch.tensor([t])).logits[0, -1].argmax().item()]) for t, _ in given[:4]]
    got = Engine(model, **{"worth": 4, **options}).score(given)
    for (tokens, targets), score in zip(given, got, strict=True):
        want, greedy = plain_score(model, tokens, targets)
        assert score.logprob == pytest.approx(want, abs=1e-5 * len(targets))
        assert score.is_greedy == greedy
    assert any(score.is_greedy for score in got)


def test_reuse_computes_a_shared_prefix_once():
    prefix = list(range(1, 41))
    given = [([*prefix, i], [i]) for i in range(10)]
    with_reuse, without = Engine(tiny()), Engine(tiny(), reuse=False)
    assert [s.logprob for s in with_reuse.score(given)] == pytest.approx([s.logprob for s in without.score(given)], abs=1e-5)
    assert with_reuse.tokens.as_dict() == {"asked": 410, "computed": 50, "generated": 0, "saved": round(1 - 50 / 410, 6)}
    assert without.tokens.computed == without.tokens.asked == 410


@torch.no_grad()
def plain_greedy(model, tokens, count, stop):
    made: list[int] = []
    while len(made) < count:
        made.append(model(torch.tensor([[*tokens, *made]])).logits[0, -1].argmax().item())
        if stop(made):
            break
    return made


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("options", [{}, {"reuse": False, "batch_size": 3}, {"segment": 5, "worth": 2, "batch_size": 4}])
def test_continuations_are_those_of_whole_passes(mixer, options):
    model = tiny(mixer)
    contexts = [tokens for tokens, _ in shared_requests()]
    stop = lambda made: made[-1] % 5 == 0  # noqa: E731
    got = Engine(model, **options).generate(contexts, max_tokens=6, stop=stop)
    want = [plain_greedy(model, tokens, 6, stop) for tokens in contexts]
    assert got == want
    assert len({len(made) for made in got}) > 1  # some stopped, some did not


def test_live_states_are_bounded(monkeypatch):
    """Many contexts with two continuations each: states of a few batches are alive at a time, not those of all contexts."""
    rng = random.Random(0)
    contexts = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(40)]
    given = [([*c, last], [1]) for c in contexts for last in (3, 4)]
    engine, most = Engine(tiny(), batch_size=4), 0
    roots, _ = build([tokens for tokens, _ in given])
    assert len(roots) == 40
    for _ in engine._run(roots):
        most = max(most, sum(edge.state is not None for edge in roots))
    assert 0 < most <= 8
    assert all(edge.state is None for edge in roots)


def test_joined_rows_are_copies():
    model = tiny("rdn+softmax")
    cache = RLACache(model.config)
    with torch.no_grad():
        model(torch.arange(1, 7).view(2, 3), past_key_values=cache)
    rows = [take_row(model.config, cache, i, 3) for i in (1, 0)]
    joined = join(model.config, rows)
    assert joined.seen == 3
    assert joined.batch_size == 2
    for old, new in zip(cache.layers, joined.layers, strict=True):
        for a, b in zip(old.tensors(), new.tensors(), strict=True):
            torch.testing.assert_close(a.flip(0), b, rtol=0, atol=0)
            assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("request_", [([1, 2], []), ([1, 2], [3, 4, 5])])
def test_targets_must_fit_the_input(request_):
    with pytest.raises(ValueError, match="request 0"):
        Engine(tiny()).score([request_])
