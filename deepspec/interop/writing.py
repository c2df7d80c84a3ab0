"""Our drafts in the words of others: config.json and weights as each engine reads them.

It turns one config and one set of weights into another and touches no file. What an engine cannot serve is refused by
engines.py before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspec.config import AlgorithmConfig, DFlashConfig, DSparkConfig, Eagle3Config
from deepspec.interop import taps
from deepspec.interop.engines import Format
from deepspec.interop.reading import LAYER_KEYS, draft_keys, plain_rope

Fields = dict[str, Any]
State = dict[str, Tensor]
# Version of the library whose files we write like; its readers do not compare it.
_SPECULATORS = "0.9.0"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


class Written(NamedTuple):
    """What goes into the export's folder."""

    fields: Fields
    state: State


class TargetNames(NamedTuple):
    """What the speculators format says of the target."""

    name_or_path: str
    architectures: tuple[str, ...]


def needed_vocabulary(fields: Mapping[str, Any], state: Mapping[str, Tensor], engine: Format, own: bool) -> set[str]:
    """Which of embedding and head must come from the target: what the engine cannot take from it, or all of them.

    Args:
        fields: config in our words.
        state: weights by our names.
        engine: whose format is written.
        own: whether copies are wanted in any case.
    """
    is_eagle3 = "ttt_length" in fields
    needed = {_EMBEDDING, _HEAD} if own and engine != "zlab" else set()
    if "d2t" in state and engine != "deepspec":
        needed.add(_HEAD)
    if is_eagle3 and engine in ("specforge", "sglang", "speculators"):
        needed.add(_HEAD)
    if is_eagle3 and engine in ("specforge", "speculators"):
        # The speculators library leaves an Eagle3 embedding that a file lacks uninitialised (found with 0.9.0).
        needed.add(_EMBEDDING)
    if fields["model_type"] == "gemma4_text" and engine == "vllm":
        needed |= {_EMBEDDING, _HEAD}
    return needed - state.keys()


def write(fields: Fields, state: State, algorithm: AlgorithmConfig, engine: Format, target: TargetNames) -> Written:
    """A draft in an engine's format.

    Args:
        fields: config in our words.
        state: weights by our names, with the vocabulary weights that `needed_vocabulary` asked for.
        algorithm: the draft's settings.
        engine: whose format.
        target: for formats that name it.
    """
    fields, state = draft_keys(fields), dict(state)
    if engine == "deepspec":
        return Written(fields, state)
    if fields["model_type"] == "gemma4_text":
        # Engines read DeepSpec's own Gemma4 drafts, whose config is the layers' own.
        made, state = _with_markov(fields, state)
        return Written({key: value for key, value in made.items() if not key.startswith("deepspec_")}, state)
    if isinstance(algorithm, Eagle3Config):
        return _eagle3(fields, state, algorithm, engine, target)
    if engine == "speculators":
        return _speculators_block(fields, state, algorithm, target)
    if isinstance(algorithm, DFlashConfig) and algorithm.layout == "fill_in":
        return Written(_zlab(fields), state)
    if engine == "specforge":
        fields, state = _with_markov(fields, state)
        return Written(_specforge_dspark(fields), state)
    made = _block_fields(fields) | {"architectures": ["Qwen3DSparkModel"]}
    return Written(*_with_markov(made, state))


def _block_fields(fields: Mapping[str, Any]) -> Fields:
    """The layers and the algorithm's public keys of a block draft."""
    keys = (
        "num_target_layers",
        "target_layer_ids",
        "mask_token_id",
        "block_size",
        "sample_from_anchor",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "draft_vocab_size",
        "num_draft_tokens",
    )
    return _layers(fields) | {key: fields[key] for key in keys if fields.get(key) is not None}


def _layers(fields: Mapping[str, Any]) -> Fields:
    kept = {key: value for key, value in fields.items() if key in LAYER_KEYS and key != "rope_scaling"}
    rope = plain_rope(fields["rope_parameters"])
    return kept | {
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "dtype": fields.get("dtype", "bfloat16"),
    }


def _with_markov(fields: Fields, state: State) -> tuple[Fields, State]:
    """Give a draft without a Markov head one that adds nothing: engines that read a DSpark want one."""
    if fields.get("markov_rank"):
        return fields, state
    like = state["fc.weight"]
    vocab = int(fields["vocab_size"])
    state = state | {
        "markov_head.markov_w1.weight": like.new_zeros(vocab, 1),
        "markov_head.markov_w2.weight": like.new_zeros(int(fields.get("draft_vocab_size") or vocab), 1),
    }
    empty = {"markov_rank": 1, "markov_head_type": "vanilla", "confidence_head_with_markov": False}
    return fields | empty, state


