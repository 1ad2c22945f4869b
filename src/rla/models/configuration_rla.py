"""RLAConfig: sizes and mixers of a model, the paper's seven models, and sizes from a few million parameters up.

`mixer` is a name in `rla.METHODS`, or "softmax", or a list of them, one for each layer.

    RLAConfig.paper("rdn")                                 one of the paper's models, 1.5B parameters
    RLAConfig.preset("tiny", "rla", vocab_size=1000)       the family at another size
    RLAConfig.preset("340m", ["rdn", "rdn", "rdn", "softmax"] * 6)
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from transformers import PretrainedConfig

from ..method import METHODS, get_method, is_method
from ..nn.attention import faithful_conv_size, resolve_head_dim
from ..nn.rotary import check_rotary_dim
from ..ops.backends import NAMES

CONFIG_VERSION = 1  # raise it when an older rla would misread a config
SOFTMAX = "softmax"
AUTO_MAP = {
    "AutoConfig": "modeling_shim.RLAConfig",
    "AutoModel": "modeling_shim.RLAModel",
    "AutoModelForCausalLM": "modeling_shim.RLAForCausalLM",
}

# The paper's vocabulary size is not given; 200,064 tied embeddings make its parameter counts come out.
PAPER_VOCAB = 200064
_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SIZES = {
    "tiny": (128, 384, 4, 2, 8192),
    "small": (256, 768, 8, 4, 16384),
    "340m": (1024, 4096, 18, 8, 32000),
    "1.5b": (2048, 8192, 16, 16, PAPER_VOCAB),
}
SIZES = MappingProxyType({name: dict(zip(_FIELDS, sizes, strict=True)) for name, sizes in _SIZES.items()})
PAPER = ("transformer", "retnet", "mamba2", "sgla", "gdn", "rla", "rdn")


class RLAConfig(PretrainedConfig):
    """Configuration of `RLAModel` and `RLAForCausalLM`.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: sizes.
        mixer: a name in `rla.METHODS` or "softmax", or a list with one for each layer.
        num_attention_heads: heads of softmax layers, and of linear ones unless `linear_num_heads` is given.
        num_key_value_heads: of softmax layers. None: as many as heads.
        linear_num_heads: heads of linear layers. None: `num_attention_heads`.
        head_dim: channels of a head. None: `hidden_size / num_attention_heads`.
        conv_size: width of the linear layers' short convolution, 0: none. None: what the mixer's paper has.
        output_gate: whether linear layers gate their output.
        rope_theta: base of the rotary embeddings (softmax, retnet).
        rms_norm_eps: of all norms.
        initializer_range: standard deviation of the initial weights; the paper's is 0.006.
        loss_chunk_size: tokens whose logits exist at a time when a loss is computed; 0: all, and the logits are returned.
        backend: of `rla.attend`, for tests and debugging. None chooses the fastest.
        config_version: version of this format; a config from a newer one is refused.
    """

    model_type = "rla"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 18
    mixer: str | list[str] = "rdn"
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    linear_num_heads: int | None = None
    head_dim: int | None = None
    conv_size: int | None = None
    output_gate: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.006
    loss_chunk_size: int = 0
    backend: str | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    config_version: int = CONFIG_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        if self.config_version > CONFIG_VERSION:
            raise ValueError(
                f"config_version: this config has version {self.config_version}, newer than this rla reads ({CONFIG_VERSION}); "
                "install a newer one: pip install -U residual-linear-attention"
            )
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raise ValueError unless the sizes and mixers fit together. Models call it too: attributes may have changed since."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        mixers = self.mixers
        head_dim = self.resolved_head_dim
        if SOFTMAX in mixers or any(get_method(m).decay == "fixed" for m in mixers if m != SOFTMAX):
            check_rotary_dim(head_dim)
        kv = self.num_key_value_heads
        if SOFTMAX in mixers and kv is not None and (kv < 1 or self.num_attention_heads % kv):
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads = {self.num_attention_heads}; got {kv}"
            )
        if self.linear_num_heads is not None and self.linear_num_heads < 1:
            raise ValueError(f"linear_num_heads: expected at least 1 or None; got {self.linear_num_heads}")
        if self.conv_size is not None and (self.conv_size < 0 or self.conv_size == 1):
            raise ValueError(f"conv_size: expected 0 (none), 2 or more, or None; got {self.conv_size}")
        if self.loss_chunk_size < 0:
            raise ValueError(f"loss_chunk_size: expected 0 (off) or a number of tokens; got {self.loss_chunk_size}")
        if self.backend is not None and self.backend not in NAMES:
            raise ValueError(f"backend: expected one of {', '.join(NAMES)} or None; got {self.backend!r}")

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of each layer."""
        names = (self.mixer,) * self.num_hidden_layers if isinstance(self.mixer, str) else tuple(self.mixer)
        if len(names) != self.num_hidden_layers:
            raise ValueError(
                f"mixer: expected one name, or a list of num_hidden_layers = {self.num_hidden_layers} names; "
                f"got a list of {len(names)}"
            )
        known = (*METHODS, SOFTMAX)
        for name in dict.fromkeys(names):
            if name not in known and not is_method(name):
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"mixer: unknown name {name!r}.{hint} Known: {', '.join(known)}")
        return names

    @property
    def resolved_head_dim(self) -> int:
        """Channels of a head: `head_dim`, or `hidden_size / num_attention_heads`."""
        return resolve_head_dim(self.hidden_size, self.num_attention_heads, self.head_dim)

    def conv_size_of(self, mixer: str) -> int:
        """Width of the short convolution of a linear mixer's layers."""
        return faithful_conv_size(mixer) if self.conv_size is None else self.conv_size

    def state_signature(self) -> tuple:
        """What two models must share for a cache of one to serve the other."""
        linear = self.linear_num_heads or self.num_attention_heads
        softmax = self.num_key_value_heads or self.num_attention_heads
        return self.mixers, linear, softmax, self.resolved_head_dim, self.conv_size

    @classmethod
    def preset(cls, size: str, mixer: str | Sequence[str] = "rdn", **changes: Any) -> RLAConfig:
        """A config of one of the sizes tiny, small, 340m and 1.5b, with other fields changed by name."""
        if size not in SIZES:
            raise ValueError(f"size: expected one of {', '.join(SIZES)}; got {size!r}")
        mixer = mixer if isinstance(mixer, str) else list(mixer)
        return cls._named({**SIZES[size], "mixer": mixer}, changes)

    @classmethod
    def paper(cls, name: str, **changes: Any) -> RLAConfig:
        """One of the paper's models (`PAPER`), an ablation (any name in `rla.METHODS`), with other fields changed by name.

        Tables 6 and 7: hidden 2048, intermediate 8192, 16 layers, head_dim 128; Transformer 32 heads with 4 key-value groups,
        linear models 16 heads; initial standard deviation 0.006.
        """
        if name == "transformer":
            heads: dict[str, Any] = {
                "mixer": SOFTMAX,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "linear_num_heads": 16,
            }
        elif is_method(name):
            heads = {"mixer": name}
        else:
            known = (*PAPER, *(m for m in METHODS if m not in PAPER))
            raise ValueError(f"name: expected one of {', '.join(known)}; got {name!r}")
        return cls._named({**SIZES["1.5b"], "head_dim": 128, **heads}, changes)

    @classmethod
    def _named(cls, fields: dict[str, Any], changes: dict[str, Any]) -> RLAConfig:
        unknown = [key for key in changes if not hasattr(cls, key)]
        if unknown:
            raise TypeError(f"RLAConfig: unknown field {unknown[0]!r}")
        return cls(**{**fields, **changes})

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: exported folders carry a shim that imports this class (export.py), not copies of its source."""
