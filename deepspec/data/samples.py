"""From an answers file to the samples that a training reads: limits, broken rows, and whose answers they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepspec.data.chat import TokenSample, samples_from_answers
from deepspec.data.packed import PackedSamples
from deepspec.data.prompts import BLANK, read_rows
from deepspec.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deepspec.config import DataConfig, TrainConfig
    from deepspec.targets.base import Target


class SampleCounts(NamedTuple):
    """What became of an answers file.

    Attributes:
        rows: rows of the file, blank lines aside.
        bad_rows: rows left out because they are broken.
        samples: samples kept.
        truncated: samples, kept or not, that were longer than the limit.
        too_short: samples left out because too few supervised tokens remained.
        answer_tokens: supervised tokens in the samples kept.
    """

    rows: int
    bad_rows: int
    samples: int
    truncated: int
    too_short: int
    answer_tokens: int


def fit_sample(sample: TokenSample, max_length: int, min_answer_tokens: int) -> TokenSample | None:
    """Cut a sample to `max_length` tokens; None if fewer than `min_answer_tokens` (or 1) supervised ones remain."""
    mask = sample.answer_mask[:max_length]
    if sum(mask) < max(1, min_answer_tokens):
        return None
    return TokenSample(sample.id, sample.input_ids[:max_length], mask)


def read_run_samples(config: TrainConfig, target: Target) -> tuple[PackedSamples, SampleCounts]:
    """Samples of a training run's answers, as `read_token_samples` makes and refuses them."""
    return read_token_samples(
        config.data.answers,
        target.tokenizer,
        config.data,
        enable_thinking=config.target.enable_thinking,
        system_prompt=config.target.system_prompt,
        vocab_size=target.vocab_size,
        target_name=config.target.name_or_path,
    )


def read_token_samples(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    enable_thinking: bool,
    system_prompt: str | None,
    vocab_size: int | None = None,
    target_name: str | None = None,
) -> tuple[PackedSamples, SampleCounts]:
    """Read an answers file into samples that fit `data.max_length` and hold `data.min_answer_tokens`.

    Args:
        path: a file as written by `deepspec data regenerate`, or one of conversations with assistant texts.
        tokenizer: the target's tokenizer with its chat template.
        data: limits, and whether a broken row stops the run or is left out.
        enable_thinking: as in `render_prompt`.
        system_prompt: as in `render_prompt`.
        vocab_size: rows of the target's embedding; larger ids make a row broken. None: not checked.
        target_name: who must have given the answers, unless `data.allow_other_target`. None: not checked.

    Raises:
        DataError: the file is missing, another target gave the answers, a row is broken and may not be skipped, or no
            sample remains.
    """
    kept = PackedSamples()
    number_of_id: dict[str, int] = {}
    first_error: DataError | None = None
    rows = bad_rows = truncated = too_short = answer_tokens = 0
    unit = "line" if Path(path).suffix == ".jsonl" else "row"
    for row in read_rows(path):
        if row.problem == BLANK:
            continue
        rows += 1
        try:
            if row.problem is not None or not isinstance(row.value, Mapping):
                raise DataError(f"{row.problem or 'the row is not an object'}.")
            _check_target(row.value, None if data.allow_other_target else target_name, path)
            samples = samples_from_answers(
                row.value,
                tokenizer,
                enable_thinking=enable_thinking,
                system_prompt=system_prompt,
                last_turn_only=data.last_turn_only,
            )
            _check_vocabulary(samples, vocab_size)
            row_id = samples[0].id
            earlier = number_of_id.setdefault(row_id, row.number)
            if earlier != row.number:
                raise DataError(f"id {row_id!r} is already used by {unit} {earlier}.")
        except _OtherTargetError:
            raise
        except DataError as error:
            bad_rows += 1
            first_error = first_error or DataError(f"{path} {unit} {row.number}: {error}")
            continue
        for sample in samples:
            fitting = fit_sample(sample, data.max_length, data.min_answer_tokens)
            truncated += len(sample.input_ids) > data.max_length
            if fitting is None:
                too_short += 1
            else:
                kept.append(fitting)
                answer_tokens += sum(fitting.answer_mask)
    if first_error is not None and data.on_bad_row == "stop":
        raise DataError(
            f"{first_error} {bad_rows:,} of {rows:,} rows are broken; skip them with data.on_bad_row=skip "
            "(on_bad_row=skip for `deepspec data inspect`)."
        )
    if not kept:
        raise DataError(
            f"{path}: no sample is left of {rows:,} rows ({bad_rows:,} broken; {too_short:,} with fewer than "
            f"data.min_answer_tokens={data.min_answer_tokens} answer tokens in data.max_length={data.max_length})."
            + (f" First broken row: {first_error}" if first_error else "")
        )
    return kept, SampleCounts(rows, bad_rows, len(kept), truncated, too_short, answer_tokens)


class _OtherTargetError(DataError):
    """All rows of a file come from one target: skipping them one by one would leave nothing."""


def _check_target(row: Mapping[str, object], target_name: str | None, path: str | Path) -> None:
    found = row.get("target")
    if target_name is not None and found is not None and found != target_name:
        raise _OtherTargetError(
            f"{path} holds answers of target {found!r}, but this run trains a draft for {target_name!r}. A draft must "
            "learn from its own target: make answers with `deepspec data regenerate`, or, where both names mean the "
            "same model, set data.allow_other_target=true."
        )


def _check_vocabulary(samples: Sequence[TokenSample], vocab_size: int | None) -> None:
    largest = max(max(sample.input_ids, default=0) for sample in samples)
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            f"token id {largest} is outside the target's {vocab_size} embedding rows: another tokenizer's answers?"
        )


class AnswerRuns:
    """The generated tokens alone, one list per answer: tokens that are neighbours in a list were so in the text.

    They can be gone through more than once, and are made anew each time.
    """

    def __init__(self, samples: Sequence[TokenSample]) -> None:
        """Take the samples whose answers these are."""
        self._samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        for sample in self._samples:
            groups = itertools.groupby(zip(sample.input_ids, sample.answer_mask, strict=True), key=lambda pair: pair[1])
            yield from ([token for token, _ in group] for is_answer, group in groups if is_answer)
