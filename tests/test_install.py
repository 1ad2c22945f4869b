"""Importing is cheap and needs torch alone; the command line; the backends and the doctor."""

import dataclasses
import importlib
import subprocess
import sys
import warnings

import pytest
import torch

import rla
from rla import cli, doctor

backends = importlib.import_module("rla.ops.backends")  # the module, not the function of that name


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_needs_torch_alone():
    heavy = ["transformers", "triton", "tyro", "rich", "matplotlib", "onnxruntime", "lm_eval", "datasets", "tokenizers"]
    # torch itself may bring some of them in, so what matters is what rla adds.
    code = (
        f"import sys, torch; a = set(sys.modules); import rla; print([m for m in {heavy} if m in sys.modules and m not in a])"
    )
    assert python(code) == "[]"


def test_import_is_cheap():
    code = "import time, torch; t = time.perf_counter(); import rla; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.2


def test_backends_say_why():
    rows = rla.backends()
    assert {"chunked", "reference"} <= set(rows)
    assert rows["chunked"].usable
    assert rows["reference"].usable
    assert all(row.reason for row in rows.values())


def test_triton_without_a_gpu_is_not_usable(monkeypatch):
    installed = dataclasses.replace(backends.BACKENDS["triton"], missing=None)
    monkeypatch.setitem(backends.BACKENDS, "triton", installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    row = rla.backends()["triton"]
    assert (row.usable, row.reason) == (False, "torch sees no GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert rla.backends()["triton"].usable
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert rla.backends()["triton"].usable


def fake_backend(monkeypatch, missing=None, refusal=None):
    class Module:
        @staticmethod
        def refuses(*problem):
            return refusal

    broken = backends.Backend("broken", ("cpu",), "never there", Module, missing)
    monkeypatch.setattr(
        backends, "BACKENDS", {"broken": broken} | {n: b for n, b in backends.BACKENDS.items() if n != "broken"}
    )
    monkeypatch.setattr(backends, "NAMES", ("broken", *backends.NAMES))
    backends._warn_once.cache_clear()


def test_automatic_choice_falls_back_and_warns_once(monkeypatch):
    fake_backend(monkeypatch, missing="no compiler was found")
    q = torch.randn(1, 3, 1, 4)
    with pytest.warns(UserWarning, match=r"'broken' is not usable here \(no compiler was found\).*rla doctor"):
        rla.attend(q, q, q)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*broken")
        rla.attend(q, q, q)
    row = rla.backends()["broken"]
    assert not row.usable
    assert row.reason == "no compiler was found"


def test_named_backend_that_cannot_serve_raises(monkeypatch):
    q = torch.randn(1, 3, 1, 4)
    fake_backend(monkeypatch, missing="no compiler was found")
    with pytest.raises(ValueError, match="backend: 'broken' can't serve this call: no compiler was found"):
        rla.attend(q, q, q, backend="broken")
    fake_backend(monkeypatch, refusal="K is at most 2; got 4")
    with pytest.raises(ValueError, match="backend: 'broken' can't serve this call: K is at most 2; got 4"):
        rla.attend(q, q, q, backend="broken")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*broken")
        rla.attend(q, q, q)  # what a backend doesn't serve goes to the next without a word


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in (
        "torch",
        torch.__version__,
        "instruction sets:",
        "chunked",
        "reference",
        "usable",
        "bfloat16 matrix products",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        ([0], "work"),
        ([-4, 0], "die with SIGILL: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        ([-4, -4], "with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 too: use float32"),
        ([3, 0], "fail (exit code 3 of the probe): set ONEDNN"),
    ],
)
def test_doctor_on_bf16(codes, says, monkeypatch):
    monkeypatch.setattr(doctor, "bf16_probe", lambda **environment: codes.pop(0))
    assert says in doctor.bf16_report()


def test_command_line(capsys):
    assert cli.main([]) == 0
    assert "rla doctor" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == rla.__version__
    assert cli.main(["docter"]) == 2
    assert "Did you mean `rla doctor`?" in capsys.readouterr().err
    assert cli.main(["bench"]) == 0
    assert "rla bench kernels" in capsys.readouterr().out
    assert cli.main(["bench", "kernel"]) == 2
    assert "Did you mean `rla bench kernels`?" in capsys.readouterr().err


def test_command_without_its_extra(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "kernels"]) == 2
    assert 'pip install "residual-linear-attention[bench]"' in capsys.readouterr().err


def test_python_m_rla():
    result = subprocess.run([sys.executable, "-m", "rla", "--help"], capture_output=True, text=True, check=True)
    assert "usage: rla COMMAND" in result.stdout
