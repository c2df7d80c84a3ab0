"""Domains, pairs, contexts and block lengths, against sums by hand."""

from __future__ import annotations

import random

import pytest

from deepspec.decoding.rounds import Round
from deepspec.evaluation.details import ALL_DOMAINS, Details, LengthRow, Measured, make_details
from deepspec.evaluation.round_table import as_table

K = 3


def rounds_of(prompt: str, rate: float, number: int, generator: random.Random) -> list[Round]:
    found = []
    for index in range(number):
        accepted = 0
        while accepted < K and generator.random() < rate:
            accepted += 1
        ending = "full" if accepted == K else "reject"
        found.append(Round(prompt, index, 50 * index, K, accepted, ending, None, (), 0.0, 0.0, accepted + 1))
    return found


def measured(task: str, draft: str, rates: dict[str, float], prompts: int = 12, seed: int = 0) -> Measured:
    """A task whose prompts lie in the given domains, each with its own rate of acceptance."""
    generator = random.Random(seed)
    groups, domains = {}, {}
    for domain, rate in rates.items():
        for number in range(prompts):
            prompt = f"{domain}-{number}"
            groups[prompt] = rounds_of(prompt, rate, 8, generator)
            domains[prompt] = domain
    return Measured(task, draft, K, as_table(groups), domains, 1.5)


def tau(one: Measured, domain: str) -> float:
    chosen = [index for index, prompt in enumerate(one.rounds.prompts) if one.domains[prompt] == domain]
    inside = [place in chosen for place in one.rounds.prompt.tolist()]
    return float(one.rounds.emitted[inside].sum() / sum(inside))


def details_of(*parts: Measured) -> Details:
    return make_details(parts, 0.0, 0, {})


def test_a_task_of_several_domains_counts_in_each_and_domains_weigh_the_same() -> None:
    mixed = measured("mixed", "a", {"chat": 0.2, "code": 0.8})
    only = measured("only", "a", {"code": 0.5}, prompts=40)
    rows = {row.domain: row for row in details_of(mixed, only).domains}
    assert set(rows) == {"chat", "code", ALL_DOMAINS}
    code = (tau(mixed, "code") + tau(only, "code")) / 2
    assert rows["code"].acceptance_length == pytest.approx(code)
    assert rows["chat"].acceptance_length == pytest.approx(tau(mixed, "chat"))
    assert rows[ALL_DOMAINS].acceptance_length == pytest.approx((code + tau(mixed, "chat")) / 2)
    assert (rows["code"].num_prompts, rows["chat"].num_prompts, rows[ALL_DOMAINS].num_prompts) == (52, 12, 64)
    assert rows["code"].tasks == ("mixed", "only")
    assert rows[ALL_DOMAINS].speedup_over_autoregressive == 1.5
    kept = reached = 0
    for one in (mixed, only):
        for prompt, accepted in zip(one.rounds.prompt.tolist(), one.rounds.accepted.tolist(), strict=True):
            if one.domains[one.rounds.prompts[prompt]] == "code" and accepted >= 1:
                reached += 1
                kept += accepted >= 2
    assert rows["code"].conditional_acceptance[1] == pytest.approx(kept / reached)


def test_speed_up_over_all_domains_weighs_them_alike_and_counts_timed_tasks_only() -> None:
    parts = [
        measured("one", "a", {"code": 0.5})._replace(speedup=1.0),
        measured("two", "a", {"code": 0.5})._replace(speedup=2.0),
        measured("three", "a", {"chat": 0.5})._replace(speedup=3.0),
        measured("four", "a", {"chat": 0.5})._replace(speedup=None),
        measured("five", "a", {"maths": 0.5})._replace(speedup=None),
    ]
    rows = {row.domain: row.speedup_over_autoregressive for row in details_of(*parts).domains}
    assert rows == {"code": 1.5, "chat": 3.0, "maths": None, ALL_DOMAINS: 2.25}


