"""The cost curve: look-ups, files of ours and of SGLang, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspec.errors import DataError
from deepspec.scheduling.cost import CostCurve, non_increasing, read_curve, write_curve, write_sglang_table

CURVE = CostCurve((1, 2, 4, 8), (0, 100), ((10.0, 9.0, 8.0, 5.0), (8.0, 7.0, 6.0, 4.0)), (1, 4), (0.01, 0.04))


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


def test_rates_that_rise_are_lowered_to_the_one_before() -> None:
    assert non_increasing([5.0, 6.0, 4.0, 4.5, 1.0]) == (5.0, 5.0, 4.0, 4.0, 1.0)


def test_a_curve_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_curve(tmp_path / "curve.json", CURVE, {"made_with": {"x": 1}})
    assert read_curve(tmp_path / "curve.json") == CURVE


def test_sglangs_table_is_written_with_its_three_keys_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_sglang_table(path, CURVE, 100)
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


def test_a_missing_curve_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .* deepspec profile"):
        read_curve(tmp_path / "none.json")
