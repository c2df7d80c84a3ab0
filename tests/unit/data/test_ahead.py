"""A target that runs ahead of the draft: one batch, in the announced order, with the very numbers of its turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from chat_targets import VOCABULARY, chat_target
from torch import Tensor

from deepspec.data.ahead import AheadFeatures
from deepspec.data.chat import TokenSample
from deepspec.data.features import FeatureMemory, FeatureSource, OnlineFeatures
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch


def samples(count: int = 14) -> list[TokenSample]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for index in range(count):
        length = 8 + 3 * (index % 5)
        ids = torch.randint(5, len(VOCABULARY), (length,), generator=generator).tolist()
        made.append(TokenSample(f"s{index}", ids, [position > 3 for position in range(length)]))
    # The same text twice: a memory of passes answers the second.
    return [*made, made[1]]


def steps(anchor_sets: int = 1, count: int = 5) -> list[list[TokenBatch]]:
    loader = BatchLoader(
        samples(), limits=BatchLimits(6, 2, anchor_sets=anchor_sets), num_anchors=4, seed=2, pad_token_id=0
    )
    taken = loader.steps()
    return [next(taken).micro_batches for _ in range(count)]


def online(target: Target, memory_gib: float = 0.0) -> OnlineFeatures:
    return OnlineFeatures(target, samples(), FeatureMemory(memory_gib), needs_log_normaliser=True)


def trained(source: FeatureSource, of_steps: Sequence[Sequence[TokenBatch]]) -> Iterator[FeatureBatch]:
    """The batches of a training, which announces each step before the one ahead of it."""
    source.upcoming(of_steps[0])
    for index, micro_batches in enumerate(of_steps):
        if index + 1 < len(of_steps):
            source.upcoming(of_steps[index + 1])
        batch: FeatureBatch | None = None
        for tokens in micro_batches:
            if batch is not None and batch.tokens.sample_index is not tokens.sample_index:
                batch = None
            batch = source.complete(tokens, batch)
            yield batch


def assert_equal(found: FeatureBatch, expected: FeatureBatch, tokens: TokenBatch) -> None:
    assert found.tokens is tokens
    assert torch.equal(found.features, expected.features)
    assert torch.equal(found.last_hidden, expected.last_hidden)
    assert found.log_normaliser is not None
    assert expected.log_normaliser is not None
    assert torch.equal(found.log_normaliser, expected.log_normaliser)


@pytest.mark.parametrize("memory_gib", [0.0, 1e-5, 1.0], ids=["no-memory", "small-memory", "memory"])
@pytest.mark.parametrize("anchor_sets", [1, 2])
def test_every_number_is_that_of_a_target_that_runs_in_its_turn(memory_gib: float, anchor_sets: int) -> None:
    target, of_steps = chat_target(torch.float32), steps(anchor_sets)
    ahead = trained(AheadFeatures(online(target, memory_gib), target.device), of_steps)
    in_turn = trained(online(target, memory_gib), of_steps)
    every = [tokens for micro_batches in of_steps for tokens in micro_batches]
    for found, expected, tokens in zip(ahead, in_turn, every, strict=True):
        assert_equal(found, expected, tokens)


def test_the_target_runs_one_announced_batch_ahead_in_order_and_over_none_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, of_steps = chat_target(torch.float32), steps(anchor_sets=2)
    seen: list[Tensor] = []
    run = target.features
    monkeypatch.setattr(target, "features", lambda ids: (seen.append(ids), run(ids))[1])
    every = [tokens for micro_batches in of_steps for tokens in micro_batches]
    runs = [tokens for place, tokens in enumerate(every) if not place or not is_further_set(every, place)]
    assert len(every) > len(runs)
    asked = -1
    for place, _ in enumerate(trained(AheadFeatures(online(target), target.device), of_steps)):
        asked += not is_further_set(every, place)
        assert len(seen) == min(asked + 2, len(runs))
    for ids, tokens in zip(seen, runs, strict=True):
        assert torch.equal(ids, tokens.input_ids)


def is_further_set(every: Sequence[TokenBatch], place: int) -> bool:
    return place > 0 and every[place].sample_index is every[place - 1].sample_index


def test_batches_may_come_unannounced_out_of_order_and_after_others_that_nobody_asks_for() -> None:
    target, (first, second, third, *_) = chat_target(torch.float32), steps()
    ahead, in_turn = AheadFeatures(online(target), target.device), online(target)
    ahead.upcoming([*first, *second])
    # Unannounced; in order; two are left out; the one begun is left out; an earlier one again; the rest.
    for tokens in [third[0], first[0], second[0], second[2], first[1], third[1]]:
        assert_equal(ahead.complete(tokens), in_turn.complete(tokens), tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_passes_beside_a_busy_stream_overwrite_nothing_that_it_still_has_to_read() -> None:
    device = torch.device("cuda")
    target = Target(
        chat_target(torch.float32).model.to(device), None, name="tiny-chat", layer_ids=(0, 1, 3), mask_token_id=4
    )
    of_steps = steps(count=40)
    wanted = [online(target).complete(on_device(tokens, device)) for step in of_steps for tokens in step]
    source = AheadFeatures(online(target), device)
    large = torch.randn(2048, 2048, device=device)
    differences, batches = [], iter(wanted)
    source.upcoming(of_steps[0])
    for index, micro_batches in enumerate(of_steps):
        if index + 1 < len(of_steps):
            source.upcoming(of_steps[index + 1])
        for tokens in micro_batches:
            batch = source.complete(on_device(tokens, device))
            # The draft's stream falls far behind the host before it reads what it was given.
            for _ in range(20):
                large = torch.tanh(large @ large)
            expected = next(batches)
            for found, other in zip(batch[1:4], expected[1:4], strict=True):
                differences.append((found != other).sum())
            del batch
    assert int(torch.stack(differences).sum()) == 0


def on_device(tokens: TokenBatch, device: torch.device) -> TokenBatch:
    """As the trainer: the sample index stays where it is."""
    moved = TokenBatch(*(tensor.to(device) for tensor in tokens))
    return moved._replace(sample_index=tokens.sample_index)
