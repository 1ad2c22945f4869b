"""Opening the model to evaluate, and what the results say of it: hash, sizes, versions, machine.

A model of this package gets our harness model (lm.py), any other Hugging Face causal model the harness's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..bench.measure import environment, version

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
PACKAGES = ("transformers", "lm_eval", "datasets", "tokenizers")


@dataclass
class Opened:
    lm: Any  # the harness's LM
    is_ours: bool
    summary: dict[str, Any]


def open_model(
    name: str,
    *,
    batch_size: int = 8,
    device: str | None = None,
    dtype: str = "auto",
    max_length: int | None = None,
    reuse: bool = True,
    trust_remote_code: bool = False,
) -> Opened:
    """The model of a folder or of a name on the hub; ValueError says what is wrong with it."""
    from transformers import AutoConfig

    from ..models import RLAConfig
    from ..models.pretrained import check_name

    check_name(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"can't open {name!r}: {error}") from error
    _check_tokenizer(name, trust_remote_code)
    is_ours = isinstance(config, RLAConfig)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: torch finds no CUDA device here; got {device!r}")
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "max_length": max_length,
        "trust_remote_code": trust_remote_code and not is_ours,
    }
    try:
        if is_ours:
            from .lm import RLAHarnessLM

            lm: Any = RLAHarnessLM(name, reuse=reuse, **options)
        else:
            from lm_eval.models.huggingface import HFLM

            lm = HFLM(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"can't open {name!r}: {error}") from error
    return Opened(lm, is_ours, _summary(name, lm))


def _check_tokenizer(name: str, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        works = len(tokenizer("a tokenizer")["input_ids"]) > 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{name!r} has no tokenizer that can be opened ({str(error).splitlines()[0]}); save the one it was trained with "
            "beside the weights: tokenizer.save_pretrained(folder)"
        ) from error
    if not works:
        raise ValueError(
            f"{name!r} has no tokenizer: what Transformers made up for it knows no token; save the one it was trained with "
            "beside the weights: tokenizer.save_pretrained(folder)"
        )


def _summary(name: str, lm: Any) -> dict[str, Any]:
    config, model = lm.config, lm.model
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size")
    mixers = list(dict.fromkeys(config.mixers)) if hasattr(config, "mixers") else []
    return {
        "name": Path(name).resolve().name if Path(name).exists() else name,
        "sha256": weights_hash(folder_of(name)),
        "model_type": config.model_type,
        "mixers": mixers,
        **{field: getattr(config, field, None) for field in fields},
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def folder_of(name: str) -> Path:
    """Where the files of a model lie: its folder, or the hub's cache."""
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    return Path(str(cached_file(name, "config.json", local_files_only=True))).parent


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of the weight files."""
    total = hashlib.sha256()
    paths = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    for path in paths:
        total.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                total.update(block)
    return total.hexdigest() if paths else ""


def surroundings(device: str) -> dict[str, Any]:
    """Machine, versions and date."""
    record = environment("cuda" if device.startswith("cuda") else "cpu", torch.get_num_threads())
    record.pop("onnxruntime")
    return {**record, **{package: version(package) for package in PACKAGES}}
