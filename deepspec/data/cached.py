"""Features read from a cache that was written before, ahead of the training that needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from deepspec import console
from deepspec.config import FeaturesConfig
from deepspec.data.ahead import AheadFeatures
from deepspec.data.cache import Cache
from deepspec.data.cache_v2 import DeepSpecCache, is_version_2
from deepspec.data.chat import TokenSample
from deepspec.data.features import (
    FeatureMemory,
    FeatureSource,
    OnlineFeatures,
    TargetPass,
    log_normaliser,
    padded,
)
from deepspec.data.loader import distinct
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch


def open_cache(folder: Path, target: Target) -> Cache | DeepSpecCache:
    """Open a cache of either format for a target.

    Raises:
        DataError: there is none, it is damaged, or it is not this target's.
    """
    return DeepSpecCache.for_target(folder, target) if is_version_2(folder) else Cache.for_target(folder, target)


def feature_source(
    config: FeaturesConfig,
    target: Target,
    samples: Sequence[TokenSample],
    memory: FeatureMemory,
    needs_log_normaliser: bool,
) -> FeatureSource:
    """The source that a run asks for.

    Args:
        config: which.
        target: the target, tapped as the draft reads it.
        samples: the training set.
        memory: of an online source.
        needs_log_normaliser: whether the draft reads logsumexps.

    Raises:
        DataError: a cache does not hold what the run needs.
    """
    if config.source == "online":
        online = OnlineFeatures(target, samples, memory, needs_log_normaliser=needs_log_normaliser)
        return AheadFeatures(online, target.device) if config.overlaps else online
    if config.overlap:
        console.info("features.overlap=true does nothing here: features=cached runs no target that could run ahead.")
    return CachedFeatures(
        open_cache(Path(config.cache), target),
        target,
        samples,
        prefetch_batches=config.prefetch_batches,
        needs_log_normaliser=needs_log_normaliser,
    )


class _Batch:
    """A batch that was announced: which samples, padded to what, and the reading of it once it has begun."""

    def __init__(self, tokens: TokenBatch) -> None:
        self.samples = tuple(tokens.sample_index.tolist())
        self.length = tokens.input_ids.shape[1]
        self.reading: Future[TargetPass] | None = None

    def is_for(self, tokens: TokenBatch) -> bool:
        return self.samples == tuple(tokens.sample_index.tolist()) and self.length == tokens.input_ids.shape[1]


class CachedFeatures:
    """Completes token batches with what a cache holds about their samples."""

    def __init__(
        self,
        cache: Cache | DeepSpecCache,
        target: Target,
        samples: Sequence[TokenSample],
        *,
        prefetch_batches: int,
        needs_log_normaliser: bool = False,
    ) -> None:
        """Find every sample in the cache.

        Args:
            cache: the open cache.
            target: whose head and dtype the draft uses.
            samples: what `sample_index` counts.
            prefetch_batches: batches read ahead, each in a thread of its own.
            needs_log_normaliser: also give the logsumexp of the target's logits on answer positions.

        Raises:
            DataError: samples are missing.
        """
        self._cache, self._target = cache, target
        self._places = cache.places(samples)
        self._needs_log_normaliser = needs_log_normaliser
        self._ahead = prefetch_batches
        self._announced: deque[_Batch] = deque()
        self._threads = ThreadPoolExecutor(prefetch_batches, thread_name_prefix="features")

    def upcoming(self, micro_batches: Sequence[TokenBatch]) -> None:
        """Begin to read the batches that come next, a few at a time."""
        self._announced += [_Batch(tokens) for tokens in distinct(micro_batches)]
        self._begin()

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        """See `FeatureSource`.

        Raises:
            DataError: a sample is damaged on disk.
        """
        if before is not None and before.tokens.sample_index is tokens.sample_index:
            return before._replace(tokens=tokens)
        batch = self._take(tokens)
        reading = batch.reading
        found = self._read(batch) if reading is None else reading.result()
        device = tokens.input_ids.device
        features, last_hidden = (part.to(device, non_blocking=True) for part in (found.features, found.last_hidden))
        normaliser = None if found.log_normaliser is None else found.log_normaliser.to(device, non_blocking=True)
        if normaliser is None and self._needs_log_normaliser:
            normaliser = log_normaliser(self._target, tokens.answer_mask, last_hidden)
        self._begin()
        return FeatureBatch(tokens, features, last_hidden, normaliser)

    def _take(self, tokens: TokenBatch) -> _Batch:
        """The announced batch, dropping what was announced before it and never asked for."""
        if any(batch.is_for(tokens) for batch in self._announced):
            while not (batch := self._announced.popleft()).is_for(tokens):
                if batch.reading is not None:
                    batch.reading.cancel()
            return batch
        return _Batch(tokens)

    def _begin(self) -> None:
        for batch in list(self._announced)[: self._ahead]:
            if batch.reading is None:
                batch.reading = self._threads.submit(self._read, batch)

    def _read(self, batch: _Batch) -> TargetPass:
        passes = [self._cache.read(self._places[sample], self._target.dtype)[1] for sample in batch.samples]
        if not self._needs_log_normaliser:
            passes = [one._replace(log_normaliser=None) for one in passes]
        # Straight into page-locked memory where a GPU waits for it: copies from elsewhere are not asynchronous.
        whole = padded(passes, batch.length, torch.device("cpu"))
        if self._target.device.type != "cuda":
            return whole
        normaliser = None if whole.log_normaliser is None else whole.log_normaliser.pin_memory()
        return TargetPass(whole.features.pin_memory(), whole.last_hidden.pin_memory(), normaliser)
