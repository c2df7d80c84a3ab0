"""The small values that cross the seams between data, models, training and decoding.

They are NamedTuples because engine hooks (DDP, FSDP2, DeepSpeed) walk tuples and see a dataclass as one opaque leaf.
Letters: B sequences, L positions, A anchors, K draft tokens, M taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenBatch(NamedTuple):
    """One micro-batch of tokenised samples, right-padded.

    Attributes:
        input_ids: [B, L] token ids; positions at or past `lengths` hold a pad id and are never read.
        lengths: [B] number of real tokens of each sample.
        answer_mask: [B, L] bool, True on the tokens that the target generated (the supervised ones).
        anchors: [B, A] positions from which blocks are drafted, ascending; zero where `anchor_mask` is False.
        anchor_mask: [B, A] bool, False on the slots that fill a row up to A.
        sample_index: [B] index of each sample in its dataset, for error messages.
    """

    input_ids: Tensor
    lengths: Tensor
    answer_mask: Tensor
    anchors: Tensor
    anchor_mask: Tensor
    sample_index: Tensor


class SlotPlan(NamedTuple):
    """Which slots of a batch teach: a function of its tokens, made on the host so that no forward waits for the device.

    Attributes:
        slots: [R] supervised slots as indices into the flat B * A * K, in the order of their teachers' positions.
        taught_by: [R] the position whose target distribution teaches each, as an index into the flat B * L, ascending;
            where the plan was made on the host it stays there.
    """

    slots: Tensor
    taught_by: Tensor


class FeatureBatch(NamedTuple):
    """A token batch together with what the frozen target says about it.

    Attributes:
        tokens: the token batch.
        features: [B, L, M*H] tapped decoder-layer outputs, concatenated on the last axis.
        last_hidden: [B, L, H] output of the target's final norm.
        log_normaliser: [B, L] fp32 logsumexp of the target's logits, for drafts with a reduced vocabulary; else None.
        plan: which slots teach; None has the forward find out, for which it waits for the device.
    """

    tokens: TokenBatch
    features: Tensor
    last_hidden: Tensor
    log_normaliser: Tensor | None = None
    plan: SlotPlan | None = None


class Ratio(NamedTuple):
    """A mean whose sum and count are still apart, so that it can be summed over micro-batches and ranks."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # a field named as a method of tuple


class LossTerms(NamedTuple):
    """What one forward of a draft model returns in training.

    Attributes:
        objective: scalar to differentiate: sum over losses of `coefficients[name] * losses[name].total`.
        losses: weighted sums of each loss and the weights they were summed with, detached.
        metrics: further means (per-slot acceptance and so on), detached.
    """

    objective: Tensor
    losses: dict[str, Ratio]
    metrics: dict[str, Ratio]
