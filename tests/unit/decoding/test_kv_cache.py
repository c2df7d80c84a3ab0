"""The ragged cache against a plain list per row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspec.decoding.kv_cache import RaggedCache

HEADS, SIZE = 2, 3


def _new(generator: torch.Generator, rows: int, queries: int) -> tuple[Tensor, Tensor]:
    keys = torch.randn(rows, HEADS, queries, SIZE, generator=generator)
    return keys, keys + 100


class NaiveCache:
    """slot -> (key, value) of every row and layer."""

    def __init__(self, rows: int) -> None:
        self.rows: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = [{} for _ in range(rows)]

    def write(self, positions: Tensor, keys: Tensor, values: Tensor, layer: int) -> None:
        for row, slots in enumerate(positions.tolist()):
            for index, slot in enumerate(slots):
                self.rows[row][layer, slot] = (keys[row, :, index], values[row, :, index])

    def assert_equals(self, keys: Tensor, values: Tensor, layer: int) -> None:
        for row, held in enumerate(self.rows):
            for (which, slot), (key, value) in held.items():
                if which == layer and slot < keys.shape[2]:
                    assert torch.equal(keys[row, :, slot], key), (row, slot)
                    assert torch.equal(values[row, :, slot], value), (row, slot)


@pytest.mark.parametrize("rows", [1, 4])
def test_ragged_rounds_equal_a_list_per_row_through_overwrites_and_growth(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    cache, naive = RaggedCache.for_batch(rows), NaiveCache(rows)
    lengths, visible = torch.zeros(rows, dtype=torch.int64), 0
    for turn in range(60):
        queries = 7 if turn == 0 else 4
        positions = lengths[:, None] + torch.arange(queries)
        visible = int(positions.max()) + 1
        cache.plan(positions, visible)
        for layer in (0, 1):
            keys, values = _new(generator, rows, queries)
            naive.write(positions, keys, values, layer)
            seen = cache.update(keys, values, layer)
            assert seen[0].shape == (rows, HEADS, visible, SIZE)
            naive.assert_equals(*seen, layer)
        lengths += torch.randint(1, queries + 1, (rows,), generator=generator)
    assert visible > 128, "the cache has grown more than once"
    assert cache.nbytes >= 2 * 2 * rows * HEADS * visible * SIZE * 4


def test_keys_that_are_not_kept_are_seen_once_and_leave_no_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    cache, naive = RaggedCache.for_batch(2), NaiveCache(2)
    positions = torch.arange(5).expand(2, -1)
    keys, values = _new(generator, 2, 5)
    cache.plan(positions, 5)
    cache.update(keys, values, 0)
    naive.write(positions, keys, values, 0)
    block = _new(generator, 2, 3)
    cache.plan(positions[:, :3], 4, keep_new=False)
    for _ in range(2):
        seen_keys, seen_values = cache.update(*block, 0)
        assert seen_keys.shape[2] == 4 + 3
        naive.assert_equals(seen_keys[:, :, :4], seen_values[:, :, :4], 0)
        assert torch.equal(seen_keys[:, :, 4:], block[0])
        assert torch.equal(seen_values[:, :, 4:], block[1])


def test_keys_that_are_not_kept_stand_alone_in_an_empty_cache() -> None:
    cache = RaggedCache.for_batch(2)
    keys, values = _new(torch.Generator().manual_seed(0), 2, 3)
    cache.plan(torch.arange(3).expand(2, -1), 0, keep_new=False)
    assert torch.equal(cache.update(keys, values, 0)[0], keys)


@pytest.mark.parametrize("long_first", [True, False])
def test_a_prompt_joins_the_batch_at_its_row_and_rows_can_be_kept_in_any_order(long_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (90, 5) if long_first else (5, 90)
    caches, naives = [], []
    for rows, size in zip((3, 2), sizes, strict=True):
        cache, naive = RaggedCache.for_batch(rows), NaiveCache(rows)
        positions = torch.arange(size).expand(rows, -1)
        cache.plan(positions, size)
        for layer in (0, 1):
            keys, values = _new(generator, rows, size)
            cache.update(keys, values, layer)
            naive.write(positions, keys, values, layer)
        caches.append(cache)
        naives.append(naive)
    caches[0].assign(torch.tensor([2, 0]), caches[1])
    naives[0].rows[2], naives[0].rows[0] = naives[1].rows[0], naives[1].rows[1]
    caches[0].keep(torch.tensor([2, 1, 0, 2]))
    held = naives[0].rows
    naives[0].rows = [held[2], held[1], held[0], held[2]]
    naives[0].rows = [dict(row) for row in naives[0].rows]
    positions = torch.tensor([[sizes[1]], [sizes[0]], [sizes[1]], [3]])
    caches[0].plan(positions, 91)
    for layer in (0, 1):
        keys, values = _new(generator, 4, 1)
        naives[0].write(positions, keys, values, layer)
        naives[0].assert_equals(*caches[0].update(keys, values, layer), layer)


def test_an_empty_cache_takes_a_prompt_into_one_of_its_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    other, whole = RaggedCache.for_batch(1), RaggedCache.for_batch(3)
    keys, values = _new(generator, 1, 4)
    other.plan(torch.arange(4)[None], 4)
    other.update(keys, values, 0)
    whole.assign(torch.tensor([1]), other)
    whole.plan(torch.full((3, 1), 4), 5)
    seen, _ = whole.update(*_new(generator, 3, 1), 0)
    assert torch.equal(seen[1, :, :4], keys[0])
