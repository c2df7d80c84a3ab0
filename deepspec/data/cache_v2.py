"""Version 2 of DeepSpec's feature caches: an index of fixed records and shards of raw bytes, read and written.

These hold states of all positions in bf16, and neither checksums nor logsumexps. What can be checked is checked when it
is read: sizes, offsets, ids, masks, and that every number is finite.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from deepspec.data.chat import TokenSample
from deepspec.data.features import TargetPass, content_key
from deepspec.errors import DataError
from deepspec.files import sync, write_json
from deepspec.targets.base import Target

_RECORD = struct.Struct("<QIIQQQQQ")
_FIXED = {
    "version": 2,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": _RECORD.size,
}


class _Entry(NamedTuple):
    """One record of samples.idx; the offsets are those of its five parts in the shard."""

    sample_id: int
    shard_id: int
    length: int
    offsets: tuple[int, ...]


def is_version_2(folder: Path) -> bool:
    """Whether a folder is a cache of this format."""
    return (folder / "samples.idx").is_file()


def trimmed(input_ids: Sequence[int], answer_mask: Sequence[bool], name: str) -> TokenSample:
    """A sample that ends with its last supervised token: no loss reads what comes after."""
    end = max((index + 1 for index, is_answer in enumerate(answer_mask) if is_answer), default=0)
    return TokenSample(name, list(input_ids[:end]), list(map(bool, answer_mask[:end])))


class DeepSpecCache:
    """An open cache of version 2.

    Attributes:
        manifest: as it was written.
    """

    def __init__(self, folder: Path) -> None:
        """Read manifest and index.

        Raises:
            DataError: something is missing, of another version, or contradicts itself.
        """
        self.folder = folder
        try:
            self.manifest = dict(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
            raw = (folder / "samples.idx").read_bytes()
            wrong = [key for key, value in _FIXED.items() if self.manifest[key] != value]
            if wrong:
                raise self._damaged(f"{wrong[0]} is {self.manifest[wrong[0]]!r}, not {_FIXED[wrong[0]]!r}")
            self._hidden_size = int(self.manifest["hidden_size"])
            self._num_taps = len(self.manifest["target_layer_ids"])
            names = {int(shard["shard_id"]): str(shard["file_name"]) for shard in self.manifest["shards"]}
            count = int(self.manifest["num_samples"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"its manifest or index cannot be read ({error!r})") from error
        if len(raw) != count * _RECORD.size:
            raise self._damaged(f"samples.idx has {len(raw):,} bytes for {count:,} samples of {_RECORD.size}")
        self._entries = [_Entry(f[0], f[1], f[2], tuple(f[3:])) for f in _RECORD.iter_unpack(raw)]
        self._shards = {}
        for number, name in names.items():
            path = folder / Path(name).name
            if not path.is_file():
                raise self._damaged(f"shard {path.name} is missing")
            self._shards[number] = path, path.stat().st_size
        for entry in self._entries:
            self._check(entry)

    @classmethod
    def for_target(cls, folder: Path, target: Target) -> DeepSpecCache:
        """Open the cache of a target, as far as the format can say whose it is.

        Raises:
            DataError: it is damaged, or of other layers or sizes.
        """
        cache = cls(folder)
        for key, wanted in (("target_layer_ids", list(target.layer_ids)), ("hidden_size", target.hidden_size)):
            if cache.manifest[key] != wanted:
                raise DataError(
                    f"cache {folder} was written with {key} {cache.manifest[key]} of "
                    f"{cache.manifest.get('target_model_name_or_path')!r}, but this run has {wanted}. Set "
                    "target.layers and target.name_or_path to the first, or write another cache."
                )
        return cache

    def __len__(self) -> int:
        return len(self._entries)

    def sample(self, index: int) -> TokenSample:
        """Tokens and mask of one sample, up to its last supervised token.

        Raises:
            DataError: they are damaged.
        """
        entry = self._entries[index]
        ids = self._part(entry, 0, np.int32, entry.length)
        attention, mask = (self._part(entry, part, np.uint8, entry.length) for part in (1, 2))
        name = str(entry.sample_id)
        if (ids < 0).any() or (mask > 1).any() or (attention > 1).any():
            raise self._damaged(f"sample {name} holds ids below 0, or masks that are neither 0 nor 1")
        if (np.diff(attention.astype(np.int8)) > 0).any() or (mask > attention).any():
            raise self._damaged(f"sample {name} is padded on the left or supervised in its padding")
        return trimmed(ids.tolist(), mask.astype(bool).tolist(), name)

    def places(self, samples: Sequence[TokenSample]) -> list[int]:
        """Where each sample is stored.

        Raises:
            DataError: some are not, or the cache is damaged.
        """
        places = {content_key(self.sample(index).input_ids): index for index in range(len(self))}
        found = [places.get(content_key(_ending_with_its_answer(sample).input_ids)) for sample in samples]
        missing = [sample for sample, place in zip(samples, found, strict=True) if place is None]
        if missing:
            raise DataError(
                f"cache {self.folder} lacks {len(missing):,} of this run's {len(samples):,} samples, the first with "
                f"the id {missing[0].id!r}. Make the answers of the run from the cache: `deepspec data cache-answers "
                f"cache={self.folder} answers=<file>.jsonl`, and train with data.answers=<file>.jsonl."
            )
        return [place for place in found if place is not None]

    def read(self, place: int, dtype: torch.dtype) -> tuple[TokenSample, TargetPass]:
        """One sample and what the target said.

        Raises:
            DataError: it is damaged.
        """
        entry, sample = self._entries[place], self.sample(place)
        states = [
            self._states(entry, 3, self._num_taps * self._hidden_size),
            self._states(entry, 4, self._hidden_size),
        ]
        rows = max(len(sample.input_ids) - 1, 0)
        features, last_hidden = (part[:rows].to(dtype) for part in states)
        if not bool(features.isfinite().all() & last_hidden.isfinite().all()):
            raise self._damaged(f"sample {sample.id} holds NaN or infinity")
        return sample, TargetPass(features, last_hidden, None)

    def _states(self, entry: _Entry, part: int, width: int) -> Tensor:
        raw = self._part(entry, part, np.int16, entry.length * width)
        return torch.from_numpy(raw).view(torch.bfloat16).view(entry.length, width)

    def _part(self, entry: _Entry, part: int, dtype: type, count: int) -> Any:
        path, _ = self._shards[entry.shard_id]
        size = count * np.dtype(dtype).itemsize
        try:
            with path.open("rb") as file:
                file.seek(entry.offsets[part])
                # A copy, since numbers of a file that is mapped would have to be aligned.
                return np.frombuffer(bytearray(file.read(size)), dtype=dtype, count=count)
        except (OSError, ValueError) as error:
            raise self._damaged(f"{path.name} cannot be read ({error})") from error

    def _check(self, entry: _Entry) -> None:
        if entry.shard_id not in self._shards:
            raise self._damaged(f"sample {entry.sample_id} is in shard {entry.shard_id}, which the manifest lacks")
        path, size = self._shards[entry.shard_id]
        sizes = (4, 1, 1, 2 * self._num_taps * self._hidden_size, 2 * self._hidden_size)
        ends = [offset + entry.length * width for offset, width in zip(entry.offsets, sizes, strict=True)]
        if max(ends) > size:
            raise self._damaged(f"{path.name} ends at byte {size:,}, sample {entry.sample_id} at {max(ends):,}")

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"cache {self.folder} (version 2) is damaged: {what}. Copy it again from its source, or write a cache with "
            "`deepspec data cache`."
        )


def _ending_with_its_answer(sample: TokenSample) -> TokenSample:
    return trimmed(sample.input_ids, sample.answer_mask, sample.id)


def write_version_2(
    folder: Path,
    passes: Iterable[tuple[TokenSample, TargetPass]],
    manifest: dict[str, Any],
    shard_bytes: int,
) -> int:
    """Write a whole cache, which is there afterwards or not at all.

    Args:
        folder: must not exist.
        passes: samples and the target's states at all of their positions.
        manifest: what is to be said besides what the format fixes: layers, sizes, names.
        shard_bytes: a new shard begins when one is larger.

    Returns:
        Number of samples.

    Raises:
        DataError: the folder exists or cannot be written.
    """
    if folder.exists():
        raise DataError(f"{folder} exists. Choose another folder with features.cache, or delete it.")
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The format has no checksums: what a second writer appended to a shard would be read as numbers.
        with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
            count = _write_and_rename(temporary, folder, passes, manifest, shard_bytes)
    except Timeout as error:
        raise DataError(f"{folder} is being written by another process. Wait for it, or end it.") from error
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise DataError(
            f"{folder} cannot be written ({error.strerror}). Free some space, or choose another folder with "
            "features.cache, and run the same command again."
        ) from error
    return count


def _write_and_rename(
    temporary: Path,
    folder: Path,
    passes: Iterable[tuple[TokenSample, TargetPass]],
    manifest: dict[str, Any],
    shard_bytes: int,
) -> int:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    names: list[str] = []
    offset, count = shard_bytes, 0
    with (temporary / "samples.idx").open("wb") as index:
        for count, (sample, one) in enumerate(passes, start=1):
            if offset >= shard_bytes:
                names.append(f"shard-{len(names):05d}.bin")
                offset = 0
            parts = _parts(sample, one)
            starts = [offset + sum(map(len, parts[:number])) for number in range(len(parts))]
            with (temporary / names[-1]).open("ab") as shard:
                shard.writelines(parts)
            offset += sum(map(len, parts))
            index.write(_RECORD.pack(count - 1, len(names) - 1, len(sample.input_ids), *starts))
    shards = [{"shard_id": number, "file_name": name} for number, name in enumerate(names)]
    write_json(
        temporary / "manifest.json",
        {**_FIXED, **manifest, "num_samples": count, "num_shards": len(names), "shards": shards},
    )
    for path in temporary.iterdir():
        sync(path)
    sync(temporary)
    os.replace(temporary, folder)
    sync(folder.absolute().parent)
    return count


def _parts(sample: TokenSample, one: TargetPass) -> list[bytes]:
    length = len(sample.input_ids)
    assert len(one.features) == len(one.last_hidden) == length
    states = [
        part.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes()
        for part in (one.features, one.last_hidden)
    ]
    masks = [np.ones(length, np.uint8).tobytes(), np.asarray(sample.answer_mask, np.uint8).tobytes()]
    return [np.asarray(sample.input_ids, "<i4").tobytes(), *masks, *states]
