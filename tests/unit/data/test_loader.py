"""A step's samples and anchors depend on (seed, step) alone, however they are split."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.data.anchors import draw_anchors
from deepspec.data.chat import TokenSample
from deepspec.data.loader import BatchLimits, BatchLoader, StepBatches
from deepspec.errors import ConfigError, DataError
from deepspec.types import TokenBatch

PAD = 99
NUM_ANCHORS = 3


def make_samples(count: int, seed: int = 0) -> list[TokenSample]:
    generator = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(generator.integers(3, 60))
        prompt = int(generator.integers(1, length - 1))
        ids = generator.integers(0, 90, length).tolist()
        samples.append(TokenSample(str(index), ids, [i >= prompt for i in range(length)]))
    return samples


def make_loader(
    samples: list[TokenSample],
    global_batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 7,
    **limits: int,
) -> BatchLoader:
    return BatchLoader(
        samples,
        limits=BatchLimits(global_batch_size, micro_batch_size, **limits),
        num_anchors=NUM_ANCHORS,
        seed=seed,
        pad_token_id=PAD,
        rank=rank,
        world_size=world_size,
    )


def supervised_rows(batch: TokenBatch) -> list[tuple[int, list[int]]]:
    """(sample index, anchors) of the rows that are not fillers."""
    return [
        (int(batch.sample_index[row]), batch.anchors[row][batch.anchor_mask[row]].tolist())
        for row in range(len(batch.lengths))
        if batch.answer_mask[row].any()
    ]


def union(ranks: list[StepBatches]) -> list[tuple[int, list[int]]]:
    return sorted(pair for step in ranks for batch in step.micro_batches for pair in supervised_rows(batch))


sizes = {
    "count": st.integers(1, 25),
    "global_batch_size": st.integers(1, 12),
    "micro_batch_size": st.integers(1, 5),
    "world_size": st.integers(1, 4),
}


@settings(max_examples=60, deadline=None)
@given(**sizes)
def test_every_epoch_visits_every_sample_exactly_once_and_ranks_hold_equally_many_micro_batches(
    count: int, global_batch_size: int, micro_batch_size: int, world_size: int
) -> None:
    samples = make_samples(count)
    loaders = [make_loader(samples, global_batch_size, micro_batch_size, r, world_size) for r in range(world_size)]
    steps_per_epoch = loaders[0].steps_per_epoch
    assert steps_per_epoch == len(range(0, count, global_batch_size))
    visits: list[Counter[int]] = [Counter(), Counter()]
    for step, ranks in enumerate(
        islice(zip(*(loader.steps() for loader in loaders), strict=True), 2 * steps_per_epoch)
    ):
        rows = union(list(ranks))
        assert {(r.epoch, r.step, r.num_samples) for r in ranks} == {(step // steps_per_epoch, step, len(rows))}
        assert len({len(r.micro_batches) for r in ranks}) == 1
        assert all(len(batch.lengths) <= micro_batch_size for r in ranks for batch in r.micro_batches)
        visits[step // steps_per_epoch].update(index for index, _ in rows)
    assert visits == [Counter(range(count))] * 2


@settings(max_examples=30, deadline=None)
@given(
    count=sizes["count"],
    global_batch_size=sizes["global_batch_size"],
    splits=st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_samples_and_anchors_of_a_step_do_not_depend_on_ranks_or_micro_batch_size(
    count: int, global_batch_size: int, splits: list[int]
) -> None:
    samples = make_samples(count)
    unions = []
    for world_size, micro_batch_size in zip((1, 2, 3), splits, strict=True):
        steps = zip(
            *(
                make_loader(samples, global_batch_size, micro_batch_size, r, world_size).steps()
                for r in range(world_size)
            ),
            strict=True,
        )
        unions.append([union(list(ranks)) for ranks in islice(steps, 6)])
    assert unions[0] == unions[1] == unions[2]


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 12), **sizes)
def test_starting_at_a_step_equals_skipping_the_steps_before(
    start: int, count: int, global_batch_size: int, micro_batch_size: int, world_size: int
) -> None:
    samples = make_samples(count)
    rank = world_size - 1
    skipped = islice(
        make_loader(samples, global_batch_size, micro_batch_size, rank, world_size).steps(), start, start + 3
    )
    resumed = make_loader(samples, global_batch_size, micro_batch_size, rank, world_size).steps(start)
    for expected, found in zip(skipped, resumed, strict=False):
        assert expected[:3] == found[:3]
        for a, b in zip(expected.micro_batches, found.micro_batches, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_rows_hold_their_sample_padded_and_the_anchors_of_their_epoch() -> None:
    samples = make_samples(11)
    loader = make_loader(samples, 4, 3)
    for step in islice(loader.steps(), 2 * loader.steps_per_epoch):
        for batch in step.micro_batches:
            width = batch.input_ids.shape[1]
            assert width == int(batch.lengths.max())  # 60 needs no more than the six bits that sizes have
            drawn = []
            for row, index in enumerate(batch.sample_index.tolist()):
                sample, length = samples[index], int(batch.lengths[row])
                assert batch.input_ids[row].tolist() == sample.input_ids + [PAD] * (width - length)
                assert batch.answer_mask[row].tolist() == sample.answer_mask + [False] * (width - length)
                drawn.append(draw_anchors(sample.answer_mask, NUM_ANCHORS, 7, step.epoch, index).tolist())
            assert batch.anchors.shape[1] == max(1, *map(len, drawn))
            for row, anchors in enumerate(drawn):
                filling = batch.anchors.shape[1] - len(anchors)
                assert batch.anchors[row].tolist() == anchors + [0] * filling
                assert batch.anchor_mask[row].tolist() == [True] * len(anchors) + [False] * filling
            assert [x.dtype for x in batch] == [
                torch.int64,
                torch.int64,
                torch.bool,
                torch.int64,
                torch.bool,
                torch.int64,
            ]


def test_a_rank_without_sample_gets_a_filler_that_supervises_nothing() -> None:
    samples = make_samples(1)
    (batch,) = next(make_loader(samples, 4, 2, rank=1, world_size=2).steps()).micro_batches
    assert batch.lengths.tolist() == [len(samples[0].input_ids)]
    assert batch.sample_index.tolist() == [0]
    assert batch.anchors.shape == (1, 1)
    assert not batch.answer_mask.any()
    assert not batch.anchor_mask.any()


def test_a_sample_without_eligible_anchor_keeps_one_masked_slot() -> None:
    sample = TokenSample("s", [1, 2, 3], [False, False, True])
    (batch,) = next(make_loader([sample], 1, 1).steps()).micro_batches
    assert batch.anchors.tolist() == [[0]]
    assert batch.anchor_mask.tolist() == [[False]]


def test_micro_batches_hold_neighbours_in_length_and_ranks_meet_similar_ones() -> None:
    loaders = [make_loader(make_samples(64), 64, 4, rank, 2) for rank in range(2)]
    steps = [next(loader.steps()) for loader in loaders]
    in_order = [batch for pair in zip(*(step.micro_batches for step in steps), strict=True) for batch in pair]
    rows = [
        (min(int(mask.sum()) - 1, NUM_ANCHORS), int(length))
        for batch in in_order
        for mask, length in zip(batch.answer_mask, batch.lengths, strict=True)
    ]
    assert rows == sorted(rows, reverse=True)


def test_epochs_and_seeds_have_orders_and_anchors_of_their_own() -> None:
    samples = make_samples(20)
    first, second = (union([step]) for step in islice(make_loader(samples, 10, 4).steps(), 0, 3, 2))
    other = union([next(make_loader(samples, 10, 4, seed=8).steps())])
    assert [index for index, _ in first] != [index for index, _ in second]
    assert [index for index, _ in first] != [index for index, _ in other]
    whole = make_loader(samples, 20, 4)
    epochs = [dict(union([step])) for step in islice(whole.steps(), 2)]
    assert epochs[0].keys() == epochs[1].keys()
    assert epochs[0].values() != epochs[1].values()
    assert any(epochs[0][index] != epochs[1][index] for index in epochs[0])


def test_an_empty_dataset_and_sizes_below_one_are_refused() -> None:
    with pytest.raises(DataError, match="holds no sample"):
        make_loader([], 4, 2)
    with pytest.raises(ConfigError, match=r"optimizer\.micro_batch_size is 0"):
        make_loader(make_samples(1), 4, 0)


@settings(max_examples=40, deadline=None)
@given(bucket_steps=st.integers(1, 5), start=st.integers(0, 9), **sizes)
def test_buckets_keep_epochs_whole_and_depend_on_seed_and_step_alone(
    bucket_steps: int, start: int, count: int, global_batch_size: int, micro_batch_size: int, world_size: int
) -> None:
    samples = make_samples(count)
    whole = make_loader(samples, global_batch_size, global_batch_size, bucket_steps=bucket_steps)
    rows = [union([step]) for step in islice(whole.steps(), 2 * whole.steps_per_epoch)]
    for epoch in (0, 1):
        seen = rows[epoch * whole.steps_per_epoch : (epoch + 1) * whole.steps_per_epoch]
        assert sorted(index for step in seen for index, _ in step) == list(range(count))
    ranks = [
        make_loader(samples, global_batch_size, micro_batch_size, rank, world_size, bucket_steps=bucket_steps)
        for rank in range(world_size)
    ]
    steps = zip(*(loader.steps(start) for loader in ranks), strict=True)
    for expected, found in zip(rows[start:], steps, strict=False):
        assert union(list(found)) == expected


@settings(max_examples=40, deadline=None)
@given(max_tokens=st.integers(1, 200), max_anchors=st.integers(1, 12), **sizes)
def test_forwards_keep_to_their_limits_unless_one_sample_alone_is_larger(
    max_tokens: int, max_anchors: int, count: int, global_batch_size: int, micro_batch_size: int, world_size: int
) -> None:
    samples = make_samples(count)
    limits = {"max_tokens": max_tokens, "max_anchors": max_anchors}
    loaders = [
        make_loader(samples, global_batch_size, micro_batch_size, rank, world_size, **limits)
        for rank in range(world_size)
    ]
    free = make_loader(samples, global_batch_size, global_batch_size)
    for ranks, expected in zip(
        islice(zip(*(loader.steps() for loader in loaders), strict=True), 5), free.steps(), strict=False
    ):
        assert union(list(ranks)) == union([expected])
        assert len({len(r.micro_batches) for r in ranks}) == 1
        for batch in (batch for r in ranks for batch in r.micro_batches if len(batch.lengths) > 1):
            assert len(batch.lengths) <= micro_batch_size
            assert batch.input_ids.numel() <= max_tokens
            assert batch.anchors.numel() <= max_anchors


def test_limits_are_filled_and_one_long_sample_does_not_decide_for_all() -> None:
    lengths = [400, *[50] * 63]
    samples = [TokenSample(str(i), [1] * n, [True] * n) for i, n in enumerate(lengths)]
    (step,) = islice(make_loader(samples, 64, 64, max_tokens=1600).steps(), 1)
    assert [len(batch.lengths) for batch in step.micro_batches] == [4, 32, 28]


def test_short_answers_take_no_more_sets_than_they_have_anchors_for() -> None:
    samples = [TokenSample(str(i), [1] * 5, [True] * 5) for i in range(4)]  # four anchors each
    limits = BatchLimits(4, 4, anchor_sets=3)
    loader = BatchLoader(samples, limits=limits, num_anchors=3 * NUM_ANCHORS, seed=7, pad_token_id=PAD)
    first, second = next(loader.steps()).micro_batches
    assert first.anchor_mask.sum(dim=1).tolist() == second.anchor_mask.sum(dim=1).tolist() == [2] * 4


def test_sets_of_anchors_share_samples_and_no_anchor() -> None:
    samples = make_samples(12)
    once = make_loader(samples, 6, 3)
    thrice = BatchLoader(
        samples, limits=BatchLimits(6, 3, anchor_sets=3), num_anchors=3 * NUM_ANCHORS, seed=7, pad_token_id=PAD
    )
    for few, many in zip(islice(once.steps(), 4), thrice.steps(), strict=False):
        assert len(many.micro_batches) == 3 * len(few.micro_batches)
        assert many.num_samples == few.num_samples
        for part in range(len(few.micro_batches)):
            sets = many.micro_batches[3 * part : 3 * part + 3]
            assert all(batch.sample_index is sets[0].sample_index for batch in sets)
            assert all(batch.anchors.shape[1] <= NUM_ANCHORS for batch in sets)
            for row, index in enumerate(sets[0].sample_index.tolist()):
                drawn = [batch.anchors[row][batch.anchor_mask[row]].tolist() for batch in sets]
                expected = draw_anchors(samples[index].answer_mask, 3 * NUM_ANCHORS, 7, many.epoch, index)
                assert sorted(itertools.chain(*drawn)) == expected.tolist()


@pytest.mark.parametrize("mean_answer", [75, 150, 300, 600])
@pytest.mark.parametrize(("global_batch_size", "micro_batch_size"), [(8, 8), (512, 4)])
def test_less_than_five_percent_of_the_rows_are_padding_on_answers_of_real_lengths(
    mean_answer: int, global_batch_size: int, micro_batch_size: int
) -> None:
    generator = np.random.default_rng(0)
    samples = []
    for index in range(2048):
        prompt = int(generator.lognormal(np.log(50), 0.5)) + 5
        answer = int(np.clip(generator.lognormal(np.log(mean_answer) - 0.18, 0.6), 2, 4 * mean_answer))
        samples.append(TokenSample(str(index), [1] * (prompt + answer), [i >= prompt for i in range(prompt + answer)]))
    loader = BatchLoader(
        samples,
        limits=BatchLimits(global_batch_size, micro_batch_size, bucket_steps=64 if global_batch_size == 8 else 1),
        num_anchors=64,
        seed=0,
        pad_token_id=PAD,
    )
    batches = [b for step in islice(loader.steps(), loader.steps_per_epoch) for b in step.micro_batches]
    real = np.array([(int(batch.lengths.sum()), int(batch.anchor_mask.sum())) for batch in batches]).sum(axis=0)
    padded = np.array([(batch.input_ids.numel(), batch.anchors.numel()) for batch in batches]).sum(axis=0)
    assert real[1] > 0.95 * padded[1]
    # In units of H^2 a context row costs about 6 (fc, keys and values), a block of five slots at least 100 (layers).
    assert real @ (6, 100) > 0.95 * (padded @ (6, 100))


@settings(max_examples=40, deadline=None)
@given(count=sizes["count"], before=st.integers(1, 12), after=st.integers(1, 12), taken=st.integers(0, 12))
def test_steps_of_another_size_go_on_with_the_next_samples(count: int, before: int, after: int, taken: int) -> None:
    samples, epochs = make_samples(count), 3
    first, second = make_loader(samples, before, 4), make_loader(samples, after, 4)
    seen: list[Counter[int]] = [Counter() for _ in range(epochs)]
    consumed = 0
    for step in islice(first.steps(), min(taken, epochs * first.steps_per_epoch)):
        seen[step.epoch].update(index for index, _ in union([step]))
        consumed += step.num_samples
    left = list(islice(second.steps(taken, consumed), second.steps_left(consumed, epochs)))
    for step in left:
        seen[step.epoch].update(index for index, _ in union([step]))
    assert seen == [Counter(range(count))] * epochs
    assert [step.step for step in left] == list(range(taken, taken + len(left)))


def test_no_step_is_left_after_more_epochs_than_were_asked_for() -> None:
    loader = make_loader(make_samples(10), 4, 2)
    assert [loader.steps_left(consumed, 2) for consumed in (0, 4, 10, 18, 20, 21, 35)] == [6, 5, 3, 1, 0, 0, 0]
