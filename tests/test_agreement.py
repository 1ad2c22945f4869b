"""Every backend against the float64 reference: values and gradients, all methods, weird shapes, all dtypes."""

import pytest
import torch

import rla
from common import ALL, WEIRD, Case, assert_agrees, assert_close, call, make, run, served, skip_unless_serves, upcast
from rla.ops.backends import BACKENDS

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
MAIN = ("gla", "sgla", "gdn", "rla", "rdn", "rdn-sum", "rdn-nofit", "vector-rdn")


@pytest.mark.parametrize("case", WEIRD)
@pytest.mark.parametrize(("backend", "name"), served(ALL))
def test_weird_shapes(backend, name, case):
    for dtype in (torch.float64, torch.float32):
        if dtype == torch.float32 or backend == "chunked":
            skip_unless_serves(backend, ALL[name], dtype, WEIRD[case])
            assert_agrees(ALL[name], WEIRD[case], backend, dtype)


@pytest.mark.parametrize("dtype", ("bf16", "f16"))
@pytest.mark.parametrize("case", ("T65", "packed", "grouped"))
@pytest.mark.parametrize(("backend", "name"), served(ALL))
def test_half_precision(backend, name, case, dtype):
    skip_unless_serves(backend, ALL[name], DTYPES[dtype], WEIRD[case])
    assert_agrees(ALL[name], WEIRD[case], backend, DTYPES[dtype])


@pytest.mark.parametrize(
    ("backend", "name", "used"), [(b, n, x) for b, n in served(MAIN) for x in ("o", "S", "R") if x != "R" or ALL[n].has_R]
)
def test_gradients_of_one_output_alone(backend, name, used):
    """What the loss doesn't see has no gradient to hand to a backend."""
    method, case = ALL[name], WEIRD["packed"]
    skip_unless_serves(backend, method, torch.float32, case)

    def grads(x, backend):
        o, state = call(x, method, backend, case.cu_seqlens)
        loss = {"o": o, "S": state.S, "R": state.R}[used].square().sum()
        found = torch.autograd.grad(loss, list(x.values()), allow_unused=True)
        return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(x.items(), found, strict=True)}

    x = make(method, case, torch.float32)
    assert_close(grads(x, backend), grads(upcast(x), "reference"), torch.float32, gradients=True)


@pytest.mark.parametrize(("backend", "name"), served(MAIN))
def test_float32_gates_with_half_inputs(backend, name):
    skip_unless_serves(backend, ALL[name], torch.bfloat16, WEIRD["T65"])
    x = make(ALL[name], WEIRD["T65"], torch.bfloat16)
    x = {n: t.detach().float().requires_grad_() if t.dim() == 3 else t for n, t in x.items()}
    got, grads = run(x, ALL[name], backend)
    want, want_grads = run(upcast(x), ALL[name], "reference")
    assert_close(got, want, torch.bfloat16)
    assert_close(grads, want_grads, torch.bfloat16, gradients=True)


@pytest.mark.parametrize(("backend", "name"), served(ALL))
def test_split_at_every_point(backend, name):
    """A sequence cut anywhere, with the state handed over, is the sequence in one piece."""
    dtype = torch.float64 if backend == "chunked" else torch.float32
    method, case = ALL[name], Case(B=1, T=67, H=2, K=5, V=6)
    skip_unless_serves(backend, method, dtype, case)
    x = {n: t.detach() for n, t in make(method, case, dtype).items()}
    o, state = call({n: t.double() for n, t in x.items()}, method, "reference")
    for cut in range(case.T + 1):
        o1, s1 = call({n: t[:, :cut] for n, t in x.items()}, method, backend)
        rest = {n: t[:, cut:] for n, t in x.items()} | {"S": s1.S} | ({} if s1.R is None else {"R": s1.R})
        o2, s2 = call(rest, method, backend)
        want = {"o": o, "S": state.S} | ({} if state.R is None else {"R": state.R})
        got = {"o": torch.cat((o1, o2), 1), "S": s2.S} | ({} if s2.R is None else {"R": s2.R})
        assert_close(got, want, dtype)


