"""Real runs whose target runs ahead of the draft: the same losses and weights, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import make_config, make_place, read_losses

from deepspec.training.checkpoint import read_training_state
from deepspec.training.run import train

AHEAD = "features.overlap=true"
KEPT = "checkpoint.keep_last=9"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("overlapped_target"))


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "training_state.safetensors")


def assert_same_state(found: Path, expected: Path) -> None:
    found_state, expected_state = state(found), state(expected)
    assert found_state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        assert torch.equal(found_state[name], value), name


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("dspark", ()),
        (
            "dspark",
            (
                "algorithm.draft_vocab_size=24",
                "features.anchors_per_target_pass=10",
                "optimizer.micro_batch_size=2",
            ),
        ),
        ("eagle3", ("optimizer.micro_batch_size=4",)),
    ],
    ids=["dspark", "dspark-reduced-several-sets", "eagle3"],
)
def test_a_run_with_its_target_ahead_is_the_run_without_bit_by_bit_also_after_a_resume(
    place: Path, algorithm: str, overrides: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    plain = make_config(place, f"{name}-plain", *overrides, algorithm=algorithm)
    ahead = make_config(place, f"{name}-ahead", AHEAD, KEPT, *overrides, algorithm=algorithm)
    first, second = train(plain), train(ahead)
    assert repr(read_losses(ahead)) == repr(read_losses(plain))
    assert_same_state(second, first)
    middle = ahead.run_dir / "step_2"
    resumed = make_config(
        place, f"{name}-resumed", AHEAD, f"checkpoint.resume={middle}", *overrides, algorithm=algorithm
    )
    third = train(resumed)
    assert read_training_state(third).progress.step == 5
    assert repr(read_losses(resumed)) == repr(read_losses(plain)[2:])
    assert_same_state(third, first)


def test_a_run_may_go_on_with_its_target_ahead_or_not(place: Path) -> None:
    plain = make_config(place, "switch-plain")
    first = train(plain)
    train(make_config(place, "switch", KEPT))
    middle = place / "switch" / "step_2"
    again = make_config(place, "switch-ahead", AHEAD, f"checkpoint.resume={middle}")
    assert_same_state(train(again), first)
