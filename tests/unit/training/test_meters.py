"""Sums that travel in one all-reduce."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepspec.training.meters import Meters
from deepspec.types import Ratio

CPU = torch.device("cpu")


def ratio(total: float, count: float) -> Ratio:
    return Ratio(torch.tensor(total), torch.tensor(count))


def test_a_mean_weighs_every_item_the_same_however_micro_batches_are_cut() -> None:
    meters = Meters()
    meters.add({"loss": ratio(10.0, 1.0)})
    meters.add({"loss": ratio(3.0, 3.0)})
    assert meters.reduce(lambda tensor: tensor, CPU)["loss"].mean == 13.0 / 4.0


def test_all_names_are_reduced_in_one_call_and_in_one_order() -> None:
    calls: list[Tensor] = []

    def all_reduce(tensor: Tensor) -> Tensor:
        calls.append(tensor.clone())
        return tensor * 2

    one, other = Meters(), Meters()
    one.add({"b": ratio(1.0, 2.0)})
    one.add({"a": Ratio(torch.tensor(3), torch.tensor(4))})
    other.add({"a": ratio(3.0, 4.0), "b": ratio(1.0, 2.0)})
    sums = one.reduce(all_reduce, CPU)
    other.reduce(all_reduce, CPU)
    assert len(calls) == 2
    assert calls[0].tolist() == calls[1].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert (sums["a"].total, sums["b"].count) == (6.0, 4.0)


def test_reducing_starts_afresh() -> None:
    meters = Meters()
    meters.add({"loss": ratio(1.0, 1.0)})
    meters.reduce(lambda tensor: tensor, CPU)
    assert meters.reduce(lambda tensor: tensor, CPU) == {}
    meters.add({"loss": ratio(5.0, 1.0)})
    assert meters.reduce(lambda tensor: tensor, CPU)["loss"].mean == 5.0


def test_a_mean_of_nothing_is_nan_and_many_small_terms_are_not_lost() -> None:
    meters = Meters()
    meters.add({"empty": ratio(0.0, 0.0)})
    meters.add({"long": ratio(2.0**24, 1.0)})
    for _ in range(8):
        meters.add({"long": ratio(1.0, 1.0)})
    sums = meters.reduce(lambda tensor: tensor, CPU)
    assert math.isnan(sums["empty"].mean)
    assert sums["long"].total == 2.0**24 + 8.0  # fp32 sums would stay at 2 ** 24


def test_loaded_sums_that_the_run_does_not_add_to_are_left_out_so_that_all_processes_reduce_the_same_names() -> None:
    shapes: list[tuple[int, ...]] = []

    def all_reduce(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    main, other = Meters(), Meters()
    main.load({"loss": (3.0, 1.0), "skipped_updates": (1.0, 1.0)})
    for meters in (main, other):
        meters.mark()
        meters.add({"loss": ratio(1.0, 1.0)})
        meters.undo_if(torch.tensor(False))
    sums = main.reduce(all_reduce, CPU)
    assert sums.keys() == other.reduce(all_reduce, CPU).keys() == {"loss"}
    assert shapes == [(1, 2), (1, 2)]
    assert sums["loss"].mean == 2.0
