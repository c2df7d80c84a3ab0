"""Attention of blocks by torch's flex attention: a compiled kernel that skips whatever no query of a tile sees.

The tiles to visit follow from the limits alone; nothing of the size queries x keys is ever made. It needs a GPU (flex
has no backward on a CPU); where its kernel cannot be compiled, callers fall back to another form.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as Tiles
from torch.nn.attention.flex_attention import flex_attention

TILE = 128
# A kernel that failed once on this machine fails always.
_broken: list[str] = []


def attend_flexibly(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor, size: int, length: int, scale: float
) -> Tensor | None:
    """Attention under a block mask, or None where flex attention cannot run.

    Args:
        query: [B, heads, Q, D], Q = N * size.
        key: [B, kv heads, L + runs * Q, D].
        value: of the same shape.
        limits: [B, N], leading context keys that each block sees.
        size: queries per block.
        length: L, context keys.
        scale: factor of the scores.

    Returns:
        [B, Q, heads, D], or None after a warning.
    """
    if _broken:
        return None
    tiles = make_tiles(limits, size, length, key.shape[2])
    attend: Any = _compiled() if query.device.type == "cuda" else flex_attention
    try:
        output = attend(query, key, value, block_mask=tiles, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways, and there is a form that needs none
        _give_up(error)
        return None
    attended: Tensor = output.transpose(1, 2).contiguous()
    return attended


def probe(attention: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Try forward and backward once at the sizes of a draft, so that a kernel that fails is given up before training.

    Kernels of the backward pass are compiled on their own, and one that fails would end the run in its first step.

    Args:
        attention: a layer's `self_attn`, as built: configs say its sizes in a different way in every family.
        device: of the training.
        dtype: likewise.
    """
    head_size = attention.head_dim
    heads, kv_heads = (one.out_features // head_size for one in (attention.q_proj, attention.k_proj))
    shapes = ((1, heads, 2 * TILE, head_size), (1, kv_heads, 4 * TILE, head_size), (1, kv_heads, 4 * TILE, head_size))
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    limits = torch.arange(2 * TILE, device=device)[None]
    with torch.enable_grad():
        output = attend_flexibly(inputs[0], inputs[1], inputs[2], limits, 1, 2 * TILE, head_size**-0.5)
        if output is None:
            return
        try:
            torch.autograd.grad(output.float().square().sum(), inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # see above
            _give_up(error)


def _give_up(error: Exception) -> None:
    _broken.append(str(error))
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    warnings.warn(f"flex attention cannot run here ({reason}); attention goes on without it.", stacklevel=3)


def make_tiles(limits: Tensor, size: int, length: int, keys: int, tile: int = TILE) -> Tiles:
    """Which tiles of queries x keys hold anything visible, and which are visible as a whole.

    Args:
        limits: [B, N], leading context keys that each block sees.
        size: queries per block.
        length: L, context keys.
        keys: L + runs * N * size.
        tile: queries, and keys, of a tile.
    """
    batch, blocks = limits.shape
    queries = blocks * size
    device = limits.device
    rows, columns = -(-queries // tile), -(-keys // tile)
    # Least and largest limit of a tile's queries; the last tile is filled up with its own values.
    per_query = limits.repeat_interleave(size, dim=1)
    filled = torch.cat([per_query, per_query[:, -1:].expand(-1, rows * tile - queries)], dim=1).view(batch, rows, tile)
    least, most = filled.amin(dim=2)[..., None], filled.amax(dim=2)[..., None]
    begin = torch.arange(columns, device=device) * tile
    end = begin + tile
    whole = end <= least
    touched = begin < most
    # A tile's own keys in each run: those of the blocks that its queries belong to.
    first = torch.arange(rows, device=device) * tile // size * size
    last = ((torch.arange(1, rows + 1, device=device) * tile).clamp(max=queries) - 1) // size * size + size
    for run in range((keys - length) // queries):
        start = length + run * queries
        touched = touched | ((begin < start + last[:, None]) & (end > start + first[:, None]))
    partial = touched & ~whole

    # Numbers inside the predicate would be compiled into the kernel, anew for every batch; those of a tensor are not.
    numbers = torch.tensor([length, queries, blocks - 1], device=device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        context, own = numbers[0], numbers[1]
        block = q // size
        in_context = (k < context) & (k < limits[b, torch.minimum(block, numbers[2])])
        return in_context | ((k >= context) & ((k - context) % own // size == block))

    return Tiles.from_kv_blocks(
        *_listed(partial), *_listed(whole), BLOCK_SIZE=tile, mask_mod=mask_mod, seq_lengths=(queries, keys)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Number and columns of the chosen tiles of every row: [B, 1, rows] and [B, 1, rows, columns] int32."""
    columns = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1).to(torch.int32)[:, None], columns.to(torch.int32)[:, None]


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