@pytest.mark.parametrize(("backend", "name"), served(("gla", "sgla", "gdn", "rla", "rdn")))
def test_gradients_flow_through_a_handed_over_state(backend, name):
    dtype = torch.float64 if backend == "chunked" else torch.float32
    method, case = ALL[name], Case(B=2, T=80, H=2, K=6, V=5)
    skip_unless_serves(backend, method, dtype, case)

    def in_two(x, backend):
        o1, s1 = call({n: t[:, :37] for n, t in x.items()}, method, backend)
        rest = {n: t[:, 37:] for n, t in x.items()} | {"S": s1.S} | ({} if s1.R is None else {"R": s1.R})
        o2, s2 = call(rest, method, backend)
        loss = (torch.cat((o1, o2), 1).double() ** 2).sum() + (s2.S.double() ** 2).sum()
        return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))

    def in_one(x, backend):
        o, s = call(x, method, backend)
        loss = (o.double() ** 2).sum() + (s.S.double() ** 2).sum()
        return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))

    x = make(method, case, dtype)
    assert_close(in_two(x, backend), in_one(upcast(x), "reference"), dtype, gradients=True)


def _fill(**values):
    def change(x):
        for name, value in values.items():
            if name in x:
                x[name].fill_(value)

    return change


def _some_alpha_zero(x):
    if "log_alpha" in x:
        generator = torch.Generator().manual_seed(5)
        x["log_alpha"][torch.rand(x["log_alpha"].shape, generator=generator) < 0.2] = -torch.inf


EXTREMES = {
    "alpha-0": _fill(log_alpha=-torch.inf),
    "alpha-sometimes-0": _some_alpha_zero,
    "alpha-1": _fill(log_alpha=0.0),
    "alpha-tiny": _fill(log_alpha=-60.0),
    "beta-0": _fill(beta=0.0),
    "beta-1": _fill(beta=1.0),
    "gamma-0": _fill(gamma=0.0),
    "gamma-1": _fill(gamma=1.0),
    "all-0": _fill(log_alpha=-torch.inf, beta=0.0, gamma=0.0),
    "all-1": _fill(log_alpha=0.0, beta=1.0, gamma=1.0),
    "k-0": _fill(k=0.0),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize(("backend", "name"), served(("retnet", "rla-sum", *MAIN)))
def test_extreme_gates(backend, name, extreme):
    dtype = torch.float64 if backend == "chunked" else torch.float32
    case = Case(B=1, T=70, H=2, K=9, V=7, state=True)
    skip_unless_serves(backend, ALL[name], dtype, case)
    if extreme == "k-0" and ALL[name].qk_norm:
        # The norm's slope at 0 is 1e6; scale the comparison down to it by comparing values only.
        x = make(ALL[name], case, dtype)
        with torch.no_grad():
            EXTREMES[extreme](x)
        o, s = call(x, ALL[name], backend)
        want_o, want_s = call(upcast(x), ALL[name], "reference")
        assert_close({"o": o, "S": s.S}, {"o": want_o, "S": want_s.S}, dtype)
    else:
        assert_agrees(ALL[name], case, backend, dtype, change=EXTREMES[extreme])


@pytest.mark.parametrize(("backend", "name"), served(("rla", "rdn")))
def test_residual_exactly_at_the_clip_bound(backend, name):
    """Psi has slope 1 at the bound itself, as torch.clamp has; with S = 0 the first residual is v."""
    dtype = torch.float64 if backend == "chunked" else torch.float32
    case = Case(B=1, T=1, H=1, K=3, V=4)
    skip_unless_serves(backend, ALL[name], dtype, case)

    def at_bound(x):
        x["v"].copy_(torch.tensor([1.0, -1.0, 1 + 1e-6, -0.5]))

    assert_agrees(ALL[name], case, backend, dtype, change=at_bound)
    x = make(ALL[name], case, dtype)
    with torch.no_grad():
        at_bound(x)
    x["q"] = x["k"].detach().clone().requires_grad_()
    o, _ = call(x, ALL[name], backend)
    (dv,) = torch.autograd.grad(o.sum(), x["v"])
    assert (dv.flatten() != 0).tolist() == [True, True, False, True]


@pytest.mark.parametrize(("backend", "name"), served(("sgla", "gdn", "rla", "rdn")))
def test_long_sequence_does_not_drift(backend, name):
    """20,000 tokens with slow decay: the end is as right as the beginning."""
    dtype = torch.float64 if backend == "chunked" else torch.float32
    method, case = ALL[name], Case(B=1, T=20_000, H=1, K=8, V=8)
    skip_unless_serves(backend, method, dtype, case)
    x = {n: t.detach() for n, t in make(method, case, dtype, decay=6.0).items()}
    with torch.no_grad():
        want, want_state = call({n: t.double() for n, t in x.items()}, method, "reference")
        got, state = call(x, method, backend)
    assert_close({"tail": got[:, -2000:], "S": state.S}, {"tail": want[:, -2000:], "S": want_state.S}, dtype)


NAN_CASE = Case(lengths=(70, 90), H=2, K=5, V=6)


@pytest.mark.parametrize(
    ("backend", "name", "where"),
    [
        (backend, name, where)
        for backend, name in served(("gla", "sgla", "gdn", "rla", "rdn", "rdn-nofit"), reference=True)
        for where in make(ALL[name], NAN_CASE)
    ],
)
def test_nan_stays_in_its_sequence_and_head(backend, name, where):
    method, case = ALL[name], NAN_CASE
    skip_unless_serves(backend, method, torch.float32, case)
    x = {n: t.detach() for n, t in make(method, case, torch.float32).items()}
    x[where][0, 75, 1] = float("nan")  # sequence 1, head 1
    o, state = call(x, method, backend, case.cu_seqlens)
    assert torch.isnan(o[:, 70:, 1]).any()
    assert torch.isfinite(o[:, 70:, 0]).all()
    assert torch.isfinite(o[:, :70]).all()
    for M in state:
        if M is not None:
            assert torch.isfinite(M[0]).all()
            assert torch.isfinite(M[1, 0]).all()
            if where != "q":
                assert torch.isnan(M[1, 1]).any() or (where == "gamma" and M is state.S)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend):
    """Views (head-first storage, expanded gates) give what their copies give."""
    method, case = rla.METHODS["rdn"], Case(B=2, T=70, H=3, K=8, V=8)
    skip_unless_serves(backend, method, torch.float32, case)
    x = {n: t.detach() for n, t in make(method, case, torch.float32).items()}
    want, _ = call(x, method, backend)
    views = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    views["q"] = torch.stack((x["q"], x["q"]), -1)[..., 0]  # last dimension not contiguous
    got, _ = call(views, method, backend)
    torch.testing.assert_close(got, want)
    views["beta"] = torch.tensor(0.5).expand(2, 70, 3)
    got, _ = call(views, method, backend)
    want, _ = call({**x, "beta": torch.full((2, 70, 3), 0.5)}, method, backend)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", (*BACKENDS, "reference"))
