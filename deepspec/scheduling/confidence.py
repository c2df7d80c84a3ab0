"""How good confidences are: calibration error, ranking and squared error, slot by slot and over all slots.

Predictions are the cumulative products a_k, observations whether slots 0..k were all accepted; or c_k against alpha_k.
Pure functions of arrays. Letters: N rounds, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from deepspec.scheduling.records import Flags, Floats, Slots

NUM_BINS = 15
RESAMPLES = 400


class Bin(NamedTuple):
    """One bar of a reliability diagram: mean prediction, mean observation and number of predictions in it."""

    predicted: float
    observed: float
    number: int


class Score(NamedTuple):
    """Quality of probabilities; None where there is nothing to judge by.

    Attributes:
        number: predictions.
        ece: expected calibration error over NUM_BINS bins of equal width.
        auc: ROC-AUC, the probability that an accepted slot ranks above a rejected one; None for graded observations.
        brier: mean squared error.
        predicted: mean prediction.
        observed: mean observation.
        bins: the reliability diagram, empty bins left out.
    """

    number: int
    ece: float | None
    auc: float | None
    brier: float | None
    predicted: float | None
    observed: float | None
    bins: tuple[Bin, ...]


def confidences(logits: Floats, temperatures: Sequence[float] | float | None = None) -> Floats:
    """c_k [N, K] from logits, divided by the temperatures where they are given."""
    divisor: Floats = np.asarray(1.0 if temperatures is None else temperatures, dtype=np.float64)
    found: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits / divisor, -700.0, 700.0)))
    return found


def survivals(logits: Floats, temperatures: Sequence[float] | None = None) -> Floats:
    """a_k [N, K], the cumulative products of c_k."""
    return np.cumprod(confidences(logits, temperatures), axis=1, dtype=np.float64)


def score(predicted: Floats, observed: Floats | Flags) -> Score:
    """Judge predictions [n] by observations [n], accepted or not, or shares in [0, 1]."""
    if not len(predicted):
        return Score(0, None, None, None, None, None, ())
    truth = observed.astype(np.float64)
    number, sum_predicted, sum_observed = _bins(predicted, truth)
    filled = number > 0
    bins = tuple(
        Bin(float(p / n), float(o / n), int(n))
        for n, p, o in zip(number[filled], sum_predicted[filled], sum_observed[filled], strict=True)
    )
    return Score(
        number=len(predicted),
        ece=float(np.abs(sum_predicted - sum_observed).sum() / len(predicted)),
        auc=auc(predicted, truth == 1) if observed.dtype == np.bool_ else None,
        brier=float(((predicted - truth) ** 2).mean()),
        predicted=float(predicted.mean()),
        observed=float(truth.mean()),
        bins=bins,
    )


def calibration_error(predicted: Floats, observed: Floats | Flags) -> float:
    """Mean over predictions of |mean prediction - mean observation| of their bin (Guo et al. 2017)."""
    _, sum_predicted, sum_observed = _bins(predicted, observed.astype(np.float64))
    return float(np.abs(sum_predicted - sum_observed).sum() / max(len(predicted), 1))


def _bins(predicted: Floats, truth: Floats) -> tuple[Floats, Floats, Floats]:
    index = np.clip((predicted * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    number, of_predicted, of_truth = (
        np.bincount(index, weights, NUM_BINS).astype(np.float64) for weights in (np.ones(len(index)), predicted, truth)
    )
    return number, of_predicted, of_truth


def auc(predicted: Floats, observed: Flags) -> float | None:
    """ROC-AUC by ranks, ties counting half; None where all observations are the same."""
    positive = int(observed.sum())
    negative = len(observed) - positive
    if not positive or not negative:
        return None
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][observed].sum())
    return (rank_sum - positive * (positive + 1) / 2) / (positive * negative)


def prefix_scores(slots: Slots, temperatures: Sequence[float] | None = None) -> list[Score]:
    """a_k against observed prefix acceptance: one score a slot, then that of all slots together."""
    predicted = survivals(slots.logits, temperatures)
    per_slot = [
        score(predicted[slots.labelled[:, k], k], slots.accepted[slots.labelled[:, k], k])
        for k in range(predicted.shape[1])
    ]
    return [*per_slot, score(predicted[slots.labelled], slots.accepted[slots.labelled])]


def conditional_scores(slots: Slots, temperatures: Sequence[float] | None = None) -> list[Score]:
    """c_k against alpha_k on slots that were reached: one score a slot, then all together.

    Where alpha was not measured, c_k is judged by whether the slot was accepted.
    """
    predicted = confidences(slots.logits, temperatures)
    reached = slots.labelled.copy()
    reached[:, 1:] &= slots.accepted[:, :-1]
    is_measured = bool(np.isfinite(slots.overlap[reached]).all())
    truth: Floats | Flags = slots.overlap if is_measured else slots.accepted
    per_slot = [score(predicted[reached[:, k], k], truth[reached[:, k], k]) for k in range(predicted.shape[1])]
    return [*per_slot, score(predicted[reached], truth[reached])]


def interval(slots: Slots, statistic: Callable[[Slots], float | None], seed: int = 0) -> tuple[float, float] | None:
    """95 % bootstrap interval of a statistic in 0..1 over conversations; None for fewer than two of them.

    A calibration error of resampled rounds is larger on average, since chance adds to it; the interval is moved back by
    as much, so it says how far the estimate scatters. Chance adds about as much to the estimate itself, above the true
    error, and that is left in both.
    """
    present = np.unique(slots.prompts)
    if len(present) < 2:
        return None
    generator = np.random.default_rng(seed)
    members = {int(prompt): np.flatnonzero(slots.prompts == prompt) for prompt in present}
    values = []
    for _ in range(RESAMPLES):
        drawn = generator.choice(present, len(present))
        index = np.concatenate([members[int(prompt)] for prompt in drawn])
        value = statistic(slots.rows(index))
        if value is not None:
            values.append(value)
    if not values:
        return None
    estimate = statistic(slots)
    bias = 0.0 if estimate is None else float(np.mean(values)) - estimate
    low, high = np.clip(np.percentile(values, (2.5, 97.5)) - bias, 0.0, 1.0)
    return float(low), float(high)
