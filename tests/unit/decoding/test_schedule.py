"""Verification lengths chosen from confidences."""

from __future__ import annotations

import math

import pytest
import torch

from deepspec.decoding.schedule import FullSchedule, Schedule, ThresholdSchedule
from deepspec.errors import ConfigError

CONFIDENCE = torch.tensor([[0.98, 0.95, 0.91, 0.88, 0.62], [0.9, 0.2, 0.9, 0.9, 0.9], [0.1, 1.0, 1.0, 1.0, 1.0]])
PROPOSED = torch.tensor([5, 5, 5])


def test_full_schedule_verifies_what_was_proposed_with_or_without_confidence() -> None:
    schedule: Schedule = FullSchedule()
    proposed = torch.tensor([5, 0, 3])
    assert schedule.lengths(CONFIDENCE, proposed).tolist() == [5, 0, 3]
    assert schedule.lengths(None, proposed).tolist() == [5, 0, 3]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.0, [5, 5, 5]), (0.5, [5, 1, 0]), (0.9, [3, 1, 0]), (0.95, [2, 0, 0]), (1.0, [0, 0, 0])],
)
def test_threshold_schedule_cuts_before_the_first_unsure_slot(threshold: float, expected: list[int]) -> None:
    schedule: Schedule = ThresholdSchedule(threshold)
    assert schedule.lengths(CONFIDENCE, PROPOSED).tolist() == expected


def test_threshold_schedule_never_exceeds_what_was_proposed() -> None:
    assert ThresholdSchedule(0.5).lengths(CONFIDENCE, torch.tensor([2, 5, 0])).tolist() == [2, 1, 0]


def test_threshold_schedule_ignores_everything_past_its_cut() -> None:
    other = CONFIDENCE.clone()
    other[1, 2:] = 0.0
    schedule = ThresholdSchedule(0.5)
    assert torch.equal(schedule.lengths(other, PROPOSED), schedule.lengths(CONFIDENCE, PROPOSED))


def test_threshold_schedule_cuts_before_a_confidence_that_is_not_a_number() -> None:
    confidence = torch.tensor([[0.9, math.nan, 0.9]])
    assert ThresholdSchedule(0.0).lengths(confidence, torch.tensor([3])).tolist() == [1]


def test_threshold_schedule_refuses_a_draft_without_confidence() -> None:
    with pytest.raises(ConfigError, match=r"confidence_threshold is 0\.5, but this draft has no confidence head"):
        ThresholdSchedule(0.5).lengths(None, PROPOSED)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan])
def test_threshold_outside_the_unit_interval_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match="confidence_threshold"):
        ThresholdSchedule(threshold)
