"""Gemma4 text layers: sandwich norms, attention scale 1, partial rotary, and a learned scalar a layer.

A draft layer is a global-attention layer of the family: full attention, the global head size, and the global number of
key/value heads where keys double as values.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import Gemma4TextConfig, PreTrainedConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
)

from deepspec.errors import TargetError
from deepspec.targets.family import TargetFamily, rotate_keys, split_heads


def _draft_config(target: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    if getattr(target, "enable_moe_block", False):
        raise TargetError(
            "Gemma4 with experts has no dense layer to copy for the draft. Use algorithm.draft_layers=qwen3."
        )
    fields = copy.deepcopy(target).to_dict()
    for key in ("per_layer_config", "model_type"):
        fields.pop(key, None)
    is_global = [index for index, kind in enumerate(target.layer_types) if kind == "full_attention"]
    layer = target.per_layer_config[is_global[0]]
    fields.update(
        global_head_dim=layer.head_dim,
        num_global_key_value_heads=layer.num_key_value_heads,
        num_hidden_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=False,
        use_double_wide_mlp=False,
        attention_dropout=0.0,  # see llama.py
    )
    # The unified model's text layers are the same under another name, which no reader of drafts knows.
    return Gemma4TextConfig(**fields)


def _keys_values(attention: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    raw_keys = split_heads(attention.k_proj(hidden), attention.head_dim)
    raw_values = raw_keys if attention.v_proj is None else split_heads(attention.v_proj(hidden), attention.head_dim)
    keys = rotate_keys(attention.k_norm(raw_keys).transpose(1, 2), rotation)
    return keys, attention.v_norm(raw_values).transpose(1, 2)


def _rotate(rotary: nn.Module, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(hidden, positions, "full_attention")
    return cos, sin


def _after_attention(layer: Any, residual: Tensor, attention_output: Tensor) -> Tensor:
    hidden = residual + layer.post_attention_layernorm(attention_output)
    widened = layer.mlp(layer.pre_feedforward_layernorm(hidden))
    output: Tensor = (hidden + layer.post_feedforward_layernorm(widened)) * layer.layer_scalar
    return output


FAMILY = TargetFamily(
    name="gemma4",
    architecture="Gemma4",
    model_types=("gemma4_text", "gemma4_unified_text"),
    draft_config=_draft_config,
    layer=Gemma4TextDecoderLayer,
    norm=lambda config: Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Gemma4TextRotaryEmbedding,
    rotate=_rotate,
    keys_values=_keys_values,
    after_attention=_after_attention,
    layer_arguments=lambda: {"shared_kv_states": {}},
)
