"""The benchmark commands on tiny sizes: what they write and print, peers that are missing, options that are wrong."""

from __future__ import annotations

import csv
import dataclasses
import os
import platform
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import rla.cli
from rla.bench import decode, kernels, measure, peers, ratios, threads, workload
from rla.bench.measure import Quantiles
from rla.bench.ratios import Cell, Results
from rla.bench.workload import AUTOGRAD, Contender, Tokens, Unavailable, Workload
from rla.ops.backends import BackendStatus

TINY = Workload(1, 2, 16, "float32", "cpu", 1)
SAME = {"machine", "cores", "threads", "torch", "transformers", "onnxruntime", "rla", "python", "date"}


@pytest.fixture(autouse=True)
def small_sgemm(monkeypatch):
    monkeypatch.setattr(measure, "SGEMM_SIZE", 64)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def run_kernels(out: Path, **options) -> int:
    settings = {"methods": ("sgla", "rla"), "backends": ("chunked",), "lengths": (16, 32), "peers": (), "heads": 2, "dim": 16}
    return kernels.main(**{**settings, "threads": 1, "seconds": 0.01, "memory": False, "out": out, **options})


def test_kernels_writes_table_ratios_csv_and_figure(tmp_path, capsys):
    threads = torch.get_num_threads()
    assert run_kernels(tmp_path, methods=("sgla", "rla", "gdn", "rdn"), peers=("sdpa",)) == 0
    shown = capsys.readouterr().out
    assert "sgemm 64^3" in shown
    for ratio in (
        "chunked rla forward: time over sgla",
        "chunked rdn forward+backward: time over gdn",
        "times as fast as sdpa",
    ):
        assert ratio in shown
    assert "chunked rla: time of forward+backward over forward" in shown
    rows = rows_of(tmp_path / "kernels.csv")
    assert len(rows) == 5 * 2 * 2  # contenders, lengths, passes
    assert SAME | {"method", "by", "pass", "T", "ms_q20", "ms_q50", "ms_q80", "tokens_per_second", "gflops"} <= set(rows[0])
    for row in rows:
        assert 0 < float(row["ms_low"]) <= float(row["ms_q20"]) <= float(row["ms_q50"]) <= float(row["ms_q80"])
        assert int(row["repetitions"]) >= 3
        assert row["threads"] == "1"
        assert row["peak_bytes"] == ""
    assert is_png(tmp_path / "kernels.png")
    assert torch.get_num_threads() == threads


def test_half_precision_beside_float32(tmp_path, capsys):
    assert run_kernels(tmp_path, peers=("float32",), dtype="float16", passes=("forward",)) == 0
    assert "chunked rla forward: times as fast as in float32" in capsys.readouterr().out
    rows = rows_of(tmp_path / "kernels.csv")
    assert [(row["by"], row["dtype"]) for row in rows[:4]] == [("chunked", "float16")] * 2 + [("float32", "float32")] * 2
    assert {row["tensor_bytes"] for row in rows if row["T"] == "32"} == {str(8 * 32 * 2 * 16 * size) for size in (2, 4)}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is measured on Linux only")
def test_peak_memory_is_that_of_the_tensors(tmp_path, capsys):
    assert run_kernels(tmp_path, methods=("rla",), lengths=(2048,), dim=64, memory=True) == 0
    assert "over that of autograd through chunked" in capsys.readouterr().out
    peak = {row["pass"]: int(row["peak_bytes"]) for row in rows_of(tmp_path / "kernels.csv")}
    output = 2048 * 2 * 64 * 4
    assert output <= peak["forward"] < peak["both"]
    assert 4 * output <= peak["both"]  # o, dq, dk, dv


def test_ctrl_c_writes_what_there_is(tmp_path, monkeypatch, capsys):
    def interrupted(cells, samples, *, seconds, rounds, on_done):
        if next(iter(cells)).T == 32:
            raise KeyboardInterrupt
        samples.update({cell: [0.5] for cell in cells})

    monkeypatch.setattr(kernels, "time_in_rounds", interrupted)
    assert run_kernels(tmp_path) == 0
    assert "interrupted" in capsys.readouterr().out
    assert {row["T"] for row in rows_of(tmp_path / "kernels.csv")} == {"16"}


@pytest.mark.parametrize(("peer", "module"), [("onnxruntime", "onnxruntime"), ("transformers", "transformers")])
def test_missing_peer_is_left_out(tmp_path, monkeypatch, capsys, peer, module):
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    peers._check_agreement.cache_clear()
    peers._session.cache_clear()
    assert run_kernels(tmp_path, methods=("gdn",), lengths=(16,), passes=("forward",), peers=(peer,)) == 0
    assert f"note: gdn {peer} forward: not available: not installed" in capsys.readouterr().out
    assert len(rows_of(tmp_path / "kernels.csv")) == 1


