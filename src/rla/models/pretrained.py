"""RLAPreTrainedModel: initialisation, loading and saving, the same for every model of the family."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import safetensors
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import cached_file

from ..nn import Gates, ResidualAttention, RMSNorm, ShortConvolution, no_weight_decay
from ..nn.gates import initial_A_log, initial_dt_bias
from .configuration_rla import AUTO_MAP, RLAConfig
from .export import write_extras


def check_name(name: str) -> None:
    """ValueError if this is clearly neither a model's folder nor a name on the hub, where Transformers is less clear."""
    folder, expected = Path(name), "expected a folder written by save_pretrained, or a name on the hub"
    if not folder.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ValueError(f"there is no folder {name!r}; {expected}")
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"{name!r} is not a model: it {'has no config.json' if folder.is_dir() else 'is a file'}; {expected}")


class RLAPreTrainedModel(PreTrainedModel):
    """What `RLAModel` and `RLAForCausalLM` share: initial weights, loading, saving."""

    config: RLAConfig
    config_class = RLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RLABlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True

    def checkpoint_activations(self) -> None:
        """Compute each block's forward again in backward instead of keeping what it needs."""
        # Transformers 5.23 warns of the second name, older ones don't know the first
        getattr(self, "activation_checkpointing_enable", self.gradient_checkpointing_enable)()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module. s is `config.initializer_range`, 0.006 in the paper.

        | tensor | distribution |
        |---|---|
        | embeddings, every projection (gates too) | normal(0, s) |
        | biases (GLA's gate) | 0 |
        | convolution | uniform(-W^-1/2, W^-1/2), as torch's Conv1d |
        | A_log | log of uniform(1, 16), as Mamba-2 |
        | dt_bias | inverse softplus of log-uniform(0.001, 0.1), as Mamba-2 |
        | D, norm weights | 1 |
        """
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ShortConvolution):
            init.uniform_(module.weight, -(module.width**-0.5), module.width**-0.5)
        elif isinstance(module, Gates):
            if hasattr(module, "A_log"):
                init.copy_(module.A_log, initial_A_log(module.num_heads))
            if hasattr(module, "dt_bias"):
                init.copy_(module.dt_bias, initial_dt_bias(module.num_heads))
        elif isinstance(module, ResidualAttention) and module.D is not None:
            init.ones_(module.D)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own, with clearer errors.

        A config field given by name replaces the checkpoint's: `from_pretrained(folder, mixer="rdn")` opens a gdn checkpoint as
        rdn (or sgla as rla). What the checkpoint lacks, gamma's projection, is initialised, and a warning names it.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model: Any
        info: Any
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        except safetensors.SafetensorError as error:
            raise OSError(
                f"{_broken_file(pretrained_model_name_or_path)}: not a whole safetensors file, perhaps cut off while it was "
                f"copied or downloaded ({error}); fetch it again, or save the model again"
            ) from error
        new = sorted(key for key in info["missing_keys"] if ".gates." in key)
        if new:
            warnings.warn(f"rla: the checkpoint has no {', '.join(new)}: initialised, and to be trained", stacklevel=2)
        for parameter in model.parameters():  # loading makes new parameters, without their marks
            if parameter.ndim < 2:
                no_weight_decay(parameter)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Transformers' own; a model card (unless there is a README.md) and the `auto_map` shim are written too."""
        self.config.auto_map = dict(AUTO_MAP)
        if kwargs.get("is_main_process", True):
            write_extras(save_directory, self.config, sum(p.numel() for p in self.parameters()))
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: exported folders carry a shim that imports this class (export.py), not copies of its source."""


def _broken_file(name: Any) -> str:
    """The first weight file that safetensors can't read, for an error message."""
    folder = Path(name)
    if not folder.is_dir():
        found = cached_file(name, "model.safetensors", local_files_only=True, _raise_exceptions_for_missing_entries=False)
        return str(found or name)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safetensors.safe_open(path, "pt"):
                pass
        except safetensors.SafetensorError:
            return str(path)
    return str(folder)
