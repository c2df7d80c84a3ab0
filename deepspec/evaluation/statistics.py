"""Estimates from round records: acceptance length and its companions, their intervals, paired comparisons.

Pure functions on rounds, either grouped by prompt (mapping prompt id -> rounds) or as one flat list. The prompt is the
unit of resampling everywhere, because rounds of one prompt resemble each other. The words are those of
docs/measuring.md. The module knows neither models nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspec.decoding.rounds import Round

Rounds = Mapping[str, Sequence[Round]] | Sequence[Round]
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


def group_by_prompt(rounds: Rounds) -> dict[str, list[Round]]:
    """Return the rounds of each prompt, prompts sorted by id so that no result depends on the order of decoding."""
    if isinstance(rounds, Mapping):
        return {prompt: list(rounds[prompt]) for prompt in sorted(rounds)}
    groups: dict[str, list[Round]] = {}
    for record in rounds:
        groups.setdefault(record.prompt_id, []).append(record)
    return {prompt: groups[prompt] for prompt in sorted(groups)}


def acceptance_length(rounds: Rounds) -> float | None:
    """Return tau: tokens emitted per round, bonus token included, as a micro-average over all rounds."""
    records = _flat(rounds)
    return _ratio(sum(record.emitted for record in records), len(records))


def accepted_drafts(rounds: Rounds) -> float | None:
    """Return tau - 1, which some engines print as acceptance length."""
    tau = acceptance_length(rounds)
    return None if tau is None else tau - 1


def acceptance_length_ci95(rounds: Rounds, seed: int = 0, resamples: int = RESAMPLES) -> Interval | None:
    """Return the 95 % bootstrap interval of tau over prompts; None for fewer than two prompts with rounds."""
    emitted, number = _emitted_and_number(group_by_prompt(rounds).values())
    return _bootstrap_ci95(emitted[:, None], number[:, None], seed, resamples)[0]


def survival(rounds: Rounds, num_draft_tokens: int) -> list[float | None]:
    """Return for k = 1..K the share of rounds with at least k accepted among those that proposed at least k."""
    accepted, proposed = _accepted_and_proposed(_flat(rounds))
    positions = range(1, num_draft_tokens + 1)
    return [_ratio(int(((accepted >= k) & (proposed >= k)).sum()), int((proposed >= k).sum())) for k in positions]


def conditional_acceptance(rounds: Rounds, num_draft_tokens: int) -> list[float | None]:
    """Return for k = 1..K the share with token k accepted among rounds that proposed k and accepted 1..k-1."""
    accepted, proposed = _accepted_and_proposed(_flat(rounds))
    shares: list[float | None] = []
    for k in range(1, num_draft_tokens + 1):
        reached = (proposed >= k) & (accepted >= k - 1)
        shares.append(_ratio(int((reached & (accepted >= k)).sum()), int(reached.sum())))
    return shares


def conditional_acceptance_ci95(
    rounds: Rounds, num_draft_tokens: int, seed: int = 0, resamples: int = RESAMPLES
) -> list[Interval | None]:
    """Return the 95 % bootstrap interval over prompts of every value of `conditional_acceptance`."""
    groups = [records for records in group_by_prompt(rounds).values() if records]
    kept = np.zeros((len(groups), num_draft_tokens))
    reached = np.zeros((len(groups), num_draft_tokens))
    for row, records in enumerate(groups):
        accepted, proposed = _accepted_and_proposed(records)
        for k in range(1, num_draft_tokens + 1):
            is_reached = (proposed >= k) & (accepted >= k - 1)
            reached[row, k - 1] = is_reached.sum()
            kept[row, k - 1] = (is_reached & (accepted >= k)).sum()
    return _bootstrap_ci95(kept, reached, seed, resamples)


def acceptance_rate(rounds: Rounds) -> float | None:
    """Return accepted / proposed draft tokens."""
    records = _flat(rounds)
    return _ratio(sum(record.accepted for record in records), sum(record.proposed for record in records))


def verified_yield(rounds: Rounds) -> float | None:
    """Return (accepted + 1) / (proposed + 1) summed over rounds: the rate of the paper's threshold sweep."""
    records = _flat(rounds)
    return _ratio(sum(record.accepted + 1 for record in records), sum(record.proposed + 1 for record in records))


