"""The first pass over prompts of unlike lengths says what a forward of each alone says, and runs no padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_target
from torch import nn

from deepspec.decoding.prompts import run_prompts, shared_prefix

SHARED = list(range(20, 32))
COUNTS = [1, 9, 4]


def prompts(beginning: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [beginning + torch.randint(4, 90, (count,), generator=generator).tolist() for count in COUNTS]


@pytest.mark.parametrize("beginning", [[], SHARED])
def test_prompts_of_unlike_lengths_give_the_states_and_the_cache_of_each_alone(beginning: list[int]) -> None:
    target = tiny_target(dtype=torch.float64)
    rows = prompts(beginning)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    tokens: list[int] = []

    def count(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        tokens.append(arguments[0].shape[0] * arguments[0].shape[1])

    handle = target.layer(0).register_forward_pre_hook(count)
    prefix = shared_prefix(target, rows)
    features, last_hidden, cache = run_prompts(target, ids, [len(row) for row in rows], prefix)
    handle.remove()
    assert (prefix is not None) == bool(beginning)
    assert sum(tokens) == len(beginning) + sum(COUNTS)
    # One more token of each row reads what the cache holds of it.
    places = torch.tensor([[len(row)] for row in rows])
    following = target.forward_cached(torch.full((len(rows), 1), 7), places, cache, longest + 1)[1]
    for index, row in enumerate(rows):
        alone = target.features(torch.tensor([[*row, 7]]))
        assert torch.allclose(features[index, : len(row)], alone[0][0, :-1], atol=1e-9)
        assert torch.allclose(last_hidden[index, : len(row)], alone[1][0, :-1], atol=1e-9)
        assert torch.allclose(following[index], alone[1][0, -1:], atol=1e-9)


def test_what_two_prompts_share_is_run_once_but_for_the_last_token_of_the_shorter() -> None:
    target = tiny_target()
    prefix = shared_prefix(target, [SHARED, [*SHARED, 50]])
    assert prefix is not None
    assert prefix.length == len(SHARED) - 1
    assert shared_prefix(target, [SHARED]) is None
    assert shared_prefix(target, [[3, *SHARED], SHARED]) is None
