"""An append-only JSONL file that survives being killed: what stands in it is whole, what was half-written is dropped.

Used wherever work is done item by item (answers, evaluated prompts). It knows nothing of what a row means.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from deepspec.errors import DataError


class Journal:
    """An open journal; made by `open_journal`.

    Attributes:
        rows: the rows that earlier runs wrote, oldest first; or what was kept of them.
    """

    def __init__(self, path: Path, rows: list[Any], file: RawIOBase, whole: int) -> None:
        self.rows = rows
        self._path, self._file = path, file
        self._whole: int | None = whole

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; after a kill it is there as a whole or not at all.

        Raises:
            DataError: the disk refuses it.
        """
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        try:
            if self._whole is not None:
                # Not earlier: a run that is refused before its first row leaves the file as it found it.
                line = _mend(self._path, self._whole) + line
                self._whole = None
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise _full(self._path, error) from error

    def sync(self) -> None:
        """Have everything on the disk, where processes of other machines read it too.

        Raises:
            DataError: the disk refuses it.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _full(self._path, error) from error


def _whole_row(row: dict[str, Any]) -> Any:
    return row


@contextmanager
def open_journal(path: Path, keep: Callable[[dict[str, Any]], Any] = _whole_row) -> Iterator[Journal]:
    """Open a journal for appending, for this process alone.

    Args:
        path: the file.
        keep: what to remember of a row; files of millions of rows do not fit into memory.

    Raises:
        DataError: another process writes it, a line in the middle is damaged, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock", timeout=0)
        lock.acquire()
    except Timeout as error:
        raise DataError(f"{path} is being written by another process. Wait for it, or choose another path.") from error
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        try:
            rows, whole = _parse(path, keep) if path.exists() else ([], 0)
            # Without a buffer, closing has nothing left to write: a full disk is met in `append` and nowhere else.
            file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error
        with file:
            journal = Journal(path, rows, file, whole)
            yield journal
            journal.sync()
    finally:
        lock.release()


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be written ({error.strerror}). Choose a path that can be.")


def _full(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be written ({error.strerror}). Free some space and run the same command again; "
        "what stands in the file is kept."
    )


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Rows of a journal that nobody writes; an unfinished last line is left out."""
    return _parse(path, _whole_row)[0] if path.exists() else []


def _mend(path: Path, whole: int) -> bytes:
    """Cut an unfinished last line off; returns the newline that a whole last row lacks."""
    with path.open("r+b") as file:
        file.truncate(whole)
        if whole == 0:
            return b""
        file.seek(whole - 1)
        return b"" if file.read(1) == b"\n" else b"\n"


def _parse(path: Path, keep: Callable[[dict[str, Any]], Any]) -> tuple[list[Any], int]:
    rows: list[Any] = []
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                # Every row begins like this: anything else was not written here, and is not ours to cut off.
                if not line.endswith(b"\n") and line.startswith(b"{"):
                    break
                raise DataError(
                    f"{path} line {number} is damaged ({error}). Delete that line; its work is then done again."
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{path} line {number} is not an object. Delete that line.")
            rows.append(keep(row))
            size += len(line)
    return rows, size
