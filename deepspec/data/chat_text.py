"""Answers that are given as text: which tokens of the template's own rendering the target would have generated.

Turn i is located by position alone: P_i, the rendering of its history with the generation prompt, must be what the full
rendering begins with, or else the header that stands there instead must be the one that P_i ends with. What cannot be
located is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from deepspec.data.chat_template import PROBE_ANSWERS, ChatTemplate, shared_prefix
from deepspec.data.prompts import Message
from deepspec.errors import DataError

_GENERATE = "Generate the answers with 'deepspec data regenerate', which keeps answer_ids."


class LocatedAnswer(NamedTuple):
    """Ids that the target reads, and ids that it is taken to have generated after them."""

    prompt_ids: list[int]
    answer_ids: list[int]


class _Ending(NamedTuple):
    """What a template writes after an answer, and the beginning of that which the target itself generates."""

    written: list[int]
    generated: list[int]
    is_written: bool


def locate_answer(template: ChatTemplate, history: Sequence[Message], answer: Message, reason: str) -> LocatedAnswer:
    """Split the rendering of a history and its answer where the target began to generate.

    A thinking block that the prompt supplies is no part of the answer, whether the template repeats it in the full
    rendering, leaves it out there, or writes an empty one for an answer without reasoning; reasoning that was
    generated is.

    Args:
        template: the target's template.
        history: the messages before the answer.
        answer: an assistant message.
        reason: "length" for an answer that was cut, which gets no end of turn.

    Raises:
        DataError: the rendering does not say which tokens the target would have generated.
    """
    prompt_text = template.prompt(history)
    full_text = template.text([*history, answer])
    if answer.reasoning is not None and template.text([*history, answer._replace(reasoning=None)]) == full_text:
        raise DataError(f"the answer comes with reasoning, which the chat template does not write. {_GENERATE}")
    if answer.reasoning is not None and not template.enable_thinking:
        raise DataError(
            "the answer comes with reasoning, but target.enable_thinking is false: the target would not have reasoned. "
            "Set target.enable_thinking=true, or leave the reasoning out."
        )
    block = _thinking_off_block(_plain(template))
    if full_text.startswith(prompt_text):
        continuation_text = full_text[len(prompt_text) :]
        # Nobody generated the empty block that stands for reasoning which a row does not have.
        if template.enable_thinking and answer.reasoning is None and block and continuation_text.startswith(block):
            prompt_text += block
            continuation_text = continuation_text[len(block) :]
    else:
        continuation_text = _after_header(template, history, answer, prompt_text, full_text, block)
    prompt, continuation = _split_tokens(template, prompt_text, continuation_text)
    ending = _ending(_plain(template))
    if answer.tool_fields is not None and not ending.is_written:
        raise DataError(
            f"the answer calls a tool, and the chat template does not write how such a turn ends. {_GENERATE}"
        )
    ids = continuation[: len(continuation) - len(ending.written)]
    if continuation[len(ids) :] != ending.written or ending.generated[-1] in ids:
        raise DataError("it does not hold its end-of-turn token exactly once, at its end.")
    return LocatedAnswer(prompt, ids if reason == "length" else ids + ending.generated)


def _after_header(
    template: ChatTemplate, history: Sequence[Message], answer: Message, prompt: str, full: str, block: str
) -> str:
    """The answer's text where the template writes its history in another way than the prompt does."""
    header, _ = template.around_answer(history)
    added = template.generation_prompt(history)
    is_after_header = added is not None and (
        header.endswith(added)
        or (
            bool(block)
            and not template.enable_thinking
            and added.endswith(block)
            and header.endswith(added[: -len(block)])
        )
    )
    if answer.reasoning is not None or not is_after_header or not full.startswith(header):
        raise DataError(
            "as rendered by the chat template it does not begin with the prompt that the target would read "
            f"(its thinking block or header differs). {_GENERATE}"
        )
    return full[len(header) :]


def _split_tokens(template: ChatTemplate, prompt_text: str, continuation_text: str) -> tuple[list[int], list[int]]:
    prompt, full = template.tokenize(prompt_text), template.tokenize(prompt_text + continuation_text)
    if full[: len(prompt)] == prompt:
        return prompt, full[len(prompt) :]
    # A token spans the end of the prompt, which generation cannot produce.
    continuation = template.tokenize(continuation_text)
    decode = template.tokenizer.decode
    if decode(prompt + continuation) != decode(full):
        raise DataError("its tokens cannot be split at the end of the prompt.")
    return prompt, continuation


def _plain(template: ChatTemplate) -> ChatTemplate:
    """Without tools, which cannot be compared, and change nothing of what is asked of it here."""
    return template._replace(tools=())


# Once for each template and not for each row; `source` tells templates of one tokenizer apart.
@lru_cache(maxsize=8)
def _cached_block(template: ChatTemplate, source: str) -> str:
    return template.thinking_off_block()


@lru_cache(maxsize=8)
def _cached_ending(template: ChatTemplate, source: str) -> _Ending:
    question = Message("user", "x")
    special = template.tokenizer.added_tokens_decoder
    written = _ids_after_answer(template, question)
    marks = [offset for offset, token in enumerate(written) if token in special]
    if marks:
        return _Ending(written, written[: marks[0] + 1], is_written=True)
    # Where nothing ends a turn, what begins the next one does (GLM): the target generates it and is stopped there.
    _, following = template.around_answer([question], [Message("user", "y")])
    first = template.tokenize(following)[:1]
    if written or not first or first[0] not in special:
        raise DataError(
            "the chat template shows no end-of-turn token after an answer, so answers given as text cannot be "
            f"supervised. {_GENERATE}"
        )
    return _Ending([], first, is_written=False)


def _ids_after_answer(template: ChatTemplate, question: Message) -> list[int]:
    """The ids after any answer: found among ids, since a token may join the end of an answer with what follows it."""
    first, second = (
        template.tokenize(template.text([question, Message("assistant", answer)])) for answer in PROBE_ANSWERS
    )
    return shared_prefix(first[::-1], second[::-1])[::-1]


def _thinking_off_block(template: ChatTemplate) -> str:
    return _cached_block(template, str(template.tokenizer.chat_template))


def _ending(template: ChatTemplate) -> _Ending:
    return _cached_ending(template, str(template.tokenizer.chat_template))
