"""How many slots of each draft block are verified.

A schedule sees what is known about a slot before its own token is drawn: confidences, the draft's distributions as a
whole, the load. It never sees tokens or the draft's probability of them: a length that depends on a token it cuts off
would change the output's distribution. The schedules that weigh a batch's cost are in deepspec/scheduling/schedules.py.
Letters: B requests, K draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from deepspec.errors import ConfigError

ConfidenceSource = Literal["auto", "head", "max_prob"]


class Situation(NamedTuple):
    """What a schedule may decide by.

    Attributes:
        confidence_logits: [B, K] logits of c_k, the predicted probability that slot k is accepted given that all
            before it were; None for a draft that predicts none.
        max_probs: [B, K] max_v q_k(v), a function of the whole distribution q_k.
        proposed: [B] int64, how many slots each block holds, 0..K; 0 in rows without a request.
        requests: number of active requests.
        context: mean position of the active anchors, in tokens.
        earlier: the same two rounds ago (its own `earlier` is None), or None in the first two rounds.
    """

    confidence_logits: Tensor | None
    max_probs: Tensor
    proposed: Tensor
    requests: int
    context: int = 0
    earlier: Situation | None = None


class Schedule(Protocol):
    """Chooses verification lengths."""

    def lengths(self, situation: Situation) -> Tensor:
        """Choose how many slots of each row are verified, [B] int64, at most `situation.proposed`."""
        ...


@dataclass(frozen=True)
class Confidence:
    """Where the confidence of a slot comes from.

    Attributes:
        source: `head` is the draft's confidence head, `max_prob` the largest probability of q_k; `auto` is the head
            where the draft has one.
        temperatures: K divisors of the logits (STS), or None.
    """

    source: ConfidenceSource = "auto"
    temperatures: tuple[float, ...] | None = None

    def of(self, situation: Situation) -> Tensor:
        """c_k of every slot [B, K]; what is not a number counts as 0.

        Raises:
            ConfigError: the draft has no confidence head, or another number of slots than there are temperatures.
        """
        logits = situation.confidence_logits
        if self.source == "head" and logits is None:
            raise ConfigError(
                "schedule.confidence is 'head', but this draft has no confidence head. Use "
                "schedule.confidence=max_prob (the largest probability of each slot), or a draft trained with "
                "algorithm.confidence_head=true."
            )
        if self.source == "max_prob" or logits is None:
            if self.temperatures is None:
                return situation.max_probs.nan_to_num(0.0)
            logits = torch.logit(situation.max_probs.double(), eps=1e-12)
        if self.temperatures is not None:
            if len(self.temperatures) != logits.shape[1]:
                raise ConfigError(
                    f"the calibration has {len(self.temperatures)} temperatures, but the draft proposes "
                    f"{logits.shape[1]} tokens. Calibrate this draft: deepspec calibrate."
                )
            logits = logits / logits.new_tensor(self.temperatures)
        return logits.sigmoid().nan_to_num(0.0)


RAW_CONFIDENCE = Confidence()


@dataclass(frozen=True)
class FullSchedule:
    """Verify every slot that was proposed."""

    def lengths(self, situation: Situation) -> Tensor:
        """Return `proposed`; see `Schedule.lengths`."""
        return situation.proposed


@dataclass(frozen=True)
class ThresholdSchedule:
    """Cut the block before the first slot whose confidence lies below a threshold.

    Attributes:
        threshold: in [0, 1]; 0 verifies every slot.
        confidence: where c_k comes from.
    """

    threshold: float
    confidence: Confidence = RAW_CONFIDENCE

    def __post_init__(self) -> None:
        """Refuse what is not a probability."""
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"schedule.threshold {self.threshold} is not in [0, 1]. Use schedule=full to verify all.")

    def lengths(self, situation: Situation) -> Tensor:
        """Count the slots before the first unsure one; see `Schedule.lengths`."""
        sure = (self.confidence.of(situation) >= self.threshold).long().cumprod(dim=-1).sum(dim=-1)
        return sure.minimum(situation.proposed)
