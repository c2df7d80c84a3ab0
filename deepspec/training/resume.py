"""Whether and where a run goes on: which checkpoint, and whether it belongs to this configuration and these data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspec import console
from deepspec.config import TrainConfig
from deepspec.errors import CheckpointError, ConfigError, DataError
from deepspec.training import checkpoint as checkpoints

# Keys that decide neither what is learned nor from what, except for rounding, and those that only say how long.
_FREE_KEYS = (
    "exp_name",
    "output_dir",
    "logger.",
    "checkpoint.",
    "engine.name",
    "engine.num_processes",
    "engine.device",
    "data.answers",  # the content of the file is compared instead
    "features.memory_gib",
    "optimizer.steps",
    "optimizer.epochs",
    "optimizer.micro_batch_size",
    "data.max_tokens_per_batch",
    "data.max_anchors_per_batch",
    "engine.gradient_checkpointing",
    "engine.attention",
)
_MISSING = "(not set)"


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        checkpoint: the checkpoint to continue from, None for a fresh start.
        is_finished: nothing is left to do after this checkpoint.
        data: fingerprint of the training data.
    """

    checkpoint: Path | None
    is_finished: bool
    data: str


def find_start(config: TrainConfig, folder: Path) -> Start:
    """Choose the checkpoint to continue from and refuse one that another configuration or other data wrote.

    Raises:
        ConfigError: the configuration differs from the checkpoint's, with every difference.
        CheckpointError: the folder holds checkpoints, but the run may not, or cannot, continue from them.
        DataError: the answers file is missing.
    """
    answers = Path(config.data.answers)
    if not answers.is_file():
        raise DataError(f"data.answers: there is no file {answers}. Make it with `deepspec data answers`.")
    data = checkpoints.hash_file(answers)
    existing = checkpoints.list_checkpoints(folder)
    if not existing:
        return Start(None, False, data)
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{folder} already holds {existing[-1].name}, and checkpoint.resume is 'never'. "
            "Use checkpoint.resume=auto to continue, or another exp_name."
        )
    checkpoint = checkpoints.latest_valid(folder)
    if checkpoint is None:
        raise CheckpointError(
            f"none of the {len(existing)} checkpoints in {folder} is whole. Delete the folder to start afresh."
        )
    state = checkpoints.read_training_state(checkpoint)
    changes = list(config_changes(state.config, config.model_dump(mode="json")))
    if changes:
        raise ConfigError(
            f"the configuration differs from that of {checkpoint}:\n  " + "\n  ".join(changes) + "\n"
            "Restore these values to continue, or choose another exp_name."
        )
    if state.data != data:
        raise ConfigError(
            f"{checkpoint} was trained on other data: data.answers {config.data.answers} had hash {state.data[:12]} "
            f"and now has {data[:12]}. Restore the file to continue, or choose another exp_name."
        )
    every_change = config_changes(state.config, config.model_dump(mode="json"), free=())
    length = [change for change in every_change if change.startswith(("optimizer.steps", "optimizer.epochs"))]
    if length:
        console.info(f"{checkpoint} continues with another length, which moves the learning rate: {', '.join(length)}")
    is_finished = state.progress.step >= planned_steps(config, state.steps_per_epoch)
    return Start(checkpoint, is_finished, data)


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any], free: Sequence[str] = _FREE_KEYS) -> Iterator[str]:
    """Say every difference but those of the free keys as `key: old -> new`."""
    before, after = dict(_flatten(old)), dict(_flatten(new))
    for key in sorted(before.keys() | after.keys()):
        is_free = any(key == one or (one.endswith(".") and key.startswith(one)) for one in free)
        if not is_free and before.get(key, _MISSING) != after.get(key, _MISSING):
            yield f"{key}: {before.get(key, _MISSING)} -> {after.get(key, _MISSING)}"


def planned_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Number of optimizer steps of the whole run."""
    if config.optimizer.steps is not None:
        return config.optimizer.steps
    assert config.optimizer.epochs is not None
    return config.optimizer.epochs * steps_per_epoch


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
