"""Features from a target that runs in the same process.

The target runs once over each micro-batch under inference mode and nothing is written to disk. Passes are kept in RAM
up to a budget, so that later epochs over the same samples need no second target pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch

_ROWS_PER_CHUNK = 128


class _Pass(NamedTuple):
    """What the target said about one sample, unpadded: [L, M*H], [L, H] and [L] or None."""

    features: Tensor
    last_hidden: Tensor
    log_normaliser: Tensor | None


class OnlineFeatures:
    """Completes token batches with the features of a live target."""

    def __init__(self, target: Target, *, memory_gib: float = 0.0, needs_log_normaliser: bool = False) -> None:
        """Wrap a target.

        Args:
            target: the frozen target.
            memory_gib: RAM for remembered passes, in GiB; 0 remembers none.
            needs_log_normaliser: also compute the logsumexp of the target's logits on answer positions.
        """
        self._target = target
        self._budget_bytes = int(memory_gib * 2**30)
        self._used_bytes = 0
        self._needs_log_normaliser = needs_log_normaliser
        self._passes: dict[int, _Pass] = {}

    def complete(self, tokens: TokenBatch) -> FeatureBatch:
        """Add features, last hidden states and, where asked for, log normalisers to a token batch on its device."""
        samples = tokens.sample_index.tolist() if self._budget_bytes else []
        if samples and all(sample in self._passes for sample in samples):
            return self._from_memory(tokens, samples)
        features, last_hidden = self._target.features(tokens.input_ids)
        normaliser = self._log_normaliser(tokens, last_hidden) if self._needs_log_normaliser else None
        if samples:
            self._remember(tokens, samples, features, last_hidden, normaliser)
        return FeatureBatch(tokens, features, last_hidden, normaliser)

    def _log_normaliser(self, tokens: TokenBatch, last_hidden: Tensor) -> Tensor:
        """logsumexp of the logits that predict an answer token; 0 elsewhere, where no loss reads it."""
        predicts = torch.zeros_like(tokens.answer_mask)
        predicts[:, :-1] = tokens.answer_mask[:, 1:]
        hidden = last_hidden[predicts]
        chunks = [self._target.logits(chunk).logsumexp(dim=-1) for chunk in torch.split(hidden, _ROWS_PER_CHUNK)]
        normaliser = torch.zeros(tokens.input_ids.shape, dtype=torch.float32, device=last_hidden.device)
        if chunks:
            normaliser[predicts] = torch.cat(chunks).float()
        return normaliser

    def _remember(
        self, tokens: TokenBatch, samples: list[int], features: Tensor, last_hidden: Tensor, normaliser: Tensor | None
    ) -> None:
        has_answer = tokens.answer_mask.any(dim=1).tolist()
        for row, (sample, length) in enumerate(zip(samples, tokens.lengths.tolist(), strict=True)):
            # A row that only fills a batch has its answers masked, hence no normalisers worth keeping.
            if sample in self._passes or not has_answer[row]:
                continue
            parts = [features[row, :length], last_hidden[row, :length]]
            parts += [] if normaliser is None else [normaliser[row, :length]]
            size = sum(part.numel() * part.element_size() for part in parts)
            if self._used_bytes + size > self._budget_bytes:
                return
            self._used_bytes += size
            copies = [part.cpu().clone() for part in parts]
            self._passes[sample] = _Pass(copies[0], copies[1], copies[2] if normaliser is not None else None)

    def _from_memory(self, tokens: TokenBatch, samples: list[int]) -> FeatureBatch:
        batch, length = tokens.input_ids.shape
        first = self._passes[samples[0]]
        device = tokens.input_ids.device
        features = first.features.new_zeros(batch, length, first.features.shape[1])
        last_hidden = first.last_hidden.new_zeros(batch, length, first.last_hidden.shape[1])
        normaliser = None if first.log_normaliser is None else first.log_normaliser.new_zeros(batch, length)
        for row, sample in enumerate(samples):
            held = self._passes[sample]
            size = len(held.features)
            features[row, :size], last_hidden[row, :size] = held.features, held.last_hidden
            if normaliser is not None and held.log_normaliser is not None:
                normaliser[row, :size] = held.log_normaliser
        normaliser = None if normaliser is None else normaliser.to(device)
        return FeatureBatch(tokens, features.to(device), last_hidden.to(device), normaliser)
