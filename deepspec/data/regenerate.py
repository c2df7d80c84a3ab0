"""Answers from a target in this process: it continues all prompts, in large batches, through the project's decoder.

Each row keeps the very ids that were fed and generated, so that masks never have to be found in text. The module knows
no drafts; which prompts are left to answer, and the file of answers, is dialogues.py's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from deepspec import console
from deepspec.config import TargetConfig
from deepspec.data.chat import samples_from_answers
from deepspec.data.chat_template import ChatTemplate, answer_message
from deepspec.data.dialogues import Answer, AnswerSettings, Dialogue, provenance, record_answers
from deepspec.data.features import FeatureMemory, PassSink, TargetPass
from deepspec.data.prompt_file import Prompts
from deepspec.decoding.decoder import Captured, Request, generate
from deepspec.errors import DataError
from deepspec.targets.base import Target

__all__ = ["AnswerSettings", "answer_prompts"]

# Prompts are answered in portions of so many batches: all that is in memory, and at most what a killed job of several
# turns loses. While a portion runs out, places of the batch stay empty: for 1 to 4 percent of the time.
_PORTION = 64


def answer_prompts(
    target: Target,
    config: TargetConfig,
    conversations: Prompts,
    settings: AnswerSettings,
    output: Path,
    memory: PassSink | None = None,
    on_bad_row: Literal["stop", "skip"] = "stop",
) -> int:
    """Generate the assistant turns of every conversation that the output does not hold yet.

    Args:
        target: answers.
        config: chat options of the target, recorded with each row.
        conversations: prompts; assistant turns in them are replaced by the target's own.
        settings: how to answer.
        output: answers file (JSONL), appended to.
        memory: takes the target's states of what it answers, so that it never runs over the same text again.
        on_bad_row: whether a prompt that the target cannot be asked stops the run or is left out and counted.

    Returns:
        Number of rows in the output.

    Raises:
        DataError: the output was made under other settings, or a prompt is too long for the target or refused by its
            template.
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
    job = _Job(target, template, settings, kept, on_bad_row)
    count = record_answers(conversations, made_with, job.play, output)
    if job.left_out:
        console.info(f"{job.left_out:,} prompts were left out: too long for {target.name}, or refused by its template")
    return count


class _Job:
    """One run over the prompts.

    Attributes:
        left_out: prompts that the target cannot be asked.
    """

    def __init__(
        self,
        target: Target,
        template: ChatTemplate,
        settings: AnswerSettings,
        memory: PassSink,
        on_bad_row: Literal["stop", "skip"],
    ) -> None:
        self.left_out = 0
        self._target, self._template, self._settings = target, template, settings
        self._memory, self._on_bad_row = memory, on_bad_row
        self._marks = template.reasoning_marks()

    def play(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """Answer dialogues portion by portion, yielding each when it has ended."""
        while portion := list(itertools.islice(dialogues, _PORTION * self._settings.batch_size)):
            yield from self._play_portion(portion)

    def _play_portion(self, portion: list[Dialogue]) -> Iterator[Dialogue]:
        """Answer turn after turn: all first turns in one stream of batches, then all second ones, and so on."""
        target, settings = self._target, self._settings
        current = {dialogue.conversation.id: dialogue for dialogue in portion if dialogue.advance()}
        turn = 0
        while current:
            requests = []
            ended = 0
            for key, dialogue in current.items():
                ids = self._prompt(dialogue)
                if ids is not None:
                    requests.append(Request(f"{key}#{turn}", ids))
                elif turn:
                    ended += 1
                    dialogue.retract()
                    yield dialogue
                else:
                    self.left_out += 1
            if ended:
                console.info(
                    f"{ended:,} conversations end before turn {turn + 1}, which would not fit the "
                    f"{target.context_length:,} positions of {target.name} with max_new_tokens "
                    f"{settings.max_new_tokens:,}, or which its template refuses"
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
                capture=self._memory.is_on,
            ):
                key = finished.prompt_id.rsplit("#", 1)[0]
                dialogue = current[key]
                prompt_ids = prompts[finished.prompt_id]
                ids = list(finished.output_ids)
                message = answer_message(self._template, ids, target.stop_token_ids, self._marks)
                goes_on = dialogue.add(Answer(message, finished.finish_reason, prompt_ids, ids, len(ids)))
                if finished.captured is not None:
                    # None too where the conversation ends for want of room: its states come with no later turn.
                    following_ids = self._prompt(dialogue) if goes_on else None
                    _hand_over(self._memory, self._template, dialogue, finished.captured, following_ids)
                if goes_on:
                    following[key] = dialogue
                else:
                    yield dialogue
            current, turn = following, turn + 1

    def _prompt(self, dialogue: Dialogue) -> list[int] | None:
        """Ids of the next turn's prompt; None where the target cannot be asked and the run goes on without it.

        Raises:
            DataError: a first turn may not be left out. A later one never ends the run: hours of first turns would be
                lost, and a rerun would meet it again.
        """
        template = self._template._replace(tools=dialogue.conversation.tools)
        limit, name = self._target.context_length, self._target.name
        try:
            ids = template.tokenize(template.prompt(dialogue.messages))
            if len(ids) + self._settings.max_new_tokens < limit:
                return ids
            reason = (
                f"it has {len(ids):,} tokens, which with max_new_tokens {self._settings.max_new_tokens:,} do not fit "
                f"the {limit:,} positions of {name}."
            )
        except DataError as error:
            reason = str(error)
        if dialogue.answers or self._on_bad_row == "skip":
            return None
        raise DataError(
            f"prompt {dialogue.conversation.id!r} cannot be asked: {reason} Leave such prompts out with "
            "on_bad_row=skip, or shorten it; all answers so far are kept."
        )


def _hand_over(
    memory: PassSink, template: ChatTemplate, dialogue: Dialogue, captured: Captured, following_ids: list[int] | None
) -> None:
    """Keep the states of a sample that ends here; a turn that reads all of it brings its states along."""
    sample = samples_from_answers(
        dialogue.row({}),
        template.tokenizer,
        enable_thinking=template.enable_thinking,
        system_prompt=template.system_prompt,
    )[-1]
    if following_ids is not None and following_ids[: len(sample.input_ids)] == sample.input_ids:
        return
    one = TargetPass(*captured)
    # The logsumexps of earlier answers were not made in this turn.
    is_first = sum(sample.answer_mask) == len(dialogue.answers[-1].answer_ids or ())
    memory.keep(sample, one if is_first else one._replace(log_normaliser=None))