def test_unusable_backend_is_noted_when_left_out(tmp_path, monkeypatch, capsys):
    rows = {
        "native": BackendStatus("native", False, "no compiler"),
        "chunked": BackendStatus("chunked", True, ""),
    }
    monkeypatch.setattr(kernels, "known_backends", lambda: rows)
    assert run_kernels(tmp_path, methods=("gdn",), lengths=(16,), passes=("forward",), backends=()) == 0
    assert "note: backend native: not available: no compiler" in capsys.readouterr().out
    assert {row["by"] for row in rows_of(tmp_path / "kernels.csv")} == {"chunked"}
    assert run_kernels(tmp_path, backends=("native",)) == 2
    assert "--backends: native is not usable here: no compiler" in capsys.readouterr().err


def test_onnxruntime_peer_agrees_with_gdn():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    tokens = TINY.tokens(100)
    peers.prepare(peers.PEERS["onnxruntime"], TINY, tokens, "forward")()
    with pytest.raises(Unavailable, match="forward only"):
        peers.prepare(peers.PEERS["onnxruntime"], TINY, tokens, "both")


def test_a_peer_that_computes_something_else_is_left_out(monkeypatch):
    monkeypatch.setattr(peers, "_transformers", lambda: lambda q, k, v, log_alpha, beta: v)
    peers._check_agreement.cache_clear()
    with pytest.raises(Unavailable, match="differs from our gdn"):
        peers.prepare(peers.PEERS["transformers"], TINY, TINY.tokens(8), "forward")


@pytest.mark.parametrize("method", ["sgla", "rla", "gdn", "rdn", "rdn-nofit", "rla-tied", "gla"])
def test_autograd_through_chunked_gives_the_gradients_of_chunked(method):
    tokens = Tokens(*(x.double() for x in vars(TINY.tokens(70)).values()))
    plain = workload.attend_pass(Contender(method, AUTOGRAD), tokens, "both")()
    own = workload.attend_pass(Contender(method, "chunked"), tokens, "both")()
    assert isinstance(plain, tuple)
    assert isinstance(own, tuple)
    own = own[:3] + own[3 if rla.METHODS[method].decay == "none" else 4 :]  # without log_alpha
    for x, y in zip(plain, own, strict=True):
        torch.testing.assert_close(x, y)


def test_ratios_and_rates():
    a, b = Contender("rla", "native"), Contender("rla", "chunked")
    times = {Cell(a, 4096, "forward"): 0.1, Cell(b, 4096, "forward"): 0.4, Cell(a, 4096, "both"): 0.3}
    w = Workload(1, 16, 128, "float32", "cpu", 2)
    results = Results(
        w, {cell: Quantiles.of([t]) for cell, t in times.items()}, {Cell(a, 4096, "both"): w.tensor_bytes(4096)}, 200.0
    )
    found = dict(ratios.table(results, [a, b], [4096]))
    assert found["native rla forward: times as fast as chunked"] == [pytest.approx(4)]
    assert found["native rla: time of forward+backward over forward"] == [pytest.approx(3)]
    assert found["native rla: allocated in forward+backward over bytes of q, k, v, o, gradients"] == [1]
    gflops = 2 * 5 * (64 * 128 + 128**2) * 16 * 4096 / 0.1 / 1e9
    assert found["native rla forward: rate over sgemm's"] == [pytest.approx(gflops / 200)]
    assert not any("sdpa" in name for name in found)


def test_ratios_within_rounds():
    """Both twice as slow in the second round and thrice in the third; one cell had a round more."""
    a, b = Contender("rla", "native"), Contender("rla", "chunked")
    cells = [Cell(c, 4096, "forward") for c in (a, b)]
    times = {cells[0]: Quantiles.of([1.0, 2.0, 3.0, 1.0]), cells[1]: Quantiles.of([4.0, 8.0, 12.0])}
    results = Results(Workload(1, 16, 128, "float32", "cpu", 2), times, {}, sgemm=200.0)
    results.rounds.update({cells[0]: [1.0, 2.0, 3.0, 1.0], cells[1]: [4.0, 8.0, 12.0]})
    speed = "native rla forward: times as fast as chunked"
    run, rounds = (dict(ratios.table(results, [a, b], [4096], which)) for which in ("run", "rounds"))
    assert (run[speed], rounds[speed]) == ([pytest.approx(8 / 1.5)], [pytest.approx(4)])
    assert "native rla forward: rate over sgemm's" in run
    assert not any("sgemm" in name for name in rounds)


def test_cells_are_timed_in_turn():
    order: list[str] = []
    samples: dict[str, list[float]] = {}
    measure.time_in_rounds({name: partial(order.append, name) for name in "ab"}, samples, seconds=0.0)
    assert [name for name, before in zip(order, [None, *order], strict=False) if name != before] == list("ababab")
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3}


