"""SpecForge's model classes on an export: strict names, and what they compute from given inputs.

A job names the export and a safetensors file of inputs (see references.py); the result holds hidden states, logits
and confidence logits as nested lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from protocol import Job, serve
from safetensors.torch import load_file
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.dspark import DSparkDraftModel
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import AutoConfig

_BLOCK = {"DSparkDraftModel": DSparkDraftModel, "DFlashDraftModel": DFlashDraftModel}


@torch.no_grad()
def forward(job: Job) -> dict[str, Any]:
    folder = Path(job["draft"])
    given, weights = load_file(job["inputs"]), load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    if config.architectures[0] == "LlamaForCausalLMEagle3":
        model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
        model.load_state_dict(weights, strict=True)
        hidden = model(given["features"], model.embed_input_ids(given["next_ids"]))
        return {"hidden": hidden.tolist(), "logits": model.lm_head(hidden).tolist()}
    model = _BLOCK[config.architectures[0]](config).float().eval()
    model.load_state_dict(weights, strict=True)
    hidden = model(
        position_ids=given["position_ids"],
        noise_embedding=given["noise"],
        target_hidden=given["features"],
        attention_mask=None,
        is_causal=False,
    )
    found = {"hidden": hidden}
    if getattr(model, "markov_head", None) is not None:
        found["logits"] = model.markov_head.apply_block_logits(
            given["base_logits"], token_ids=given["previous_ids"], hidden_states=hidden
        )
    if getattr(model, "confidence_head", None) is not None:
        found["confidence"] = model.predict_confidence(hidden, prev_token_ids=given["previous_ids"])
    return {name: value.tolist() for name, value in found.items()}


serve(forward)
