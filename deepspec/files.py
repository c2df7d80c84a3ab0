"""Files that are whole or not there: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, parts: Iterable[str]) -> None:
    """Replace a file by the given texts, so that a reader or a crash sees the old content or the new, never a part.

    Args:
        path: the file; its folder is made where it does not exist.
        parts: texts, written one after the other.

    Raises:
        OSError: the disk refuses, or a device or a pipe has that name; what is there is untouched.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        # Renaming over /dev/null would take it away from the whole machine.
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(parts)
            file.flush()
            # mkstemp makes the file private; the result gets the permissions of any other new file.
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), 0o666 & ~umask)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value atomically; NaN is refused, since no other reader takes it."""
    write_atomically(path, [json.dumps(value, indent=2, allow_nan=False), "\n"])


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object a line, atomically."""
    write_atomically(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Put one file, or the entries of one folder, on disk: a rename survives a power cut only then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
