"""Verification lengths chosen from confidences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepspec.decoding.schedule import Confidence, FullSchedule, Schedule, Situation, ThresholdSchedule
from deepspec.errors import ConfigError

CONFIDENCE = torch.tensor([[0.98, 0.95, 0.91, 0.88, 0.62], [0.9, 0.2, 0.9, 0.9, 0.9], [0.1, 1.0, 1.0, 1.0, 1.0]])


def situation(confidence: Tensor | None, proposed: list[int], max_probs: Tensor | None = None) -> Situation:
    logits = None if confidence is None else torch.logit(confidence)
    probs = torch.zeros(len(proposed), 5) if max_probs is None else max_probs
    return Situation(logits, probs, torch.tensor(proposed), len(proposed))


def test_full_schedule_verifies_what_was_proposed_with_or_without_confidence() -> None:
    schedule: Schedule = FullSchedule()
    assert schedule.lengths(situation(CONFIDENCE, [5, 0, 3])).tolist() == [5, 0, 3]
    assert schedule.lengths(situation(None, [5, 0, 3])).tolist() == [5, 0, 3]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.0, [5, 5, 5]), (0.5, [5, 1, 0]), (0.9, [3, 1, 0]), (0.94, [2, 0, 0]), (1.0, [0, 0, 0])],
)
def test_threshold_schedule_cuts_before_the_first_unsure_slot(threshold: float, expected: list[int]) -> None:
    # 1 - 0.9 is not exact, and neither is a logit.
    lowered = ThresholdSchedule(max(threshold - 1e-6, 0.0)) if threshold < 1 else ThresholdSchedule(1.0)
    assert lowered.lengths(situation(CONFIDENCE, [5, 5, 5])).tolist() == expected


def test_threshold_schedule_never_exceeds_what_was_proposed() -> None:
    assert ThresholdSchedule(0.5).lengths(situation(CONFIDENCE, [2, 5, 0])).tolist() == [2, 1, 0]


def test_the_articles_block_of_confidences_above_the_threshold_is_verified_whole() -> None:
    assert ThresholdSchedule(0.6).lengths(situation(CONFIDENCE[:1], [5])).tolist() == [5]


def test_threshold_schedule_ignores_everything_past_its_cut() -> None:
    other = CONFIDENCE.clone()
    other[1, 2:] = 0.0
    schedule = ThresholdSchedule(0.5)
    both = [schedule.lengths(situation(values, [5, 5, 5])).tolist() for values in (other, CONFIDENCE)]
    assert both[0] == both[1]


def test_threshold_schedule_cuts_before_a_confidence_that_is_not_a_number() -> None:
    confidence = torch.tensor([[0.9, math.nan, 0.9]])
    assert ThresholdSchedule(0.1).lengths(situation(confidence, [3])).tolist() == [1]


def test_without_a_head_the_largest_probability_of_each_slot_is_the_confidence() -> None:
    probs = torch.tensor([[0.9, 0.6, 0.4, 0.9, 0.9]])
    assert ThresholdSchedule(0.5).lengths(situation(None, [5], probs)).tolist() == [2]
    both = situation(CONFIDENCE[:1], [5], probs)
    assert ThresholdSchedule(0.5).lengths(both).tolist() == [5]
    assert ThresholdSchedule(0.5, Confidence("max_prob")).lengths(both).tolist() == [2]


def test_a_head_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.confidence is 'head', but this draft has no confidence head"):
        ThresholdSchedule(0.5, Confidence("head")).lengths(situation(None, [5]))


@pytest.mark.parametrize("source", ["head", "max_prob"])
def test_temperatures_divide_the_logits_of_either_source(source: str) -> None:
    values = torch.tensor([[0.9, 0.8, 0.7]])
    temperatures = (1.0, 2.0, 0.5)
    confidence = Confidence(source, temperatures)  # type: ignore[arg-type]
    found = confidence.of(Situation(torch.logit(values), values, torch.tensor([3]), 1))
    expected = [1 / (1 + ((1 - c) / c) ** (1 / t)) for c, t in zip(values[0].tolist(), temperatures, strict=True)]
    assert found[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_temperatures_of_another_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 temperatures, but the draft proposes 5 tokens"):
        Confidence("head", (1.0, 1.0)).of(situation(CONFIDENCE, [5, 5, 5]))


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan])
def test_threshold_outside_the_unit_interval_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.threshold"):
        ThresholdSchedule(threshold)
