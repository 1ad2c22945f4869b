"""What an exported folder holds beside weights and config: a model card, and a shim.

The shim lets `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` open the folder where nobody has imported
`rla.models`; the package must be installed all the same.
"""

from __future__ import annotations

import os
from pathlib import Path

from .configuration_rla import RLAConfig

SHIM = "from rla.models import RLAConfig, RLAForCausalLM, RLAModel  # needs: pip install residual-linear-attention[hf]\n"

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [rla, linear-attention, {tag}]
---

# {title}

A language model of the `rla` family with {parameters} parameters: {layers} layers of {mixers}, hidden size {hidden},
vocabulary {vocab}. A linear layer keeps a state of fixed size for each sequence, so that its memory does not grow with
length.

```python
import rla.models  # pip install "residual-linear-attention[hf]"
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{title}")
```

Without the first line pass `trust_remote_code=True`. On the command line: `rla generate {title} --prompt "..."`.

What it was trained on, how it was evaluated, what it should not be used for: not filled in yet.
"""


def write_extras(folder: str | os.PathLike, config: RLAConfig, parameters: int) -> None:
    """Write the shim, and the card unless there is one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "modeling_shim.py").write_text(SHIM)
    card = folder / "README.md"
    if card.exists():
        return
    mixers = list(dict.fromkeys(config.mixers))
    number = f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
    card.write_text(
        CARD.format(
            title=folder.name,
            tag=mixers[0],
            parameters=number,
            layers=config.num_hidden_layers,
            mixers=" and ".join(mixers),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )
    )
