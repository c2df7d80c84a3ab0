"""Requests side by side: what the host, the target's cache and the draft's state hold of each, row by row."""

from __future__ import annotations

from typing import Any

import torch

from deepspec.decoding.kv_cache import RaggedCache
from deepspec.decoding.lane import Lane


class Rows:
    """Rows of a batch.

    Attributes:
        lanes: as the host sees them; finished ones stay until others take their rows.
        cache: keys and values of the target.
        state: of the draft, None where there is none.
    """

    def __init__(self, lanes: list[Lane], cache: RaggedCache, state: Any, device: torch.device) -> None:
        """Take rows that are in the same order in all three, and the device that holds the latter two."""
        self.lanes, self.cache, self.state = lanes, cache, state
        self._device = device

    @classmethod
    def empty(cls, device: torch.device) -> Rows:
        """No rows."""
        return cls([], RaggedCache(), None, device)

    @property
    def free(self) -> list[int]:
        """Rows whose request has finished."""
        return [index for index, lane in enumerate(self.lanes) if lane.finish_reason is not None]

    @property
    def are_active(self) -> list[bool]:
        """Which requests have not finished."""
        return [lane.finish_reason is None for lane in self.lanes]

    def keep(self, kept: list[int]) -> None:
        """Keep only the given rows, in the given order; a row may occur twice."""
        self.lanes = [self.lanes[row] for row in kept]
        self._keep_states(kept)

    def take_over(self, others: Rows, count: int) -> None:
        """Move the first rows of others here, first into free rows, then behind the last.

        Args:
            others: lose them.
            count: how many, at least one; this has a row already.
        """
        held, free = len(self.lanes), self.free[:count]
        missing = count - len(free)
        rows = free + list(range(held, held + missing))
        if missing:
            self._keep_states([*range(held), *[0] * missing])
        self.lanes += others.lanes[:missing]
        for row, lane in zip(rows, others.lanes, strict=False):
            self.lanes[row] = lane
        index = torch.tensor(rows, device=self._device)
        self.cache.assign(index, others.cache)
        if self.state is not None:
            self.state.assign(index, others.state)
        others.keep(list(range(count, len(others.lanes))))

    def _keep_states(self, kept: list[int]) -> None:
        index = torch.tensor(kept, dtype=torch.int64, device=self._device)
        self.cache.keep(index)
        if self.state is not None:
            self.state.keep(index)
