"""Greedy verification reads choices instead of distributions; what it decides is what the distributions would say."""

from __future__ import annotations

import pytest
import torch
from helpers import KINDS, kind_of_draft, tiny_target
from torch import Tensor

from deepspec.algorithms.base import Observation, Proposal, Sampler
from deepspec.attention import Packing
from deepspec.decoding.judge import judge
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.decoding.sampling import Sampling, warp
from deepspec.decoding.verify import verify
from deepspec.targets.base import Target

GREEDY = Sampling(temperature=0.0)
PROMPT, ROWS, BLOCK = 7, 6, 4


def _prompts(target: Target) -> tuple[Tensor, RaggedCache]:
    """Random prompts [B, L], of which the cache knows all but the last token."""
    ids = torch.randint(4, target.vocab_size, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    cache = RaggedCache.for_batch(ROWS)
    target.forward_cached(ids[:, :-1], torch.arange(PROMPT - 1).expand(ROWS, -1), cache, PROMPT - 1)
    return ids, cache


def _half_right(target: Target, ids: Tensor) -> Tensor:
    """Blocks [B, K] that follow the target's own choices for 0, 1, .., K tokens and for K again, and then do not."""
    whole = ids
    for slot in range(BLOCK):
        last_hidden = target.features(whole)[1]
        token = target.logits(last_hidden[:, -1]).argmax(dim=-1)
        token = torch.where(torch.arange(ROWS) > slot, token, (token + 1) % target.vocab_size)
        whole = torch.cat([whole, token[:, None]], dim=1)
    return whole[:, PROMPT:]


@pytest.mark.parametrize("packs", [False, True])
def test_a_greedy_judgement_equals_the_one_from_one_hot_distributions(packs: bool) -> None:
    target = tiny_target()
    ids, cache = _prompts(target)
    tokens = _half_right(target, ids)
    lengths = torch.tensor([4, 4, 2, 4, 3, 4])
    one_hot = torch.zeros(ROWS, BLOCK, target.vocab_size).scatter_(-1, tokens[..., None], 1.0)
    uniforms = torch.rand(ROWS, BLOCK + 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = judge(
        target,
        cache,
        ids[:, -1],
        torch.full((ROWS,), PROMPT - 1),
        Proposal(tokens, None, None, torch.ones(ROWS, BLOCK)),
        lengths,
        uniforms,
        PROMPT + BLOCK,
        GREEDY,
        packing=Packing.of((lengths + 1).tolist(), target.device) if packs else None,
        measures_overlap=True,
    )
    last_hidden = target.features(torch.cat([ids, tokens], dim=1))[1][:, PROMPT - 1 :]
    probs = warp(target.logits(last_hidden), GREEDY)
    expected = verify(tokens, one_hot, probs, lengths, uniforms)
    assert found.accepted.tolist() == expected.accepted.tolist() == [0, 1, 2, 3, 3, 4]
    assert torch.equal(found.bonus, expected.bonus)
    overlap = torch.minimum(probs[:, :-1], one_hot).sum(dim=-1)
    assert found.overlap is not None
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(found.overlap[row, :length], overlap[row, :length])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [None, 40])
def test_a_greedy_proposal_is_the_top_of_the_distributions_and_carries_none(kind: str, vocab: int | None) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, kind, draft_vocab_size=vocab).eval()
    ids, _ = _prompts(target)
    features, _ = target.features(ids)
    starts, counts = torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS,), PROMPT - 1)
    anchors, positions = ids[:, -1], torch.full((ROWS,), PROMPT - 1)
    block = draft.num_draft_tokens

    def propose(sampling: Sampling) -> Proposal:
        with torch.inference_mode():
            state = draft.new_state(ROWS)
            draft.observe(state, Observation(features[:, :-1], ids[:, 1:], starts, counts, PROMPT - 1))
            sampler = Sampler(sampling, torch.full((ROWS, block), 0.5, dtype=torch.float64))
            return draft.propose(state, anchors, positions, PROMPT + block, sampler)

    # With one candidate left a draw is the greedy choice, on the way that makes distributions.
    greedy, sampled = propose(GREEDY), propose(Sampling(top_k=1))
    assert greedy.probs is None
    assert sampled.probs is not None
    assert torch.equal(greedy.tokens, sampled.tokens)
    assert torch.equal(sampled.probs.argmax(dim=-1), greedy.tokens)
    torch.testing.assert_close(greedy.max_probs, sampled.max_probs)
