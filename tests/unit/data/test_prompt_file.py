"""A file of prompts is looked through once and then read row by row; its rows are never held."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspec.data.dialogues import Answer, Dialogue, record_answers
from deepspec.data.prompt_file import PromptFile
from deepspec.data.prompts import Message
from deepspec.errors import DataError

ROWS = [
    {"id": "a", "prompt": "one"},
    {"prompt": ""},
    {"id": "b", "prompt": "two"},
    {"id": "a", "prompt": "x"},
    {"prompt": "3"},
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_iteration_gives_the_usable_rows_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = PromptFile(write(tmp_path / "p.jsonl", ROWS), "skip")
    texts = [conversation.turns[0].content for conversation in file]
    assert texts == ["one", "two", "3"]
    assert [conversation.turns[0].content for conversation in file] == texts
    assert len(file) == 3
    assert file.skipped == {"'prompt' is empty": 1, "the id is used twice": 1}


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (2, 2), (9, 3)])
def test_a_limit_takes_the_first_conversations(tmp_path: Path, limit: int, count: int) -> None:
    path = write(tmp_path / "p.jsonl", ROWS)
    file = PromptFile(path, "skip", limit)
    assert list(file) == list(PromptFile(path, "skip"))[:limit]
    assert len(file) == count


def test_a_file_that_changes_while_a_job_reads_it_is_refused(tmp_path: Path) -> None:
    # Longer than what is read ahead of a row.
    rows: list[dict[str, object]] = [{"id": key, "prompt": "x" * 30_000} for key in "abc"]
    path = write(tmp_path / "p.jsonl", rows)
    for other in ([*rows[:2], {"id": "c", "prompt": None}], [*rows, {"prompt": "one more"}]):
        write(path, rows)
        file = PromptFile(path, "skip")
        conversations = iter(file)
        next(conversations)
        write(path, other)
        with pytest.raises(
            DataError, match=r"p\.jsonl was changed while this job was reading it. Run the same command"
        ):
            list(conversations)
    with pytest.raises(DataError, match="was changed"):
        iter(file)
    path.unlink()
    with pytest.raises(DataError, match="was changed"):
        iter(file)


def test_a_change_is_noticed_behind_a_limit_and_with_an_old_date_too(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ROWS)
    file, date = PromptFile(path, "skip", limit=2), path.stat().st_mtime_ns
    conversations = iter(file)
    next(conversations)
    write(path, [*ROWS, {"prompt": "one more"}])
    os.utime(path, ns=(date, date))
    with pytest.raises(DataError, match="was changed"):
        list(conversations)
    with pytest.raises(DataError, match="was changed"):
        file.check_unchanged()


def test_rows_that_are_added_while_a_job_reads_are_not_given_out_unchecked(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ROWS)
    conversations = iter(PromptFile(path, "skip"))
    given = [next(conversations)]
    with path.open("a") as file:
        file.write(json.dumps({"id": "a", "prompt": "the id of the first row again"}) + "\n")
    with pytest.raises(DataError, match="was changed"):
        given.extend(conversations)
    assert [conversation.turns[0].content for conversation in given] == ["one", "two", "3"]


def played(dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
    """Answer every dialogue with one word."""
    for dialogue in dialogues:
        assert dialogue.advance()
        dialogue.add(Answer(Message("assistant", "yes"), "stop", [1], [2], 1))
        yield dialogue


def test_what_was_answered_before_a_change_was_noticed_stays_and_the_same_command_answers_the_rest(
    tmp_path: Path,
) -> None:
    path, output = write(tmp_path / "p.jsonl", ROWS), tmp_path / "answers.jsonl"
    rows = [*ROWS, {"id": "c", "prompt": "four"}]

    def answer(dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        for dialogue in played(dialogues):
            yield dialogue
            write(path, rows)

    with pytest.raises(DataError, match="nothing that was written is lost"):
        record_answers(PromptFile(path, "skip"), {}, answer, output)
    assert output.read_bytes().count(b"\n") == 3
    assert record_answers(PromptFile(path, "skip"), {}, played, output) == 4
    ids = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    assert len(set(ids)) == 4


def test_answering_a_large_file_holds_no_more_of_it_than_is_being_answered(tmp_path: Path) -> None:
    count, characters = 600, 20_000
    rows: list[dict[str, object]] = [
        {"id": str(index), "prompt": f"{index} " + "x" * characters} for index in range(count)
    ]
    path = write(tmp_path / "p.jsonl", rows)
    del rows

    output = tmp_path / "answers.jsonl"
    tracemalloc.start()
    try:
        # A rerun compares all prompts with the rows that are there, and adds the rest.
        for limit in (count // 2, None):
            record_answers(PromptFile(path, "stop", limit), {}, played, output)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.read_bytes().count(b"\n") == count
    # A line is there as bytes, as text and as a conversation, and again on its way out.
    assert peak < 30 * characters < count * characters / 10
