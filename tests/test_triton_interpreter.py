"""The Triton kernels in Triton's interpreter, on CPU tensors, and the interpreter itself (`make triton`; skipped elsewhere).

The op's agreement tests (test_agreement.py) run on this backend too when the interpreter is on; here is what is particular to
it: every method with its memory watched, sizes up to 256, several segments of saved states, decode, and the same bits twice.
"""

import os

import pytest
import torch

import rla
from common import ALL, Case, assert_agrees, assert_close, call, make, rmse_ratio, run, upcast

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 and triton: make triton", allow_module_level=True)

import numpy as np
import triton
import triton.language as tl
import triton_interpreter

from rla.ops import triton as backend
from rla.ops.triton import config, launch, tune

pytestmark = pytest.mark.usefixtures("poison")

SCALAR = [name for name in ALL if ALL[name].decay != "vector"]
SMALL = Case(lengths=(1, 0, 37, 70), H=1, G=2, K=20, V=17, state=True)
HALF = {"bf16": torch.bfloat16, "f16": torch.float16}


@triton.jit
def _cast(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def _multiply(a, b, c, N: tl.constexpr, PRECISION: tl.constexpr = "ieee"):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION))


@triton.jit
def _multiply_batch(a, b, c, G: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = tl.arange(0, G)[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="tf32x3"))


@triton.jit
def _double(x, y, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(y + at, value + value)


@triton.jit
def _shift(x, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(x + at, tl.load(x + at + 1))


@triton.jit
def _same_place(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)


def test_bfloat16_casts_round_to_nearest_even():
    x = torch.cat(
        (torch.randn(1018) * 10.0 ** torch.randint(-30, 30, (1018,)), torch.tensor([0.0, -0.0, 1e-40, 3e38, 3.4e38, torch.inf]))
    )
    y = torch.zeros(1024, dtype=torch.bfloat16)
    _cast[(1,)](x, y, 1024)
    assert torch.equal(y.view(torch.int16), x.bfloat16().view(torch.int16))
    back = torch.zeros(1024)
    _cast[(1,)](y, back, 1024)
    assert torch.equal(back, y.float())
    half = torch.zeros(1024, dtype=torch.float16)
    with np.errstate(over="ignore"):
        _cast[(1,)](y, half, 1024)
    assert torch.equal(half, y.half())


def test_bfloat16_dots_multiply_numbers():
    a, b = torch.randn(2, 32, 32).bfloat16()
    c = torch.zeros(32, 32)
    _multiply[(1,)](a, b, c, 32)
    torch.testing.assert_close(c, a.float() @ b.float())


@pytest.mark.parametrize(("precision", "low", "high"), (("tf32", 2e-4, 2e-3), ("bf16x3", 1e-6, 2e-5), ("tf32x3", 0, 5e-7)))
def test_float32_dots_lose_what_their_precision_loses(precision, low, high):
    a, b = torch.randn(2, 32, 32)
    c = torch.zeros(32, 32)
    _multiply[(1,)](a, b, c, 32, precision)
    assert low <= rmse_ratio(c, a.double() @ b.double()) <= high


def test_dots_come_in_batches():
    a, b = torch.randn(2, 4, 16, 16)
    c = torch.zeros(4, 16, 16)
    _multiply_batch[(1,)](a, b, c, 4, 16)
    assert rmse_ratio(c, a.double() @ b.double()) <= 5e-7


def test_bfloat16_arithmetic_is_refused():
    with pytest.raises(Exception, match="add of bfloat16"):
        _double[(1,)](torch.ones(16).bfloat16(), torch.ones(16).bfloat16(), 16)


def test_stray_accesses_and_races_are_found():
    with triton_interpreter.watched():
        _double[(4,)](torch.zeros(64), torch.zeros(64), 16)
        with pytest.raises(Exception, match="load outside the tensors, 1 of 16"):
            _shift[(1,)](torch.zeros(16), 16)
        with pytest.raises(Exception, match="a program loads what another stores"):
            _shift[(2,)](torch.zeros(33), 16)
        with pytest.raises(Exception, match="two programs store to one address"):
            _same_place[(2,)](torch.zeros(16), 16)


def test_counts_are_exact():
    with triton_interpreter.counted() as works:
        _double[(4,)](torch.zeros(64), torch.zeros(64), 16)
        _multiply[(1,)](*torch.zeros(3, 32, 32), 32)
        _multiply_batch[(1,)](*torch.zeros(3, 4, 16, 16), 4, 16)
    assert (works["_double"].read, works["_double"].written, works["_double"].flops) == (256, 256, 0)
    assert (works["_multiply"].flops, works["_multiply"].read) == (2 * 32**3, 2 * 4 * 32**2)
    assert works["_multiply_batch"].flops == 4 * 2 * 16**3


@pytest.mark.parametrize("name", SCALAR)
def test_every_method_with_watched_memory(name):
    with triton_interpreter.watched():
        assert_agrees(ALL[name], SMALL, "triton", torch.float32)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ("gdn", "rla", "rdn", "rdn-sum", "rdn-nofit", "rdn-noclip", "rdn-logcosh"))
def test_half_precision(name, dtype):
    assert_agrees(ALL[name], Case(lengths=(5, 75), H=1, K=40, V=24, state=True), "triton", HALF[dtype])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
@pytest.mark.parametrize(("K", "V"), ((256, 16), (192, 40), (16, 256), (129, 1), (1, 65)))
def test_sizes(K, V, dtype):
    """All blocks of key channels, exact and not."""
    with triton_interpreter.watched():
        assert_agrees(ALL["rdn"], Case(B=1, T=70, H=1, K=K, V=V, state=True), "triton", dtype)


@pytest.mark.parametrize("name", ("sgla", "rla", "rdn"))
def test_float32_tiles_of_amd_gpus(name, monkeypatch):
    """States as separate tiles of key channels, which float32 has on AMD GPUs alone."""
    monkeypatch.setattr(launch, "target", lambda: ("hip", 0))
    assert config.configure(40, 24, 4, "hip").scan.groups == 1 < config.configure(40, 24, 4, "cpu").scan.groups
    with triton_interpreter.watched():
        assert_agrees(ALL[name], Case(B=1, T=70, H=1, K=40, V=24, state=True), "triton", torch.float32)


@pytest.mark.parametrize("lengths", (None, (150, 3, 0, 200)), ids=("dense", "packed"))
def test_several_segments_of_saved_states(lengths, monkeypatch):
    monkeypatch.setattr(backend, "segment", lambda *sizes: 64)
    monkeypatch.setattr(launch, "segment", lambda *sizes: 64)
    with triton_interpreter.watched():
        assert_agrees(ALL["rdn"], Case(B=2, T=200, H=1, K=8, V=8, lengths=lengths, state=True), "triton", torch.float32)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=("f32", "bf16", "f16"))
