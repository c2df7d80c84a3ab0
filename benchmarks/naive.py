"""A DSpark train step written the way public trainers write it, on a draft's own modules.

Every sequence has the same number of anchor slots, those without an anchor are computed and masked away; the mask is a
dense boolean matrix; the target's states are gathered for every slot, so that a position is taught up to K times; draft
and teacher logits of all slots exist at once and autograd keeps their fp32 softmaxes. Only the layers' weights and the
helper that puts context keys before a layer's own are shared with deepspec; mask, gathers and losses are written anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspec.algorithms.dspark import Draft
from deepspec.attention import FeaturePrefix
from deepspec.types import FeatureBatch


def naive_objective(draft: Draft, batch: FeatureBatch, num_slots: int, total_weight: Tensor) -> Tensor:
    """Objective of one micro-batch.

    Args:
        draft: a vanilla DSpark draft of the full vocabulary.
        batch: tokens and what the target says about them.
        num_slots: anchor slots per sequence, at least as many as the batch has anchors.
        total_weight: denominator of all losses, the slot weights of the whole optimizer step.
    """
    anchors, is_anchor = padded_anchors(batch, num_slots)
    hidden = naive_hidden(draft, batch, anchors, is_anchor)
    return naive_losses(draft, batch, anchors, is_anchor, hidden, total_weight)


def padded_anchors(batch: FeatureBatch, num_slots: int) -> tuple[Tensor, Tensor]:
    """Anchors and their mask [B, A] with A the fixed number of slots."""
    missing = num_slots - batch.tokens.anchors.shape[1]
    return F.pad(batch.tokens.anchors, (0, missing)), F.pad(batch.tokens.anchor_mask, (0, missing))


def naive_hidden(draft: Draft, batch: FeatureBatch, anchors: Tensor, is_anchor: Tensor) -> Tensor:
    """Normed hidden states [B, A, K, H] of every slot, dummies included."""
    tokens, block = batch.tokens, draft.num_draft_tokens
    count, num_slots = anchors.shape
    length, device = tokens.input_ids.shape[1], anchors.device
    ids = torch.full((count, num_slots, block), draft.spec.mask_token_id, device=device)
    ids[:, :, 0] = tokens.input_ids.gather(1, anchors)
    hidden = F.embedding(ids.flatten(1), draft.head.embedding).to(draft.fc.weight.dtype)
    positions = (anchors[:, :, None] + torch.arange(block, device=device)).flatten(1)

    context = draft.hidden_norm(draft.fc(batch.features.to(draft.fc.weight.dtype)))
    context_rotation = draft.rotation(context, torch.arange(length, device=device)[None])
    prefix = FeaturePrefix([draft.family.keys_values(one.self_attn, context, context_rotation) for one in draft.layers])

    owner = torch.arange(num_slots, device=device).repeat_interleave(block)
    before = torch.arange(length, device=device) < anchors[:, owner][:, :, None]
    before = before & is_anchor[:, owner][:, :, None]
    own = (owner[:, None] == owner[None, :]).expand(count, -1, -1)
    mask = torch.cat([before, own], dim=2)[:, None]

    rotation = draft.rotation(hidden, positions)
    with _stock_attention(draft):
        for layer in draft.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation, cache=prefix, use_cache=True)
    normed: Tensor = draft.norm(hidden)
    return normed.view(count, num_slots, block, -1)


def naive_losses(
    draft: Draft, batch: FeatureBatch, anchors: Tensor, is_anchor: Tensor, hidden: Tensor, total_weight: Tensor
) -> Tensor:
    """Objective from the hidden states of every slot."""
    assert draft.markov_head is not None
    assert draft.confidence_head is not None
    tokens, weights_of = batch.tokens, draft.config.losses
    count, num_slots, block, size = hidden.shape
    length, slots = tokens.input_ids.shape[1], torch.arange(block, device=hidden.device)
    label_at = anchors[:, :, None] + slots + 1
    inside = label_at.clamp(max=length - 1).flatten(1)
    labels = tokens.input_ids.gather(1, inside).view_as(label_at)
    previous = tokens.input_ids.gather(1, (label_at - 1).flatten(1).clamp(max=length - 1)).view_as(label_at)
    is_label = (label_at < tokens.lengths[:, None, None]) & tokens.answer_mask.gather(1, inside).view_as(label_at)
    supervised = (is_label & is_anchor[:, :, None]).cumprod(dim=-1)
    weights = supervised * torch.exp(-slots / draft.config.position_decay)

    with torch.no_grad():
        index = (inside - 1).clamp(min=0)[:, :, None].expand(-1, -1, size)
        teacher = batch.last_hidden.gather(1, index).view(count, num_slots, block, size)
        target_probs = torch.softmax(_exact(F.linear(teacher, draft.head.weight)), dim=-1)

    embedded = draft.markov_head.markov_w1(previous)
    base = F.linear(hidden.to(_product_dtype(hidden)), draft.head.weight)
    logits = _exact(base + draft.markov_head.markov_w2(embedded))
    ce = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(weights)
    draft_probs = torch.softmax(logits, dim=-1)
    distance = (draft_probs - target_probs).abs().sum(dim=-1)

    confidence = draft.confidence_head(torch.cat([hidden, embedded], dim=-1))
    acceptance = (1.0 - 0.5 * distance).detach()
    surprise = F.binary_cross_entropy_with_logits(confidence, acceptance.to(confidence.dtype), reduction="none")
    losses = weights_of.ce * ce + weights_of.tv * distance + weights_of.confidence * surprise
    return (weights * losses).sum() / total_weight


def naive_optimizer(draft: nn.Module) -> torch.optim.AdamW:
    """AdamW as it comes; at a rate of zero it does its work and leaves the weights alone."""
    return torch.optim.AdamW(draft.parameters(), lr=0.0, weight_decay=0.0)


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


@contextmanager
def _stock_attention(draft: Draft) -> Iterator[None]:
    """The attention that transformers takes by itself, with keys and values repeated over the heads of a group."""
    ours = draft.layer_config._attn_implementation
    draft.layer_config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        draft.layer_config._attn_implementation = ours