def _zlab(fields: Mapping[str, Any]) -> Fields:
    """DFlash as z-lab writes it; SpecForge, SGLang and vLLM read the same."""
    keys = ("block_size", "num_target_layers", "draft_vocab_size", "num_draft_tokens")
    return (
        _layers(fields)
        | {key: fields[key] for key in keys if fields.get(key) is not None}
        | {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {
                "mask_token_id": fields["mask_token_id"],
                "target_layer_ids": taps.written(("dflash_config", "target_layer_ids"), fields["target_layer_ids"]),
            },
        }
    )


def _specforge_dspark(fields: Mapping[str, Any]) -> Fields:
    keys = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov")
    is_gqa = fields["num_key_value_heads"] < fields["num_attention_heads"]
    nested = {key: fields[key] for key in keys if fields.get(key) is not None} | {
        "projector_type": "dspark",
        "attention_mode": "gqa" if is_gqa else "mha",
        "markov_head_type": fields.get("markov_head_type", "vanilla"),
    }
    made = _zlab(fields) | {"architectures": ["DSparkDraftModel"], "sample_from_anchor": True}
    return made | {"dflash_config": made["dflash_config"] | nested}


def _eagle3(
    fields: Mapping[str, Any], state: State, algorithm: Eagle3Config, engine: Format, target: TargetNames
) -> Written:
    is_llama = fields["model_type"] == "llama"
    vocab = int(fields["vocab_size"])
    draft_vocab = int(fields.get("draft_vocab_size") or vocab)
    layer_ids = fields["target_layer_ids"]
    if engine == "speculators":
        outer = _speculators("eagle3", algorithm.num_draft_tokens, target) | {
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": _layers(fields) | {"num_hidden_layers": 1},
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": fields["hidden_size"],
            "norm_before_residual": algorithm.norm_before_residual,
        }
        if layer_ids is not None:
            outer["eagle_aux_hidden_state_layer_ids"] = taps.written(("eagle_aux_hidden_state_layer_ids",), layer_ids)
        return Written(outer, state)
    made = _layers(fields) | {
        "architectures": ["LlamaForCausalLMEagle3" if is_llama else "Eagle3Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": fields["hidden_size"],
        "norm_before_residual": algorithm.norm_before_residual,
        "num_draft_tokens": algorithm.num_draft_tokens,
    }
    if fields.get("num_target_layers") is not None:
        made["num_target_layers"] = fields["num_target_layers"]
    if layer_ids is not None:
        path = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
        made["eagle_config"] = {"use_aux_hidden_state": True, path[1]: taps.written(path, layer_ids)}
        made["num_aux_hidden_states"] = len(layer_ids)
    if layer_ids is not None and engine == "vllm":
        made["eagle_aux_hidden_state_layer_ids"] = taps.written(("eagle_aux_hidden_state_layer_ids",), layer_ids)
    if engine == "specforge":
        state = {name.replace("layers.0.", "midlayer."): value for name, value in state.items()}
        if "d2t" not in state:
            state |= {"d2t": torch.zeros(vocab, dtype=torch.int64), "t2d": torch.ones(vocab, dtype=torch.bool)}
    return Written(made, state)


def _speculators_block(
    fields: Mapping[str, Any], state: State, algorithm: AlgorithmConfig, target: TargetNames
) -> Written:
    is_fill_in = isinstance(algorithm, DFlashConfig) and algorithm.layout == "fill_in"
    kind = "dflash" if is_fill_in else "dspark"
    vocab = fields["vocab_size"]
    made = _speculators(kind, algorithm.num_draft_tokens, target) | {
        "architectures": ["DFlashSpeculator" if is_fill_in else "Qwen3DSparkModel"],
        "transformer_layer_config": _layers(fields),
        "vocab_size": vocab,
        "draft_vocab_size": fields.get("draft_vocab_size") or vocab,
        "block_size": fields["block_size"],
        "aux_hidden_state_layer_ids": taps.written(("aux_hidden_state_layer_ids",), fields["target_layer_ids"]),
        "mask_token_id": fields["mask_token_id"],
        "sample_from_anchor": not is_fill_in,
        # vLLM reads false, the library's default, as a causal block.
        "sliding_window_non_causal": True,
    }
    if is_fill_in:
        return Written(made, state)
    has_confidence = isinstance(algorithm, DSparkConfig) and algorithm.confidence_head
    made |= {
        "markov_rank": fields.get("markov_rank") or 0,
        "markov_head_type": fields.get("markov_head_type", "vanilla"),
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": bool(has_confidence and fields.get("confidence_head_with_markov")),
    }
    made, state = _with_markov(made, state)
    made.pop("vocab_size")
    return Written(made, state)


def _speculators(kind: str, tokens: int, target: TargetNames) -> Fields:
    """What all drafts of the speculators format begin with."""
    return {
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name_or_path, "architectures": list(target.architectures)},
        },
        "tie_word_embeddings": False,
    }
