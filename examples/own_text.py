"""Train from text of your own, in Python: prepare it, write a recipe, train, continue a prompt.

    python examples/own_text.py BOOK.txt [MORE.txt ...]        without a file: the built-in books

The same as `rla prepare`, `rla train` and `rla generate`; run it again and it goes on where it was stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rla.data.prepare import prepare
from rla.train.loop import train
from rla.train.recipe import recipe_from_dict


def main(files: list[str], folder: Path = Path("runs/own-text"), tokens: int = 500_000) -> Path:
    """The folder of the trained model, a Hugging Face folder."""
    data = "builtin"
    if files:
        data = str(folder / "data")
        if not Path(data).exists():
            counts = prepare(files, data, tokenizer="bytes", validation=0.1 if len(files) > 1 else 0.0)
            print(f"{counts.documents:,} documents, {counts.tokens:,} tokens")
    recipe = recipe_from_dict(
        {
            "name": "own-text",
            "out": str(folder / "run"),
            "model": {"preset": "tiny", "mixer": "rdn", "num_hidden_layers": 2, "initializer_range": 0.02},
            "data": {"path": data, "length": 256},
            "schedule": {"batch_tokens": 4096, "total_tokens": tokens, "warmup_tokens": tokens // 20},
            "optimizer": {"lr": 5e-3, "min_lr": 5e-4},
        }
    )
    print({key: value for key, value in train(recipe).items() if key in ("loss", "bits_per_byte")})
    return recipe.folder / "model"


if __name__ == "__main__":
    model = main(sys.argv[1:])
    from rla.models.generate import main as generate

    generate(str(model), prompt="It was a ", max_new_tokens=200, seed=0)
