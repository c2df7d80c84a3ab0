"""Where the numbers of a run go: metrics.jsonl, a progress bar, TensorBoard, Weights & Biases.

Only the main process makes one. Trackers are guests: whatever goes wrong in one is said once and never ends a run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspec import console
from deepspec.errors import CheckpointError

METRICS = "metrics.jsonl"
Line = dict[str, float | int]
Tracker = Callable[[int, Mapping[str, float]], None]


class RunLog:
    """Takes one line of numbers per logging step and passes it on; used as a context manager.

    Args:
        folder: the run folder; trackers keep their files inside it.
        first_step: the step that the run continues from; lines of metrics.jsonl past it are dropped.
        total_steps: end of the progress bar.
        config: the run's configuration, shown by the trackers.
        tensorboard: also write TensorBoard events.
        wandb_project: also log to this Weights & Biases project; None for not at all.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int,
        total_steps: int,
        config: Mapping[str, Any],
        tensorboard: bool,
        wandb_project: str | None,
    ) -> None:
        """Drop the lines that a resumed run will write again, and start the trackers."""
        self._path = folder / METRICS
        self._status = ""
        self._stack = contextlib.ExitStack()
        self._trackers: dict[str, Tracker] = {}
        drop_lines_after(self._path, first_step)
        if tensorboard:
            self._start("TensorBoard", lambda: _tensorboard(folder, first_step, self._stack))
        if wandb_project is not None:
            self._start("Weights & Biases", lambda: _wandb(folder, wandb_project, config, self._stack))
        self._bar = self._stack.enter_context(console.progress("train", total_steps, done=first_step))

    def __enter__(self) -> RunLog:
        """Use it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar and the trackers."""
        try:
            self._stack.close()
        except Exception as failure:
            console.error(f"warning: a tracker could not be closed: {failure!r}")

    def advance(self) -> None:
        """Count one more step on the progress bar."""
        self._bar.advance(status=self._status)

    def write(self, line: Line) -> None:
        """Record one line, which must hold `step`.

        Raises:
            CheckpointError: metrics.jsonl cannot be written.
        """
        finite = {key: value if math.isfinite(value) else None for key, value in line.items()}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._path}: {error}. Make room there, then start the same command again."
            ) from error
        self._status = describe(line)
        self._bar.advance(0, status=self._status)
        step = int(line["step"])
        for name, tracker in list(self._trackers.items()):
            try:
                tracker(step, line)
            except Exception as failure:
                self._give_up(name, failure)

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self._trackers[name] = make()
        except Exception as failure:
            self._give_up(name, failure)

    def _give_up(self, name: str, failure: Exception) -> None:
        self._trackers.pop(name, None)
        console.error(f"warning: {name} is switched off for the rest of this run: {failure!r}")


def drop_lines_after(path: Path, step: int) -> None:
    """Drop from a metrics file the lines past `step`, and a last line that a kill cut in two."""
    if not path.is_file():
        return
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(text)["step"] <= step:
                kept.append(text)
        except (ValueError, KeyError, TypeError):
            continue
    temporary = path.with_name(f".tmp_{path.name}")
    temporary.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")
    os.replace(temporary, path)


def describe(line: Line) -> str:
    """Say a line's loss, acceptance per slot, speed and rate in a few words."""
    slots = sorted(
        (int(key.partition("@")[2]), value)
        for key, value in line.items()
        if key.startswith("acceptance") and "@" in key
    )
    parts = [f"loss {line['loss']:.4f}"]
    if slots:
        parts.append("acceptance " + " ".join(f"{value:.2f}" for _, value in slots))
    parts.append(f"{line['tokens_per_second']:,.0f} tok/s")
    parts.append(f"lr {line['learning_rate']:.2e}")
    return "  ".join(parts)


def _tensorboard(folder: Path, first_step: int, stack: contextlib.ExitStack) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
    stack.callback(writer.close)

    def write(step: int, line: Mapping[str, float]) -> None:
        for name, value in line.items():
            if name != "step":
                writer.add_scalar(name, value, step)

    return write


def _wandb(folder: Path, project: str, config: Mapping[str, Any], stack: contextlib.ExitStack) -> Tracker:
    import wandb  # optional, and slow to import

    # The id lives in the run folder, so that a resumed run continues the same curves.
    remembered = folder / "wandb_run_id"
    if not remembered.is_file():
        remembered.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    identity = remembered.read_text(encoding="utf-8").strip()
    run = wandb.init(
        project=project, name=folder.name, id=identity, resume="allow", dir=str(folder), config=dict(config)
    )
    stack.callback(run.finish)

    def write(step: int, line: Mapping[str, float]) -> None:
        run.log(dict(line), step=step)

    return write
