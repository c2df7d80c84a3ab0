"""One row of an answers file and the samples that a training reads of it: the same in every process that does it.

Knows the row at hand alone: whether two rows share an id, and what a broken one costs, is the business of samples.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepspec.data.chat import TokenSample, samples_from_answers
from deepspec.data.packed import PackedSamples
from deepspec.data.prompts import Row
from deepspec.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deepspec.config import DataConfig


class RowSamples(NamedTuple):
    """What a row gives.

    Attributes:
        id: of the row.
        kept: samples that fit the limits.
        truncated: samples, kept or not, that were longer than the limit.
        too_short: samples left out because too few supervised tokens remained.
        answer_tokens: supervised tokens in the samples kept.
    """

    id: str
    kept: PackedSamples
    truncated: int
    too_short: int
    answer_tokens: int


class OtherTargetError(DataError):
    """All rows of a file come from one target: skipping them one by one would leave nothing."""


class SampleMaker(NamedTuple):
    """How the rows of a file become samples.

    Attributes:
        path: the file, named in errors.
        tokenizer: the target's tokenizer with its chat template.
        data: limits.
        enable_thinking: as in `render_prompt`.
        system_prompt: as in `render_prompt`.
        vocab_size: rows of the target's embedding; larger ids make a row broken. None: not checked.
        target_name: who must have given the answers. None: not checked.
    """

    path: Path
    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    enable_thinking: bool
    system_prompt: str | None
    vocab_size: int | None
    target_name: str | None

    def samples(self, row: Row) -> RowSamples:
        """The samples of a row.

        Raises:
            OtherTargetError: another target gave the answers.
            DataError: the row is broken.
        """
        if row.problem is not None or not isinstance(row.value, Mapping):
            raise DataError(f"{row.problem or 'the row is not an object'}.")
        self._check_target(row.value)
        samples = samples_from_answers(
            row.value,
            self.tokenizer,
            enable_thinking=self.enable_thinking,
            system_prompt=self.system_prompt,
            last_turn_only=self.data.last_turn_only,
        )
        self._check_vocabulary(samples)
        kept = PackedSamples()
        truncated = too_short = answer_tokens = 0
        for sample in samples:
            fitting = fit_sample(sample, self.data.max_length, self.data.min_answer_tokens)
            truncated += len(sample.input_ids) > self.data.max_length
            if fitting is None:
                too_short += 1
            else:
                kept.append(fitting)
                answer_tokens += sum(fitting.answer_mask)
        return RowSamples(samples[0].id, kept, truncated, too_short, answer_tokens)

    def outcome(self, row: Row) -> RowSamples | str:
        """The samples of a row, or why it is broken.

        Raises:
            OtherTargetError: another target gave the answers.
        """
        try:
            return self.samples(row)
        except OtherTargetError:
            raise
        except DataError as error:
            return str(error)

    def _check_target(self, row: Mapping[str, object]) -> None:
        found = row.get("target")
        if self.target_name is not None and found is not None and found != self.target_name:
            raise OtherTargetError(
                f"{self.path} holds answers of target {found!r}, but this run trains a draft for "
                f"{self.target_name!r}. A draft must learn from its own target: make answers with `deepspec data "
                "regenerate`, or, where both names mean the same model, set data.allow_other_target=true."
            )

    def _check_vocabulary(self, samples: Sequence[TokenSample]) -> None:
        largest = max(max(sample.input_ids, default=0) for sample in samples)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(
                f"token id {largest} is outside the target's {self.vocab_size} embedding rows: another tokenizer's "
                "answers?"
            )


def fit_sample(sample: TokenSample, max_length: int, min_answer_tokens: int) -> TokenSample | None:
    """Cut a sample to `max_length` tokens; None if fewer than `min_answer_tokens` (or 1) supervised ones remain."""
    mask = sample.answer_mask[:max_length]
    if sum(mask) < max(1, min_answer_tokens):
        return None
    return TokenSample(sample.id, sample.input_ids[:max_length], mask)


def needs_template(row: Row) -> bool:
    """Whether a row has to be rendered and tokenised, which takes a hundred times as long as reading ids."""
    value = row.value
    return isinstance(value, Mapping) and (value.get("answer_ids") is None or value.get("prompt_ids") is None)
