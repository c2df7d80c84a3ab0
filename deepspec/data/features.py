"""Features from a target that runs in the same process.

The target runs once over each micro-batch under inference mode and nothing is written to disk. Passes are kept in RAM
up to a budget, so that later epochs over the same samples need no second target pass.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class FeatureMemory:
    """Target passes kept in RAM, by sample, up to a budget.

    One memory may serve several trainings after each other; passes of other data, taps or needs are dropped.
    """

    def __init__(self, budget_gib: float) -> None:
        """Set the budget in GiB; 0 remembers nothing."""
        self._budget_bytes = int(budget_gib * 2**30)
        self._used_bytes = 0
        self._made_for: tuple[object, ...] = ()
        self.passes: dict[int, _Pass] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything can be remembered."""
        return self._budget_bytes > 0

    def claim(self, *made_for: object) -> None:
        """Say what the coming passes are made for; a change empties the memory."""
        if made_for != self._made_for:
            self._made_for, self._used_bytes = made_for, 0
            self.passes.clear()

    def remember(self, sample: int, parts: Sequence[Tensor]) -> None:
        """Keep a copy of a pass (features, last hidden states and perhaps log normalisers) if it fits."""
        size = sum(part.numel() * part.element_size() for part in parts)
        if sample in self.passes or self._used_bytes + size > self._budget_bytes:
            return
        self._used_bytes += size
        copies = [part.cpu().clone() for part in parts]
        self.passes[sample] = _Pass(copies[0], copies[1], copies[2] if len(copies) > 2 else None)


class OnlineFeatures:
    """Completes token batches with the features of a live target."""

    def __init__(
        self, target: Target, memory: FeatureMemory, *, data: str = "", needs_log_normaliser: bool = False
    ) -> None:
        """Wrap a target.

        Args:
            target: the frozen target.
            memory: of passes; may be shared with other trainings.
            data: fingerprint of the samples that `sample_index` counts.
            needs_log_normaliser: also compute the logsumexp of the target's logits on answer positions.
        """
        self._target = target
        self._memory = memory
        self._needs_log_normaliser = needs_log_normaliser
        memory.claim(target.name, target.dtype, target.layer_ids, data, needs_log_normaliser)

    def complete(self, tokens: TokenBatch) -> FeatureBatch:
        """Add features, last hidden states and, where asked for, log normalisers to a token batch on its device."""
        samples = tokens.sample_index.tolist() if self._memory.is_on else []
        if samples and all(sample in self._memory.passes for sample in samples):
            return self._from_memory(tokens, samples)
        features, last_hidden = self._target.features(tokens.input_ids)
        normaliser = self._log_normaliser(tokens, last_hidden) if self._needs_log_normaliser else None
        if samples:
            self._remember(tokens, samples, features, last_hidden, normaliser)
        return FeatureBatch(tokens, features, last_hidden, normaliser)

    def _log_normaliser(self, tokens: TokenBatch, last_hidden: Tensor) -> Tensor:
        """Logsumexp of the logits that predict an answer token; 0 elsewhere, where no loss reads it."""
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
            if has_answer[row]:
                parts = [features[row, :length], last_hidden[row, :length]]
                self._memory.remember(sample, parts if normaliser is None else [*parts, normaliser[row, :length]])

    def _from_memory(self, tokens: TokenBatch, samples: list[int]) -> FeatureBatch:
        batch, length = tokens.input_ids.shape
        first = self._memory.passes[samples[0]]
        device = tokens.input_ids.device
        features = first.features.new_zeros(batch, length, first.features.shape[1])
        last_hidden = first.last_hidden.new_zeros(batch, length, first.last_hidden.shape[1])
        normaliser = None if first.log_normaliser is None else first.log_normaliser.new_zeros(batch, length)
        for row, sample in enumerate(samples):
            held = self._memory.passes[sample]
            size = len(held.features)
            features[row, :size], last_hidden[row, :size] = held.features, held.last_hidden
            if normaliser is not None and held.log_normaliser is not None:
                normaliser[row, :size] = held.log_normaliser
        normaliser = None if normaliser is None else normaliser.to(device)
        return FeatureBatch(tokens, features.to(device), last_hidden.to(device), normaliser)
