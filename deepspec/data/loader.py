"""From token samples to the micro-batches of each optimizer step, for one rank.

Which samples and anchors a step holds is a function of (seed, step) alone; the number of ranks and the size of a
micro-batch only decide how they are split. This module does not know targets, features, losses or the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deepspec.data.anchors import draw_anchors
from deepspec.data.chat import TokenSample
from deepspec.errors import ConfigError, DataError
from deepspec.types import TokenBatch

# Padded lengths are multiples of this, so that kernels and compiled graphs meet few shapes.
_LENGTH_MULTIPLE = 16
# Keeps the order of the data apart from every other draw that is made from the same seed.
_PURPOSE = 0x6F726472


class StepBatches(NamedTuple):
    """What one rank computes in one optimizer step.

    Attributes:
        epoch: number of the pass over the data, from 0.
        step: number of the optimizer step, from 0.
        num_samples: samples of this step over all ranks.
        micro_batches: as many on every rank, so that collectives match.
    """

    epoch: int
    step: int
    num_samples: int
    micro_batches: list[TokenBatch]


class BatchLoader:
    """Micro-batches of every optimizer step, computable from any step on.

    An epoch visits every sample once, in an order drawn from (seed, epoch). Each step takes the next
    `global_batch_size` samples, its last one what is left. Inside a step the samples are sorted by length, cut into
    micro-batches of neighbours and dealt over the ranks, so that ranks work on similar lengths at the same time.
    """

    def __init__(
        self,
        samples: Sequence[TokenSample],
        *,
        global_batch_size: int,
        micro_batch_size: int,
        num_anchors: int,
        seed: int,
        pad_token_id: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Keep the samples and how to split them.

        Args:
            samples: the dataset; `sample_index` in the batches refers to it.
            global_batch_size: samples of an optimizer step, over all ranks.
            micro_batch_size: the most samples that one forward holds.
            num_anchors: the most anchors drawn per sample.
            seed: seed of the run.
            pad_token_id: id written past the end of a sample; never read.
            rank: which part of each step this loader yields.
            world_size: number of ranks.

        Raises:
            DataError: there is no sample.
            ConfigError: a size is below 1.
        """
        if not samples:
            raise DataError(
                "the dataset holds no sample; check data.answers, data.max_length and data.min_answer_tokens."
            )
        for key, value in (
            ("optimizer.global_batch_size", global_batch_size),
            ("optimizer.micro_batch_size", micro_batch_size),
            ("data.num_anchors", num_anchors),
        ):
            if value < 1:
                raise ConfigError(f"{key} is {value}; it must be at least 1.")
        assert 0 <= rank < world_size
        self._samples = samples
        self._lengths = np.array([len(sample.input_ids) for sample in samples])
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._num_anchors = num_anchors
        self._seed = seed
        self._pad_token_id = pad_token_id
        self._rank = rank
        self._world_size = world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data."""
        return -(-len(self._samples) // self._global_batch_size)

    def steps(self, start_step: int = 0) -> Iterator[StepBatches]:
        """Yield the steps from `start_step` on, without end."""
        epoch, step = -1, start_step
        order = np.empty(0, dtype=np.int64)
        while True:
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self._epoch_order(epoch)
            first = step % self.steps_per_epoch * self._global_batch_size
            indices = order[first : first + self._global_batch_size]
            yield StepBatches(epoch, step, len(indices), self._micro_batches(indices, epoch))
            step += 1

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        sequence = np.random.SeedSequence(self._seed, spawn_key=(_PURPOSE, epoch))
        return np.random.Generator(np.random.Philox(sequence)).permutation(len(self._samples))

    def _micro_batches(self, indices: npt.NDArray[np.int64], epoch: int) -> list[TokenBatch]:
        # Longest first: a run that does not fit into memory fails at once. The index settles ties, whatever the order.
        ordered = indices[np.lexsort((indices, -self._lengths[indices]))]
        num_micro_batches = -(-len(ordered) // self._micro_batch_size)
        num_micro_batches += -num_micro_batches % self._world_size
        parts = np.array_split(ordered, num_micro_batches)[self._rank :: self._world_size]
        return [
            self._collate(part, epoch) if len(part) else self._collate(ordered[-1:], epoch, is_filler=True)
            for part in parts
        ]

    def _collate(self, indices: npt.NDArray[np.int64], epoch: int, *, is_filler: bool = False) -> TokenBatch:
        """Pad samples into one batch; a filler keeps its tokens and supervises none of them."""
        anchors = [
            draw_anchors(
                [] if is_filler else self._samples[i].answer_mask, self._num_anchors, self._seed, epoch, int(i)
            )
            for i in indices
        ]
        lengths = self._lengths[indices]
        num_rows = len(indices)
        padded_length = -(-int(lengths.max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        padded_anchors = max(1, *(len(row) for row in anchors))
        batch = TokenBatch(
            input_ids=torch.full((num_rows, padded_length), self._pad_token_id),
            lengths=torch.from_numpy(lengths),
            answer_mask=torch.zeros(num_rows, padded_length, dtype=torch.bool),
            anchors=torch.zeros(num_rows, padded_anchors, dtype=torch.int64),
            anchor_mask=torch.zeros(num_rows, padded_anchors, dtype=torch.bool),
            sample_index=torch.from_numpy(indices.copy()),
        )
        for row, (i, row_anchors) in enumerate(zip(indices, anchors, strict=True)):
            sample = self._samples[i]
            batch.input_ids[row, : lengths[row]] = torch.tensor(sample.input_ids)
            if not is_filler:
                batch.answer_mask[row, : lengths[row]] = torch.tensor(sample.answer_mask)
            batch.anchors[row, : len(row_anchors)] = torch.from_numpy(row_anchors)
            batch.anchor_mask[row, : len(row_anchors)] = True
        return batch
