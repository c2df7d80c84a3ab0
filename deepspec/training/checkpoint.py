"""Checkpoints on disk: a folder `step_<N>` is either whole or not there; knows files, and nothing of how to train.

A checkpoint is written into a hidden sibling folder, hashed into manifest.json, flushed and renamed, so that a kill
at any moment, or a disk that fills up, leaves the checkpoints before it as they were. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepspec import console
from deepspec.errors import CheckpointError
from deepspec.files import sync, write_json

LATEST = "step_latest"
MANIFEST = "manifest.json"
STATE_TENSORS = "training_state.safetensors"
STATE_JSON = "training_state.json"
_STEP = re.compile(r"step_(\d+)")
_TEMPORARY = ".tmp_"
# A killed run needs a moment to let go of its folder; longer than this means that another run is alive.
_LOCK_SECONDS = 10.0


class Progress(NamedTuple):
    """How far a run is: optimizer steps taken and samples consumed over all processes."""

    step: int
    samples: int


class TrainingState(NamedTuple):
    """What training_state.json holds beside the tensors.

    Attributes:
        progress: where the run stands.
        steps_per_epoch: optimizer steps of one pass over the data.
        data: fingerprint of the training data.
        config: the run's configuration as plain values.
    """

    progress: Progress
    steps_per_epoch: int
    data: str
    config: dict[str, Any]


@contextlib.contextmanager
def lock_run_folder(folder: Path, wait_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold the run folder for this process alone; the system lets go of it when the process ends, however it ends.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written to.
    """
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise CheckpointError(
            f"another run is training in {folder} (its lock {folder / '.lock'} is held). "
            "Wait for it to end, or choose another exp_name."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot write into the run folder {folder}: {error}. Choose another output_dir."
        ) from error
    try:
        yield
    finally:
        lock.release()


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep_last: int) -> Path:
    """Write `step_<step>` into the run folder all at once, point step_latest at it and drop the oldest ones.

    Args:
        folder: the run folder.
        step: optimizer steps taken.
        write: puts the files into the empty folder that it is given.
        keep_last: how many checkpoints stay.

    Raises:
        CheckpointError: the files could not be written; the checkpoints before are untouched.
    """
    final = folder / f"step_{step}"
    temporary = folder / f"{_TEMPORARY}step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        _write_manifest(temporary, step)
        _flush_tree(temporary)
        if final.exists():  # only a damaged one can be in the way: a run starts from the latest valid one
            _remove_folder(final)
        temporary.rename(final)
        sync(folder)
        point_latest(folder, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        steps = [path.name for path in list_checkpoints(folder)]
        kept = f"The last checkpoint on disk is {folder / steps[-1]}" if steps else "There is no earlier checkpoint"
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}. {kept}; {_free_space(folder)}. "
            "Make room or choose another output_dir, then start the same command again."
        ) from error
    _rotate(folder, step, keep_last)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """List the step folders of a run, oldest first, whether valid or not."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_valid(folder: Path) -> Path | None:
    """Find the newest checkpoint whose files all match their manifest; each damaged one is named in a warning."""
    for path in reversed(list_checkpoints(folder)):
        damage = find_damage(path)
        if damage is None:
            return path
        console.error(f"warning: checkpoint {path} is damaged and is passed over: {damage}")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """Say what is wrong with a checkpoint's files, or None if they are as they were written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, entry in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if hash_file(path) != entry["sha256"]:
                return f"the content of {name} differs from what was written"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def point_latest(folder: Path, checkpoint: Path) -> None:
    """Make step_latest a link to the checkpoint, in one step."""
    temporary = folder / f"{_TEMPORARY}latest"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.name)
    os.replace(temporary, folder / LATEST)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed run left of an unfinished save."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def save_training_state(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Put the fp32 master weights, the optimizer's tensors and the progress beside the draft.

    The masters are kept here because the draft's own file may be rounded to what engines load.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    masters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {f"master/{name}": _stored(masters[name]) for name in names}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{names[index]}/{key}": _stored(value) for key, value in values.items()}
    save_file(tensors, checkpoint / STATE_TENSORS)
    write_json(
        checkpoint / STATE_JSON,
        {
            "step": state.progress.step,
            "samples": state.progress.samples,
            "steps_per_epoch": state.steps_per_epoch,
            "data": state.data,
            "config": state.config,
        },
    )


def read_training_state(checkpoint: Path) -> TrainingState:
    """Read training_state.json."""
    try:
        raw = json.loads((checkpoint / STATE_JSON).read_text(encoding="utf-8"))
        progress = Progress(raw["step"], raw["samples"])
        return TrainingState(progress, raw["steps_per_epoch"], raw["data"], raw["config"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE_JSON} cannot be read ({error!r}). There is no training state to resume from here; "
            "choose another exp_name to start afresh."
        ) from error


def load_training_state(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore master weights and optimizer state exactly.

    Raises:
        CheckpointError: the state belongs to a draft with other parameters.
    """
    tensors = load_file(checkpoint / STATE_TENSORS)
    masters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    stored = {key.removeprefix("master/"): value for key, value in tensors.items() if key.startswith("master/")}
    shapes = {name: tuple(parameter.shape) for name, parameter in masters.items()}
    stored_shapes = {name: tuple(value.shape) for name, value in stored.items()}
    if shapes != stored_shapes:
        odd = sorted(name for name in shapes.keys() | stored_shapes if shapes.get(name) != stored_shapes.get(name))
        raise CheckpointError(
            f"{checkpoint} was trained with other parameters, first {odd[0]}: stored {stored_shapes.get(odd[0])}, "
            f"now {shapes.get(odd[0])}. Restore the old configuration or choose another exp_name."
        )
    with torch.no_grad():
        for name, parameter in masters.items():
            parameter.copy_(stored[name])
    index = {name: number for number, name in enumerate(masters)}
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, name, slot = key.split("/")
            states.setdefault(index[name], {})[slot] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _stored(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host that shares no memory with another tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _write_manifest(folder: Path, step: int) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": hash_file(folder / name)} for name in names}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n", encoding="utf-8")


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _flush_tree(folder: Path) -> None:
    """Force every file and folder entry below a folder to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def _rotate(folder: Path, step: int, keep_last: int) -> None:
    """Drop all but the newest `keep_last` checkpoints up to `step`; later ones are damaged and stay to be looked at."""
    written = [path for path in list_checkpoints(folder) if int(path.name.removeprefix("step_")) <= step]
    for path in written[: -max(1, keep_last)]:
        _remove_folder(path)


def _remove_folder(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that no half-deleted one is ever seen."""
    doomed = path.with_name(f"{_TEMPORARY}removed_{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _free_space(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB are free there"
