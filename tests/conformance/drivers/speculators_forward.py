"""Drafts as the speculators library loads them, and what they compute from given inputs.

A job names the export and a safetensors file of inputs (see references.py). The layers are called with an eager
mask: the library's own forward wants flex attention and lengths that are multiples of 128.
"""

from __future__ import annotations

from typing import Any

import torch
from protocol import Job, serve
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig


@torch.no_grad()
def forward(job: Job) -> dict[str, Any]:
    given = load_file(job["inputs"])
    config = SpeculatorModelConfig.from_pretrained(job["draft"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(job["draft"], config=config).float().eval()
    unread = [name for name, value in model.named_parameters() if value.isnan().any()]
    if unread:
        raise ValueError(f"weights that the file does not fill: {unread}")
    found = eagle3(model, given) if type(model).__name__ == "Eagle3DraftModel" else block(model, given)
    return {name: value.tolist() for name, value in found.items()}


def eagle3(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = torch.cat([model.embed_tokens(given["next_ids"]), model.fc(given["features"])], dim=-1)
    count = rows.shape[1]
    positions = torch.arange(count)[None] + 1  # only differences of positions matter
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    hidden = model.layers[0](
        rows,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=model.rotary_emb(rows, positions),
    )
    hidden = model.norm(hidden)
    return {"hidden": hidden, "logits": model.lm_head(hidden)}


def block(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    context = model.hidden_norm(model.fc(given["features"]))
    rotary = model.rotary_emb(given["features"], given["position_ids"])
    hidden = given["noise"]
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
        hidden = layer(
            hidden_states=hidden,
            target_hidden=context,
            attention_mask=None,
            position_ids=given["position_ids"],
            use_cache=False,
            position_embeddings=rotary,
        )
    hidden = model.norm(hidden)
    slots = hidden[:, -given["previous_ids"].shape[1] :]
    logits = model.lm_head(slots)
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=given["previous_ids"], hidden_states=slots)
    return {"hidden": hidden, "logits": logits}


serve(forward)
