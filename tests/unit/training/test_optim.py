"""The learning-rate schedule, clipping and AdamW on master weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspec.config import compose_train
from deepspec.errors import ConfigError
from deepspec.training.optim import (
    clip_gradients,
    decay_steps,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    warmup_steps,
)

RUNS = st.tuples(st.integers(1, 3000), st.floats(0.0, 1.0))


def rates(total_steps: int, warmup_share: float, peak: float = 6e-4) -> list[float]:
    return [
        learning_rate(step, peak=peak, total_steps=total_steps, warmup_share=warmup_share)
        for step in range(total_steps + 1)
    ]


@given(RUNS)
def test_the_peak_is_reached_exactly_once_and_never_exceeded(run: tuple[int, float]) -> None:
    total_steps, share = run
    series = rates(total_steps, share)
    assert max(series) == 6e-4
    assert series.count(6e-4) == 1
    assert series.index(6e-4) == warmup_steps(total_steps, share)


@given(RUNS)
def test_the_rate_rises_to_the_peak_then_falls_to_zero_after_the_last_step(run: tuple[int, float]) -> None:
    total_steps, share = run
    series = rates(total_steps, share)
    top = warmup_steps(total_steps, share)
    changes = np.diff(series)
    assert (changes[:top] > 0).all()
    assert (changes[top:] < 0).all()
    assert series[-1] == pytest.approx(0.0, abs=1e-18)
    assert all(rate > 0 for rate in series[:-1])


@given(RUNS)
def test_the_rate_makes_no_jump_at_the_hand_over(run: tuple[int, float]) -> None:
    total_steps, share = run
    series = rates(total_steps, share)
    warmup = warmup_steps(total_steps, share)
    steepest = max(1 / (warmup + 1), math.pi / 2 / (total_steps - warmup)) * 6e-4
    changes = np.abs(np.diff(series))
    assert changes.max() <= steepest * (1 + 1e-9)


def test_a_short_run_still_warms_up_and_a_run_of_one_step_uses_the_peak() -> None:
    assert warmup_steps(10, 0.04) == 1
    assert rates(10, 0.04)[0] == pytest.approx(3e-4)
    assert warmup_steps(1, 0.04) == 0
    assert rates(1, 0.04)[0] == 6e-4
    assert rates(10, 0.0)[0] == 6e-4


def test_the_schedule_equals_its_formula_written_with_loops() -> None:
    expected = [6e-4 * (step + 1) / 9 for step in range(8)]
    expected += [3e-4 * (1 + math.cos(math.pi * step / 192)) for step in range(193)]
    assert rates(200, 0.04) == pytest.approx(expected, abs=1e-18)


def wsd_rates(total_steps: int, warmup_share: float, decay_share: float, peak: float = 6e-4) -> list[float]:
    settings = {"warmup_share": warmup_share, "schedule": "wsd", "decay_share": decay_share}
    return [learning_rate(step, peak=peak, total_steps=total_steps, **settings) for step in range(total_steps + 1)]


WSD_RUNS = st.tuples(st.integers(1, 3000), st.floats(0.0, 1.0), st.floats(0.0, 1.0)).map(
    lambda run: (run[0], run[1], min(run[2], 1.0 - run[1]))
)


@given(WSD_RUNS)
def test_wsd_rises_to_the_peak_stays_there_and_falls_to_exactly_zero(run: tuple[int, float, float]) -> None:
    total_steps, warmup_share, decay_share = run
    series = wsd_rates(*run)
    warmup = warmup_steps(total_steps, warmup_share)
    decay = decay_steps(total_steps, warmup, decay_share)
    assert max(series) == 6e-4
    assert (np.diff(series[: warmup + 1]) > 0).all()
    assert series[warmup : total_steps - decay + 1] == [6e-4] * (total_steps - decay - warmup + 1)
    assert (np.diff(series[total_steps - decay :]) < 0).all()
    assert series[-1] == (0.0 if decay else 6e-4)
    assert all(rate > 0 for rate in series[:-1])


def test_wsd_equals_its_formula_written_with_loops() -> None:
    expected = [6e-4 * (step + 1) / 9 for step in range(8)]
    expected += [6e-4] * (150 - 8)
    expected += [6e-4 * (1 - step / 50) for step in range(51)]
    assert wsd_rates(200, 0.04, 0.25) == pytest.approx(expected, abs=1e-18)


def test_wsd_of_a_longer_run_is_the_same_until_the_shorter_one_decays() -> None:
    short, long = wsd_rates(100, 0.1, 0.2), wsd_rates(200, 0.05, 0.1)
    assert short[:81] == long[:81]
    assert short[81] < long[81]


def test_wsd_in_the_shortest_runs_has_its_peak_and_its_decay() -> None:
    assert wsd_rates(1, 0.04, 0.2) == [6e-4, 0.0]
    assert wsd_rates(2, 0.04, 0.2) == pytest.approx([3e-4, 6e-4, 0.0])
    assert wsd_rates(3, 0.0, 0.0) == [6e-4] * 4


def test_wsd_shares_beyond_the_whole_run_are_refused() -> None:
    overrides = ["experiment=dspark_qwen3_4b", "optimizer.warmup_share=0.5", "optimizer.decay_share=0.6"]
    assert compose_train(overrides).optimizer.schedule == "cosine"
    with pytest.raises(ConfigError, match=r"warmup_share 0\.5 and decay_share 0\.6 .* Use decay_share=0\.5 or less"):
        compose_train([*overrides, "optimizer.schedule=wsd"])


def test_clipping_scales_all_gradients_by_one_factor_and_returns_the_norm_before() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([4.0])
    norm = clip_gradients(parameters, 1.0)
    assert float(norm) == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.0], abs=1e-6)
    assert parameters[1].grad.tolist() == pytest.approx([0.8], abs=1e-6)


def test_adamw_follows_its_equations_in_float64() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5))
    frozen = nn.Parameter(torch.randn(5), requires_grad=False)
    optimizer = make_optimizer([parameter, frozen], betas=(0.9, 0.95), weight_decay=0.1)
    weights = parameter.detach().double()
    first, second = torch.zeros(5).double(), torch.zeros(5).double()
    for step in range(1, 6):
        gradient = torch.randn(5)
        rate = 0.01 / step
        parameter.grad = gradient.clone()
        set_learning_rate(optimizer, rate)
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.95 * second + 0.05 * gradient.double() ** 2
        weights = weights * (1 - rate * 0.1)
        weights = weights - rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(parameter.detach().double(), weights, rtol=1e-5, atol=1e-6)


def test_rounded_master_weights_are_refused() -> None:
    with pytest.raises(AssertionError, match="fp32"):
        make_optimizer([nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))], betas=(0.9, 0.999), weight_decay=0.0)
