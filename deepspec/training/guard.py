"""Watching for NaN and infinity without waiting for the device at every step; knows sample ids, not what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from deepspec.errors import DeepSpecError

_MOST_IDS = 20


class NonFiniteLossError(DeepSpecError):
    """A loss or a gradient became NaN or infinite."""


class Update(NamedTuple):
    """One optimizer step as one process saw it; the numbers are still on the device.

    Attributes:
        step: number of the step, from 1.
        gradient_norm: of the whole global batch.
        objectives: objective of each micro-batch.
        sample_index: samples of each micro-batch.
    """

    step: int
    gradient_norm: Tensor
    objectives: list[Tensor]
    sample_index: list[Tensor]


class FiniteGuard:
    """Remembers updates until `check` looks at all of them at once."""

    def __init__(self, sample_ids: Sequence[str]) -> None:
        """Start with nothing to look at.

        Args:
            sample_ids: id of each sample of the dataset.
        """
        self._sample_ids = sample_ids
        self._updates: list[Update] = []

    def add(self, update: Update) -> None:
        """Remember one update."""
        self._updates.append(update)

    def check(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Look at every update since the last look; all processes must call this and come to the same verdict.

        Raises:
            NonFiniteLossError: naming the first bad step and its samples.
        """
        updates, self._updates = self._updates, []
        if not updates:
            return
        numbers = [torch.stack([update.gradient_norm, *update.objectives]) for update in updates]
        is_bad = torch.stack([~row.isfinite().all() for row in numbers]).float()
        verdicts = all_reduce(is_bad).tolist()
        for update, verdict in zip(updates, verdicts, strict=True):
            if verdict:
                raise NonFiniteLossError(self._describe(update))

    def _describe(self, update: Update) -> str:
        """Runs once, on the way out, on all processes."""
        pairs = zip(update.objectives, update.sample_index, strict=True)
        bad = [int(index) for objective, indices in pairs if not objective.isfinite() for index in indices]
        every = [int(index) for indices in update.sample_index for index in indices]
        # Where no loss is bad the gradient itself overflowed, and all samples of the step are suspects.
        named = gather_object(bad)
        suspects = named or gather_object(every)
        ids = ", ".join(self._sample_ids[index] for index in suspects[:_MOST_IDS])
        more = f" and {len(suspects) - _MOST_IDS} more" if len(suspects) > _MOST_IDS else ""
        what = "loss" if named else "gradient"
        return (
            f"the {what} is not finite at step {update.step} (gradient norm {float(update.gradient_norm):g}); "
            f"samples: {ids}{more}. The checkpoints on disk are from before it. "
            "Lower optimizer.learning_rate, use engine.precision=fp32, or look at these samples."
        )
