"""The `deepspec data` jobs around feature caches: write one, check one, read the answers back out of one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from deepspec import console
from deepspec.config import DataJobConfig, TrainConfig
from deepspec.data.cache import Cache, find
from deepspec.data.cache_manifest import manifest_of
from deepspec.data.cache_v2 import DeepSpecCache, is_version_2, trimmed, write_version_2
from deepspec.data.cache_writer import check_disk, in_words, open_writer, planned_bytes
from deepspec.data.cached import open_cache
from deepspec.data.chat import TokenSample
from deepspec.data.features import TargetPass
from deepspec.data.packed import PackedSamples
from deepspec.data.samples import read_run_samples
from deepspec.errors import ConfigError, DataError
from deepspec.files import write_jsonl
from deepspec.runtime import choose_device
from deepspec.targets.base import Target
from deepspec.targets.head_only import load_head_only

# Two logits that are this close change places with the shape of a product (conventions.md): 2 units of bf16.
_ULPS = 2 * 2.0**-8
_CHUNK = 512


def write_cache(config: TrainConfig) -> Path:
    """Run the target over the samples of a training and store what it says; samples that are there are left alone.

    Started by torchrun, each process writes its own share; they need not finish, or start, together.

    Raises:
        DataError: the answers or the cache cannot be used, or the disk is too small.
    """
    folder = Path(config.features.cache)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console.set_quiet(rank > 0)
    target = Target.load(config.target, choose_device(config.engine.device))
    samples = _samples(config, target)
    if config.features.format == "deepspec_v2":
        return _write_version_2(config, folder, target, samples, world)
    manifest = manifest_of(target, config.target, config.features.encoding, Path(config.data.answers))
    with open_writer(folder, target, manifest, config.features.shard_mib, rank) as writer:
        found = find(writer.shards, samples)
        missing = [number for number, place in enumerate(found) if place is None]
        needed = planned_bytes((samples[number] for number in missing), target, config.features.encoding)
        console.info(
            f"{folder}: {len(samples):,} samples, {len(missing):,} of them to be written, {in_words(needed)} in "
            f"{config.features.encoding}"
        )
        check_disk(folder, needed)
        mine = PackedSamples(samples[number] for number in missing if number % world == rank)
        with console.progress("running the target", total=len(mine)) as bar:
            for sample, one in _passes(target, mine, config.features.batch_size):
                writer.keep(sample, one)
                bar.advance(1)
    console.info(f"{folder}: {writer.written:,} samples written, {sum(map(len, writer.shards)):,} were there")
    return folder


def verify_cache(config: TrainConfig) -> None:
    """Read every sample of a cache: checksums, and the target's head on the last hidden states.

    Raises:
        DataError: there is no sample, one is damaged, or the head does not say what it said when the cache was
            written.
    """
    folder = Path(config.features.cache)
    target = load_head_only(config.target, choose_device(config.engine.device))
    cache = open_cache(folder, target)
    places: Sequence[Any] = range(len(cache)) if isinstance(cache, DeepSpecCache) else cache.all_places()
    if not places:
        raise DataError(
            f"cache {folder} holds no sample: whoever wrote it was stopped before its first file was whole. Run "
            "`deepspec data cache` with the words of the training."
        )
    labels = hits = 0
    with console.progress("verifying", total=len(places)) as bar:
        for place in places:
            for best, expected, following, name in _heads(cache, place, target):
                # DeepSpec's format has no argmax: there only the answers themselves can be compared.
                if expected is not None and not _agree(best, expected):
                    raise DataError(
                        f"cache {folder}: the target's head gives other tokens on the last hidden states of sample "
                        f"{name!r} than were noted: it was stored before the final norm, or by another target. Write "
                        "the cache anew."
                    )
                hits += int((best.argmax(dim=-1) == following).sum())
                labels += len(following)
            bar.advance(1)
    console.info(
        f"{folder} is whole: {len(places):,} samples, {labels:,} supervised tokens, {hits / max(labels, 1):.1%} of "
        "them the target's first choice"
    )


def write_cached_answers(config: DataJobConfig) -> Path:
    """Write the samples of a cache as an answers file, so that a training without their texts can read it.

    Raises:
        ConfigError: no cache is named.
        DataError: the cache is damaged, or the file is there already or cannot be written.
    """
    if config.cache is None:
        raise ConfigError("no cache is named. Give the folder: cache=<folder>.")
    folder, path = Path(config.cache), Path(config.answers)
    if path.exists():
        raise DataError(f"{path} exists; its answers would be lost. Give another file: answers=<file>.jsonl.")
    cache: Cache | DeepSpecCache = DeepSpecCache(folder) if is_version_2(folder) else Cache(folder)
    name = cache.manifest.get("target", cache.manifest.get("target_model_name_or_path"))
    try:
        write_jsonl(path, ({**_answer_row(sample), "target": name} for sample in _cached_samples(cache)))
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}). Choose another path for answers.") from error
    console.info(f"answers of {folder}: {path}")
    return path


def _samples(config: TrainConfig, target: Target) -> Sequence[TokenSample]:
    samples, _ = read_run_samples(config, target)
    return samples[: config.features.limit]


def _passes(
    target: Target, samples: Sequence[TokenSample], batch_size: int
) -> Iterator[tuple[TokenSample, TargetPass]]:
    """Run a target over samples, longest first: what does not fit into memory fails at once."""
    lengths = [len(sample.input_ids) for sample in samples]
    ordered = sorted(range(len(samples)), key=lambda number: -lengths[number])
    for begin in range(0, len(ordered), batch_size):
        batch = [samples[number] for number in ordered[begin : begin + batch_size]]
        longest = len(batch[0].input_ids)
        ids = torch.tensor([sample.input_ids + [0] * (longest - len(sample.input_ids)) for sample in batch])
        whole = TargetPass(*target.features(ids.to(target.device)), None)
        for row, sample in enumerate(batch):
            yield sample, whole.row(row, len(sample.input_ids))


def _write_version_2(
    config: TrainConfig, folder: Path, target: Target, samples: Sequence[TokenSample], world: int
) -> Path:
    if config.features.encoding != "bf16" or world > 1:
        raise ConfigError(
            "features.format=deepspec_v2 is written by one process in bf16. Set features.encoding=bf16, or use "
            "features.format=deepspec."
        )
    tokens = sum(len(sample.input_ids) for sample in samples)
    needed = tokens * (6 + 2 * target.hidden_size * (len(target.layer_ids) + 1))
    console.info(f"{folder}: {len(samples):,} samples, {in_words(needed)} in DeepSpec's version 2")
    check_disk(folder, needed)
    manifest = {
        "target_layer_ids": list(target.layer_ids),
        "hidden_size": target.hidden_size,
        "target_model_name_or_path": target.name,
        "source_jsonl_paths": [config.data.answers],
        "chat_template": str(target.tokenizer.chat_template or ""),
        "max_length": config.data.max_length,
        "min_loss_tokens": config.data.min_answer_tokens,
    }
    with console.progress("running the target", total=len(samples)) as bar:
        passes = _passes(target, samples, config.features.batch_size)
        write_version_2(folder, _counted(passes, bar), manifest, config.features.shard_mib * 2**20)
    return folder


def _counted(
    passes: Iterator[tuple[TokenSample, TargetPass]], bar: console.ProgressBar
) -> Iterator[tuple[TokenSample, TargetPass]]:
    for one in passes:
        yield one
        bar.advance(1)


def _heads(cache: Any, place: Any, target: Target) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, Any, str]]:
    """Logits on the supervised positions of a sample, the noted argmax, the answer tokens, and the sample's id."""
    record, one = cache.read(place, target.dtype)
    ids, mask = (torch.as_tensor(part).long() for part in (record.input_ids, record.answer_mask))
    rows = mask[1:].bool()
    expected = None if isinstance(cache, DeepSpecCache) else record.best_token.long()
    hidden, following = one.last_hidden[rows], ids[1:][rows]
    for begin in range(0, len(hidden), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        logits = target.logits(hidden[part].to(target.device)).cpu()
        yield logits, None if expected is None else expected[part], following[part], record.id


def _agree(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the noted tokens are the best ones, but for logits that lie within two bf16 units of each other."""
    best = logits.amax(dim=-1)
    return bool((best - logits.gather(-1, expected[:, None])[:, 0] <= _ULPS * best.abs()).all())


def _cached_samples(cache: Cache | DeepSpecCache) -> Iterator[TokenSample]:
    if isinstance(cache, DeepSpecCache):
        yield from (cache.sample(index) for index in range(len(cache)))
        return
    for place in cache.all_places():
        record = place.shard.read(place.number)
        yield TokenSample(record.id, record.input_ids.tolist(), record.answer_mask.bool().tolist())


def _answer_row(sample: TokenSample) -> dict[str, Any]:
    """A row whose turns are the supervised runs of a sample."""
    ids, mask = trimmed(sample.input_ids, sample.answer_mask, sample.id)[1:]
    prompts, answers, at = [], [], 0
    for is_answer, run in groupby(mask):
        begin, at = at, at + len(list(run))
        if is_answer:
            prompts.append(ids[:begin])
            answers.append(ids[begin:at])
    return {"id": sample.id, "prompt_ids": prompts, "answer_ids": answers}
