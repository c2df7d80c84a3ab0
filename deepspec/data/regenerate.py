"""Answers: the target itself continues every prompt, in large batches, through the project's own decoder.

Rows are written as they finish and a rerun continues by id. Each row keeps the very ids that were fed and generated, so
that masks never have to be found in text. The module knows no drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspec import console
from deepspec.config import TargetConfig
from deepspec.data.chat import render_prompt
from deepspec.data.features import FeatureMemory, TargetPass, content_key
from deepspec.data.journal import Journal, open_journal
from deepspec.data.prompts import Conversation, Message
from deepspec.decoding.decoder import Finished, Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.errors import DataError
from deepspec.targets.base import Target


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


class _Dialogue:
    """A conversation whose assistant turns are being generated in order."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.messages: list[Message] = []
        self.pending = [turn for turn in conversation.turns if turn.role != "assistant"]
        self.prompt_ids: list[list[int]] = []
        self.answer_ids: list[list[int]] = []
        self.finish_reasons: list[str] = []

    def advance(self) -> bool:
        """Move up to and including the next user turn; False when none is left."""
        while self.pending:
            self.messages.append(self.pending.pop(0))
            if self.messages[-1].role in ("user", "tool") and (not self.pending or self.pending[0].role != "tool"):
                return True
        return False

    def retract(self) -> None:
        """Take back the messages after the last answer."""
        while self.messages[-1].role != "assistant":
            self.messages.pop()


def answer_prompts(
    target: Target,
    config: TargetConfig,
    conversations: Sequence[Conversation],
    settings: AnswerSettings,
    output: Path,
    memory: FeatureMemory | None = None,
) -> int:
    """Generate the assistant turns of every conversation that the output does not hold yet.

    Args:
        target: answers.
        config: chat options of the target, recorded with each row.
        conversations: prompts; assistant turns in them are replaced by the target's own.
        settings: how to answer.
        output: answers file (JSONL), appended to.
        memory: keeps the target's states of what it answers, for a training in the same process.

    Returns:
        Number of rows in the output.

    Raises:
        DataError: the output was made under other settings, or a prompt does not fit the target.
    """
    provenance = _provenance(target, config, settings)
    memory = memory or FeatureMemory(0.0)
    memory.claim(target)
    with open_journal(output) as journal:
        done = _finished_ids(journal, provenance, output)
        _check_prompts(journal, conversations, output)
        waiting = [_Dialogue(conversation) for conversation in conversations if conversation.id not in done]
        total = len(waiting) + len(done)
        with console.progress("answering prompts", total=total, done=len(done)) as bar:
            tokens = 0
            for dialogue in _play(target, config, waiting, settings, memory):
                journal.append(_row(dialogue, target, provenance))
                tokens += sum(map(len, dialogue.answer_ids))
                bar.advance(1, f"{tokens:,} tokens")
        return total


def _play(
    target: Target,
    config: TargetConfig,
    dialogues: list[_Dialogue],
    settings: AnswerSettings,
    memory: FeatureMemory,
) -> Iterator[_Dialogue]:
    """Answer turn after turn: all first turns in one stream of batches, then all second ones, and so on."""
    current = {dialogue.conversation.id: dialogue for dialogue in dialogues if dialogue.advance()}
    turn = 0
    while current:
        requests = []
        overlong = 0
        for key, dialogue in current.items():
            ids = render_prompt(
                target.tokenizer,
                dialogue.messages,
                enable_thinking=config.enable_thinking,
                system_prompt=config.system_prompt,
            )
            # The decoder refuses it; a first turn is refused before any work, a later one must not undo the others.
            if turn and len(ids) + settings.max_new_tokens >= target.context_length:
                overlong += 1
                dialogue.retract()
                yield dialogue
                continue
            dialogue.prompt_ids.append(ids)
            requests.append(Request(f"{key}#{turn}", ids))
        if overlong:
            console.info(
                f"{overlong:,} conversations end before turn {turn + 1}, which would not fit the "
                f"{target.context_length:,} positions of {target.name} with max_new_tokens {settings.max_new_tokens:,}"
            )
        following: dict[str, _Dialogue] = {}
        for finished in generate(
            target,
            None,
            requests,
            settings.sampling,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            seed=settings.seed,
            timers=False,
            capture=memory.is_on,
        ):
            key = finished.prompt_id.rsplit("#", 1)[0]
            dialogue = current[key]
            _add_answer(dialogue, finished, target)
            # Later turns become one sample with the first, whose passes were not made in one piece.
            if finished.captured is not None and turn == 0 and not dialogue.pending:
                ids = [*dialogue.prompt_ids[0], *finished.output_ids]
                memory.remember(content_key(ids), TargetPass(*finished.captured))
            # A cut answer is no history that the target would ever continue from.
            if finished.finish_reason == "stop" and dialogue.advance():
                following[key] = dialogue
            else:
                yield dialogue
        current, turn = following, turn + 1


def _add_answer(dialogue: _Dialogue, finished: Finished, target: Target) -> None:
    dialogue.answer_ids.append(finished.output_ids)
    dialogue.finish_reasons.append(finished.finish_reason)
    text = target.tokenizer.decode(finished.output_ids, skip_special_tokens=True)
    dialogue.messages.append(Message("assistant", str(text)))


def _row(dialogue: _Dialogue, target: Target, provenance: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": dialogue.conversation.id,
        "domain": dialogue.conversation.domain,
        "messages": [{"role": message.role, "content": message.content} for message in dialogue.messages],
        "prompt_ids": dialogue.prompt_ids,
        "answer_ids": dialogue.answer_ids,
        "finish_reason": dialogue.finish_reasons,
        **provenance,
    }


def _provenance(target: Target, config: TargetConfig, settings: AnswerSettings) -> dict[str, Any]:
    template = str(target.tokenizer.chat_template or "")
    return {
        "target": config.name_or_path,
        "template_hash": hashlib.sha256(template.encode()).hexdigest()[:16],
        "enable_thinking": config.enable_thinking,
        "system_prompt": config.system_prompt,
        "sampling": {**settings.sampling._asdict(), "max_new_tokens": settings.max_new_tokens},
        "seed": settings.seed,
    }


def _finished_ids(journal: Journal, provenance: dict[str, Any], output: Path) -> set[str]:
    for row in journal.rows:
        different = [key for key, value in provenance.items() if row.get(key) != value]
        if different:
            key = different[0]
            raise DataError(
                f"{output} was made with {key} {row.get(key)!r}, but this run asks for {provenance[key]!r}. "
                "Write to another file, or delete this one."
            )
    return {str(row.get("id")) for row in journal.rows}


def _check_prompts(journal: Journal, conversations: Sequence[Conversation], output: Path) -> None:
    """Refuse prompts that changed behind the id of an answered one; an answered conversation may be a shorter one."""
    asked = {one.id: [(turn.role, turn.content) for turn in one.turns] for one in conversations}
    for number, row in enumerate(journal.rows, start=1):
        wanted = [turn for turn in asked.get(str(row.get("id")), []) if turn[0] != "assistant"]
        answered = [(one["role"], one["content"]) for one in row.get("messages", []) if one["role"] != "assistant"]
        if wanted and wanted[: len(answered)] != answered:
            raise DataError(
                f"{output} line {number} answers another prompt with the id {row['id']!r} than the one asked now. "
                "Give changed prompts new ids, write to another file, or delete that line."
            )
