"""Attention for stock decoder layers: who sees whom, and how a prefix of keys and values enters a layer.

No attention is rewritten here. A decoder layer of transformers asks its cache to `update(keys, values, layer_idx)` and
attends to what comes back, under the mask it is given; the classes below are such caches. The predicates say which key
a query may see; they know nothing of algorithms, losses or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspec.flex import attend_flexibly

GROUPED_SDPA = "deepspec_grouped_sdpa"
# Slices of a block mask whose blocks see equally much of the context; shorter ones make slow products.
MOST_SLICES, LEAST_SLICE_QUERIES = 8, 112

AttentionForm = Literal["auto", "two_part", "dense", "flex"]


class BlockMask(NamedTuple):
    """Queries in blocks of equal size, all of which see the beginning of a context and the whole of their own block.

    Keys are the context's followed by one or more runs of as many keys as there are queries; a block sees its own keys
    in every run. Block drafts have one run and blocks of their slots; the later steps of Eagle3's training-time test
    have a run a step and blocks of a single row.

    Attributes:
        limits: [B, N], how many leading context keys each of N blocks sees.
        size: queries per block.
        length: L, number of context keys.
        form: how attention is computed under this mask. `two_part` scores the context and the block's own keys apart,
            `dense` makes one matrix for SDPA, `flex` compiles a kernel that skips what no query sees; `auto` is flex on
            a GPU (dense where the kernel fails) and two_part elsewhere.
    """

    limits: Tensor
    size: int
    length: int
    form: AttentionForm = "auto"

    @property
    def context(self) -> Tensor:
        """Which context keys each block sees [B, N, L] bool."""
        return torch.arange(self.length, device=self.limits.device) < self.limits[..., None]

    def dense(self, runs: int = 1) -> Tensor:
        """The same as one matrix [B, 1, N * size, L + runs * N * size]."""
        batch, count = self.limits.shape
        block = torch.arange(count * self.size, device=self.limits.device) // self.size
        own = (block[:, None] == block[None, :]).repeat(1, runs).expand(batch, -1, -1)
        return torch.cat([self.context.repeat_interleave(self.size, dim=1), own], dim=-1)[:, None]


class Packing(NamedTuple):
    """Queries of several requests side by side in one row, without padding, while keys stay in a cache row a request.

    Everything but attention then costs what the real tokens cost, however different their numbers are.

    Attributes:
        rows: [N] cache row of each query, ascending.
        columns: [N] its place among the queries of its row.
        batch: B, number of cache rows.
        width: Q, most queries of a row.
    """

    rows: Tensor
    columns: Tensor
    batch: int
    width: int

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Packing:
        """Put the first counts[b] queries of every row b side by side."""
        number = torch.tensor(counts)
        rows = torch.arange(len(counts)).repeat_interleave(number)
        columns = torch.arange(len(rows)) - (number.cumsum(0) - number)[rows]
        return cls(rows.to(device), columns.to(device), len(counts), max(counts))

    def flat(self, padded: Tensor) -> Tensor:
        """The real entries [N, ...] of a padded tensor [B, Q or more, ...]."""
        return padded[self.rows, self.columns]

    def padded(self, flat: Tensor) -> Tensor:
        """Entries [N, ...] in their places [B, Q, ...], zeros elsewhere."""
        out = flat.new_zeros((self.batch, self.width, *flat.shape[1:]))
        out[self.rows, self.columns] = flat
        return out


def block_mask(
    anchors: Tensor, anchor_mask: Tensor, num_slots: int, context_length: int, form: AttentionForm = "auto"
) -> BlockMask:
    """Blocks that see the context before their anchor.

    Args:
        anchors: [B, A] positions.
        anchor_mask: [B, A] bool; the queries of a masked anchor see only their own block.
        num_slots: inputs per block.
        context_length: L, number of context keys.
        form: see BlockMask.
    """
    return BlockMask(anchors * anchor_mask, num_slots, context_length, form)


class FeaturePrefix:
    """Keys and values that come before a layer's own: the differentiable context of a block draft in training."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take one (keys, values) pair a layer, each [B, heads, L, D], keys already rotated."""
        self._layers = layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the prefix followed by the layer's own keys and values; nothing is stored."""
        prefix_keys, prefix_values = self._layers[layer_idx]
        return torch.cat([prefix_keys, keys], dim=2), torch.cat([prefix_values, values], dim=2)


