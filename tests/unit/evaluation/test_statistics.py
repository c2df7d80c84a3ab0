"""Estimates against closed forms, naive loops and simulated coverage."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from deepspec.decoding.rounds import Round, from_json, to_json
from deepspec.errors import DataError
from deepspec.evaluation import statistics
from deepspec.evaluation.round_table import (
    RoundTable,
    as_table,
    group_by_prompt,
    pooled,
    split_by_context,
    split_by_domain,
)

K = 5
Groups = dict[str, list[Round]]


def make_round(prompt: str, index: int, proposed: int, accepted: int, stops: bool = False) -> Round:
    ended_by = "stop" if stops else "full" if accepted == proposed else "reject"
    return Round(prompt, index, 10 + index, proposed, accepted, ended_by, None, (), 0.001, 0.01, accepted + (not stops))


def simulate(prompt: str, number: int, rate: float, generator: random.Random, block: int = K) -> list[Round]:
    rounds = []
    for index in range(number):
        accepted = 0
        while accepted < block and generator.random() < rate:
            accepted += 1
        rounds.append(make_round(prompt, index, block, accepted))
    return rounds


def ragged_rounds(seed: int) -> list[Round]:
    """Rounds with every proposal length from 0 to K, some of them ended by an accepted stop token."""
    generator = random.Random(seed)
    rounds = []
    for number in range(300):
        proposed = generator.randint(0, K)
        accepted = generator.randint(0, proposed)
        stops = accepted > 0 and generator.random() < 0.2
        rounds.append(make_round(f"p{number % 17}", number // 17, proposed, accepted, stops))
    return rounds


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_acceptance_length_of_independent_acceptance_equals_its_closed_form(rate: float) -> None:
    generator = random.Random(1)
    rounds = simulate("a", 60_000, rate, generator)
    expected = (1 - rate ** (K + 1)) / (1 - rate)
    # The standard error at 60,000 rounds is below K / 2 / sqrt(60000) = 0.0102; four of them.
    assert statistics.acceptance_length(rounds) == pytest.approx(expected, abs=0.041)
    assert statistics.accepted_drafts(rounds) == pytest.approx(expected - 1, abs=0.041)
    for k, share in enumerate(statistics.survival(rounds, K), start=1):
        assert share == pytest.approx(rate**k, abs=0.01)
    reached = 60_000
    for share in statistics.conditional_acceptance(rounds, K):
        assert share == pytest.approx(rate, abs=4 * (0.25 / reached) ** 0.5)
        reached = int(reached * rate)


@pytest.mark.parametrize("seed", range(3))
def test_estimates_equal_naive_loops(seed: int) -> None:
    rounds = ragged_rounds(seed)
    emitted = proposed_sum = accepted_sum = 0
    for record in rounds:
        emitted += record.emitted
        proposed_sum += record.proposed
        accepted_sum += record.accepted
    assert statistics.acceptance_length(rounds) == emitted / len(rounds)
    assert statistics.acceptance_rate(rounds) == accepted_sum / proposed_sum
    assert statistics.verified_yield(rounds) == (accepted_sum + len(rounds)) / (proposed_sum + len(rounds))
    for k in range(1, K + 1):
        survived = proposed = reached = kept = 0
        for record in rounds:
            if record.proposed >= k:
                proposed += 1
                survived += record.accepted >= k
                if record.accepted >= k - 1:
                    reached += 1
                    kept += record.accepted >= k
        assert statistics.survival(rounds, K)[k - 1] == survived / proposed
        assert statistics.conditional_acceptance(rounds, K)[k - 1] == kept / reached


def test_a_round_that_ends_on_an_accepted_stop_token_counts_its_accepted_tokens_only() -> None:
    rounds = [make_round("a", 0, K, 3), make_round("a", 1, K, 2, stops=True)]
    assert statistics.acceptance_length(rounds) == (4 + 2) / 2


def test_estimates_are_none_where_nothing_was_observed() -> None:
    nothing: list[Round] = []
    assert statistics.acceptance_length(nothing) is None
    assert statistics.accepted_drafts(nothing) is None
    assert statistics.acceptance_rate([make_round("a", 0, 0, 0)]) is None
    assert statistics.survival([make_round("a", 0, 1, 1)], 2) == [1.0, None]
    assert statistics.conditional_acceptance([make_round("a", 0, 2, 0)], 2) == [0.0, None]
    assert statistics.acceptance_length_ci95(nothing) is None
    assert statistics.acceptance_length_ci95([make_round("a", 0, 2, 1), make_round("a", 1, 2, 2)]) is None
    assert statistics.macro_average([None, None]) is None


def test_interval_equals_a_naive_bootstrap_over_prompts() -> None:
    rounds = ragged_rounds(5)
    groups = list(group_by_prompt(rounds).values())
    drawn = np.random.default_rng(9).integers(len(groups), size=(200, len(groups)))
    ratios = []
    for resample in drawn:
        chosen = [record for index in resample for record in groups[index]]
        ratios.append(sum(record.emitted for record in chosen) / len(chosen))
    low, high = statistics.acceptance_length_ci95(rounds, seed=9, resamples=200) or (0.0, 0.0)
    assert (low, high) == pytest.approx((np.percentile(ratios, 2.5), np.percentile(ratios, 97.5)))


def test_interval_does_not_depend_on_the_order_of_rounds() -> None:
    rounds = ragged_rounds(2)
    shuffled = random.Random(3).sample(rounds, len(rounds))
    assert statistics.acceptance_length_ci95(rounds) == statistics.acceptance_length_ci95(shuffled)


def test_interval_does_not_depend_on_how_the_draws_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = ragged_rounds(2)
    whole = statistics.acceptance_length_ci95(rounds)
    monkeypatch.setattr(statistics, "_CHUNK", 170)
    assert statistics.acceptance_length_ci95(rounds) == pytest.approx(whole)


def test_interval_covers_the_true_value_in_about_95_percent_of_experiments() -> None:
    generator = random.Random(7)
    rates = (0.4, 0.8)  # prompts differ: an interval over rounds would be too narrow
    truth = sum((1 - rate ** (K + 1)) / (1 - rate) for rate in rates) / 2
    covered, trials = 0, 400
    for trial in range(trials):
        groups = {f"p{p}": simulate(f"p{p}", 8, generator.choice(rates), generator) for p in range(60)}
        low, high = statistics.acceptance_length_ci95(groups, seed=trial, resamples=500) or (0.0, 0.0)
        covered += low <= truth <= high
    # Standard error of the coverage at 400 trials: 1.1 %; a percentile interval of 60 prompts loses about 1 %.
    assert 0.91 <= covered / trials <= 0.985


def test_interval_of_every_position_contains_its_estimate_and_widens_with_depth() -> None:
    generator = random.Random(4)
    rounds = [record for p in range(40) for record in simulate(f"p{p}", 30, 0.6, generator)]
    widths = []
    intervals = statistics.conditional_acceptance_ci95(rounds, K)
    for share, interval in zip(statistics.conditional_acceptance(rounds, K), intervals, strict=True):
        low, high = interval or (1.0, 0.0)
        assert share is not None
        assert low <= share <= high
        widths.append(high - low)
    assert widths[0] < widths[2] < widths[4]
    assert statistics.conditional_acceptance_ci95([make_round("a", 0, 2, 2), make_round("b", 0, 2, 0)], 2)[1] is None


def paired_groups(rate_a: float, rate_b: float, generator: random.Random) -> tuple[Groups, Groups]:
    side_a: Groups = {}
    side_b: Groups = {}
    for p in range(50):
        ease = generator.uniform(-0.25, 0.25)  # prompts are easy or hard for both drafts
        side_a[f"p{p}"] = simulate(f"p{p}", 12, rate_a + ease, generator)
        side_b[f"p{p}"] = simulate(f"p{p}", 12, rate_b + ease, generator)
    return side_a, side_b


def test_paired_interval_is_narrower_than_the_two_intervals_together() -> None:
    side_a, side_b = paired_groups(0.65, 0.55, random.Random(2))
    result = statistics.paired_difference(side_a, side_b)
    assert result.ci95 is not None
    assert result.p_value is not None
    tau_a, tau_b = statistics.acceptance_length(side_a), statistics.acceptance_length(side_b)
    assert tau_a is not None
    assert tau_b is not None
    assert result.difference == pytest.approx(tau_a - tau_b)
    assert result.p_value < 0.01
    intervals = [statistics.acceptance_length_ci95(side) or (0.0, 0.0) for side in (side_a, side_b)]
    unpaired = sum((high - low) ** 2 for low, high in intervals) ** 0.5
    assert result.ci95[1] - result.ci95[0] < 0.9 * unpaired


def test_paired_p_of_equal_drafts_is_small_as_rarely_as_it_says() -> None:
    generator = random.Random(6)
    small = 0
    for trial in range(200):
        result = statistics.paired_difference(*paired_groups(0.6, 0.6, generator), seed=trial, resamples=400)
        small += result.p_value is not None and result.p_value < 0.05
    assert small / 200 < 0.11  # 0.05 plus four standard errors


def test_paired_difference_of_a_draft_with_itself_is_zero_with_p_one() -> None:
    rounds = ragged_rounds(1)
    result = statistics.paired_difference(rounds, rounds)
    assert result == statistics.PairedDifference(0.0, (0.0, 0.0), 1.0, 17)


def test_paired_difference_refuses_other_prompts() -> None:
    with pytest.raises(ValueError, match="1 only in a, 1 only in b"):
        statistics.paired_difference([make_round("a", 0, 2, 1)], [make_round("b", 0, 2, 1)])


def test_macro_average_weighs_a_small_domain_like_a_large_one() -> None:
    rounds = [make_round("a", index, 4, 4) for index in range(90)] + [make_round("b", 0, 4, 0)]
    parts = split_by_domain(rounds, {"a": "maths", "b": "chat"}.__getitem__)
    by_domain = {domain: statistics.acceptance_length(part) for domain, part in parts.items()}
    assert by_domain == {"chat": 1.0, "maths": 5.0}
    assert statistics.macro_average(by_domain.values()) == 3.0


def test_summary_holds_the_single_estimates() -> None:
    rounds = ragged_rounds(3)
    summary = statistics.summarise(rounds, K, seed=4)
    assert (summary.num_prompts, summary.rounds) == (17, 300)
    assert summary.acceptance_length == statistics.acceptance_length(rounds)
    assert summary.acceptance_length_ci95 == statistics.acceptance_length_ci95(rounds, seed=4)
    assert summary.survival == statistics.survival(rounds, K)


def test_round_record_survives_json() -> None:
    record = Round("a", 2, 17, 3, 1, "reject", (0.5, -1.25, 2.0), (0.9, 0.5, 0.25), 0.004, 0.03, 2)
    assert from_json(to_json(record)) == record
    assert from_json(to_json(record._replace(confidence_logits=None))).confidence_logits is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": 4}, "contradict"),
        ({"emitted": 9}, "contradict"),
        ({"ended_by": "end"}, "'end'"),
        ({"proposed": "3"}, "an integer"),
        ({"max_draft_prob": 0.5}, "a list of numbers"),
        ({"tokens": 1}, "unknown fields"),
        ({"overlap": [0.5] * 4}, "overlap holds 4 slots"),
        ({"max_draft_prob": [0.5, 0.25]}, "3 tokens proposed, but .* 2 drafted ones"),
        ({"max_draft_prob": [0.5] * 3, "confidence_logits": [1.0] * 4}, "of 3 and 4 drafted ones"),
    ],
)
def test_broken_round_record_is_refused_with_its_value(change: dict[str, object], message: str) -> None:
    row = {**to_json(make_round("a", 0, 3, 1)), **change}
    with pytest.raises(DataError, match=message):
        from_json(row)


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_tau_over_the_block_length_of_independent_acceptance_equals_its_closed_form(rate: float) -> None:
    rounds = simulate("a", 60_000, rate, random.Random(1))
    for k, tau in enumerate(statistics.acceptance_length_by_length(rounds, K), start=1):
        assert tau == pytest.approx((1 - rate ** (k + 1)) / (1 - rate), abs=0.041)  # four standard errors, as above


@pytest.mark.parametrize("seed", range(2))
def test_tau_over_the_block_length_equals_a_naive_loop_and_ends_at_tau(seed: int) -> None:
    rounds = ragged_rounds(seed)
    found = statistics.acceptance_length_by_length(rounds, K)
    for k in range(1, K + 1):
        emitted = 0
        for record in rounds:
            kept = min(record.accepted, k)
            ended_by_stop = record.emitted == record.accepted and kept == record.accepted
            emitted += kept + (not ended_by_stop)
        assert found[k - 1] == emitted / len(rounds)
    assert found[-1] == statistics.acceptance_length(rounds)


def test_parts_by_context_hold_every_round_once_and_only_prompts_that_have_some() -> None:
    generator = random.Random(8)
    rounds = []
    for number in range(400):
        record = make_round(f"p{number % 9}", number // 9, K, generator.randint(0, K))
        rounds.append(record._replace(position=generator.choice([0, 127, 128, 300, 1023, 1024, 200_000])))
    parts = split_by_context([*rounds, make_round("late", 0, K, 2)._replace(position=500)])
    assert list(parts) == [(0, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048), (131072, None)]
    assert "late" in parts[256, 512].prompts
    assert sum(len(part.prompt) for part in parts.values()) == 401
    for (low, high), part in parts.items():
        inside = [one for one in rounds if low <= one.position < (high or 10**9)]
        others = [prompt for prompt in part.prompts if prompt != "late"]
        assert others == sorted({one.prompt_id for one in inside})
        kept = part.of_prompts(others)
        assert sorted(kept.emitted.tolist()) == sorted(one.emitted for one in inside)


def test_mean_over_tasks_weighs_a_small_task_like_a_large_one() -> None:
    large = {f"p{p}": simulate(f"p{p}", 50, 0.8, random.Random(p)) for p in range(40)}
    small = {f"p{p}": simulate(f"p{p}", 5, 0.2, random.Random(p)) for p in range(12)}
    mean, interval = statistics.macro_acceptance_length([large, small])
    taus = [statistics.acceptance_length(part) or 0.0 for part in (large, small)]
    assert mean == pytest.approx(sum(taus) / 2)
    # Independent parts: the widths of two halves add like standard errors.
    parts = [statistics.acceptance_length_ci95(part) or (0.0, 0.0) for part in (large, small)]
    expected = 0.5 * sum((high - low) ** 2 for low, high in parts) ** 0.5
    assert interval is not None
    assert interval[1] - interval[0] == pytest.approx(expected, rel=0.1)
    weighed, _ = statistics.macro_acceptance_length([large, small], weights=[3.0, 1.0])
    assert weighed == pytest.approx(0.75 * taus[0] + 0.25 * taus[1])


def test_mean_over_tasks_has_no_interval_where_a_task_has_a_single_prompt() -> None:
    mean, interval = statistics.macro_acceptance_length([{"a": [make_round("a", 0, 4, 4)]}, ragged_rounds(0)])
    assert mean is not None
    assert interval is None
    assert statistics.macro_acceptance_length([[], {}]) == (None, None)


def test_interval_of_the_mean_over_tasks_covers_the_true_value_in_about_95_percent_of_experiments() -> None:
    generator = random.Random(5)
    truth = sum((1 - rate ** (K + 1)) / (1 - rate) for rate in (0.4, 0.8)) / 2
    covered, trials = 0, 300
    for trial in range(trials):
        parts = [
            {f"p{p}": simulate(f"p{p}", 4, rate, generator) for p in range(size)}
            for rate, size in ((0.4, 60), (0.8, 30))
        ]
        _, interval = statistics.macro_acceptance_length(parts, seed=trial, resamples=400)
        low, high = interval or (0.0, 0.0)
        covered += low <= truth <= high
    assert 0.90 <= covered / trials <= 0.99  # four standard errors of 1.3 % around the 94 % of small samples


def test_paired_difference_over_tasks_is_the_mean_of_the_tasks_and_finds_a_real_one() -> None:
    generator = random.Random(3)
    pairs = [paired_groups(0.65, 0.55, generator), paired_groups(0.6, 0.5, generator)]
    found = statistics.macro_paired_difference(pairs)
    single = [statistics.paired_difference(*pair) for pair in pairs]
    assert found.difference == pytest.approx(sum(one.difference for one in single) / 2)
    assert found.num_prompts == 100
    assert found.p_value is not None
    assert found.p_value <= min(one.p_value or 1.0 for one in single)
    widths = [one.ci95[1] - one.ci95[0] for one in [found, *single] if one.ci95 is not None]
    assert widths[0] < min(widths[1:])


def test_table_holds_what_the_records_say_whatever_their_order() -> None:
    rounds = ragged_rounds(4)
    table = as_table(random.Random(1).sample(rounds, len(rounds)))
    assert table.prompts == sorted({record.prompt_id for record in rounds})
    rows = zip(*(column.tolist() for column in table[1:]), strict=True)
    assert sorted(rows) == sorted(
        (table.prompts.index(one.prompt_id), one.position, one.proposed, one.accepted, one.emitted) for one in rounds
    )
    assert as_table(table) is table


def test_parts_of_a_table_are_those_of_the_records() -> None:
    rounds = ragged_rounds(4)
    domains = {f"p{number}": "even" if number % 2 == 0 else "odd" for number in range(17)}
    parts = split_by_domain(rounds, domains.__getitem__)
    for domain, part in parts.items():
        mine = [record for record in rounds if domains[record.prompt_id] == domain]
        assert statistics.summarise(part, K) == statistics.summarise(mine, K)
    whole = pooled(parts)
    assert statistics.survival(whole, K) == statistics.survival(rounds, K)
    assert len(whole.prompts) == 17


def test_prompts_without_a_round_stay_in_a_table() -> None:
    table = as_table({"b": [make_round("b", 0, 2, 1)], "a": []})
    assert isinstance(table, RoundTable)
    assert table.prompts == ["a", "b"]
    assert statistics.summarise(table, 2).num_prompts == 2
    assert table.of_prompts(["a"]).prompt.size == 0


def test_interval_of_a_median_is_the_narrowest_that_holds_it_with_95_percent() -> None:
    assert statistics.median_ci95([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    for number in range(6, 60):
        values = [float(value) for value in range(number)]
        random.Random(number).shuffle(values)
        low, high = statistics.median_ci95(values) or (-1.0, -1.0)
        assert low == number - 1 - high
        # The median lies outside where too few of the values, or too many, came out below it: fair coins.
        outside = 2 * sum(math.comb(number, below) for below in range(int(low) + 1)) / 2**number
        narrower = outside + 2 * math.comb(number, int(low) + 1) / 2**number
        assert outside <= 0.05 < narrower
