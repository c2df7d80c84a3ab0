"""Where features come from, and the source that is a target in the same process.

That target runs once over each micro-batch under inference mode and nothing is written to disk. Passes are kept in
RAM up to a budget, so that the target never runs twice over the same text: not in later epochs, not in the next
algorithm's training, and not at all where it has just generated the text itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from deepspec.data.chat import TokenSample
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch

_ROWS_PER_CHUNK = 128


class TargetPass(NamedTuple):
    """What the target said about one sample of n tokens, for its n or its first n - 1 positions; or about a batch.

    Nothing reads the last position: no label follows it. A batch has B in front of every shape.

    Attributes:
        features: [n, M*H].
        last_hidden: [n, H].
        log_normaliser: [n] fp32, right where the next token is an answer token; or None.
    """

    features: Tensor
    last_hidden: Tensor
    log_normaliser: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.numel() * part.element_size() for part in self if part is not None)

    def row(self, index: int, length: int) -> TargetPass:
        """One sample out of a batch of passes [B, L, ...]."""
        normaliser = None if self.log_normaliser is None else self.log_normaliser[index, :length]
        return TargetPass(self.features[index, :length], self.last_hidden[index, :length], normaliser)

    def copied(self) -> TargetPass:
        """A copy in host memory that shares nothing with this one."""
        normaliser = None if self.log_normaliser is None else self.log_normaliser.cpu().clone()
        return TargetPass(self.features.cpu().clone(), self.last_hidden.cpu().clone(), normaliser)


def content_key(input_ids: Sequence[int]) -> bytes:
    """Name of a sample by its tokens, so that passes are found again whoever made them."""
    return hashlib.blake2b(np.asarray(input_ids, dtype=np.int64).tobytes(), digest_size=16).digest()


class FeatureSource(Protocol):
    """Where a training gets its features: all sources give the same ones, up to the rounding of their storage."""

    def upcoming(self, micro_batches: Sequence[TokenBatch]) -> None:
        """Hear which batches, still on the host, will be completed next, in order; a source may begin to fetch them."""

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        """Add features, last hidden states and, where asked for, log normalisers to a token batch on its device.

        Args:
            tokens: the batch.
            before: the batch completed last: if `tokens` is a further set of anchors of it (the very same
                `sample_index`), its features are taken over.
        """


class PassSink(Protocol):
    """Takes what a target says about samples while it generates them."""

    @property
    def is_on(self) -> bool:
        """Whether anything is taken."""

    def claim(self, target: Target) -> None:
        """Say whose passes are coming."""

    def keep(self, sample: TokenSample, one: TargetPass) -> None:
        """Take what the target said about a sample."""


class FeatureMemory:
    """Target passes kept in RAM by content, up to a budget.

    One memory may serve the answering of prompts and several trainings; a change of target or taps empties it.
    """

    def __init__(self, budget_gib: float) -> None:
        """Set the budget in GiB; 0 remembers nothing."""
        self._budget_bytes = int(budget_gib * 2**30)
        self._used_bytes = 0
        self._made_for: tuple[object, ...] = ()
        self._passes: dict[bytes, TargetPass] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything can be remembered."""
        return self._budget_bytes > 0

    def claim(self, target: Target) -> None:
        """Say whose passes are coming; those of another target, dtype or taps are dropped."""
        made_for = (target.name, target.dtype, target.layer_ids)
        if made_for != self._made_for:
            self._made_for, self._used_bytes = made_for, 0
            self._passes.clear()

    def get(self, key: bytes, needs_log_normaliser: bool) -> TargetPass | None:
        """The pass of a sample, or None where there is none that says enough."""
        held = self._passes.get(key)
        return None if held is None or (needs_log_normaliser and held.log_normaliser is None) else held

    def keep(self, sample: TokenSample, one: TargetPass) -> None:
        """Keep a copy of a sample's pass if it fits."""
        self.remember(content_key(sample.input_ids), one)

    def remember(self, key: bytes, one: TargetPass) -> None:
        """Keep a copy of a pass if it fits."""
        replaced = self._passes.get(key)
        used = self._used_bytes - (0 if replaced is None else replaced.nbytes) + one.nbytes
        if used <= self._budget_bytes:
            self._used_bytes = used
            self._passes[key] = one.copied()


