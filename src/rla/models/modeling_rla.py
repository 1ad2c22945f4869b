"""RLAModel and RLAForCausalLM: one model for every linear method, softmax attention and hybrids of them.

- pre-norm blocks: x + mixer(norm(x)), then x + mlp(norm(x)); RMSNorm, SwiGLU, no biases
- the mixer of a layer is `rla.nn.ResidualAttention` or `rla.nn.SoftmaxAttention`
- no positional embeddings but the rotary ones of softmax and RetNet
- padding and packed documents are exact for every mixer (layout.py); one-token steps update linear states in place
- tied embeddings; the loss can do without the whole logits (loss.py)

Shapes: B rows, T new tokens, `past` tokens in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from ..nn import ResidualAttention, RMSNorm, SoftmaxAttention, SwiGLU
from .cache import LayerState, RLACache, Segment, map_state
from .configuration_rla import SOFTMAX, RLAConfig
from .layout import Layout, document_starts, make_layout
from .loss import IGNORE, chunked_loss, shift
from .pretrained import RLAPreTrainedModel

logger = logging.get_logger(__name__)


class RLABlock(GradientCheckpointingLayer):
    def __init__(self, config: RLAConfig, layer_idx: int) -> None:
        super().__init__()
        mixer, hidden, eps = config.mixers[layer_idx], config.hidden_size, config.rms_norm_eps
        heads, head_dim, theta = config.num_attention_heads, config.resolved_head_dim, config.rope_theta
        self.layer_idx, self.is_softmax = layer_idx, mixer == SOFTMAX
        self.mixer_norm = RMSNorm(hidden, eps)
        self.mixer: nn.Module
        if self.is_softmax:
            self.mixer = SoftmaxAttention(hidden, heads, config.num_key_value_heads, head_dim, rope_theta=theta)
        else:
            self.mixer = ResidualAttention(
                hidden,
                config.linear_num_heads or heads,
                head_dim,
                mixer,
                conv_size=config.conv_size,
                output_gate=config.output_gate,
                rope_theta=theta,
                norm_eps=eps,
                backend=config.backend,
            )
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size)

    def forward(self, x: Tensor, layout: Layout, past_key_values: RLACache | None = None) -> Tensor:  # x [B, T, hidden]
        x = x + self._mix(self.mixer_norm(x), layout, past_key_values)
        return x + self.mlp(self.mlp_norm(x))

    def _mix(self, x: Tensor, layout: Layout, cache: RLACache | None) -> Tensor:
        if cache is None:
            return self._run(x, None, layout)[0]
        layer = cache.layers[self.layer_idx]
        if cache.record_past and not self.is_softmax:
            before = map_state(layer.state, torch.clone)
            layer.segments.append(Segment(before, x.shape[1], lambda s, n: self._run(x[:, :n], s, layout.first(n))[1]))
        y, layer.state = self._run(x, layer.state, layout)
        return y

    def _run(self, x: Tensor, state: LayerState | None, layout: Layout) -> tuple[Tensor, LayerState]:
        positions, packing = layout.position_ids, layout.packing
        if self.is_softmax:
            return self.mixer(x, state=state, mask=layout.mask, position_ids=positions)
        if packing is None:
            return self.mixer(x, state=state, position_ids=positions)
        positions = packing.pack(positions.expand(x.shape[:2]))
        y, state = self.mixer(packing.pack(x), state=state, cu_seqlens=packing.cu_seqlens, position_ids=positions)
        return packing.unpack(y, x.shape), state


class RLAModel(RLAPreTrainedModel):
    """The blocks between embedding and head; returns hidden states."""

    def __init__(self, config: RLAConfig) -> None:
        super().__init__(config)
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RLABlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RLACache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the blocks.

        Args:
            input_ids: [B, T]; or inputs_embeds [B, T, hidden].
            attention_mask: [B, past + T], zeros at padding, which lies on the left or on the right of a row, not in the middle.
            position_ids: [B or 1, T]. Where they don't go on by one, without padding or a cache, a packed document begins.
            past_key_values: an `RLACache` to continue from; it is updated.
            use_cache: whether to return a cache. None: the config's word, but not in training or for packed documents.
            output_hidden_states: whether to return the input of every block, and the output.
            cu_seqlens: [N + 1] int, bounds of N documents packed into the one row.
            kwargs: ignored, as Transformers' models do.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "input_ids: expected either input_ids or inputs_embeds; got " + ("none" if input_ids is None else "both")
            )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values
        if cache is not None:
            if not isinstance(cache, RLACache):
                raise TypeError(f"past_key_values: expected an RLACache, RLACache(model.config); got {type(cache).__name__}")
            cache.check(self.config, x.shape[0])
        past = 0 if cache is None else cache.seen
        softmax = SOFTMAX in self.config.mixers
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
        layout = make_layout(x, past, softmax=softmax, **inputs)
        if layout.has_documents:
            if cache is not None or use_cache:
                raise ValueError("use_cache: packed documents leave no cache for their rows; pass use_cache=False and no cache")
        elif cache is None and (use_cache if use_cache is not None else self.config.use_cache and not self.training):
            cache = RLACache(self.config)

        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = [x] if wants_hidden else None
        for layer in self.layers:
            x = layer(x, layout, past_key_values=cache)
            if hidden is not None:
                hidden.append(x)
        if cache is not None:
            cache.seen += x.shape[1]
        x = self.norm(x)
        if hidden is not None:
            hidden[-1] = x
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=None if hidden is None else tuple(hidden),  # type: ignore[arg-type]
        )


class RLAForCausalLM(RLAPreTrainedModel, GenerationMixin):
    """A language model: `RLAModel` and a head, tied to the embedding by default."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RLAConfig) -> None:
        super().__init__(config)
        self.model = RLAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RLACache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        loss_chunk_size: int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next tokens. Arguments are those of `RLAModel.forward`, and:

        Args:
            labels: [B, T], -100 where nothing is predicted; shifted here. A packed document's first token is not predicted.
            logits_to_keep: how many of the last positions to compute logits for, or which; 0: all.
            loss_chunk_size: tokens whose logits exist at a time, for the loss; None: `config.loss_chunk_size`, 0: all, and the
                logits are returned.
            kwargs: `num_items_in_batch` and `shift_labels` as in other models of Transformers; others are ignored.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
        )
        x = outputs.last_hidden_state
        targets, count = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
        if labels is not None and targets is None:
            starts = document_starts(x.shape[1], x.device, position_ids, cu_seqlens)
            if starts is not None:
                labels = torch.cat((labels[:, :1], labels[:, 1:].masked_fill(starts.to(labels.device), IGNORE)), 1)
            targets = shift(labels)
        chunk = self.config.loss_chunk_size if loss_chunk_size is None else loss_chunk_size
        loss = logits = None
        if targets is not None and chunk:
            loss = chunked_loss(x, targets, self.lm_head, chunk, count)
        else:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
            logits = self.lm_head(x if isinstance(keep, int) else x[:, keep])
        if targets is not None and logits is not None:
            vocab = logits.shape[-1]
            loss = self.loss_function(logits, labels=labels, vocab_size=vocab, shift_labels=targets, num_items_in_batch=count)
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any) -> Any:
        """Transformers' hook: the cache that `generate` uses when it is given none."""
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        if generation_config.cache_implementation is not None:
            logger.warning_once(f"cache_implementation={generation_config.cache_implementation!r} is ignored: RLACache is used")
        cache = RLACache(self.config)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache
        return None
