"""The rows of an answers file through several processes: in the order of the file, as one process would give them.

Processes are spawned, since the one that asks has threads and perhaps a GPU. In flight is a bounded number of rows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import NamedTuple

from deepspec import console
from deepspec.data.answer_rows import RowSamples, SampleMaker, needs_template
from deepspec.data.prompts import BLANK, Row, read_rows
from deepspec.errors import DataError, DeepSpecError

# Starting processes takes as long as some thousand rows; so many given as text are read before any is started.
ROWS_ALONE = 1000
# What goes to a process at once: enough to hide the way there, little enough that a few of them are no memory.
_PORTION_ROWS, _PORTION_BYTES = 32, 2**20

_GRACE_SECONDS = 2.0

Outcome = RowSamples | str


class _Portion(NamedTuple):
    """Rows that are in flight: their numbers in the file, and what will have become of them."""

    numbers: list[int]
    outcomes: Future[list[Outcome]]


def row_outcomes(maker: SampleMaker, workers: int, rows_alone: int = ROWS_ALONE) -> Iterator[tuple[int, Outcome]]:
    """Yield the number of each row that is not blank with its samples, or with why it is broken.

    Args:
        maker: makes them.
        workers: processes, 1 for this one alone.
        rows_alone: rows without ids that this process reads before it starts others.

    Raises:
        DataError: the file is not readable as a whole, all of it is another target's, or a process died.
    """
    rows = (row for row in read_rows(maker.path) if row.problem != BLANK)
    if workers > 1:
        texts = 0
        while texts < rows_alone:
            row = next(rows, None)
            if row is None:
                return
            texts += needs_template(row)
            yield row.number, maker.outcome(row)
        pool = _started_pool(maker, workers)
        if pool is not None:
            try:
                yield from _by_processes(maker, rows, pool, 2 * workers + 2)
            finally:
                # What was read ahead is of no use once the reader has stopped.
                pool.shutdown(cancel_futures=True)
    for row in rows:
        yield row.number, maker.outcome(row)


def _by_processes(
    maker: SampleMaker, rows: Iterator[Row], pool: ProcessPoolExecutor, most: int
) -> Iterator[tuple[int, Outcome]]:
    pending: deque[_Portion] = deque()
    try:
        for numbers, blobs in _portions(rows):
            if isinstance(blobs, Row):
                done: Future[list[Outcome]] = Future()
                done.set_result([maker.outcome(blobs)])
                pending.append(_Portion(numbers, done))
            else:
                pending.append(_Portion(numbers, pool.submit(_outcomes, blobs)))
            if len(pending) == most:
                yield from _finished(pending)
        while pending:
            yield from _finished(pending)
    except BrokenProcessPool as error:
        first, last = (pending[0].numbers[0], pending[-1].numbers[-1]) if pending else (0, 0)
        unit = "line" if maker.path.suffix == ".jsonl" else "row"
        raise DataError(
            f"{maker.path} {unit} {first} to {last}: a process that tokenised one of these rows was killed or crashed "
            f"({error}). If memory was short, run with fewer processes (data.workers=2) or with this one alone "
            "(data.workers=1); rows that make a tokenizer crash must be taken out."
        ) from error


def _finished(pending: deque[_Portion]) -> Iterator[tuple[int, Outcome]]:
    outcomes = pending[0].outcomes.result()  # while it may still fail, the portion says which rows these are
    yield from zip(pending.popleft().numbers, outcomes, strict=True)


def _portions(rows: Iterator[Row]) -> Iterator[tuple[list[int], list[bytes] | Row]]:
    """Runs of rows, pickled; or a single row that cannot be, since it is nested too deeply or of an odd type."""
    numbers: list[int] = []
    blobs: list[bytes] = []
    size = 0
    for row in rows:
        blob: bytes | None = None
        with contextlib.suppress(RecursionError, pickle.PicklingError, TypeError, AttributeError):
            blob = pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
        if blob is not None:
            numbers.append(row.number)
            blobs.append(blob)
            size += len(blob)
        if blobs and (blob is None or len(blobs) == _PORTION_ROWS or size >= _PORTION_BYTES):
            yield numbers, blobs
            numbers, blobs, size = [], [], 0
        if blob is None:
            yield [row.number], row
    if blobs:
        yield numbers, blobs


def _started_pool(maker: SampleMaker, workers: int) -> ProcessPoolExecutor | None:
    """Processes that are known to work; None where this process has to do without, which is said."""
    pool: ProcessPoolExecutor | None = None
    try:
        blob = pickle.dumps(maker, protocol=pickle.HIGHEST_PROTOCOL)
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(blob,))
        # All at once: each would otherwise be started by the rows that find no other idle.
        list(pool.map(_outcomes, [[]] * workers))
    except DeepSpecError:  # a signal has asked for an end
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        raise
    # No semaphores, no memory, a tokenizer of one's own, a script that starts a run when it is imported: many types.
    except Exception as error:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        console.info(f"{maker.path} is tokenised by one process; others cannot be started here ({reason})")
        return None
    return pool


# What follows runs in the processes. ----------------------------------------------------------------------------------

_given: list[bytes] = []
_makers: list[SampleMaker] = []


def _begin(blob: bytes) -> None:
    """Take the maker; it is unpacked with the first rows, where an error reaches the one who asks."""
    _given.append(blob)
    # Whoever asks for the rows is told to stop as well, and ends its processes by itself: with SIGTERM if one has died.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _timer().start())
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)  # a parent that was killed leaves nobody who would ask for more

    threading.Thread(target=end_with_parent, daemon=True).start()


def _timer() -> threading.Timer:
    """Ends the process a little later: a scheduler signals a whole group, and whoever asks must notice that first."""
    timer = threading.Timer(_GRACE_SECONDS, os._exit, (1,))
    timer.daemon = True
    return timer


def _outcomes(blobs: list[bytes]) -> list[Outcome]:
    if not _makers:
        _makers.append(pickle.loads(_given[0]))
    return [_makers[0].outcome(pickle.loads(blob)) for blob in blobs]
