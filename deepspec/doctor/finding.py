"""What a check of the doctor says, and how checks are run: none can take another or the doctor down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One line of the doctor.

    Attributes:
        level: `ok`; `note` where something is slower or less than it could be; `fail` where a run would not start.
        text: what is so.
        way_out: what to do about it, "" for nothing.
    """

    level: Literal["ok", "note", "fail"]
    text: str
    way_out: str = ""


Check = Callable[[], Iterable[Finding]]


def run_check(name: str, check: Check, seconds: float) -> Iterator[Finding]:
    """Run one check in a thread of its own; an error of its own, or silence, is a finding as well.

    Args:
        name: what is looked at, for the message.
        check: yields what it finds; findings before an error stand.
        seconds: how long it may take: a dead network drive never answers.
    """
    found: list[Finding] = []
    failures: list[Exception] = []

    def look() -> None:
        try:
            for finding in check():
                found.append(finding)
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    yield from list(found)
    if thread.is_alive():
        yield Finding("note", f"{name}: no answer within {seconds:g} s", "a dead network drive or device is a cause")
    for failure in failures:
        yield Finding("note", f"{name}: could not be looked at: {type(failure).__name__}: {one_line(failure)}")


def one_line(failure: Exception) -> str:
    """An error's message in one line that is not endless."""
    return " ".join(str(failure).split())[:400]
