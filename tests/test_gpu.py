"""The compiled kernels on a GPU: `pytest -m gpu`. Skipped where torch finds none."""

import pytest
import torch

import rla
from common import ALL, LIMITS, WEIRD, Case, call, make, rmse_ratio, run, upcast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]

SCALAR = [name for name in ALL if ALL[name].decay != "vector"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def agrees(method, case, dtype):
    """Values and gradients of the kernels against the float64 reference on the CPU."""
    x = make(method, case, dtype)
    want, want_grads = run(upcast(x), method, "reference", case.cu_seqlens)
    on_gpu = {n: t.detach().cuda().requires_grad_() for n, t in x.items()}
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    o, state = call(on_gpu, method, "triton", cu_seqlens)
    outputs = {"o": o, "S": state.S} | ({} if state.R is None else {"R": state.R})
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (y.double() * torch.randn(y.shape, generator=generator).bfloat16().double().cuda()).sum() for y in outputs.values()
    )
    grads = torch.autograd.grad(loss, list(on_gpu.values()))
    for name, y in outputs.items():
        assert rmse_ratio(y.cpu(), want[name]) <= LIMITS[dtype][0], name
    for name, grad in zip(x, grads, strict=True):
        assert rmse_ratio(grad.cpu(), want_grads[name]) <= LIMITS[dtype][1], f"gradient of {name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WEIRD)
@pytest.mark.parametrize("name", SCALAR)
def test_weird_shapes(name, case, dtype):
    agrees(ALL[name], WEIRD[case], DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (64, 128, 256))
@pytest.mark.parametrize("name", ("gdn", "rla", "rdn"))
def test_sizes(name, size, dtype):
    agrees(ALL[name], Case(B=1, T=600, H=2, K=size, V=size, state=True), DTYPES[dtype])


def test_chosen_by_itself_and_the_same_bits_twice():
    x = {n: t.detach().cuda() for n, t in make(ALL["rdn"], Case(T=200, K=64, V=64), torch.bfloat16).items()}
    results = [call(x, "rdn", backend) for backend in (None, "triton")]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1].S, results[1][1].S)


@pytest.mark.parametrize("name", ("gdn", "rla", "rdn"))
def test_step_is_attend_for_one_token(name):
    method, case = ALL[name], Case(B=8, T=1, H=4, K=128, V=128, state=True)
    x = {n: t.detach() for n, t in make(method, case, torch.float32).items()}
    want, want_state = call({n: t.double() for n, t in x.items()}, method, "reference")
    state = rla.State(x["S"].cuda(), x["R"].cuda() if "R" in x else None)
    args = [x[n].cuda() if n in x else None for n in ("q", "k", "v", "log_alpha", "beta", "gamma")]
    o = rla.step(*args, method=method, state=state)
    assert rmse_ratio(o.cpu(), want) <= 1e-5
    assert rmse_ratio(state.S.cpu(), want_state.S) <= 1e-5
