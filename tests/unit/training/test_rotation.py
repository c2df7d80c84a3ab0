"""Which checkpoints stay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspec.training.rotation import Keep, best_step, kept_steps

TAU = "eval/acceptance_length"


def recorded(*values: float | None, first: int = 10) -> dict[int, dict[str, float]]:
    """Checkpoints every 10 steps with these values, None for one that recorded nothing."""
    return {first + 10 * i: {} if value is None else {TAU: value} for i, value in enumerate(values)}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Keep(2), {50, 60}),
        (Keep(1, every=20), {20, 40, 60}),
        (Keep(1, best=TAU), {30, 60}),
        (Keep(1, best=TAU, best_is="lowest"), {10, 60}),
        (Keep(2, every=40, best=TAU), {30, 40, 50, 60}),
        (Keep(1, best="another"), {60}),
    ],
)
def test_every_rule_keeps_its_own(keep: Keep, expected: set[int]) -> None:
    assert kept_steps(recorded(1.1, 1.5, 1.9, None, 1.2, 1.9 - 1e-9), keep) == expected


def test_the_newer_of_two_equal_ones_is_the_best_and_one_that_is_not_a_number_never_is() -> None:
    assert best_step(recorded(2.0, 2.0, math.nan), Keep(1, best=TAU)) == 20
    assert best_step(recorded(2.0, 2.0, math.inf), Keep(1, best=TAU, best_is="lowest")) == 20
    assert best_step(recorded(None, None), Keep(1, best=TAU)) is None


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 8)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_dropping_while_saving_keeps_what_dropping_at_the_end_would(
    values: list[float | None], last: int, every: int | None
) -> None:
    keep = Keep(last, every, TAU)
    on_disk: dict[int, dict[str, float]] = {}
    for step, metrics in recorded(*values).items():
        on_disk[step] = metrics
        kept = kept_steps(on_disk, keep)
        on_disk = {step: metrics for step, metrics in on_disk.items() if step in kept}
        assert step in on_disk
    assert set(on_disk) == kept_steps(recorded(*values), keep)
