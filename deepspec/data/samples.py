"""From an answers file to the samples that a training reads: limits, broken rows, and whose answers they are."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec import console
from deepspec.data.answer_rows import SampleMaker
from deepspec.data.chat import TokenSample
from deepspec.data.kept_samples import Made, SampleCounts, kept_or_made
from deepspec.data.packed import PackedSamples
from deepspec.data.prompt_file import unchanged
from deepspec.data.row_workers import row_outcomes
from deepspec.errors import DataError
from deepspec.runtime import available_cpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deepspec.config import DataConfig, TrainConfig
    from deepspec.targets.base import Target

# More processes would wait for the one that reads the file, and each takes some hundred megabytes.
_MOST_WORKERS = 16


def read_run_samples(config: TrainConfig, target: Target) -> Made:
    """Samples of a training run's answers, as `read_token_samples` makes and refuses them; kept for the next start."""
    return read_token_samples(
        config.data.answers,
        target.tokenizer,
        config.data,
        enable_thinking=config.target.enable_thinking,
        system_prompt=config.target.system_prompt,
        vocab_size=target.vocab_size,
        target_name=config.target.name_or_path,
        is_kept=True,
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
    is_kept: bool = False,
) -> Made:
    """Read an answers file into samples that fit `data.max_length` and hold `data.min_answer_tokens`.

    Args:
        path: a file as written by `deepspec data regenerate`, or one of conversations with assistant texts.
        tokenizer: the target's tokenizer with its chat template.
        data: limits, whether a broken row stops the run or is left out, and how many processes may tokenise.
        enable_thinking: as in `render_prompt`.
        system_prompt: as in `render_prompt`.
        vocab_size: rows of the target's embedding; larger ids make a row broken. None: not checked.
        target_name: who must have given the answers, unless `data.allow_other_target`. None: not checked.
        is_kept: keep the samples of a large file on disk, and read them there the next time.

    Raises:
        DataError: the file is missing, another target gave the answers, a row is broken and may not be skipped, no
            sample remains, or a process that tokenises died.
    """
    named = None if data.allow_other_target else target_name
    maker = SampleMaker(Path(path), tokenizer, data, enable_thinking, system_prompt, vocab_size, named)
    with unchanged(maker.path):
        if is_kept:
            return kept_or_made(maker, lambda sharers: _made(maker, sharers))
        return _made(maker, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _made(maker: SampleMaker, sharers: int) -> Made:
    """Make the samples, while so many processes of this machine make theirs."""
    path, data = maker.path, maker.data
    workers = data.workers or min(_MOST_WORKERS, max(1, available_cpus() // sharers))
    kept = PackedSamples()
    number_of_id: dict[str, int] = {}
    first_problem: str | None = None
    rows = bad_rows = truncated = too_short = answer_tokens = 0
    unit = "line" if path.suffix == ".jsonl" else "row"
    with console.progress("reading answers", total=None) as bar:
        for number, outcome in row_outcomes(maker, workers):
            rows += 1
            bar.advance(1)
            problem = outcome if isinstance(outcome, str) else None
            if not isinstance(outcome, str):
                earlier = number_of_id.setdefault(outcome.id, number)
                if earlier == number:
                    kept.extend(outcome.kept)
                    truncated += outcome.truncated
                    too_short += outcome.too_short
                    answer_tokens += outcome.answer_tokens
                    continue
                problem = f"id {outcome.id!r} is already used by {unit} {earlier}."
            bad_rows += 1
            first_problem = first_problem or f"{path} {unit} {number}: {problem}"
    if first_problem is not None and data.on_bad_row == "stop":
        raise DataError(
            f"{first_problem} {bad_rows:,} of {rows:,} rows are broken; skip them with data.on_bad_row=skip "
            "(on_bad_row=skip for `deepspec data inspect`)."
        )
    if not kept:
        raise DataError(
            f"{path}: no sample is left of {rows:,} rows ({bad_rows:,} broken; {too_short:,} with fewer than "
            f"data.min_answer_tokens={data.min_answer_tokens} answer tokens in data.max_length={data.max_length})."
            + (f" First broken row: {first_problem}" if first_problem else "")
        )
    return kept, SampleCounts(rows, bad_rows, len(kept), truncated, too_short, answer_tokens)


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
