"""What the paper says of the family, as tests: special cases of the residual form, and every row of Table 1.

The right-hand sides are written out here, token by token, from the paper's equations alone.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import rla
from common import Case, make, served, skip_unless_serves
from rla.ops.backends import BACKENDS

CASE = Case(B=1, T=70, H=1, K=6, V=5)
BACKEND = [*BACKENDS, "reference"]


def columns(method, backend):
    """Inputs as lists of column vectors, [T][d, 1], in the paper's letters, and the op's output."""
    dtype = torch.float32 if backend == "native" else torch.float64
    skip_unless_serves(backend, method, dtype, CASE)
    x = {n: t.detach() for n, t in make(method, CASE, dtype).items()}
    out, _ = rla.attend(**x, method=method, backend=backend)
    x = {n: t.double()[0, :, 0] for n, t in x.items()}
    q, k = (F.normalize(x[n], dim=-1) if method.qk_norm else x[n] for n in "qk")
    letters = {"q": q[..., None], "k": k[..., None], "v": x["v"][..., None]}
    if "log_alpha" in x:
        letters["alpha"] = x["log_alpha"].exp()
    for name in ("beta", "gamma"):
        if name in x:
            letters[name] = x[name]
    return letters, out[0, :, 0], 1e-10 if dtype == torch.float64 else 1e-4


def check(out, o, tolerance):
    want = torch.stack(o)[..., 0]
    assert want.abs().max() > 0.1
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("backend", "name"), served(("linear", "mamba2", "gla", "deltanet", "gdn", "sgla", "retnet"), reference=True)
)
def test_table_1(backend, name):
    """Each method's o_t = S_t q_t is its base prediction plus its single-token correction."""
    method = rla.METHODS[name]
    x, out, tolerance = columns(method, backend)
    S, o = torch.zeros(5, 6, dtype=torch.float64), []
    for t in range(CASE.T):
        q, k, v = x["q"][t], x["k"][t], x["v"][t]
        alpha = x["alpha"][t] if "alpha" in x else torch.tensor(1.0, dtype=torch.float64)
        beta = x["beta"][t] if "beta" in x else 1.0
        decayed = S * alpha  # diag(alpha) acts on the key channels, the columns of the paper's S
        R = (v - decayed @ k) @ k.T if method.rule == "delta" else v @ k.T
        o.append(decayed @ q + beta * R @ q)
        S = decayed + beta * R
    check(out, o, tolerance)


@pytest.mark.parametrize("backend", BACKEND)
@pytest.mark.parametrize("rule", ("additive", "delta"))
def test_a_correction_by_the_value_is_linear_attention(rule, backend):
    """With R_t = v_t k_t^T the residual form S_{t-1} q + R_t q is standard linear attention, whose output is S_t q."""
    method = dataclasses.replace(rla.METHODS["linear"], rule=rule)
    x, out, tolerance = columns(method, backend)
    S, o = torch.zeros(5, 6, dtype=torch.float64), []
    for t in range(CASE.T):
        q, k, v = x["q"][t], x["k"][t], x["v"][t]
        R = v @ k.T - (S @ k @ k.T if rule == "delta" else 0)
        o.append(S @ q + R @ q)
        S = S + R
    check(out, o, tolerance)


@pytest.mark.parametrize("backend", BACKEND)
def test_a_correction_by_the_current_residual_is_one_delta_step(backend):
    """R_t = (v_t - S_{t-1} k_t) k_t^T read with S_{t-1} is one delta step: DeltaNet's output when S learns by it too."""
    token = rla.Method(rule="delta", correction="token", decay="none", rate="sigmoid", gamma="tied", loss="l2")
    x, out, tolerance = columns(token, backend)
    S, o = torch.zeros(5, 6, dtype=torch.float64), []
    for t in range(CASE.T):
        q, k, v, beta = x["q"][t], x["k"][t], x["v"][t], x["beta"][t]
        S = S @ (torch.eye(6) - beta * k @ k.T) + beta * v @ k.T
        o.append(S @ q)
    check(out, o, tolerance)


@pytest.mark.parametrize("backend", BACKEND)
@pytest.mark.parametrize("name", ("rla", "rdn", "rla-sum", "rdn-sum", "rla-noclip", "rdn-logcosh", "rla-nofit", "rdn-nofit"))
def test_final_formulations(name, backend):
    """Section 3.4 and its ablations, with the paper's v x k states."""
    method = rla.METHODS[name]
    x, out, tolerance = columns(method, backend)
    S, R, o = torch.zeros(5, 6, dtype=torch.float64), torch.zeros(5, 6, dtype=torch.float64), []
    one = torch.eye(6, dtype=torch.float64)
    for t in range(CASE.T):
        q, k, v = x["q"][t], x["k"][t], x["v"][t]
        alpha, beta, gamma = x["alpha"][t], x["beta"][t], x["gamma"][t]
        e = v - S @ k
        r = {"l2": e, "huber": torch.clip(e, -1, 1), "logcosh": torch.tanh(e)}[method.loss]
        forget = (lambda rate, k=k: one - rate * k @ k.T) if method.rule == "delta" else (lambda rate: one)
        R = r @ k.T if method.correction == "token" else alpha * R @ forget(gamma) + gamma * r @ k.T
        o.append(alpha * S @ q + gamma * R @ q if method.gate_output else S @ q + R @ q)
        S = alpha * S @ forget(beta) + beta * v @ k.T
    check(out, o, tolerance)


def test_pseudo_code_of_the_appendix():
    """The listing of the paper's appendix D, in its own words, against attend(method="rla")."""
    x = {n: t.detach() for n, t in make(rla.METHODS["rla"], CASE).items()}
    q, k, v = (x[n][0, :, 0] for n in "qkv")
    alpha, beta, gamma = x["log_alpha"][0, :, 0].exp(), x["beta"][0, :, 0], x["gamma"][0, :, 0]
    S = torch.zeros(6, 5, dtype=torch.float64)
    R = torch.zeros(6, 5, dtype=torch.float64)
    o = torch.zeros(CASE.T, 5, dtype=torch.float64)
    for t in range(CASE.T):
        qt, kt, vt = q[t : t + 1], k[t : t + 1], v[t : t + 1]
        qt, kt = F.normalize(qt, dim=-1), F.normalize(kt, dim=-1)
        rt = torch.clip(vt - kt @ S, min=-1, max=1)
        R = alpha[t] * R + gamma[t] * kt.T @ rt
        o[t : t + 1] = alpha[t] * qt @ S + gamma[t] * qt @ R
        S = alpha[t] * S + beta[t] * kt.T @ vt
    out, state = rla.attend(**x, method="rla", backend="chunked")
    torch.testing.assert_close(out[0, :, 0], o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.R[0, 0], R, rtol=1e-10, atol=1e-10)
