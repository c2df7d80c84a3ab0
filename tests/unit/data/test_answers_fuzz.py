"""Rows of answers files that hold anything: a named error or a counted skip, never a trace, never a wrong mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_targets import ascii_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.config import DataConfig
from deepspec.data.chat import samples_from_answers
from deepspec.data.dialogues import Dialogue
from deepspec.data.prompts import RowError, conversation_from_row
from deepspec.data.samples import read_token_samples
from deepspec.errors import DataError

TOKENIZER = ascii_tokenizer()
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["user", "assistant", "tool", "system", "stop", "length", "\ufeff", "\r\n", "\ud800", "<|im_end|>"]
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system", "narrator"]) | VALUES,
            "content": st.text(max_size=6) | VALUES,
            "reasoning_content": VALUES,
            "tool_calls": VALUES,
            "tool_call_id": VALUES,
        },
    ),
    max_size=5,
)
IDS = st.lists(st.lists(st.integers(-2, 110) | VALUES, max_size=4) | VALUES, max_size=3) | VALUES
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["a", "b", 3, ""]) | VALUES,
        "messages": MESSAGES | VALUES,
        "prompt_ids": IDS,
        "answer_ids": IDS,
        "finish_reason": st.lists(st.sampled_from(["stop", "length", "tool_calls"]) | VALUES, max_size=3) | VALUES,
        "answer_turns": st.lists(st.integers(-1, 5) | VALUES, max_size=3) | VALUES,
        "tools": VALUES,
        "domain": VALUES,
        "target": VALUES,
    },
)


@given(row=ROWS, thinking=st.booleans(), last_turn_only=st.booleans())
@settings(max_examples=400, deadline=None)
def test_a_row_of_anything_is_a_named_error_or_samples_that_are_supervised_in_part(
    row: dict[str, Any], thinking: bool, last_turn_only: bool
) -> None:
    try:
        samples = samples_from_answers(
            row, TOKENIZER, enable_thinking=thinking, system_prompt=None, last_turn_only=last_turn_only
        )
    except DataError as error:
        assert str(error)  # noqa: PT017
        return
    for sample in samples:
        assert len(sample.input_ids) == len(sample.answer_mask)
        assert 0 < sum(sample.answer_mask) < len(sample.input_ids)
        assert all(type(token) is int and token >= 0 for token in sample.input_ids)


@given(row=ROWS)
@settings(max_examples=200, deadline=None)
def test_a_prompt_of_anything_is_refused_or_can_be_answered(row: dict[str, Any]) -> None:
    try:
        conversation = conversation_from_row(row)
    except RowError:
        return
    dialogue = Dialogue(conversation)
    assert dialogue.advance()
    assert dialogue.messages[-1].role in ("user", "tool")


GOOD = {"id": "good", "prompt_ids": [[5, 6]], "answer_ids": [[7, 8, 3]], "finish_reason": ["stop"]}


@given(content=st.lists(ROWS.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=20), max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_file_of_anything_names_its_first_bad_line_or_counts_what_it_leaves_out(
    content: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.mktemp("rows") / "answers.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *content]) + b"\n")

    def read(on_bad_row: Any) -> Any:
        data = DataConfig(
            answers=str(path),
            max_length=64,
            num_anchors=1,
            min_answer_tokens=1,
            bucket_steps=1,
            on_bad_row=on_bad_row,
            allow_other_target=False,
        )
        return read_token_samples(path, TOKENIZER, data, enable_thinking=False, system_prompt=None, vocab_size=101)

    samples, counts = read("skip")
    assert "good" in {sample.id for sample in samples}
    assert all(max(sample.input_ids) < 101 for sample in samples)
    if counts.bad_rows:
        with pytest.raises(DataError, match=rf"answers\.jsonl line \d+: .*{counts.bad_rows:,} of {counts.rows:,} rows"):
            read("stop")
    else:
        assert read("stop") == (samples, counts)


@pytest.mark.parametrize("turns", [1, 2, 100])
def test_conversations_of_many_turns_are_supervised_at_each_of_them(turns: int) -> None:
    talk = [{"role": role, "content": f"{role} {turn}"} for turn in range(turns) for role in ("user", "assistant")]
    (sample,) = samples_from_answers(
        {"id": "x", "messages": talk}, TOKENIZER, enable_thinking=False, system_prompt=None
    )
    supervised = [token for token, on in zip(sample.input_ids, sample.answer_mask, strict=True) if on]
    assert TOKENIZER.decode(supervised) == "".join(f"assistant {turn}<|im_end|>" for turn in range(turns))
    (last,) = samples_from_answers(
        {"id": "x", "messages": talk}, TOKENIZER, enable_thinking=False, system_prompt=None, last_turn_only=True
    )
    assert last.input_ids == sample.input_ids
    assert TOKENIZER.decode(last.input_ids[last.answer_mask.index(True) :]) == f"assistant {turns - 1}<|im_end|>"
