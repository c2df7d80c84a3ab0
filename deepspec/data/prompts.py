"""Rows of files, and the conversations in them, in the layouts that public data sets use.

A row that cannot be used says why. Knows nothing of tokens or templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspec.errors import DataError

# A longer line is never a conversation; reading it whole would only cost memory.
MAX_LINE_BYTES = 64 * 1024 * 1024
BLANK = "blank line"
SUFFIXES = (".jsonl", ".json", ".parquet")
# Where the conversation or the prompt of a row stands, the first that is given.
CONVERSATION_KEYS = ("conversations", "messages", "turns", "prompt")
# What ShareGPT's collections call the two who speak: whichever assistant it was, the target answers in its place.
_ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
_MAY_FOLLOW = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


class Message(NamedTuple):
    """One message of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        content: text; empty only beside tool calls.
        reasoning: the thinking text that came with an assistant's answer.
        tool_fields: `tool_calls` of an assistant, `tool_call_id` and `name` of a tool's message, as they were given.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_fields: Mapping[str, Any] | None = None

    def as_row(self) -> dict[str, Any]:
        """The message as files and servers spell it."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            row["reasoning_content"] = self.reasoning
        return row | dict(self.tool_fields or {})


class Conversation(NamedTuple):
    """Messages in order: at most one system message first, then user and assistant in turn; and the tools on offer."""

    id: str
    turns: tuple[Message, ...]
    domain: str
    tools: tuple[Mapping[str, Any], ...] = ()


class RowError(Exception):
    """One row cannot be used; the text is the reason, without the row's own content so that it can be counted."""


class Row(NamedTuple):
    """One row of a file: its number (line of a .jsonl, else position, both from 1) and its value or what is wrong."""

    number: int
    value: object
    problem: str | None = None


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of a .jsonl, .json or .parquet file; rows that are not readable carry the reason instead.

    Raises:
        DataError: the file is missing, of another kind, or not readable as a whole.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path} is of kind {path.suffix or 'none'!r}; prompts are read from {', '.join(SUFFIXES)} files."
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}. Give the path of a {', '.join(SUFFIXES)} file.")
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    return _read_json(path) if path.suffix == ".json" else _read_parquet(path)


