"""Estimates from round records: acceptance length and its companions, their intervals, paired comparisons.

Pure functions on rounds: a table, or records grouped by prompt (mapping prompt id -> rounds), or one flat list. The
prompt is the unit of resampling everywhere, because rounds of one prompt resemble each other. The words are those of
docs/measuring.md. The module knows neither models nor files. Letters: N rounds, P prompts, K draft tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspec.evaluation.round_table import Rounds, RoundTable, as_table

Interval = tuple[float, float]
Counts = NDArray[np.float64]

RESAMPLES = 2000
_PERCENTILES = (2.5, 97.5)
_CHUNK = 4_000_000  # drawn indices held at once: 32 MB, whatever the number of prompts


class Summary(NamedTuple):
    """All estimates of one draft on one set of prompts; None where nothing was observed."""

    num_prompts: int
    rounds: int
    acceptance_length: float | None
    acceptance_length_ci95: Interval | None
    accepted_drafts: float | None
    survival: list[float | None]
    conditional_acceptance: list[float | None]
    acceptance_rate: float | None
    verified_yield: float | None


class PairedDifference(NamedTuple):
    """Acceptance length of a minus that of b on the same prompts.

    Attributes:
        difference: tau_a - tau_b, both micro-averages.
        ci95: bootstrap interval over prompts; None for fewer than two prompts.
        p_value: two-sided bootstrap p of "no difference"; None for fewer than two prompts.
        num_prompts: prompts that both decoded.
    """

    difference: float
    ci95: Interval | None
    p_value: float | None
    num_prompts: int


def acceptance_length(rounds: Rounds) -> float | None:
    """Return tau: tokens emitted per round, bonus token included, as a micro-average over all rounds."""
    table = as_table(rounds)
    return _ratio(table.emitted.sum(), len(table.emitted))


def accepted_drafts(rounds: Rounds) -> float | None:
    """Return tau - 1, which some engines print as acceptance length."""
    tau = acceptance_length(rounds)
    return None if tau is None else tau - 1


def acceptance_length_ci95(rounds: Rounds, seed: int = 0, resamples: int = RESAMPLES) -> Interval | None:
    """Return the 95 % bootstrap interval of tau over prompts; None for fewer than two prompts with rounds."""
    return ratio_ci95(*_emitted_and_number(as_table(rounds)), seed, resamples)


def ratio_ci95(totals: Counts, counts: Counts, seed: int = 0, resamples: int = RESAMPLES) -> Interval | None:
    """Return the 95 % bootstrap interval of sum(totals) / sum(counts) over prompts, both [P]."""
    return _bootstrap_ci95(totals[:, None], counts[:, None], seed, resamples)[0]


def survival(rounds: Rounds, num_draft_tokens: int) -> list[float | None]:
    """Return for k = 1..K the share of rounds with at least k accepted among those that proposed at least k."""
    table = as_table(rounds)
    shares = []
    for k in range(1, num_draft_tokens + 1):
        is_proposed = table.proposed >= k
        shares.append(_ratio((is_proposed & (table.accepted >= k)).sum(), is_proposed.sum()))
    return shares


def conditional_acceptance(rounds: Rounds, num_draft_tokens: int) -> list[float | None]:
    """Return for k = 1..K the share with token k accepted among rounds that proposed k and accepted 1..k-1."""
    table = as_table(rounds)
    pairs = (_reached_and_kept(table, k) for k in range(1, num_draft_tokens + 1))
    return [_ratio(kept.sum(), reached.sum()) for reached, kept in pairs]


def conditional_acceptance_ci95(
    rounds: Rounds, num_draft_tokens: int, seed: int = 0, resamples: int = RESAMPLES
) -> list[Interval | None]:
    """Return the 95 % bootstrap interval over prompts of every value of `conditional_acceptance`."""
    table = as_table(rounds)
    reached, kept = [], []
    for k in range(1, num_draft_tokens + 1):
        is_reached, is_kept = _reached_and_kept(table, k)
        reached.append(_per_prompt(table, is_reached))
        kept.append(_per_prompt(table, is_kept))
    return _bootstrap_ci95(np.stack(kept, axis=1), np.stack(reached, axis=1), seed, resamples)


def acceptance_rate(rounds: Rounds) -> float | None:
    """Return accepted / proposed draft tokens."""
    table = as_table(rounds)
    return _ratio(table.accepted.sum(), table.proposed.sum())


def verified_yield(rounds: Rounds) -> float | None:
    """Return (accepted + 1) / (proposed + 1) summed over rounds: the rate of the paper's threshold sweep."""
    table = as_table(rounds)
    return _ratio((table.accepted + 1).sum(), (table.proposed + 1).sum())


