"""The optimizer, its learning-rate schedule and gradient clipping; knows neither models nor data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn


def warmup_steps(total_steps: int, warmup_share: float) -> int:
    """Number of updates below the peak: at least one when a share is asked for, and always fewer than all."""
    if warmup_share <= 0.0:
        return 0
    return min(max(1, round(warmup_share * total_steps)), total_steps - 1)


def learning_rate(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_share: float,
    schedule: Literal["cosine", "wsd"] = "cosine",
    decay_share: float = 0.0,
) -> float:
    """Learning rate of the update number `step` (from 0): linear warm-up, then down to 0 in the way of the schedule.

    All pieces meet in the peak, which no step exceeds. The rate is exactly 0 at `total_steps`, the first step that is
    not taken, so no update is wasted on a rate of 0.

    Args:
        step: updates taken before.
        peak: the highest rate.
        total_steps: updates of the run.
        warmup_share: of all updates.
        schedule: `cosine` falls from the end of the warm-up on; `wsd` (warm-up, stable, decay) stays at the peak and
            falls linearly over the last `decay_share` of all updates (Hu et al. 2024, MiniCPM, section 4).
        decay_share: of all updates, for `wsd`; 0 keeps the peak to the end.
    """
    warmup = warmup_steps(total_steps, warmup_share)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule == "wsd":
        decay = decay_steps(total_steps, warmup, decay_share)
        return peak * min(1.0, max(0, total_steps - step) / decay) if decay else peak
    progress = min(1.0, (step - warmup) / (total_steps - warmup))
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def decay_steps(total_steps: int, warmup: int, decay_share: float) -> int:
    """Number of updates of `wsd` from the last one at the peak on: at least one for a share, none before the peak."""
    if decay_share <= 0.0:
        return 0
    return min(max(1, round(decay_share * total_steps)), total_steps - warmup)


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Make AdamW over the trainable parameters, which must be the fp32 master weights.

    The learning rate starts at 0: the trainer sets it before every update. Fused: one pass over each parameter instead
    of about ten (on 2 CPU cores the update of 23 M parameters takes 25 ms instead of 120).
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    assert all(parameter.dtype in (torch.float32, torch.float64) for parameter in trainable), "masters must be fp32"
    return torch.optim.AdamW(trainable, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `clip_norm`.

    Returns:
        The norm before clipping, a 0-d tensor still on the device (reading it would stall the device).
    """
    return nn.utils.clip_grad_norm_(list(parameters), clip_norm)


def step_unless(optimizer: torch.optim.Optimizer, is_bad: Tensor) -> None:
    """Update the weights, or leave them and the optimizer's state exactly as they are, without waiting for the device.

    Args:
        optimizer: a fused one, whose kernels look at the flag themselves, as they do for a gradient scaler.
        is_bad: 0-d flag on the device.
    """
    plain: Any = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    plain.grad_scale, plain.found_inf = None, is_bad.float()
    try:
        plain.step()
    finally:
        del plain.grad_scale, plain.found_inf
