"""Conversations that are answered in order, and which of their messages are given and which generated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_templates import recorded_tokenizer

from deepspec.config import TargetConfig
from deepspec.data.chat_template import ChatTemplate, generated_message
from deepspec.data.dialogues import Answer, AnswerSettings, Dialogue, given_messages, provenance, record_answers
from deepspec.data.journal import open_journal, read_journal
from deepspec.data.prompts import Conversation, Message
from deepspec.decoding.sampling import Sampling
from deepspec.errors import DataError

CALL = Message("assistant", "", None, {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]})
CONVERSATION = Conversation(
    "c",
    (
        Message("system", "s"),
        Message("user", "one"),
        CALL,
        Message("tool", "2", None, {"tool_call_id": "x"}),
        Message("tool", "3"),
        Message("assistant", "of another"),
        Message("user", "two"),
        Message("assistant", "of another"),
        Message("user", "three"),
    ),
    "maths",
)
SETTINGS = AnswerSettings(Sampling(), max_new_tokens=9, seed=4, batch_size=1)
CONFIG = TargetConfig(name_or_path="t", dtype="float32", attention="sdpa", enable_thinking=False, short_name="t")


def said(text: str, reason: str = "stop") -> Answer:
    return Answer(Message("assistant", text), reason, [1, 2], [3, 4], 2)


def test_a_call_whose_result_stands_in_the_prompt_is_kept_and_all_other_answers_are_replaced() -> None:
    assert [message.role for message in given_messages(CONVERSATION)] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "user",
    ]
    dialogue = Dialogue(CONVERSATION)
    histories = []
    goes_on = dialogue.advance()
    while goes_on:
        histories.append([message.content for message in dialogue.messages])
        goes_on = dialogue.add(said(f"mine {len(histories)}"))
    assert histories == [
        ["s", "one", "", "2", "3"],
        ["s", "one", "", "2", "3", "mine 1", "two"],
        ["s", "one", "", "2", "3", "mine 1", "two", "mine 2", "three"],
    ]
    row = dialogue.row({"seed": 4})
    assert row["answer_turns"] == [5, 7, 9]
    assert row["messages"][2] == {"role": "assistant", "content": "", "tool_calls": CALL.tool_fields["tool_calls"]}  # type: ignore[index]
    assert row["messages"][3]["tool_call_id"] == "x"


@pytest.mark.parametrize("reason", ["length", "tool_calls"])
def test_nothing_follows_an_answer_that_was_cut_or_that_calls_a_tool(reason: str) -> None:
    dialogue = Dialogue(CONVERSATION)
    dialogue.advance()
    assert not dialogue.add(said("mine", reason))
    assert dialogue.row({})["messages"][-1]["content"] == "mine"


def test_a_conversation_that_is_taken_back_ends_with_its_last_answer() -> None:
    dialogue = Dialogue(CONVERSATION)
    dialogue.advance()
    assert dialogue.add(said("mine"))
    dialogue.retract()
    assert [message.content for message in dialogue.messages] == ["s", "one", "", "2", "3", "mine"]
    assert dialogue.is_over


def test_ids_are_written_only_where_every_turn_has_them() -> None:
    dialogue = Dialogue(CONVERSATION)
    dialogue.advance()
    dialogue.add(said("mine"))
    dialogue.add(Answer(Message("assistant", "two"), "length", None, None, 7))
    row = dialogue.row({})
    assert "answer_ids" not in row
    assert row["num_tokens"] == [2, 7]


def answer_all(dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
    for dialogue in dialogues:
        goes_on = dialogue.advance()
        while goes_on:
            goes_on = dialogue.add(said("x"))
        yield dialogue


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"revision": "main"}, "revision None, but this run asks for 'main'"),
        ({"enable_thinking": True}, "enable_thinking False, but this run asks for True"),
        ({"system_prompt": "Be kind."}, "system_prompt None"),
    ],
)
def test_answers_of_another_revision_or_prompt_are_not_mixed(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "answers.jsonl"
    made = [
        provenance(config, "template", SETTINGS, source="in_process", dtype="float32")
        for config in (CONFIG, CONFIG.model_copy(update=change))
    ]
    assert record_answers([CONVERSATION], made[0], answer_all, path) == 1
    before = path.read_bytes()
    with pytest.raises(DataError, match=words):
        record_answers([CONVERSATION], made[1], answer_all, path)
    row = json.loads(before)
    for damage in ({"answer_turns": 3}, {"answer_turns": ["x"]}, {"messages": None}, {"messages": ["x"]}):
        path.write_text(json.dumps(row | damage) + "\n")
        with pytest.raises(DataError, match="row with the id 'c' has no list of messages"):
            record_answers([CONVERSATION], made[0], answer_all, path)
    path.write_bytes(before)
    with pytest.raises(DataError, match="dtype 'float32', but this run asks for 'bfloat16'"):
        record_answers([CONVERSATION], made[0] | {"dtype": "bfloat16"}, answer_all, path)
    assert path.read_bytes() == before


def test_a_changed_tool_result_behind_an_id_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    record_answers([CONVERSATION], {}, answer_all, path)
    turns = list(CONVERSATION.turns)
    turns[3] = turns[3]._replace(content="22")
    with pytest.raises(DataError, match="line 1 answers another prompt with the id 'c'"):
        record_answers([CONVERSATION._replace(turns=tuple(turns))], {}, answer_all, path)
    turns = list(CONVERSATION.turns)
    turns[5] = turns[5]._replace(content="other words of another")
    assert record_answers([CONVERSATION._replace(turns=tuple(turns))], {}, answer_all, path) == 1


def test_a_journal_remembers_only_what_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": number, "long": "x" * 100}) + "\n" for number in range(3)))
    with open_journal(path, lambda row: row["id"]) as journal:
        assert journal.rows == [0, 1, 2]
        journal.append({"id": 3})
    assert [row["id"] for row in read_journal(path)] == [0, 1, 2, 3]


def test_generated_reasoning_is_told_apart_by_the_marks_of_the_template_alone() -> None:
    marks = ChatTemplate(recorded_tokenizer("qwen3"), True, None).reasoning_marks()
    assert generated_message("<think>\nhm\n</think>\n\nyes", marks) == Message("assistant", "yes", "hm")
    assert generated_message("no <think>\nhm\n</think>\n\nyes", marks).reasoning is None
    assert generated_message("<think>\ncut", marks) == Message("assistant", "<think>\ncut")
    assert generated_message("<think>\nhm\n</think>\n\nyes", None).reasoning is None
    channels = ChatTemplate(recorded_tokenizer("gpt_oss"), False, None).reasoning_marks()
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert generated_message(text, channels) == Message("assistant", "yes", "hm")
