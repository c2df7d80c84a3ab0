"""From token samples to the micro-batches of each optimizer step, for one rank.

Which samples and anchors a step holds is a function of the seed and of the samples consumed before; the number of ranks
and the size of a micro-batch only decide how they are split. This module does not know targets, features, losses or the
trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deepspec.data.anchors import draw_anchors, eligible_anchors
from deepspec.data.chat import TokenSample
from deepspec.errors import ConfigError, DataError
from deepspec.types import TokenBatch

# A length has this many leading bits: shapes come in few sizes (32 between a power of two and the next), so that
# compiled graphs are reused, and rounding up costs 1.6 % on average at most.
_LEADING_BITS = 6
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


class BatchLimits(NamedTuple):
    """What one optimizer step and one forward may hold.

    Attributes:
        global_batch_size: samples of an optimizer step, over all ranks.
        micro_batch_size: the most samples that one forward holds.
        bucket_steps: steps whose samples are shared out by size, so that those of a step are alike and little is
            padded; 1 leaves the drawn order as it is.
        max_tokens: the most padded tokens of a forward with more than one sample, or None.
        max_anchors: the most padded anchors of a forward with more than one sample, or None.
        anchor_sets: the most forwards over the same samples, each with other anchors, so that the target runs once for
            several; a step whose answers are short takes fewer.
    """

    global_batch_size: int
    micro_batch_size: int
    bucket_steps: int = 1
    max_tokens: int | None = None
    max_anchors: int | None = None
    anchor_sets: int = 1


class BatchLoader:
    """Micro-batches of every optimizer step, computable from any step on.

    An epoch visits every sample once, in an order drawn from (seed, epoch). Each step takes the next
    `global_batch_size` samples, its last one what is left; with `bucket_steps` the samples of so many steps are first
    sorted by size and then cut into these steps, which come in a drawn order. Inside a step the samples are sorted by
    size, cut into micro-batches of neighbours and dealt over the ranks, so that ranks work on similar sizes at the same
    time.
    """

    def __init__(
        self,
        samples: Sequence[TokenSample],
        *,
        limits: BatchLimits,
        num_anchors: int,
        seed: int,
        pad_token_id: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Keep the samples and how to split them.

        Args:
            samples: the dataset; `sample_index` in the batches refers to it.
            limits: sizes of steps and forwards.
            num_anchors: the most anchors drawn per sample and epoch, over all sets.
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
            ("optimizer.global_batch_size", limits.global_batch_size),
            ("optimizer.micro_batch_size", limits.micro_batch_size),
            ("data.bucket_steps", limits.bucket_steps),
            ("data.num_anchors", num_anchors),
        ):
            if value < 1:
                raise ConfigError(f"{key} is {value}; it must be at least 1.")
        assert 0 <= rank < world_size
        self._samples = samples
        sizes = [(len(sample.input_ids), len(eligible_anchors(sample.answer_mask))) for sample in samples]
        self._lengths, eligible = np.array(sizes).T
        self._num_drawn = np.minimum(eligible, num_anchors)
        self._limits = limits
        self._num_anchors = num_anchors
        self._seed = seed
        self._pad_token_id = pad_token_id
        self._rank = rank
        self._world_size = world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data."""
        return -(-len(self._samples) // self._limits.global_batch_size)

    def steps(self, start_step: int = 0, consumed: int | None = None) -> Iterator[StepBatches]:
        """Yield the steps from `start_step` on, without end.

        Args:
            start_step: steps taken before, which only number what is yielded.
            consumed: samples taken before, which say where in the data to go on; None for what so many steps take.
        """
        count, size = len(self._samples), self._limits.global_batch_size
        if consumed is None:
            epochs, steps = divmod(start_step, self.steps_per_epoch)
            consumed = epochs * count + steps * size
        begun, step = -1, start_step
        order = np.empty(0, dtype=np.int64)
        while True:
            epoch, first = divmod(consumed, count)
            if epoch != begun:
                begun, order = epoch, self._epoch_order(epoch)
            indices = order[first : first + size]
            yield StepBatches(epoch, step, len(indices), self._micro_batches(indices, epoch))
            step, consumed = step + 1, consumed + len(indices)

    def steps_left(self, consumed: int, epochs: int) -> int:
        """Number of steps after so many samples, up to the end of so many epochs."""
        whole = epochs - -(-consumed // len(self._samples))
        rest = -(-self.left_in_epoch(consumed) // self._limits.global_batch_size)
        return max(0, whole * self.steps_per_epoch + rest)

    def left_in_epoch(self, consumed: int) -> int:
        """Number of samples between so many and the end of the epoch that they reach into; 0 at an end."""
        return -consumed % len(self._samples)

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Samples in the order in which an epoch's steps take them."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(_PURPOSE, epoch))
        generator = np.random.Generator(np.random.Philox(sequence))
        order = generator.permutation(len(self._samples))
        size, limits = self._limits.global_batch_size, self._limits
        if limits.bucket_steps == 1:
            return order
        pools = np.split(order, range(size * limits.bucket_steps, len(order), size * limits.bucket_steps))
        steps = []
        for pool in pools:
            # What does not fill a step comes last, as without buckets; it must not always be the smallest samples.
            rest = len(pool) % size
            full, partial = (pool[: len(pool) - rest], pool[len(pool) - rest :])
            cut = np.split(self._by_size(full), range(size, len(full), size)) if len(full) else []
            steps += [cut[index] for index in generator.permutation(len(cut))]
            if rest:
                steps.append(partial)
        return np.concatenate(steps)

    def _by_size(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Largest first: a run that does not fit into memory fails at once. The index settles ties."""
        return indices[np.lexsort((indices, -self._lengths[indices], -self._num_drawn[indices]))]

    def _micro_batches(self, indices: npt.NDArray[np.int64], epoch: int) -> list[TokenBatch]:
        ordered = self._by_size(indices)
        # The largest sample comes first; ranks agree on the number of sets, since they share the step's samples.
        a_set = -(-self._num_anchors // self._limits.anchor_sets)
        sets = max(1, -(-int(self._num_drawn[ordered[0]]) // a_set))
        parts = self._parts(ordered, sets)[self._rank :: self._world_size]
        return [
            batch
            for part in parts
            for batch in (
                self._collate(part, epoch, sets)
                if len(part)
                else self._collate(ordered[-1:], epoch, sets, is_filler=True)
            )
        ]

    def _parts(self, ordered: npt.NDArray[np.int64], sets: int) -> list[npt.NDArray[np.int64]]:
        """Runs of neighbours, each small enough for one forward, as many as a multiple of the ranks; some empty."""
        most, limits = self._limits.micro_batch_size, self._limits
        if limits.max_tokens is None and limits.max_anchors is None:
            # Equally many samples a part: ranks then do similar work at the same time.
            count = -(-len(ordered) // most)
            return np.array_split(ordered, count + -count % self._world_size)
        parts, begin = [], 0
        for end in range(1, len(ordered) + 1):
            if end - begin > most or not self._fits(ordered[begin:end], sets):
                parts.append(ordered[begin : end - 1])
                begin = end - 1
        parts.append(ordered[begin:])
        while len(parts) % self._world_size:
            index = max(range(len(parts)), key=lambda number: len(parts[number]))
            parts[index : index + 1] = np.array_split(parts[index], 2)
        return parts

    def _fits(self, part: npt.NDArray[np.int64], sets: int) -> bool:
        if len(part) <= 1:
            return True
        limits, (tokens, anchors) = self._limits, self._padded_sizes(part, sets)
        return (limits.max_tokens is None or len(part) * tokens <= limits.max_tokens) and (
            limits.max_anchors is None or len(part) * anchors <= limits.max_anchors
        )

    def _padded_sizes(self, part: npt.NDArray[np.int64], sets: int) -> tuple[int, int]:
        """Tokens and anchors of every row of a batch."""
        anchors = -(-int(self._num_drawn[part].max()) // sets)
        return _rounded_up(int(self._lengths[part].max())), _rounded_up(max(1, anchors))

    def _collate(
        self, indices: npt.NDArray[np.int64], epoch: int, sets: int, *, is_filler: bool = False
    ) -> Iterator[TokenBatch]:
        """Pad samples into one batch for each set of anchors; a filler keeps its tokens and supervises none of them."""
        samples = [self._samples[i] for i in indices]
        drawn = [
            draw_anchors([] if is_filler else sample.answer_mask, self._num_anchors, self._seed, epoch, int(i))
            for i, sample in zip(indices, samples, strict=True)
        ]
        lengths = self._lengths[indices]
        padded_length, padded_anchors = self._padded_sizes(indices, sets)
        input_ids = torch.full((len(indices), padded_length), self._pad_token_id)
        answer_mask = torch.zeros(len(indices), padded_length, dtype=torch.bool)
        for row, sample in enumerate(samples):
            input_ids[row, : lengths[row]] = torch.tensor(sample.input_ids)
            if not is_filler:
                answer_mask[row, : lengths[row]] = torch.tensor(sample.answer_mask)
        # One tensor for all sets: by it, features know that a batch has the samples of the one before.
        sample_index = torch.from_numpy(indices.copy())
        for first in range(sets):
            anchors = torch.zeros(len(indices), 1 if is_filler else padded_anchors, dtype=torch.int64)
            anchor_mask = torch.zeros(anchors.shape, dtype=torch.bool)
            for row, positions in enumerate(drawn):
                # Every n-th one: the sets share no anchor, and each is spread over the whole answer.
                chosen = positions[first::sets]
                anchors[row, : len(chosen)] = torch.from_numpy(chosen.copy())
                anchor_mask[row, : len(chosen)] = True
            yield TokenBatch(
                input_ids=input_ids,
                lengths=torch.from_numpy(lengths),
                answer_mask=answer_mask,
                anchors=anchors,
                anchor_mask=anchor_mask,
                sample_index=sample_index,
            )


def distinct(micro_batches: Sequence[TokenBatch]) -> Iterator[TokenBatch]:
    """One micro-batch for each run of the target: those that are not a further anchor set of the one before."""
    for index, tokens in enumerate(micro_batches):
        if index == 0 or tokens.sample_index is not micro_batches[index - 1].sample_index:
            yield tokens


def _rounded_up(size: int) -> int:
    """The next size that has only its `_LEADING_BITS` leading bits set."""
    step = 1 << max(size.bit_length() - _LEADING_BITS, 0)
    return -(-size // step) * step
