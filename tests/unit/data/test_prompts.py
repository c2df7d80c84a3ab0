"""Reading prompts: every layout, every kind of broken row, and the atomic writer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import read_conversations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspec.data import prompts
from deepspec.data.prompts import Message
from deepspec.errors import DataError
from deepspec.files import write_jsonl

GOOD = {"prompt": "Hello there"}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_every_layout_gives_the_same_messages(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"id": str(number), key: value} for number, (key, value) in enumerate([
        ("conversations", talk), ("messages", talk), ("conversations", shared),
    ])]  # fmt: skip
    conversations, skipped = read_conversations(write_lines(tmp_path / "p.jsonl", *rows), "stop")
    assert [conversation.turns for conversation in conversations] == [
        (Message("user", "Hi"), Message("assistant", "Hello"))
    ] * 3
    assert skipped == {}


def test_turns_and_prompt_become_user_messages(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"turns": ["One", "Two"], "domain": "chat"}, {"prompt": "One"})
    first, second = read_conversations(path, "stop")[0]
    assert first.turns == (Message("user", "One"), Message("user", "Two"))
    assert first.domain == "chat"
    assert second.turns == (Message("user", "One"),)
    assert second.domain == ""


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_is_kept_under_both_names(tmp_path: Path, key: str) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", key: "Hm"}]}
    (conversation,), _ = read_conversations(write_lines(tmp_path / "p.jsonl", row), "stop")
    assert conversation.turns[1] == Message("assistant", "Yes", "Hm")


def test_system_first_and_tool_after_assistant_are_in_order(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    row = {"messages": [{"role": role, "content": "x"} for role in roles]}
    (conversation,), _ = read_conversations(write_lines(tmp_path / "p.jsonl", row), "stop")
    assert [turn.role for turn in conversation.turns] == roles


def test_ids_are_kept_or_made_from_the_content_alone(tmp_path: Path) -> None:
    first = read_conversations(write_lines(tmp_path / "a.jsonl", GOOD, {"id": 7, "prompt": "b"}), "stop")[0]
    second = read_conversations(write_lines(tmp_path / "b.jsonl", {"prompt": "other"}, GOOD), "stop")[0]
    assert first[0].id == second[1].id
    assert first[1].id == "7"


def test_byte_order_mark_and_windows_line_ends_are_accepted_and_blank_lines_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b\xe2\x80\xa8c"}\r\n')
    conversations, skipped = read_conversations(path, "stop")
    assert [conversation.turns[0].content for conversation in conversations] == ["a", "b\u2028c"]
    assert skipped == {"blank line": 2}


MESSAGES_OUT_OF_ORDER = (
    ["assistant"],
    ["user", "user"],
    ["user", "system"],
    ["system"],
    ["system", "assistant"],
    ["user", "tool"],
    ["user", "assistant", "assistant"],
)
BAD_ROWS: list[tuple[object, str]] = [
    ({"messages": [{"role": "user", "content": None}]}, "'content' is null"),
    ({"messages": [{"role": "user"}]}, "no 'content'"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "'content' is a list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role is unknown"),
    ({"messages": [{"content": "x"}]}, "neither 'role' nor 'from'"),
    ({"messages": ["x"]}, "a message is a string"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": "x"}, "'messages' is a string"),
    ({"turns": [""]}, "'turns' is empty"),
    ({"turns": [3]}, "'turns' is a number"),
    ({"prompt": " \n"}, "'prompt' is empty"),
    ({"prompt": "x", "id": True}, "'id' is a boolean"),
    ({"prompt": "x", "id": ""}, "'id' is empty"),
    ({"prompt": "x", "domain": 1}, "'domain' is a number"),
    ({"prompt": "\ud800"}, "surrogate"),
    ({"text": "x"}, "none of"),
    ([1], "the row is a list"),
    ("null", "the row is null"),
    ('{"prompt": "x', "not a complete JSON"),
    ("[" * 100_000, "not a complete JSON"),
    *(({"messages": [{"role": role, "content": "x"} for role in roles]}, "") for roles in MESSAGES_OUT_OF_ORDER),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_broken_row_is_named_by_line_or_skipped_and_counted(tmp_path: Path, row: object, reason: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", GOOD, "", row, {"prompt": "Bye"})
    with pytest.raises(DataError, match=r"p\.jsonl line 3: .*1 of 3 rows are broken; skip.*on_bad_row=skip") as caught:
        read_conversations(path, "stop")
    assert reason in str(caught.value)
    conversations, skipped = read_conversations(path, "skip")
    assert len(conversations) == 2
    assert sum(skipped.values()) == 2
    assert skipped.pop("blank line") == 1
    assert reason in next(iter(skipped))


def test_a_line_that_is_not_utf8_is_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: the line is not UTF-8"):
        read_conversations(path, "stop")


def test_an_endless_line_is_skipped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 50)
    path = write_lines(tmp_path / "p.jsonl", GOOD, {"prompt": "x" * 500}, {"prompt": "Bye"})
    conversations, skipped = read_conversations(path, "skip")
    assert [conversation.turns[0].content for conversation in conversations] == ["Hello there", "Bye"]
    assert skipped == {"the line is longer than 50 bytes": 1}


def test_an_id_used_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"id": "a", "prompt": "1"}, {"prompt": "2"}, {"id": "a", "prompt": "3"})
    with pytest.raises(DataError, match="line 3: id 'a' is already used by line 1"):
        read_conversations(path, "stop")
    assert read_conversations(path, "skip")[1] == {"the id is used twice": 1}


@pytest.mark.parametrize("text", ["", "\n\n", '{"prompt": ""}\n'])
def test_a_file_without_any_usable_row_is_an_error_even_when_skipping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="no usable conversation"):
        read_conversations(path, "skip")


def test_missing_files_folders_and_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "p.csv").write_text("a,b")
    for name, message in (("none.jsonl", "does not exist"), ("folder.jsonl", "is a folder"), ("p.csv", "'.csv'")):
        with pytest.raises(DataError, match=message):
            read_conversations(tmp_path / name, "skip")


def test_json_lists_are_read_and_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([GOOD, {"prompt": None}]).encode())
    with pytest.raises(DataError, match="row 2: none of"):
        read_conversations(path, "stop")
    assert len(read_conversations(path, "skip")[0]) == 1
    path.write_text(json.dumps(GOOD))
    with pytest.raises(DataError, match="an object"):
        read_conversations(path, "skip")
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD))
    with pytest.raises(DataError, match=r"into a \.jsonl file"):
        read_conversations(path, "skip")


def test_parquet_files_are_read_and_damaged_ones_refused(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "p.parquet"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"id": "a", "messages": talk}, {"id": "b", "messages": None}]), path)
    with pytest.raises(DataError, match="row 2: none of"):
        read_conversations(path, "stop")
    (conversation,), _ = read_conversations(path, "skip")
    assert conversation.turns == (Message("user", "Hi"), Message("assistant", "Hello"))
    path.write_bytes(b"PAR1 damaged")
    with pytest.raises(DataError, match="not readable as parquet"):
        read_conversations(path, "skip")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "thinking"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ROWS = st.dictionaries(
    st.sampled_from(["id", "domain", "conversations", "messages", "turns", "prompt"]), JSON_VALUES, max_size=4
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(ROWS.map(json.dumps) | JSON_VALUES.map(json.dumps) | st.text(max_size=8), max_size=4))
def test_any_file_gives_conversations_or_a_data_error(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes("\n".join([*lines, json.dumps(GOOD)]).encode("utf-8", "surrogatepass"))
    conversations, skipped = read_conversations(path, "skip")
    assert len(conversations) + sum(skipped.values()) == path.read_bytes().count(b"\n") + 1
    for conversation in conversations:
        assert conversation.id
        assert all(turn.content.strip() for turn in conversation.turns)
    broken = sum(count for reason, count in skipped.items() if reason != "blank line")
    if broken:
        with pytest.raises(DataError, match=rf"{broken} of .*on_bad_row=skip"):
            read_conversations(path, "stop")


def test_writing_reads_back_the_same_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    rows: list[dict[str, object]] = [{"prompt": "caf\u00e9\u2028\n"}, {"prompt": "b"}]
    write_jsonl(path, rows)
    assert [row.value for row in prompts.read_rows(path)] == rows
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "out.jsonl", GOOD)
    with pytest.raises(TypeError):
        write_jsonl(path, [{"a": 1}, {"b": object()}])
    assert json.loads(path.read_text()) == GOOD
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_or_a_pipe_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="Not a regular file"):
        write_jsonl(pipe, [{"a": 1}])
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
