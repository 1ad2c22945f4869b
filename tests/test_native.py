"""The native kernels beyond agreement: threads, instruction sets, denormals, sizes, a stale or missing library."""

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import rla
from common import ALL, NAMES, Case, assert_agrees, call, make, run
from rla.ops import native

built = pytest.mark.skipif(native.missing() is not None, reason=f"native: {native.missing()}")
CASES = {
    "one head": Case(B=1, T=700, H=1, K=64, V=96),
    "one of two": Case(B=1, T=900, H=1, G=2, K=128, V=128, state=True),  # of rla and rdn some states are not saved
    "three heads": Case(B=1, T=300, H=3, K=33, V=50, state=True),
    "grouped": Case(B=2, T=130, H=2, G=3, K=20, V=40),
    "packed": Case(lengths=(300, 0, 1, 129, 64), H=1, K=48, V=64, state=True),
    "large": Case(B=1, T=2100, H=4, K=64, V=128),
    "many heads": Case(lengths=(200, 1, 300), H=8, G=2, K=32, V=48, state=True),  # several are taken together
}
LARGE = Case(B=16, T=70, H=6, G=2, K=32, V=80)  # its output and gradients are written past the caches


def bits(case, method, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run(make(method, case, torch.float32), method, "native", case.cu_seqlens)
    finally:
        torch.set_num_threads(before)


@built
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ("sgla", "rdn", "rla-sum", "rdn-nofit"))
def test_the_same_bits_for_any_number_of_threads(name, case):
    want = bits(CASES[case], ALL[name], 1)
    for threads in (1, 2, 3, 5):
        got = bits(CASES[case], ALL[name], threads)
        for a, b in zip(got, want, strict=True):
            assert all(torch.equal(a[n], b[n]) for n in b)