def acceptance_length_by_length(rounds: Rounds, num_draft_tokens: int) -> list[float | None]:
    """Return for k = 1..K what tau would be if no more than k tokens of each of these blocks were verified.

    The blocks begin where those of K tokens did: this is an estimate, not a second run.
    """
    table = as_table(rounds)
    lengths = range(1, num_draft_tokens + 1)
    return [_ratio(emitted_within(table.accepted, table.emitted, k).sum(), len(table.accepted)) for k in lengths]


def emitted_within(accepted: Any, emitted: Any, length: Any) -> Any:
    """Return what whole blocks would have emitted had only `length` tokens of them been verified.

    That is min(accepted, length) and the bonus token, and none of the latter where the last accepted one is the
    answer's stop token. Numbers or arrays of one shape.
    """
    has_bonus = (emitted > accepted) | (accepted > length)
    return np.minimum(accepted, length) + has_bonus


def median_ci95(values: Sequence[float]) -> Interval | None:
    """Return two of the values between which the median of their distribution lies with at least 95 %.

    Right for any distribution: how many values lie below its median is binomial. None for fewer than six values, whose
    smallest and largest do not hold it so surely.
    """
    ordered, number = sorted(values), len(values)
    place, outside = -1, 0.0
    while 2 * place + 3 < number and outside + math.comb(number, place + 1) / 2**number <= 0.025:
        place += 1
        outside += math.comb(number, place) / 2**number
    return None if place < 0 else (ordered[place], ordered[-1 - place])


def summarise(rounds: Rounds, num_draft_tokens: int, seed: int = 0, resamples: int = RESAMPLES) -> Summary:
    """Return every estimate at once, for one row of a table."""
    table = as_table(rounds)
    return Summary(
        num_prompts=len(table.prompts),
        rounds=len(table.prompt),
        acceptance_length=acceptance_length(table),
        acceptance_length_ci95=acceptance_length_ci95(table, seed, resamples),
        accepted_drafts=accepted_drafts(table),
        survival=survival(table, num_draft_tokens),
        conditional_acceptance=conditional_acceptance(table, num_draft_tokens),
        acceptance_rate=acceptance_rate(table),
        verified_yield=verified_yield(table),
    )


def paired_difference(
    rounds_a: Rounds, rounds_b: Rounds, seed: int = 0, resamples: int = RESAMPLES
) -> PairedDifference:
    """Compare two drafts on the same prompts: each resample draws one set of prompts and uses it for both.

    The p-value counts resamples on the far side of zero, twice, with one added to both counts so that it is never 0.

    Raises:
        ValueError: the two sides do not hold the same prompts, or one of them has no round at all.
    """
    return macro_paired_difference([(rounds_a, rounds_b)], seed, resamples)


def macro_paired_difference(
    pairs: Sequence[tuple[Rounds, Rounds]],
    seed: int = 0,
    resamples: int = RESAMPLES,
    weights: Sequence[float] | None = None,
) -> PairedDifference:
    """Compare two drafts over several sets of prompts, such as the tasks of a domain; prompts are drawn in each set.

    Args:
        pairs: rounds of a and of b on each set.
        seed: of the resampling.
        resamples: how many.
        weights: of the sets; None weighs all alike.

    Raises:
        ValueError: the two sides of a set do not hold the same prompts, or one has no round at all.
    """
    shares = _shares(len(pairs), weights)
    difference, draws, prompts, has_spread = 0.0, np.zeros(resamples), 0, True
    for index, ((rounds_a, rounds_b), share) in enumerate(zip(pairs, shares, strict=True)):
        table_a, table_b = as_table(rounds_a), as_table(rounds_b)
        if table_a.prompts != table_b.prompts:
            only_a = len(set(table_a.prompts) - set(table_b.prompts))
            only_b = len(set(table_b.prompts) - set(table_a.prompts))
            raise ValueError(f"not the same prompts: {only_a} only in a, {only_b} only in b; pass the common ones")
        tau_a, tau_b = acceptance_length(table_a), acceptance_length(table_b)
        if tau_a is None or tau_b is None:
            raise ValueError("one side has no rounds: there is nothing to compare")
        difference += share * (tau_a - tau_b)
        prompts += len(table_a.prompts)
        columns = np.stack([*_emitted_and_number(table_a), *_emitted_and_number(table_b)], axis=1)
        columns = columns[(columns[:, 1] > 0) | (columns[:, 3] > 0)]
        if len(columns) < 2:
            has_spread = False
            continue
        sums = _resampled_sums(columns, [seed, index] if index else seed, resamples)
        with np.errstate(invalid="ignore", divide="ignore"):
            draws += share * (sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3])
    draws = draws[np.isfinite(draws)]
    if not has_spread or not len(draws):
        return PairedDifference(difference, None, None, prompts)
    beyond = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p_value = min(1.0, 2 * (beyond + 1) / (len(draws) + 1))
    return PairedDifference(difference, _interval(draws), p_value, prompts)


