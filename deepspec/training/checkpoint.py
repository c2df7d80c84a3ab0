"""Checkpoints on disk: a folder `step_<N>` is either whole or not there; knows files, and nothing of how to train.

A checkpoint is written into a hidden sibling folder, hashed into manifest.json, flushed and renamed, so that a kill
at any moment, or a disk that fills up, leaves the checkpoints before it as they were. Nothing is pickled. Which ones
stay is rotation.py's to say, and who may write lock.py's.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from deepspec import console
from deepspec.errors import CheckpointError
from deepspec.files import hash_file, sync, write_json
from deepspec.training.engines import MASTER, Engine
from deepspec.training.rotation import Keep, best_step, kept_steps

LATEST, BEST = "step_latest", "step_best"
MANIFEST = "manifest.json"
STATE_TENSORS = "training_state.safetensors"
STATE_JSON = "training_state.json"
_STEP = re.compile(r"step_(\d+)")
_TEMPORARY = ".tmp_"
# Texts, the manifest and what the file system needs for itself.
_ROOM_BESIDE_TENSORS = 2**20


class Progress(NamedTuple):
    """How far a run is: optimizer steps taken and samples consumed over all processes."""

    step: int
    samples: int


class TrainingState(NamedTuple):
    """What training_state.json holds beside the tensors.

    Attributes:
        progress: where the run stands.
        planned_steps: optimizer steps of the whole run; None in checkpoints that are older than this number.
        data: fingerprint of the training data.
        target: fingerprint of the target; None in older ones.
        config: the run's configuration as plain values.
        metrics: numbers recorded last, by name; rotation finds the best checkpoint by one of them.
        meters: (total, count) of everything measured since the last log line, by name.
    """

    progress: Progress
    planned_steps: int | None
    data: str
    target: str | None
    config: dict[str, Any]
    metrics: Mapping[str, float] = {}
    meters: Mapping[str, tuple[float, float]] = {}


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: Keep, needed_bytes: int = 0) -> Path:
    """Write `step_<step>` into the run folder all at once, point step_latest at it and drop those that need not stay.

    Args:
        folder: the run folder.
        step: optimizer steps taken.
        write: puts the files into the empty folder that it is given.
        keep: which checkpoints stay.
        needed_bytes: room that the files will take, looked for before anything is written.

    Raises:
        CheckpointError: the files could not be written; the checkpoints before are untouched.
    """
    final = folder / f"step_{step}"
    temporary = folder / f"{_TEMPORARY}step_{step}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        check_room(folder, needed_bytes)
        temporary.mkdir(parents=True)
        write(temporary)
        _write_manifest(temporary, step)
        _flush_tree(temporary)
        if final.exists():  # only a damaged one can be in the way: a run starts from the latest valid one
            _remove_folder(final)
        temporary.rename(final)
        sync(folder)
        point_latest(folder, final)
        _rotate(folder, step, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}. {_left_in(folder)}. "
            "Make room or choose another output_dir, then start the same command again."
        ) from error
    return final


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin a checkpoint that will not fit.

    Raises:
        CheckpointError: the disk has less room.
    """
    free = _free_bytes(folder)
    if free < needed_bytes:
        raise CheckpointError(
            f"a checkpoint takes {_size(needed_bytes)}, but the disk of {folder} has {_size(free)} free. "
            f"{_left_in(folder)}. Make room or choose another output_dir, then start the same command again."
        )


def bytes_needed(draft: nn.Module) -> int:
    """Room that a checkpoint of a draft takes: its weights, and fp32 masters with two moments of the trained ones."""
    weights: int = sum(tensor.numel() * tensor.element_size() for tensor in draft.state_dict().values())
    trained: int = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad)
    return weights + 3 * 4 * trained + _ROOM_BESIDE_TENSORS


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
    _point(folder, LATEST, checkpoint.name)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed run left of an unfinished save."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def save_training_state(checkpoint: Path, tensors: Mapping[str, Tensor], state: TrainingState) -> None:
    """Put the training state beside the draft: what the engine gathered (see Engine.gather), and the progress.

    The masters are kept here because the draft's own file may be rounded to what engines load.
    """
    save_file(dict(tensors), checkpoint / STATE_TENSORS)
    write_json(
        checkpoint / STATE_JSON,
        {
            "step": state.progress.step,
            "samples": state.progress.samples,
            "planned_steps": state.planned_steps,
            "data": state.data,
            "target": state.target,
            "config": state.config,
            "metrics": {name: value for name, value in state.metrics.items() if math.isfinite(value)},
            "meters": {name: [_number(value) for value in pair] for name, pair in state.meters.items()},
        },
    )


