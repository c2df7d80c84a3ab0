"""SpecForge's model classes on an export: strict names, what they compute from given inputs, and its training losses.

A job names the export, the target, a safetensors file of inputs (see references.py) and one with a batch (see
objectives.py); the result holds hidden states, logits, confidence logits and losses as nested lists.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

# Its Eagle3 loss is a Triton kernel, and compiling the rest would take longer than running it.
os.environ.update(TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1")

import torch
from protocol import Job, serve
from safetensors.torch import load_file
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.dspark import DSparkDraftModel
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import AutoConfig, AutoModelForCausalLM

_BLOCK = {"DSparkDraftModel": DSparkDraftModel, "DFlashDraftModel": DFlashDraftModel}

Tensors = dict[str, torch.Tensor]


@functools.cache
def load_target(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def run(job: Job) -> dict[str, Any]:
    folder = Path(job["draft"])
    given, batch, weights = load_file(job["inputs"]), load_file(job["batch"]), load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    target = load_target(job["target"])
    if config.architectures[0] == "LlamaForCausalLMEagle3":
        model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
        model.load_state_dict(weights, strict=True)
        found, losses = eagle3(model, given), eagle3_losses(model, target, batch, job)
    else:
        model = _BLOCK[config.architectures[0]](config).float().eval()
        model.load_state_dict(weights, strict=True)
        found, losses = block(model, given), block_losses(model, target, batch, job)
    losses["loss"].backward()
    losses["gradient"] = model.fc.weight.grad
    return {name: value.tolist() for name, value in found.items()} | {
        "losses": {name: value.tolist() for name, value in losses.items()}
    }


@torch.no_grad()
def eagle3(model: Any, given: Tensors) -> Tensors:
    hidden = model(given["features"], model.embed_input_ids(given["next_ids"]))
    return {"hidden": hidden, "logits": model.lm_head(hidden)}


@torch.no_grad()
def block(model: Any, given: Tensors) -> Tensors:
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
    return found


def block_losses(model: Any, target: Any, batch: Tensors, job: Job) -> Tensors:
    weights, is_dspark = job["weights"], isinstance(model, DSparkDraftModel)
    answer = torch.ones_like(batch["ids"], dtype=torch.float32)
    answer[:, 0] = 0
    settings: dict[str, Any] = {
        "draft_model": model,
        "target_lm_head": target.lm_head,
        "target_embed_tokens": target.model.embed_tokens,
        "mask_token_id": model.mask_token_id,
        "block_size": model.block_size,
        "attention_backend": "sdpa",
        "num_anchors": batch["ids"].shape[1],  # more than there are, so that none is drawn by chance
        "loss_decay_gamma": job["decay"],
    }
    if not is_dspark:
        loss, _, _ = OnlineDFlashModel(**settings)(batch["ids"], batch["features"], answer)
        return {"ce": loss.detach(), "loss": loss}
    wrapped = OnlineDSparkModel(
        **settings,
        dspark_ce_loss_alpha=weights["ce"],
        dspark_l1_loss_alpha=weights["tv"],
        dspark_confidence_head_alpha=weights.get("confidence", 0.0),
    )
    loss, _, metrics = wrapped(batch["ids"], batch["features"], answer, batch["last_hidden"])
    names = {"ce": "ce_loss", "tv": "l1_loss", "confidence": "confidence_loss"}
    ratios = {name: metrics["ratio_metrics"][names[name]] for name in weights}
    return {name: total / count for name, (total, count) in ratios.items()} | {"loss": loss}


def eagle3_losses(model: Any, target: Any, batch: Tensors, job: Job) -> Tensors:
    following = batch["ids"][:, 1:]
    # Of the token that a row predicts; behind the last there is none.
    answer = torch.ones_like(following)[..., None]
    answer[:, -1] = 0
    losses, *_ = OnlineEagle3Model(model, length=job["steps"], attention_backend="sdpa")(
        input_ids=following,
        attention_mask=torch.ones_like(following),
        target=target.lm_head(batch["last_hidden"][:, 1:]),
        loss_mask=answer,
        hidden_states=batch["features"][:, :-1],
    )
    # Its trainer weighs steps this way.
    total = sum(job["decay"] ** step * loss for step, loss in enumerate(losses))
    return {f"step_{step}": loss.detach() for step, loss in enumerate(losses)} | {"loss": total}


serve(run)
