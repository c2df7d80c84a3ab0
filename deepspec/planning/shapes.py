"""The sizes of a target without its weights: from its config.json, or as known here for the targets of config/target/.

A target that is not on this machine can be planned for without a network, too.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from deepspec.config import TargetConfig
from deepspec.errors import TargetError

_SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.0e6},
}
_QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
_QWEN3_8B = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_QWEN3_14B = _QWEN3 | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "tie_word_embeddings": False,
}
# The text part; every sixth layer attends to everything.
_GEMMA4_12B: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_KNOWN: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "smollm2-135m": (LlamaConfig, _SMOLLM2_135M),
    "Qwen/Qwen3-4B": (Qwen3Config, _QWEN3_4B),
    "Qwen/Qwen3-8B": (Qwen3Config, _QWEN3_8B),
    "Qwen/Qwen3-14B": (Qwen3Config, _QWEN3_14B),
    "google/gemma-4-12B-it": (Gemma4TextConfig, _GEMMA4_12B),
}


def target_config(target: TargetConfig) -> tuple[PreTrainedConfig, str]:
    """The transformers config of a target, and in words where it comes from.

    A folder or what an earlier run fetched comes first, then the sizes known here, then the hub: a machine without a
    network would otherwise wait a minute for the hub's silence.

    Raises:
        TargetError: the config is not on this machine, not known here, and the hub does not answer.
    """
    name = target.name_or_path
    known = _KNOWN.get(name)
    try:
        return AutoConfig.from_pretrained(name, revision=target.revision, local_files_only=True), "its config.json"
    except (OSError, ValueError):
        if known is not None:
            kind, values = known
            return kind(**values), "deepspec's own list (its config.json is not on this machine)"
    try:
        return AutoConfig.from_pretrained(name, revision=target.revision), "its config.json on the hub"
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"the config.json of target '{name}' cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}"
            f" Give a folder or a hub id that this machine can reach; sizes known without one: {', '.join(_KNOWN)}."
        ) from error
