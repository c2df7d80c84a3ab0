"""A file of prompts: checked as a whole before anything is done with it, then read row by row, however large it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from deepspec.data.prompts import BLANK, Conversation, RowError, conversation_from_row, read_rows
from deepspec.errors import DataError


class Prompts(Protocol):
    """Conversations that can be gone through more than once; they need not be in memory."""

    def __len__(self) -> int:
        """How many there are."""

    def __iter__(self) -> Iterator[Conversation]:
        """One after the other, always in the same order."""


class FileState(NamedTuple):
    """What tells a file from what it is after somebody has written to it.

    Attributes:
        bytes: its size.
        written: when, in nanoseconds.
    """

    bytes: int
    written: int

    @classmethod
    def of(cls, path: Path) -> FileState | None:
        """State of a file, None where there is none."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_size, found.st_mtime_ns)


@contextmanager
def unchanged(path: str | Path) -> Iterator[None]:
    """Read a file in the body: what is read while somebody writes to it is neither the old file nor the new one.

    Raises:
        DataError: it is not what it was before; also in place of a broken row, which may only have been half written.
    """
    before = FileState.of(Path(path))
    problem: DataError | None = None
    try:
        yield
    except DataError as error:
        problem = error
    if FileState.of(Path(path)) != before:
        raise DataError(
            f"{path} was changed while it was being read. Run the same command again when nothing writes to it any "
            "more."
        ) from problem
    if problem is not None:
        raise problem


class PromptFile:
    """Every conversation of a .jsonl, .json (a list) or .parquet file.

    A row holds `conversations` or `messages` (role and content, or from and value), `turns` (the user's turns) or
    `prompt` (one user turn), and may hold `id` and `domain`. A row without `id` gets one made from its content.

    Each iteration reads the file anew; of the rows, only the numbers of those that are left out stay in memory. A file
    that somebody writes to meanwhile is noticed before its first conversation, after its last one and when asked.

    Attributes:
        skipped: how many rows are left out for each reason, blank lines included.
    """

    def __init__(self, path: str | Path, on_bad_row: Literal["stop", "skip"], limit: int | None = None) -> None:
        """Read the file once to see what it holds.

        Args:
            path: the file.
            on_bad_row: "stop" raises at broken rows, "skip" leaves them out and counts them.
            limit: give at most so many conversations, the first ones.

        Raises:
            DataError: the file is missing or of another kind, a row is broken, or nothing usable is left.
        """
        self.skipped: dict[str, int] = {}
        self._path = Path(path)
        self._left_out: set[int] = set()
        self._state = FileState.of(self._path)
        first_bad: tuple[int, str] | None = None
        number_of_id: dict[str, int] = {}
        bad = 0
        for row in read_rows(self._path):
            try:
                if row.problem is not None:
                    raise RowError(row.problem)
                identity = conversation_from_row(row.value).id
            except RowError as error:
                reason = detail = str(error)
            else:
                earlier = number_of_id.setdefault(identity, row.number)
                if earlier == row.number:
                    continue
                reason = "the id is used twice"
                detail = f"id {identity!r} is already used by {self._unit} {earlier}"
            self._left_out.add(row.number)
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            if reason != BLANK:
                bad += 1
                first_bad = first_bad or (row.number, detail)
        usable = len(number_of_id)
        if first_bad is not None and on_bad_row == "stop":
            number, detail = first_bad
            raise DataError(
                f"{path} {self._unit} {number}: {detail}. {bad:,} of {usable + bad:,} rows are broken; "
                "skip them with on_bad_row=skip."
            )
        if not usable:
            what = "it has no rows"
            if first_bad is not None:
                what = f"all {bad:,} rows are broken, the first at {self._unit} {first_bad[0]}: {first_bad[1]}"
            raise DataError(f"{path} holds no usable conversation: {what}. Give a file with at least one prompt.")
        self._count = usable if limit is None else min(usable, limit)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Conversation]:
        """Go through the conversations in the order of the file.

        Raises:
            DataError: the file was changed since it was checked.
        """
        self.check_unchanged()
        return self._conversations()

    def check_unchanged(self) -> None:
        """Refuse a file that is no longer what it was when it was looked through.

        Raises:
            DataError: it was changed, grew or is gone.
        """
        if FileState.of(self._path) != self._state:
            raise self._changed()

    def _conversations(self) -> Iterator[Conversation]:
        usable = (row for row in read_rows(self._path) if row.number not in self._left_out)
        # No more than were looked through: a row that was added since may be broken or repeat an id.
        for row in itertools.islice(usable, self._count):
            try:
                yield conversation_from_row(row.value)
            except RowError as error:
                raise self._changed() from error
        self.check_unchanged()

    def _changed(self) -> DataError:
        return DataError(
            f"{self._path} was changed while this job was reading it. Run the same command again; nothing that was "
            "written is lost."
        )

    @property
    def _unit(self) -> str:
        return "line" if self._path.suffix == ".jsonl" else "row"
