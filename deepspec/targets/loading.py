"""Finding and making a target's model: where it lies, which class loads it, and what cannot be one.

It knows transformers' model classes and this project's settings; what a target is used for it does not know.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from deepspec.attention import GROUPED_SDPA
from deepspec.config import TargetConfig
from deepspec.errors import TargetError
from deepspec.targets import embedded

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Kinds of layer whose state a rejected token leaves behind can be undone.
_KINDS = frozenset({"full_attention", "sliding_attention", "linear_attention"})
# While transformers loads a model it replaces PreTrainedModel.tie_weights for the whole process; two threads that load
# at once can leave it replaced, and every later model then has an untied, random head.
_loading = threading.Lock()


def model_options(config: TargetConfig) -> dict[str, Any]:
    """How transformers is to make the model, whether it loads weights or not."""
    attention = GROUPED_SDPA if config.attention == "sdpa" else config.attention
    return {"dtype": _DTYPES[config.dtype], "attn_implementation": attention}


def source_of(config: TargetConfig) -> str | Path:
    """Folder or hub id to load from; the embedded target is converted on its first use."""
    return embedded.folder() if config.name_or_path == embedded.NAME else config.name_or_path


def is_local_target(config: TargetConfig) -> bool:
    """Whether the target is a folder of this machine or the embedded one, not a hub id that others can load."""
    return config.name_or_path == embedded.NAME or Path(config.name_or_path).expanduser().exists()


def read_model_config(config: TargetConfig) -> PreTrainedConfig:
    """The model's config.

    Raises:
        OSError: it is not there.
        ValueError: it is none that transformers knows.
    """
    model_config: PreTrainedConfig = AutoConfig.from_pretrained(source_of(config), revision=config.revision)
    return model_config


def load_model(config: TargetConfig, model_config: PreTrainedConfig, device: torch.device) -> Any:
    """Load the weights onto one device; of a vision-language model its whole wrapper, of which only the text runs.

    Raises:
        OSError: files are missing.
        ValueError: no language model of that type exists.
        ImportError: the weights are quantised in a way whose package is not installed.
        TargetError: the chosen attention cannot compute this family, or weights of the text part are missing.
    """
    is_text = model_config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    options = model_options(config)
    if getattr(model_config, "quantization_config", None) is not None:
        # Quantised weights are packed while they are loaded and may not be moved or cast afterwards.
        options["device_map"] = {"": device}
    try:
        source = source_of(config)
        with _loading:
            model, report = kind.from_pretrained(
                source, config=model_config, revision=config.revision, output_loading_info=True, **options
            )
    except ValueError as error:
        if config.attention == "sdpa" and "scaled_dot_product_attention" in str(error):
            raise TargetError(
                f"target '{config.name_or_path}' ({model_config.model_type}) has attention that SDPA cannot compute "
                "(caps or sinks of the scores). Set target.attention=eager."
            ) from error
        raise
    _check_complete(model, report["missing_keys"], config.name_or_path)
    return model if "device_map" in options else model.to(device)


def _check_complete(model: Any, missing: Collection[str], name: str) -> None:
    """Refuse what transformers only warns of: weights and buffers that its files lack are made up."""
    parts = (part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None)
    used = {id(weight) for part in parts for weight in itertools.chain(part.parameters(), part.buffers())}
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    lost = [key for key, weight in named if key in missing and id(weight) in used]
    if lost:
        raise TargetError(
            f"target '{name}' lacks {len(lost)} of its weights, the first is {lost[0]}: its files are incomplete, or "
            "quantised in a way that transformers does not know. Fetch it again, or use a checkpoint that is not "
            "quantised."
        )


def text_body(model: Any, name: str) -> Any:
    """The module that holds embed_tokens, layers and norm of the text part.

    Raises:
        TargetError: the model is not a plain decoder, or of a kind that decoding cannot roll back.
    """
    decoder = model.get_decoder()
    if hasattr(decoder, "language_model"):
        decoder = decoder.language_model
    for part in ("embed_tokens", "layers", "norm"):
        if not hasattr(decoder, part):
            raise TargetError(f"target '{name}' ({type(model).__name__}) is not a plain decoder: it has no '{part}'.")
    _check_attention(model, name)
    _check_weights(model, name)
    return decoder


def _check_attention(model: Any, name: str) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    lone = [layer for layer in model.get_decoder().modules() if hasattr(layer, "linear_attn")]
    if kinds - _KINDS or ("linear_attention" in kinds and not lone):
        found = ", ".join(sorted(kinds - _KINDS)) or "linear_attention"
        raise TargetError(
            f"target '{name}' ({config.model_type}) has {found} layers, whose state cannot be rolled back after a "
            "rejected token. Use a target with full, sliding-window or Qwen3-Next-style linear attention."
        )


def _check_weights(model: Any, name: str) -> None:
    # Weights that a device map leaves on disk are on "meta"; without a map they are layers that are never to run.
    is_mapped = getattr(model, "hf_device_map", None) is not None
    places = (str(one.device) for one in model.parameters() if is_mapped or not one.is_meta)
    devices = sorted(set(places))
    if len(devices) > 1:
        raise TargetError(
            f"target '{name}' is spread over {', '.join(devices)}; its taps are read on one device. Load it without "
            "a device map, quantised or in a smaller dtype if it does not fit."
        )
    head = model.get_output_embeddings()
    if head is None:
        raise TargetError(f"target '{name}' ({type(model).__name__}) has no language-model head.")
    embedding = model.get_input_embeddings().weight
    for part, weight in (("head", head.weight), ("embedding", embedding)):
        if not weight.is_floating_point() or weight.dim() != 2 or weight.element_size() == 1:
            raise TargetError(
                f"target '{name}': its {part} is quantised ({weight.dtype}, shape {tuple(weight.shape)}), and drafts "
                "share it. Use a checkpoint that leaves embedding and head in 16 or 32 bits."
            )
    if getattr(head, "bias", None) is not None:
        raise TargetError(
            f"target '{name}' ({type(model).__name__}) adds a bias to its logits, which engines do not give to drafts."
        )


def stop_tokens(
    source: str | Path, revision: str | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Every id that ends an answer, from the generation config, the model config and the tokenizer."""
    try:
        generation = GenerationConfig.from_pretrained(source, revision=revision or "main").eos_token_id
    except OSError:
        generation = None
    ids: list[int] = []
    for found in (generation, config.get_text_config().eos_token_id, tokenizer.eos_token_id):
        ids += [found] if isinstance(found, int) else list(found or [])
    return ids
