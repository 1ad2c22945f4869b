"""Forward of bfloat16 with operands in bfloat16: on AMX tiles and by dot products of pairs, and which of them is used when.

Tiles run on any machine, in a portable build with a model of them; dot products where the CPU has them. What the CPU has, the
other bfloat16 tests use too.
"""

import ast
import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from common import ALL, WEIRD, Case, assert_close, call, make, rmse_ratio, run, upcast
from rla import doctor
from rla.ops import native

ROOT = Path(__file__).parent.parent
METHODS = [name for name, method in ALL.items() if method.decay != "vector"]
LIMIT = 1e-2  # RMSE ratio of values
bf16 = torch.bfloat16


@pytest.fixture(scope="module")
def model_path():
    """The library with the model; `make sanitize` has one of its own."""
    if native.missing() is not None:
        pytest.skip(f"native: {native.missing()}")
    if "RLA_NATIVE_LIBRARY" in os.environ:
        return Path(os.environ["RLA_NATIVE_LIBRARY"])
    if not (ROOT / "setup.py").exists():
        pytest.skip("not a checkout")
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "_native_model.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "setup.py", "--quiet", "build_native", "--model"], cwd=ROOT, check=True)
    return ROOT / "build" / "_native_model.so"


@pytest.fixture(scope="module")
def tiles(model_path, tmp_path_factory):
    """That library with AMX in use."""
    path = shutil.copy(model_path, tmp_path_factory.mktemp("amx") / "started.so")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLA_NATIVE_LIBRARY", str(path))
        patch.delenv("RLA_NATIVE_ISA", raising=False)
        library = native._Library()
        assert library.missing is None, library.missing
        assert library.library.rla_amx_missing() is None
    assert library.library.rla_amx_check() == 0
    assert library.library.rla_amx_start() == 0
    return library


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A function that loads a copy of the shipped library for an instruction set; "": as it is loaded by default."""
    path = Path(native.__file__).parent / "_native.so"
    if "RLA_NATIVE_LIBRARY" in os.environ or not path.exists():
        pytest.skip("another library, or none, is under test")

    def load(isa):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLA_NATIVE_LIBRARY", str(shutil.copy(path, tmp_path_factory.mktemp("shipped") / "copy.so")))
            patch.setenv("RLA_NATIVE_ISA", isa)
            library = native._Library()
            assert library.missing is None, library.missing
            library.library.rla_dots()  # chosen once, by the environment of now
        return library

    return load


@pytest.fixture(scope="module")
def dots(shipped):
    library = shipped("dots")
    if not library.library.rla_dots():
        pytest.skip("the CPU or the compiler has no AVX512_BF16")
    return library


@pytest.fixture(params=("tiles", "dots"))
def halves(request, poison, monkeypatch):
    library = request.getfixturevalue(request.param)
    monkeypatch.setattr(native, "_library", lambda: library)
    monkeypatch.setattr(native, "amx", lambda: None)


@pytest.fixture
def load(model_path, tmp_path, monkeypatch):
    """A function that makes native.py use a fresh copy of the library, in which AMX has not been tried."""
    monkeypatch.delenv("RLA_NATIVE_ISA", raising=False)

    def load():
        path = shutil.copy(model_path, tmp_path / f"copy{len(list(tmp_path.iterdir()))}.so")
        monkeypatch.setenv("RLA_NATIVE_LIBRARY", str(path))
        library = native._Library()
        assert library.missing is None, library.missing
        monkeypatch.setattr(native, "_library", lambda: library)
        native.amx.cache_clear()
        return library

    yield load
    native.amx.cache_clear()


def forward(x, method, backend="native"):
    with torch.no_grad():
        o, state = call(x, method, backend)
    return {"o": o, "S": state.S} | ({} if state.R is None else {"R": state.R})


def assert_values(got, want):
    for n, y in want.items():
        assert torch.isfinite(got[n]).all(), n
        assert rmse_ratio(got[n], y) <= LIMIT, f"{n}: RMSE ratio {rmse_ratio(got[n], y):.2e}"


def assert_agrees(name, case, decay=2.0):
    x = make(ALL[name], case, bf16, decay=decay)
    want, want_grads = run(upcast(x), ALL[name], "reference", case.cu_seqlens)
    got, grads = run(x, ALL[name], "native", case.cu_seqlens)
    assert_values(got, want)
    assert_close(grads, want_grads, bf16, gradients=True)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("case", ("packed", "wide"))
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, case):
    assert_agrees(name, WEIRD[case])


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("case", WEIRD)
@pytest.mark.parametrize("name", ("sgla", "rdn"))
def test_weird_shapes(name, case):
    assert_agrees(name, WEIRD[case])


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize(("K", "V"), [(1, 1), (2, 256), (31, 33), (32, 32), (33, 31), (256, 5), (255, 64)])
def test_sizes(K, V):
    assert_agrees("rdn", Case(B=1, T=40, H=1, K=K, V=V, state=True))


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("name", ("linear", "deltanet", "rla-noclip", "rdn-noclip", "rdn-logcosh"))
def test_long_sequences(name):
    """Longer than a segment of backward, whose saved states come from the tiles; with little decay errors could pile up."""
    assert_agrees(name, Case(B=1, T=600, H=1, K=32, V=16), decay=6.0)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("name", ("rla", "rdn"))
def test_long_sequences_with_a_clip(name):
    """Where the clip sets in the gradient jumps: the few errors within a rounding of it have either side's gradient.

    One such error is felt by many tokens before it, so that a single seed is a matter of luck: half of many decide.
    """
    case, off = Case(B=1, T=600, H=1, K=32, V=16), []
    for seed in range(25):
        x = make(ALL[name], case, bf16, seed=seed, decay=6.0)
        want, want_grads = run(upcast(x), ALL[name], "reference")
        got, grads = run(x, ALL[name], "native")
        assert_values(got, want)
        assert max(rmse_ratio(grads[n], want_grads[n]) for n in want_grads) <= 5e-2
        rows = (grads["v"] - want_grads["v"]).abs() > 0.05 * want_grads["v"].square().mean().sqrt()
        off.append(rows.double().mean().item())
    assert sorted(off)[12] < 0.01, f"more than one in a hundred gradients is off: {off}"


def no_decay(x):
    x["log_alpha"].zero_()


def forget(x):
    x["log_alpha"][:, 3::7] = -torch.inf
    x["log_alpha"][:, 4] = -100


def steep(x):
    """A chunk of 32 tokens leaves 1e-14 of a state, later 1e-17."""
    x["log_alpha"].fill_(-1)
    x["log_alpha"][:, 64:] = -1.2


def shut(x):
    x["beta"][:, ::2] = 0
    x["gamma"][:, 1::2] = 0


def wide_open(x):
    x["beta"].fill_(1)
    x["gamma"].fill_(1)


def large(x):
    x["q"] *= 1e6
    x["k"] *= 1e6
    x["v"] *= 100


def small(x):
    x["q"] *= 1e-9
    x["k"][:, ::3] = 0


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("change", (no_decay, forget, steep, shut, wide_open, large, small))
@pytest.mark.parametrize("name", ("rla", "rdn"))
def test_extremes(name, change):
    x = make(ALL[name], WEIRD["wide"], bf16)
    with torch.no_grad():
        change(x)
    assert_values(forward(x, ALL[name]), forward(upcast(x), ALL[name], "reference"))


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("which", ("q", "k", "v"))
def test_a_nan_does_not_reach_earlier_tokens(which):
    method, case = ALL["rdn"], Case(B=1, T=70, H=1, K=40, V=40)
    x = {n: t.detach() for n, t in make(method, case, bf16).items()}
    want = forward(x, method)["o"]
    x[which][:, 20] = torch.nan
    got = forward(x, method)["o"]
    assert torch.equal(got[:, :20], want[:, :20])
    assert got[:, 20].isnan().any()


@pytest.mark.usefixtures("halves")
def test_inputs_with_strides():
    method, case = ALL["rdn"], Case(B=2, T=50, H=2, K=24, V=40)
    x = {n: t.detach() for n, t in make(method, case, bf16).items()}
    want = forward(x, method)
    for n in "qkv":
        wide = torch.full((*x[n].shape[:3], x[n].shape[3] + 9), torch.nan, dtype=bf16)
        wide[..., 3:-6] = x[n]
        x[n] = wide[..., 3:-6]
    got = forward(x, method)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("name", ("sgla", "rdn", "rla-sum"))
@pytest.mark.parametrize(
    "case", (Case(B=1, T=600, H=1, K=64, V=96), Case(lengths=(300, 0, 1, 129, 64), H=3, K=48, V=64, state=True))
)
def test_the_same_bits_for_any_number_of_threads(name, case):
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(run(make(ALL[name], case, bf16), ALL[name], "native", case.cu_seqlens))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert all(torch.equal(a[n], b[n]) for n in b)


def bits(dtype=bf16):
    case = WEIRD["wide"]
    return forward({n: t.detach() for n, t in make(ALL["rdn"], case, dtype).items()}, ALL["rdn"])


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def test_used_for_bfloat16_alone(load, monkeypatch):
    load()
    assert native.amx() is None
    tiles, others = bits(), {dtype: bits(dtype) for dtype in (torch.float32, torch.float16)}
    monkeypatch.setenv("RLA_NATIVE_ISA", "portable")
    load()
    assert native.amx() == "RLA_NATIVE_ISA asks for another instruction set"
    assert not same(bits(), tiles), "AMX made no difference: it was not used"
    assert all(same(bits(dtype), others[dtype]) for dtype in others)


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "a process that uses it dies with SIGILL"),
        ("import sys; sys.exit(1)", "it fails (exit code 1 of the trial)"),
        ("import time; time.sleep(60)", "it could not be tried"),
    ],
)
def test_a_trial_that_fails_leaves_the_float32_products(probe, says, load, monkeypatch):
    monkeypatch.setenv("RLA_NATIVE_ISA", "portable")
    load()
    want = bits()
    monkeypatch.delenv("RLA_NATIVE_ISA")
    load()
    monkeypatch.setattr(native, "_AMX_PROBE", probe)
    monkeypatch.setattr(native, "_AMX_SECONDS", 0.2 if "sleep" in probe else 60)
    assert same(bits(), want)
    assert says in native.amx()
    assert f"no ({native.amx()})" in doctor.native_report()


def test_a_refusal_of_the_operating_system(load, monkeypatch):
    library = load()
    monkeypatch.setattr(library.library, "rla_amx_start", lambda: 1)
    assert native.amx() == "the operating system refuses it"


def test_without_an_interpreter(load, monkeypatch):
    load()
    monkeypatch.setattr(sys, "executable", "")
    assert native.amx() == "there is no Python interpreter to try it in"


def test_the_doctor_tells(load):
    load()
    assert doctor.native_report() == "portable, AMX for bfloat16: yes"


def test_dot_products_are_used_for_bfloat16_alone(dots, shipped, monkeypatch):
    monkeypatch.setattr(native, "amx", lambda: "not in this test")
    results = []
    for library in (shipped("avx512"), dots):
        monkeypatch.setattr(native, "_library", lambda library=library: library)
        assert native.dots() == (library is dots)
        assert doctor.native_report().endswith(f"AVX512_BF16: {'yes' if library is dots else 'no'}")
        results.append({dtype: bits(dtype) for dtype in (bf16, torch.float32, torch.float16)})
    plain, by_dots = results
    assert not same(by_dots.pop(bf16), plain.pop(bf16)), "dot products made no difference: they were not used"
    assert all(same(by_dots[dtype], plain[dtype]) for dtype in plain)


def test_dot_products_leave_the_gradient_of_a_clip_alone(dots, shipped, monkeypatch):
    case = Case(B=1, T=200, H=1, K=40, V=24)
    for name, alike in (("rdn", True), ("rdn-logcosh", False), ("gdn", False)):
        results = []
        for library in (shipped("avx512"), dots):
            monkeypatch.setattr(native, "_library", lambda library=library: library)
            values, gradients = run(make(ALL[name], case, bf16), ALL[name], "native")
            results.append(values | {f"d{n}": x for n, x in gradients.items()})
        assert same(*results) == alike, name


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no /proc/cpuinfo")
def test_dot_products_are_the_choice_on_amd_alone(dots, shipped):
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    assert bool(shipped("").library.rla_dots()) == amd


def test_not_tried_before_it_is_needed():
    code = (
        "import torch, rla; from rla.ops import native; q = torch.randn(1, 3, 1, 4)\n"
        "rla.attend(q, q, q); assert native.amx.cache_info().currsize == 0\n"
        "rla.attend(*[q.bfloat16()] * 3); assert native.amx.cache_info().currsize == (native.missing() is None)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.skipif(platform.machine() != "x86_64" or not sys.platform.startswith("linux"), reason="no AMX on this platform")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_shipped_library_has_the_instructions():
    path = Path(native.__file__).parent / "_native.so"
    if not path.exists():
        pytest.skip(f"native: {native.missing()}")
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True).stdout
    for words in ("tdpbf16ps %tmm6,%tmm4,%tmm0", "tdpbf16ps %tmm7,%tmm5,%tmm3", "ldtilecfg", "tilerelease", "tilestored %tmm3"):
        assert words in text


def setting(name):
    """A literal of setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py has no {name}")


