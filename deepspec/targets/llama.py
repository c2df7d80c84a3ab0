"""Llama layers (SmolLM2 too): pre-norm, no q/k norms."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from deepspec.targets.family import TargetFamily, pre_norm_tail, rotate_keys, rotate_plain, split_heads


def _draft_config(target: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    config = copy.deepcopy(target)
    config.num_hidden_layers = num_layers
    config.tie_word_embeddings = False
    # Left from the target's own training; it draws from torch's generator, which neither a resume nor a recomputation
    # winds back.
    config.attention_dropout = 0.0
    return config


def _keys_values(attention: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    keys = split_heads(attention.k_proj(hidden), attention.head_dim)
    values = split_heads(attention.v_proj(hidden), attention.head_dim)
    return rotate_keys(keys.transpose(1, 2), rotation), values.transpose(1, 2)


FAMILY = TargetFamily(
    name="llama",
    architecture="Llama",
    model_types=("llama",),
    draft_config=_draft_config,
    layer=LlamaDecoderLayer,
    norm=lambda config: LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=LlamaRotaryEmbedding,
    rotate=rotate_plain,
    keys_values=_keys_values,
    after_attention=pre_norm_tail,
    layer_arguments=dict,
)