class GrowingPrefix:
    """Keys and values of a step behind those of the steps before it: Eagle3's unrolled layer in training.

    A step sets its own and appends to nothing, so running it again (gradient checkpointing) gives the same.
    """

    def __init__(self, before: GrowingPrefix | None = None) -> None:
        """Begin the step after `before`, or the first one."""
        self._before = before
        self._own: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Set the keys and values of this step [B, heads, rows, D] and return those of all steps so far."""
        self._own = (keys, values)
        parts = self._parts()
        return torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        assert self._own is not None, "steps run in order"
        return [*(self._before._parts() if self._before is not None else []), self._own]


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that folds the query heads of a group into the query axis.

    Keys and values are shared inside a group, so folding saves the copy of both that a repeat over heads would make
    (measured on 2 CPU cores, 16 rows of 8 queries over 300 keys: 1.9x faster than repeating).

    Args:
        module: the calling attention module, unused but part of transformers' interface.
        query: [B, heads, Q, D].
        key: [B, kv heads, S, D].
        value: of the same shape.
        attention_mask: [B, 1, Q, S] bool; a BlockMask; or None for causal attention.
        dropout: drop probability of attention weights.
        scaling: factor of the scores; None means D ** -0.5.
        packing: queries are [1, heads, N, D], those of several rows of keys side by side, and so is the output.

    Returns:
        [B, Q, heads, D], and None in place of attention weights.
    """
    if packing is not None:
        spread = packing.padded(query[0].transpose(0, 1)).transpose(1, 2)
        output = grouped_sdpa(module, spread, key, value, attention_mask, dropout, scaling)[0]
        return packing.flat(output)[None], None
    batch, heads, queries, size = query.shape
    groups = heads // key.shape[1]
    # Under autocast rotary tables lift queries and keys to fp32 while values stay low.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if attention_mask is None:
        output = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=queries > 1, enable_gqa=groups > 1
        )
        return output.transpose(1, 2).contiguous(), None
    scale = size**-0.5 if scaling is None else scaling
    if isinstance(attention_mask, BlockMask):
        return _attend_in_blocks(query, key, value, attention_mask, scale), None
    folded = query.reshape(batch, key.shape[1], groups * queries, size)
    mask = attention_mask if groups == 1 else attention_mask.repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.reshape(batch, heads, queries, size).transpose(1, 2).contiguous(), None


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attention [B, Q, heads, D] under a block mask, in the form that it asks for."""
    is_on_gpu = query.device.type == "cuda"
    wants_flex = mask.form == "flex" or (mask.form == "auto" and is_on_gpu)
    if wants_flex:
        output = attend_flexibly(query, key, value, mask.limits, mask.size, mask.length, scale)
        if output is not None:
            return output
    # SDPA's kernels on GPUs keep no scores for the backward pass; two parts do.
    if mask.form == "dense" or (wants_flex and is_on_gpu):
        runs = (key.shape[2] - mask.length) // query.shape[2]
        return grouped_sdpa(nn.Module(), query, key, value, mask.dense(runs), scaling=scale)[0]
    return _attend_in_two_parts(query * scale, key, value, mask)


def _attend_in_two_parts(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """One softmax over a context and each block's own keys.

    The own part costs Q x size scores a run instead of Q x Q (measured on one CPU core with 17 blocks of 5 over 160
    keys: forward and backward in about half the time of the dense mask). Neighbouring blocks are taken together, over
    the context that the farthest of them sees; as anchors ascend, the first ones cost little.
    """
    batch, heads, queries, size = query.shape
    kv_heads, blocks, shared = key.shape[1], mask.limits.shape[1], mask.length
    in_blocks = query.view(batch, kv_heads, heads // kv_heads, blocks, mask.size, size)
    own_keys = torch.unflatten(key[:, :, shared:], 2, (-1, blocks, mask.size))
    own_values = torch.unflatten(value[:, :, shared:], 2, (-1, blocks, mask.size))
    # On the host a look at the limits waits for nothing.
    count = max(1, min(MOST_SLICES, queries // LEAST_SLICE_QUERIES)) if mask.limits.is_cpu else 1
    outputs = []
    for begin in range(0, blocks, -(-blocks // count)):
        part = slice(begin, min(begin + -(-blocks // count), blocks))
        limits = mask.limits[:, part]
        seen = int(limits.max()) if count > 1 else shared
        outputs.append(
            _SliceAttention.apply(  # type: ignore[no-untyped-call]
                in_blocks[:, :, :, part],
                key[:, :, :seen],
                value[:, :, :seen],
                own_keys[:, :, :, part],
                own_values[:, :, :, part],
                limits,
            )
        )
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
    return output.view(batch, heads, queries, size).transpose(1, 2).contiguous()


class _SliceAttention(torch.autograd.Function):
    """Attention of neighbouring blocks to a context and to their own keys, under one softmax.

    Its own backward keeps weights once, in the dtype of the values, and makes half the passes over them that autograd
    makes (measured with the slices, one core, 512 blocks of 7 over 660 keys: 4.5x faster than autograd in one piece).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        limits: Tensor,
    ) -> Tensor:
        """Attend.

        Args:
            ctx: keeps what the backward pass reads.
            query: [B, kv heads, groups, N, size, D], scaled.
            keys: [B, kv heads, S, D] of the context.
            values: of the same shape.
            own_keys: [B, kv heads, runs, N, size, D] of the blocks.
            own_values: of the same shape.
            limits: [B, N], how many of the S keys each block sees.
        """
        shared, exact = keys.shape[2], torch.promote_types(torch.float32, query.dtype)
        own_scores = torch.einsum("bkgnqd,bkrncd->bkgnqrc", query, own_keys)
        weights = query.new_empty(*query.shape[:-1], shared + own_scores[0, 0, 0, 0, 0].numel(), dtype=exact)
        weights[..., :shared] = (query.flatten(2, 4) @ keys.transpose(2, 3)).view(*query.shape[:-1], shared)
        weights[..., shared:] = own_scores.flatten(-2)
        is_hidden = torch.arange(shared, device=limits.device) >= limits[..., None]
        weights[..., :shared].masked_fill_(is_hidden[:, None, None, :, None], float("-inf"))
        torch.softmax(weights, dim=-1, out=weights)
        seen, own = weights[..., :shared].to(query.dtype), weights[..., shared:].to(query.dtype).view_as(own_scores)
        output = (seen.flatten(2, 4) @ values).view_as(query)
        output += torch.einsum("bkgnqrc,bkrncd->bkgnqd", own, own_values)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, seen, own, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, seen, own, output = ctx.saved_tensors
        (grad,) = outer
        rows, grad_rows = query.flatten(2, 4), grad.flatten(2, 4)
        # The gradient of a softmax is w (g - sum w g), and that sum is the output's product with its own gradient.
        mean = (grad.to(torch.promote_types(torch.float32, query.dtype)) * output).sum(dim=-1, keepdim=True)
        slope = (grad_rows @ values.transpose(2, 3)).view_as(seen)
        slope = (slope - mean).mul_(seen).to(query.dtype).flatten(2, 4)
        own_slope = torch.einsum("bkgnqd,bkrncd->bkgnqrc", grad, own_values)
        own_slope = (own_slope - mean[..., None]).mul_(own).to(query.dtype)
        query_grad = (slope @ keys).view_as(query)
        query_grad += torch.einsum("bkgnqrc,bkrncd->bkgnqd", own_slope, own_keys)
        return (
            query_grad,
            slope.transpose(2, 3) @ rows,
            seen.flatten(2, 4).transpose(2, 3) @ grad_rows,
            torch.einsum("bkgnqrc,bkgnqd->bkrncd", own_slope, query),
            torch.einsum("bkgnqrc,bkgnqd->bkrncd", own, grad),
            None,
        )


ALL_ATTENTION_FUNCTIONS.register(GROUPED_SDPA, grouped_sdpa)
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED_SDPA, sdpa_mask)
