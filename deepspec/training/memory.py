"""Running out of memory said as what it is: an error that names the settings which decide how much is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from deepspec.config import TrainConfig
from deepspec.errors import DeepSpecError

# What torch raises as a plain RuntimeError: its CPU allocator, the driver, and libraries that allocate by themselves.
_WORDS = ("DefaultCPUAllocator", "CUDA error: out of memory", "ALLOC_FAILED")


class NoMemoryError(DeepSpecError):
    """The device or the host has no memory left for a run."""


@contextlib.contextmanager
def memory_named(config: TrainConfig) -> Iterator[None]:
    """Run the body, which trains what the configuration says.

    Raises:
        NoMemoryError: in place of what torch or Python raises when there is no memory left.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).strip() or type(error).__name__
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(word in text for word in _WORDS):
            raise
        raise NoMemoryError(
            f"out of memory: {text.splitlines()[0].rstrip('.')}. Use a smaller optimizer.micro_batch_size "
            f"({config.optimizer.micro_batch_size}; the same command then continues from the last checkpoint), fewer "
            f"data.num_anchors ({config.data.num_anchors}), or engine.gradient_checkpointing=true. `deepspec plan` "
            "with the words of this run says what each takes."
        ) from error
