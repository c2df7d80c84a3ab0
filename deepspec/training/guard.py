"""Watching for NaN and infinity without waiting for the device at every step; knows sample ids, not what they hold.

An infinite loss makes the gradient infinite too (see TrainingForward), and the norm of the gradient is the same on all
processes, so it says for all of them whether a step was bad.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from deepspec import console
from deepspec.errors import DeepSpecError

SKIPPED = "skipped_updates.jsonl"
_MOST_IDS = 20
# A run whose every update is bad only burns time.
_MOST_IN_A_ROW = 20


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

    def __init__(self, sample_ids: Sequence[str], *, skips: bool, record: Path | None) -> None:
        """Start with nothing to look at.

        Args:
            sample_ids: id of each sample of the dataset.
            skips: bad updates were not applied, and are only reported.
            record: where their samples are written, a line each; None on processes that write nothing.
        """
        self._sample_ids = sample_ids
        self._skips = skips
        self._record = record
        self._updates: list[Update] = []
        self._in_a_row = 0

    def add(self, update: Update) -> None:
        """Remember one update."""
        self._updates.append(update)

    def check(self) -> None:
        """Look at every update since the last look; all processes must call this.

        Raises:
            NonFiniteLossError: naming the first bad step and its samples; where bad ones are skipped, after
                20 in a row.
        """
        updates, self._updates = self._updates, []
        if not updates:
            return
        is_fine = torch.stack([update.gradient_norm for update in updates]).isfinite().tolist()
        for update, fine in zip(updates, is_fine, strict=True):
            if fine:
                self._in_a_row = 0
                continue
            what, samples = self._suspects(update)
            self._in_a_row += 1
            if not self._skips:
                raise NonFiniteLossError(
                    f"{self._describe(update, what, samples)}. The checkpoints on disk are from before it. Lower "
                    "optimizer.learning_rate, use engine.precision=fp32, look at these samples, or leave such updates "
                    "out with optimizer.on_nonfinite=skip."
                )
            self._report(update, what, samples)
            if self._in_a_row >= _MOST_IN_A_ROW:
                raise NonFiniteLossError(
                    f"{self._describe(update, what, samples)}, as were the {_MOST_IN_A_ROW - 1} before it. All were "
                    "skipped; the weights are those of before. Lower optimizer.learning_rate or look at the samples."
                )

    def _suspects(self, update: Update) -> tuple[str, list[str]]:
        """What is not finite, and the samples that may have caused it; only for bad updates, on all processes."""
        pairs = zip(update.objectives, update.sample_index, strict=True)
        bad = [int(index) for objective, indices in pairs if not objective.isfinite() for index in indices]
        every = [int(index) for indices in update.sample_index for index in indices]
        # Where no loss is bad the gradient itself overflowed, and all samples of the step are suspects.
        named = gather_object(bad)
        suspects = named or gather_object(every)
        return "loss" if named else "gradient", [self._sample_ids[index] for index in suspects]

    def _describe(self, update: Update, what: str, samples: Sequence[str]) -> str:
        ids = ", ".join(samples[:_MOST_IDS])
        more = f" and {len(samples) - _MOST_IDS} more" if len(samples) > _MOST_IDS else ""
        return (
            f"the {what} is not finite at step {update.step} (gradient norm {float(update.gradient_norm):g}); "
            f"samples: {ids}{more}"
        )

    def _report(self, update: Update, what: str, samples: Sequence[str]) -> None:
        if self._record is None:
            return
        console.error(f"warning: update skipped: {self._describe(update, what, samples)}")
        line = {"step": update.step, "what": what, "samples": list(samples)}
        try:
            with self._record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            console.error(f"warning: {self._record} cannot be written: {error}")