@built
def test_fewer_threads_than_asked_for():
    """OpenMP may give fewer; then those that would share a head's chunks can't wait for each other."""
    code = (
        "import torch; from common import *; from test_native import CASES, bits; from rla.ops import native\n"
        "want = bits(CASES['one head'], ALL['rdn'], 1); got = bits(CASES['one head'], ALL['rdn'], 4)\n"
        "assert all(torch.equal(a[n], b[n]) for a, b in zip(got, want) for n in b)\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@built
@pytest.mark.parametrize("case", (LARGE, CASES["many heads"]), ids=("large", "many heads"))
@pytest.mark.parametrize("name", ("sgla", "gdn", "rla", "rdn", "rdn-nofit", "rla-nonorm"))
def test_outputs_larger_than_the_caches_and_heads_taken_together(name, case):
    assert_agrees(ALL[name], case, "native", torch.float32)


@built
@pytest.mark.parametrize("name", ("sgla", "rdn"))
def test_outputs_of_half_precision_larger_than_the_caches(name):
    assert_agrees(ALL[name], Case(B=40, T=70, H=12, K=16, V=64), "native", torch.bfloat16)


@built
@pytest.mark.parametrize("isa", ("portable", "avx2", "avx512"))
def test_instruction_sets(isa):
    """Each instruction set this machine has, forced in a child process, passes a part of the agreement tests."""
    flags = {"portable": None, "avx2": "avx2", "avx512": "avx512bw"}[isa]
    from rla.doctor import cpu_flags

    if flags is not None and flags not in cpu_flags():
        pytest.skip(f"this CPU has no {isa}")
    code = (
        "import torch; from common import *; from test_native import LARGE; from rla.ops import native\n"
        f"assert native.isa() == {isa!r}, native.isa()\n"
        "for name in ('sgla', 'gdn', 'rla', 'rdn', 'rdn-logcosh', 'rdn-nofit-sum'):\n"
        "    for case in (*WEIRD.values(), LARGE):\n"
        "        for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "            assert_agrees(ALL[name], case, 'native', dtype)\n"
    )
    env = {**os.environ, "RLA_NATIVE_ISA": isa, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@built
def test_denormals_are_flushed_inside_and_kept_outside():
    tiny = torch.tensor(1e-40)
    x = {n: t.detach() for n, t in make(ALL["sgla"], Case(B=1, T=64, H=2), torch.float32).items()}
    x["v"] = torch.full_like(x["v"], 1e-39)
    o, state = call(x, "sgla", "native")
    assert o.abs().max() == 0
    assert state.S.abs().max() == 0
    assert (tiny * 1.0).item() > 0, "the caller's floating-point state was changed"


@built
@pytest.mark.parametrize(("K", "V"), [(257, 8), (8, 300)])
def test_sizes_out_of_range(K, V):
    q, v = torch.randn(1, 4, 1, K), torch.randn(1, 4, 1, V)
    with pytest.raises(ValueError, match=rf"backend: 'native' can't serve this call: .*256; got K = {K}, V = {V}"):
        rla.attend(q, q, v, backend="native")
    rla.attend(q, q, v)  # an automatic choice goes to chunked


@built
@pytest.mark.parametrize("size", (1, 255, 256))
def test_largest_sizes(size):
    assert_agrees(ALL["rdn"], Case(B=1, T=70, H=1, K=256, V=size), "native", torch.float32)
    assert_agrees(ALL["rdn"], Case(B=1, T=70, H=1, K=size, V=256), "native", torch.float32)


@built
@pytest.mark.parametrize(("name", "size", "dtype", "dense", "packed"), [
    ("rdn", 64, torch.float32, (32, 0), (32, 0)),
    ("gdn", 128, torch.float32, (32, 0), (32, 0)),
    ("rla", 128, torch.float32, (32, 16), (64, 0)),
    ("rdn", 128, torch.float32, (32, 16), (64, 0)),
    ("gdn", 256, torch.float32, (32, 32), (64, 0)),
    ("rla", 256, torch.float32, (64, 32), (128, 0)),
    ("sgla", 64, torch.bfloat16, (64, 0), (64, 0)),
    ("rla", 256, torch.bfloat16, (64, 2), (128, 0)),
])  # fmt: skip
def test_states_are_saved_as_often_as_memory_allows(name, size, dtype, dense, packed):
    """Segments of one, two and four chunks, of one length and of two, with a part at the end."""
    method = ALL[name]
    if native.isa() == "avx512":  # others have panels of another width
        assert native._segments(size, size, False, method, dtype) == dense
        assert native._segments(size, size, True, method, dtype) == packed
    assert_agrees(method, Case(B=2, T=290, H=1, K=size, V=size, state=True), "native", dtype)
    assert_agrees(method, Case(lengths=(129, 1, 128, 33), H=2, K=size, V=size), "native", dtype)


@built
def test_refusals_name_what_came():
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"can't serve this call: .*float64"):
        rla.attend(q.double(), q.double(), q.double(), backend="native")
    with pytest.raises(ValueError, match="vector decay"):
        rla.attend(q, q, q, torch.zeros(1, 4, 1, 8), method="gla", backend="native")


@built
def test_memory_of_forward_and_backward():
    """Saved for backward: no more than q, k, v, o and their gradients, for any method; o and gradients are another half.

    Predictions come on top, but are places for gradients.
    """
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (64, 96, 128, 200, 256)):
        q = torch.empty(1, 4096, 16, size, device="meta", dtype=dtype)
        for name in ("sgla", "gdn", "rla", "rdn", "rdn-sum"):
            (saved, *_), *predictions = native.saved_shapes(q, q, 1, ALL[name])
            assert all(shape in (q.shape, (0,)) for shape in predictions)
            saved *= 4
            assert 0 < saved <= 8 * dtype.itemsize * q.numel(), (name, dtype, size)
            every, skip = native._segments(size, size, False, ALL[name], dtype)
            assert (2 * every if skip else every) <= 128


@built
@pytest.mark.parametrize("name", ("gdn", "rla", "rdn"))
def test_gradients_lie_where_predictions_were(name):
    x = make(ALL[name], Case(B=1, T=70, H=2, K=8, V=8), torch.float32)
    inputs = [x.get(n) for n in NAMES]
    detached = [None if t is None else t.detach() for t in inputs]
    o, _, _, kept = native.forward(*detached, cu_seqlens=None, method=ALL[name], save=True)
    _, dk, dv, *_ = native.backward(o, None, None, *detached, cu_seqlens=None, kept=kept, method=ALL[name], overwrite=True)
    assert dv is kept[1]
    assert (dk is kept[2]) == (name == "rdn")


@built
@pytest.mark.parametrize("name", ("gdn", "rla", "rdn"))
def test_backward_more_than_once(name):
    """A graph that autograd keeps is not spent by the first backward."""
    x = make(ALL[name], Case(B=1, T=70, H=2, K=8, V=8), torch.float32)
    o, _ = call(x, name, "native")
    first, second, last = (
        torch.autograd.grad(o.sum(), list(x.values()), retain_graph=keep, allow_unused=True) for keep in (True, True, False)
    )
    for a, b, c in zip(first, second, last, strict=True):
        assert (a is b is c is None) or (torch.equal(a, b) and torch.equal(a, c))


