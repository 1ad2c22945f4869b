"""The op as torch sees it: opcheck, and torch.compile without graph breaks."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rla
from common import ALL, NAMES, Case, call, make, run, served, skip_unless_serves
from rla.ops.attend import _attend, _attend_backward, _attend_backward_, _encode
from rla.ops.backends import BACKENDS
from rla.ops.step import _step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles for itself: one function compiled for every case would meet torch's limit of recompilations."""
    torch.compiler.reset()


def compiler() -> str:
    """Inductor where it finds a C++ compiler; else the same tracing without code generation."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "aot_eager"
    return "inductor"


CASES = {
    "dense": Case(B=2, T=70, H=2, K=8, V=8, state=True),
    "packed-grouped": Case(lengths=(3, 0, 70), H=1, G=2, K=5, V=6),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "name"), served(("gdn", "rdn", "gla")))
def test_opcheck(backend, name, case):
    method, case = ALL[name], CASES[case]
    skip_unless_serves(backend, method, torch.float32, case)
    x = make(method, case, torch.float32)
    inputs = [x.get(n) for n in NAMES]
    args = (*inputs, case.cu_seqlens, _encode(method), backend, True, False)
    torch.library.opcheck(_attend, args)
    detached = [None if t is None else t.detach() for t in inputs]
    o, S, R, *kept = _attend(*detached, *args[8:])
    args = (o, S, R if method.has_R else None, *detached, case.cu_seqlens, *kept, _encode(method))
    torch.library.opcheck(_attend_backward, (*args, backend), test_utils=("test_schema", "test_faketensor"))
    if backend == "native":
        torch.library.opcheck(_attend_backward_, args, test_utils="test_schema")


@pytest.mark.parametrize("grad", (True, False))
def test_a_dispatch_mode_sees_the_op(grad):
    """Without a gradient attend goes past autograd, not past torch."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q = torch.randn(1, 5, 2, 8, requires_grad=grad)
    with Mode():
        out, _ = rla.attend(q, q, q)
    assert "rla.attend.default" in seen
    assert out.requires_grad == grad


def test_opcheck_of_the_step():
    case = Case(B=2, T=1, H=2, K=8, V=8, state=True)
    skip_unless_serves("native", ALL["rdn"], torch.float32, case)
    x = {n: t.detach() for n, t in make(ALL["rdn"], case, torch.float32).items()}
    torch.library.opcheck(_step, (*(x.get(n) for n in NAMES), _encode(ALL["rdn"]), "native"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ("gdn", "rdn"))
@pytest.mark.parametrize("backend", (*BACKENDS, None))
def test_compile_gives_the_same(backend, name, case):
    method, case = ALL[name], CASES[case]
    if backend is not None:
        skip_unless_serves(backend, method, torch.float32, case)
    x = make(method, case, torch.float32)

    def function(x):
        y = {n: 1.5 * t if n in "qkv" else t for n, t in x.items()}  # something for the compiler to do
        o, state = call(y, method, backend, case.cu_seqlens)
        return {"o": o.sigmoid(), "S": state.S, **({} if state.R is None else {"R": state.R})}

    def grads(outputs):
        loss = sum((y * y).sum() for y in outputs.values())
        return torch.autograd.grad(loss, list(x.values()))

    want = function(x)
    got = torch.compile(function, fullgraph=True, backend=compiler())(x)
    for n in want:
        torch.testing.assert_close(got[n], want[n])
    for n, a, b in zip(x, grads(got), grads(want), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=n: f"{n}: {m}")


def test_compile_of_the_step():
    case = Case(B=2, T=1, H=2, K=8, V=8, state=True)
    x = {n: t.detach() for n, t in make(ALL["rdn"], case, torch.float32).items()}
    args = [x[n] for n in NAMES[:6]]
    one, two = (rla.State(x["S"].clone(), x["R"].clone()) for _ in range(2))
    want = rla.step(*args, state=one)
    got = torch.compile(lambda *a: rla.step(*a, state=two), fullgraph=True, backend=compiler())(*args)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(two.S, one.S)
    torch.testing.assert_close(two.R, one.R)


def test_no_gradient_saves_nothing():
    x = make(ALL["rdn"], Case(), torch.float32)
    with torch.no_grad():
        o, _ = call(x, "rdn", "chunked")
    assert o.grad_fn is None
    outputs, _ = run(x, ALL["rdn"], "chunked")
    assert outputs["o"].grad_fn is not None
