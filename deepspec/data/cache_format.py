"""The bytes of a feature cache: how features are encoded, what a shard holds, and the sums that guard it.

A shard is one safetensors file, whole or not there, with a small JSON file beside it that is written last. Every sample
carries a checksum over all that is stored of it. Knows no targets and no training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepspec.errors import DataError
from deepspec.files import sync, write_json

Encoding = Literal["bf16", "fp8", "int8"]

ENCODINGS: tuple[Encoding, ...] = ("bf16", "fp8", "int8")
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_PER_SAMPLE = ("keys", "mask_hashes", "counts", "checksums")
_PER_TOKEN = ("input_ids", "answer_mask")
_PER_ROW = ("features", "scales")
_PER_LABEL = ("last_hidden", "log_normaliser", "best_token")


class Record(NamedTuple):
    """One sample of n tokens as it is stored.

    Attributes:
        id: of the sample.
        input_ids: [n] int32.
        answer_mask: [n] uint8.
        features: [n - 1, M*H] encoded; nothing reads the last position.
        scales: [n - 1, M] fp32, what each tap of a row was divided by; [n - 1, 0] for bf16.
        last_hidden: [s, H] bf16, where the next token is an answer token.
        log_normaliser: [s] fp32 logsumexp of the target's logits there.
        best_token: [s] int32 argmax of the target's logits there.
    """

    id: str
    input_ids: Tensor
    answer_mask: Tensor
    features: Tensor
    scales: Tensor
    last_hidden: Tensor
    log_normaliser: Tensor
    best_token: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.numel() * part.element_size() for part in self[1:] if isinstance(part, Tensor))


def encode(features: Tensor, num_taps: int, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Encode features [n, M*H]; returns them and the scales of their taps.

    int8 and fp8 (e4m3) are scaled so that the largest entry of every tap of every row is the largest number there is.
    """
    if encoding == "bf16":
        return features.to(torch.bfloat16), torch.empty(len(features), 0)
    taps = features.float().reshape(len(features), num_taps, features.shape[1] // num_taps)
    scales = (taps.abs().amax(dim=-1) / _LARGEST[encoding]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = taps / scales[..., None]
    if encoding == "int8":
        scaled = scaled.round()
    return scaled.view(features.shape).to(_DTYPES[encoding]), scales


def decode(features: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Features [n, M*H] from what `encode` made."""
    num_taps = scales.shape[1]
    if not num_taps:
        return features.to(dtype)
    taps = features.float().reshape(len(features), num_taps, features.shape[1] // num_taps)
    return (taps * scales[..., None]).view(features.shape).to(dtype)


def bytes_per_sample(length: int, labels: int, hidden_size: int, num_taps: int, encoding: Encoding) -> int:
    """Bytes that a sample takes, to a percent.

    Args:
        length: n, its tokens.
        labels: s, its supervised positions.
        hidden_size: H.
        num_taps: M.
        encoding: of the features.
    """
    scales = 0 if encoding == "bf16" else 4 * num_taps
    row = num_taps * hidden_size * _DTYPES[encoding].itemsize + scales
    # Last hidden, logsumexp and argmax of a supervised position; id and mask of each token; the index.
    return (length - 1) * row + labels * (2 * hidden_size + 8) + 5 * length + 64


def checksum(record: Record) -> int:
    """Sum over everything of a record but its id, as a signed number that fits an int64."""
    digest = xxhash.xxh3_64()
    for part in record[1:]:
        if isinstance(part, Tensor):
            digest.update(raw_bytes(part))
    return digest.intdigest() - 2**63


def mask_hash(answer_mask: Sequence[bool]) -> int:
    """Name of a mask, as a signed number that fits an int64."""
    return xxhash.xxh3_64_intdigest(bytes(map(bool, answer_mask))) - 2**63


def write_shard(path: Path, records: Sequence[Record], keys: Sequence[bytes]) -> None:
    """Write records as one shard, synced and renamed into place, then the summary that makes it count.

    Raises:
        OSError: the disk refuses; no shard is there then.
    """
    columns: dict[str, Tensor] = {
        "keys": torch.tensor(list(b"".join(keys)), dtype=torch.uint8).view(-1, 16),
        "mask_hashes": torch.tensor([mask_hash(record.answer_mask.tolist()) for record in records]),
        "counts": torch.tensor([[len(record.input_ids), len(record.last_hidden)] for record in records]),
        "checksums": torch.tensor([checksum(record) for record in records]),
        "names": torch.tensor(list(json.dumps([record.id for record in records]).encode()), dtype=torch.uint8),
    }
    for name in (*_PER_TOKEN, *_PER_ROW, *_PER_LABEL):
        columns[name] = torch.cat([getattr(record, name) for record in records]).contiguous()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(columns, temporary)
        sync(temporary)
        os.replace(temporary, path)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(None, str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    summary = {
        "bytes": path.stat().st_size,
        "index": _index_hash(columns),
        "samples": len(records),
        "rows": len(columns["features"]),
        "labels": len(columns["last_hidden"]),
    }
    write_json(summary_path(path), summary)


def summary_path(shard: Path) -> Path:
    """The JSON file beside a shard."""
    return shard.with_suffix(".json")


class Shard:
    """One shard: the index is read at once, each sample out of the memory-mapped file when it is asked for.

    Between reads the file is closed, so that a cache may have more shards than a process may have open files.

    Attributes:
        path: the file.
        keys: [n] content keys.
        mask_hashes: [n] of the masks.
        ids: [n] of the samples.
    """

    def __init__(self, path: Path) -> None:
        """Open a shard and check its index.

        Raises:
            DataError: the file is missing, cut off, or its index is damaged.
        """
        self.path = path
        try:
            summary = json.loads(summary_path(path).read_text(encoding="utf-8"))
            size = path.stat().st_size
            if size != summary["bytes"]:
                raise self._damaged(f"it has {size:,} bytes instead of {summary['bytes']:,}")
            with safe_open(path, framework="pt") as file:
                index = {name: file.get_tensor(name) for name in (*_PER_SAMPLE, "names")}
            if _index_hash(index) != summary["index"]:
                raise self._damaged("its index does not have the sum that was noted when it was written")
            self.ids: list[str] = json.loads(bytes(index["names"].tolist()))
        except FileNotFoundError as error:
            raise self._damaged("it is missing, though its summary is there") from error
        # SafetensorError, JSON and type errors of a damaged header or summary are one thing to the user.
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise self._damaged(f"it cannot be read ({' '.join(str(error).split())})") from error
        self.keys = [bytes(row) for row in index["keys"].tolist()]
        self.mask_hashes: list[int] = index["mask_hashes"].tolist()
        self._sums: list[int] = index["checksums"].tolist()
        tokens, labels = index["counts"].T
        self._tokens = [0, *tokens.cumsum(0).tolist()]
        self._rows = [0, *(tokens - 1).cumsum(0).tolist()]
        self._labels = [0, *labels.cumsum(0).tolist()]

    def __len__(self) -> int:
        return len(self.keys)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """The ids [n] int32 and the mask [n] uint8 of one sample, unchecked.

        Raises:
            DataError: they cannot be read.
        """
        ids, answer_mask = self._slices(dict.fromkeys(_PER_TOKEN, self._tokens), index)
        return ids, answer_mask

    def read(self, index: int) -> Record:
        """One sample.

        Raises:
            DataError: its bytes are not those that were written.
        """
        starts = dict.fromkeys(_PER_TOKEN, self._tokens)
        starts |= dict.fromkeys(_PER_ROW, self._rows) | dict.fromkeys(_PER_LABEL, self._labels)
        record = Record(self.ids[index], *self._slices(starts, index))
        if checksum(record) != self._sums[index]:
            raise self._damaged(f"sample {self.ids[index]!r} has another checksum than when it was written")
        return record

    def _slices(self, starts: Mapping[str, Sequence[int]], index: int) -> list[Tensor]:
        """A sample's part of some columns, each with where its samples start."""
        try:
            with safe_open(self.path, framework="pt") as file:
                return [file.get_slice(name)[at[index] : at[index + 1]] for name, at in starts.items()]
        except (OSError, SafetensorError, RuntimeError, IndexError, ValueError) as error:
            raise self._damaged(f"sample {self.ids[index]!r} cannot be read ({error})") from error

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"cache shard {self.path} is damaged: {what}. Delete it and {summary_path(self.path).name}, then run "
            "`deepspec data cache` with the words of the training: only these samples are made again."
        )


def _index_hash(columns: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in (*_PER_SAMPLE, "names"):
        digest.update(raw_bytes(columns[name]))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory."""
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
