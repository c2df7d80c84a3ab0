"""Masks against naive loops, and grouped attention against attention over repeated heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_config
from torch import Tensor, nn

from deepspec import attention, flex
from deepspec.attention import AttentionForm, BlockMask, FeaturePrefix, GrowingPrefix, block_mask, grouped_sdpa
from deepspec.flex import make_tiles
from deepspec.targets.family import family_named


@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_block_sees_the_context_before_its_anchor_and_its_own_slots(num_slots: int) -> None:
    anchors = torch.tensor([[0, 3, 6], [5, 2, 0]])
    anchor_mask = torch.tensor([[True, True, True], [True, True, False]])
    length = 7
    mask = block_mask(anchors, anchor_mask, num_slots, length).dense()
    assert mask.shape == (2, 1, 3 * num_slots, length + 3 * num_slots)
    for row in range(2):
        for query in range(3 * num_slots):
            block = query // num_slots
            for key in range(length + 3 * num_slots):
                if key < length:
                    expected = bool(anchor_mask[row, block]) and key < int(anchors[row, block])
                else:
                    expected = (key - length) // num_slots == block
                assert bool(mask[row, 0, query, key]) == expected


def _inputs(heads: int, kv_heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    return query, key, value


def _repeated(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -1e30)
    return (torch.softmax(scores, dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scaling", [None, 1.0])
def test_grouped_attention_equals_attention_over_repeated_heads_forward_and_backward(
    heads: int, kv_heads: int, is_causal: bool, scaling: float | None
) -> None:
    inputs = _inputs(heads, kv_heads, 5, 5 if is_causal else 9)
    if is_causal:
        mask, given = torch.ones(5, 5).tril().bool()[None, None].expand(2, -1, -1, -1), None
    else:
        mask = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[..., 0] = True
        given = mask
    output, weights = grouped_sdpa(nn.Module(), *inputs, given, scaling=scaling)
    expected = _repeated(*inputs, mask, 8**-0.5 if scaling is None else scaling)
    assert weights is None
    torch.testing.assert_close(output, expected)
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad((output * seed).sum(), inputs)
    for gradient, wanted in zip(found, torch.autograd.grad((expected * seed).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_query_that_sees_no_key_gives_zeros_and_no_nan(dtype: torch.dtype, kv_heads: int) -> None:
    query, key, value = (tensor.detach().to(dtype).requires_grad_() for tensor in _inputs(4, kv_heads, 3, 6))
    mask = torch.ones(2, 1, 3, 6, dtype=torch.bool)
    mask[0, 0, 1] = False
    output, _ = grouped_sdpa(nn.Module(), query, key, value, mask)
    assert bool((output[0, 1] == 0).all())
    gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
    assert bool(output.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][0, :, 1] == 0).all())


def test_a_single_causal_query_sees_every_key() -> None:
    inputs = _inputs(4, 2, 1, 6)
    output, _ = grouped_sdpa(nn.Module(), *inputs, None)
    torch.testing.assert_close(output, _repeated(*inputs, torch.ones(2, 1, 1, 6, dtype=torch.bool), 8**-0.5))


def test_a_feature_prefix_comes_first_and_stores_nothing() -> None:
    prefix = torch.arange(4.0).view(1, 1, 4, 1)
    cache = FeaturePrefix([(prefix, -prefix)])
    for _ in range(2):
        keys, values = cache.update(torch.full((1, 1, 2, 1), 9.0), torch.full((1, 1, 2, 1), 8.0), 0)
        assert keys.flatten().tolist() == [0, 1, 2, 3, 9, 9]
        assert values.flatten().tolist() == [0, -1, -2, -3, 8, 8]


def test_a_growing_prefix_puts_steps_behind_each_other_and_stays_differentiable() -> None:
    start = GrowingPrefix()
    first = torch.ones(1, 1, 2, 1, requires_grad=True)
    start.update(first, first, 0)
    step = GrowingPrefix(start)
    for _ in range(2):  # running a step again changes nothing
        keys, values = step.update(torch.zeros(1, 1, 2, 1), torch.full((1, 1, 2, 1), 5.0), 0)
        assert keys.flatten().tolist() == [1, 1, 0, 0]
        assert values.flatten().tolist() == [1, 1, 5, 5]
    keys.sum().backward()
    assert first.grad is not None


# The first slice of the second row's blocks sees no context at all.
LIMITS = [[[0, 2, 6, 3], [5, 1, 0, 4]], [[0, 0, 2, 3], [0, 0, 0, 6]]]


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_attention_in_two_parts_equals_attention_under_the_dense_mask(
    runs: int, size: int, kv_heads: int, limits: list[list[int]], slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LEAST_SLICE_QUERIES", 1)
    monkeypatch.setattr(attention, "MOST_SLICES", slices)
    queries, shared = 4 * size, 6
    query, key, value = _inputs(4, kv_heads, queries, shared + runs * queries)
    mask = BlockMask(torch.tensor(limits), size, shared)
    output, _ = grouped_sdpa(nn.Module(), query, key, value, mask, scaling=0.7)
    expected = _repeated(query, key, value, mask.dense(runs), 0.7)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output.square().sum(), (query, key, value))
    wanted = torch.autograd.grad(expected.square().sum(), (query, key, value))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_other_forms_equal_attention_in_two_parts(runs: int, size: int, kv_heads: int) -> None:
    shared, blocks = 300, 50
    # Flex refuses inputs that require gradients on a CPU.
    inputs = [one.detach() for one in _inputs(4, kv_heads, blocks * size, shared + runs * blocks * size)]
    limits = torch.randint(0, shared + 1, (2, blocks), generator=torch.Generator().manual_seed(1))
    expected, _ = grouped_sdpa(nn.Module(), *inputs, BlockMask(limits, size, shared, "two_part"))
    forms: tuple[AttentionForm, ...] = ("dense", "flex")
    for form in forms:
        found, _ = grouped_sdpa(nn.Module(), *inputs, BlockMask(limits, size, shared, form))
        torch.testing.assert_close(found, expected)


TILED = [(1, 7, 40, 333), (1, 1, 3, 5), (3, 1, 70, 129), (1, 5, 1, 64)]


@pytest.mark.parametrize(("runs", "size", "blocks", "shared"), TILED)
def test_tiles_are_listed_exactly_where_something_is_visible(runs: int, size: int, blocks: int, shared: int) -> None:
    tile = 16
    generator = torch.Generator().manual_seed(2)
    limits = torch.randint(0, shared + 1, (2, blocks), generator=generator).sort(dim=1).values
    mask = BlockMask(limits, size, shared)
    dense = mask.dense(runs)[:, 0]
    tiles = make_tiles(limits, size, shared, dense.shape[2], tile)
    for row in range(2):
        for number, visible in enumerate(dense[row].split(tile)):
            columns = [visible[:, k : k + tile] for k in range(0, dense.shape[2], tile)]
            listed = [
                set(indices[row, 0, number, : int(counts[row, 0, number])].tolist())
                for counts, indices in (
                    (tiles.kv_num_blocks, tiles.kv_indices),
                    (tiles.full_kv_num_blocks, tiles.full_kv_indices),
                )
            ]
            assert listed[0].isdisjoint(listed[1])
            # A last tile that is not full may be listed as partial although all that exists of it is visible.
            assert {k for k, part in enumerate(columns) if part.any()} == listed[0] | listed[1]
            assert all(bool(columns[k].all()) for k in listed[1])


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma4"])
def test_a_probe_gives_flex_up_where_it_has_no_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_broken", [])
    family = family_named(name)
    layer: Any = family.layer(family.draft_config(tiny_config(name), 1), 0)
    with pytest.warns(UserWarning, match="does not support backward on CPU"):
        flex.probe(layer.self_attn, torch.device("cpu"), torch.float32)
    inputs = [one.detach() for one in _inputs(4, 2, 6, 6 + 6)]
    limits = torch.tensor([[0, 2, 6], [5, 1, 4]])
    assert flex.attend_flexibly(inputs[0], inputs[1], inputs[2], limits, 2, 6, 1.0) is None


def test_a_flex_kernel_that_fails_is_replaced_for_good_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Tensor:
        raise RuntimeError("No valid triton configs")

    monkeypatch.setattr(flex, "flex_attention", fails)
    monkeypatch.setattr(flex, "_broken", [])
    inputs = _inputs(4, 2, 6, 6 + 6)
    limits = torch.tensor([[0, 2, 6], [5, 1, 4]])
    with pytest.warns(UserWarning, match="No valid triton configs.*without it"):
        found, _ = grouped_sdpa(nn.Module(), *inputs, BlockMask(limits, 2, 6, "flex"))
    again, _ = grouped_sdpa(nn.Module(), *inputs, BlockMask(limits, 2, 6, "flex"))
    expected, _ = grouped_sdpa(nn.Module(), *inputs, BlockMask(limits, 2, 6, "two_part"))
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma4"])
def test_draft_layers_leave_the_targets_dropout_behind(name: str) -> None:
    target = tiny_config(name)
    target.attention_dropout = 0.1
    family = family_named(name)
    layer: Any = family.layer(family.draft_config(target, 1), 0)
    assert layer.train().self_attn.attention_dropout == 0.0