def test_the_model_is_what_intel_defines(tmp_path):
    """Sums of even and of odd products in float32, each step rounded, denormals zero; then both, then the tile."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "dot.cpp").write_text(
        "#define RLA_ISA test\n"
        '#include "args.h"\n#include "amx.h"\n'
        'extern "C" __attribute__((visibility("default"))) void dot(const void* a, const void* b, float* c) {\n'
        "  test::AmxConfig config;\n"
        "  for (int i = 0; i < 3; ++i) config.rows[i] = 16, config.bytes[i] = 64;\n"
        "  test::amx_configure(config);\n"
        "  test::amx_load<0>(c, 64), test::amx_load<1>(a, 64), test::amx_load<2>(b, 64);\n"
        "  test::amx_dot<0, 1, 2>(), test::amx_store<0>(c, 64), test::amx_release();\n"
        "}\n"
    )
    flags = [*setting("FLAGS").split(), *setting("MODEL").split(), f"-I{native._HERE / 'csrc'}", "-shared"]
    subprocess.run([compiler, *flags, str(tmp_path / "dot.cpp"), "-o", str(tmp_path / "dot.so")], check=True)
    library = ctypes.CDLL(str(tmp_path / "dot.so"))
    random = np.random.default_rng(0)

    def flush(x):
        x = x.astype(np.float32)
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)

    for scale in (1.0, 1e-19, 1e-39):  # ordinary; products near the least float32; inputs that are denormal
        a, b = (torch.from_numpy(random.standard_normal((16, 32)) * scale).bfloat16() for _ in range(2))
        c = (random.standard_normal((16, 16)) * scale**2).astype(np.float32)
        got = c.copy()
        library.dot(ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr()), ctypes.c_void_p(got.ctypes.data))
        x, y = (flush(t.float().numpy()).astype(np.float64) for t in (a, b))
        sums = np.zeros((16, 16, 2))
        for k in range(16):
            for odd in range(2):  # a float64 holds the product and, but for one case in 2^29, the sum
                sums[..., odd] = flush(np.outer(x[:, 2 * k + odd], y[k, odd::2]) + sums[..., odd])
        want = flush(flush(c).astype(np.float64) + flush(sums[..., 0] + sums[..., 1]))
        assert np.array_equal(got, want)
        assert scale < 1e-30 or np.abs(want).max() > 0
