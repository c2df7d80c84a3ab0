"""The one place that writes to the terminal: lines, tables, errors and progress bars.

It knows nothing about models and imports no torch, so that an error in a setting shows at once. Text from users is
never read as markup. Results, lines and progress go to stdout, errors to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as EtaColumn
from rich.table import Table
from rich.text import Text

LOG_WIDTH = 140  # columns where the output is a file or a pipe: rich would assume 80 and fold every table


class _Stream:
    """stdout or stderr as they are now; where they fail, once and for all nowhere.

    A closed pipe (`| head`) or a full disk below a log file must not end a week of training. The stream is replaced
    for the whole process, since Python would try to write the rest of it once more at the end, and fail.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        return self._tried(lambda stream: stream.write(text))

    def flush(self) -> None:
        self._tried(lambda stream: stream.flush() or 0)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    @property
    def _stream(self) -> TextIO:
        stream: TextIO = vars(sys)[self._name]
        return stream

    def _tried(self, action: Callable[[TextIO], int]) -> int:
        try:
            return action(self._stream)
        except OSError as failure:
            vars(sys)[self._name] = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
            if self._name == "stdout":
                error(f"warning: nothing more is written to stdout: {failure}")
            return 0


def _new_console(name: str) -> Console:
    stream = cast(IO[str], _Stream(name))
    console = Console(file=stream, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(file=stream, highlight=False, width=LOG_WIDTH)
    return console


_out = _new_console("stdout")
_err = _new_console("stderr")


def set_quiet(is_quiet: bool) -> None:
    """Silence lines, tables and progress of this process (for ranks other than 0); errors are always shown."""
    _out.quiet = is_quiet


def info(message: str) -> None:
    """Print one line."""
    _out.print(Text(message), soft_wrap=True)


def error(problem: Exception | str) -> None:
    """Print one line on stderr; an exception is preceded by the name of its type."""
    message = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
    _err.print(Text(message, style="bold red"), soft_wrap=True)


def table(content: Table) -> None:
    """Print a table followed by an empty line."""
    _out.print(content)
    _out.print()


def text(content: Text) -> None:
    """Print styled text, such as a sample whose supervised tokens are coloured."""
    _out.print(content, soft_wrap=True)


class ProgressBar:
    """One running bar; made by `progress`."""

    def __init__(
        self, bar: Progress, task: TaskID, description: str, total: int | None, done: int, line_seconds: float
    ) -> None:
        """Wrap a started rich bar."""
        self._bar = bar
        self._task = task
        self._description = description
        self._total = total
        self._done_before = done
        self._line_seconds = line_seconds
        self._started = self._last_line = time.monotonic()

    def advance(self, count: int = 1, status: str = "") -> None:
        """Count `count` more units as done and show `status` (the current loss, say) beside the bar."""
        # The task counts in either case: rich keeps the number when the bar itself is not drawn.
        self._bar.update(self._task, advance=count, status=status)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= self._line_seconds:
            self._last_line = now
            info(self._line(now - self._started, status))

    def _line(self, seconds: float, status: str) -> str:
        done = int(self._bar.tasks[0].completed)
        of_total = "" if self._total is None else f"/{self._total}"
        line = f"{self._description}: {done}{of_total}, {seconds:.0f} s"
        here = done - self._done_before
        if self._total is not None and here > 0:
            line += f", {max(0.0, seconds * (self._total - done) / here):.0f} s left"
        return f"{line}, {status}" if status else line


@contextmanager
def progress(description: str, total: int | None, done: int = 0, line_seconds: float = 30.0) -> Iterator[ProgressBar]:
    """Show a progress bar on a terminal, or one line every `line_seconds` where the output is a file or a pipe.

    Args:
        description: what is being done.
        total: number of units, None where unknown.
        done: units that an earlier, interrupted run already did.
        line_seconds: seconds between two lines when no bar can be drawn.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        EtaColumn(),
        TextColumn("{task.fields[status]}", markup=False),
    )
    with Progress(*columns, console=_out, disable=not _out.is_terminal) as bar:
        task = bar.add_task(description, total=total, completed=done, status="")
        yield ProgressBar(bar, task, description, total, done, line_seconds)
