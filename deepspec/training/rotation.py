"""Which checkpoints of a run stay; knows their steps and recorded values, not their files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple


class Keep(NamedTuple):
    """What is kept; a checkpoint that any of the rules names stays.

    Attributes:
        last: the newest so many, at least 1.
        every: those whose step is a multiple of this; None for no such rule.
        best: the one with the best value of this recorded metric, the newer of equals; None for no such rule.
        best_is: which value is the best.
    """

    last: int
    every: int | None = None
    best: str | None = None
    best_is: Literal["highest", "lowest"] = "highest"


def kept_steps(metrics: Mapping[int, Mapping[str, float]], keep: Keep) -> set[int]:
    """Steps whose checkpoints stay.

    Args:
        metrics: what was recorded with the checkpoint of each step.
        keep: the rules.
    """
    steps = sorted(metrics)
    kept = set(steps[-max(1, keep.last) :])
    if keep.every is not None:
        kept |= {step for step in steps if step % keep.every == 0}
    best = best_step(metrics, keep)
    return kept if best is None else kept | {best}


def best_step(metrics: Mapping[int, Mapping[str, float]], keep: Keep) -> int | None:
    """Step of the best checkpoint; None without such a rule, or where none recorded the metric."""
    if keep.best is None:
        return None
    sign = 1.0 if keep.best_is == "highest" else -1.0
    values = {step: sign * recorded[keep.best] for step, recorded in metrics.items() if keep.best in recorded}
    ranked = [(value, step) for step, value in values.items() if math.isfinite(value)]
    return max(ranked)[1] if ranked else None
