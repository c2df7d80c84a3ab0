"""One run at a time in a folder: a lock of the operating system, and a sign of life where that does not reach.

The system lets go of its lock when the holder ends, however it ends, so a stale one is taken over at once. On some
network file systems it does not reach other machines; so the holder also writes who it is and a counter, and whoever
gets the lock on another machine first watches the counter. It knows nothing of what a run writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from deepspec import console
from deepspec.errors import CheckpointError

LOCK, OWNER = ".lock", ".lock_owner.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A killed run needs a moment to let go of its folder; longer than this means that another run is alive.
_WAIT_SECONDS = 10.0
_BEAT_SECONDS = 5.0


class Owner(NamedTuple):
    """Who holds a folder.

    Attributes:
        host: name of the machine.
        machine: its identity, since names repeat in containers.
        process: process id.
        beats: signs of life so far.
    """

    host: str
    machine: str
    process: int
    beats: int


@contextlib.contextmanager
def lock_run_folder(
    folder: Path, wait_seconds: float = _WAIT_SECONDS, beat_seconds: float = _BEAT_SECONDS
) -> Iterator[None]:
    """Hold the run folder for this process alone.

    Args:
        folder: made where it does not exist.
        wait_seconds: how long the holder may take to let go.
        beat_seconds: time between two signs of life; another machine's are watched for two and a half times as long.

    Raises:
        CheckpointError: another run holds the folder, or it cannot be written to.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise _held(folder, read_owner(folder)) from None
    except (OSError, NotImplementedError) as error:
        raise CheckpointError(
            f"cannot write into the run folder {folder}: {error}. Choose another output_dir."
        ) from error
    try:
        _refuse_another_machine(folder, beat_seconds)
        with _signs_of_life(folder, beat_seconds):
            yield
    finally:
        lock.release()


def read_owner(folder: Path) -> Owner | None:
    """Who holds a folder or held it last without letting go; None where nobody wrote it down."""
    try:
        return Owner(**json.loads((folder / OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def find_holder(folder: Path) -> str | None:
    """Say which process of this machine holds a folder now; None where none does, and nothing is changed."""
    if not (folder / LOCK).is_file():
        return None
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _named(read_owner(folder))
    except (OSError, NotImplementedError):
        return None
    lock.release()
    return None


def machine_id() -> str:
    """Something that two machines never share and that a restart changes."""
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


def _held(folder: Path, owner: Owner | None) -> CheckpointError:
    return CheckpointError(f"{_named(owner)} is training in {folder}. Wait for it to end, or choose another exp_name.")


def _named(owner: Owner | None) -> str:
    return "another run" if owner is None else f"another run (process {owner.process} on {owner.host})"


def _refuse_another_machine(folder: Path, beat_seconds: float) -> None:
    owner = read_owner(folder)
    if owner is None or owner.machine == machine_id():
        return
    console.info(f"process {owner.process} on {owner.host} held {folder}; looking whether it still runs")
    time.sleep(2.5 * beat_seconds)
    now = read_owner(folder)
    if now is not None and now != owner:
        raise _held(folder, now)


@contextlib.contextmanager
def _signs_of_life(folder: Path, beat_seconds: float) -> Iterator[None]:
    path, fresh, is_over = folder / OWNER, folder / f".tmp{OWNER}", threading.Event()
    owner = Owner(platform.node(), machine_id(), os.getpid(), 0)

    def write(beats: int) -> None:
        # A full disk stops saves with an error of their own; the lock itself holds without this file. Renamed into its
        # place, since whoever reads half of it would take the folder for free.
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(owner._replace(beats=beats)._asdict()), encoding="utf-8")
            fresh.replace(path)

    def beat() -> None:
        beats = 0
        while not is_over.wait(beat_seconds):
            beats += 1
            write(beats)

    write(0)
    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
