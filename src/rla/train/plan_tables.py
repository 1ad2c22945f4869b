"""The tables of `rla plan`, for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .plan import ROOM, Layout, Plan
from .recipe import Recipe

_WORDS = {
    "weights": "weights, float32",
    "optimizer": "AdamW's moments, float32",
    "gradients": "gradients, float32",
    "gathered": "weights gathered for a pass",
    "activations": "activations",
    "op states": "states kept by the op",
    "loss": "loss: logits of a chunk, gradients of the head",
    "backward": "backward: gradients of activations, recomputed block",
    "op workspace": "buffers of the op's kernels",
    "reduction": "buffers of reductions",
}


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def show(plan: Plan, recipe: Recipe) -> None:
    console = Console()
    console.print(
        f"[bold]{recipe.name}[/] on {plan.gpus} x {plan.gpu.name}, {plan.precision}, "
        f"activation checkpointing {'on' if plan.checkpointing else 'off'}: "
        f"{plan.passes} {'passes' if plan.passes > 1 else 'pass'} of {plan.tokens_per_pass:,} tokens a step on each GPU"
        + (f"; op by {plan.backend}" if plan.backend else ""),
        highlight=False,
    )
    console.print(_parameters(plan), _memory(plan), _operations(plan), _run(plan, recipe), _states(plan))


def _parameters(plan: Plan) -> Table:
    table, p = _table("Parameters", "part", "millions"), plan.parameters
    for name in ("embedding", "mixers", "mlps", "head", "rest"):
        table.add_row(name, f"{getattr(p, name) / 1e6:,.2f}")
    table.add_row("total", f"{p.total / 1e6:,.2f}", style="bold")
    return table


def _memory(plan: Plan) -> Table:
    rows = [*plan.layouts, plan.other]
    named = [*(layout.name for layout in plan.layouts), f"{plan.layouts[0].name}, {plan.other.name} checkpointing"]
    table = _table(f"Memory of a GPU at the peak of a step, GB (of {plan.gpu.memory / 1e9:.0f})", "", *named)
    table.add_row("shards x replicas", *(f"{layout.shards} x {layout.replicas}" for layout in rows))
    for kind, words in _WORDS.items():
        if any(layout.memory[kind] >= 5e6 for layout in rows):
            table.add_row(words, *(_gb(layout.memory[kind]) for layout in rows))
    table.add_row("total", *(_gb(layout.total) for layout in rows), style="bold")
    table.add_row(f"fits in {ROOM:.0%}", *(_fits(layout) for layout in rows))
    return table


def _fits(layout: Layout) -> str:
    return "[green]yes[/]" if layout.fits else "[red]no[/]"


def _operations(plan: Plan) -> Table:
    table = _table("Operations per token, GFLOP", "part", *plan.flops, "share of forward and backward")
    model = sum(sum(plan.flops[name].values()) for name in ("forward", "backward"))
    for part, forward in plan.flops["forward"].items():
        values = [plan.flops[name].get(part, 0.0) for name in plan.flops]
        table.add_row(part, *(f"{x / 1e9:.3f}" for x in values), f"{(forward + plan.flops['backward'][part]) / model:.1%}")
    table.add_row("total", *(f"{sum(values.values()) / 1e9:.3f}" for values in plan.flops.values()), "100.0%", style="bold")
    return table


def _run(plan: Plan, recipe: Recipe) -> Table:
    table = _table(f"The run, if {plan.mfu:.0%} of the peak rate is reached (an assumption)", "", "")
    table.add_row("tokens per second, all GPUs", f"{plan.tokens_per_second:,.0f}")
    table.add_row("steps, seconds of each", f"{recipe.schedule.steps:,}, {plan.step_seconds:.2f}")
    table.add_row(f"days for {recipe.schedule.total_tokens:,} tokens", f"{plan.days:,.2f}", style="bold")
    table.add_row("GPU hours", f"{plan.days * 24 * plan.gpus:,.0f}")
    for name, size in plan.traffic.items():
        if size:
            table.add_row(f"received by a GPU in a step, {name}, GB", _gb(size))
    if plan.gpus > 1:
        table.add_row("bandwidth of a GPU to keep up with that, GB/s", _gb(plan.bandwidth))
    return table


def _states(plan: Plan) -> Table:
    lengths = next(iter(plan.states.values()))
    table = _table("Memory of one sequence at inference, MB", "tokens", *(f"{n:,}" for n in lengths))
    for name, sizes in plan.states.items():
        table.add_row(name, *(f"{size / 1e6:,.1f}" for size in sizes.values()))
    return table
