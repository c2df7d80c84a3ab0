"""What one process holds of a training state that an engine spreads over processes, and what it puts together of it.

It follows training/accelerator.py, engines.py and zero.py, and what torch and DeepSpeed make of these settings for fp32
weights; tests/distributed/test_planned_shards.py counts the bytes of real processes. It knows no drafts and no targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from deepspec.config import TrainConfig
from deepspec.planning.dryrun import Memory
from deepspec.planning.ledger import (
    BACKWARD,
    BUFFERS,
    FEATURES,
    GATHERED,
    GRADIENTS,
    MASTERS,
    MOMENTS,
    PROBE,
    TARGET,
    TARGET_PASS,
)
from deepspec.training import accelerator as accelerators

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
_FLOAT = 4
# What of a step is still there when its backward ends.
_KEPT = (TARGET, PROBE, MASTERS, GRADIENTS, MOMENTS, BUFFERS, GATHERED, FEATURES, TARGET_PASS)


class Held(NamedTuple):
    """Bytes of one process.

    Attributes:
        weights: that the forward reads, or this process's part of them.
        masters: fp32 masters apart from these weights; 0 where the weights are the masters.
        moments: both of AdamW.
        gradients: sums over the micro-batches of a step.
        buffers: of communication, kept from step to step.
        gathered: whole weights, put together for a micro-batch.
        passing: gradients at the end of a backward, before they are added to the sums.
    """

    weights: int
    masters: int
    moments: int
    gradients: int
    buffers: int
    gathered: int
    passing: int

    @property
    def throughout(self) -> int:
        """What is held between micro-batches."""
        return self.weights + self.masters + self.moments + self.gradients + self.buffers


def shares_of(train: TrainConfig, shapes: Sequence[Sequence[int]]) -> dict[str, Held]:
    """What a process of a run holds, under its own engine, and on GPUs under every other that it could have."""
    engine, optimizer = train.engine, train.optimizer
    if engine.num_processes == 1:
        return {engine.name: held_by("single", 1, shapes, is_summed=True)}
    forwards = optimizer.global_batch_size // (engine.num_processes * optimizer.micro_batch_size) * train.anchor_sets
    is_cut = train.data.max_tokens_per_batch is not None or train.data.max_anchors_per_batch is not None
    names = (engine.name,) if engine.device == "cpu" else ENGINES
    return {name: held_by(name, engine.num_processes, shapes, is_summed=forwards > 1 or is_cut) for name in names}


def held_by(
    engine: str, num_processes: int, shapes: Sequence[Sequence[int]], *, is_summed: bool, rank: int = 0
) -> Held:
    """What a process holds; the first one holds the most.

    Args:
        engine: its name.
        num_processes: that share the state.
        shapes: of the trained weights, in the order of the model.
        is_summed: whether a step has several micro-batches, whose gradients are summed up.
        rank: number of the process.
    """
    sizes = [math.prod(shape) for shape in shapes]
    whole = _FLOAT * sum(sizes)
    if engine == "single":
        return Held(whole, 0, 2 * whole, whole, 0, 0, 0)
    if engine == "ddp":
        # Sums over micro-batches lie apart from the buckets in which processes meet in the last one.
        return Held(whole, 0, 2 * whole, whole if is_summed else 0, whole, 0, 0)
    if engine == "fsdp2":
        # Every weight is cut along its first axis, and room for its largest part is kept everywhere. What was gathered
        # stays beside the weights made of it; a backward makes whole gradients before they are added up.
        share = own = 0
        for shape, size in zip(shapes, sizes, strict=True):
            rows = math.ceil(shape[0] / num_processes)
            row = _FLOAT * size // shape[0]
            share += rows * row
            own += min(max(shape[0] - rank * rows, 0), rows) * row
        return Held(share, 0, 2 * own, whole if is_summed else share, 0, 2 * whole, whole)
    bucket = _FLOAT * accelerators.BUCKET_ELEMENTS
    if engine == "zero3":
        # Every weight is cut by itself. Gathered ones wait for their use in the backward.
        share = _FLOAT * sum(math.ceil(size / num_processes) for size in sizes)
        return Held(share, share, 2 * share, share, bucket, whole, 0)
    # All weights in a row are cut into parts of equal length.
    share = _FLOAT * 2 * math.ceil(sum(sizes) / (2 * num_processes))
    flat = num_processes * share
    return Held(flat, share, 2 * share, flat if engine == "zero1" else share, bucket, 0, share)


def spread(memory: Memory, held: Held) -> Memory:
    """The memory of a step where a process holds this of the training state instead of all of it."""
    phases = {}
    for phase, parts in memory.phases.items():
        # Among the masters are a few tensors that are not trained, whole everywhere.
        own = {
            MASTERS: parts[MASTERS] - parts[GRADIENTS] + held.weights + held.masters,
            GRADIENTS: held.gradients,
            MOMENTS: held.moments,
            BUFFERS: held.buffers,
            GATHERED: 0 if phase == "target pass" else held.gathered,
        }
        phases[phase] = {name: size for name, size in (parts | own).items() if size}
    # Activations are gone then.
    kept = {name: size for name, size in phases["backward"].items() if name in _KEPT}
    phases["end of the backward"] = kept | ({BACKWARD: held.passing} if held.passing else {})
    before = memory.phases["forward"]
    whole = 2 * before[GRADIENTS] + before[MOMENTS]
    return Memory.of(phases, memory.static - whole + held.throughout)
