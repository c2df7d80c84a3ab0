"""Tiny models and naive references that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.attention import GROUPED_SDPA
from deepspec.targets.base import Target

VOCAB_SIZE = 96
MASK_TOKEN = VOCAB_SIZE - 1
STOP_TOKEN = 3


def tiny_config(family: str, num_layers: int = 5, vocab_size: int = VOCAB_SIZE) -> PreTrainedConfig:
    """A config of the family with a hidden size of 32."""
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "eos_token_id": STOP_TOKEN,
    }
    if family == "gemma4":
        kinds = ["sliding_attention", "full_attention"] * num_layers
        return Gemma4TextConfig(
            **common,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            layer_types=[*kinds[: num_layers - 1], "full_attention"],
            sliding_window=8,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=30.0,
            vocab_size_per_layer_input=vocab_size,
        )
    return {"qwen3": Qwen3Config, "llama": LlamaConfig}[family](**common, tie_word_embeddings=family == "llama")


def tiny_target(
    family: str = "qwen3",
    *,
    num_layers: int = 5,
    layer_ids: tuple[int, ...] = (0, 1, 3),
    vocab_size: int = VOCAB_SIZE,
    stop_token_ids: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    seed: int = 11,
) -> Target:
    """A random target; its weights are large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = tiny_config(family, num_layers, vocab_size)
    config._attn_implementation = GROUPED_SDPA
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    return Target(
        model,
        None,
        name=f"tiny-{family}",
        layer_ids=layer_ids,
        mask_token_id=vocab_size - 1,
        stop_token_ids=stop_token_ids,
    )