def test_empty_sequences(backend):
    case = Case(B=2, T=0, H=2, K=4, V=3, state=True)
    for name in ("gdn", "rdn"):
        skip_unless_serves(backend, rla.METHODS[name], torch.float32, case)
        x = make(rla.METHODS[name], case, torch.float32)
        o, state = call(x, name, backend)
        assert o.shape == (2, 0, 2, 3)
        torch.testing.assert_close(state.S, x["S"])
        (dS,) = torch.autograd.grad(state.S.sum(), x["S"])
        torch.testing.assert_close(dS, torch.ones_like(dS))


@pytest.mark.parametrize("backend", BACKENDS)
def test_int32_bounds(backend):
    method, case = rla.METHODS["rdn"], Case(lengths=(40, 0, 70), H=1)
    skip_unless_serves(backend, method, torch.float32, case)
    x = make(method, case, torch.float32)
    want, got = (run(x, method, backend, case.cu_seqlens.to(dtype)) for dtype in (torch.int64, torch.int32))
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone(backend):
    method, case = rla.METHODS["rdn"], Case(state=True)
    skip_unless_serves(backend, method, torch.float32, case)
    x = make(method, case, torch.float32)
    before = {n: t.detach().clone() for n, t in x.items()}
    run(x, method, backend)
    assert all(torch.equal(x[n], before[n]) for n in x)


@pytest.mark.parametrize(("backend", "name"), served(("rdn-tied", *MAIN), reference=True))
def test_step_is_attend_for_one_token(backend, name):
    method, case = ALL[name], Case(B=3, T=5, H=2, G=2, K=7, V=13, state=True)
    skip_unless_serves(backend, method, torch.float32, case)
    x = {n: t.detach() for n, t in make(method, case, torch.float32).items()}
    want, want_state = call({n: t.double() for n, t in x.items()}, method, "reference")
    state = rla.State(x.pop("S").clone(), x.pop("R").clone() if "R" in x else None)
    storage = [M.data_ptr() for M in state if M is not None]
    out = []
    for t in range(case.T):
        token = [x[n][:, t : t + 1] if n in x else None for n in ("q", "k", "v", "log_alpha", "beta", "gamma")]
        out.append(rla.step(*token, method=method, state=state, backend=backend))
    got = {"o": torch.cat(out, 1), "S": state.S} | ({} if state.R is None else {"R": state.R})
    wanted = {"o": want, "S": want_state.S} | ({} if want_state.R is None else {"R": want_state.R})
    assert_close(got, wanted, torch.float32)
    assert storage == [M.data_ptr() for M in state if M is not None]