def macro_acceptance_length(
    parts: Sequence[Rounds], seed: int = 0, resamples: int = RESAMPLES, weights: Sequence[float] | None = None
) -> tuple[float | None, Interval | None]:
    """Return the mean tau of several sets of prompts and its interval; prompts are drawn anew in each set.

    Args:
        parts: rounds of each set; sets without a round do not count.
        seed: of the resampling.
        resamples: how many.
        weights: of the sets; None weighs all alike.
    """
    tables = [as_table(part) for part in parts]
    chosen = [index for index, table in enumerate(tables) if len(table.prompt)]
    if not chosen:
        return None, None
    shares = _shares(len(chosen), None if weights is None else [weights[index] for index in chosen])
    mean, draws, has_spread = 0.0, np.zeros(resamples), True
    for place, (index, share) in enumerate(zip(chosen, shares, strict=True)):
        emitted, number = _emitted_and_number(tables[index])
        mean += share * float(emitted.sum() / number.sum())
        observed = number > 0
        has_spread = has_spread and int(observed.sum()) > 1
        sums = _resampled_sums(
            np.stack([emitted, number], axis=1)[observed], [seed, place] if place else seed, resamples
        )
        draws += share * sums[:, 0] / sums[:, 1]
    return mean, _interval(draws) if has_spread else None


def macro_average(values: Iterable[float | None]) -> float | None:
    """Return the plain mean of the values that exist: every domain or task weighs the same, whatever its size."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _ratio(total: float, count: float) -> float | None:
    return float(total / count) if count else None


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    given = [1.0] * count if weights is None else list(weights)
    return [weight / sum(given) for weight in given]


def _reached_and_kept(table: RoundTable, k: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    reached = (table.proposed >= k) & (table.accepted >= k - 1)
    return reached, reached & (table.accepted >= k)


def _per_prompt(table: RoundTable, values: NDArray[np.generic]) -> Counts:
    return np.bincount(table.prompt, weights=values, minlength=len(table.prompts)).astype(np.float64)


def _emitted_and_number(table: RoundTable) -> tuple[Counts, Counts]:
    return _per_prompt(table, table.emitted), _per_prompt(table, np.ones(len(table.prompt)))


def _interval(draws: Counts) -> Interval:
    low, high = np.percentile(draws, _PERCENTILES)
    return float(low), float(high)


def _resampled_sums(columns: Counts, seed: int | Sequence[int], resamples: int) -> Counts:
    """Column sums [resamples, C] of prompts [P, C] drawn with replacement."""
    generator = np.random.default_rng(seed)
    prompts = len(columns)
    step = max(1, _CHUNK // prompts)
    sums = []
    for start in range(0, resamples, step):
        drawn = generator.integers(prompts, size=(min(step, resamples - start), prompts))
        # One column at a time: columns[drawn] would hold resamples x prompts x C numbers.
        sums.append(np.stack([column[drawn].sum(axis=1) for column in columns.T], axis=1))
    return np.concatenate(sums)


def _bootstrap_ci95(totals: Counts, counts: Counts, seed: int, resamples: int) -> list[Interval | None]:
    """Percentile intervals of sum(totals) / sum(counts) per column, prompts [P, C] resampled."""
    width = totals.shape[1]
    observed = counts.sum(axis=1) > 0
    if observed.sum() < 2:
        return [None] * width
    sums = _resampled_sums(np.concatenate([totals, counts], axis=1)[observed], seed, resamples)
    intervals: list[Interval | None] = []
    for column in range(width):
        is_defined = sums[:, width + column] > 0
        # A position that only one prompt ever reached says nothing about the spread between prompts.
        if (counts[:, column] > 0).sum() < 2:
            intervals.append(None)
            continue
        intervals.append(_interval(sums[is_defined, column] / sums[is_defined, width + column]))
    return intervals