@pytest.mark.parametrize(("change", "says"), [("stale", "built from other sources"), ("absent", "not built")])
def test_a_stale_or_absent_library_is_not_used(change, says, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_HERE", tmp_path)
    monkeypatch.delenv("RLA_NATIVE_LIBRARY", raising=False)  # `make sanitize` sets it
    if change == "stale":
        if native.missing() is not None:
            pytest.skip(f"native: {native.missing()}")
        library = Path(native.__file__).parent / "_native.so"
        (tmp_path / "_native.so").write_bytes(library.read_bytes())
        (tmp_path / "csrc").mkdir()
        (tmp_path / "csrc" / "kernel.cpp").write_text("// changed\n")
    assert f"{says}; run make" in native._Library().missing


def test_the_reason_of_a_failed_build_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_HERE", tmp_path)
    monkeypatch.delenv("RLA_NATIVE_LIBRARY", raising=False)  # `make sanitize` sets it
    (tmp_path / "_native.txt").write_text("false failed: exit status 1\n")
    assert native._Library().missing == "false failed: exit status 1"


@built
def test_states_lie_as_the_step_wants_them():
    _, state = call(make(ALL["rdn"], Case(T=3, V=6), torch.float32), ALL["rdn"], "native")
    assert all(native.lies_by_columns(M) for M in state)
    assert not native.lies_by_columns(state.S.contiguous())


LAYOUTS = {
    "by columns": lambda M: M.mT.contiguous().mT,
    "contiguous": torch.Tensor.contiguous,
    "a part of another": lambda M: M.repeat(1, 1, 1, 2)[..., : M.shape[-1]],
}


@built
@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ("gdn", "rdn", "rla-logcosh", "rdn-nofit"))
def test_a_step_updates_a_state_of_any_layout(name, layout):
    method = ALL[name]
    x = make(method, Case(T=1, G=2, K=11, V=6, state=True), torch.float32)
    want, new = call(x, method, "reference")
    state = rla.State(*(None if M is None else LAYOUTS[layout](M.clone()) for M in (x["S"], x.get("R"))))
    got = rla.step(*map(x.get, NAMES[:6]), method=method, state=state, backend="native")
    torch.testing.assert_close((got, *state), (want, *new))


def step_in_place(x, method, threads):
    """The output and the new states."""
    before = torch.get_num_threads()
    state = rla.State(*(None if M is None else LAYOUTS["by columns"](M.clone()) for M in (x["S"], x.get("R"))))
    torch.set_num_threads(threads)
    try:
        return (rla.step(*map(x.get, NAMES[:6]), method=method, state=state, backend="native"), *state)
    finally:
        torch.set_num_threads(before)


@built
@torch.no_grad()
@pytest.mark.parametrize("V", (1, 2, 3, 4))
@pytest.mark.parametrize("K", (1, 16, 33))
@pytest.mark.parametrize("name", ("gdn", "rdn", "rla-logcosh", "rdn-nofit"))
def test_a_step_with_few_columns(name, K, V):
    """The kernel works on one column and looks at the second next."""
    method = ALL[name]
    x = make(method, Case(T=1, K=K, V=V, state=True), torch.float32)
    want, new = call(x, method, "reference")
    torch.testing.assert_close(step_in_place(x, method, 1), (want, *new))


@built
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "K", "V"), (("gdn", 256, 256), ("rdn", 256, 129), ("rdn", 255, 130), ("rla-logcosh", 253, 131))
)
def test_a_step_of_one_head_gives_the_same_bits_for_any_number_of_threads(name, K, V):
    """Threads share the columns of a head that is large enough, so that first and last columns lie elsewhere."""
    x = make(ALL[name], Case(B=1, T=1, H=1, K=K, V=V, state=True), torch.float32)
    want = step_in_place(x, ALL[name], 1)
    for threads in (2, 3, 5):
        got = step_in_place(x, ALL[name], threads)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


plain = pytest.mark.skipif(native.missing() is not None or native._exchange() is None, reason="no DLPack exchange interface")


def plain_step(*, method, **x):
    run = native.plain_step(method)
    return None if run is None else run(*(x[n] for n in (*NAMES[:6], "S", "R")))


LIES = {
    "contiguous": lambda x: x,
    "a part of another": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one for all": lambda x: x[:1].expand(x.shape),
}


