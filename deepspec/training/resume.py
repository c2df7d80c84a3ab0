"""Whether and where a run goes on: which checkpoint, and whether it belongs to this configuration and these data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspec import console
from deepspec.config import TargetConfig, TrainConfig, default_train_values
from deepspec.errors import CheckpointError, ConfigError, DataError
from deepspec.files import hash_file
from deepspec.lookup import nearest
from deepspec.training import checkpoint as checkpoints
from deepspec.training.checkpoint import TrainingState

# Keys that decide neither what is learned nor from what, except for rounding, and those that only say how long.
_FREE_KEYS = (
    "exp_name",
    "output_dir",
    "logger.",
    "checkpoint.",
    "evaluation.",
    "engine.name",
    "engine.num_processes",
    "engine.device",
    "engine.timeout_seconds",
    "data.answers",  # the content of the file is compared instead
    "features.memory_gib",
    "features.overlap",
    "features.cache",  # what it holds is compared with the samples instead
    "features.encoding",
    "features.format",
    "features.shard_mib",
    "features.batch_size",
    "features.prefetch_batches",
    "features.limit",
    "optimizer.steps",
    "optimizer.epochs",
    "optimizer.micro_batch_size",
    "optimizer.on_nonfinite",
    "data.max_tokens_per_batch",
    "data.max_anchors_per_batch",
    "data.workers",
    "engine.gradient_checkpointing",
    "engine.attention",
)
_MISSING = "(not set)"


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        checkpoint: the checkpoint to continue from, None for a fresh start.
        is_finished: it is known without the data that nothing is left to do after this checkpoint; the trainer decides
            where it is not.
        data: fingerprint of the training data.
    """

    checkpoint: Path | None
    is_finished: bool
    data: str


