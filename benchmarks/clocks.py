"""Seconds and peak memory of a piece of work; imports torch alone, so that other environments can use it too."""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from typing import Any

import torch


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = clock.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock.perf_counter() - begin


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """Most bytes of tensors alive at once during a call, above those alive before it."""
    return seconds_and_peak(work, device)[1]


def seconds_and_peak(work: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """`seconds` and `peak_bytes` of one call; on a CPU, recording memory takes some microseconds an operation."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        time = seconds(work, device)
        return time, torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        time = seconds(work, device)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return time, peak
