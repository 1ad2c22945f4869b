"""Kernels, training and decoding over length: `rla bench` with a scale's options, its CSV files kept, and verdicts on them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..bench import decode, kernels
from ..bench.measure import Quantiles
from ..bench.ratios import Cell, Results
from ..bench.style import canvas, colours, dashes, log_ticks, styled
from ..bench.workload import Contender
from ..ops import backends
from ..report import benchmarks
from ..report.page import Figure, Section, Table, Verdict
from ..train import throughput
from .claims import UNTESTABLE
from .scales import Timing
from .store import Store

LINEAR = 1.25  # time per token at the longest length over that at the shortest: linear up to here
LONG = 8192  # tokens; what does not fall before may fall later
STEADY = 0.8  # tokens per second at the longest length over those at the shortest: steady from here
CSV = {"kernels": "kernels.csv", "decode": "decode.csv", "train": "train.csv"}


class MeasureError(RuntimeError):
    """A benchmark that failed; the message has what it said."""


@contextmanager
def interruptible() -> Iterator[None]:
    """The benchmarks end at Ctrl-C with what they have; here a part is no result, and the interrupt is raised after all."""
    came = False

    def handle(number: int, frame: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def options(timing: Timing) -> dict[str, dict[str, Any]]:
    """Of each benchmark."""
    common = {"heads": timing.heads, "dim": timing.dim, "dtype": timing.dtype, "device": timing.device}
    fast = next((name for name in ("triton", "native") if _serves(name, timing)), "chunked")
    shown = tuple(dict.fromkeys((fast, "chunked")))
    found: dict[str, dict[str, Any]] = {
        "kernels": {
            **common,
            "backends": shown,
            "lengths": timing.lengths,
            "passes": ("forward",) if timing.seconds < 0.5 else ("forward", "both"),
            "peers": ("sdpa",),
            "seconds": timing.seconds,
            "memory": False,
            "keep_memory": True,
        },
        "decode": {
            **common,
            "backends": (fast,),
            "positions": timing.positions,
            "cycle": timing.cycle,
            "seconds": timing.seconds / 2,
        },
    }
    if timing.train_lengths:
        found["train"] = {
            "mixers": ("softmax", "gdn", "rla", "rdn"),
            "chunked": (),
            "lengths": timing.train_lengths,
            "preset": timing.train_preset,
            "vocab_size": timing.train_vocabulary,
            "tokens": timing.train_tokens,
            "seconds": timing.seconds * 3,
        }
    return found


def _serves(name: str, timing: Timing) -> bool:
    row = backends().get(name)
    return row is not None and row.usable and (name == "triton") == (timing.device == "cuda")


def command(name: str, given: Mapping[str, Any]) -> str:
    """The command line that measures the same."""
    words = [f"rla bench {name}"]
    for key, value in given.items():
        option = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{key.replace('_', '-')}")
        elif isinstance(value, tuple):
            words += [option, *map(str, value)]
        else:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return " ".join(words)


def measure(timing: Timing, store: Store, say: Callable[[str], Any]) -> dict[str, Path]:
    """The CSV file of each benchmark, measured now if there is none yet; `say` makes a context that tells what goes on."""
    mains: dict[str, Callable[..., int]] = {"kernels": kernels.main, "decode": decode.main, "train": throughput.main}
    found = {}
    for name, given in options(timing).items():

        def make(folder: Path, name: str = name, given: dict[str, Any] = given) -> None:
            said = io.StringIO()
            with say(command(name, given)), interruptible(), contextlib.redirect_stdout(said):
                code = mains[name](**given, out=folder)
            if code:
                raise MeasureError(f"`{command(name, given)}` failed with exit code {code}. {said.getvalue().strip()}")

        found[name] = store.files(name, given, make) / CSV[name]
    return found


def records(paths: Mapping[str, Path]) -> list[dict[str, str]]:
    """One row of each file, for its machine and versions."""
    return [_rows(path)[0] for path in paths.values()]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sections(paths: Mapping[str, Path], timing: Timing) -> list[Section]:
    given = options(timing)
    made = benchmarks.section(paths["kernels"], "kernels")
    verdicts = kernel_verdicts(benchmarks.read_kernels(_rows(paths["kernels"])))
    rule = (
        f"Rules: time is linear when a token takes at most {LINEAR} times as long at the longest length as at the shortest, "
        "and not linear when that holds for no two times of their 20 to 80 % ranges; one method is faster than another when "
        "their 20 to 80 % ranges don't meet."
    )
    note = "The paper timed Triton kernels and FlashAttention on a GPU." + (
        " Here it is the CPU, and torch's scaled_dot_product_attention." if timing.device == "cpu" else ""
    )
    found = [
        dataclasses.replace(
            made,
            body=(*made.body, rule),
            verdicts=tuple(verdicts),
            notes=(note, *made.notes),
            commands=(command("kernels", given["kernels"]),),
        )
    ]
    if "train" in paths:
        found.append(_training(_rows(paths["train"]), command("train", given["train"])))
    found.append(
        dataclasses.replace(benchmarks.section(paths["decode"], "decode"), commands=(command("decode", given["decode"]),))
    )
    return found


def kernel_verdicts(results: Results) -> list[Verdict]:
    """Forward alone, by the first backend that was timed."""
    cells = [cell for cell in results.times if cell.which == "forward"]
    lengths = sorted({cell.T for cell in cells})
    if not cells or len(lengths) < 2:
        return []
    by = next(cell.contender.by for cell in cells)
    low, high = lengths[0], lengths[-1]
    found = []

    def time(method: str, T: int, who: str = by) -> Quantiles | None:
        return results.times.get(Cell(Contender(method, who), T, "forward"))

    for method in ("rla", "rdn"):
        a, b, softmax = time(method, low), time(method, high), time("softmax", high, "sdpa")
        if a is None or b is None:
            continue
        ratio, least = b.q50 / high / (a.q50 / low), b.q20 / high / (a.q80 / low)
        found.append(
            Verdict(
                f"{method.upper()}'s run time grows linearly with the length.",
                "agrees" if ratio <= LINEAR else "disagrees" if least > LINEAR else UNTESTABLE,
                f"a token takes {ratio:.2f} times as long at T = {high:,} as at T = {low:,} ({by}).",
                "Figure 2",
            )
        )
        if softmax is not None:
            apart = b.q80 < softmax.q20 or softmax.q80 < b.q20
            outcome = UNTESTABLE if not apart else "agrees" if b.q50 < softmax.q50 else "disagrees"
            times = f"{1e3 * b.q50:,.1f} against {1e3 * softmax.q50:,.1f} ms"
            evidence = f"{softmax.q50 / b.q50:.1f} times as fast at T = {high:,}: {times}."
            claim = f"{method.upper()} is faster than softmax attention on long sequences."
            found.append(Verdict(claim, outcome, evidence, "Figure 2"))
    return found


def _training(rows: Sequence[Mapping[str, str]], again: str) -> Section:
    speed = {(row["contender"], int(row["length"])): float(row["tokens_per_second"]) for row in rows}
    mixers, lengths = list(dict.fromkeys(m for m, _ in speed)), sorted({n for _, n in speed})
    shown = tuple(
        (m, *(f"{speed[m, n]:,.0f}" for n in lengths), f"{speed[m, lengths[-1]] / speed[m, lengths[0]]:.2f}") for m in mixers
    )
    headers = ("model", *(f"{n:,} tokens" for n in lengths), "last over first")
    table = Table("Tokens per second of whole training steps, by length of a sequence", headers, shown)
    kept = {m: speed[m, lengths[-1]] / speed[m, lengths[0]] for m in mixers}
    verdicts = []
    if len(lengths) > 1:
        ours = {m: kept[m] for m in mixers if m in ("rla", "rdn")}
        evidence = ", ".join(f"{m} keeps {100 * share:.0f} %" for m, share in kept.items())
        evidence += f" of its throughput from {lengths[0]:,} to {lengths[-1]:,} tokens."
        steady = all(share >= STEADY for share in ours.values())
        claim = "RLA and RDN keep a nearly constant throughput as sequences grow."
        verdicts.append(Verdict(claim, "agrees" if steady else "disagrees", evidence, "Figure 2"))
        if "softmax" in kept:
            falls = kept["softmax"] < min(STEADY, *ours.values())
            verdicts.append(
                Verdict(
                    "The Transformer's throughput falls as sequences grow.",
                    "agrees" if falls else "disagrees" if lengths[-1] >= LONG else UNTESTABLE,
                    f"it keeps {100 * kept['softmax']:.0f} %.",
                    "Figure 2",
                )
            )
    figure = Figure(
        "throughput",
        _throughput(speed, mixers, lengths),
        f"Tokens per second over the length of a sequence for {', '.join(mixers)}. The values are in the table.",
        "Medians. Both axes are logarithmic.",
    )
    first = rows[0]
    sizes = [int(row["parameters"]) for row in rows]
    body = (
        f"Whole training steps, optimizer included, of models with {min(sizes):,} to {max(sizes):,} parameters. "
        f"Rule: throughput is nearly constant when at least {100 * STEADY:.0f} % of it is left at the longest length.",
    )
    note = f"{first['machine']}, {first['threads']} threads, torch {first['torch']}."
    return Section("Training throughput", body, tuple(verdicts), (figure,), (table,), (note,), (again,))


@styled
def _throughput(speed: Mapping[tuple[str, int], float], mixers: Sequence[str], lengths: Sequence[int]) -> Any:
    figure, axes = canvas()
    axis, tones = axes[0, 0], colours(mixers)
    for mixer in mixers:
        values = [speed[mixer, n] for n in lengths]
        axis.plot(lengths, values, color=tones[mixer], linestyle=dashes(mixer), marker="o", label=mixer)
    axis.set(xscale="log", xlabel="length of a sequence (tokens)", ylabel="tokens/s")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axis.set_xticks([], minor=True)
    log_ticks(axis.yaxis, list(speed.values()))
    axis.legend()
    return figure