def read_training_state(checkpoint: Path) -> TrainingState:
    """Read training_state.json."""
    try:
        raw = json.loads((checkpoint / STATE_JSON).read_text(encoding="utf-8"))
        return TrainingState(
            Progress(raw["step"], raw["samples"]),
            raw.get("planned_steps"),
            raw["data"],
            raw.get("target"),
            raw["config"],
            raw.get("metrics", {}),
            {name: (_float(total), _float(count)) for name, (total, count) in raw.get("meters", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE_JSON} cannot be read ({error!r}). There is no training state to resume from here; "
            "choose another exp_name to start afresh, with checkpoint.warm_start to start from its weights."
        ) from error


def load_training_state(checkpoint: Path, engine: Engine) -> None:
    """Restore master weights and optimizer state exactly, whichever engine wrote them.

    Raises:
        CheckpointError: the state belongs to a draft with other parameters.
    """
    with safe_open(checkpoint / STATE_TENSORS, framework="pt") as stored:
        names = stored.keys()
        prefix = f"{MASTER}/"
        masters = {key: tuple(stored.get_slice(key).get_shape()) for key in names if key.startswith(prefix)}
        shapes = {f"{prefix}{name}": shape for name, shape in engine.shapes().items()}
        odd = sorted(key for key in shapes.keys() | masters if shapes.get(key) != masters.get(key))
        if odd:
            raise CheckpointError(
                f"{checkpoint} was trained with other parameters, first {odd[0].removeprefix(prefix)}: stored "
                f"{masters.get(odd[0])}, now {shapes.get(odd[0])}. Restore the old configuration or choose another "
                "exp_name."
            )
        engine.scatter(names, stored.get_tensor)


def _write_manifest(folder: Path, step: int) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": hash_file(folder / name)} for name in names}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n", encoding="utf-8")


def _flush_tree(folder: Path) -> None:
    """Force every file and folder entry below a folder to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def _rotate(folder: Path, step: int, keep: Keep) -> None:
    """Drop what need not stay of the checkpoints up to `step`; later ones are damaged and stay to be looked at."""
    written = {int(path.name.removeprefix("step_")): path for path in list_checkpoints(folder)}
    metrics = {number: _recorded(path) if keep.best else {} for number, path in written.items() if number <= step}
    best = best_step(metrics, keep)
    if best is None:
        (folder / BEST).unlink(missing_ok=True)  # of another rule: what it names would go and leave it dangling
    else:
        _point(folder, BEST, written[best].name)
    kept = kept_steps(metrics, keep)
    for number in metrics:
        if number not in kept:
            _remove_folder(written[number])


def _recorded(checkpoint: Path) -> Mapping[str, float]:
    """Metrics of a checkpoint; none where they cannot be read, so that it is never the best."""
    try:
        return read_training_state(checkpoint).metrics
    except CheckpointError:
        return {}


def _point(folder: Path, link: str, name: str) -> None:
    temporary = folder / f"{_TEMPORARY}{link}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, folder / link)
    sync(folder)


def _remove_folder(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that no half-deleted one is ever seen."""
    doomed = path.with_name(f"{_TEMPORARY}removed_{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _left_in(folder: Path) -> str:
    """What a save that failed leaves."""
    steps = [path.name for path in list_checkpoints(folder)]
    kept = f"The last checkpoint on disk is {folder / steps[-1]}" if steps else "There is no earlier checkpoint"
    return f"{kept}; {_size(_free_bytes(folder))} are free there"


def _free_bytes(folder: Path) -> int:
    """Room where a folder is, or will be made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


# JSON has no NaN.
def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _float(value: float | None) -> float:
    return math.nan if value is None else value
