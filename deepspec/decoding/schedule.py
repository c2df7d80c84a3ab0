"""How many slots of each draft block are verified.

A schedule sees confidences and nothing of tokens or of the draft's probability of them: a length that depends on a
token it cuts off would change the output's distribution. Letters: B requests, K draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deepspec.errors import ConfigError


class Schedule(Protocol):
    """Chooses verification lengths."""

    def lengths(self, confidence: Tensor | None, proposed: Tensor) -> Tensor:
        """Choose how many slots of each row are verified.

        Args:
            confidence: [B, K] c_k, the predicted probability that slot k is accepted given that all before it were;
                None for a draft that predicts none.
            proposed: [B] int64, how many slots each draft block holds, 0..K.

        Returns:
            [B] int64, at most `proposed`.
        """
        ...


@dataclass(frozen=True)
class FullSchedule:
    """Verify every slot that was proposed."""

    def lengths(self, confidence: Tensor | None, proposed: Tensor) -> Tensor:
        """Return `proposed`; see `Schedule.lengths`."""
        return proposed


@dataclass(frozen=True)
class ThresholdSchedule:
    """Cut the block before the first slot whose confidence lies below a threshold.

    Attributes:
        threshold: in [0, 1]; 0 verifies every slot.
    """

    threshold: float

    def __post_init__(self) -> None:
        """Refuse what is not a probability."""
        if not 0 <= self.threshold <= 1:
            raise ConfigError(
                f"confidence_threshold {self.threshold} is not in [0, 1]. Use null to verify every draft token."
            )

    def lengths(self, confidence: Tensor | None, proposed: Tensor) -> Tensor:
        """Count the slots before the first unsure one; see `Schedule.lengths`.

        Raises:
            ConfigError: the draft predicts no confidence.
        """
        if confidence is None:
            raise ConfigError(
                f"confidence_threshold is {self.threshold}, but this draft has no confidence head. "
                "Use confidence_threshold=null, or a draft trained with algorithm.confidence_head=true."
            )
        sure = (confidence >= self.threshold).long().cumprod(dim=-1).sum(dim=-1)
        return sure.minimum(proposed)
