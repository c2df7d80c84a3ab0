"""Running sums of losses and metrics between two log lines; knows nothing of what they mean.

Sums stay on the device, so adding never waits for it; all names travel through one all-reduce when a line is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.types import Ratio


@dataclass(frozen=True)
class Sum:
    """A reduced ratio on the host."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        """Total per count; NaN where nothing was counted."""
        return self.total / self.count if self.count else float("nan")


class Meters:
    """Ratios summed by name since the last reduction.

    Every process must have added the same names before `reduce`, in any order. Loaded sums that nothing was added to
    are left out there: only one process has them, and the run that saved them measured something else.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._sums: dict[str, Tensor] = {}
        self._marked: dict[str, Tensor] = {}
        self._added: set[str] = set()

    def add(self, ratios: Mapping[str, Ratio]) -> None:
        """Add one micro-batch's ratios without synchronising with the device."""
        for name, ratio in ratios.items():
            pair = torch.stack([ratio.total.detach().double(), ratio.count.detach().double()])
            # Restored sums begin on the host.
            self._sums[name] = self._sums[name].to(pair.device) + pair if name in self._sums else pair
            self._added.add(name)

    def mark(self) -> None:
        """Remember the sums as they are, for `undo_if`."""
        self._marked = dict(self._sums)

    def undo_if(self, is_bad: Tensor) -> None:
        """Take back what was added since `mark`, where a 0-d flag is set, without waiting for its device."""
        for name, pair in self._sums.items():
            before = self._marked.get(name, torch.zeros_like(pair))
            self._sums[name] = torch.where(is_bad.to(pair.device, non_blocking=True), before, pair)

    def fold(
        self, all_reduce: Callable[[Tensor], Tensor], device: torch.device, is_main: bool
    ) -> dict[str, tuple[float, float]]:
        """Move all sums to the main process, as they will be when a run continues from a checkpoint made now.

        Returns:
            (total, count) by name, over all processes.
        """
        sums = self.reduce(all_reduce, device)
        pairs = {name: (value.total, value.count) for name, value in sums.items()}
        self.load(pairs if is_main else dict.fromkeys(pairs, (0.0, 0.0)))
        return pairs

    def load(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        """Start from sums of before."""
        self._sums = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in pairs.items()}
        self._added = set()

    def reduce(self, all_reduce: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, Sum]:
        """Sum over processes in one all-reduce, read the result, and start afresh.

        Args:
            all_reduce: sums a tensor over all processes; the identity for a single one.
            device: where to reduce; some ratios are counted on the host.
        """
        names = sorted(self._added)
        if not names:
            return {}
        stacked = all_reduce(torch.stack([self._sums[name].to(device) for name in names])).tolist()
        self._sums, self._added = {}, set()
        return {name: Sum(total, count) for name, (total, count) in zip(names, stacked, strict=True)}
