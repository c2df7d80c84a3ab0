"""Training losses of others on one batch, made of what our own forward computes.

Each library has its own weights, denominators and row sets, so ours are put together its way: what is compared is
every loss that both know, their sum, and its gradient at `fc`, behind which lies the whole draft. The batch is what a
target says greedily after one token, since libraries differ in whether a label is the token of the text or the target's
first choice.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from chat_targets import MASK_TOKEN
from conformance.drafts import CASES, LAYERS, Workshop
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from deepspec.algorithms.backbone import BlockDraft
from deepspec.algorithms.checkpoint import load_draft
from deepspec.algorithms.dspark import Draft as DSparkDraft
from deepspec.algorithms.eagle3 import Draft as Eagle3Draft
from deepspec.attention import GROUPED_SDPA
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, SlotPlan, TokenBatch

_TOKENS, _FIRST = 28, 12
WEIGHTS = {"ce": 0.3, "tv": 0.5, "kl": 0.2, "confidence": 0.7}
"""Of each loss in the sum, by the words that drivers use."""
# speculators divides by this more than the rows it counts.
_EPSILON = 1e-5


class _Batch(NamedTuple):
    target: Target
    ids: Tensor
    features: Tensor
    last_hidden: Tensor
    before_norm: Tensor


def inputs(workshop: Workshop, case: str) -> Path:
    """A safetensors file with the batch: ids, features, and last hidden states after and before the final norm."""
    family = CASES[case].target
    path = workshop.folder / "inputs" / f"batch_{family}.safetensors"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        batch = _batch(workshop, family)
        tensors = {name: getattr(batch, name) for name in ("ids", "features", "last_hidden", "before_norm")}
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def settings(workshop: Workshop, case: str, client: str) -> dict[str, Any]:
    """What a driver must know beside the tensors: weights of the losses, decay over slots or steps, K."""
    draft = _draft(workshop, case)
    decay = draft.config.step_decay if isinstance(draft, Eagle3Draft) else draft.config.position_decay
    return {"weights": _weights(draft, client), "decay": decay, "steps": draft.num_draft_tokens}


def expected(workshop: Workshop, case: str, client: str) -> dict[str, Tensor]:
    """The losses as a client counts them: each by its name, `loss` for their sum, and `gradient` [H, M*H] at fc."""
    draft = _draft(workshop, case)
    draft.zero_grad()
    draft.fc.weight.requires_grad_(True)
    batch = _batch(workshop, CASES[case].target)
    if isinstance(draft, BlockDraft):
        found = _block(draft, batch, client, _weights(draft, client))
    else:
        assert isinstance(draft, Eagle3Draft)
        found = _eagle3(draft, batch, client)
    found["loss"].backward()
    assert draft.fc.weight.grad is not None
    return {name: value.detach() for name, value in found.items()} | {"gradient": draft.fc.weight.grad.clone()}


def _weights(draft: BlockDraft | Eagle3Draft, client: str) -> dict[str, float]:
    """The losses that a client and we both have for a draft."""
    if isinstance(draft, Eagle3Draft):
        return {"kl": 1.0}
    names = {"ce", "tv", "kl"} if client == "speculators" else {"ce", "tv"}
    if draft.vocab is not None:
        names.discard("ce")  # a label outside the draft's vocabulary is dropped here, and replaced there
    if isinstance(draft, DSparkDraft):
        names.add("confidence")
    elif client == "specforge" and draft.config.layout == "fill_in":
        return {"ce": 1.0}
    return {name: weight for name, weight in WEIGHTS.items() if name in names}


def _block(draft: BlockDraft, batch: _Batch, client: str, weights: dict[str, float]) -> dict[str, Tensor]:
    length = batch.ids.shape[1]
    # speculators drafts no block that would end outside the text.
    end = length - draft.inputs_per_block if client == "speculators" else length - 1
    tokens = _tokens(batch, end)
    slot_weights = draft.slot_weights(tokens)
    plan = draft.slot_plan(tokens)
    count = slot_weights.sum() if client == "specforge" else draft.supervised(tokens).sum() + _EPSILON
    ours = {"ce": ("ce", 1.0), "tv": ("tv", 1.0 if client == "specforge" else 0.5), "kl": ("soft_ce", 1.0)}
    ours["confidence"] = ("confidence", 1.0)
    factors = {ours[name][0]: ours[name][1] * weight / count for name, weight in weights.items()}
    logits = batch.last_hidden @ draft.draft_head_weight.T
    terms = draft.forward(
        FeatureBatch(
            tokens,
            batch.features,
            batch.last_hidden,
            # Over the draft's vocabulary alone: they renormalise, we do not (docs/engines/speculators.md).
            None if draft.vocab is None else logits.logsumexp(-1),
            plan,
        ),
        factors,
    )
    found = {name: factor * terms.losses[key].total / count for name, (key, factor) in ours.items() if name in weights}
    found["loss"] = terms.objective
    if "kl" in weights:
        taught = logits.flatten(0, 1)[plan.taught_by]
        entropy = (slot_weights.flatten()[plan.slots] * _entropy(taught)).sum() / count
        found["kl"] = found["kl"] - entropy
        found["loss"] = found["loss"] - weights["kl"] * entropy
    return found


def _eagle3(draft: Eagle3Draft, batch: _Batch, client: str) -> dict[str, Tensor]:
    tokens = _tokens(batch, batch.ids.shape[1] - 1)
    steps, anchors = draft.num_draft_tokens, tokens.anchors.numel()
    taught = draft.supervised(tokens).permute(2, 0, 1).float()
    # speculators drops no row whose label lies outside a reduced vocabulary.
    weights = draft.row_weights(tokens) if client == "specforge" else taught
    counts = taught.sum(dim=(1, 2)) + _EPSILON
    if client == "specforge":
        counts = torch.full((steps,), float(batch.ids.shape[1] - 1))
    decay = draft.config.step_decay ** torch.arange(steps)
    slots, taught_by = draft.slot_plan(tokens)
    rows = slots % steps * anchors + slots // steps
    terms = draft.step_losses(
        draft.unroll(FeatureBatch(tokens, batch.features, batch.last_hidden), tokens.anchors - 1),
        FeatureBatch(tokens, batch.features, batch.last_hidden),
        weights,
        SlotPlan(rows, taught_by),
        dict(zip(draft.loss_weights, decay / counts, strict=True)),
    )
    found = {"loss": terms.objective}
    logits = (batch.last_hidden @ draft.draft_head_weight.T).flatten(0, 1)[taught_by]
    entropies = weights.flatten()[rows] * _entropy(logits)
    for step, ratio in enumerate(terms.losses.values()):
        value = ratio.total
        if client == "speculators":
            value = value - entropies[rows // anchors == step].sum()
            found["loss"] = found["loss"] - decay[step] * entropies[rows // anchors == step].sum() / counts[step]
        found[f"step_{step}"] = value / counts[step]
    return found


def _entropy(logits: Tensor) -> Tensor:
    """What separates a divergence from the cross-entropy that we train on; no draft can change it."""
    probs = logits.softmax(-1)
    return -(probs * probs.log()).sum(-1)


def _tokens(batch: _Batch, end: int) -> TokenBatch:
    """Everything but the first token is an answer, and a block starts at every place before `end`."""
    answer = torch.ones_like(batch.ids, dtype=torch.bool)
    answer[:, 0] = False
    anchors = torch.arange(1, end)[None]
    length = torch.tensor([batch.ids.shape[1]])
    return TokenBatch(batch.ids, length, answer, anchors, torch.ones_like(anchors, dtype=torch.bool), torch.zeros(1))


@functools.cache
def _draft(workshop: Workshop, case: str) -> BlockDraft | Eagle3Draft:
    draft = load_draft(workshop.draft(case), _batch(workshop, CASES[case].target).target)
    assert isinstance(draft, BlockDraft | Eagle3Draft)
    return draft


@functools.cache
@torch.no_grad()
def _batch(workshop: Workshop, family: str) -> _Batch:
    folder = workshop.target(family)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=GROUPED_SDPA, dtype=torch.float32)
    target = Target(model, None, name=str(folder), layer_ids=LAYERS, mask_token_id=MASK_TOKEN)
    ids = torch.tensor([[_FIRST]])
    for _ in range(_TOKENS - 1):
        ids = torch.cat([ids, target.logits(target.features(ids)[1])[:, -1:].argmax(-1)], dim=1)
    seen: list[Tensor] = []
    hook = target.final_norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    features, last_hidden = target.features(ids)
    hook.remove()
    return _Batch(target, ids, features, last_hidden, seen[0])
