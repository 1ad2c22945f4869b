"""The cost report: bytes and operations of each kernel, counted in the interpreter, and a roofline from public figures.

    TRITON_INTERPRET=1 python tools/gpu_cost.py [--method rdn] [--out results/gpu-cost.md]

Counts are exact: the kernels run on one head at three lengths, the work is affine in the number of chunks (checked), and heads
don't share work. "Moved" bytes are those of distinct 32-byte sectors that a launch reads, and writes: what memory must carry
if the cache holds what the programs of one launch share. Beside it, from the same rules, the formulas of

    gdn        flash-linear-attention's chunked gated delta rule, kernel by kernel (`FLA_FORWARD`, `FLA_BACKWARD`)
    two-pass   the paper's way: that twice, for S with v and for R with the residuals, and the tensors handed over between

Times are a model: the longer of moved bytes over bandwidth and operations over the tensor cores' rate, for each kernel.
Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import triton_interpreter

import rla
from rla.ops import triton as backend

HEADS, D, CHUNK = 16, 128, 64
LENGTHS = (2048, 8192, 32768, 65536)
# Bytes per second and dense bfloat16 tensor operations per second: NVIDIA's data sheets of the SXM models with 80 GB.
GPUS = {"A100": (2.039e12, 312e12), "H100": (3.35e12, 989e12)}

# One tensor [T, d] of 2 bytes is 1 unit. The others: a gate in float32 is 2 / d, a C x C matrix C / d, the states of all
# chunks d / C. Each row: what a kernel reads and writes, in the order of fla's chunk_gated_delta_rule.
_GATE, _MATRIX, _STATES = 2 / D, CHUNK / D, D / CHUNK
FLA_FORWARD = {
    "l2 norm of q and k": (2, 2),
    "cumulative sum of log_alpha": (_GATE, _GATE),
    "k k^T and inverse": (1 + 2 * _GATE, _MATRIX),
    "w, u": (2 + _MATRIX + 2 * _GATE, 2),
    "states": (3 + _GATE, _STATES + 1),
    "output": (3 + _STATES + _GATE, 1),
}
FLA_BACKWARD = {
    "w, u again": (2 + _MATRIX + 2 * _GATE, 2),
    "states again": (3 + _GATE, _STATES + 1),
    "dv within chunks": (3 + _GATE, 1),
    "dstates": (5 + _GATE, _STATES + 1),
    "dq, dk, dw, dgates": (5 + 2 * _STATES + _GATE, 3 + _GATE),
    "through w, u": (4 + _MATRIX + 2 * _GATE, 2 + 2 * _GATE),
    "sums of dk and dgates": (2 + 2 * _GATE, 1 + _GATE),
    "norm": (4, 2),
}
# Two passes share the norm. The second needs the predictions p of the first: the output kernel once more, with k in q's
# place; then r = psi(v - p), o = alpha S q + gamma R q; in backward their adjoints.
BETWEEN_FORWARD = {"p": (3 + _STATES + _GATE, 1), "r": (2, 1), "o": (2 + 2 * _GATE, 1)}
BETWEEN_BACKWARD = {
    "do, dgamma": (3 + 2 * _GATE, 2),
    "dr": (2, 1),
    "backward of p": (5 + 2 * _STATES, 3),
    "sums of dq, dk, dv": (6, 3),
}


def count(T: int, method: str, heads: int = 1) -> dict[str, dict[str, triton_interpreter.Work]]:
    """Forward's and backward's kernels over T tokens in bfloat16."""
    m = rla.METHODS[method]
    q, k, v, do = torch.randn(4, 1, T, heads, D).bfloat16()
    gates = torch.full((3, 1, T, heads), -0.05), torch.full((1, T, heads), 0.5), torch.full((1, T, heads), 0.5)
    log_alpha, beta, gamma = gates[0][0].bfloat16(), gates[1].bfloat16(), gates[2].bfloat16() if m.has_residual else None
    inputs = (q, k, v, log_alpha, beta, gamma, None, None)
    with triton_interpreter.counted() as forward:
        _, S, R, saved = backend.forward(*inputs, None, m, True)
    with triton_interpreter.counted() as backward:
        backend.backward(do, S, R if m.has_R else None, *inputs, None, saved, m)
    return {"forward": dict(forward), "backward": dict(backward)}


def affine(method: str) -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """(per head, per chunk and head) of bytes and operations of each kernel; AssertionError if work is not affine in chunks."""
    segment = backend.segment(D, D, 2, 1 + rla.METHODS[method].has_R)
    lengths = (segment, 2 * segment, 3 * segment)
    one, two, three = (count(T, method) for T in lengths)
    per = segment // CHUNK
    lines: dict = {}
    for which in one:
        lines[which] = {}
        for name in one[which]:
            lines[which][name] = {}
            for key in ("read", "written", "moved", "flops"):
                a, b, c = (getattr(x[which][name], key) for x in (one, two, three))
                assert c - b == b - a, f"{name}, {key}: {a}, {b}, {c} is not affine"
                slope = (b - a) / per
                lines[which][name][key] = (a - per * slope, slope)
    return lines


def at(line: tuple[float, float], T: int) -> float:
    return HEADS * (line[0] + line[1] * T / CHUNK)


def seconds(kernels: dict[str, dict[str, tuple[float, float]]], T: int, gpu: str) -> float:
    bandwidth, rate = GPUS[gpu]
    return sum(max(at(k["moved"], T) / bandwidth, at(k["flops"], T) / rate) for k in kernels.values())


def formula(rows: dict[str, tuple[float, float]], T: int) -> float:
    return sum(map(sum, rows.values())) * HEADS * T * D * 2


def report(method: str) -> str:
    lines, out = affine(method), []
    out.append(f"# Bytes and operations of the Triton kernels: {method}, {HEADS} heads, K = V = {D}, bfloat16, B = 1\n")
    out.append(
        "Made by `make gpu-cost`; what is counted and what is a formula stands in `tools/gpu_cost.py`. Per token and head:\n"
    )
    out.append("| pass | kernel | bytes read | written | moved | flop |\n|---|---|---|---|---|---|")
    for which, kernels in lines.items():
        for name, k in kernels.items():
            values = " | ".join(f"{k[key][1] / CHUNK:,.0f}" for key in ("read", "written", "moved", "flops"))
            out.append(f"| {which} | `{name}` | {values} |")
    out.append("\nBytes moved, GB, beside the formulas (a model of others' kernels, not a measurement of them):\n")
    out.append("| T | pass | ours | two-pass | ours / two-pass | gdn (fla) | ours / gdn |\n|---|---|---|---|---|---|---|")
    worst = 0.0
    for T in LENGTHS:
        totals = [0.0, 0.0, 0.0]
        for which, fla, extra in (("forward", FLA_FORWARD, BETWEEN_FORWARD), ("backward", FLA_BACKWARD, BETWEEN_BACKWARD)):
            ours = sum(at(k["moved"], T) for k in lines[which].values())
            gdn = formula(fla, T)
            norm = {name: row for name, row in fla.items() if "norm" in name}
            two = 2 * gdn - formula(norm, T) + formula(extra, T)
            totals = [a + b for a, b in zip(totals, (ours, two, gdn), strict=True)]
            out.append(_row(T, which, ours, two, gdn))
            worst = max(worst, ours / two)
        out.append(_row(T, "both", *totals))
        worst = max(worst, totals[0] / totals[1])
    out.append(f"\nThe largest ratio to two passes is {worst:.2f}; the bound is 0.70.\n")
    out.append(
        "Roofline, ms (a model: bandwidth and tensor-core rate of the data sheets, no latency, every kernel at its bound):\n"
    )
    out.append(
        "| T | " + " | ".join(f"{gpu} {which}" for gpu in GPUS for which in lines) + " |\n|---|" + "---|" * 2 * len(GPUS)
    )
    for T in LENGTHS:
        out.append(f"| {T} | " + " | ".join(f"{1e3 * seconds(lines[w], T, gpu):.3f}" for gpu in GPUS for w in lines) + " |")
    assert worst <= 0.7, f"{worst:.2f} of the two-pass bytes; expected at most 0.70"
    return "\n".join(out) + "\n"


def _row(T: int, which: str, ours: float, two: float, gdn: float) -> str:
    return f"| {T} | {which} | {ours / 1e9:.3f} | {two / 1e9:.3f} | {ours / two:.2f} | {gdn / 1e9:.3f} | {ours / gdn:.2f} |"


def main() -> None:
    """Count and print; write the report if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="rdn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    triton_interpreter.mend()
    text = report(args.method)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
