"""The vocabulary weights of a target, which drafts share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FrozenHead(NamedTuple):
    """The target's vocabulary weights, shared by reference with every draft.

    Attributes:
        embedding: [V, H] input embedding.
        embedding_scale: factor on embedded tokens (Gemma: sqrt(H)).
        weight: [V, H] language-model head.
        softcap: cap c of logits, c * tanh(logits / c), or None.
    """

    embedding: Tensor
    embedding_scale: float
    weight: Tensor
    softcap: float | None

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids [...] -> [..., H]."""
        embedded_ids = torch.nn.functional.embedding(ids, self.embedding)
        if self.embedding_scale == 1.0:
            return embedded_ids
        # The family rounds the scale to the embedding's dtype, so a draft must as well.
        return embedded_ids * torch.tensor(self.embedding_scale, dtype=embedded_ids.dtype)

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """Capped logits [..., V] in fp32 (fp64 stays) of normed hidden states, from this head or a part of its rows."""
        weight = self.weight if weight is None else weight
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
