"""Schedules with several requests in flight, as part of an evaluation: what is played, kept, shown and refused."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from chat_targets import chat_target
from eval_places import PROMPTS, Place
from helpers import kind_of_draft

from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import RAW_CONFIDENCE, FullSchedule
from deepspec.errors import ConfigError
from deepspec.evaluation.evaluator import evaluate
from deepspec.scheduling.cost import CostCurve, RoundCosts, write_curve
from deepspec.scheduling.load import Played, Repeat, Setup, chosen, load_rows, play_in_turn
from deepspec.scheduling.schedules import FixedSchedule
from deepspec.scheduling.serving import Way

K, TOKENS, REPEATS = 4, 6, 6
POINTS = tuple(range(1, 60))
# A step of n tokens takes 9 + n ms, whatever else is in the round.
ROUNDS = tuple(
    RoundCosts(
        requests,
        (9 + requests) / 1000,
        (9 + requests * (1 + K)) / 1000,
        *[
            tuple(range(requests, requests * (1 + K) + 1)),
            tuple((9 + n) / 1000 for n in range(requests, requests * (1 + K) + 1)),
        ]
        * 2,
    )
    for requests in (1, 2)
)
CURVE = CostCurve(POINTS, (4,), (tuple(1000 / (9 + n) for n in POINTS),), (1, 8), (0.002, 0.004), ROUNDS)
SCHEDULES = ("autoregressive", "full", "fixed", "threshold", "throughput")


def words(place: Place, curve: Path, output: Path, *more: str) -> Any:
    return place.words(
        "latency_prompts=0",
        f"load.curve={curve}",
        "load.batches=[1,3]",
        "load.simulated=[16]",
        f"load.repeats={REPEATS}",
        f"load.max_new_tokens={TOKENS}",
        *more,
        output=output,
        drafts=place.drafts[:1],
    )


class Done:
    """An evaluation with a comparison under load."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder)
        self.curve, self.output = folder / "curve.json", folder / "out"
        write_curve(self.curve, CURVE, {})
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            evaluate(words(self.place, self.curve, self.output))
        self.shown = shown.getvalue()
        self.journal = self.output / "load" / "sure.jsonl"
        self.lines = [json.loads(line) for line in self.journal.read_text().splitlines()]
        self.details = json.loads((self.output / "results.json").read_text())["details"]

    def of(self, requests: int, schedule: str) -> list[dict[str, Any]]:
        return [line["ways"][schedule] for line in self.lines if line["requests"] == requests]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Done(tmp_path_factory.mktemp("load"))


def test_every_load_is_played_with_every_schedule_as_often_as_asked(done: Done) -> None:
    assert sorted((line["requests"], line["repeat"]) for line in done.lines) == [
        (load, repeat) for load in (1, 3, 16) for repeat in range(REPEATS)
    ]
    for line in done.lines:
        assert tuple(line["ways"]) == SCHEDULES
    # Few requests in flight answer four prompts at least, one batch after the other.
    for load, prompts in ((1, 4), (3, 6)):
        # The prefill's own token belongs to no round, and no stop token ends an answer.
        assert all(one["tokens"] == prompts * (TOKENS - 1) for one in done.of(load, "autoregressive"))
        assert all(one["tokens"] >= prompts * (TOKENS - 1) for one in done.of(load, "throughput"))
        assert all(one["seconds"] > 0 for name in SCHEDULES for one in done.of(load, name))
        assert all(one["budget"] == K for one in done.of(load, "full"))
        assert all(one["budget"] == 0 for one in done.of(load, "autoregressive"))
    assert all(one["seconds"] is None and one["simulated"] > 0 for one in done.of(16, "full"))


def test_predictions_for_one_request_are_its_rounds_times_what_the_curve_says(done: Done) -> None:
    # A step of n tokens takes 9 + n ms, a draft step 2 ms.
    for one in done.of(1, "autoregressive"):
        assert one["simulated"] == pytest.approx(1000 / (9 + 1))
    for one in done.of(1, "full"):
        # Four prompts, one after the other.
        rounds = one["tokens"] / one["simulated"] / ((9 + 1 + K + 2) / 1000)
        assert rounds == pytest.approx(round(rounds))
        assert 4 <= round(rounds) <= 4 * (TOKENS - 1)


