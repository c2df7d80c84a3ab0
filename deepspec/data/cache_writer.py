"""Writing a feature cache: what it will take, and its shards, by any number of processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from deepspec.data.cache import open_shards, predicting
from deepspec.data.cache_format import (
    Encoding,
    Record,
    bytes_per_sample,
    encode,
    summary_path,
    write_shard,
)
from deepspec.data.cache_manifest import IDENTITY, MANIFEST, check_identity, read_manifest
from deepspec.data.chat import TokenSample
from deepspec.data.features import TargetPass, content_key
from deepspec.errors import DataError
from deepspec.files import write_json
from deepspec.targets.base import Target

_CHUNK = 512


def planned_bytes(samples: Iterable[TokenSample], target: Target, encoding: Encoding) -> int:
    """Bytes that samples take in a cache, to a percent."""
    hidden, taps = target.hidden_size, len(target.layer_ids)
    return sum(
        bytes_per_sample(len(sample.input_ids), sum(sample.answer_mask[1:]), hidden, taps, encoding)
        for sample in samples
    )


def check_disk(folder: Path, needed: int) -> None:
    """Refuse to begin what will not fit.

    Raises:
        DataError: with the sizes and the ways out.
    """
    free = free_bytes(folder)
    if needed > free:
        raise DataError(
            f"the cache needs {in_words(needed)} more, but {folder} has {in_words(free)} free. Write int8 "
            "(features.encoding=int8), fewer layers (target.layers), shorter or fewer samples (data.max_length, "
            "features.limit), or choose another folder (features.cache). `deepspec data regenerate` calls them "
            "cache_encoding, max_new_tokens, limit and cache."
        )


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder that need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def in_words(size: int) -> str:
    """Bytes with a unit."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


class CacheWriter:
    """Adds samples to a cache; made by `open_writer`. Also takes what a target says while it generates answers."""

    is_on = True

    def __init__(self, folder: Path, target: Target, encoding: Encoding, shard_bytes: int, rank: int) -> None:
        self._folder, self._target, self._encoding = folder, target, encoding
        self._shard_bytes, self._rank = shard_bytes, rank
        self._records: list[Record] = []
        self._keys: list[bytes] = []
        self._held_bytes = 0
        self.shards = open_shards(folder)
        self.written = 0

    def claim(self, target: Target) -> None:
        """Say whose passes are coming: no others than those of the target that the cache was opened for."""
        assert target is self._target

    def keep(self, sample: TokenSample, one: TargetPass) -> None:
        """Store what the target said about a sample, now or with the next ones.

        Raises:
            DataError: it holds NaN or infinity, or the disk refuses it.
        """
        rows = predicting(sample.answer_mask)
        features, last_hidden = one.features[: len(rows)], one.last_hidden[: len(rows)]
        if not bool(features.isfinite().all() & last_hidden.isfinite().all()):
            raise DataError(
                f"the target's states of sample {sample.id!r} hold NaN or infinity; training on them would fail. Try "
                "target.dtype=float32, or leave the sample out."
            )
        stored = last_hidden[rows.to(last_hidden.device)].to(torch.bfloat16)
        normaliser, best = self._said(stored)
        encoded, scales = encode(features, len(self._target.layer_ids), self._encoding)
        record = Record(
            id=sample.id,
            input_ids=torch.tensor(sample.input_ids, dtype=torch.int32),
            answer_mask=torch.tensor(sample.answer_mask, dtype=torch.uint8),
            features=encoded.cpu(),
            scales=scales.cpu(),
            last_hidden=stored.cpu(),
            log_normaliser=normaliser,
            best_token=best,
        )
        self._records.append(record)
        self._keys.append(content_key(sample.input_ids))
        self._held_bytes += record.nbytes
        if self._held_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is held as a shard.

        Raises:
            DataError: the disk refuses it; the shards before are untouched.
        """
        if not self._records:
            return
        number = 0
        while (path := self._folder / f"shard-{self._rank:05d}-{number:06d}.safetensors").exists():
            number += 1
        try:
            write_shard(path, self._records, self._keys)
        except OSError as error:
            raise DataError(
                f"{path} cannot be written ({error.strerror}). Free some space and run the same command again; the "
                "shards before it are kept."
            ) from error
        self.written += len(self._records)
        self._records, self._keys, self._held_bytes = [], [], 0

    def _said(self, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logsumexp and argmax of the logits that follow from the hidden states as they are stored."""
        normaliser, best = [torch.empty(0)], [torch.empty(0, dtype=torch.int32)]
        for chunk in torch.split(last_hidden, _CHUNK) if len(last_hidden) else ():
            logits = self._target.logits(chunk)
            normaliser.append(logits.logsumexp(dim=-1).float().cpu())
            best.append(logits.argmax(dim=-1).int().cpu())
        return torch.cat(normaliser), torch.cat(best)


@contextmanager
def open_writer(
    folder: Path, target: Target, manifest: Mapping[str, Any], shard_mib: int, rank: int = 0
) -> Iterator[CacheWriter]:
    """Open a cache for adding, as one of possibly many processes; what is held is written at the end, also of a run
    that an error or Ctrl-C ends.

    Args:
        folder: the cache, made where it does not exist.
        target: whose passes will come.
        manifest: from `manifest_of`.
        shard_mib: size of a file, MiB.
        rank: number of this process among those that write.

    Raises:
        DataError: the cache is another target's or damaged, cannot be written, or this rank writes it already.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".rank-{rank:05d}.lock", timeout=0):
            if (folder / MANIFEST).exists():
                check_identity(folder, read_manifest(folder), manifest, (*IDENTITY, "encoding"))
            else:
                write_json(folder / MANIFEST, dict(manifest))
            _remove_leftovers(folder, rank)
            writer = CacheWriter(folder, target, manifest["encoding"], shard_mib * 2**20, rank)
            try:
                yield writer
            finally:  # the answers that these states belong to are on disk, and are not generated again
                writer.flush()
    except Timeout as error:
        raise DataError(
            f"cache {folder} is being written by another process of the same rank {rank}. Wait for it, or start the "
            "processes with torchrun, which numbers them."
        ) from error
    except OSError as error:
        raise DataError(
            f"cache {folder} cannot be written ({error.strerror or error}). Choose another folder."
        ) from error


def _remove_leftovers(folder: Path, rank: int) -> None:
    """Delete what a killed writer of this rank left: temporary files, and a shard without its summary."""
    for path in folder.glob(f".shard-{rank:05d}-*"):
        path.unlink()
    for path in folder.glob(f"shard-{rank:05d}-*.safetensors"):
        if not summary_path(path).exists():
            path.unlink()
