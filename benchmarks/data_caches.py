"""Feature caches against the disk below them: the part of benchmarks/data.py that runs no target but its head."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import table
from benchmarks.clocks import seconds
from deepspec.config import TargetConfig
from deepspec.data.cache import Cache, Place
from deepspec.data.cache_format import Encoding, Record, Shard, write_shard
from deepspec.data.cache_manifest import manifest_of
from deepspec.data.cache_writer import open_writer
from deepspec.data.chat import TokenSample
from deepspec.data.features import TargetPass, content_key
from deepspec.targets.base import Target

CPU = torch.device("cpu")
SAMPLE_TOKENS, SAMPLE_ANSWER = 400, 300
SHARD_MIB = 64
BLOCK = random.Random(0).randbytes(8 * 2**20)
MEASURED: tuple[Encoding, ...] = ("bf16", "int8")


def drop_from_memory(paths: Sequence[Path]) -> None:
    """Let the system forget what it holds of files, so that reading them reads the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_devices() -> int:
    """What this process has read from devices so far, not from memory (Linux)."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])


def plain_write(paths: Sequence[Path], sizes: Sequence[int]) -> None:
    """Write files of these sizes from one end to the other and sync them: as fast as the disk takes it."""
    for path, size in zip(paths, sizes, strict=True):
        with path.open("wb", buffering=0) as file:
            for begin in range(0, size, len(BLOCK)):
                file.write(memoryview(BLOCK)[: size - begin])
            os.fsync(file.fileno())


def plain_read(paths: Sequence[Path]) -> None:
    """Read files from one end to the other."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(len(BLOCK)):
                pass


def samples_and_passes(target: Target, megabytes: int) -> tuple[list[TokenSample], list[TargetPass]]:
    """Samples whose features are random numbers."""
    generator = torch.Generator().manual_seed(0)
    width = len(target.layer_ids) * target.hidden_size
    count = max(2, megabytes * 2**20 // (2 * width * SAMPLE_TOKENS))
    mask = [index >= SAMPLE_TOKENS - SAMPLE_ANSWER for index in range(SAMPLE_TOKENS)]

    def draw(size: int) -> Tensor:
        return torch.randn(SAMPLE_TOKENS, size, generator=generator).to(torch.bfloat16)

    samples, passes = [], []
    for number in range(count):
        ids = torch.randint(target.vocab_size, (SAMPLE_TOKENS,), generator=generator).tolist()
        samples.append(TokenSample(str(number), ids, mask))
        passes.append(TargetPass(draw(width), draw(target.hidden_size), None))
    return samples, passes


def write_cache(
    target: Target,
    config: TargetConfig,
    folder: Path,
    encoding: Encoding,
    made: tuple[list[TokenSample], list[TargetPass]],
) -> None:
    """Write a cache as `deepspec data cache` does once the target has run."""
    with open_writer(folder, target, manifest_of(target, config, encoding, None), SHARD_MIB) as writer:
        for sample, one in zip(*made, strict=True):
            writer.keep(sample, one)


def write_again(folder: Path, shards: Sequence[tuple[list[Record], list[bytes]]]) -> None:
    """Write shards of ready records."""
    for number, (records, keys) in enumerate(shards):
        write_shard(folder / f"shard-again-{number}.safetensors", records, keys)


def read_cache(cache: Cache, places: Sequence[Place], threads: int) -> None:
    """Read and decode samples in the given order."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda place: cache.read(place, torch.bfloat16), places):
            pass


def measure_caches(target: Target, config: TargetConfig, megabytes: int, repeats: int, folder: Path) -> str:
    """MB/s of a cache and of the disk below it."""
    rows = []
    made = samples_and_passes(target, megabytes)
    for encoding in MEASURED:
        place = folder / f"cache_{encoding}"
        with_head = seconds(functools.partial(write_cache, target, config, place, encoding, made), CPU)
        cache = Cache(place)
        files = [shard.path for shard in cache.shards]
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes) / 1e6
        ready = [_records(shard) for shard in cache.shards]
        places = cache.all_places()
        random.Random(0).shuffle(places)
        plain = [folder / f"plain-{number}" for number in range(len(files))]
        rates: dict[str, list[float]] = {}

        def note(
            what: str, work: Callable[[], Any], size: float = total, rates: dict[str, list[float]] = rates
        ) -> None:
            before = bytes_from_devices()
            rates.setdefault(what, []).append(size / seconds(work, CPU))
            rates.setdefault(f"{what} fetched", []).append((bytes_from_devices() - before) / 1e6 / size)

        for _ in range(repeats):
            note("disk write", functools.partial(plain_write, plain, sizes))
            note("write", functools.partial(write_again, folder, ready))
            drop_from_memory([*plain, *files])
            note("disk read", functools.partial(plain_read, plain))
            note("read", functools.partial(read_cache, cache, places, 1))
            drop_from_memory(files)
            note("read by 2 threads", functools.partial(read_cache, cache, places, 2))
        name = f"{encoding}, {total:,.0f} MB in {len(files)} files"
        for what, disk in (("write", "disk write"), ("read", "disk read"), ("read by 2 threads", "disk read")):
            mine, its = median(rates[what]), median(rates[disk])
            fetched = f"{median(rates[f'{what} fetched']):.0%}", f"{median(rates[f'{disk} fetched']):.0%}"
            shares = fetched if "read" in what else ("", "")
            rows.append([f"{name}: {what}", f"{mine:,.0f}", f"{its:,.0f}", f"{mine / its:.0%}", *shares])
        rows.append([f"{name}: write, encoding and head included", f"{total / with_head:,.0f}", "", "", "", ""])
        for row in rows[-4:]:
            print(row, flush=True)
    return "\n\n".join(
        [
            f"Samples of {SAMPLE_TOKENS} tokens, {SAMPLE_ANSWER} of them answer, {len(target.layer_ids)} taps of "
            f"{target.hidden_size}. The disk's own rate: the same bytes written in one piece a file and synced, or "
            "read from one end to the other, in turns with ours. Before a reading the system is told to forget the "
            "files (posix_fadvise; a host below may hold them all the same); the last columns say what share of the "
            "bytes it then took from the device, of ours and of the plain reading. `write` takes ready records: "
            "checksums, file, sync. `read` takes samples in random order: checksums, decoding to bf16. The last line "
            "of an encoding also encodes, and runs the target's head over all answer positions for their logsumexps, "
            f"which is arithmetic of this CPU; once. Medians of {repeats}.",
            table(["cache", "MB/s", "disk MB/s", "share", "from the device", "plain reading"], rows),
        ]
    )


def _records(shard: Shard) -> tuple[list[Record], list[bytes]]:
    """Copies: tensors that are still mapped into the file would keep the system from forgetting it."""
    read = (shard.read(index) for index in range(len(shard)))
    records = [Record(one.id, *(part.clone() for part in one[1:] if isinstance(part, Tensor))) for one in read]
    return records, [content_key(record.input_ids.tolist()) for record in records]
