"""Samples kept on disk, so that answers are tokenised once and not at every start and by every process of a machine.

A file is one line of JSON, padded, and plain arrays after it, which all processes map into memory; it is whole or not
there, and carries a checksum over everything. Its name is a hash of all that its samples depend on. Whatever goes wrong
with such a file, the samples are made as if there were none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import xxhash
from filelock import FileLock, Timeout

from deepspec import __version__, console
from deepspec.data.answer_rows import SampleMaker
from deepspec.data.cache_writer import free_bytes, in_words
from deepspec.data.chat_template import ChatTemplate
from deepspec.data.packed import PackedSamples, SampleParts
from deepspec.data.prompts import Message
from deepspec.errors import DataError
from deepspec.files import hash_file, sync
from deepspec.targets.embedded import cache_root

# Smaller files are read in seconds.
KEPT_FROM_BYTES = 8 * 2**20
# Five bytes for a token, which is about four bytes of text, or seven of a file with ids; with room to spare.
_BYTES_PER_BYTE = 2
_DAYS_UNUSED = 30
_HEADER_BYTES = 1024
_CODE = ("answer_rows.py", "chat.py", "chat_template.py", "chat_text.py", "kept_samples.py", "packed.py", "prompts.py")
_PROBE = Message("user", "x")


class SampleCounts(NamedTuple):
    """What became of an answers file.

    Attributes:
        rows: rows of the file, blank lines aside.
        bad_rows: rows left out because they are broken.
        samples: samples kept.
        truncated: samples, kept or not, that were longer than the limit.
        too_short: samples left out because too few supervised tokens remained.
        answer_tokens: supervised tokens in the samples kept.
    """

    rows: int
    bad_rows: int
    samples: int
    truncated: int
    too_short: int
    answer_tokens: int


Made = tuple[PackedSamples, SampleCounts]


def kept_or_made(maker: SampleMaker, make: Callable[[int], Made]) -> Made:
    """The samples of a file: those that an earlier start or another process of this machine kept, or new ones, kept.

    Args:
        maker: how rows become samples.
        make: makes them, given how many processes of this machine do so at the same time.

    Raises:
        DataError: `make` does.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = maker.path.stat().st_size if maker.path.is_file() else 0  # what is wrong with a path, `make` says
    if size < KEPT_FROM_BYTES or not maker.tokenizer.is_fast:
        return make(ranks)
    needed = _BYTES_PER_BYTE * size
    path = cache_root() / "samples" / f"{name_of(maker)}.samples"
    found = load(path)
    if found is not None:
        return found
    lock = FileLock(f"{path}.lock", timeout=0)
    is_first = True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = free_bytes(path.parent)
        if free < needed:
            _say_not_kept(path, f"they may need {in_words(needed)}, but {in_words(free)} are free")
            return make(ranks)
        try:
            lock.acquire()
        except Timeout:
            is_first = False
            console.info(f"another process tokenises {maker.path}; its samples are waited for")
            lock.acquire(timeout=-1)
    except (OSError, NotImplementedError) as error:  # the second where a file system knows no locks
        _say_not_kept(path, str(error))
        return make(ranks)
    try:
        found = load(path)
        if found is None and is_first:
            made = make(1)
            return (load(path) or made) if _save(path, *made) else made
    finally:
        lock.release()
    # Whoever held the lock died or could not keep them: all who waited make their own at once, not one after another.
    return found or make(ranks)


def name_of(maker: SampleMaker) -> str:
    """Hash of everything that the samples of a file depend on, the date included where the template writes it."""
    tokenizer, data = maker.tokenizer, maker.data
    template = ChatTemplate(tokenizer, maker.enable_thinking, maker.system_prompt)
    try:
        probe = template.prompt([_PROBE]) + template.text([_PROBE, Message("assistant", "x")])
    except DataError as error:
        probe = str(error)
    code = hashlib.sha256()
    for name in _CODE:
        code.update((Path(__file__).parent / name).read_bytes())
    parts = {
        "answers": hash_file(maker.path),
        "suffix": maker.path.suffix,
        "tokenizer": [type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str()],
        "special": {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
        "template": str(tokenizer.chat_template),
        "probe": probe,
        "options": [maker.enable_thinking, maker.system_prompt, maker.vocab_size, maker.target_name],
        "limits": [data.max_length, data.min_answer_tokens, data.last_turn_only, data.on_bad_row],
        "versions": [__version__, *map(metadata.version, ("transformers", "tokenizers", "jinja2"))],
        "code": code.hexdigest(),
        "order": sys.byteorder,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load(path: Path) -> Made | None:
    """What a file holds; None where there is none, or where it is damaged, which is said."""
    try:
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        head = json.loads(bytes(view[:_HEADER_BYTES]))
        if head.pop("sum") != _sum(head, view[_HEADER_BYTES:]):
            raise ValueError("it does not have the checksum that was noted when it was written")
        samples, tokens = head["counts"]["samples"], head["tokens"]
        sizes = (8 * (samples + 1), 4 * tokens, tokens)
        parts, begin = [], _HEADER_BYTES
        for size in sizes:
            parts.append(view[begin : begin + size])
            begin += size
        ends, ids, mask = parts
        made = (
            PackedSamples.from_parts(SampleParts(ends.cast("q"), ids.cast("i"), mask, json.loads(bytes(view[begin:])))),
            SampleCounts(**head["counts"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        console.info(f"{path} cannot be used and is made anew ({' '.join(str(error).split())[:200]})")
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it is in use: see _delete_unused
    return made


def _save(path: Path, samples: PackedSamples, counts: SampleCounts) -> bool:
    """Write a file as the only process that does; whether the disk took it."""
    ends, tokens, mask, names = samples.parts
    columns = [memoryview(ends).cast("B"), memoryview(tokens).cast("B"), mask, json.dumps(names).encode()]
    head = {"counts": counts._asdict(), "tokens": len(tokens)}
    head["sum"] = _sum(head, *columns)
    line = json.dumps(head).ljust(_HEADER_BYTES - 1) + "\n"
    assert len(line) == _HEADER_BYTES
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        _delete_unused(path.parent)
        with temporary.open("wb") as file:
            file.write(line.encode())
            for column in columns:
                file.write(column)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        _say_not_kept(path, str(error.strerror or error))
        return False
    return True


def _sum(head: dict[str, object], *columns: memoryview | bytearray | bytes) -> str:
    digest = xxhash.xxh3_128(json.dumps(head, sort_keys=True).encode())
    for column in columns:
        digest.update(column)
    return digest.hexdigest()


def _delete_unused(folder: Path) -> None:
    """Delete what no run has read for a month, and what killed writers left that long ago."""
    oldest = time.time() - _DAYS_UNUSED * 24 * 3600
    for path in (*folder.glob("*.samples"), *folder.glob(".*.tmp")):
        with contextlib.suppress(OSError):  # another process does the same, or the folder is not ours
            if path.stat().st_mtime < oldest:
                path.unlink()


def _say_not_kept(path: Path, reason: str) -> None:
    console.info(
        f"samples are not kept in {path.parent} ({reason}), and will be tokenised again at the next start; make room "
        "there, or name another folder in DEEPSPEC_CACHE"
    )
