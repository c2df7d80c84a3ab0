"""Qwen3 layers: pre-norm, q/k norms, no biases. The default draft layer for every target: it is what engines load."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from deepspec.targets.family import TargetFamily, pre_norm_tail, rotate_keys, rotate_plain, split_heads


def _draft_config(target: PreTrainedConfig, num_layers: int) -> Qwen3Config:
    # Where layers differ in size (Gemma4), the first one is of the common kind.
    layer = target.per_layer_config[0] if getattr(target, "is_heterogeneous", False) else target
    heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or target.hidden_size // heads
    return Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=layer.num_key_value_heads or heads,
        head_dim=head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=_plain_rope(target),
        initializer_range=target.initializer_range,
        layer_types=["full_attention"] * num_layers,
        tie_word_embeddings=False,
        use_sliding_window=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _plain_rope(target: PreTrainedConfig) -> dict[str, Any]:
    """The target's rope base; its scaling and partial rotation belong to the target's own layers."""
    parameters = target.rope_parameters
    if "rope_type" not in parameters:
        parameters = parameters["full_attention"]
    return {"rope_type": "default", "rope_theta": float(parameters["rope_theta"])}


def _keys_values(attention: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    keys = attention.k_norm(split_heads(attention.k_proj(hidden), attention.head_dim))
    values = split_heads(attention.v_proj(hidden), attention.head_dim)
    return rotate_keys(keys.transpose(1, 2), rotation), values.transpose(1, 2)


FAMILY = TargetFamily(
    name="qwen3",
    architecture="Qwen3",
    model_types=("qwen3",),
    draft_config=_draft_config,
    layer=Qwen3DecoderLayer,
    norm=lambda config: Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Qwen3RotaryEmbedding,
    rotate=rotate_plain,
    keys_values=_keys_values,
    after_attention=pre_norm_tail,
    layer_arguments=dict,
)
