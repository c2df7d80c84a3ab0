"""Jobs for processes that are killed at a chosen operation on files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_runs import make_config

from deepspec.training.checkpoint import latest_valid, remove_leftovers, save_checkpoint
from deepspec.training.rotation import Keep
from deepspec.training.run import train

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Operations:
    """Counts what this process changes in a folder, and kills it before the operation of a given number.

    Args:
        folder: only operations in it count, and the flushing of any file.
        kill_at: number of the operation, from 1; 0 for none.
        loses_unsynced: cut files that were not flushed in half, as a power failure may.
    """

    def __init__(self, folder: Path, kill_at: int, loses_unsynced: bool = False) -> None:
        self._folder = str(folder)
        self._kill_at = kill_at
        self._loses_unsynced = loses_unsynced
        self._synced: set[int] = set()
        self.count = 0
        self._sync: Callable[[int], None] = os.fsync
        os.fsync = self._count_sync  # the only one of these operations that Python does not announce
        sys.addaudithook(self._hook)

    def _count_sync(self, descriptor: int) -> None:
        self._next()
        self._sync(descriptor)
        self._synced.add(os.fstat(descriptor).st_ino)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CHANGES and not (event == "open" and arguments[2] & _WRITES):
            return
        # Deleting a tree names files relative to an open folder.
        if str(arguments[0]).startswith(self._folder) or not str(arguments[0]).startswith("/"):
            self._next()

    def _next(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            if self._loses_unsynced:
                self._cut()
            os.kill(os.getpid(), signal.SIGKILL)

    def _cut(self) -> None:
        self._kill_at = 0
        for path in Path(self._folder).rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_ino not in self._synced:
                os.truncate(path, path.stat().st_size // 2)


def save_next(folder: Path, kill_at: int = 0, loses_unsynced: bool = False) -> None:
    """What a run does when it starts again: clear up, and save step 20 where only step 10 is whole."""
    operations = Operations(folder, kill_at, loses_unsynced)
    if loses_unsynced:  # step 10 has been on disk for long
        operations._synced |= {path.stat().st_ino for path in (folder / "step_10").glob("*")}
    remove_leftovers(folder)
    latest = latest_valid(folder)
    assert latest is not None
    if latest.name == "step_10":
        save_checkpoint(folder, 20, write_content, Keep(1, best="tau"))


def write_content(folder: Path) -> None:
    """Files of two kinds, as in a checkpoint."""
    save_file({"weight": torch.arange(1000.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def train_small(place: Path, name: str, kill_at: int = 0) -> None:
    """A real run of one process; how many operations it took is left beside its folder."""
    config = make_config(place, name, "optimizer.steps=5", "checkpoint.every_steps=2", "checkpoint.keep_last=1")
    operations = Operations(config.run_dir, kill_at)
    train(config)
    (place / f"{name}.count").write_text(str(operations.count))
