"""Hypothesis searches shapes, methods and gates; gradcheck checks each distinct formula."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rla
from common import ALL, Case, assert_agrees, call, make, skip_unless_serves
from rla.ops.backends import BACKENDS

SEARCH = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def methods(draw):
    return rla.Method(
        rule=draw(st.sampled_from(("additive", "delta"))),
        correction=draw(st.sampled_from(("none", "token", "fitted"))),
        decay=draw(st.sampled_from(("none", "scalar", "scalar", "vector"))),
        rate=draw(st.sampled_from(("one", "sigmoid"))),
        gamma=draw(st.sampled_from(("own", "tied"))),
        gate_output=draw(st.booleans()),
        loss=draw(st.sampled_from(("l2", "huber", "logcosh"))),
        clip=draw(st.sampled_from((0.1, 1.0, 3.0))),
    )


@st.composite
def cases(draw):
    sizes = {name: draw(st.integers(1, most)) for name, most in (("H", 3), ("G", 3), ("K", 17), ("V", 17))}
    state = draw(st.booleans())
    if draw(st.booleans()):
        return Case(lengths=tuple(draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))), state=state, **sizes)
    return Case(B=draw(st.integers(1, 3)), T=draw(st.integers(0, 140)), state=state, **sizes)


@st.composite
def gates(draw):
    """A change of the random inputs: some gates at their extremes, slow or fast decay."""
    values = {"log_alpha": (0.0, -torch.inf, -1e-3, -30.0), "beta": (0.0, 1.0), "gamma": (0.0, 1.0)}
    chosen = {name: draw(st.sampled_from((None, *extremes))) for name, extremes in values.items()}
    seed, share = draw(st.integers(0, 99)), draw(st.sampled_from((0.1, 0.5, 1.0)))

    def change(x):
        generator = torch.Generator().manual_seed(seed)
        for name, value in chosen.items():
            if value is not None and name in x:
                x[name][torch.rand(x[name].shape, generator=generator) < share] = value

    return change


@pytest.mark.parametrize("backend", BACKENDS)
@SEARCH
@given(method=methods(), case=cases(), change=gates(), seed=st.integers(0, 1000))
def test_float32_agrees_with_the_reference(backend, method, case, change, seed):
    if backend == "native" and method.decay == "vector":
        method = dataclasses.replace(method, decay="scalar")
    skip_unless_serves(backend, method, torch.float32, case)
    assert_agrees(method, case, backend, torch.float32, seed=seed, change=change)


@SEARCH
@given(method=methods(), case=cases(), change=gates(), seed=st.integers(0, 1000))
def test_float64_agrees_with_the_reference(method, case, change, seed):
    assert_agrees(method, case, "chunked", torch.float64, seed=seed, change=change)


@SEARCH
@given(method=methods(), cut=st.integers(0, 100), seed=st.integers(0, 1000))
def test_later_tokens_do_not_reach_earlier_outputs(method, cut, seed):
    case = Case(B=1, T=100, H=1, K=4, V=4)
    x = {n: t.detach() for n, t in make(method, case, torch.float64, seed).items()}
    o, _ = call(x, method, "chunked")
    start, _ = call({n: t[:, :cut] for n, t in x.items()}, method, "chunked")
    torch.testing.assert_close(o[:, :cut], start, rtol=1e-12, atol=1e-12)


# One method of each distinct formula; clip and l2 differ by psi alone, tied and own by the caller.
FORMULAS = ("linear", "gla", "sgla", "gdn", "rla", "rdn", "rla-sum", "rdn-sum", "rla-nofit", "rdn-nofit", "rdn-logcosh",
            "rla-noclip", "rla-nonorm", "rla-nofit-sum", "rdn-nofit-sum", "vector-gdn", "vector-rla", "vector-rdn",
            "vector-rdn-nofit", "vector-rdn-sum")  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_gradcheck(name, monkeypatch):
    from rla.ops import chunked

    monkeypatch.setattr(chunked, "CHUNK", 4)  # several chunks in a short sequence
    monkeypatch.setattr(chunked, "CHUNK_VECTOR", 4)
    method, case = ALL[name], Case(lengths=(6, 0, 3), H=1, G=2, K=3, V=2, state=True)
    x = make(method, case)

    def function(*tensors):
        o, state = call(dict(zip(x, tensors, strict=True)), method, "chunked", case.cu_seqlens)
        return (o, state.S) if state.R is None else (o, state.S, state.R)

    assert torch.autograd.gradcheck(function, tuple(x.values()))
