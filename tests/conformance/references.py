"""What a draft computes here, for clients that are model classes: inputs for them, and the values to compare with.

Block drafts: the features of 12 tokens, then one block. Eagle3: the first step over 20 tokens.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from chat_targets import MASK_TOKEN
from conformance.drafts import CASES, LAYERS, Workshop
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from deepspec.algorithms.backbone import BlockDraft
from deepspec.algorithms.checkpoint import load_draft
from deepspec.algorithms.eagle3 import Draft as Eagle3Draft
from deepspec.attention import GROUPED_SDPA, FeaturePrefix, block_mask
from deepspec.targets.base import Target

_TOKENS, _ANCHOR = 20, 12


def inputs(workshop: Workshop, case: str) -> Path:
    """A safetensors file with what the client's forward takes."""
    path = workshop.folder / "inputs" / f"{case}.safetensors"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        given, _ = _computed(workshop, case)
        save_file({name: value.contiguous() for name, value in given.items()}, path)
    return path


def expected(workshop: Workshop, case: str) -> dict[str, Tensor]:
    """Normed hidden states, logits (Markov head included) and confidence logits where the draft has them."""
    return _computed(workshop, case)[1]


@functools.cache
@torch.no_grad()
def _computed(workshop: Workshop, case: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    folder = workshop.target(CASES[case].target)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=GROUPED_SDPA, dtype=torch.float32)
    target = Target(model, None, name=str(folder), layer_ids=LAYERS, mask_token_id=MASK_TOKEN)
    draft = load_draft(workshop.draft(case), target)
    ids = torch.randint(5, target.vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(7))
    features, _ = target.features(ids)
    if isinstance(draft, BlockDraft):
        return _block(draft, ids, features)
    assert isinstance(draft, Eagle3Draft)
    return _eagle3(draft, ids, features)


def _block(draft: BlockDraft, ids: Tensor, features: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    slots, size = draft.num_draft_tokens, draft.inputs_per_block
    seen = features[:, :_ANCHOR]
    context = draft.context(seen)
    rotation = draft.rotation(context, torch.arange(_ANCHOR)[None])
    prefix = FeaturePrefix([draft.family.keys_values(layer.self_attn, context, rotation) for layer in draft.layers])
    noise = draft.embed_blocks(ids[:, _ANCHOR])
    mask = block_mask(torch.tensor([[_ANCHOR]]), torch.tensor([[True]]), size, _ANCHOR, "dense")
    hidden = draft._through_layers(noise, torch.arange(_ANCHOR, _ANCHOR + size)[None], mask, prefix)
    previous = ids[:, _ANCHOR : _ANCHOR + slots]
    logits = draft.head.logits(hidden[:, -slots:], draft.draft_head_weight)
    heads = draft.head_inputs(hidden[:, -slots:], previous, torch.arange(slots))
    given = {
        "features": seen,
        "position_ids": torch.arange(_ANCHOR + size)[None],
        "noise": noise,
        "previous_ids": previous,
        "base_logits": logits,
    }
    wanted = {"hidden": hidden, "logits": logits}
    if heads.latent is not None and draft.latent_weight is not None:
        wanted["logits"] = logits + heads.latent @ draft.latent_weight.T
    if heads.confidence_logits is not None:
        wanted["confidence"] = heads.confidence_logits[None]
    return given, wanted


def _eagle3(draft: Eagle3Draft, ids: Tensor, features: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
    positions = torch.arange(_TOKENS)[None]
    hidden = draft._decode_rows(draft.new_state(1), draft.fc(features), following, positions, _TOKENS)
    normed = draft.norm(hidden)
    wanted = {"hidden": normed, "logits": draft.head.logits(normed, draft.student_weight)}
    return {"features": features, "next_ids": following}, wanted
