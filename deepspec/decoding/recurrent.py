"""State of linear-attention layers in a batch whose rows accept tokens at their own pace.

Keys of rejected tokens are overwritten in place; a recurrent state cannot be. Such a layer therefore keeps the state
before the newest tokens together with its inputs at these tokens. The positions of the next forward tell how many of
them each row kept, and the stock layer runs again over exactly those: once a round, and once over a prompt. The module
knows the cache interface of transformers' linear-attention layers and nothing of models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _Row(NamedTuple):
    """One row of one layer: its state before position `start`, and its inputs [Q, H] from there on."""

    start: int
    convolution: Tensor | None
    recurrent: Tensor | None
    inputs: Tensor


class LayerState:
    """The cache that a stock layer sees: the states of its rows, replaced and never changed in place."""

    def __init__(self, convolution: Tensor | None, recurrent: Tensor | None) -> None:
        """Begin with the given states [B, ...], or with none."""
        self.convolution, self.recurrent = convolution, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of the convolution [B, channels, kernel size]."""
        return self.convolution

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state [B, ...]."""
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, which keeps the layer from updating the convolution's state in place."""
        return True

    def update_conv_state(self, inputs: Tensor, layer_idx: int, *, conv_kernel_size: int, state_idx: int = 0) -> Tensor:
        """Append inputs of the convolution [B, channels, Q] and return them with what came before."""
        whole = inputs if self.convolution is None else torch.cat([self.convolution, inputs], dim=-1)
        self.convolution = nn.functional.pad(whole, (max(conv_kernel_size - whole.shape[-1], 0), 0))
        self.convolution = self.convolution[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Replace the recurrent state."""
        self.recurrent = state
        return state


class RecurrentStates:
    """States of all linear-attention layers of one batch."""

    def __init__(self) -> None:
        self._layers: dict[int, list[_Row | None]] = {}

    def before(self, layer_idx: int, module: nn.Module, hidden: Tensor, starts: Sequence[int]) -> LayerState:
        """The state that new tokens continue from.

        Args:
            layer_idx: which layer.
            module: the stock layer.
            hidden: [B, Q, H] its inputs at the new tokens; remembered.
            starts: first position of each row; says how many of the tokens before them were kept.
        """
        rows = self._layers.get(layer_idx) or [None] * len(starts)
        states = self._advanced(module, rows, starts)
        # The caller may go on to write into its tensor.
        kept = hidden.clone()
        self._layers[layer_idx] = [
            _Row(start, convolution, recurrent, inputs)
            for start, (convolution, recurrent), inputs in zip(starts, states, kept, strict=True)
        ]
        return LayerState(_stacked([state[0] for state in states]), _stacked([state[1] for state in states]))

    def assign(self, rows: Tensor, other: RecurrentStates, batch: int) -> None:
        """Copy the first rows of another batch (in order) into the given rows of this one of `batch` rows."""
        # Reading the rows stops the device, so only targets that have such layers pay for it.
        chosen = rows.tolist() if other._layers else []
        for layer_idx, new in other._layers.items():
            mine = self._layers.setdefault(layer_idx, [None] * batch)
            for row, state in zip(chosen, new, strict=False):
                mine[row] = state

    def keep(self, rows: Tensor) -> None:
        """Keep only the given rows, in the given order."""
        chosen = rows.tolist() if self._layers else []
        self._layers = {index: [states[row] for row in chosen] for index, states in self._layers.items()}

    def repeated(self, count: int) -> RecurrentStates:
        """States of `count` rows that all begin as this one's first."""
        states = RecurrentStates()
        states._layers = {index: rows[:1] * count for index, rows in self._layers.items()}
        return states

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        parts = [part for rows in self._layers.values() for row in rows if row is not None for part in row[1:]]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @staticmethod
    def _advanced(
        module: nn.Module, rows: Sequence[_Row | None], starts: Sequence[int]
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """States of all rows at their new starts; rows that kept equally many tokens run together."""
        states: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(rows)
        by_count: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            if row is None:
                continue
            count = start - row.start
            assert 0 <= count <= len(row.inputs), "a row continues within the tokens that it last ran over"
            states[index] = (row.convolution, row.recurrent)
            if count:
                by_count[count, row.recurrent is None].append(index)
        for (count, _), members in by_count.items():
            # A group without the rows that are None by construction.
            group: list[Any] = [rows[index] for index in members]
            state = LayerState(_stacked([row.convolution for row in group]), _stacked([row.recurrent for row in group]))
            inputs = torch.stack([row.inputs[:count] for row in group])
            # Not through __call__, whose hook led here.
            module.forward(hidden_states=inputs, cache=state, attention_mask=None)
            assert state.convolution is not None
            assert state.recurrent is not None
            for place, index in enumerate(members):
                states[index] = (state.convolution[place], state.recurrent[place])
        return states


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of all rows; rows that have no state yet begin from zeros where others have one."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if part is None else part for part in parts])
