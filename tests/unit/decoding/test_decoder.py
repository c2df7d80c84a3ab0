"""What the decoder runs the target over while requests of a batch finish one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_draft, tiny_target
from torch import nn

from deepspec.decoding.decoder import Request, generate, generate_by_round
from deepspec.decoding.sampling import Sampling

ROWS = 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_requests_that_have_finished_cost_one_token_a_round_and_change_nothing(
    algorithm: str, temperature: float
) -> None:
    target = tiny_target(dtype=torch.float64)
    draft = tiny_draft(target, algorithm).eval()
    generator = torch.Generator().manual_seed(7)
    requests = [Request(f"p{row}", torch.randint(4, 90, (5,), generator=generator).tolist()) for row in range(ROWS)]

    def decode(batch: int) -> list[Any]:
        found = generate(target, draft, requests, Sampling(temperature), max_new_tokens=24, batch_size=batch)
        return sorted(found, key=lambda one: one.prompt_id)

    def count(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        tokens.append(arguments[0].shape[0] * arguments[0].shape[1])

    tokens: list[int] = []
    free = decode(ROWS)
    target.stop_token_ids = (free[0].output_ids[3], free[1].output_ids[9])
    alone = decode(1)
    handle = target.layer(0).register_forward_pre_hook(count)
    together = decode(ROWS)
    handle.remove()
    for one, other in zip(together, alone, strict=True):
        assert (one.output_ids, one.finish_reason) == (other.output_ids, other.finish_reason)
        assert [item.accepted for item in one.rounds] == [item.accepted for item in other.rounds]
    rows, expected, idle = ROWS, [], 0
    for index in range(max(len(one.rounds) for one in together)):
        active = sum(len(one.rounds) > index for one in together)
        rows = active if 4 * active <= 3 * rows else rows
        expected.append(active * (draft.num_draft_tokens + 1) + rows - active)
        idle += rows - active
    assert tokens[1:] == expected, "the first forward reads the prompts"
    assert idle > 0


def test_a_free_row_is_filled_before_the_next_round_as_long_as_prompts_wait() -> None:
    target = tiny_target(dtype=torch.float64)
    draft = tiny_draft(target, "dspark").eval()
    generator = torch.Generator().manual_seed(11)
    requests = [Request(f"p{row}", torch.randint(4, 90, (5,), generator=generator).tolist()) for row in range(20)]
    tokens: list[int] = []

    def count(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        tokens.append(arguments[0].shape[0] * arguments[0].shape[1])

    options: dict[str, Any] = {"max_new_tokens": 9, "batch_size": 4, "timers": False}
    alone = {one.prompt_id: one for one in generate(target, draft, requests, Sampling(), **options | {"batch_size": 1})}
    handle = target.layer(0).register_forward_pre_hook(count)
    loop = generate_by_round(target, draft, requests, Sampling(), stops=False, **options)
    found, read, passes = [], 0, 0
    while read < len(requests):
        before = len(tokens)
        found += next(loop)
        read += sum(tokens[before:]) // 5
        passes += len(tokens) - before
        before = len(tokens)
        found += next(loop)
        assert tokens[before:] == [4 * (draft.num_draft_tokens + 1)]
    for part in loop:
        found += part
    handle.remove()
    # Prompts are read several at a time, also where one row alone was free.
    assert passes <= 1 + (len(requests) - 4) // 2
    assert {one.prompt_id: one.output_ids for one in found} == {key: one.output_ids for key, one in alone.items()}
