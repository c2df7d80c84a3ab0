"""The acceptance rule of lossless speculative decoding, as one pure function of distributions and random numbers.

It knows nothing of models, caches, schedules or stop tokens. Letters: B requests, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.decoding.sampling import sample


class Verdict(NamedTuple):
    """What verification decides about a batch of draft blocks.

    Attributes:
        accepted: [B] int64, how many draft tokens of each row are kept, 0..lengths.
        bonus: [B] int64, the target's own token that follows them.
    """

    accepted: Tensor
    bonus: Tensor


def verify(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    lengths: Tensor,
    uniforms: Tensor,
    places: Tensor | None = None,
) -> Verdict:
    """Keep the longest prefix of the draft block that leaves the target's distribution unchanged.

    A draft token x is kept with probability min(1, p(x) / q(x)); after the first rejection the bonus token is drawn
    from the normalised positive part of p - q, after a fully accepted block from the target's next distribution
    (Leviathan et al. 2023, algorithm 1). Greedy decoding is the case of one-hot distributions (`verify_greedy`). Runs
    without waiting for the device.

    Args:
        draft_tokens: [B, K] proposed token ids, valid ids also past `lengths`.
        draft_probs: [B, K, V] q, the distributions they were drawn from; zero outside a reduced draft vocabulary.
        target_probs: [B, K + 1, V] p, at the same positions and one on.
        lengths: [B] how many draft tokens of each row are verified, 0..K. Must not depend on the tokens they cut off.
        uniforms: [B, K + 2] in [0, 1), the request's own draws for this round, independent of those that drew the
            block: K tests of acceptance, then the bonus draw after a rejection, then that after full acceptance.
        places: [B, K + 1] where `target_probs` [N, V] holds each position's distribution, anything past `lengths`; None
            where all are there, as [B, K + 1, V].

    Returns:
        The number of kept tokens and the bonus token of each row.

    Raises:
        ValueError: shapes do not fit together, or probabilities are coarser than float32.
    """
    rows, block = draft_tokens.shape
    _check_inputs(draft_tokens, draft_probs, target_probs, lengths, uniforms, places)
    lengths = lengths.clamp(0, block)
    if places is None:
        places = torch.arange(rows * (block + 1), device=draft_tokens.device).view(rows, block + 1)
        target_probs = target_probs.flatten(0, 1)

    tokens = draft_tokens.unsqueeze(-1)
    q = draft_probs.gather(-1, tokens).squeeze(-1)
    p = target_probs[places[:, :block], draft_tokens]
    kept = uniforms[:, :block] * q < p  # the same as u < p / q, without dividing by zero
    accepted = _count_accepted(kept, lengths)
    is_rejected = accepted < lengths

    row = torch.arange(rows, device=accepted.device)
    next_probs = target_probs[places[row, accepted]]
    weights = next_probs
    if block:
        # Past the verified part q counts as zero, so the residual there is p itself: one rule serves both endings.
        drafted = draft_probs[row, accepted.clamp_max(block - 1)] * is_rejected.unsqueeze(-1)
        residual = (next_probs - drafted).clamp_min_(0.0)
        # Where p and q differ by rounding alone nothing may be left; p is then the same distribution.
        weights = torch.where(residual.amax(dim=-1, keepdim=True) > 0, residual, next_probs)
    bonus = sample(weights, torch.where(is_rejected, uniforms[:, block], uniforms[:, block + 1]))
    return Verdict(accepted, bonus)


def verify_greedy(draft_tokens: Tensor, choices: Tensor, lengths: Tensor) -> Verdict:
    """What `verify` decides about one-hot distributions, whatever the uniforms: the block is kept up to the first token
    that the target would not have chosen, whose own choice follows.

    Args:
        draft_tokens: [B, K] proposed token ids.
        choices: [B, K + 1] the target's most probable tokens, at the same positions and one on.
        lengths: [B] how many draft tokens of each row are verified, 0..K.
    """
    block = draft_tokens.shape[1]
    accepted = _count_accepted(draft_tokens == choices[:, :block], lengths.clamp(0, block))
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def _count_accepted(kept: Tensor, lengths: Tensor) -> Tensor:
    """Length [B] of the kept prefix within `lengths`, of tests [B, K]."""
    kept = kept & (torch.arange(kept.shape[1], device=kept.device) < lengths.unsqueeze(-1))
    return kept.long().cumprod(dim=-1).sum(dim=-1)


def _check_inputs(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    lengths: Tensor,
    uniforms: Tensor,
    places: Tensor | None,
) -> None:
    """Raise ValueError where shapes or dtypes cannot be right; reads no values."""
    rows, block = draft_tokens.shape
    vocab_size = target_probs.shape[-1]
    found = (rows, block + 1, vocab_size) if places is None else (len(target_probs), vocab_size)
    expected = {
        "draft_probs": (draft_probs, (rows, block, vocab_size)),
        "target_probs": (target_probs, found),
        "lengths": (lengths, (rows,)),
        "uniforms": (uniforms, (rows, block + 2)),
    }
    if places is not None:
        expected["places"] = (places, (rows, block + 1))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but draft_tokens {(rows, block)} needs {shape}.")
    for name in ("draft_probs", "target_probs"):
        dtype = expected[name][0].dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is {dtype}; score with the float32 or float64 distribution that was drawn from.")
