"""The cost curve: look-ups, files of ours and of SGLang, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspec.errors import DataError
from deepspec.scheduling.cost import (
    CostCurve,
    Kind,
    Lookup,
    RoundCosts,
    non_increasing,
    read_curve,
    write_curve,
    write_sglang_table,
)

CURVE = CostCurve((1, 2, 4, 8), (0, 100), ((10.0, 9.0, 8.0, 5.0), (8.0, 7.0, 6.0, 4.0)), (1, 4), (0.01, 0.04))
ROUNDS = (
    RoundCosts(1, 0.11, 0.16, (1, 4), (0.12, 0.18), (1, 2, 4), (0.12, 0.14, 0.20)),
    RoundCosts(3, 0.15, 0.30, (3, 12), (0.18, 0.33), (3, 6, 12), (0.18, 0.24, 0.36)),
)
PLAYED = replace(CURVE, rounds=ROUNDS)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 10.0), (2, 9.0), (3, 9.0), (4, 8.0), (7, 8.0), (8, 5.0)])
def test_between_points_the_left_neighbour_counts(tokens: int, expected: float) -> None:
    assert CURVE.rate(tokens) == expected


def test_linear_look_up_interpolates_seconds() -> None:
    assert 1 / CURVE.rate(3, 0, "linear") == pytest.approx((1 / 9 + 1 / 8) / 2)
    assert 1 / CURVE.rate(6, 0, "linear") == pytest.approx((1 / 8 + 1 / 5) / 2)
    for tokens in (1, 2, 4, 8):
        assert CURVE.rate(tokens, 0, "linear") == CURVE.rate(tokens)


def test_past_the_last_point_a_step_takes_longer_in_proportion() -> None:
    for lookup in ("left", "linear"):
        assert CURVE.rate(16, 0, lookup) == pytest.approx(2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("context", "expected"), [(0, 10.0), (99, 10.0), (100, 8.0), (5000, 8.0)])
def test_the_largest_measured_context_that_is_not_longer_counts(context: int, expected: float) -> None:
    assert CURVE.rate(1, context) == expected


def test_draft_time_is_linear_between_points_and_grows_past_them() -> None:
    assert CURVE.draft_time(1) == 0.01
    assert CURVE.draft_time(2) == pytest.approx(0.02)
    assert CURVE.draft_time(8) == pytest.approx(0.08)
    assert CostCurve((1,), (0,), ((1.0,),)).draft_time(3) == 0.0


def test_rates_of_a_batch_count_anchors_and_the_draft() -> None:
    assert CURVE.rates(2, 3, 0, "left", False) == (9.0, 9.0, 8.0, 8.0)
    assert CURVE.rates(1, 1, 0, "left", True) == pytest.approx((1 / (0.1 + 0.01), 1 / (1 / 9 + 0.01)))


@pytest.mark.parametrize(
    ("requests", "tokens", "kind", "expected"),
    [
        (1, 1, "plain", 0.11),
        (1, 4, "whole", 0.16),
        (1, 2, "cut", 0.14),
        (1, 2, "even", 0.14),
        (3, 6, "even", 0.23),
        (1, 3, "cut", 0.17),  # between two points of one request
        (3, 6, "cut", 0.24),
        (2, 4, "cut", (0.14 + 0.24) / 2),  # two tokens each, between one and three requests
        (2, 2, "plain", 0.13),
        (6, 6, "plain", 0.30),  # twice the most requests
        (6, 12, "cut", 0.48),
        (1, 8, "cut", 0.40),  # twice the most tokens
    ],
)
def test_a_round_costs_what_the_nearest_rounds_that_were_played_took(
    requests: int, tokens: int, kind: Kind, expected: float
) -> None:
    assert PLAYED.beside_draft(requests, tokens, 0, kind) == pytest.approx(expected)
    # At the longer context it takes longer by as much as a step of the target does.
    longer = 1 / CURVE.rate(tokens, 100, "linear") - 1 / CURVE.rate(tokens, 0, "linear")
    assert longer > 0
    assert PLAYED.beside_draft(requests, tokens, 100, kind) == pytest.approx(expected + longer)


@pytest.mark.parametrize(("lookup", "expected"), [("left", 0.14), ("linear", 0.17)])
def test_between_cut_rounds_the_look_up_counts(lookup: Lookup, expected: float) -> None:
    assert PLAYED.beside_draft(1, 3, 0, "cut", lookup) == pytest.approx(expected)


def test_a_longer_context_that_was_timed_faster_takes_nothing_off() -> None:
    rounds = RoundCosts(1, 1e-3, 1e-3, (1, 6), (1e-3, 1e-3), (1, 6), (1e-6, 2e-5))
    curve = CostCurve((1, 8), (64, 512), ((500.0, 400.0), (510.0, 420.0)), (1,), (1e-3,), (rounds,))
    assert curve.beside_draft(1, 1, 512) == curve.beside_draft(1, 1, 64) == 1e-6
    assert min(curve.rates(1, 5, 512, "left", False)) > 0


def test_without_rounds_a_round_is_the_step_of_the_target() -> None:
    for kind in ("plain", "whole", "even", "cut"):
        assert CURVE.beside_draft(2, 3, 0, kind) == pytest.approx(1 / CURVE.rate(3, 0, "linear"))  # type: ignore[arg-type]


def test_rates_of_a_batch_are_those_of_cut_rounds() -> None:
    assert PLAYED.rates(1, 2, 0, "linear", False) == pytest.approx((1 / 0.12, 1 / 0.14, 1 / 0.17))
    assert PLAYED.rates(1, 1, 0, "linear", True) == pytest.approx((1 / (0.12 + 0.01), 1 / (0.14 + 0.01)))


def test_rates_that_rise_are_lowered_to_the_one_before() -> None:
    assert non_increasing([5.0, 6.0, 4.0, 4.5, 1.0]) == (5.0, 5.0, 4.0, 4.0, 1.0)


def test_a_curve_is_read_as_it_was_written(tmp_path: Path) -> None:
    for curve in (CURVE, PLAYED):
        write_curve(tmp_path / "curve.json", curve, {"made_with": {"x": 1}})
        assert read_curve(tmp_path / "curve.json") == curve


def test_a_curve_of_a_version_that_played_no_rounds_still_means_what_it_meant(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    write_curve(path, CURVE, {})
    content = json.loads(path.read_text())
    del content["rounds"]
    path.write_text(json.dumps(content))
    assert read_curve(path) == CURVE


def test_sglangs_table_is_written_with_its_three_keys_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_sglang_table(path, PLAYED, 100)
    content = json.loads(path.read_text())
    assert content == {
        "sample_batch_tokens": [1, 2, 4, 8],
        "sample_steps_per_sec": [8.0, 7.0, 6.0, 4.0],
        "max_batch_tokens": 8,
    }
    assert read_curve(path) == CostCurve((1, 2, 4, 8), (0,), ((8.0, 7.0, 6.0, 4.0),))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "it has neither our keys"),
        ({"bias_seconds": 1.0}, "SGLang's additive table"),
        ({"sample_batch_tokens": [1, 1], "sample_steps_per_sec": [1.0, 1.0]}, "tokens do not ascend"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0, 0.0]}, "a rate is not positive"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0, 1e300]}, "not within 1e-09 to 1e\\+12"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1e-300, 1.0]}, "not within 1e-09 to 1e\\+12"),
        ({"sample_batch_tokens": [1, math.inf], "sample_steps_per_sec": [1.0, 1.0]}, "is damaged"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0]}, "not one value for every point"),
        ({"sample_batch_tokens": []}, "is damaged"),
        ({"schema": 1, "tokens": [1]}, "is damaged"),
    ],
)
def test_what_is_no_curve_is_refused_by_name(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=words):
        read_curve(path)


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ((ROUNDS[1], ROUNDS[0]), "rounds do not ascend in requests"),
        ((ROUNDS[0]._replace(cut_tokens=(2, 1, 4)),), "tokens of rounds do not ascend"),
        ((ROUNDS[0]._replace(even_tokens=(4, 1)),), "tokens of rounds do not ascend"),
        ((ROUNDS[0]._replace(cut_tokens=(), cut=()),), "not one time for every round"),
        ((ROUNDS[0]._replace(cut=(0.1, 0.2)),), "not one time for every round"),
        ((ROUNDS[0]._replace(even=(0.1, -0.2)),), "the time of a round is not positive"),
        ((ROUNDS[0]._replace(whole=0.0),), "the time of a round is not positive"),
    ],
)
def test_rounds_that_cannot_have_been_played_are_refused(rounds: tuple[RoundCosts, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        replace(CURVE, rounds=rounds)


def test_a_round_without_its_times_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    write_curve(path, PLAYED, {})
    content = json.loads(path.read_text())
    del content["rounds"][0]["whole"]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="is damaged"):
        read_curve(path)


def test_a_missing_curve_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .* deepspec profile"):
        read_curve(tmp_path / "none.json")