@pytest.mark.parametrize("name", ("sgla", "gdn", "rla", "rdn", "rdn-nofit", "rdn-sum", "rla-logcosh"))
def test_step_agrees_and_updates_in_place(name, dtype):
    method, case = ALL[name], Case(B=2, T=1, H=2, G=2, K=20, V=17, state=True)
    x = {n: t.detach() for n, t in make(method, case, dtype).items()}
    want, want_state = call({n: t.double() for n, t in x.items()}, method, "reference")
    state = rla.State(x["S"].clone(), x["R"].clone() if "R" in x else None)
    places = [M.data_ptr() for M in state if M is not None]
    with triton_interpreter.watched():
        o = rla.step(
            *(x.get(n) for n in ("q", "k", "v", "log_alpha", "beta", "gamma")), method=method, state=state, backend="triton"
        )
    assert places == [M.data_ptr() for M in state if M is not None]
    names = ("S", "R")[: len(places)]
    assert_close(
        {"o": o} | dict(zip(names, state, strict=False)), {"o": want} | dict(zip(names, want_state, strict=False)), dtype
    )


@pytest.mark.parametrize("name", ("rla", "rdn"))
def test_bfloat16_slopes_of_a_clip(name, monkeypatch):
    """An error in v - p of bfloat16's size would flip slopes and put 2 to 4e-2 into dv, the more the longer the sequence."""
    monkeypatch.setattr(backend, "segment", lambda *sizes: 64)
    monkeypatch.setattr(launch, "segment", lambda *sizes: 64)
    x = make(ALL[name], Case(B=1, T=200, H=1, K=16, V=64), torch.bfloat16, decay=4.0)
    _, got = run(x, ALL[name], "triton")
    _, want = run(upcast(x), ALL[name], "reference")
    assert rmse_ratio(got["v"], want["v"]) <= 6e-3


