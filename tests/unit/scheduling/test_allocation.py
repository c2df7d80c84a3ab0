"""Algorithm 1 against brute force, and which slots a budget buys."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepspec.scheduling.allocation import best_number, causal_number, first_slots, ranked, survival


def naive_algorithm(chances: list[list[float]], rates: list[float]) -> list[int]:
    """Algorithm 1 as it is written, slot by slot."""
    lengths = [0] * len(chances)
    visits = sorted((-a, j, r) for r, row in enumerate(chances) for j, a in enumerate(row) if a > 0)
    expected, best = float(len(chances)), len(chances) * rates[0]
    for number, (minus, j, r) in enumerate(visits, start=1):
        expected -= minus
        if expected * rates[number] <= best:
            break
        best = expected * rates[number]
        lengths[r] = j + 1
    return lengths


def scheduled(chances: torch.Tensor, rates: list[float]) -> list[int]:
    descending, order = ranked(chances)
    number = causal_number(descending, len(chances), torch.tensor(rates, dtype=torch.float64))
    return first_slots(order, number, *chances.shape).tolist()


def random_chances(requests: int, block: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Coarse values make ties and certain slots (c = 1) common.
    confidence = (torch.rand(requests, block, generator=generator) * 5).ceil() / 5
    proposed = torch.randint(0, block + 1, (requests,), generator=generator)
    return survival(confidence, proposed)


@pytest.mark.parametrize("seed", range(40))
def test_vectorised_algorithm_1_admits_what_the_loop_admits(seed: int) -> None:
    chances = random_chances(1 + seed % 4, 1 + seed % 5, seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    steps = 1 + torch.rand(chances.numel() + 1, generator=generator).double().cumsum(0) * 0.2
    rates = (1 / steps).tolist()
    assert scheduled(chances, rates) == naive_algorithm(chances.tolist(), rates)


@pytest.mark.parametrize("seed", range(20))
def test_algorithm_1_finds_the_best_lengths_where_the_throughput_has_one_peak(seed: int) -> None:
    requests, block = 1 + seed % 3, 3
    chances = random_chances(requests, block, seed)
    # Affine seconds and descending survivals: tokens per second rises to one peak and falls.
    rates = [1 / (1 + 0.15 * number) for number in range(requests * block + 1)]

    def speed(lengths: tuple[int, ...]) -> float:
        gained = sum(float(row[:length].sum()) for row, length in zip(chances, lengths, strict=True))
        return (requests + gained) * rates[sum(lengths)]

    best = max(speed(lengths) for lengths in itertools.product(range(block + 1), repeat=requests))
    assert speed(tuple(scheduled(chances, rates))) == pytest.approx(best, rel=1e-12)


def test_on_a_stair_algorithm_1_stops_at_the_edge_that_a_search_would_cross() -> None:
    chances = torch.tensor([[0.9, 0.8, 0.7, 0.6]], dtype=torch.float64)
    # The step to two tokens costs half as much again, the three after it nothing.
    rates = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    descending, _ = ranked(chances)
    assert int(causal_number(descending, 1, rates)) == 0
    assert int(best_number(descending, 1, rates)) == 4


def test_equal_survivals_go_to_the_earlier_slot_then_to_the_earlier_request() -> None:
    chances = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    _, order = ranked(chances)
    taken = [first_slots(order, torch.tensor(number), 2, 2).tolist() for number in range(5)]
    assert taken == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def test_slots_that_were_not_proposed_or_cannot_be_accepted_are_never_admitted() -> None:
    chances = survival(torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.0, 0.9]]), torch.tensor([1, 3]))
    assert chances.tolist() == [[pytest.approx(0.9), 0, 0], [pytest.approx(0.9), 0, 0]]
    # Free tokens: everything that may be accepted is verified, and nothing else.
    assert scheduled(chances, [1.0] * 7) == [1, 1]
    descending, _ = ranked(chances)
    assert int(best_number(descending, 2, torch.tensor([1.0] * 6 + [50.0], dtype=torch.float64))) == 2


def test_an_equal_speed_is_no_gain() -> None:
    chances = torch.tensor([[1.0]], dtype=torch.float64)
    assert scheduled(chances, [1.0, 0.5]) == [0]
    assert scheduled(chances, [1.0, 0.50001]) == [1]
