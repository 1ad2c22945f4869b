"""Runs, results and a page made up for the tests of `rla report`; nothing here was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rla.bench.style import canvas, colours, dashes, styled
from rla.report.page import Figure, Page, Section, Table, Verdict
from rla.train.recipe import recipe_from_dict

STEPS = 10


def make_run(
    folder: Path,
    mixer: str,
    seed: int = 0,
    *,
    loss: float = 2.0,
    lr: float = 1e-3,
    steps: int = STEPS,
    accuracy: dict[str, float] | None = None,
    events: tuple[str, ...] = (),
    **data: Any,
) -> Path:
    """The folder of a run that ended with this validation loss (or accuracies); `steps` below STEPS: it is not finished."""
    tree = {
        "name": folder.name,
        "seed": seed,
        "model": {"mixer": [mixer]},
        "data": {"path": "mqar" if accuracy is not None else "builtin", "length": 64, **data},
        "schedule": {"batch_tokens": 1024, "total_tokens": 1024 * STEPS, "warmup_tokens": 0},
        "optimizer": {"lr": lr, "min_lr": lr / 10},
    }
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe_from_dict(tree).to_dict()))
    rows: list[dict[str, Any]] = [{"kind": "start", "step": 0, "parameters": 123_456}]
    for step in range(1, steps + 1):
        now = loss + 3.0 * (STEPS - step) / STEPS
        rows.append(
            {"kind": "train", "step": step, "tokens": 1024 * step, "loss": now + 0.1, "tokens_per_second": 500.0 + step}
        )
        if step % 2 == 0:
            found = {"loss": now, "bits_per_byte": 2 * now}
            if accuracy is not None:
                each = {f"accuracy/{task}": share * step / STEPS for task, share in accuracy.items()}
                found = {"loss": now, "accuracy": sum(each.values()) / len(each), **each}
            rows.append({"kind": "evaluation", "step": step, **found})
            layers = [{"output_norm": 1.0 + i + seed, **({"clip_rate": 0.1 * i} if mixer == "rla" else {})} for i in range(2)]
            rows.append({"kind": "probe", "step": step, "layers": layers})
    rows += [{"kind": "event", "step": steps, "message": message} for message in events]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_result(
    name: str, tasks: dict[str, dict[str, float]], *, limit: int | None = None, mixers: Any = ("rdn",)
) -> dict[str, Any]:
    """A result of `rla eval` with these metrics."""
    records: dict[str, Any] = {}
    for task, metrics in tasks.items():
        shown = {metric: {"value": value, "stderr": 0.01, "higher_is_better": True} for metric, value in metrics.items()}
        records[task] = {"version": 1.0, "num_fewshot": 0, "n": 50, "metrics": shown, "files": [], "seconds": 1.0}
        if task == "needle":
            cells = [(a, b) for a in (512, 1024) for b in (0.0, 1.0)]
            records[task]["grid"] = [{"length": a, "depth": b, "acc": b if a > 512 else 1.0, "n": 1} for a, b in cells]
    return {
        "kind": "rla eval",
        "format": 1,
        "model": {
            "name": name,
            "sha256": "0123456789abcdef" * 4,
            "model_type": "rla",
            "mixers": list(mixers),
            "parameters": 1_000_000,
            "dtype": "float32",
        },
        "run": {"limit": limit, "data": "files", "max_length": None, "seed": 0, "needle": {}},
        "command": f"rla eval {name} --suite paper",
        "environment": {"machine": "a machine", "rla": "0.1.0", "torch": "2.13.0", "lm_eval": "0.4.13"},
        "tasks": records,
        "missing": {"piqa": "no file"},
    }


@styled
def sample_picture() -> Any:
    figure, axes = canvas()
    for i, (name, tone) in enumerate(colours(["sgla", "rla", "gdn", "rdn", "softmax"]).items()):
        axes[0, 0].plot([0, 1, 2], [i, i + 1, i + 0.5], color=tone, linestyle=dashes(name), label=name)
    axes[0, 0].set(xlabel="tokens", ylabel="loss")
    axes[0, 0].legend()
    return figure


def sample_png() -> bytes:
    file = io.BytesIO()
    sample_picture().savefig(file, dpi=40)
    return file.getvalue()


def sample_page() -> Page:
    """A page with something of everything."""
    verdicts = (
        Verdict(
            "RDN has a lower perplexity than GDN.", "agrees", "-0.021 nats (-0.031 to -0.011, n = 3).", "16.57 against 17.27"
        ),
        Verdict("RLA finds more needles than sGLA.", "disagrees", "41 % against 47 %, n = 3.", "83.6 against 76.6"),
        Verdict(
            "RDN beats the Transformer on ARC-E.", "not testable at this scale", "both are at chance.", "58.7 against 55.7"
        ),
    )
    wide = Table(
        "Language modelling, with a caption that is long enough to need more than one line on a telephone",
        ("model", *(f"column {i} acc_n" for i in range(12))),
        tuple(
            (name, *(f"{10 * i + 0.5:.1f} ±1.2*" for i in range(12)))
            for name in ("sgla", "rla", "a rather long name of a model")
        ),
        (("RDN", *["58.7"] * 12),),
        "The paper, 1.5B parameters, 100B tokens: printed there, not measured here",
    )
    small = Table(
        "Words & numbers", ("what", "how much", "why"), (("a < b", "3.5 (3.1 to 3.9)", "`code` | pipe"), ("c", "", ""))
    )
    return Page(
        "Residual linear attention: a <sample> of the report",
        "What the page looks like, with `made-up` numbers and a [link](#claims).",
        (
            Section(
                "Language modelling",
                ("First paragraph.", "Second, with `rla train` in it & a < sign."),
                verdicts[:1],
                (
                    Figure("sample", sample_picture(), "Lines of five methods.", "A figure of matplotlib."),
                    Figure("sample-png", sample_png(), "The same lines as pixels.", "A PNG file."),
                    Figure("sample-wide", sample_picture(), 'Lines, with "quotes".', "A wide one.", wide=True),
                ),
                (wide, small),
                ("A note.", "Another one."),
                ("rla reproduce language --scale demo", 'rla report runs/* --title "a & b"'),
            ),
            Section("Recall", (), verdicts[1:]),
            Section("Recall", ("Two sections may have the same title.",)),
        ),
        {"machine": "two cores", "rla": "0.1.0", "torch": "2.13.0"},
    )
