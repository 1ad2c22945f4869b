"""`rla train RECIPE [--section.field value ...]`."""

from __future__ import annotations

import sys

import tyro

from .guard import Halt
from .recipe import Recipe, RecipeError, load_recipe

HELP = """usage: rla train RECIPE [--section.field value ...]

Train a model as a TOML recipe says; the same command goes on with a run that was stopped.

  rla train recipes/tiny.toml
  rla train recipes/tiny.toml --model.mixer gdn --out runs/gdn
  torchrun --nproc-per-node 8 -m rla train recipes/paper-1.5b.toml

`rla train RECIPE --help` lists every field with the recipe's value.
"""


def parse(argv: list[str]) -> Recipe:
    """The recipe of the file with the options' changes."""
    recipe = load_recipe(argv[0])
    return tyro.cli(Recipe, default=recipe, args=argv[1:], prog=f"rla train {argv[0]}", description=HELP)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if argv else 2
    try:
        recipe = parse(argv)
        from .loop import train

        train(recipe)
    except RecipeError as error:
        print(f"rla train: {error}", file=sys.stderr)
        return 2
    except Halt:
        return 3
    except KeyboardInterrupt:
        print("rla train: stopped at once; the last checkpoint is whole", file=sys.stderr)
        return 130
    return 0
