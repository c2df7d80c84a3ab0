"""Tiny random targets of every family that is supported, for contract tests."""

from __future__ import annotations

from typing import Any

import torch
from helpers import MASK_TOKEN, SIZES, VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from deepspec.attention import GROUPED_SDPA
from deepspec.targets.base import Target

WINDOW = 8
_COMMON = SIZES | {"num_hidden_layers": 4, "bos_token_id": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA4 = {
    **_ALTERNATING,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 30.0,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _SCALED_ROPE, "tie_word_embeddings": True},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "gemma2": {**_ALTERNATING, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 8},
    "gemma4_text": _GEMMA4,
    "gpt_oss": {
        **_ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
    },
    "phi3": {"sliding_window": WINDOW},
    "olmo3": _ALTERNATING,
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3_5_text": _LINEAR,
}
"""Settings of a tiny config, by model type."""

WRAPPED: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": _COMMON, "vision_config": _VISION | {"deepstack_visual_indexes": [0]}},
    "gemma3": {
        "text_config": _COMMON | FAMILIES["gemma3_text"] | {"query_pre_attn_scalar": 8},
        "vision_config": _VISION,
    },
    "gemma4_unified": {"text_config": _COMMON | _GEMMA4},
    "qwen3_5": {"text_config": _COMMON | _LINEAR, "vision_config": _VISION | {"deepstack_visual_indexes": []}},
}
"""Vision-language models, of which the text part is a target."""

NEEDS_EAGER = frozenset({"gpt_oss", "gemma2"})


def family_model(family: str, attention: str | None = None) -> Any:
    """A tiny random model, the same weights for every attention."""
    settings = WRAPPED[family] if family in WRAPPED else _COMMON | FAMILIES[family]
    config = AutoConfig.for_model(family, **settings)
    chosen = attention or ("eager" if family in NEEDS_EAGER else GROUPED_SDPA)
    kind: Any = AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM
    torch.manual_seed(11)
    return kind.from_config(config, attn_implementation=chosen).eval()


def family_target(family: str, layer_ids: tuple[int, ...] = (0, 1, 2)) -> Target:
    """A tiny random target of a family."""
    return Target(family_model(family), None, name=family, layer_ids=layer_ids, mask_token_id=MASK_TOKEN)
