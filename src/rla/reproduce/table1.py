"""Table 1 in numbers: each method's output against its prediction-plus-correction form, written out token by token.

    base prediction          alpha_t S_{t-1} q_t
    single-token methods     + beta_t R_t q_t,  R_t = v_t k_t^T, or (v_t - alpha_t S_{t-1} k_t) k_t^T for the delta rule
    RLA, RDN                 + gamma_t R_t q_t, R_t recurrent

States are v x k with column vectors, as in the paper. The op has another form (chunks, and S_t q_t where there is no
correction): that the two agree is the content of the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..method import METHODS, Method
from ..ops import attend
from ..ops.backends import choose
from ..report.page import Section, Table, Verdict
from .store import Store

TOKENS, K, V = 150, 16, 12  # two chunks of 64 and a part
TOLERANCE = 1e-10  # of float64
ROWS = {  # output and correction, in the paper's letters
    "linear": ("S q + R q", "v k^T"),
    "retnet": ("alpha S q + R q", "v k^T, alpha constant"),
    "mamba2": ("alpha S q + beta R q", "v k^T, beta the step dt"),
    "gla": ("diag(alpha) S q + R q", "v k^T"),
    "sgla": ("alpha S q + beta R q", "v k^T"),
    "deltanet": ("S q + beta R q", "(v - S k) k^T"),
    "gdn": ("alpha S q + beta R q", "(v - alpha S k) k^T"),
    "rla": ("alpha S q + gamma R q", "R fitted: alpha R + gamma r k^T, r = clip(v - S k)"),
    "rdn": ("alpha S q + gamma R q", "R fitted: alpha R (I - gamma k k^T) + gamma r k^T"),
}


@dataclass(frozen=True)
class Sum:
    """A method's output as the two terms of its sum, each [T, V]."""

    prediction: Tensor
    correction: Tensor

    @property
    def output(self) -> Tensor:
        return self.prediction + self.correction


def inputs(method: Method, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens of one head in float64, with the gates that the method has."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, TOKENS, 1, *shape, generator=generator, dtype=torch.float64)

    scale = 1 if method.qk_norm else K**-0.5  # without the norm the delta rule wants |k| of about 1
    found = {"q": normal(K) * scale, "k": normal(K) * scale, "v": normal(V)}
    if method.decay != "none":
        found["log_alpha"] = F.logsigmoid(normal(*((K,) if method.decay == "vector" else ())) + 2)
    if method.rate != "one":
        found["beta"] = normal().sigmoid()
    if method.has_residual:
        found["gamma"] = normal().sigmoid()
    return found


def written_out(method: Method, x: Mapping[str, Tensor]) -> Sum:
    """The form of Table 1 or, for a fitted correction, of the method section; for methods that METHODS names in ROWS."""
    q, k = (F.normalize(x[n], dim=-1) if method.qk_norm else x[n] for n in "qk")
    columns = [y[0, :, 0, :, None] for y in (q, k, x["v"])]  # [T, d, 1]
    one = torch.ones(TOKENS, dtype=torch.float64)
    alphas = x["log_alpha"][0, :, 0].exp() if "log_alpha" in x else one
    betas, gammas = (x[n][0, :, 0] if n in x else one for n in ("beta", "gamma"))
    S, R = torch.zeros(2, V, K, dtype=torch.float64)
    terms: list[tuple[Tensor, Tensor]] = []
    for q, k, v, alpha, beta, gamma in zip(*columns, alphas, betas, gammas, strict=True):
        decayed = S * alpha  # diag(alpha) acts on the columns, the key channels
        pair = (v - decayed @ k) @ k.T if method.rule == "delta" else v @ k.T
        if method.has_R:
            r = torch.clip(v - S @ k, -method.clip, method.clip)
            R = R * alpha
            R = R + gamma * ((r - R @ k) @ k.T if method.rule == "delta" else r @ k.T)
            terms.append((decayed @ q, gamma * R @ q))
        else:
            terms.append((decayed @ q, beta * pair @ q))
        S = decayed + beta * pair
    prediction, correction = (torch.stack([term[i][:, 0] for term in terms]) for i in (0, 1))
    return Sum(prediction, correction)


def measure() -> dict[str, Any]:
    """For each method the largest |o|, the correction's share of the two terms' norms, each backend's largest difference."""
    rows: dict[str, Any] = {}
    for name in ROWS:
        method, found = METHODS[name], {}
        x = inputs(method)
        want = written_out(method, x)
        for backend, dtype in (("reference", torch.float64), ("chunked", torch.float64), ("native", torch.float32)):
            own = {key: value.to(dtype) for key, value in x.items()}
            try:
                choose(backend, own["q"], own["v"], method)
            except ValueError:
                continue
            out, _ = attend(**own, method=method, backend=backend)  # type: ignore[arg-type]
            found[f"{backend}, {str(dtype).removeprefix('torch.')}"] = (out[0, :, 0].double() - want.output).abs().max().item()
        share = want.correction.norm() / (want.correction.norm() + want.prediction.norm())
        rows[name] = {"largest": want.output.abs().max().item(), "share": share.item(), "difference": found}
    return rows


def kept(store: Store) -> dict[str, Any]:
    """`measure`, done once."""

    def make(folder: Path) -> None:
        (folder / "table1.json").write_text(json.dumps(measure(), indent=1))

    inputs = {"tokens": TOKENS, "keys": K, "values": V, "methods": list(ROWS)}
    return json.loads((store.files("table1", inputs, make) / "table1.json").read_text())


def section(rows: Mapping[str, Any], again: str) -> Section:
    kinds = [f"{name}, {dtype}" for name, dtype in (("reference", "float64"), ("chunked", "float64"), ("native", "float32"))]
    kinds = [kind for kind in kinds if any(kind in row["difference"] for row in rows.values())]
    shown = []
    for name, row in rows.items():
        numbers = [f"{row['difference'][kind]:.1e}" if kind in row["difference"] else "" for kind in kinds]
        shown.append((name, *ROWS[name], f"{row['largest']:.2f}", f"{100 * row['share']:.0f} %", *numbers))
    headers = ("method", "output", "correction R", "largest |o|", "correction's share", *kinds)
    exact = [value for row in rows.values() for kind, value in row["difference"].items() if kind.endswith("float64")]
    claim = Verdict(
        "Every method of Table 1 is a base prediction from the past plus a correction.",
        "agrees" if max(exact) < TOLERANCE else "disagrees",
        f"the two forms differ by at most {max(exact):.0e} in float64, for {len(rows)} methods.",
    )
    body = (
        f"{TOKENS} random tokens, keys of {K} and values of {V} numbers: the op's output beside the same method written out "
        "token by token as a prediction from the state before the token and a correction, in the paper's letters (S and R of "
        f"steps t - 1 and t, alpha, beta, gamma of step t). Rule: differences in float64 below {TOLERANCE:.0e}.",
    )
    table = Table("Largest difference between the two forms", headers, tuple(shown))
    return Section("Table 1: prediction and correction", body, (claim,), (), (table,), (), (again,))
