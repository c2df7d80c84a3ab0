"""What a target's config says, without its weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deepspec.config import TargetConfig
from deepspec.errors import TargetError
from deepspec.targets.loading import read_model_config, text_body


class TargetFacts(NamedTuple):
    """What a target's config says.

    Attributes:
        architectures: its classes.
        hidden_size: H.
        vocab_size: V.
        num_layers: N.
        embedding_scale: factor on embedded tokens.
        softcap: cap of logits, or None.
        has_windows: some layers see a window of the context and some all of it.
    """

    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding_scale: float
    softcap: float | None
    has_windows: bool

    @property
    def changes_vocabulary(self) -> bool:
        """Whether embeddings are scaled or logits capped, which plain layers of engines do not follow."""
        return self.embedding_scale != 1.0 or self.softcap is not None


def read_facts(config: TargetConfig) -> TargetFacts:
    """Read what a target's config says, without its weights.

    Raises:
        TargetError: it cannot be found.
    """
    try:
        model_config = read_model_config(config)
        text = model_config.get_text_config()
        is_text = model_config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        kind: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        with torch.device("meta"):
            body = text_body(kind.from_config(model_config), config.name_or_path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TargetError(
            f"the config of target '{config.name_or_path}' cannot be read: {reason} Give the draft's target, as in "
            "target=qwen3_4b or target.name_or_path=FOLDER."
        ) from error
    return TargetFacts(
        tuple(model_config.architectures or ()),
        text.hidden_size,
        text.vocab_size,
        len(body.layers),
        float(getattr(body.embed_tokens, "scalar_embed_scale", 1.0)),
        getattr(text, "final_logit_softcapping", None),
        {"sliding_attention", "full_attention"} <= set(getattr(text, "layer_types", None) or ()),
    )
