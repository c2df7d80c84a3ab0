"""The simulator against closed forms: flat cost, independent acceptance, known loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_rounds import closed_form_tau, make_records, save_records
from torch import Tensor

from deepspec.config import compose_job
from deepspec.decoding.schedule import FullSchedule, Situation, ThresholdSchedule
from deepspec.errors import ConfigError
from deepspec.scheduling.cost import CostCurve, RoundCosts, write_curve
from deepspec.scheduling.outcomes import gains
from deepspec.scheduling.schedules import FixedSchedule, ThroughputSchedule
from deepspec.scheduling.serving import (
    SIMULATOR_VERSION,
    Conversation,
    Load,
    Outcome,
    Way,
    conversations_of,
    simulate,
)
from deepspec.scheduling.settings import SimulateConfig
from deepspec.scheduling.simulate import best_window, run_simulation

FLAT = CostCurve((1,), (0,), ((20.0,),))
# No point is passed, so the time of a step stays the same however many tokens it has.
FLAT_WIDE = CostCurve((1, 100_000), (0,), ((20.0, 20.0),))
# 1 ms a token on top of 9 ms, measured at every number of tokens.
DEAR = CostCurve(tuple(range(1, 200)), (0,), (tuple(1000 / (9 + n) for n in range(1, 200)),))


def independent(chance: float, block: int) -> list[Conversation]:
    return conversations_of([make_records(20, 400, block, chance=chance)])


def play(conversations: Sequence[Conversation], curve: CostCurve, way: Way, load: Load, rounds: int = 400) -> Outcome:
    return simulate(conversations, curve, way, load, rounds, seed=3)


@pytest.mark.parametrize(("chance", "block", "requests"), [(0.6, 4, 1), (0.8, 7, 3), (0.3, 5, 16)])
def test_flat_cost_and_independent_acceptance_give_the_closed_form(chance: float, block: int, requests: int) -> None:
    # R requests, tau tokens a round each, a round takes T_verify + T_draft.
    conversations = independent(chance, block)
    way = Way(FullSchedule(), lambda _: 0.03, block)
    found = play(conversations, FLAT_WIDE, way, Load(requests, max_new_tokens=200), 4000 // requests)
    tau = closed_form_tau(chance, block)
    # Four standard errors of the mean of 4,000 rounds plus those of the 8,000 recorded ones.
    error = 4 * block / 2 * (1 / 4000 + 1 / 8000) ** 0.5
    assert found.throughput == pytest.approx(requests * tau / (0.05 + 0.03), abs=requests * error / 0.08)
    assert found.requests == requests
    assert found.budget == block
    # One user waits for its own rounds alone, and its last round is cut by no limit.
    assert found.user_speed == pytest.approx(tau / 0.08, rel=0.1)


def test_plain_decoding_takes_one_step_a_token_and_no_draft() -> None:
    found = play(independent(0.9, 4), FLAT, Way(None, lambda _: 9.0, 0), Load(1, max_new_tokens=50))
    assert found.throughput == pytest.approx(20.0)
    assert found.user_speed == pytest.approx(20.0)
    assert found.verified == found.accepted == 0


def test_a_fixed_window_verifies_exactly_so_many_and_pays_for_them() -> None:
    way = Way(FixedSchedule(((1, 2),)), lambda _: 0.0, 4)
    found = play(independent(0.7, 4), DEAR, way, Load(5, max_new_tokens=100), 2000)
    tau = closed_form_tau(0.7, 2)
    assert found.budget == 2
    # 5 anchors and 10 draft tokens: 9 + 15 ms.
    assert found.throughput == pytest.approx(5 * tau / 0.024, rel=0.03)


def test_the_oracle_rejects_nothing_and_no_schedule_beats_it_where_tokens_are_cheap() -> None:
    conversations = conversations_of([make_records(30, 60, 5)])
    load = Load(8, max_new_tokens=100)
    curve = CostCurve(tuple(range(1, 100)), (0,), (tuple(1000 / (30 + n) for n in range(1, 100)),))
    oracle = play(conversations, curve, Way(None, lambda _: 0.0, 5, is_oracle=True), load)
    assert oracle.verified == oracle.accepted
    assert oracle.verified_yield == 1.0
    for schedule in (FullSchedule(), ThresholdSchedule(0.5), ThroughputSchedule(curve, lookup="linear")):
        found = play(conversations, curve, Way(schedule, lambda _: 0.0, 5), load)
        assert found.throughput < oracle.throughput
        assert found.verified > found.accepted


def test_the_throughput_schedule_verifies_less_the_more_requests_share_a_step() -> None:
    conversations = conversations_of([make_records(30, 60, 5)])
    curve = CostCurve((1, 16, 64, 256), (0,), ((100.0, 95.0, 60.0, 18.0),))
    budgets, speeds, full = [], [], []
    for requests in (1, 8, 32):
        load = Load(requests, max_new_tokens=60)
        way = Way(ThroughputSchedule(curve, lookup="linear"), lambda _: 0.0, 5)
        found = play(conversations, curve, way, load)
        budgets.append(found.budget)
        speeds.append(found.throughput)
        full.append(play(conversations, curve, Way(FullSchedule(), lambda _: 0.0, 5), load).throughput)
    assert budgets[0] > budgets[1] > budgets[2] > 0
    assert speeds[2] > 1.1 * full[2]


def test_arrivals_below_the_servers_capacity_are_served_as_they_come() -> None:
    # 10 tokens a request, one of them from the prefill; 20 steps a second: capacity far above 0.2 requests a second.
    way = Way(None, lambda _: 0.0, 0)
    found = play(independent(0.5, 3), FLAT_WIDE, way, Load(50, rate=0.2, max_new_tokens=10), 3000)
    # 9 tokens of each of 0.2 requests a second; Poisson: sqrt(333 arrivals) is 5.5 %, four of them.
    assert found.throughput == pytest.approx(0.2 * 9, rel=0.22)
    assert found.user_speed == pytest.approx(20.0, rel=0.01)


def test_a_prefill_stops_everyone_for_its_time() -> None:
    way = Way(None, lambda _: 0.0, 0)
    found = play(independent(0.5, 3), FLAT, way, Load(1, max_new_tokens=11, prefill_seconds=0.5), 1000)
    # 10 steps of 50 ms and half a second of prefill for 10 tokens; its first token belongs to the prefill.
    assert found.throughput == pytest.approx(10.0, rel=0.02)


def test_the_same_seed_gives_the_same_run() -> None:
    conversations = conversations_of([make_records(10, 30, 3)])
    way = Way(ThroughputSchedule(DEAR), lambda _: 0.001, 3)
    assert play(conversations, DEAR, way, Load(4)) == play(conversations, DEAR, way, Load(4))


def test_the_best_window_is_that_of_a_search_by_simulation() -> None:
    conversations = independent(0.6, 5)
    by_simulation = [
        play(conversations, DEAR, Way(FixedSchedule(((1, w),)), lambda _: 0.004, 5), Load(6, max_new_tokens=80), 1500)
        for w in range(6)
    ]
    speeds = [one.throughput for one in by_simulation]
    window = best_window(conversations, DEAR, lambda _: 0.004, 6)
    assert speeds[window] > 0.99 * max(speeds)
    assert window not in (0, 5)


def config_for(folder: Path, *more: str) -> SimulateConfig:
    words = [f"records=['{folder / 'eval'}']", f"curve='{folder / 'curve.json'}'", f"output_dir='{folder / 'out'}'"]
    return compose_job("simulate", SimulateConfig, [*words, *more])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_records(tmp_path / "eval", make_records(12, 25, 4))
    write_curve(tmp_path / "curve.json", DEAR, {})
    return tmp_path


def test_the_command_writes_numbers_and_a_page_of_every_way(place: Path) -> None:
    points = run_simulation(
        config_for(place, "concurrency=[1,8]", "rounds=40", "repeats=3", "draft_seconds=0.002", "lookup=linear")
    )
    numbers = json.loads((place / "out" / "simulation.json").read_text())
    assert len(numbers["points"]) == len(points) == 2 * 8
    by_key = {(one["way"], one["load"]): one for one in numbers["points"]}
    assert by_key["oracle", 8.0]["verified_yield"] == 1.0
    assert by_key["autoregressive", 1.0]["budget"] == 0.0
    assert by_key["full", 8.0]["budget"] == 4.0
    assert 0 < by_key["mtp1", 8.0]["budget"] <= 1.0
    page = (place / "out" / "simulation.html").read_text()
    assert page.count("<svg") == 6
    yields = [one["verified_yield"] for one in numbers["thresholds"]]
    assert yields == sorted(yields)
    assert "a one-token MTP head, which it is not" in page
    over_full = gains(points, "full")
    assert over_full[8.0][0] > 1.0
    low, high = over_full[8.0][1]
    assert low <= over_full[8.0][0] <= high


def test_poisson_arrivals_need_rates_and_use_them(place: Path) -> None:
    with pytest.raises(ConfigError, match="rates is empty"):
        run_simulation(config_for(place, "arrivals=poisson", "rates=[]"))
    points = run_simulation(
        config_for(place, "arrivals=poisson", "rates=[0.5]", "rounds=20", "repeats=2", "schedules=[full]")
    )
    assert [point.x for point in points] == [0.5]


def test_conversations_hold_what_was_recorded() -> None:
    record = make_records(3, 5, 4, has_head=False)
    found = conversations_of([record])
    assert [len(one.accepted) for one in found] == [5, 5, 5]
    assert all(one.logits is None for one in found)
    emitted = [sum(one.emitted for one in rounds) for rounds in record.rounds.values()]
    assert [one.tokens for one in found] == [1 + total for total in emitted]
    assert np.array_equal(found[0].max_probs[0], record.rounds["p0"][0].max_draft_prob)


def test_a_replay_plays_every_recorded_round_once_and_counts_everything() -> None:
    record = make_records(5, 6, 3)
    conversations = conversations_of([record])
    load = Load(5, is_replay=True)
    found = simulate(conversations, FLAT_WIDE, Way(FullSchedule(), lambda _: 0.05, 3), load, 1, seed=0)
    rounds = [one for rounds in record.rounds.values() for one in rounds]
    assert found.turns == len(rounds)
    assert found.tokens == sum(one.emitted for one in rounds)
    assert found.accepted == sum(one.accepted for one in rounds)
    # All five answers take six rounds of 50 ms and as much for the draft.
    assert found.seconds == pytest.approx(6 * 0.1)


def test_no_bonus_token_is_counted_behind_an_accepted_stop_token() -> None:
    record = make_records(5, 6, 3, chance=0.8, stop_every=2)
    rounds = [one for found in record.rounds.values() for one in found]
    assert any(one.emitted == one.accepted for one in rounds)
    way, load = Way(FullSchedule(), lambda _: 0.05, 3), Load(5, is_replay=True)
    found = simulate(conversations_of([record]), FLAT_WIDE, way, load, 1, seed=0)
    assert found.tokens == sum(one.emitted for one in rounds)
    assert found.turns == len(rounds)


def test_long_answers_meet_prefills_and_have_a_speed_however_few_rounds_are_counted() -> None:
    way = Way(None, lambda _: 0.0, 0)
    load = Load(64, max_new_tokens=2048, prefill_seconds=0.5)
    found = play(independent(0.5, 3), FLAT_WIDE, way, load, 300)
    prefills = (found.seconds - 300 * 0.05) / 0.5
    # 64 requests of 2,047 steps each: 9.4 finish within 300 rounds, give or take four standard deviations.
    assert prefills == pytest.approx(300 * 64 / 2047, abs=4 * 3.1)
    assert prefills >= 0.99
    # A token a step, while everyone waits for the prefills.
    assert found.user_speed == pytest.approx(found.tokens / (64 * found.seconds), rel=0.1)
    alone = play(independent(0.5, 3), FLAT_WIDE, way, Load(1, max_new_tokens=2048), 20)
    assert alone.user_speed == pytest.approx(20.0)


def test_answers_of_one_token_are_refused_before_they_stall_the_simulation(place: Path) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens"):
        config_for(place, "max_new_tokens=1")


def test_idle_rows_of_a_replay_cost_a_token_until_a_quarter_of_them_are_idle() -> None:
    lengths = (1, 2, 4, 4, 4)
    record = make_records(5, 4, 2, chance=0.0)
    for index, rounds in enumerate(record.rounds.values()):
        del rounds[lengths[index] :]
    seconds = CostCurve(tuple(range(1, 20)), (0,), (tuple(1.0 / n for n in range(1, 20)),))
    load = Load(5, is_replay=True)
    found = simulate(conversations_of([record]), seconds, Way(FullSchedule(), lambda _: 0.0, 2), load, 1, seed=0)
    # A token costs a second: five rows of three tokens, then one of them has its anchor only, then three rows twice.
    assert found.seconds == pytest.approx(15 + 13 + 9 + 9)


def test_rounds_without_a_draft_with_whole_blocks_and_with_cut_ones_cost_what_the_profile_says_of_each() -> None:
    record = make_records(2, 5, 3, chance=0.0)  # a token a round, so both are in flight to the end
    rounds = (
        RoundCosts(1, 1.0, 2.0, (1, 4), (3.0, 3.0), (1, 4), (4.0, 7.0)),
        RoundCosts(2, 10.0, 20.0, (2, 8), (30.0, 33.0), (2, 8), (40.0, 70.0)),
    )
    curve = CostCurve((1, 8), (0,), ((9.0, 9.0),), (1, 2), (0.25, 0.5), rounds)

    def seconds_a_round(way: Way) -> float:
        found = simulate(conversations_of([record]), curve, way, Load(2, is_replay=True), 1, seed=0)
        assert found.requests == 2
        return found.seconds / found.rounds

    assert seconds_a_round(Way(None, curve.draft_time, 0)) == pytest.approx(10.0)
    assert seconds_a_round(Way(FullSchedule(), curve.draft_time, 3)) == pytest.approx(20.0 + 0.5)
    # One draft token each: four tokens, a third of the way from 2 to 8.
    assert seconds_a_round(Way(FixedSchedule(((1, 1),)), curve.draft_time, 3)) == pytest.approx(31.0 + 0.5)
    # A block of one token is no whole block of this draft.
    assert seconds_a_round(Way(FullSchedule(), lambda _: 0.1, 1)) == pytest.approx(31.0 + 0.1)
    # One verifies three draft tokens, the other one: six tokens.
    assert seconds_a_round(Way(_Uneven(), curve.draft_time, 3)) == pytest.approx(60.0 + 0.5)


class _Uneven:
    def lengths(self, situation: Situation) -> Tensor:
        return torch.tensor([3, 1])


def test_a_row_that_idles_makes_a_round_uneven() -> None:
    record = make_records(5, 2, 2, chance=0.0)
    del record.rounds["p0"][1:]
    rounds = (RoundCosts(5, 1.0, 2.0, (5, 10, 15), (3.0, 4.0, 5.0), (5, 9, 15), (3.0, 60.0, 90.0)),)
    curve = CostCurve((1, 30), (0,), ((9.0, 9.0),), rounds=rounds)
    load = Load(5, is_replay=True)
    way = Way(FixedSchedule(((1, 1),)), lambda _: 0.0, 2)
    # Five blocks of two tokens, then four of them beside an anchor.
    found = simulate(conversations_of([record]), curve, way, load, 1, seed=0)
    assert found.seconds == pytest.approx(4.0 + 60.0)


def test_a_simulation_that_gives_other_numbers_has_another_version() -> None:
    # Stored predictions are used again under the same version: raise it where these numbers change.
    conversations = conversations_of([make_records(10, 30, 3)])
    way = Way(ThroughputSchedule(DEAR, lookup="linear"), lambda _: 0.001, 3)
    found = play(conversations, DEAR, way, Load(4, max_new_tokens=40), 50)
    replayed = play(conversations, DEAR, way, Load(10, max_new_tokens=40, is_replay=True), 1)
    assert SIMULATOR_VERSION == 3
    numbers = [(one.tokens, one.verified, one.rounds, round(one.seconds, 9)) for one in (found, replayed)]
    assert numbers == [(313, 176, 50, 0.876), (395, 152, 33, 0.772)]
