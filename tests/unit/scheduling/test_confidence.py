"""Scores of confidences against naive loops and known cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from made_up_rounds import make_records
from scipy.stats import mannwhitneyu

from deepspec.scheduling.confidence import (
    NUM_BINS,
    auc,
    calibration_error,
    conditional_scores,
    interval,
    prefix_scores,
    score,
    survivals,
)
from deepspec.scheduling.records import slots_of


def naive_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for one, truth in zip(predicted, observed, strict=True):
        bins.setdefault(min(int(one * NUM_BINS), NUM_BINS - 1), []).append((float(one), bool(truth)))
    total = 0.0
    for members in bins.values():
        gap = sum(one for one, _ in members) / len(members) - sum(truth for _, truth in members) / len(members)
        total += abs(gap) * len(members) / len(predicted)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_calibration_error_equals_a_loop_over_bins(seed: int) -> None:
    generator = np.random.default_rng(seed)
    predicted = np.round(generator.random(200), 1 + seed)
    observed = generator.random(200) < predicted
    assert calibration_error(predicted, observed) == pytest.approx(naive_error(predicted, observed), abs=1e-12)
    assert calibration_error(np.array([0.0, 1.0]), np.array([False, True])) == 0.0
    assert calibration_error(np.array([1.0, 1.0]), np.array([False, True])) == 0.5


@pytest.mark.parametrize("digits", [1, 6])
def test_auc_counts_pairs_and_half_the_ties(digits: int) -> None:
    generator = np.random.default_rng(digits)
    predicted = np.round(generator.random(60), digits)
    observed = generator.random(60) < predicted
    pairs = itertools.product(predicted[observed], predicted[~observed])
    wins = [1.0 if one > other else 0.5 if one == other else 0.0 for one, other in pairs]
    assert auc(predicted, observed) == pytest.approx(np.mean(wins), abs=1e-12)
    statistic = mannwhitneyu(predicted[observed], predicted[~observed]).statistic
    assert auc(predicted, observed) == pytest.approx(statistic / len(wins), abs=1e-12)
    assert auc(predicted, np.ones(60, dtype=bool)) is None


def test_confidences_that_tell_the_truth_have_no_calibration_error_and_those_that_shout_do() -> None:
    honest = slots_of([make_records(200, 40, 3)], "head")
    shouting = slots_of([make_records(200, 40, 3, sharpness=(4.0, 4.0, 4.0))], "head")
    # 8,000 rounds in 15 bins: the error of chance alone is about sqrt(0.1 / 533) = 0.014.
    assert max(one.ece or 0 for one in prefix_scores(honest)) < 0.025
    assert (prefix_scores(shouting)[0].ece or 0) > 0.1
    # The order within a slot stays, and with it the AUC.
    assert prefix_scores(shouting)[0].auc == pytest.approx(prefix_scores(honest)[0].auc, abs=1e-12)
    assert (prefix_scores(honest)[0].auc or 0) > 0.75


def test_survivals_are_running_products() -> None:
    logits = np.log(np.array([[0.9, 0.5, 0.2]]) / np.array([[0.1, 0.5, 0.8]]))
    assert survivals(logits)[0].tolist() == pytest.approx([0.9, 0.45, 0.09])
    assert survivals(logits, (1.0, 1e9, 1.0))[0].tolist() == pytest.approx([0.9, 0.45, 0.09])


def test_conditional_scores_take_reached_slots_and_measured_overlaps() -> None:
    record = make_records(4, 30, 3)
    slots = slots_of([record], "head")
    found = conditional_scores(slots)
    reached = [sum(one.accepted >= k for rounds in record.rounds.values() for one in rounds) for k in range(3)]
    assert [one.number for one in found] == [*reached, sum(reached)]
    # The made-up head says alpha itself.
    assert all((one.brier or 0) < 1e-20 for one in found)
    without = slots._replace(overlap=np.full_like(slots.overlap, np.nan))
    assert (conditional_scores(without)[0].brier or 0) > 0.05


def test_slots_behind_an_accepted_stop_token_have_no_label() -> None:
    record = make_records(1, 1, 4, chance=0.5)
    (stopped,) = record.rounds["p0"]
    record.rounds["p0"][0] = stopped._replace(proposed=2, accepted=2, ended_by="stop", emitted=2, overlap=())
    slots = slots_of([record], "head")
    assert slots.labelled.tolist() == [[True, True, False, False]]
    assert [one.number for one in prefix_scores(slots)] == [1, 1, 0, 0, 2]
    assert prefix_scores(slots)[2].ece is None


def test_interval_over_conversations_holds_the_estimate_and_needs_two() -> None:
    slots = slots_of([make_records(30, 20, 2)], "head")
    found = interval(slots, lambda rows: float(rows.accepted[:, 0].mean()))
    assert found is not None
    assert found[0] < slots.accepted[:, 0].mean() < found[1]
    assert interval(slots.rows(slots.prompts == 0), lambda rows: 1.0) is None


def test_the_score_of_nothing_is_empty() -> None:
    assert score(np.array([]), np.array([], dtype=bool)).number == 0
