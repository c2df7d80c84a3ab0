"""Answers of earlier runs as they are read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspec.errors import DataError
from deepspec.evaluation.answers import Answer, answers_from_rows, to_row

ROW = to_row(Answer("a#0", [1, 2], [3], [], "stop", "maths"), "draft", "id", "")


def test_a_row_gives_the_answer_that_was_written() -> None:
    assert answers_from_rows([ROW], "draft", "id", "", Path("rounds.jsonl")) == {
        "a#0": Answer("a#0", [1, 2], [3], [], "stop", "maths")
    }


@pytest.mark.parametrize(
    "damage",
    [
        {"prompt_ids": None},
        {"prompt_ids": "12"},
        {"output_ids": [1.5]},
        {"output_ids": [True]},
        {"rounds": None},
        {"rounds": [3]},
        {"domain": 4},
        {"finish_reason": None},
        {"request_id": 7},
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(damage: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"rounds\.jsonl line 2 is damaged .* Delete that line"):
        answers_from_rows([ROW, ROW | damage], "draft", "id", "", Path("rounds.jsonl"))
