"""From answers to token samples whose answer mask says exactly which tokens the target generated.

Masks are made by construction: the ids that were fed to the target, then the ids that it generated. Nothing here
searches the text of a conversation, so no content can move a mask. This module knows no models, batches or anchors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateError

from deepspec.data.prompts import Conversation, Message, RowError, conversation_from_row
from deepspec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Two answers that differ in their last token show what a template puts after any answer.
_PROBE_ANSWERS = ("yes", "no")


class TokenSample(NamedTuple):
    """One training sequence.

    Attributes:
        id: id of the conversation, with "#2" and so on for a turn that needs a sequence of its own.
        input_ids: token ids.
        answer_mask: True on the tokens that the target generated, as long as `input_ids`.
    """

    id: str
    input_ids: list[int]
    answer_mask: list[bool]


class _Turn(NamedTuple):
    prompt_ids: list[int]
    answer_ids: list[int]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    enable_thinking: bool,
    system_prompt: str | None,
) -> list[int]:
    """Render a history with the generation prompt: exactly the ids that the target reads before it answers.

    Args:
        tokenizer: the target's tokenizer with its chat template.
        messages: the history, oldest first, not ending on an assistant turn.
        enable_thinking: passed to the template; templates without a thinking mode ignore it.
        system_prompt: put first where the history has no system message of its own; None leaves the template's default.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the history has nothing to answer, or the template refuses it.
    """
    return _tokenize(tokenizer, _prompt_text(tokenizer, messages, enable_thinking, system_prompt))


def samples_from_answers(
    row: Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    *,
    enable_thinking: bool,
    system_prompt: str | None,
) -> list[TokenSample]:
    """Turn one row of an answers file into token samples, at full length.

    Turn i is supervised after P_i, the rendering of its history with the generation prompt. It continues the sample of
    the turn before only if P_i begins with that whole sample; templates that strip earlier thinking break this, and
    then the turn becomes a sample of its own. Generated ids are used as they are. Rows without `answer_ids` (data from
    elsewhere) are rendered, and refused where the rendering does not say which tokens follow P_i.

    Args:
        row: the JSON object: `id` and `answer_ids` with `prompt_ids`, or `messages` with assistant texts.
        tokenizer: the target's tokenizer with its chat template.
        enable_thinking: as in `render_prompt`, for rows without `prompt_ids`.
        system_prompt: as in `render_prompt`, for rows without `prompt_ids`.

    Raises:
        DataError: the row is malformed, or its answers cannot be located among its tokens.
    """
    sample_id = row.get("id")
    if sample_id is None and row.get("answer_ids") is None:
        sample_id = _conversation(row).id
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int)) or sample_id == "":
        raise DataError(f"'id' is {_shown(sample_id)}, not a non-empty string.")
    try:
        answers = _read_id_lists(row, "answer_ids")
        if answers is None:
            turns = _turns_from_text(row, tokenizer, enable_thinking, system_prompt)
        else:
            turns = _turns_from_ids(row, answers, tokenizer, enable_thinking, system_prompt)
    except DataError as error:
        raise DataError(f"sample {str(sample_id)!r}: {error}") from error
    return list(_merge_turns(str(sample_id), turns))


def _merge_turns(sample_id: str, turns: Sequence[_Turn]) -> Iterator[TokenSample]:
    ids: list[int] = []
    mask: list[bool] = []
    name = sample_id
    for number, (prompt, answer) in enumerate(turns, start=1):
        if ids and prompt[: len(ids)] != ids:
            yield TokenSample(name, ids, mask)
            ids, mask, name = [], [], f"{sample_id}#{number}"
        mask = mask + [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = prompt + answer
    yield TokenSample(name, ids, mask)


def _turns_from_ids(
    row: Mapping[str, object],
    answers: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool,
    system_prompt: str | None,
) -> list[_Turn]:
    prompts = _read_id_lists(row, "prompt_ids")
    if prompts is None:
        messages = _conversation(row).turns
        prompts = [
            render_prompt(tokenizer, messages[:i], enable_thinking=enable_thinking, system_prompt=system_prompt)
            for i, message in enumerate(messages)
            if message.role == "assistant"
        ]
    if not answers or len(prompts) != len(answers):
        raise DataError(
            f"{len(answers)} lists of answer_ids for {len(prompts)} prompts; every generated turn needs both."
        )
    for number, (prompt, answer, reason) in enumerate(
        zip(prompts, answers, _read_finish_reasons(row, len(answers)), strict=True), start=1
    ):
        if not prompt:
            raise DataError(f"prompt_ids of turn {number} is empty, so every token would be supervised.")
        if not answer and reason == "stop":
            raise DataError(f"answer_ids of turn {number} is empty, but it ended by 'stop': the stop token is missing.")
    return [_Turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _turns_from_text(
    row: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, enable_thinking: bool, system_prompt: str | None
) -> list[_Turn]:
    messages = _conversation(row).turns
    positions = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not positions:
        raise DataError("no assistant turn, so no token would be supervised.")
    ending, eot_offset = _end_of_turn(tokenizer, enable_thinking, system_prompt)
    turns = []
    for number, (i, reason) in enumerate(
        zip(positions, _read_finish_reasons(row, len(positions)), strict=True), start=1
    ):
        prompt_text = _prompt_text(tokenizer, messages[:i], enable_thinking, system_prompt)
        full_text = _template_text(tokenizer, messages[: i + 1], enable_thinking, system_prompt, is_prompt=False)
        prompt, full = _tokenize(tokenizer, prompt_text), _tokenize(tokenizer, full_text)
        if not full_text.startswith(prompt_text):
            raise DataError(
                f"turn {number} as rendered by the chat template does not begin with the prompt that the target "
                "would read (its thinking block or header differs). Generate the answers with 'deepspec data answers'."
            )
        if full[: len(prompt)] == prompt:
            continuation = full[len(prompt) :]
        else:  # a token spans the end of the prompt, which generation cannot produce
            continuation = _tokenize(tokenizer, full_text[len(prompt_text) :])
            if tokenizer.decode(prompt + continuation) != tokenizer.decode(full):
                raise DataError(f"turn {number}: its tokens cannot be split at the end of the prompt.")
        answer = continuation[: len(continuation) - len(ending)]
        if continuation[len(answer) :] != ending or ending[eot_offset] in answer:
            raise DataError(f"turn {number} does not hold its end-of-turn token exactly once, at its end.")
        turns.append(_Turn(prompt, answer if reason == "length" else answer + ending[: eot_offset + 1]))
    return turns


def _end_of_turn(
    tokenizer: PreTrainedTokenizerBase, enable_thinking: bool, system_prompt: str | None
) -> tuple[list[int], int]:
    """The ids that the template puts after an answer, and which of them is the end-of-turn token."""
    first, second = (
        _tokenize(
            tokenizer,
            _template_text(
                tokenizer,
                [Message("user", "x"), Message("assistant", answer)],
                enable_thinking,
                system_prompt,
                is_prompt=False,
            ),
        )
        for answer in _PROBE_ANSWERS
    )
    shared = 0
    while shared < min(len(first), len(second)) and first[-1 - shared] == second[-1 - shared]:
        shared += 1
    ending = first[len(first) - shared :]
    added = tokenizer.added_tokens_decoder
    special = [offset for offset, token in enumerate(ending) if token in added]
    if first == second or not special:
        raise DataError(
            "the chat template shows no end-of-turn token after an answer, so answers given as text cannot be "
            "supervised. Generate them with 'deepspec data answers', which keeps answer_ids."
        )
    return ending, special[0]


def _prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], enable_thinking: bool, system_prompt: str | None
) -> str:
    if not messages or messages[-1].role == "assistant":
        raise DataError(f"a history of {len(messages)} messages without a last user turn has nothing to answer.")
    return _template_text(tokenizer, messages, enable_thinking, system_prompt, is_prompt=True)


def _template_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    enable_thinking: bool,
    system_prompt: str | None,
    *,
    is_prompt: bool,
) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template; give one with target.chat_template."
        )
    turns = [
        {"role": message.role, "content": message.content}
        | ({} if message.reasoning is None else {"reasoning_content": message.reasoning})
        for message in messages
    ]
    if system_prompt is not None and messages[0].role != "system":
        turns.insert(0, {"role": "system", "content": system_prompt})
    try:
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=is_prompt, enable_thinking=enable_thinking
        )
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise DataError(f"the chat template refuses these turns ({roles}): {error}") from error
    assert isinstance(text, str)
    return text


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template already wrote the beginning-of-sequence token where the target wants one.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _conversation(row: Mapping[str, object]) -> Conversation:
    try:
        return conversation_from_row(row)
    except RowError as error:
        raise DataError(f"{error}.") from error


def _read_id_lists(row: Mapping[str, object], key: str) -> list[list[int]] | None:
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(ids, list) for ids in value):
        raise DataError(f"'{key}' is {_shown(value)}, not one list of token ids per turn.")
    for ids in value:
        wrong = [token for token in ids if type(token) is not int or token < 0]
        if wrong:
            raise DataError(f"'{key}' holds {_shown(wrong[0])}, which is not a token id.")
    return value


def _read_finish_reasons(row: Mapping[str, object], num_turns: int) -> list[str]:
    value = row.get("finish_reason")
    if value is None:
        return ["stop"] * num_turns
    if (
        not isinstance(value, list)
        or len(value) != num_turns
        or not all(reason in ("stop", "length") for reason in value)
    ):
        raise DataError(f"'finish_reason' is {_shown(value)}, not 'stop' or 'length' for each of {num_turns} turns.")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
