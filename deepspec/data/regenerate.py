"""Answers from a target in this process: it continues all prompts, in large batches, through the project's decoder.

Each row keeps the very ids that were fed and generated, so that masks never have to be found in text. The module knows
no drafts; which prompts are left to answer, and the file of answers, is dialogues.py's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deepspec import console
from deepspec.config import TargetConfig
from deepspec.data.chat import samples_from_answers
from deepspec.data.chat_template import ChatTemplate, generated_message
from deepspec.data.dialogues import Answer, AnswerSettings, Dialogue, provenance, record_answers
from deepspec.data.features import FeatureMemory, PassSink, TargetPass
from deepspec.data.prompts import Conversation
from deepspec.decoding.decoder import Captured, Finished, Request, generate
from deepspec.targets.base import Target

__all__ = ["AnswerSettings", "answer_prompts"]


def answer_prompts(
    target: Target,
    config: TargetConfig,
    conversations: Sequence[Conversation],
    settings: AnswerSettings,
    output: Path,
    memory: PassSink | None = None,
) -> int:
    """Generate the assistant turns of every conversation that the output does not hold yet.

    Args:
        target: answers.
        config: chat options of the target, recorded with each row.
        conversations: prompts; assistant turns in them are replaced by the target's own.
        settings: how to answer.
        output: answers file (JSONL), appended to.
        memory: takes the target's states of what it answers, so that it never runs over the same text again.

    Returns:
        Number of rows in the output.

    Raises:
        DataError: the output was made under other settings, or a prompt does not fit the target.
    """
    kept: PassSink = memory or FeatureMemory(0.0)
    kept.claim(target)
    template = ChatTemplate(target.tokenizer, config.enable_thinking, config.system_prompt)
    made_with = provenance(
        config,
        str(target.tokenizer.chat_template or ""),
        settings,
        source="in_process",
        dtype=str(target.dtype).removeprefix("torch."),
    )
    return record_answers(
        conversations, made_with, lambda dialogues: _play(target, template, dialogues, settings, kept), output
    )


def _play(
    target: Target,
    template: ChatTemplate,
    dialogues: Iterable[Dialogue],
    settings: AnswerSettings,
    memory: PassSink,
) -> Iterator[Dialogue]:
    """Answer turn after turn: all first turns in one stream of batches, then all second ones, and so on."""
    current = {dialogue.conversation.id: dialogue for dialogue in dialogues if dialogue.advance()}
    turn = 0
    marks = template.reasoning_marks()
    while current:
        requests = []
        overlong = 0
        for key, dialogue in current.items():
            asked = template._replace(tools=dialogue.conversation.tools)
            ids = asked.tokenize(asked.prompt(dialogue.messages))
            # The decoder refuses it; a first turn is refused before any work, a later one must not undo the others.
            if turn and len(ids) + settings.max_new_tokens >= target.context_length:
                overlong += 1
                dialogue.retract()
                yield dialogue
                continue
            requests.append(Request(f"{key}#{turn}", ids))
        if overlong:
            console.info(
                f"{overlong:,} conversations end before turn {turn + 1}, which would not fit the "
                f"{target.context_length:,} positions of {target.name} with max_new_tokens {settings.max_new_tokens:,}"
            )
        prompts = {request.prompt_id: list(request.prompt_ids) for request in requests}
        following: dict[str, Dialogue] = {}
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
            prompt_ids = prompts[finished.prompt_id]
            goes_on = dialogue.add(_answer(finished, prompt_ids, target, marks))
            if finished.captured is not None:
                _hand_over(memory, template, dialogue, finished.captured, goes_on)
            if goes_on:
                following[key] = dialogue
            else:
                yield dialogue
        current, turn = following, turn + 1


def _hand_over(memory: PassSink, template: ChatTemplate, dialogue: Dialogue, captured: Captured, goes_on: bool) -> None:
    """Keep the states of a sample that ends here; a turn that reads all of it brings its states along."""
    sample = samples_from_answers(
        dialogue.row({}),
        template.tokenizer,
        enable_thinking=template.enable_thinking,
        system_prompt=template.system_prompt,
    )[-1]
    if goes_on:
        asked = template._replace(tools=dialogue.conversation.tools)
        if asked.tokenize(asked.prompt(dialogue.messages))[: len(sample.input_ids)] == sample.input_ids:
            return
    one = TargetPass(*captured)
    # The logsumexps of earlier answers were not made in this turn.
    is_first = sum(sample.answer_mask) == len(dialogue.answers[-1].answer_ids or ())
    memory.keep(sample, one if is_first else one._replace(log_normaliser=None))


def _answer(finished: Finished, prompt_ids: list[int], target: Target, marks: tuple[str, str] | None) -> Answer:
    ids = list(finished.output_ids)
    is_whole = bool(ids) and ids[-1] in target.stop_token_ids
    # Special tokens stay: they are how some families mark reasoning and tool calls.
    text = str(target.tokenizer.decode(ids[:-1] if is_whole else ids, skip_special_tokens=False))
    return Answer(generated_message(text, marks), finished.finish_reason, prompt_ids, ids, len(ids))