def test_a_single_domain_has_no_mean_of_domains() -> None:
    assert [row.domain for row in details_of(measured("t", "a", {"chat": 0.5})).domains] == ["chat"]
    assert [row.domain for row in details_of(measured("t", "a", {"": 0.5})).domains] == ["t"]


def test_pairs_are_compared_on_their_common_prompts_and_once_over_all_domains() -> None:
    parts = [
        measured(task, draft, {"chat": rate, "code": rate + 0.1}, seed=seed)
        for task in ("one", "two")
        for seed, (draft, rate) in enumerate((("a", 0.7), ("b", 0.4), ("c", 0.4)))
    ]
    fewer = parts[1]._replace(rounds=parts[1].rounds.of_prompts(parts[1].rounds.prompts[3:]))
    rows = {(row.task, row.draft, row.other): row for row in details_of(parts[0], fewer, *parts[2:]).pairs}
    assert len(rows) == 9
    assert rows["one", "a", "b"].num_prompts == 21
    assert rows["one", "a", "c"].num_prompts == 24
    for key in (("one", "a", "b"), (None, "a", "b"), (None, "a", "c")):
        found = rows[key]
        assert found.difference > 0.3
        assert found.p_value is not None
        assert found.p_value < 0.01
        assert found.ci95 is not None
        assert found.ci95[0] < found.difference < found.ci95[1]
    mean = [
        tau(a, domain) - tau(c, domain)
        for a, c in ((parts[0], parts[2]), (parts[3], parts[5]))
        for domain in ("chat", "code")
    ]
    assert rows[None, "a", "c"].difference == pytest.approx(sum(mean) / 4)
    equal = rows[None, "b", "c"]
    assert equal.p_value is not None
    assert equal.p_value > 0.05


def test_a_handful_of_prompts_gives_no_p() -> None:
    parts = [measured("t", draft, {"chat": rate}, prompts=9) for draft, rate in (("a", 0.9), ("b", 0.1))]
    (row,) = details_of(*parts).pairs
    assert row.p_value is None
    assert row.ci95 is not None


def test_contexts_and_lengths_are_those_of_each_task() -> None:
    part = measured("t", "a", {"chat": 0.6})
    timed = LengthRow(
        task="t", draft="a", temperature=0.0, length=2, acceptance_length=None, measured_acceptance_length=1.7
    )
    found = make_details([part], 0.0, 0, {("t", "a", 2): timed})
    assert [(row.low, row.rounds) for row in found.contexts] == [(0, 36), (128, 36), (256, 24)]
    assert [row.length for row in found.lengths] == [1, 2, 3]
    accepted = part.rounds.accepted
    assert found.lengths[1].acceptance_length == pytest.approx(float(accepted.clip(max=2).mean()) + 1)
    assert found.lengths[1].measured_acceptance_length == 1.7
    assert found.lengths[0].measured_acceptance_length is None


def test_cut_blocks_say_nothing_of_other_lengths_and_what_was_timed_stays() -> None:
    part = measured("t", "a", {"chat": 0.6})
    timed = LengthRow(
        task="t", draft="a", temperature=0.0, length=2, acceptance_length=None, measured_acceptance_length=1.7
    )
    assert make_details([part], 0.0, 0, {("t", "a", 2): timed}, is_full=False).lengths == (timed,)
    assert make_details([part], 0.0, 0, {}, is_full=False).lengths == ()


def test_details_are_read_back_as_they_were_written() -> None:
    found = details_of(measured("t", "a", {"chat": 0.6}), measured("t", "b", {"chat": 0.5}))
    assert Details.model_validate_json(found.model_dump_json()) == found
    renamed = found.renamed(str.upper)
    assert {row.draft for row in renamed.domains} == {"A", "B"}
    assert renamed.pairs[0].other == "B"
    assert len(found.joined(renamed).contexts) == 2 * len(found.contexts)