def conversation_from_row(row: object, default_id: str | None = None) -> Conversation:
    """Turn one row into a conversation.

    Args:
        row: the row as read.
        default_id: id of a row that has none; None makes one from the content.

    Raises:
        RowError: the row cannot be used.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"the row is {_kind(row)}, not an object")
    turns = _turns(row)
    domain = row.get("domain")
    if domain is None:
        domain = ""
    domain = _text(domain, "domain")
    given = row.get("id")
    if given is None:
        identity = default_id or content_id(turns)
    elif isinstance(given, int) and not isinstance(given, bool):
        identity = _number_id(given)
    else:
        identity = _text(given, "id")
        if not identity.strip():
            raise RowError("'id' is empty")
    return Conversation(identity, turns, domain, _tools(row.get("tools")))


def row_of(conversation: Conversation) -> dict[str, object]:
    """A row that `conversation_from_row` turns back into the same conversation."""
    row: dict[str, object] = {"id": conversation.id, "domain": conversation.domain}
    turns = conversation.turns
    # User turns in a row are no conversation: the target answers each before it sees the next.
    if len(turns) > 1 and all(turn.role == "user" for turn in turns):
        return {**row, "turns": [turn.content for turn in turns]}
    if conversation.tools:
        row["tools"] = list(conversation.tools)
    return {**row, "conversations": [turn.as_row() for turn in turns]}


def content_id(turns: Iterable[Message]) -> str:
    """Return an id that depends on the messages alone, the same on every machine."""
    # Fields of tools only where there are any: the ids of all other conversations stay what they always were.
    text = json.dumps([list(turn[:3]) + ([turn.tool_fields] if turn.tool_fields else []) for turn in turns])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while not raw.endswith(b"\n") and (raw := file.readline(MAX_LINE_BYTES)):
                    pass
                yield Row(number, None, f"the line is longer than {MAX_LINE_BYTES:,} bytes")
                continue
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                yield Row(number, None, BLANK)
                continue
            try:
                yield Row(number, json.loads(raw.decode("utf-8")))
            except UnicodeDecodeError:
                yield Row(number, None, "the line is not UTF-8 text")
            except (ValueError, RecursionError):
                yield Row(number, None, "the line is not a complete JSON value")


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not readable as JSON: {error}. One object a line belongs into a .jsonl file."
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds {_kind(rows)}; a .json file of prompts holds a list of objects.")
    for number, value in enumerate(rows, start=1):
        yield Row(number, value)


def _read_parquet(path: Path) -> Iterator[Row]:
    import datasets  # costs seconds, and most runs read JSONL

    try:
        # Streaming reads the file in place; the other way copies it into a cache first.
        rows = datasets.load_dataset("parquet", data_files=str(path.resolve()), split="train", streaming=True)
        for number, value in enumerate(rows, start=1):
            yield Row(number, value)
    # datasets and pyarrow raise unrelated types for a damaged file.
    except Exception as error:
        raise DataError(f"{path} is not readable as parquet: {error}. Rewrite it, or give a .jsonl file.") from error


def _turns(row: Mapping[object, object]) -> tuple[Message, ...]:
    for key in CONVERSATION_KEYS:
        value = row.get(key)
        if value is None:
            continue
        if key == "prompt":
            return (Message("user", _content(value, "prompt")),)
        if not isinstance(value, list):
            raise RowError(f"{key!r} is {_kind(value)}, not a list")
        if not value:
            raise RowError(f"{key!r} is empty")
        # Turns given as plain texts are all the user's: the target answers each before it sees the next.
        if key == "turns":
            return tuple(Message("user", _content(text, "turns")) for text in value)
        messages = tuple(_message(message) for message in value)
        _check_order(messages)
        return messages
    raise RowError("none of 'conversations', 'messages', 'turns' and 'prompt' is given")


def _message(message: object) -> Message:
    if not isinstance(message, Mapping):
        raise RowError(f"a message is {_kind(message)}, not an object")
    role_key, content_key = ("role", "content") if message.get("role") is not None else ("from", "value")
    if role_key not in message:
        raise RowError("a message has neither 'role' nor 'from'")
    role = _ROLES.get(_text(message[role_key], role_key))
    if role is None:
        raise RowError(f"a role is unknown; known are {', '.join(_ROLES)}")
    if content_key not in message:
        raise RowError(f"a message has no {content_key!r}")
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("thinking")
    if reasoning is not None:
        reasoning = _text(reasoning, "reasoning_content") or None
    fields = _tool_fields(message, role)
    content = message[content_key]
    if fields and "tool_calls" in fields and (content is None or content == ""):
        return Message(role, "", reasoning, fields)
    return Message(role, _content(content, content_key), reasoning, fields)


def _tool_fields(message: Mapping[object, object], role: str) -> dict[str, Any] | None:
    if role == "tool":
        given = {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
        return {key: _text(value, key) for key, value in given.items()} or None
    calls = message.get("tool_calls")
    if role != "assistant" or not calls:
        return None
    if not isinstance(calls, list) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping) for call in calls
    ):
        raise RowError(f"'tool_calls' is {_kind(calls)} without functions, not a list of calls")
    return {"tool_calls": calls}


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if not value:
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("'tools' is a string that is no JSON") from error
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowError(f"'tools' is {_kind(value)}, not a list of objects")
    return tuple(value)


def _check_order(turns: tuple[Message, ...]) -> None:
    before = ""
    for turn in turns:
        if turn.role not in _MAY_FOLLOW[before]:
            where = f"after {before!r}" if before else "first"
            raise RowError(f"roles are out of order: {turn.role!r} comes {where}")
        before = turn.role
    if before == "system":
        raise RowError("there is no user message")


def _content(value: object, key: str) -> str:
    text = _text(value, key)
    if not text.strip():
        raise RowError(f"{key!r} is empty")
    return text


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key!r} is {_kind(value)}" + ("" if value is None else ", not a string"))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{key!r} holds half a surrogate pair, which no tokenizer can read") from error
    return value


def _number_id(value: int) -> str:
    try:
        return str(value)
    except ValueError as error:
        raise RowError("'id' is a number with too many digits") from error


def _kind(value: object) -> str:
    return "null" if value is None else _JSON_TYPES.get(type(value), f"of type {type(value).__name__}")
