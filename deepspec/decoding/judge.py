"""One verification step: the target runs over a draft block's verified slots, and the acceptance test follows.

The decoder plays it every round and `deepspec profile` times it, so that the cost curve is that of the real step. It
knows nothing of requests, schedules or records. Letters: B rows, Q tokens a row, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.algorithms.base import Proposal
from deepspec.attention import Packing
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.decoding.sampling import Sampling, choose, draw, warp
from deepspec.decoding.verify import verify, verify_greedy
from deepspec.targets.base import Target


class Judgement(NamedTuple):
    """What the target said about a block.

    Attributes:
        features: [B, Q, M*H], of real tokens; anything past them.
        last_hidden: [B, Q, H], likewise.
        accepted: [B] draft tokens kept.
        bonus: [B] the target's own token behind them.
        has_nan: [B] bool, whether the target gave NaN at a token of the row.
        log_normaliser: [B, Q] fp32 logsumexp of the logits, where asked for.
        overlap: [B, Q - 1] alpha_k = sum_v min(p_k, q_k) of the verified slots, where asked for.
    """

    features: Tensor
    last_hidden: Tensor
    accepted: Tensor
    bonus: Tensor
    has_nan: Tensor
    log_normaliser: Tensor | None
    overlap: Tensor | None


def judge(
    target: Target,
    cache: RaggedCache,
    anchors: Tensor,
    positions: Tensor,
    proposal: Proposal | None,
    lengths: Tensor,
    uniforms: Tensor,
    visible: int,
    sampling: Sampling,
    *,
    packing: Packing | None = None,
    keeps_normaliser: bool = False,
    measures_overlap: bool = False,
) -> Judgement:
    """Run the target over anchors and draft tokens and decide what is kept.

    Args:
        target: the target.
        cache: its keys and values of everything before the anchors.
        anchors: [B] last known tokens.
        positions: [B] their positions.
        proposal: the draft's block; None draws one token of the target.
        lengths: [B] how many draft tokens of each row are verified.
        uniforms: [B, K + 2] this round's draws, see `verify`.
        visible: upper bound of the positions of the block plus one.
        sampling: warpers of the target.
        packing: lengths + 1 tokens of each row of a proposal, run side by side where rows differ; None runs whole
            blocks.
        keeps_normaliser: return `log_normaliser`.
        measures_overlap: return `overlap`.
    """
    block = 0 if proposal is None else proposal.tokens.shape[1]
    ids = anchors[:, None] if proposal is None else torch.cat([anchors[:, None], proposal.tokens], dim=1)
    width = block + 1 if packing is None else packing.width
    if packing is not None and len(packing.rows) == packing.batch * width:
        packing = None  # rows cut alike are a rectangle, which needs no copies
    visible -= block + 1 - width
    coming = positions[:, None] + torch.arange(width, device=positions.device)
    features, last_hidden = target.forward_cached(ids[:, :width], coming, cache, visible, packing)
    logits = target.logits(last_hidden)
    normaliser = logits.logsumexp(dim=-1).float() if keeps_normaliser else None
    if proposal is None:
        bonus = draw(logits[:, 0], sampling, uniforms[:, 1])
        has_nan = last_hidden.isnan().flatten(1).any(dim=1)
        return Judgement(features, last_hidden, torch.zeros_like(anchors), bonus, has_nan, normaliser, None)
    is_greedy = sampling.temperature == 0
    # What the acceptance test reads: the target's choices where these have all the mass, else its distributions.
    found = choose(logits) if is_greedy else warp(logits, sampling)
    places: Tensor | None = None
    if packing is not None:
        features, last_hidden = packing.padded(features[0]), packing.padded(last_hidden[0])
        normaliser = None if normaliser is None else packing.padded(normaliser[0])
        if is_greedy:
            found = packing.padded(found[0])
        else:
            # Distributions stay side by side: padding them would copy a vocabulary a token.
            found, places = found[0], packing.padded(torch.arange(len(packing.rows), device=positions.device))
    has_nan = last_hidden.isnan().flatten(1).any(dim=1)
    tokens = proposal.tokens[:, : width - 1]
    overlap = None
    if is_greedy:
        accepted, bonus = verify_greedy(tokens, found, lengths)
        if measures_overlap:
            overlap = (tokens == found[:, : width - 1]).float()
    else:
        assert proposal.probs is not None, "only greedy decoding goes without them"
        drafted = proposal.probs[:, : width - 1]
        # The last two draws are those of the bonus token, however short the longest row is.
        draws = uniforms if width == block + 1 else torch.cat([uniforms[:, : width - 1], uniforms[:, block:]], dim=1)
        accepted, bonus = verify(tokens, drafted, found, lengths, draws, places)
        if measures_overlap:
            own = found[:, : width - 1] if places is None else found[places[:, : width - 1]]
            overlap = torch.minimum(own, drafted).sum(dim=-1)
    return Judgement(features, last_hidden, accepted, bonus, has_nan, normaliser, overlap)