def test_same_input_same_bits():
    x = make(ALL["rdn"], SMALL, torch.float32)
    first, second = (run(x, ALL["rdn"], "triton", SMALL.cu_seqlens) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in b)


def test_the_search_for_tiles_is_off_by_default(monkeypatch):
    monkeypatch.setattr(tune, "choose", lambda *args: pytest.fail("searched"))
    call(make(ALL["rdn"], Case(T=3), torch.float32), ALL["rdn"], "triton")


def test_the_search_for_tiles_takes_no_notice_of_the_length(monkeypatch):
    """One search for each kernel: another length, batch or number of heads finds what the first found."""
    monkeypatch.setenv("RLA_TRITON_AUTOTUNE", "1")
    monkeypatch.setattr(tune, "_chosen", {})
    timed = []

    def time(launch):
        launch()
        timed.append(launch)
        return len(timed) % 3

    monkeypatch.setattr(triton.testing, "do_bench", time)
    method, results = ALL["rdn"], []
    for case in (Case(B=1, T=40, H=1), Case(B=1, T=70, H=2), Case(B=2, T=3, H=1)):
        x = make(method, case, torch.float32)
        results.append((len(timed), set(tune._chosen)))
        got, grads = run(x, method, "triton")
        want, want_grads = run(upcast(x), method, "reference")
        assert_close(got, want, torch.float32)
        assert_close(grads, want_grads, torch.float32, gradients=True)
    kernels = {key[0] for key in tune._chosen}
    assert kernels == {"prepare", "invert", "scan", "reverse", "between", "grads"}
    assert results[0] == (0, set())
    assert results[1] == results[2] == (len(timed), set(tune._chosen))
    names = {item[0] for key in tune._chosen for item in key if isinstance(item, tuple)}
    assert not names & {"T", "B", "N", "H", "HV", "SAVE"}


def test_candidates_that_do_not_fit_are_left_out():
    tile = config.Tile(64, 16, 4, 2)

    def time(launch):
        launch()
        return 1.0

    def launch(candidate):
        if candidate != tile and candidate.stages != 1:
            raise RuntimeError("out of resource: shared memory")

    assert tune.candidates(tile)[0] == tile
    assert all((c.BK, c.BV) == (64, 16) and 1 <= c.warps <= 8 and c.stages >= 1 for c in tune.candidates(tile))
    assert tune.choose(("fits",), tile, launch, time) in (tile, config.Tile(64, 16, 4, 1))
    with pytest.raises(RuntimeError, match="always"):
        tune.choose(("never fits",), tile, lambda candidate: (_ for _ in ()).throw(RuntimeError("always")), time)


@pytest.mark.parametrize("itemsize", (2, 4))
def test_gpus_with_little_shared_memory_load_less_ahead(itemsize):
    for size in (64, 128, 256):
        small = config.configure(size, size, itemsize, "cuda", 89)
        fits = itemsize == 2 and size <= 128  # two stages of the reverse scan, in 99 KiB
        assert (small.scan.stages, small.reverse.stages) == (1, 2 if fits else 1)
        assert config.configure(size, size, itemsize, "cuda", 120) == small


def test_saved_memory_is_bounded():
    """At most half of q, k, v and o; with q, k and v, which autograd keeps too, 1.25 times the four."""
    for dtype in (torch.float32, torch.bfloat16):
        for size in (64, 128, 256):
            q = torch.empty(1, 8192, 2, size, dtype=dtype, device="meta")
            saved = 4 * torch.Size(backend.saved_shapes(q, q, 1, rla.METHODS["rdn"])[0]).numel()
            assert saved <= 0.5 * 4 * q.numel() * q.element_size()


def test_the_interpreter_is_never_chosen_by_itself():
    x = make(ALL["rdn"], Case(B=1, T=3, H=1), torch.float32)
    assert backend.refuses("cpu", torch.float32, 8, 8, False) is None
    o, _ = call(x, "rdn", None)
    want, _ = call(x, "rdn", "native" if rla.backends()["native"].usable else "chunked")
    assert torch.equal(o, want)
