"""Drafts as the speculators library loads them: what they compute from given inputs, and its training losses.

A job names the export, a safetensors file of inputs (see references.py) and one with a batch (see objectives.py). The
layers are called with an eager mask: flex attention wants lengths that are multiples of 128. So are the losses, whose
fused form wants a GPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from protocol import Job, serve
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import eager, resolve_loss_config

_LOSSES = {"ce": "ce", "tv": "tv", "kl": "kl_div"}


def run(job: Job) -> dict[str, Any]:
    config = SpeculatorModelConfig.from_pretrained(job["draft"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(job["draft"], config=config).float().eval()
    unread = [name for name, value in model.named_parameters() if value.isnan().any()]
    if unread:
        raise ValueError(f"weights that the file does not fill: {unread}")
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    is_eagle3 = type(model).__name__ == "Eagle3DraftModel"
    given, batch = load_file(job["inputs"]), load_file(job["batch"])
    with torch.no_grad():
        found = eagle3(model, given) if is_eagle3 else block(model, given)
    model.fc.weight.requires_grad_(True)
    losses = (eagle3_losses if is_eagle3 else block_losses)(model, batch, job)
    losses["loss"].backward()
    losses["gradient"] = model.fc.weight.grad
    return {name: value.tolist() for name, value in found.items()} | {
        "losses": {name: value.tolist() for name, value in losses.items()}
    }


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


def block_losses(model: Any, batch: dict[str, torch.Tensor], job: Job) -> dict[str, torch.Tensor]:
    weights = job["weights"]
    answer = torch.ones_like(batch["ids"], dtype=torch.bool)
    answer[:, 0] = False
    options: dict[str, Any] = {}
    if type(model).__name__ == "DSparkDraftModel":
        options = {"tv_loss_fn": eager.tv_loss, "confidence_head_alpha": weights.get("confidence", 0.0)}
    _, loss, metrics = model(
        hidden_states=batch["features"],
        input_ids=batch["ids"],
        loss_mask=answer,
        verifier_last_hidden_states=batch["before_norm"],
        document_ids=torch.zeros_like(batch["ids"]),
        loss_config=_config(weights),
        gamma=job["decay"],
        # As many as there are, so that none is drawn by chance.
        max_anchors=batch["ids"].shape[1] - model.block_size - 1,
        **options,
    )
    found = {name: metrics[f"{key}_loss_sum"] for name, key in _LOSSES.items() if name in weights}
    if "confidence" in weights:
        found["confidence"] = metrics["confidence_loss_sum"]
    return found | {"loss": loss}


def eagle3_losses(model: Any, batch: dict[str, torch.Tensor], job: Job) -> dict[str, torch.Tensor]:
    following = batch["ids"][:, 1:]
    # Of the token that a row predicts; behind the last there is none.
    answer = torch.ones_like(following, dtype=torch.bool)
    answer[:, -1] = False
    _, loss, metrics = model(
        hidden_states=batch["features"][:, :-1],
        input_ids=following,
        loss_mask=answer,
        verifier_last_hidden_states=batch["before_norm"][:, 1:],
        document_ids=torch.zeros_like(following),
        loss_config=_config(job["weights"]),
        ttt_steps=job["steps"],
        ttt_step_loss_decay=job["decay"],
    )
    # A step's loss is told with its decay.
    steps = {f"step_{step}": metrics[f"loss_{step}_sum"] / job["decay"] ** step for step in range(job["steps"])}
    return steps | {"loss": loss}


def _config(weights: dict[str, float]) -> Any:
    return resolve_loss_config(
        json.dumps({_LOSSES[name]: weights[name] for name in weights if name in _LOSSES}), "eager"
    )


serve(run)
