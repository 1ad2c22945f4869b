"""Results of measurements and evaluations, kept beside the runs and found again by what they were made from.

    store.files("kernels", options, make)    the folder kernels-HASH, which make(folder) has filled

HASH is that of the options and of this package's version. A folder appears when it is complete, so that one that was
interrupted is made again from its beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__

FACTS = ("machine", "instruction_sets", "cores", "threads", "system", "python", "rla", "torch", "transformers")


@dataclass(frozen=True)
class Store:
    folder: Path

    def place(self, name: str, inputs: Mapping[str, Any]) -> Path:
        content = json.dumps({"rla": __version__, **inputs}, sort_keys=True, default=str)
        return self.folder / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"

    def files(self, name: str, inputs: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
        """The folder for these inputs, made now if there is none yet."""
        place = self.place(name, inputs)
        if not place.exists():
            partial = place.with_name(f".{place.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            make(partial)
            os.replace(partial, place)
        return place


def facts(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Versions and machine of what was measured, each value once; the days from the first record to the last."""
    found: dict[str, dict[str, None]] = {}
    days = set()
    for record in records:
        for key in FACTS:
            if record.get(key) not in (None, ""):
                found.setdefault(key.replace("_", " "), {})[str(record[key])] = None
        if record.get("date"):
            days.add(str(record["date"])[:10])
    shown = {key: "; ".join(sorted(values)) for key, values in found.items()}
    if days:
        shown["measured"] = min(days) if len(days) == 1 else f"{min(days)} to {max(days)}"
    return shown
