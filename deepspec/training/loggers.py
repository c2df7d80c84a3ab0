"""Where the numbers of a run go: metrics.jsonl, a progress bar, TensorBoard, Weights & Biases.

Only the main process makes one. None of them is worth a run: whatever goes wrong is said once, and training goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from deepspec import console
from deepspec.config import TrainConfig
from deepspec.files import write_atomically
from deepspec.training.trackers import TensorBoardTracker, Tracker, WandbTracker, acceptance_by_slot

METRICS = "metrics.jsonl"
Line = dict[str, float | int]
# A tracker that does not end by itself is left alone after this; wandb's own limit is shorter.
_CLOSE_SECONDS = 180.0


class RunLog:
    """Takes one line of numbers per logging step and passes it on; used as a context manager.

    Args:
        folder: the run folder; trackers keep their files inside it.
        config: the run; its `logger` says what else is written.
        first_step: the step that the run continues from; lines of metrics.jsonl past it are dropped.
        total_steps: end of the progress bar.
    """

    def __init__(self, folder: Path, config: TrainConfig, *, first_step: int, total_steps: int) -> None:
        """Drop the lines that a resumed run will write again, and start the trackers."""
        self._metrics = _MetricsFile(folder / METRICS)
        self._last: Line = {}
        self._status = ""
        self._stack = contextlib.ExitStack()
        self._trackers: dict[str, Tracker] = {}
        drop_lines_after(folder / METRICS, first_step)
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
        for name, tracker in list(self._trackers.items()):
            self._close(name, tracker, is_finished=error is None)

    def advance(self) -> None:
        """Count one more step on the progress bar."""
        self._bar.advance(status=self._status)

    def write(self, line: Line) -> None:
        """Record one line, which must hold `step`."""
        self._last = line
        self._metrics.write(line)
        self._status = describe(line)
        self._bar.advance(0, status=self._status)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(int(line["step"]), line)
            except Exception as failure:
                self._give_up(name, failure)

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self._trackers[name] = make()
        except Exception as failure:
            self._give_up(name, failure)

    def _give_up(self, name: str, failure: Exception) -> None:
        # It is not closed: after a failure that fails as well, or waits.
        self._trackers.pop(name, None)
        console.error(f"warning: {name} is switched off for the rest of this run: {failure!r}")

    def _close(self, name: str, tracker: Tracker, *, is_finished: bool) -> None:
        """End a tracker, in a thread that may be left behind where a file system or a server never answers."""
        failures: list[Exception] = []

        def close() -> None:
            try:
                tracker.close(self._last, is_finished=is_finished)
            except Exception as failure:
                failures.append(failure)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            failures.append(TimeoutError(f"did not end within {_CLOSE_SECONDS:.0f} s"))
        for failure in failures:
            console.error(f"warning: {name} could not be closed, its last numbers may be missing: {failure!r}")


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
