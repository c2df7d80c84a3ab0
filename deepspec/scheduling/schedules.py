"""Schedules that weigh the load and the cost of a step, and the schedule that a configuration names.

All are frozen values and pure functions of a situation, so the decoder and the simulator play the very same ones.
Letters: B requests, K draft tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspec.config_schedule import ScheduleConfig
from deepspec.decoding.schedule import (
    RAW_CONFIDENCE,
    Confidence,
    FullSchedule,
    Schedule,
    Situation,
    ThresholdSchedule,
)
from deepspec.errors import ConfigError
from deepspec.scheduling.allocation import best_number, causal_number, first_slots, ranked, survival
from deepspec.scheduling.calibration import chosen_temperatures
from deepspec.scheduling.cost import CostCurve, Lookup, read_curve


@dataclass(frozen=True)
class FixedSchedule:
    """The same number of slots for every request, chosen from the load alone.

    Attributes:
        windows: (from so many active requests on, so many slots), the first for one request, ascending.
    """

    windows: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Refuse windows that leave a load without a length."""
        loads = [load for load, _ in self.windows]
        if not loads or loads[0] != 1 or loads != sorted(set(loads)) or min(slots for _, slots in self.windows) < 0:
            raise ConfigError(
                f"schedule.windows {[list(window) for window in self.windows]} must be pairs [requests, slots] that "
                "begin with 1 request and ascend, such as [[1,5],[16,2]]."
            )

    def window(self, requests: int) -> int:
        """Slots of each request at a load."""
        return [slots for load, slots in self.windows if load <= max(requests, 1)][-1]

    def lengths(self, situation: Situation) -> Tensor:
        """The window of the present load; see `Schedule.lengths`."""
        return situation.proposed.clamp_max(self.window(situation.requests))


@dataclass(frozen=True)
class ThroughputSchedule:
    """Algorithm 1: one budget for the batch, spent on the likeliest slots as long as each raises tokens per second.

    Attributes:
        curve: what a step costs.
        confidence: where c_k comes from.
        lookup: how the curve is read between its points.
        with_draft: count the time of the draft as part of a step, where the curve knows it.
    """

    curve: CostCurve
    confidence: Confidence = RAW_CONFIDENCE
    lookup: Lookup = "left"
    with_draft: bool = True

    def lengths(self, situation: Situation) -> Tensor:
        """Spend the budget; see `Schedule.lengths`."""
        chances = survival(self.confidence.of(situation), situation.proposed)
        descending, order = ranked(chances)
        number = causal_number(descending, situation.requests, _rates(self, situation, chances))
        return first_slots(order, number, *chances.shape)


@dataclass(frozen=True)
class AsynchronousSchedule:
    """A budget from confidences two rounds old, spent on the slots that are likeliest now.

    The budget needs no causal stop, since it knows nothing of the present round; an engine can compute it while the
    round before runs. In the first two rounds everything is verified. Where the number of requests has changed since,
    the budget grows or shrinks with it.

    Attributes: as those of ThroughputSchedule.
    """

    curve: CostCurve
    confidence: Confidence = RAW_CONFIDENCE
    lookup: Lookup = "left"
    with_draft: bool = True

    def lengths(self, situation: Situation) -> Tensor:
        """Spend the budget of two rounds ago; see `Schedule.lengths`."""
        earlier = situation.earlier
        if earlier is None:
            return situation.proposed
        before = survival(self.confidence.of(earlier), earlier.proposed)
        budget = best_number(ranked(before)[0], earlier.requests, _rates(self, earlier, before))
        budget = budget * situation.requests // earlier.requests
        chances = survival(self.confidence.of(situation), situation.proposed)
        # A slot of survival 0 is never worth its place.
        budget = budget.minimum((chances > 0).sum())
        return first_slots(ranked(chances)[1], budget, *chances.shape)


def _rates(schedule: ThroughputSchedule | AsynchronousSchedule, situation: Situation, chances: Tensor) -> Tensor:
    # A curve has few contexts: rounding keeps the table of rates from being made anew every round.
    context = max((known for known in schedule.curve.contexts if known <= situation.context), default=0)
    rates = schedule.curve.rates(situation.requests, chances.numel(), context, schedule.lookup, schedule.with_draft)
    return torch.tensor(rates, dtype=torch.float64, device=chances.device)


def schedule_id(schedule: Schedule | None) -> str:
    """Changes whenever anything does that a schedule decides by, temperatures and the points of its curve included.

    Files of the same name may hold others later, so their content counts. Empty where everything is verified.
    """
    if schedule is None or isinstance(schedule, FullSchedule):
        return ""
    # All schedules are frozen values: their text is their content.
    return hashlib.sha256(repr(schedule).encode()).hexdigest()[:16]


def make_schedule(
    config: ScheduleConfig,
    folder: Path,
    weights: str,
    has_head: bool,
    samplings: Sequence[Mapping[str, Any]],
) -> Schedule:
    """The schedule that a configuration names, for one draft.

    Args:
        config: the group `schedule`.
        folder: the draft's checkpoint, where its calibration lies.
        weights: the draft's `weights_id`, which the calibration must have been made with.
        has_head: whether the draft has a confidence head.
        samplings: what it will decode with, which the calibration must have been fitted under.

    Raises:
        ConfigError: a setting is not possible.
        DataError: the curve or the calibration cannot be read, or belongs to another draft or sampling.
    """
    if config.name == "full":
        return FullSchedule()
    if config.name == "fixed":
        return FixedSchedule(config.windows)
    if config.confidence == "head" and not has_head:
        raise ConfigError(
            f"schedule.confidence is 'head', but {folder} has no confidence head. Use schedule.confidence=max_prob "
            "(the largest probability of each slot), or a draft trained with algorithm.confidence_head=true."
        )
    source = config.confidence if config.confidence != "auto" else "head" if has_head else "max_prob"
    confidence = Confidence(source, chosen_temperatures(config.calibration, folder, source, weights, samplings))
    if config.name == "threshold":
        return ThresholdSchedule(config.threshold, confidence)
    kind = ThroughputSchedule if config.name == "throughput" else AsynchronousSchedule
    return kind(read_curve(config.curve), confidence, config.lookup, config.with_draft)
