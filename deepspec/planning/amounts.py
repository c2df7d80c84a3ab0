"""What a run needs beside the memory of a step: checkpoints and caches on disk, and how often its target has to run."""

from __future__ import annotations

import math

from deepspec.config import CheckpointConfig, TrainConfig
from deepspec.data.cache_format import ENCODINGS, bytes_per_sample
from deepspec.planning.sources import memory_gib

_GIB = 2**30


def checkpoints_at_once(checkpoint: CheckpointConfig, steps: int) -> int:
    """The most checkpoints of a run that lie on its disk at once, the one that is being written included.

    Args:
        checkpoint: when they are written, and which stay (training/rotation.py).
        steps: of the run.
    """
    every = checkpoint.every_steps or steps
    written = (steps - 1) // every  # before the last one
    kept = min(checkpoint.keep_last, written)
    if checkpoint.keep_every is not None:
        kept += every * (written - kept) // math.lcm(every, checkpoint.keep_every)
    if checkpoint.keep_best is not None and kept < written:
        kept += 1
    return kept + 1


def share_of_passes(train: TrainConfig, pass_bytes: int, num_samples: int, steps: int) -> float:
    """How often the target runs for a sequence that a draft learns from, where earlier passes stay in memory.

    Args:
        train: the run.
        pass_bytes: of what is kept of a sequence.
        num_samples: sequences of the data.
        steps: of the run.
    """
    if train.features.source == "cached":
        return 0.0
    fits = min(1.0, memory_gib(train) * _GIB / (pass_bytes * num_samples))
    if not fits:
        return 1.0
    epochs = steps * train.optimizer.global_batch_size / num_samples
    kept = 0.0
    for epoch in range(math.ceil(epochs)):
        # Each process keeps passes of its own, and which one meets a sequence is drawn anew in every epoch.
        met = 1.0 - (1.0 - 1.0 / train.engine.num_processes) ** epoch
        kept += min(fits, met) * min(1.0, epochs - epoch)
    return 1.0 - kept / epochs


def cache_sizes(
    train: TrainConfig, num_samples: int, length: int, answer: int, hidden_size: int, num_taps: int
) -> dict[str, int]:
    """Bytes of a feature cache of the data, by encoding and, last, in DeepSpec's own format.

    Args:
        train: the run.
        num_samples: sequences of the data.
        length: tokens of each.
        answer: tokens that are learned from.
        hidden_size: H.
        num_taps: M.
    """
    count = min(num_samples, train.features.limit or num_samples)
    sizes = {
        str(encoding): count * bytes_per_sample(length, answer, hidden_size, num_taps, encoding)
        for encoding in ENCODINGS
    }
    # Ids (4 bytes), masks and states of all positions, unencoded (data/cache_jobs.py).
    return sizes | {"deepspec_v2": count * length * (6 + 2 * hidden_size * (num_taps + 1))}