class Change(NamedTuple):
    """One setting that differs from the checkpoint's."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def find_start(config: TrainConfig, folder: Path) -> Start:
    """Choose the checkpoint to continue from and refuse one that another configuration or other data wrote.

    Raises:
        ConfigError: the configuration differs from the checkpoint's, with every difference.
        CheckpointError: the folder holds checkpoints, but the run may not, or cannot, continue from them; or the
            checkpoint that was asked for cannot be used.
        DataError: the answers file is missing.
    """
    answers = Path(config.data.answers)
    if not answers.is_file():
        raise DataError(f"data.answers: there is no file {answers}. Make it with `deepspec data regenerate`.")
    data = hash_file(answers)
    checkpoint = _choose(config.checkpoint.resume, folder)
    if checkpoint is None:
        return Start(None, False, data)
    state = checkpoints.read_training_state(checkpoint)
    changes = [*config_changes(state.config, config.model_dump(mode="json"))]
    _check_allowed(config.checkpoint.allow_changes, state.config, config)
    refused = [change for change in changes if not _covers(config.checkpoint.allow_changes, change.key)]
    if refused:
        lines = "\n  ".join(str(change) for change in refused)
        keys = ",".join(change.key for change in refused)
        raise ConfigError(
            f"the configuration differs from that of {checkpoint}:\n  {lines}\n"
            "Restore these values to continue, choose another exp_name, or continue with the new ones with "
            f"'checkpoint.allow_changes=[{keys}]'."
        )
    if state.data != data:
        if not _covers(config.checkpoint.allow_changes, "data.answers"):
            raise ConfigError(
                f"{checkpoint} was trained on other data: data.answers {config.data.answers} had hash "
                f"{state.data[:12]} and now has {data[:12]}. Restore the file to continue, choose another exp_name, or "
                "continue with the new data with 'checkpoint.allow_changes=[data.answers]'."
            )
        changes.append(Change("content of data.answers", state.data[:12], data[:12]))
    if changes:
        console.info(f"{checkpoint} continues with changed settings: {'; '.join(map(str, changes))}")
    every_change = config_changes(state.config, config.model_dump(mode="json"), free=())
    length = [str(change) for change in every_change if change.key in ("optimizer.steps", "optimizer.epochs")]
    if length:
        console.info(f"{checkpoint} continues with another length, which moves the learning rate: {', '.join(length)}")
    planned = config.optimizer.steps
    if planned is None and not changes and not length:
        planned = state.planned_steps
    return Start(checkpoint, planned is not None and state.progress.step >= planned, data)


def check_target(checkpoint: Path, state: TrainingState, config: TrainConfig, target: str) -> None:
    """Refuse a target of the same name that is another model.

    Args:
        checkpoint: that is continued from.
        state: of it.
        config: the run.
        target: fingerprint of the target as it was loaded.

    Raises:
        ConfigError: with both fingerprints.
    """
    keys = ("target.name_or_path", "target.revision", "target.dtype")
    is_allowed = any(_covers(config.checkpoint.allow_changes, key) for key in keys)
    if state.target is None or state.target == target or is_allowed:
        return
    raise ConfigError(
        f"{checkpoint} was trained for another target: head and first layer of {config.target.name_or_path} "
        f"(revision {config.target.revision}) had hash {state.target[:12]} and now have {target[:12]}. Give "
        "target.revision the commit of before or restore the folder, choose another exp_name, or continue for this "
        "target with 'checkpoint.allow_changes=[target.revision]'."
    )


def check_order(checkpoint: Path, state: TrainingState, config: TrainConfig, left_in_epoch: int) -> None:
    """Refuse, in the middle of an epoch, another order of its samples: some would be repeated and others left out.

    Without buckets the order knows no batch size, and steps of another size go on with the next samples.

    Args:
        checkpoint: that is continued from.
        state: of it.
        config: the run.
        left_in_epoch: samples that the epoch still holds, 0 at its end.

    Raises:
        ConfigError: the samples were shared out by size over steps of another size or number.
    """
    before = dict(_flatten(state.config))
    now = {
        "optimizer.global_batch_size": config.optimizer.global_batch_size,
        "data.bucket_steps": config.data.bucket_steps,
    }
    changed = [str(Change(key, before[key], value)) for key, value in now.items() if before.get(key, value) != value]
    has_buckets = max(before.get("data.bucket_steps", 1), config.data.bucket_steps) > 1
    if changed and has_buckets and left_in_epoch:
        raise ConfigError(
            f"{checkpoint} lies in the middle of an epoch, {left_in_epoch:,} samples before its end, and with "
            f"data.bucket_steps the order of the samples depends on {'; '.join(changed)}. Restore the value, continue "
            "from a checkpoint at the end of an epoch (checkpoint.resume=<run>/step_<N> with another exp_name), or "
            "take only the weights (checkpoint.warm_start)."
        )


def config_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], free: Sequence[str] = _FREE_KEYS
) -> Iterator[Change]:
    """Find every difference but those of the free keys.

    A key that did not exist when `old` was written had its default then: it differs only where it has another now.
    """
    before, after = dict(_flatten(old)), dict(_flatten(new))
    differing = [key for key in before.keys() | after.keys() if before.get(key, _MISSING) != after.get(key, _MISSING)]
    differing = sorted(key for key in differing if not _covers(free, key))
    # Composing takes a moment, and hardly any checkpoint is older than its keys.
    is_older = any(key not in before for key in differing)
    defaults = _defaults(str(after.get("algorithm.name"))) if is_older else {}
    for key in differing:
        if key in before:
            yield Change(key, before[key], after.get(key, _MISSING))
        elif key not in defaults:
            yield Change(key, _MISSING, after[key])
        elif defaults[key] != after[key]:
            yield Change(key, f"{_MISSING}, by default {defaults[key]}", after[key])


def _choose(resume: str, folder: Path) -> Path | None:
    """The checkpoint to continue from, None for a fresh start."""
    existing = checkpoints.list_checkpoints(folder)
    if resume == "never" and existing:
        raise CheckpointError(
            f"{folder} already holds {existing[-1].name}, and checkpoint.resume is 'never'. "
            "Use checkpoint.resume=auto to continue, or another exp_name."
        )
    if resume not in ("auto", "never"):
        given = _given(Path(resume))
        if given.parent == folder.resolve():
            if given.name != existing[-1].name:
                raise CheckpointError(
                    f"checkpoint.resume is {given}, but {folder} already holds the later {existing[-1].name}. Delete "
                    "the later ones, choose another exp_name, or use checkpoint.resume=auto to continue from the last."
                )
            return folder / given.name
        if not existing:
            return given
        console.info(f"{folder} has checkpoints of its own; they are continued, and checkpoint.resume is past.")
    if not existing:
        return None
    checkpoint = checkpoints.latest_valid(folder)
    if checkpoint is None:
        raise CheckpointError(
            f"none of the {len(existing)} checkpoints in {folder} is whole. Delete the folder to start afresh."
        )
    return checkpoint


def _given(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the last whole one of a run."""
    path = path.resolve()
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint.resume is '{path.name}', but there is no folder {path}. Use auto, never, a checkpoint "
            "<run>/step_<N> or a run folder."
        )
    if checkpoints.list_checkpoints(path):
        checkpoint = checkpoints.latest_valid(path)
        if checkpoint is None:
            raise CheckpointError(f"none of the checkpoints in {path} is whole, so checkpoint.resume cannot use it.")
        return checkpoint
    damage = checkpoints.find_damage(path)
    if damage is not None:
        raise CheckpointError(
            f"checkpoint.resume: {path} is no whole checkpoint: {damage}. To start from its weights alone use "
            "checkpoint.warm_start."
        )
    return path


def _check_allowed(allowed: Sequence[str], old: Mapping[str, Any], config: TrainConfig) -> None:
    keys = dict(_flatten(old)).keys() | dict(_flatten(config.model_dump(mode="json")))
    for name in allowed:
        if not any(_covers([name], key) for key in keys):
            raise ConfigError(f"checkpoint.allow_changes: there is no key or section '{name}'.{nearest(name, keys)}")


def _covers(names: Sequence[str], key: str) -> bool:
    """Whether a key is among names of keys and sections; a section may end in a dot."""
    return any(key == name or key.startswith(f"{name.rstrip('.')}.") for name in names)


def _defaults(algorithm: str) -> dict[str, Any]:
    """Values of keys where nobody sets them; each target has its own, so theirs are the schema's."""
    composed = {key: value for key, value in _flatten(default_train_values(algorithm)) if not key.startswith("target.")}
    fields = TargetConfig.model_fields.items()
    return composed | {f"target.{name}": field.default for name, field in fields if not field.is_required()}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
