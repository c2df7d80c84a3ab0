"""Reading a feature cache: what a target said about samples, found again by their tokens.

A cache is a folder with a manifest (whose features they are) and shards. Knows no training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.data.cache_format import Record, Shard, decode, mask_hash
from deepspec.data.cache_manifest import IDENTITY, check_identity, identity_of, read_manifest
from deepspec.data.chat import TokenSample
from deepspec.data.features import TargetPass, content_key
from deepspec.errors import DataError
from deepspec.targets.base import Target


class Place(NamedTuple):
    """Where a sample is stored.

    Attributes:
        shard: the file.
        number: of the stored sample in it.
        length: tokens to read, of a stored sample that goes on after the one that is asked for; None for all.
    """

    shard: Shard
    number: int
    length: int | None = None


def predicting(answer_mask: Sequence[bool]) -> Tensor:
    """Positions before an answer token [n - 1] bool: the only ones at which a loss reads the target's distribution."""
    return torch.tensor(answer_mask, dtype=torch.bool)[1:]


class Cache:
    """An open cache.

    Attributes:
        manifest: whose features it holds.
        shards: memory-mapped, in the order of their names.
    """

    def __init__(self, folder: Path) -> None:
        """Open all shards and check their indices.

        Raises:
            DataError: the manifest or a shard is missing or damaged.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.shards = open_shards(folder)

    @classmethod
    def for_target(cls, folder: Path, target: Target) -> Cache:
        """Open the cache of a target.

        Raises:
            DataError: it is damaged, or another target's, or of other layers.
        """
        check_identity(folder, read_manifest(folder), identity_of(target), IDENTITY)
        return cls(folder)

    def places(self, samples: Sequence[TokenSample]) -> list[Place]:
        """Where each sample is stored.

        Raises:
            DataError: some are not.
        """
        found = find(self.shards, samples)
        missing = [sample for sample, place in zip(samples, found, strict=True) if place is None]
        if missing:
            raise DataError(
                f"cache {self.folder} lacks {len(missing):,} of this run's {len(samples):,} samples, the first with "
                f"the id {missing[0].id!r} and {len(missing[0].input_ids):,} tokens: other answers, another template "
                "or a larger data.max_length. Run `deepspec data cache` with the words of this run, without "
                "features.limit; it adds what is missing."
            )
        return [place for place in found if place is not None]

    def all_places(self) -> list[Place]:
        """Every sample of the cache."""
        return [Place(shard, index) for shard in self.shards for index in range(len(shard))]

    def read(self, place: Place, dtype: torch.dtype) -> tuple[Record, TargetPass]:
        """One sample, and what the target said, zero where no loss reads it.

        Raises:
            DataError: it is damaged.
        """
        record = place.shard.read(place.number)
        rows = predicting(record.answer_mask.tolist())
        last_hidden = torch.zeros(len(rows), record.last_hidden.shape[1], dtype=dtype)
        normaliser = torch.zeros(len(rows), dtype=torch.float32)
        last_hidden[rows], normaliser[rows] = record.last_hidden.to(dtype), record.log_normaliser
        whole = TargetPass(decode(record.features, record.scales, dtype), last_hidden, normaliser)
        if place.length is None:
            return record, whole
        # A target reads from left to right: what it says about a beginning does not depend on what follows.
        return record, TargetPass(*(part[: place.length - 1] for part in whole if part is not None))


def open_shards(folder: Path) -> list[Shard]:
    """All shards that a cache lists; a shard without its summary was never finished and does not count."""
    return [Shard(path.with_suffix(".safetensors")) for path in sorted(folder.glob("shard-*.json"))]


def find(shards: Iterable[Shard], samples: Sequence[TokenSample]) -> list[Place | None]:
    """Where each sample is stored with at least its own supervised positions, or None.

    A sample that a training cuts at its max_length is found as the beginning of the stored one of the same id.
    """
    shards = list(shards)
    numbers: dict[bytes, list[int]] = {}
    for number, sample in enumerate(samples):
        numbers.setdefault(content_key(sample.input_ids), []).append(number)
    found: list[Place | None] = [None] * len(samples)
    for shard in shards:
        for index, key in enumerate(shard.keys):
            for number in numbers.get(key, ()):
                if found[number] is None and _covers(shard, index, samples[number].answer_mask):
                    found[number] = Place(shard, index)
    cut = {sample.id: number for number, sample in enumerate(samples) if found[number] is None}
    for shard in shards if cut else ():
        for index, name in enumerate(shard.ids):
            cut_number = cut.get(name)
            if cut_number is not None and found[cut_number] is None and _begins_with(shard, index, samples[cut_number]):
                found[cut_number] = Place(shard, index, len(samples[cut_number].input_ids))
    return found


def _covers(shard: Shard, index: int, answer_mask: Sequence[bool]) -> bool:
    if shard.mask_hashes[index] == mask_hash(answer_mask):
        return True
    return _supervises(shard.tokens(index)[1], answer_mask)


def _begins_with(shard: Shard, index: int, sample: TokenSample) -> bool:
    ids, answer_mask = shard.tokens(index)
    length = len(sample.input_ids)
    return ids[:length].tolist() == sample.input_ids and _supervises(answer_mask[:length], sample.answer_mask)


def _supervises(stored: Tensor, answer_mask: Sequence[bool]) -> bool:
    return not bool((predicting(answer_mask) & ~predicting(stored.tolist())).any())
