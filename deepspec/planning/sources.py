"""Sources of features for a dry run: the real ones around a target without data, and in place of a cache its sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspec.config import TrainConfig
from deepspec.data.ahead import AheadFeatures
from deepspec.data.chat import TokenSample
from deepspec.data.features import FeatureMemory, FeatureSource, OnlineFeatures, TargetPass, log_normaliser, padded
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch

# A memory that is on and holds nothing: what it keeps lies in the host's memory, of which the plan speaks apart.
_HOLDS_NOTHING_GIB = 2.0**-30


def holds_layers(config: TrainConfig) -> bool:
    """Whether a process of the run has all of the target, or embedding and head alone; as training/run.py."""
    return config.features.source == "online" or config.evaluation.every_steps is not None


def cache_lacks_normalisers(config: TrainConfig) -> bool:
    """Whether log normalisers that a draft needs have to be made from what a cache gives."""
    return config.features.format == "deepspec_v2"


def memory_gib(config: TrainConfig) -> float:
    """RAM of each process for target passes; features out of a cache are not kept."""
    return config.features.memory_gib if config.features.source == "online" else 0.0


def batches_read_ahead(config: TrainConfig) -> int:
    """The most batches out of a cache that wait for their turn in a process; 0 for a live target."""
    if config.features.source == "online":
        return 0
    optimizer = config.optimizer
    in_step = -(-optimizer.global_batch_size // (config.engine.num_processes * optimizer.micro_batch_size))
    # A source hears of a step while the one before it is taken.
    return min(config.features.prefetch_batches, 2 * in_step - 1)


def planned_source(
    config: TrainConfig, target: Target, upcoming: Sequence[TokenBatch], *, needs_log_normaliser: bool, overlaps: bool
) -> FeatureSource:
    """The run's source of features, which has heard of these batches where it runs ahead.

    Args:
        config: the run.
        target: without data.
        upcoming: batches that come, equal in size.
        needs_log_normaliser: whether the draft reads logsumexps.
        overlaps: whether a live target runs ahead.
    """
    if config.features.source == "cached":
        return _CacheWithoutData(config, target, needs_log_normaliser)
    remembers = memory_gib(config) > 0
    batch, length = upcoming[0].input_ids.shape
    online = OnlineFeatures(
        target,
        [TokenSample("", [0] * length, [])] * batch,
        FeatureMemory(_HOLDS_NOTHING_GIB if remembers else 0.0),
        needs_log_normaliser=needs_log_normaliser,
    )
    if not overlaps:
        return online
    ahead = AheadFeatures(online, target.device)
    ahead.upcoming(upcoming)
    return ahead


class _CacheWithoutData:
    """Gives batches as large as those of CachedFeatures, and on a CPU holds those that it would have read ahead."""

    def __init__(self, config: TrainConfig, target: Target, needs_log_normaliser: bool) -> None:
        self._target = target
        self._needs_log_normaliser = needs_log_normaliser
        self._makes_normalisers = cache_lacks_normalisers(config)
        # Beside a GPU they wait in the host's memory.
        self._ahead = batches_read_ahead(config) if config.engine.device == "cpu" else 0
        self._waiting: list[TargetPass] = []

    def upcoming(self, micro_batches: Sequence[TokenBatch]) -> None:
        """Nothing to hear: how many are read ahead is known."""

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        """See `FeatureSource`."""
        features, last_hidden, normaliser = self._read(tokens)
        self._waiting = [self._read(tokens) for _ in range(self._ahead)]
        if self._needs_log_normaliser and normaliser is None:
            normaliser = log_normaliser(self._target, tokens.answer_mask, last_hidden)
        return FeatureBatch(tokens, features, last_hidden, normaliser)

    def _read(self, tokens: TokenBatch) -> TargetPass:
        target, stores_normalisers = self._target, self._needs_log_normaliser and not self._makes_normalisers
        hidden = target.hidden_size
        passes = [
            TargetPass(
                torch.empty(length - 1, len(target.layer_ids) * hidden, dtype=target.dtype),
                torch.empty(length - 1, hidden, dtype=target.dtype),
                torch.empty(length - 1) if stores_normalisers else None,
            )
            for length in tokens.lengths.tolist()
        ]
        return padded(passes, tokens.input_ids.shape[1], torch.device("cpu"))