@plain
@torch.no_grad()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("name", ("linear", "rdn", "rdn-tied", "rdn-nofit"))
def test_a_plain_step_reads_tensors_where_they_lie(name, lies, dtype):
    method = ALL[name]
    x = make(method, Case(B=3, T=1, H=2, G=2, K=9, V=6, state=True), torch.float32)
    x |= {n: LIES[lies](x[n].to(dtype)) for n in "qkv"}
    want, new = call({n: t.double() for n, t in x.items()}, method, "reference")
    state = [None if M is None else LAYOUTS["by columns"](M.clone()) for M in (x["S"], x.get("R"))]
    got = plain_step(**{n: x.get(n) for n in NAMES[:6]}, S=state[0], R=state[1], method=method)
    assert got is not None
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, atol=1e-5 + torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(state, [None if M is None else M.float() for M in new])


def _by_columns(*shape, **options):
    return torch.ones(*shape, **options).mT


NOT_PLAIN = {
    "float64": {"q": torch.ones(2, 1, 2, 8, dtype=torch.float64)},
    "two dtypes": {"k": torch.ones(2, 1, 2, 8, dtype=torch.bfloat16)},
    "integers": {n: torch.ones(2, 1, 2, 8, dtype=torch.int32) for n in "qk"},
    "two tokens": {n: torch.ones(2, 2, 2, 8) for n in "qk"},
    "fewer dimensions": {"q": torch.ones(2, 2, 8)},
    "another batch": {"v": torch.ones(3, 1, 4, 6)},
    "heads that don't divide": {"v": torch.ones(2, 1, 3, 6)},
    "no heads": {"q": torch.ones(2, 1, 0, 8), "k": torch.ones(2, 1, 0, 8)},
    "keys that lie apart": {"k": torch.ones(2, 1, 2, 16)[..., ::2]},
    "too large": {n: torch.ones(2, 1, 2, 257) for n in "qk"} | {n: _by_columns(2, 4, 6, 257) for n in "SR"},
    "a gate of half precision": {"beta": torch.ones(2, 1, 4, dtype=torch.bfloat16)},
    "a gate for other heads": {"log_alpha": -torch.ones(2, 1, 2)},
    "a gate that lies apart": {"gamma": torch.ones(2, 1, 8)[..., ::2]},
    "a number": {"beta": 0.5},
    "a parameter": {"v": torch.nn.Parameter(torch.ones(2, 1, 4, 6))},
    "another device": {"k": torch.ones(2, 1, 2, 8, device="meta")},
    "no memory": {"gamma": torch.ones(2, 1, 4).to_sparse()},
    "a state by rows": {"S": torch.ones(2, 4, 8, 6)},
    "a state of another size": {"R": _by_columns(2, 4, 6, 7)},
    "a state in float64": {"S": _by_columns(2, 4, 6, 8, dtype=torch.float64)},
    "no R": {"R": None},
    "vector decay": {"method": rla.Method(decay="vector")},
    "no decay": {"method": rla.Method(decay="none")},
    "no rate": {"method": rla.Method(rate="one")},
    "tied": {"method": rla.Method(gamma="tied")},
    "a method without R": {"method": rla.Method(correction="none")},
}


def two_tokens(**changes):
    """A plain step of two sequences."""
    gates = {"log_alpha": -torch.ones(2, 1, 4), "beta": torch.ones(2, 1, 4), "gamma": torch.ones(2, 1, 4)}
    x = {"q": torch.ones(2, 1, 2, 8), "k": torch.ones(2, 1, 2, 8), "v": torch.ones(2, 1, 4, 6), **gates}
    return x | {"S": _by_columns(2, 4, 6, 8), "R": _by_columns(2, 4, 6, 8), "method": rla.METHODS["rdn"]} | changes


@plain
@torch.no_grad()
@pytest.mark.parametrize("case", NOT_PLAIN)
def test_what_is_not_plain_gets_the_full_checks(case):
    x = two_tokens(**NOT_PLAIN[case])
    assert plain_step(**x) is None
    assert all(M is None or bool((M == 1).all()) for M in (x["S"], x["R"]))


@plain
@torch.no_grad()
def test_a_plain_step_leaves_modes_alone():
    x = two_tokens()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert plain_step(**x) is None
    assert (x["S"] == 1).all()
    assert plain_step(**x) is not None
    assert not (x["S"] == 1).all()


@plain
@torch.no_grad()
def test_other_threads_of_python_run_during_a_plain_step():
    x = two_tokens()
    counts, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counts[0] += 1
            time.sleep(0)  # gives the interpreter's lock to the one who waits for it

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # and nobody takes it from the one who has it
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counts[0]
        for _ in range(10000):
            assert plain_step(**x) is not None
        assert counts[0] > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
