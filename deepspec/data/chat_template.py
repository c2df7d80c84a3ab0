"""A target's chat template with its options: histories in, exact texts and token ids out.

The module knows no masks. What it says about a template it finds by rendering, never by searching a text for markers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jinja2 import TemplateError

from deepspec.data.prompts import Message
from deepspec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Answers that differ from their first character on show what a template puts before and after any answer.
PROBE_ANSWERS = ("yes", "no")
Shown = TypeVar("Shown", str, list[int])
_PROBE_REASONING = "because"
_PROBE_USER = Message("user", "x")


class ChatTemplate(NamedTuple):
    """How a target's conversations are written.

    Attributes:
        tokenizer: the target's tokenizer with its chat template.
        enable_thinking: passed to the template; templates without a thinking mode ignore it.
        system_prompt: put first where a history has no system message of its own; None leaves the template's default.
        tools: functions that the target may call, as JSON schemas.
    """

    tokenizer: PreTrainedTokenizerBase
    enable_thinking: bool
    system_prompt: str | None
    tools: tuple[Mapping[str, Any], ...] = ()

    def prompt(self, messages: Sequence[Message]) -> str:
        """The history with the generation prompt.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: the history has nothing to answer, or the template refuses it.
        """
        if not messages or messages[-1].role == "assistant":
            raise DataError(f"a history of {len(messages)} messages without a last user turn has nothing to answer.")
        return self._render(messages, is_prompt=True)

    def text(self, messages: Sequence[Message]) -> str:
        """The messages without a generation prompt.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: the template refuses them.
        """
        return self._render(messages, is_prompt=False)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        # The template already wrote the beginning-of-sequence token where the target wants one.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def generation_prompt(self, messages: Sequence[Message]) -> str | None:
        """What the template adds to a history so that the target answers it; None where it rewrites the history."""
        prompt, bare = self.prompt(messages), self.text(messages)
        return prompt[len(bare) :] if prompt.startswith(bare) else None

    def thinking_off_block(self) -> str:
        """What the prompt itself writes after its header to switch thinking off, such as an empty thinking block."""
        on = self._replace(enable_thinking=True).generation_prompt([_PROBE_USER])
        off = self._replace(enable_thinking=False).generation_prompt([_PROBE_USER])
        return "" if on is None or off is None or not off.startswith(on) else off[len(on) :]

    def around_answer(self, history: Sequence[Message], following: Sequence[Message] = ()) -> tuple[str, str]:
        """What the template writes before and after any answer to a history, thinking aside."""
        first, second = (self.text([*history, Message("assistant", answer), *following]) for answer in PROBE_ANSWERS)
        return shared_prefix(first, second), shared_prefix(first[::-1], second[::-1])[::-1]

    def reasoning_marks(self) -> tuple[str, str] | None:
        """What the template writes before and after the reasoning of an answer that follows its prompt.

        None for templates that do not write reasoning. The first text is empty where the prompt opens the block.
        """
        on = self._replace(enable_thinking=True)
        prompt = on.prompt([_PROBE_USER])
        try:
            full = on.text([_PROBE_USER, Message("assistant", PROBE_ANSWERS[0], _PROBE_REASONING)])
        except DataError:
            return None
        before, found, rest = full[len(prompt) :].partition(_PROBE_REASONING)
        between, has_answer, _ = rest.partition(PROBE_ANSWERS[0])
        return (before, between) if full.startswith(prompt) and found and has_answer and between else None

    def _render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; give one with target.chat_template."
            )
        turns = [_as_templates_read_it(message) for message in messages]
        if self.system_prompt is not None and messages[0].role != "system":
            turns.insert(0, {"role": "system", "content": self.system_prompt})
        try:
            text = tokenizer.apply_chat_template(
                turns,
                tools=[dict(tool) for tool in self.tools] or None,
                tokenize=False,
                add_generation_prompt=is_prompt,
                enable_thinking=self.enable_thinking,
                thinking=self.enable_thinking,  # the name that DeepSeek's templates read
            )
        # Templates raise errors of Python as well where a conversation has a shape that they do not expect.
        except (TemplateError, TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise DataError(f"the chat template refuses these turns ({roles}): {error}") from error
        assert isinstance(text, str)
        return text


def _as_templates_read_it(message: Message) -> dict[str, Any]:
    row = message.as_row()
    # gpt-oss reads this name, all others the one that servers use.
    return row if message.reasoning is None else row | {"thinking": message.reasoning}


def generated_message(text: str, marks: tuple[str, str] | None) -> Message:
    """An assistant's message out of generated text, its reasoning apart where the template has marks for it."""
    if marks is not None and text.startswith(marks[0]):
        reasoning, closing, content = text[len(marks[0]) :].partition(marks[1])
        if closing:
            return Message("assistant", content, reasoning or None)
    return Message("assistant", text)


def answer_message(
    template: ChatTemplate, ids: Sequence[int], stop_token_ids: Sequence[int], marks: tuple[str, str] | None
) -> Message:
    """An assistant's message out of generated tokens, as the history of the turns after it.

    Args:
        template: with the tokenizer.
        ids: the answer, with the stop token that ended it, if one did.
        stop_token_ids: of the target.
        marks: `template.reasoning_marks()`.
    """
    is_whole = bool(ids) and ids[-1] in stop_token_ids
    # Special tokens stay: they are how some families mark reasoning and tool calls.
    text = template.tokenizer.decode(list(ids[:-1] if is_whole else ids), skip_special_tokens=False)
    return generated_message(str(text), marks)


def shared_prefix(first: Shown, second: Shown) -> Shown:
    """The longest beginning that two texts, or two lists of ids, have in common."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]
