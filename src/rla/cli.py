"""The `rla` command. Each subcommand is a typed function, imported when it is called; tyro makes its options and help.

`rla doctor` and `rla --help` need nothing beyond the core install; the others name the extra they belong to.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import sys
from dataclasses import dataclass

from . import __version__


@dataclass(frozen=True)
class Command:
    target: str  # "module:function"
    help: str
    extra: str | None  # what to install for it; None: nothing
    parses: bool = False  # whether the function takes the command line itself, instead of options made by tyro


COMMANDS = {
    "doctor": Command("rla.doctor:main", "what is installed, which backends are usable here, and what to set", None),
    "tokenizer train": Command("rla.data.tokenizer:main_train", "make a byte-level BPE tokenizer from text", "train"),
    "prepare": Command("rla.data.prepare:main", "turn text, JSONL, Parquet or a dataset into token shards", "train"),
    "plan": Command("rla.train.plan:main", "what a recipe needs: parameters, memory, operations, days", "train", parses=True),
    "train": Command("rla.train.command:main", "train a model as a recipe says, or go on with it", "train", parses=True),
    "export": Command("rla.train.export:main", "a checkpoint of a run as a Hugging Face folder", "train"),
    "eval mqar": Command("rla.eval.mqar:main", "train methods to recall pairs, and compare them", "train"),
    "eval": Command("rla.eval.run:main", "the paper's evaluations, through lm-evaluation-harness", "eval"),
    "reproduce": Command("rla.reproduce.command:main", "the paper's tables and figures at the scale you have", "eval"),
    "report": Command("rla.report.command:main", "a page of tables and figures from runs, evaluations and benchmarks", "train"),
    "generate": Command("rla.models.generate:main", "stream text from a saved model", "hf"),
    "bench kernels": Command("rla.bench.kernels:main", "time attend's backends beside their peers, over lengths", "bench"),
    "bench train": Command("rla.train.throughput:main", "time training steps, by part, beside the baselines", "train"),
    "bench decode": Command("rla.bench.decode:main", "time the one-token step beside one pass over its states", "bench"),
    "bench threads": Command("rla.bench.threads:main", "time attend with one thread and with several, in turn", "bench"),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        f"usage: rla COMMAND [options]\n\nResidual linear attention, version {__version__}.\n\ncommands:\n{rows}\n\n"
        "`rla COMMAND --help` shows a command's options.\n\nexample:\n  rla doctor\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code is 2 for a command line that can't be understood."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(), end="")
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    name = next((" ".join(argv[:n]) for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), None)
    if name is None:
        return _unknown(argv)
    command, rest = COMMANDS[name], argv[len(name.split()) :]
    if command.extra is not None and importlib.util.find_spec("tyro") is None:
        print(f'rla {name}: needs more packages: pip install "residual-linear-attention[{command.extra}]"', file=sys.stderr)
        return 2
    module, function = command.target.split(":")
    run = getattr(importlib.import_module(module), function)
    if command.extra is None:
        argparse.ArgumentParser(f"rla {name}", description=run.__doc__).parse_args(rest)
        return run()
    if command.parses:
        return run(rest)
    import tyro

    return tyro.cli(run, prog=f"rla {name}", args=rest) or 0


def _unknown(argv: list[str]) -> int:
    group = [name for name in COMMANDS if name.split()[0] == argv[0]]
    if group and (len(argv) == 1 or argv[1] in ("-h", "--help")):
        print("\n".join(f"rla {name}: {COMMANDS[name].help}" for name in group))
        return 0
    asked = " ".join(argv[:2] if group else argv[:1])
    near = difflib.get_close_matches(asked, COMMANDS, n=1)
    hint = f" Did you mean `rla {near[0]}`?" if near else ""
    print(f"rla: unknown command {asked!r}.{hint} `rla --help` lists the commands.", file=sys.stderr)
    return 2