def summarise(rounds: Rounds, num_draft_tokens: int, seed: int = 0, resamples: int = RESAMPLES) -> Summary:
    """Return every estimate at once, for one row of a table."""
    groups = group_by_prompt(rounds)
    return Summary(
        num_prompts=len(groups),
        rounds=sum(len(records) for records in groups.values()),
        acceptance_length=acceptance_length(groups),
        acceptance_length_ci95=acceptance_length_ci95(groups, seed, resamples),
        accepted_drafts=accepted_drafts(groups),
        survival=survival(groups, num_draft_tokens),
        conditional_acceptance=conditional_acceptance(groups, num_draft_tokens),
        acceptance_rate=acceptance_rate(groups),
        verified_yield=verified_yield(groups),
    )


def paired_difference(
    rounds_a: Rounds, rounds_b: Rounds, seed: int = 0, resamples: int = RESAMPLES
) -> PairedDifference:
    """Compare two drafts on the same prompts: each resample draws one set of prompts and uses it for both.

    The p-value counts resamples on the far side of zero, twice, with one added to both counts so that it is never 0.

    Raises:
        ValueError: the two sides do not hold the same prompts, or one of them has no round at all.
    """
    groups_a, groups_b = group_by_prompt(rounds_a), group_by_prompt(rounds_b)
    if groups_a.keys() != groups_b.keys():
        only_a, only_b = len(groups_a.keys() - groups_b.keys()), len(groups_b.keys() - groups_a.keys())
        raise ValueError(f"not the same prompts: {only_a} only in a, {only_b} only in b; pass the common ones")
    tau_a, tau_b = acceptance_length(groups_a), acceptance_length(groups_b)
    if tau_a is None or tau_b is None:
        raise ValueError("one side has no rounds: there is nothing to compare")
    difference = tau_a - tau_b
    emitted_a, number_a = _emitted_and_number(groups_a.values())
    emitted_b, number_b = _emitted_and_number(groups_b.values())
    has_rounds = (number_a > 0) | (number_b > 0)
    if has_rounds.sum() < 2:
        return PairedDifference(difference, None, None, len(groups_a))
    columns = np.stack([emitted_a, number_a, emitted_b, number_b], axis=1)[has_rounds]
    sums = _resampled_sums(columns, seed, resamples)
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
    draws = draws[np.isfinite(draws)]
    low, high = np.percentile(draws, _PERCENTILES)
    beyond = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p_value = min(1.0, 2 * (beyond + 1) / (len(draws) + 1))
    return PairedDifference(difference, (float(low), float(high)), p_value, len(groups_a))


def acceptance_length_by_domain(rounds: Rounds, domains: Mapping[str, str]) -> dict[str, float | None]:
    """Return tau of each domain, domains sorted by name.

    Args:
        rounds: the rounds of all domains.
        domains: domain of every prompt id.
    """
    parts: dict[str, dict[str, list[Round]]] = {}
    for prompt, records in group_by_prompt(rounds).items():
        parts.setdefault(domains[prompt], {})[prompt] = records
    return {domain: acceptance_length(parts[domain]) for domain in sorted(parts)}


def macro_average(values: Iterable[float | None]) -> float | None:
    """Return the plain mean of the values that exist: every domain or task weighs the same, whatever its size."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _flat(rounds: Rounds) -> list[Round]:
    if isinstance(rounds, Mapping):
        return [record for records in rounds.values() for record in records]
    return list(rounds)


def _ratio(total: int, count: int) -> float | None:
    return total / count if count else None


def _accepted_and_proposed(records: Sequence[Round]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    accepted = np.array([record.accepted for record in records], dtype=np.int64)
    return accepted, np.array([record.proposed for record in records], dtype=np.int64)


def _emitted_and_number(groups: Iterable[Sequence[Round]]) -> tuple[Counts, Counts]:
    pairs = [(sum(record.emitted for record in records), len(records)) for records in groups]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _resampled_sums(columns: Counts, seed: int, resamples: int) -> Counts:
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
        low, high = np.percentile(sums[is_defined, column] / sums[is_defined, width + column], _PERCENTILES)
        intervals.append((float(low), float(high)))
    return intervals
