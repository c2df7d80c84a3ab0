"""Where the numbers of a run go: metrics.jsonl, a progress bar, TensorBoard, Weights & Biases.

Only the main process makes one. None of them is worth a run: whatever goes wrong is said once, and training goes on.
Trackers have a thread of their own, since on a dead file system, or without an answer, they do not fail but wait.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspec import console
from deepspec.config import TrainConfig
from deepspec.files import write_atomically
from deepspec.training.trackers import TensorBoardTracker, Tracker, WandbTracker, acceptance_by_slot

METRICS = "metrics.jsonl"
Line = dict[str, float | int]
# A tracker that does not end by itself is left alone after this; wandb's own limit is shorter.
_CLOSE_SECONDS = 180.0
# A tracker so many lines behind is not slow but stuck.
_MOST_WAITING = 1000


class RunLog:
    """Takes one line of numbers per logging step and passes it on; used as a context manager.

    Args:
        folder: the run folder; trackers keep their files inside it.
        config: the run; its `logger` says what else is written.
        first_step: the step that the run continues from.
        total_steps: end of the progress bar.
    """

    def __init__(self, folder: Path, config: TrainConfig, *, first_step: int, total_steps: int) -> None:
        """Start the trackers."""
        self._metrics = _MetricsFile(folder / METRICS)
        self._status = ""
        self._stack = contextlib.ExitStack()
        self._guests: list[_Guest] = []
        if config.logger.tensorboard:
            self._start("TensorBoard", lambda: TensorBoardTracker(folder, config, first_step))
        if config.logger.wandb:
            self._start("Weights & Biases", lambda: WandbTracker(folder, config))
        self._bar = self._stack.enter_context(console.progress("train", total_steps, done=first_step))

    def __enter__(self) -> RunLog:
        """Use it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar and the trackers."""
        self._stack.close()
        self._metrics.close()
        for guest in self._guests:
            guest.close(is_finished=error is None)

    @property
    def status(self) -> str:
        """The last line in a few words."""
        return self._status

    def advance(self) -> None:
        """Count one more step on the progress bar."""
        self._bar.advance(status=self._status)

    def write(self, line: Line) -> None:
        """Record one line, which must hold `step`."""
        self._metrics.write(line)
        self._status = describe(line)
        self._bar.advance(0, status=self._status)
        for guest in self._guests:
            guest.write(line)

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self._guests.append(_Guest(name, make()))
        except Exception as failure:
            console.error(f"warning: {name} is switched off for the rest of this run: {failure!r}")


class _Guest:
    """A tracker and its thread; the run never waits for it but at the end, and then not for ever."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._is_off = False
        self._waiting: queue.Queue[Line | bool] = queue.Queue(_MOST_WAITING)  # lines, at last whether the run finished
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Hand over one line."""
        if not self._is_off:
            try:
                self._waiting.put_nowait(line)
            except queue.Full:
                self._give_up(f"{_MOST_WAITING} lines wait for it")

    def close(self, *, is_finished: bool) -> None:
        """Let it take what waits, and end it."""
        if self._is_off:
            return  # after a failure that fails as well, or waits
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(is_finished)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say_lost(f"did not end within {_CLOSE_SECONDS:.0f} s")

    def _serve(self) -> None:
        last: Line = {}
        while not isinstance(line := self._waiting.get(), bool):
            try:
                self._tracker.write(int(line["step"]), line)
            except Exception as failure:
                self._give_up(repr(failure))
                return
            last = line
        try:
            self._tracker.close(last, is_finished=line)
        except Exception as failure:
            self._say_lost(repr(failure))

    def _give_up(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            console.error(f"warning: {self._name} is switched off for the rest of this run: {reason}")

    def _say_lost(self, reason: str) -> None:
        console.error(f"warning: {self._name} could not be closed, its last numbers may be missing: {reason}")


class _MetricsFile:
    """metrics.jsonl; lines that the disk refuses are kept, and written once there is room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[str] = []
        self._has_warned = False

    def write(self, line: Line) -> None:
        """Append one line of JSON; numbers that JSON does not have become null."""
        finite = {key: value if math.isfinite(value) else None for key, value in line.items()}
        self._pending.append(json.dumps(finite) + "\n")
        try:
            self._append("".join(self._pending).encode())
        except OSError as failure:
            if not self._has_warned:
                console.error(
                    f"warning: {self._path} cannot be written: {failure}. Training goes on; make room, and the lines "
                    "that are missing follow."
                )
            self._has_warned = True
        else:
            self._pending.clear()

    def close(self) -> None:
        """Say what is lost."""
        if self._pending:
            console.error(f"warning: {len(self._pending)} lines are missing at the end of {self._path}")

    def _append(self, content: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                written = file.write(content)
                if written < len(content):  # what fitted; the next write says why
                    file.write(content[written:])
            except OSError:
                file.truncate(end)
                raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, none where there is no file."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                lines += [line] if isinstance(line, dict) and isinstance(line.get("step"), int) else []
    return lines


def drop_lines_after(path: Path, step: int) -> None:
    """Drop from a metrics file the lines past `step`, and a last line that a kill cut in two."""
    if not path.is_file():
        return
    content = path.read_text(encoding="utf-8", errors="replace")
    kept = []
    for text in content.splitlines():
        try:
            if json.loads(text)["step"] <= step:
                kept.append(text)
        except (ValueError, KeyError, TypeError):
            continue
    whole = "".join(f"{text}\n" for text in kept)
    if whole != content:
        write_atomically(path, [whole])


def describe(line: Line) -> str:
    """Say a line's loss, acceptance per slot, speed and rate in a few words."""
    slots = acceptance_by_slot(line)
    parts = {
        "loss": "loss {:.4f}",
        "eval/acceptance_length": "tau {:.2f}",
        "tokens_per_second": "{:,.0f} tok/s",
        "learning_rate": "lr {:.2e}",
    }
    words = [text.format(line[key]) for key, text in parts.items() if key in line]
    if slots:
        words.insert(1, "acceptance " + " ".join(f"{value:.2f}" for value in slots.values()))
    return "  ".join(words)