def run_threads(out: Path, **options) -> int:
    settings: dict = {"methods": ("rdn",), "backends": ("chunked",), "length": 70, "dim": 16}
    return threads.main(**{**settings, "seconds": 0.0, "out": out, **options})


def test_threads_writes_table_and_csv_and_leaves_torch_as_it_was(tmp_path, capsys):
    before = torch.get_num_threads()
    assert run_threads(tmp_path, threads=(1, 2)) == 0
    assert torch.get_num_threads() == before
    assert "times as fast" in capsys.readouterr().out
    rows = rows_of(tmp_path / "threads.csv")
    assert [(r["method"], r["threads"]) for r in rows] == [("rdn", "1"), ("rdn", "2"), ("sgemm", "1"), ("sgemm", "2")]
    assert all(float(r["times_as_fast_q50"]) == 1 for r in rows if r["threads"] == "1")
    assert all(float(r["times_as_fast_q50"]) > 0 for r in rows)


def run_decode(out: Path, **options) -> int:
    settings = {"methods": ("gdn", "rdn"), "backends": ("chunked",), "positions": (3, 9), "cycle": 2, "heads": 2, "dim": 8}
    return decode.main(**{**settings, "threads": 1, "seconds": 0.0, "out": out, **options})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_memory_is_kept_between_calls():
    import resource  # not on every system

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(2**24)  # 64 MB
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    pages = 2**26 // resource.getpagesize()
    with measure.memory_kept(reserve=2**30):
        assert all(faults() < pages // 100 for _ in range(10))
    assert faults() > pages // 1000  # huge pages are 512 small ones


def test_decode_writes_table_csv_and_figure(tmp_path, capsys):
    assert run_decode(tmp_path) == 0
    assert "step/pass" in capsys.readouterr().out
    rows = rows_of(tmp_path / "decode.csv")
    assert len(rows) == 2 * 2 * 2  # methods, positions, ways of visiting states
    assert SAME | {"method", "by", "states", "position", "us_q50", "pass_us_q50", "step_over_pass"} <= set(rows[0])
    assert {row["state_bytes"] for row in rows if row["method"] == "rdn"} == {str(2 * 2 * 8 * 8 * 4)}
    assert is_png(tmp_path / "decode.png")


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (run_kernels, {"methods": ("rdnn",)}, "unknown name 'rdnn'. Did you mean 'rdn'?"),
        (run_kernels, {"methods": ()}, "--methods: expected at least one"),
        (run_kernels, {"backends": ("cuda",)}, "--backends: unknown name 'cuda'"),
        (run_kernels, {"lengths": (0, 16)}, "--lengths: expected numbers of at least 1; got 0 16"),
        (run_kernels, {"lengths": ()}, "--lengths: expected numbers of at least 1; got none"),
        (run_kernels, {"passes": ()}, "--passes: expected forward, both"),
        (run_kernels, {"threads": 0}, "--threads: expected at least 1; got 0"),
        (run_kernels, {"dim": -1}, "--dim: expected at least 1; got -1"),
        (run_kernels, {"seconds": -1.0}, "--seconds: expected a number >= 0; got -1.0"),
        (run_kernels, {"device": "cuda"}, "--device: torch finds no CUDA device here; expected cpu"),
        (run_decode, {"device": "cuda"}, "--device: torch finds no CUDA device here; expected cpu"),
        (run_decode, {"cycle": 0}, "--cycle: expected numbers of at least 1; got 0"),
        (run_decode, {"positions": (-3,)}, "--positions: expected numbers of at least 1; got -3"),
        (run_threads, {"threads": (1, 0)}, "--threads: expected numbers of at least 1; got 1 0"),
        (run_threads, {"length": 0}, "--length: expected numbers of at least 1; got 0"),
    ],
)
def test_wrong_options_are_named(tmp_path, capsys, run, options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(tmp_path, **options) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_backend_for_another_device_is_left_out(tmp_path, capsys, monkeypatch):
    """Where there is a GPU a default choice of backends has triton, whatever --device says."""
    every = {name: dataclasses.replace(b, usable=True) for name, b in rla.backends().items()}
    monkeypatch.setattr(kernels, "known_backends", lambda: every)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert run_kernels(tmp_path, backends=("chunked", "triton"), memory=False) == 0
    assert "triton forward: not available: backend: 'triton' can't serve this call" in capsys.readouterr().out
    assert {row["by"] for row in rows_of(tmp_path / "kernels.csv")} == {"chunked"}


@pytest.mark.parametrize("command", ["kernels", "decode", "threads"])
def test_command_line(capsys, command):
    with pytest.raises(SystemExit) as done:
        rla.cli.main(["bench", command, "--help"])
    assert done.value.code == 0
    assert f"rla bench {command} --methods rla rdn" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        rla.cli.main(["bench", command, "--dtype", "int8"])
    assert done.value.code == 2
