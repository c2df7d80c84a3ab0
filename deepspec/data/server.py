"""Answers from OpenAI-compatible servers that serve the target: many conversations at a time, turn after turn.

With `chat` the server writes the conversation by the template it serves with; with `completions` it gets token ids that
our own template wrote. Token ids are kept where a server gives them (vLLM). The module knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from deepspec.config import ServerConfig, TargetConfig
from deepspec.data.chat import FINISH_REASONS
from deepspec.data.chat_template import ChatTemplate, generated_message
from deepspec.data.chat_text import locate_answer
from deepspec.data.dialogues import Answer, AnswerSettings, Dialogue, provenance, record_answers
from deepspec.data.prompt_file import Prompts
from deepspec.data.prompts import Message
from deepspec.data.server_client import PassingError, RefusedRequestError, ServerPool
from deepspec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A generated answer's seed: any that all servers take.
_SEEDS = 2**31


class ServerCounts(NamedTuple):
    """What became of the prompts that servers were asked.

    Attributes:
        rows: rows in the output.
        left_out: conversations that the servers would not answer; a rerun asks again.
        without_ids: turns answered here without token ids.
        changed: of these, turns whose text has another number of tokens than the server generated.
        unlocated: of these, turns whose tokens the chat template does not show.
        other_prompt: turns that the server wrote in another way than the target's template does here.
    """

    rows: int = 0
    left_out: int = 0
    without_ids: int = 0
    changed: int = 0
    unlocated: int = 0
    other_prompt: int = 0


def answer_prompts_by_server(
    tokenizer: PreTrainedTokenizerBase,
    config: TargetConfig,
    server: ServerConfig,
    conversations: Prompts,
    settings: AnswerSettings,
    output: Path,
    on_bad_row: Literal["stop", "skip"] = "stop",
) -> ServerCounts:
    """Let servers answer every conversation that the output does not hold yet.

    Args:
        tokenizer: the target's tokenizer with its chat template.
        config: chat options of the target, recorded with each row.
        server: where to ask, and how.
        conversations: prompts; assistant turns in them are replaced by the target's own.
        settings: how to answer; the batch size is the servers' own business.
        output: answers file (JSONL), appended to.
        on_bad_row: whether a prompt that the servers refuse stops the run or is left out and counted.

    Raises:
        ConfigError: the servers serve another model, want a key, or cannot be asked for this kind of sampling.
        DataError: no server answers, one refuses a prompt that may not be left out, or the output was made otherwise.
    """
    sampling = settings.sampling
    if not server.extensions and (sampling.top_k or sampling.min_p):
        raise ConfigError(
            f"sampling.top_k {sampling.top_k} and sampling.min_p {sampling.min_p} are no part of OpenAI's protocol. "
            "Set server.extensions=true if the servers know them, or leave both at 0."
        )
    template = ChatTemplate(tokenizer, config.enable_thinking, config.system_prompt)
    made_with = provenance(config, str(tokenizer.chat_template or ""), settings, source="server", dtype=None)
    job = _Job(template, config, server, settings, on_bad_row)
    rows = record_answers(conversations, {**made_with, "api": server.api}, job.play, output)
    return job.counts._replace(rows=rows)


def describe_counts(counts: ServerCounts) -> Iterator[str]:
    """Lines that say what of the answers a training cannot use as it was generated."""
    if counts.left_out:
        yield f"{counts.left_out:,} prompts got no answer that can be used; run again to ask for them once more"
    if counts.without_ids:
        share = counts.changed / counts.without_ids
        yield (
            f"{counts.without_ids:,} answers came without token ids: at least {share:.1%} of them differ when their "
            "text is tokenised again (they have another number of tokens; other ones of the same number are not seen), "
            f"{counts.unlocated:,} cannot be located by the chat template"
        )
    if counts.other_prompt:
        yield (
            f"{counts.other_prompt:,} prompts were written by the server in another way than by the target's template "
            "here: evaluation would use other prompts than these answers were made with"
        )


class _Job:
    """One run over the servers."""

    def __init__(
        self,
        template: ChatTemplate,
        config: TargetConfig,
        server: ServerConfig,
        settings: AnswerSettings,
        on_bad_row: Literal["stop", "skip"],
    ) -> None:
        self.counts = ServerCounts()
        self._template, self._server, self._settings = template, server, settings
        self._system_prompt, self._on_bad_row = config.system_prompt, on_bad_row
        self._model = server.model or config.name_or_path
        self._marks = template.reasoning_marks()

    def play(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """Answer dialogues, `concurrency` of them at a time, yielding each when it has ended."""
        loop = asyncio.new_event_loop()
        answered = self._answer_all(dialogues)
        try:
            while True:
                try:
                    dialogue = loop.run_until_complete(anext(answered))
                except StopAsyncIteration:
                    return
                yield dialogue
        finally:
            loop.run_until_complete(answered.aclose())
            loop.close()

    async def _answer_all(self, dialogues: Iterator[Dialogue]) -> AsyncGenerator[Dialogue, None]:
        first = next(dialogues, None)
        if first is None:
            return
        waiting = itertools.chain([first], dialogues)
        async with ServerPool(self._server) as pool:
            await pool.check(self._model)
            running: set[asyncio.Task[Dialogue | None]] = set()
            try:
                while True:
                    for dialogue in itertools.islice(waiting, self._server.concurrency - len(running)):
                        running.add(asyncio.ensure_future(self._converse(pool, dialogue)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    # Those that ended well are written before an error of another ends the run.
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        ended = task.result()
                        if ended is not None:
                            yield ended
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _converse(self, pool: ServerPool, dialogue: Dialogue) -> Dialogue | None:
        """Play a conversation to its end; None where nothing of it can be used."""
        goes_on = dialogue.advance()
        while goes_on:
            template = self._template._replace(tools=dialogue.conversation.tools)
            try:
                answer, written = await self._ask(pool, dialogue, template)
            except RefusedRequestError as error:
                return self._refused(dialogue, error)
            if answer.answer_ids is None and not answer.message.content and answer.message.tool_fields is None:
                # Cut inside its reasoning, or empty: without ids no text says which tokens these were.
                return self._end_early(dialogue)
            self._compare(template, dialogue, answer, written)
            goes_on = dialogue.add(answer)
        return dialogue

    def _refused(self, dialogue: Dialogue, error: RefusedRequestError) -> Dialogue | None:
        if error.is_final and dialogue.answers:
            return self._end_early(dialogue)  # the conversation has become too long, most likely
        if self._on_bad_row == "stop":
            raise DataError(
                f"prompt {dialogue.conversation.id!r} gets no answer: {error} "
                "Leave such prompts out with on_bad_row=skip, or run again; all answers so far are kept."
            ) from error
        self.counts = self.counts._replace(left_out=self.counts.left_out + 1)
        return None

    def _end_early(self, dialogue: Dialogue) -> Dialogue | None:
        if dialogue.answers:
            dialogue.retract()
            return dialogue
        self.counts = self.counts._replace(left_out=self.counts.left_out + 1)
        return None

    async def _ask(
        self, pool: ServerPool, dialogue: Dialogue, template: ChatTemplate
    ) -> tuple[Answer, list[int] | None]:
        """The next answer, and the prompt as our own template writes it (None where it cannot)."""
        written: list[int] | None = None
        try:
            written = template.tokenize(template.prompt(dialogue.messages))
        except DataError as error:
            if self._server.api == "completions":
                raise RefusedRequestError(str(error), is_final=True) from error
        body = self._body(dialogue)
        if self._server.api == "completions":
            body["prompt"] = written
            return await pool.post("/completions", body, lambda reply: self._parse(reply, "text", written)), written
        messages = [self._spelled(message) for message in dialogue.messages]
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        body["messages"] = messages
        if dialogue.conversation.tools:
            body["tools"] = list(dialogue.conversation.tools)
        if self._server.extensions:
            thinking = template.enable_thinking
            body["chat_template_kwargs"] = {"enable_thinking": thinking, "thinking": thinking}
        return await pool.post("/chat/completions", body, lambda reply: self._parse(reply, "message", None)), written

    def _spelled(self, message: Message) -> dict[str, Any]:
        """A message of the history; reasoning is no part of OpenAI's own protocol."""
        return (message if self._server.extensions else message._replace(reasoning=None)).as_row()

    def _body(self, dialogue: Dialogue) -> dict[str, Any]:
        sampling = self._settings.sampling
        draw = f"{self._settings.seed}/{dialogue.conversation.id}/{len(dialogue.answers)}"
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": self._settings.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": int.from_bytes(hashlib.sha256(draw.encode()).digest()[:8], "big") % _SEEDS,
        }
        if self._server.extensions:
            body["return_token_ids"] = True
            body |= {key: value for key in ("top_k", "min_p") if (value := getattr(sampling, key))}
        return body

    def _parse(self, reply: Any, kind: Literal["message", "text"], prompt_ids: list[int] | None) -> Answer:
        """Read one reply.

        Raises:
            PassingError: it is not what was asked for.
        """
        choices = _field(reply, "choices", list)
        if len(choices) != 1:
            raise PassingError(f"the reply holds {len(choices)} answers instead of 1")
        choice = choices[0]
        said = _field(choice, kind, dict if kind == "message" else str)
        reason = choice.get("finish_reason")
        if reason not in FINISH_REASONS:
            raise PassingError(f"the answer ended by {reason!r}")
        ids = _token_ids(choice.get("token_ids"))
        count = _num_tokens(reply)
        if ids is not None:
            if count is not None and count != len(ids):
                raise PassingError(f"the reply counts {count} tokens and lists {len(ids)}")
            if len(ids) > self._settings.max_new_tokens:
                raise PassingError(
                    f"the reply has {len(ids)} tokens, but {self._settings.max_new_tokens} were asked for"
                )
            # Ids without the token that ended the turn would leave a draft without it.
            if reason != "length" and (not ids or ids[-1] not in self._template.tokenizer.added_tokens_decoder):
                ids = None
        read_ids = _token_ids(reply.get("prompt_token_ids") or choice.get("prompt_token_ids")) or prompt_ids
        if kind == "text" and ids is not None:
            said = str(self._template.tokenizer.decode(ids if reason == "length" else ids[:-1]))
        message = generated_message(said, self._marks) if kind == "text" else self._message(said)
        try:
            json.dumps(message.as_row(), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise PassingError("the answer holds half a surrogate pair, which no tokenizer can read") from error
        return Answer(message, reason, read_ids, ids, len(ids) if ids is not None else count)

    def _message(self, said: Mapping[str, Any]) -> Message:
        content = said.get("content") or ""
        reasoning = said.get("reasoning_content") or said.get("reasoning") or None
        calls = said.get("tool_calls") or None
        if not isinstance(content, str) or not isinstance(reasoning, str | None) or not isinstance(calls, list | None):
            raise PassingError("the reply's message has parts of unknown kinds")
        if reasoning is None:
            message = generated_message(content, self._marks)
            content, reasoning = message.content, message.reasoning
        return Message("assistant", content, reasoning, None if calls is None else {"tool_calls": calls})

    def _compare(self, template: ChatTemplate, dialogue: Dialogue, answer: Answer, written: list[int] | None) -> None:
        """Count where the server's tokens and those that a training would make here differ."""
        counts = self.counts
        if answer.prompt_ids is not None and written is not None and answer.prompt_ids != written:
            counts = counts._replace(other_prompt=counts.other_prompt + 1)
        if answer.answer_ids is None:
            counts = counts._replace(without_ids=counts.without_ids + 1)
            try:
                located = locate_answer(template, dialogue.messages, answer.message, answer.finish_reason)
            except DataError:
                counts = counts._replace(unlocated=counts.unlocated + 1)
            else:
                is_changed = answer.num_tokens is not None and answer.num_tokens != len(located.answer_ids)
                counts = counts._replace(changed=counts.changed + is_changed)
        self.counts = counts


def _field(value: Any, key: str, kind: type) -> Any:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise PassingError(f"the reply has no {key!r}")
    return found


def _token_ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise PassingError("the reply's token ids are no list of ids")
    return value


def _num_tokens(reply: Mapping[str, Any]) -> int | None:
    usage = reply.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else None