def test_rows_and_gains_follow_from_the_journal(done: Done) -> None:
    def speeds(load: int, schedule: str, key: str) -> list[float]:
        found = done.of(load, schedule)
        return [one["tokens"] / one["seconds"] if key == "measured" else one["simulated"] for one in found]

    def paces(load: int) -> list[float]:
        return [line["pace"] or 1.0 for line in done.lines if line["requests"] == load]

    loads, gains = done.details["loads"], done.details["gains"]
    assert len(loads) == 3 * len(SCHEDULES)
    assert [row["over"] for row in gains] == [*SCHEDULES[:-1]] * 3
    for row in loads:
        load, schedule = row["requests"], row["schedule"]
        simulated = [one / pace for one, pace in zip(speeds(load, schedule, "simulated"), paces(load), strict=True)]
        assert row["simulated_throughput"] == pytest.approx(median(simulated))
        # Of six values the least and the most hold the median with 1 - 2 / 64.
        assert row["simulated_throughput_ci95"] == pytest.approx([min(simulated), max(simulated)])
        assert row["budget"] == pytest.approx(median(one["budget"] for one in done.of(load, schedule)))
        if load == 16:
            assert [row[key] for key in ("throughput", "throughput_ci95", "off", "off_ci95", "pace")] == [None] * 5
            continue
        measured = speeds(load, schedule, "measured")
        assert row["pace"] == pytest.approx(median(paces(load)))
        off = [mine / true - 1 for mine, true in zip(simulated, measured, strict=True)]
        assert row["off"] == pytest.approx(median(off))
        assert row["off_ci95"] == pytest.approx([min(off), max(off)])
        assert row["throughput"] == pytest.approx(median(measured))
        assert row["throughput_ci95"] == pytest.approx([min(measured), max(measured)])
    for row in gains:
        for key, name in (("measured", "gain"), ("simulated", "simulated_gain")):
            if key == "measured" and row["requests"] == 16:
                assert (row["gain"], row["gain_ci95"]) == (None, None)
                continue
            pairs = zip(*(speeds(row["requests"], one, key) for one in ("throughput", row["over"])), strict=True)
            ratios = [mine / theirs for mine, theirs in pairs]
            assert row[name] == pytest.approx(median(ratios))
            assert row[f"{name}_ci95"] == pytest.approx([min(ratios), max(ratios)])


def test_the_profiles_own_rounds_are_played_in_turn_and_say_how_fast_the_machine_is(done: Done) -> None:
    for line in done.lines:
        assert (line["pace"] is None) == (line["requests"] == 16)
        assert line["pace"] is None or 0 < line["pace"] < 1000


def test_a_machine_that_became_slower_is_predicted_to_be() -> None:
    # Profiled at 100 tokens a second, decoded at 80 on a machine that takes a quarter longer: the prediction was right.
    ways = {"full": Played(tokens=80, seconds=1.0, budget=4.0, simulated=100.0)}
    (row,), _ = load_rows([Repeat(2, ways, 1.25)] * 6, "sure", 1.0)
    assert (row.simulated_throughput, row.off, row.pace) == (80.0, 0.0, 1.25)


def test_the_console_shows_the_speed_of_every_schedule_under_every_load(done: Done) -> None:
    rows = {(row["requests"], row["schedule"]): row for row in done.details["loads"]}
    lines = [re.findall(r"[^\s\u2502]+", line) for line in done.shown.splitlines() if "sure" in line]
    for load in (1, 3, 16):
        (cells,) = [cells[3:] for cells in lines if cells[:3] == ["sure", "1", str(load)]]
        wanted = "throughput" if load < 16 else "simulated_throughput"
        star = "" if load < 16 else "*"
        assert cells == [f"{rows[load, schedule][wanted]:,.1f}{star}" for schedule in SCHEDULES]


