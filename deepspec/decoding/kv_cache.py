"""A key/value cache whose rows have lengths of their own.

Every request of a batch accepts its own number of tokens per round. Each row therefore writes its keys at slot =
position and attends to slots <= position: the keys of rejected tokens need no removal, the next round overwrites them.
It serves targets and drafts alike and knows nothing of either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspec.decoding.recurrent import LayerState, RecurrentStates

_GROWTH = 64


class RaggedCache:
    """Keys and values [B, heads, capacity, D] of every layer, with one position per row.

    `plan(positions)` says where the coming forward writes; the layers then call `update` as they would on any cache of
    transformers.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._positions: Tensor | None = None
        self._rows: Tensor | None = None
        self._start: int | None = None
        self._visible = 0
        self._keep_new = True
        self._recurrent = RecurrentStates()
        self._starts: list[int] | None = None

    def plan(self, positions: Tensor, visible: int, *, keep_new: bool = True, rows: Tensor | None = None) -> None:
        """Set where the next forward writes.

        Args:
            positions: [B, Q] slot of each new key; [N] where `rows` is given.
            visible: number of leading slots that the layers see, at least `positions.max() + 1` when `keep_new`;
                passed in because reading it from a tensor would stop the device.
            keep_new: False appends the new keys behind the visible ones for this forward only.
            rows: [N] row of each new key, which then come side by side as [1, heads, N, D].
        """
        self._positions, self._visible, self._keep_new, self._rows = positions, visible, keep_new, rows
        self._starts = None
        if rows is not None:
            self._start = None
            return
        # One row writes a contiguous run: a plain slice copy is several times faster than a scatter.
        self._start = visible - positions.shape[1] if positions.shape[0] == 1 and keep_new else None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, Q, D] and return all visible ones [B, heads, visible(+Q), D]."""
        assert self._positions is not None, "plan() comes before a forward"
        if not self._keep_new:
            if layer_idx not in self._keys:
                return keys, values
            seen_keys, seen_values = self._keys[layer_idx], self._values[layer_idx]
            return (
                torch.cat([seen_keys[:, :, : self._visible], keys], dim=2),
                torch.cat([seen_values[:, :, : self._visible], values], dim=2),
            )
        self.write(keys, values, layer_idx)
        return self._keys[layer_idx][:, :, : self._visible], self._values[layer_idx][:, :, : self._visible]

    def write(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Store keys and values [B, heads, Q, D] at the planned positions."""
        assert self._positions is not None, "plan() comes before a forward"
        self._reserve(layer_idx, keys, values)
        for buffer, new in ((self._keys[layer_idx], keys), (self._values[layer_idx], values)):
            if self._start is not None:
                buffer[:, :, self._start : self._visible] = new
            elif self._rows is not None:
                buffer[self._rows, :, self._positions] = new[0].transpose(0, 1).to(buffer.dtype)
            else:
                rows = torch.arange(new.shape[0], device=new.device)[:, None]
                buffer[rows, :, self._positions] = new.transpose(1, 2).to(buffer.dtype)

    def recurrent_state(self, layer_idx: int, module: nn.Module, hidden: Tensor) -> LayerState:
        """The state from which a linear-attention layer goes on at the planned positions; see RecurrentStates.before.

        Which tokens each row kept must be known on the host here, so such targets wait for the device once a forward.
        """
        assert self._positions is not None, "plan() comes before a forward"
        if self._starts is None:
            self._starts = self._positions[:, 0].tolist()
        return self._recurrent.before(layer_idx, module, hidden, self._starts)

    def assign(self, rows: Tensor, other: RaggedCache) -> None:
        """Copy the first rows of another cache (in order) into the given rows of this one: prompts join the batch."""
        for layer_idx, new_keys in other._keys.items():
            length = new_keys.shape[2]
            for buffers, new in ((self._keys, new_keys), (self._values, other._values[layer_idx])):
                buffer = self._grown(buffers.get(layer_idx), new, int(self._batch), length)
                buffer[rows, :, :length] = new[: len(rows)]
                buffers[layer_idx] = buffer
        self._recurrent.assign(rows, other._recurrent, int(self._batch))

    def keep(self, rows: Tensor) -> None:
        """Keep only the given rows, in the given order."""
        for buffers in (self._keys, self._values):
            for layer_idx, buffer in buffers.items():
                buffers[layer_idx] = buffer.index_select(0, rows)
        self._recurrent.keep(rows)
        self._batch = len(rows)

    def repeated(self, count: int) -> RaggedCache:
        """A cache of `count` rows that all begin with this one's first."""
        cache = RaggedCache.for_batch(count)
        cache._keys = {index: buffer[:1].repeat(count, 1, 1, 1) for index, buffer in self._keys.items()}
        cache._values = {index: buffer[:1].repeat(count, 1, 1, 1) for index, buffer in self._values.items()}
        cache._recurrent = self._recurrent.repeated(count)
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        tensors = [*self._keys.values(), *self._values.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + self._recurrent.nbytes

    _batch: int = 0

    @classmethod
    def for_batch(cls, batch: int) -> RaggedCache:
        """An empty cache of `batch` rows that prompts can be assigned to."""
        cache = cls()
        cache._batch = batch
        return cache

    def _reserve(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        # Keys that come side by side do not show how many rows there are.
        batch = keys.shape[0] if self._rows is None else self._batch
        for buffers, new in ((self._keys, keys), (self._values, values)):
            buffers[layer_idx] = self._grown(buffers.get(layer_idx), new, batch, self._visible)

    @staticmethod
    def _grown(buffer: Tensor | None, like: Tensor, batch: int, length: int) -> Tensor:
        """The buffer itself, or a larger copy when `length` slots do not fit; growth is geometric."""
        if buffer is not None and buffer.shape[2] >= length:
            return buffer
        held = 0 if buffer is None else buffer.shape[2]
        capacity = -(-max(length, held + held // 2) // _GROWTH) * _GROWTH
        grown = like.new_zeros((batch if buffer is None else buffer.shape[0], like.shape[1], capacity, like.shape[3]))
        if buffer is not None:
            grown[:, :, :held] = buffer
        return grown
