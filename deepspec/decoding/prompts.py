"""The target's first pass over prompts: what all begin with runs once, and only real tokens run.

It knows nothing of drafts, draws or rounds. Letters: B prompts, L tokens of the longest, P tokens that all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.attention import Packing
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.targets.base import Target

# A shorter common beginning of the prompts is not worth a forward of its own.
_SHORTEST_PREFIX = 8


class Prefix(NamedTuple):
    """What the target said about the tokens that all prompts begin with (a template's system prompt).

    Attributes:
        cache: their keys and values, one row.
        features: [1, P, M*H].
        last_hidden: [1, P, H].
    """

    cache: RaggedCache
    features: Tensor
    last_hidden: Tensor

    @property
    def length(self) -> int:
        """P, number of shared tokens."""
        return self.features.shape[1]


def shared_prefix(target: Target, prompts: Sequence[Sequence[int]]) -> Prefix | None:
    """Run what all prompts begin with once; every prompt keeps at least one token of its own. None for next to nothing.

    Args:
        target: the target.
        prompts: token ids of all prompts that will be run.
    """
    if len(prompts) < 2:
        return None
    # What the first and the last in lexicographic order share, all share.
    first, last = min(map(list, prompts)), max(map(list, prompts))
    pairs = enumerate(zip(first, last, strict=False))
    length = next((index for index, (one, other) in pairs if one != other), min(len(first), len(last)))
    length = min(length, *(len(prompt) - 1 for prompt in prompts))
    if length < _SHORTEST_PREFIX:
        return None
    cache = RaggedCache.for_batch(1)
    positions = torch.arange(length, device=target.device)[None]
    ids = torch.tensor([first[:length]], device=target.device)
    return Prefix(cache, *target.forward_cached(ids, positions, cache, length))


def run_prompts(
    target: Target, ids: Tensor, counts: Sequence[int], prefix: Prefix | None
) -> tuple[Tensor, Tensor, RaggedCache]:
    """Run prompts, from the end of their shared prefix on.

    Args:
        target: the target.
        ids: [B, L] prompts, padded on the right.
        counts: B numbers of real tokens, the largest of them L.
        prefix: what `shared_prefix` returned.

    Returns:
        Features [B, L, M*H] and last hidden states [B, L, H], anything past the counts, and the cache of B rows.
    """
    batch, longest = ids.shape
    skipped = 0 if prefix is None else prefix.length
    cache = RaggedCache.for_batch(batch) if prefix is None else prefix.cache.repeated(batch)
    positions = torch.arange(skipped, longest, device=ids.device).expand(batch, -1)
    is_ragged = target.packs and min(counts) < longest
    packing = Packing.of([count - skipped for count in counts], ids.device) if is_ragged else None
    features, last_hidden = target.forward_cached(ids[:, skipped:], positions, cache, longest, packing)
    if packing is not None:
        features, last_hidden = packing.padded(features[0]), packing.padded(last_hidden[0])
    if prefix is not None:
        features = torch.cat([prefix.features.expand(batch, -1, -1), features], dim=1)
        last_hidden = torch.cat([prefix.last_hidden.expand(batch, -1, -1), last_hidden], dim=1)
    return features, last_hidden, cache