class OnlineFeatures:
    """Completes token batches with the features of a live target."""

    def __init__(
        self,
        target: Target,
        samples: Sequence[TokenSample],
        memory: FeatureMemory,
        *,
        needs_log_normaliser: bool = False,
    ) -> None:
        """Wrap a target.

        Args:
            target: the frozen target.
            samples: what `sample_index` counts.
            memory: of passes; may be shared with other trainings.
            needs_log_normaliser: also compute the logsumexp of the target's logits on answer positions.
        """
        self._target = target
        self._memory = memory
        self._needs_log_normaliser = needs_log_normaliser
        memory.claim(target)
        self._keys = [content_key(sample.input_ids) for sample in samples] if memory.is_on else []

    def upcoming(self, micro_batches: Sequence[TokenBatch]) -> None:
        """Nothing to fetch: the target runs when its turn comes (see deepspec.data.ahead)."""

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        """See `FeatureSource`; the target does not run where features are taken over."""
        if before is not None and before.tokens.sample_index is tokens.sample_index:
            return before._replace(tokens=tokens)
        return FeatureBatch(tokens, *self._made(tokens))

    def _made(self, tokens: TokenBatch) -> TargetPass:
        if not self._memory.is_on:
            return self._run(tokens.input_ids, tokens.answer_mask)
        keys = [self._keys[sample] for sample in tokens.sample_index.tolist()]
        passes = [self._memory.get(key, self._needs_log_normaliser) for key in keys]
        missing = [row for row, held in enumerate(passes) if held is None]
        if missing:
            lengths = tokens.lengths[missing].tolist()
            upto = max(lengths)
            has_answer = tokens.answer_mask[missing].any(dim=1).tolist()
            made = self._run(tokens.input_ids[missing, :upto], tokens.answer_mask[missing, :upto])
            for index, row in enumerate(missing):
                one = made.row(index, lengths[index])
                passes[row] = one
                # A row that only fills a batch has its answers masked, hence no normalisers worth keeping.
                if has_answer[index]:
                    self._memory.remember(keys[row], one)
        whole = [held for held in passes if held is not None]
        if not self._needs_log_normaliser:
            whole = [held._replace(log_normaliser=None) for held in whole]
        return padded(whole, tokens.input_ids.shape[1], tokens.input_ids.device)

    def _run(self, input_ids: Tensor, answer_mask: Tensor) -> TargetPass:
        features, last_hidden = self._target.features(input_ids)
        normaliser = log_normaliser(self._target, answer_mask, last_hidden) if self._needs_log_normaliser else None
        return TargetPass(features, last_hidden, normaliser)


def log_normaliser(target: Target, answer_mask: Tensor, last_hidden: Tensor) -> Tensor:
    """Logsumexp [B, L] fp32 of the logits that predict an answer token; 0 elsewhere, where no loss reads it.

    Args:
        target: whose head is used.
        answer_mask: [B, L]; on the host, nothing waits for the device.
        last_hidden: [B, L, H].
    """
    predicts = torch.zeros_like(answer_mask)
    predicts[:, :-1] = answer_mask[:, 1:]
    places = predicts.flatten().nonzero().squeeze(-1).to(last_hidden.device, non_blocking=True)
    hidden = last_hidden.flatten(0, 1)[places]
    chunks = [target.logits(chunk).logsumexp(dim=-1) for chunk in torch.split(hidden, _ROWS_PER_CHUNK)]
    normaliser = torch.zeros(answer_mask.numel(), dtype=torch.float32, device=last_hidden.device)
    if chunks:
        normaliser[places] = torch.cat(chunks).float()
    return normaliser.view(answer_mask.shape)


def padded(passes: Sequence[TargetPass], length: int, device: torch.device) -> TargetPass:
    """One batch [B, length, ...] out of single passes, zero past their ends."""
    first = passes[0]
    features = first.features.new_zeros(len(passes), length, first.features.shape[1], device=device)
    last_hidden = first.last_hidden.new_zeros(len(passes), length, first.last_hidden.shape[1], device=device)
    normaliser = None if first.log_normaliser is None else torch.zeros(len(passes), length, device=device)
    for row, held in enumerate(passes):
        size = len(held.features)
        features[row, :size], last_hidden[row, :size] = held.features.to(device), held.last_hidden.to(device)
        if normaliser is not None and held.log_normaliser is not None:
            normaliser[row, :size] = held.log_normaliser.to(device)
    return TargetPass(features, last_hidden, normaliser)
