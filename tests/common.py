"""What the op's tests share: random inputs for a method, a run with gradients, and the distance from the float64 reference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

import rla
from rla.ops.backends import BACKENDS

# RMSE ratio allowed for values and for gradients; float64 is held to a maximal error instead.
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-2, 2e-2)}
MAX_ERROR_64 = 1e-10
NAMES = ("q", "k", "v", "log_alpha", "beta", "gamma", "S", "R")

# Vector decay is a property of the method: the family beyond GLA, which has no name of its own.
VECTOR = {
    f"vector-{name}": dataclasses.replace(rla.METHODS[name], decay="vector")
    for name in ("gdn", "rla", "rdn", "rdn-nofit", "rdn-sum")
}
TOKEN_SUM = {
    f"{name}-nofit-sum": dataclasses.replace(rla.METHODS[f"{name}-nofit"], gate_output=False) for name in ("rla", "rdn")
}
ALL = {**rla.METHODS, **TOKEN_SUM, **VECTOR}


@dataclass(frozen=True)
class Case:
    """Sizes of one problem. `lengths`: packed sequences (then B is 1 and T their sum)."""

    B: int = 2
    T: int = 70
    H: int = 2
    G: int = 1  # value heads per key head
    K: int = 8
    V: int = 8
    lengths: tuple[int, ...] | None = None
    state: bool = False

    def __post_init__(self):
        if self.lengths is not None:
            object.__setattr__(self, "B", 1)
            object.__setattr__(self, "T", sum(self.lengths))

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor([0, *accumulate(self.lengths)])


WEIRD = {
    "T1": Case(T=1),
    "T1-state": Case(T=1, state=True),
    "T63": Case(T=63, H=3, K=7, V=13),
    "T64": Case(T=64, H=1, K=16, V=4, state=True),
    "T65": Case(B=1, T=65, H=3, K=7, V=13, state=True),
    "T200": Case(B=3, T=200, H=1, K=7, V=13),
    "grouped": Case(T=67, H=3, G=2, K=7, V=13, state=True),
    "packed": Case(lengths=(1, 0, 63, 64, 65, 7), H=3, K=7, V=13, state=True),
    "packed-grouped": Case(lengths=(0, 5, 1, 1, 130, 0), H=2, G=2, K=9, V=5),
    "wide": Case(B=1, T=130, H=2, K=40, V=72, state=True),
}


def make(method: rla.Method, case: Case, dtype=torch.float64, seed=0, decay=2.0) -> dict[str, Tensor]:
    """Leaf tensors by name, those the method has. `decay`: mean of the logit of alpha."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, T, H, HV, K, V = case.B, case.T, case.H, case.H * case.G, case.K, case.V
    # Without the norm the delta rule diverges unless |k| is about 1.
    scale = 1 if method.qk_norm else K**-0.5
    x = {"q": randn(B, T, H, K) * scale, "k": randn(B, T, H, K) * scale, "v": randn(B, T, HV, V)}
    if method.decay != "none":
        shape = (B, T, HV, K) if method.decay == "vector" else (B, T, HV)
        x["log_alpha"] = torch.nn.functional.logsigmoid(randn(*shape) + decay)
    if method.rate != "one":
        x["beta"] = randn(B, T, HV).sigmoid()
    if method.has_residual and method.gamma == "own":
        x["gamma"] = randn(B, T, HV).sigmoid()
    if case.state:
        x["S"] = randn(case.N, HV, K, V)
        if method.has_R:
            x["R"] = randn(case.N, HV, K, V)
    half = dtype in (torch.bfloat16, torch.float16)
    return {n: t.to(torch.float32 if half and n in "SR" else dtype).requires_grad_() for n, t in x.items()}


def upcast(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in float64, as new leaves."""
    return {name: t.detach().double().requires_grad_() for name, t in x.items()}


def call(x: dict[str, Tensor], method, backend: str, cu_seqlens=None):
    state = rla.State(x["S"], x.get("R")) if "S" in x else None
    args = [x.get(name) for name in NAMES[:6]]
    return rla.attend(*args, method=method, state=state, cu_seqlens=cu_seqlens, backend=backend)


def run(x: dict[str, Tensor], method, backend: str, cu_seqlens=None, seed=1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs (o, S, R) and the gradients of a random linear functional of all of them."""
    o, state = call(x, method, backend, cu_seqlens)
    outputs = {"o": o, "S": state.S} | ({} if state.R is None else {"R": state.R})
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for y in outputs.values():
        # The weights are numbers of y's own dtype, so that every dtype differentiates the same functional.
        weight = torch.randn(y.shape, generator=generator).bfloat16()
        loss = loss + (y.double() * weight.double()).sum()
    # Without a token the reference's outputs are constants.
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True) if loss.requires_grad else [None] * len(x)
    zeros = {name: torch.zeros_like(t) for name, t in x.items()}
    return outputs, {name: zeros[name] if g is None else g for name, g in zip(x, grads, strict=True)}


def rmse_ratio(got: Tensor, want: Tensor) -> float:
    """Root mean square error over root mean square, the latter at least 0.01 (some gradients are exactly 0)."""
    if want.numel() == 0:
        return 0.0
    error = (got.double() - want).square().mean().sqrt()
    return (error / want.square().mean().sqrt().clamp_min(1e-2)).item()


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], dtype, *, gradients=False) -> None:
    assert got.keys() == want.keys()
    for name, y in want.items():
        what = f"gradient of {name}" if gradients else name
        assert got[name].shape == y.shape, what
        assert torch.isfinite(got[name]).all(), f"{what} is not finite"
        if dtype == torch.float64:
            error = (got[name] - y).abs().max().item() if y.numel() else 0.0
            assert error <= MAX_ERROR_64, f"{what}: maximal error {error:.2e}"
        else:
            ratio = rmse_ratio(got[name], y)
            assert ratio <= LIMITS[dtype][gradients], f"{what}: RMSE ratio {ratio:.2e}"


def assert_agrees(method, case: Case, backend: str, dtype, seed=0, decay=2.0, change=None) -> None:
    """Values and gradients of a backend against the float64 reference on the same numbers."""
    x = make(method, case, dtype, seed, decay)
    if change is not None:
        with torch.no_grad():
            change(x)
    want, want_grads = run(upcast(x), method, "reference", case.cu_seqlens)
    got, grads = run(x, method, backend, case.cu_seqlens)
    assert got["o"].dtype == x["q"].dtype
    assert got["S"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(grads[name].dtype == x[name].dtype for name in x)
    assert_close(got, want, dtype)
    assert_close(grads, want_grads, dtype, gradients=True)


def served(names, *, reference=False) -> list[tuple[str, str]]:
    """(backend, method) for parametrize: what each backend claims to serve, whether or not it is built here."""
    problem = ("cpu", torch.float32, 8, 8)
    pairs = [(b, n) for b in BACKENDS for n in names if not BACKENDS[b].module.refuses(*problem, ALL[n].decay == "vector")]
    return pairs + [("reference", name) for name in names if reference]


def skip_unless_serves(backend: str, method: rla.Method, dtype, case: Case) -> None:
    """Skip what a backend says it doesn't do; a kernel that is missing altogether skips with the reason."""
    if backend == "reference":
        return
    why = BACKENDS[backend].missing or BACKENDS[backend].module.refuses("cpu", dtype, case.K, case.V, method.decay == "vector")
    if why is not None:
        pytest.skip(f"{backend}: {why}")