def test_the_page_shows_speeds_and_gains_with_their_intervals(done: Done) -> None:
    page = (done.output / "report.html").read_text()
    for heading in ("Schedules under load", "Gain of the throughput schedule", "Confidence at temperature 1"):
        assert f"<h2>{heading}</h2>" in page
    for row in done.details["gains"]:
        low, high = row["simulated_gain_ci95"]
        assert f"<td>{row['simulated_gain']:.3f}x</td><td>[{low:.3f}, {high:.3f}]</td>" in page


def test_a_rerun_plays_nothing_again_and_another_curve_everything(done: Done, tmp_path: Path) -> None:
    before = done.journal.read_bytes()
    evaluate(words(done.place, done.curve, done.output))
    assert done.journal.read_bytes() == before
    assert json.loads((done.output / "results.json").read_text())["details"] == done.details
    # One repeat more plays one line a load.
    evaluate(words(done.place, done.curve, done.output, f"load.repeats={REPEATS + 1}"))
    assert len(done.journal.read_text().splitlines()) == 3 * (REPEATS + 1)
    other = tmp_path / "curve.json"
    write_curve(other, CostCurve(POINTS, (4,), CURVE.steps_per_second, (1,), (0.003,)), {})
    evaluate(words(done.place, other, done.output, "load.repeats=1"))
    assert len(done.journal.read_text().splitlines()) == 3 * (REPEATS + 1) + 3
    done.journal.write_bytes(before)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("schedule=threshold",), "load.curve compares all schedules itself.* schedule is 'threshold'"),
        (("load.batches=[8]",), "load.batches .8. has 8 requests in flight, but the tasks have 7 prompts"),
        (("load.schedules=[throughput]",), "load: schedules .'throughput'. lacks 'full'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_decoded(
    done: Done, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(words(done.place, done.curve, tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


def test_a_curve_without_the_draft_and_a_second_draft_are_refused(done: Done, tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    write_curve(curve, CostCurve(POINTS, (0,), CURVE.steps_per_second), {})
    with pytest.raises(ConfigError, match=r"does not know what a draft step takes\. Profile with the draft"):
        evaluate(words(done.place, curve, tmp_path / "out"))
    with pytest.raises(ConfigError, match="given with 2 drafts, but a cost curve holds the time of one"):
        evaluate(done.place.words(f"load.curve={done.curve}", output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_repeats_share_no_prompt_as_long_as_there_are_enough() -> None:
    requests = [Request(f"p{index}", [1]) for index in range(len(PROMPTS))]
    for number in (2, 3):
        drawn = [one.prompt_id for repeat in range(2) for one in chosen(requests, number, repeat, seed=5)]
        assert len(set(drawn)) == 2 * number
    later = [one.prompt_id for one in chosen(requests, 3, 2, seed=5)]
    assert len(set(later)) == 3


def test_ways_that_take_turns_answer_as_each_does_alone_without_stop_tokens(done: Done) -> None:
    target = chat_target()
    draft = kind_of_draft(target, "dspark-vanilla").eval()
    config = words(done.place, done.curve, done.output, "load.max_new_tokens=12").load
    setup = Setup(target, draft, "sure", "w", CURVE, RAW_CONFIDENCE, config, Sampling(temperature=1.0), 3, "here")
    requests = [Request(f"p{index}", [7 + index] * (4 + index)) for index in range(3)]
    schedules = {"autoregressive": None, "full": FullSchedule(), "fixed": FixedSchedule(((1, 2),))}
    ways = {name: Way(schedule, lambda _: 0.0, K) for name, schedule in schedules.items()}
    played = play_in_turn(setup, ways, requests)
    target.stop_token_ids = ()
    for name, schedule in schedules.items():
        alone = generate(
            target,
            None if schedule is None else draft,
            requests,
            setup.sampling,
            max_new_tokens=12,
            batch_size=3,
            seed=3,
            schedule=schedule,
            timers=False,
        )
        expected = {one.prompt_id: one.output_ids for one in alone}
        assert {one.prompt_id: one.output_ids for one in played[name][0]} == expected
        assert all(len(output) == 12 for output in expected.values())
        assert played[name][1] > 0
