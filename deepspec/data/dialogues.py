"""Conversations whose assistant turns are being answered, and the file that receives them.

Rows are written as conversations end, and a rerun goes on by their ids: whatever kills a run, nothing that stands in
the file is lost or asked for again. Who answers, a target in this process or a server, is the caller's business.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deepspec import console
from deepspec.config import TargetConfig
from deepspec.data.journal import open_journal
from deepspec.data.prompt_file import Prompts
from deepspec.data.prompts import Conversation, Message
from deepspec.decoding.sampling import Sampling
from deepspec.errors import DataError

_Kind = TypeVar("_Kind")


class AnswerSettings(NamedTuple):
    """How answers are made; recorded in every row.

    Attributes:
        sampling: warpers.
        max_new_tokens: per turn.
        seed: of all draws; those of a turn depend on (seed, id, turn) alone.
        batch_size: prompts in flight.
    """

    sampling: Sampling
    max_new_tokens: int
    seed: int
    batch_size: int


class Answer(NamedTuple):
    """One generated turn.

    Attributes:
        message: the assistant's message.
        finish_reason: stop, length or tool_calls.
        prompt_ids: what the target read, None where the source does not say.
        answer_ids: what it generated, None where the source does not say.
        num_tokens: how many tokens it generated, by the source's own count; None where it does not say.
    """

    message: Message
    finish_reason: str
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None
    num_tokens: int | None = None


class Dialogue:
    """A conversation whose assistant turns are being generated in order.

    An assistant's turn that a tool's message follows is kept as it was given: the tool answered that very call.
    """

    def __init__(self, conversation: Conversation) -> None:
        """Begin before the first message."""
        self.conversation = conversation
        self.messages: list[Message] = []
        self.answers: list[Answer] = []
        self._answer_turns: list[int] = []
        self._pending = deque(given_messages(conversation))

    @property
    def is_over(self) -> bool:
        """Whether no message is left after the last answer."""
        return not self._pending

    def advance(self) -> bool:
        """Move up to the next place where the target speaks; False when there is none."""
        while self._pending:
            self.messages.append(self._pending.popleft())
            follows_given = bool(self._pending) and self._pending[0].role in ("assistant", "tool")
            if self.messages[-1].role in ("user", "tool") and not follows_given:
                return True
        return False

    def add(self, answer: Answer) -> bool:
        """Take an answer; whether the target is to speak again.

        A cut answer is no history that the target would ever continue from, and nobody has run the tools of a call.
        """
        self._answer_turns.append(len(self.messages))
        self.messages.append(answer.message)
        self.answers.append(answer)
        return answer.finish_reason == "stop" and self.advance()

    def retract(self) -> None:
        """End the conversation with its last answer, without the messages after it."""
        del self.messages[self._answer_turns[-1] + 1 :]
        self._pending.clear()

    def row(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """The row of an answers file."""
        prompts = [answer.prompt_ids for answer in self.answers]
        ids = [answer.answer_ids for answer in self.answers]
        has_ids = None not in ids and None not in prompts
        return {
            "id": self.conversation.id,
            "domain": self.conversation.domain,
            **({"tools": list(self.conversation.tools)} if self.conversation.tools else {}),
            "messages": [message.as_row() for message in self.messages],
            "answer_turns": self._answer_turns,
            **({"prompt_ids": prompts, "answer_ids": ids} if has_ids else {}),
            "num_tokens": [answer.num_tokens for answer in self.answers],
            "finish_reason": [answer.finish_reason for answer in self.answers],
            **provenance,
        }


class _Done(NamedTuple):
    """What is remembered of a row that an earlier run wrote: its id, and which messages it was asked."""

    id: str
    num_given: int
    digest: bytes


def given_messages(conversation: Conversation) -> list[Message]:
    """The messages that are not generated."""
    following = [*(turn.role for turn in conversation.turns[1:]), ""]
    return [
        turn
        for turn, after in zip(conversation.turns, following, strict=True)
        if turn.role != "assistant" or after == "tool"
    ]


def provenance(
    config: TargetConfig, chat_template: str, settings: AnswerSettings, *, source: str, dtype: str | None
) -> dict[str, Any]:
    """How answers were made; a row holds all of it.

    Args:
        config: which target, and how its template is used.
        chat_template: text of its template.
        settings: how it samples.
        source: `in_process` or `server`.
        dtype: precision of its weights, None where nobody says.
    """
    return {
        "target": config.name_or_path,
        "revision": config.revision,
        "dtype": dtype,
        "source": source,
        "template_hash": hashlib.sha256(chat_template.encode()).hexdigest()[:16],
        "enable_thinking": config.enable_thinking,
        "system_prompt": config.system_prompt,
        "sampling": {**settings.sampling._asdict(), "max_new_tokens": settings.max_new_tokens},
        "seed": settings.seed,
    }


def record_answers(
    conversations: Prompts,
    made_with: Mapping[str, Any],
    answer: Callable[[Iterator[Dialogue]], Iterable[Dialogue]],
    output: Path,
) -> int:
    """Have every conversation answered that the output does not hold yet, and append each as it ends.

    Args:
        conversations: prompts; assistant turns in them are replaced by the target's own. They are gone through twice at
            most, and none is held.
        made_with: provenance of all rows.
        answer: plays dialogues, yielding each when it has ended; those that it has begun are all that is in memory.
        output: answers file (JSONL).

    Returns:
        Number of rows in the output.

    Raises:
        DataError: the output was made under other settings or from other prompts.
    """

    def keep(row: dict[str, Any]) -> _Done:
        _check_provenance(row, made_with, output)
        turns, messages = _list_of(row.get("answer_turns"), int), _list_of(row.get("messages"), dict)
        if turns is None or messages is None:
            raise DataError(
                f"{output}: the row with the id {row.get('id')!r} has no list of messages, or no list of the places of "
                "its answers (answer_turns). Delete that line; it is then answered again."
            )
        given = [message for place, message in enumerate(messages) if place not in set(turns)]
        return _Done(str(row.get("id")), len(given), _digest(given))

    with open_journal(output, keep) as journal:
        line_of_id = {row.id: number for number, row in enumerate(journal.rows, start=1)}
        answered = 0
        # Reading a file of prompts costs minutes where it is large: only a run that goes on has anything to compare.
        for conversation in conversations if line_of_id else ():
            line = line_of_id.get(conversation.id)
            if line is not None:
                _check_prompt(conversation, line, journal.rows[line - 1], output)
                answered += 1
        waiting = (Dialogue(conversation) for conversation in conversations if conversation.id not in line_of_id)
        count, tokens = len(line_of_id), 0
        total = count + len(conversations) - answered
        with console.progress("answering prompts", total=total, done=count) as bar:
            for dialogue in answer(waiting):
                journal.append(dialogue.row(made_with))
                count += 1
                tokens += sum(one.num_tokens or 0 for one in dialogue.answers)
                bar.advance(1, f"{tokens:,} tokens")
        return count


def _list_of(value: Any, kind: type[_Kind]) -> list[_Kind] | None:
    return value if isinstance(value, list) and all(isinstance(one, kind) for one in value) else None


def _digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    return hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=16).digest()


def _check_provenance(row: Mapping[str, Any], made_with: Mapping[str, Any], output: Path) -> None:
    for key, value in made_with.items():
        if row.get(key) != value:
            raise DataError(
                f"{output} was made with {key} {row.get(key)!r}, but this run asks for {value!r}. "
                "Write to another file, or delete this one."
            )


def _check_prompt(conversation: Conversation, number: int, row: _Done, output: Path) -> None:
    """Refuse a prompt that changed behind the id of an answered one; what was answered may be shorter."""
    asked = [message.as_row() for message in given_messages(conversation)[: row.num_given]]
    if _digest(asked) != row.digest:
        raise DataError(
            f"{output} line {number} answers another prompt with the id {row.id!r} than the one asked now. "
            "Give changed prompts new ids, write to another file, or delete that line."
        )
