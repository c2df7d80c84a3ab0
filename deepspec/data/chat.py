"""From answers to token samples whose answer mask says exactly which tokens the target generated.

Masks are made by construction: the ids that were fed to the target, then the ids that it generated. Nothing here
searches the text of a conversation, so no content can move a mask. This module knows no models, batches or anchors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspec.data.chat_template import ChatTemplate
from deepspec.data.chat_text import locate_answer
from deepspec.data.prompts import Conversation, Message, RowError, conversation_from_row
from deepspec.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A tool call ends a turn as any other answer does; only "length" means that it was cut.
FINISH_REASONS = ("stop", "length", "tool_calls")


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
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Render a history with the generation prompt: exactly the ids that the target reads before it answers.

    Args:
        tokenizer: the target's tokenizer with its chat template.
        messages: the history, oldest first, not ending on an assistant turn.
        enable_thinking: passed to the template; templates without a thinking mode ignore it.
        system_prompt: put first where the history has no system message of its own; None leaves the template's default.
        tools: functions that the target may call.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the history has nothing to answer, or the template refuses it.
    """
    template = ChatTemplate(tokenizer, enable_thinking, system_prompt, tuple(tools))
    return template.tokenize(template.prompt(messages))


def samples_from_answers(
    row: Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    *,
    enable_thinking: bool,
    system_prompt: str | None,
    last_turn_only: bool = False,
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
        last_turn_only: supervise the last answer alone; the ones before it are context.

    Raises:
        DataError: the row is malformed, its answers cannot be located among its tokens, or a sample would be
            supervised everywhere or nowhere.
    """
    sample_id = row.get("id")
    if sample_id is None and row.get("answer_ids") is None:
        sample_id = _conversation(row).id
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int)) or sample_id == "":
        raise DataError(f"'id' is {_shown(sample_id)}, not a non-empty string.")
    if any("\ud800" <= char <= "\udfff" for char in str(sample_id)):
        raise DataError(f"'id' is {_shown(sample_id)}, which holds half a surrogate pair.")
    template = ChatTemplate(tokenizer, enable_thinking, system_prompt)
    try:
        answers = _read_id_lists(row, "answer_ids")
        turns = _turns_from_text(row, template) if answers is None else _turns_from_ids(row, answers, template)
        samples = list(_merge_turns(str(sample_id), turns[-1:] if last_turn_only else turns))
        for sample in samples:
            _check_mask(sample)
    except DataError as error:
        raise DataError(f"sample {str(sample_id)!r}: {error}") from error
    return samples


def _check_mask(sample: TokenSample) -> None:
    supervised = sum(sample.answer_mask)
    if supervised in (0, len(sample.input_ids)):
        share = "no token" if supervised == 0 else "every token"
        raise DataError(f"{share} of its {len(sample.input_ids)} would be supervised. An answer follows a prompt.")


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
    template: ChatTemplate,
) -> list[_Turn]:
    prompts = _read_id_lists(row, "prompt_ids")
    if prompts is None:
        conversation = _conversation(row)
        template = template._replace(tools=conversation.tools)
        prompts = [
            template.tokenize(template.prompt(conversation.turns[:i]))
            for i in _answer_positions(row, conversation.turns)
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
        if not answer and reason != "length":
            raise DataError(
                f"answer_ids of turn {number} is empty, but it ended by {reason!r}: the stop token is missing."
            )
    return [_Turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _turns_from_text(row: Mapping[str, object], template: ChatTemplate) -> list[_Turn]:
    conversation = _conversation(row)
    template = template._replace(tools=conversation.tools)
    positions = _answer_positions(row, conversation.turns)
    if not positions:
        raise DataError("no assistant turn, so no token would be supervised.")
    turns = []
    for number, (i, reason) in enumerate(
        zip(positions, _read_finish_reasons(row, len(positions)), strict=True), start=1
    ):
        try:
            turns.append(_Turn(*locate_answer(template, conversation.turns[:i], conversation.turns[i], reason)))
        except DataError as error:
            raise DataError(f"turn {number}: {error}") from error
    return turns


def _answer_positions(row: Mapping[str, object], messages: Sequence[Message]) -> list[int]:
    """Which messages the target generated: all of the assistant's, unless the row says that some were given."""
    positions = [i for i, message in enumerate(messages) if message.role == "assistant"]
    given = row.get("answer_turns")
    if given is None:
        return positions
    is_list = isinstance(given, list) and all(type(i) is int and i in positions for i in given)
    if not isinstance(given, list) or not is_list or given != sorted(set(given)):
        raise DataError(f"'answer_turns' is {_shown(given)}, not ascending positions of assistant messages.")
    return given


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
        wrong = [token for token in ids if type(token) is not int or not 0 <= token < 2**31]
        if wrong:
            raise DataError(f"'{key}' holds {_shown(wrong[0])}, which is not a token id.")
    return value


def _read_finish_reasons(row: Mapping[str, object], num_turns: int) -> list[str]:
    value = row.get("finish_reason")
    if value is None:
        return ["stop"] * num_turns
    if not isinstance(value, list) or len(value) != num_turns or not all(reason in FINISH_REASONS for reason in value):
        known = ", ".join(map(repr, FINISH_REASONS))
        raise DataError(f"'finish_reason' is {_shown(value)}, not one of {known} for each of {num_turns} turns.")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
