"""From answers and timings to rows and details: what results.json holds follows from here and from nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deepspec.config import TaskConfig
from deepspec.decoding.rounds import Round
from deepspec.evaluation.answers import Answer
from deepspec.evaluation.details import Details, LengthRow, Measured, make_details
from deepspec.evaluation.latency import Latency
from deepspec.evaluation.preparation import NamedDraft, Prepared
from deepspec.evaluation.report import AUTOREGRESSIVE, ResultRow
from deepspec.evaluation.report_html import Example
from deepspec.evaluation.round_table import RoundTable, as_table
from deepspec.evaluation.statistics import summarise
from deepspec.targets.base import Target

_EXAMPLE_TOKENS = 120


class DraftOutcome(NamedTuple):
    """What one draft did on one task.

    Attributes:
        rounds: of every conversation: its turns are not independent, so it is one cluster of the bootstrap.
        domains: domain of each conversation.
        examples: an answer, coloured; draft and task are left empty.
    """

    rounds: RoundTable
    domains: dict[str, str]
    examples: list[Example]


class TaskOutcome(NamedTuple):
    """What every draft did on one task."""

    task: TaskConfig
    num_prompts: int
    drafts: dict[str, DraftOutcome]


def draft_outcome(answers: Sequence[Answer], task: TaskConfig, target: Target) -> DraftOutcome:
    """Keep of the answers what numbers and pages need; records of a whole suite would not fit into memory."""
    rounds: dict[str, list[Round]] = {}
    domains: dict[str, str] = {}
    for answer in answers:
        rounds.setdefault(answer.conversation, []).extend(answer.rounds)
        domains[answer.conversation] = answer.domain or task.domain
    return DraftOutcome(as_table(rounds), domains, [_example(answers[0], target)] if answers else [])


def make_results(
    part: Prepared, outcomes: Sequence[TaskOutcome], latencies: Mapping[str, Mapping[str, Latency]]
) -> tuple[list[ResultRow], Details]:
    """Compute every number.

    Args:
        part: the evaluation.
        outcomes: of every task.
        latencies: by task and `Way.key`.
    """
    temperature, seed = part.config.sampling.temperature, part.config.seed
    rows, measured = [], []
    timed: dict[tuple[str, str, int], LengthRow] = {}
    for outcome in outcomes:
        name = outcome.task.name
        timings = latencies.get(name, {})
        rows.append(_plain_row(outcome, temperature, timings.get(AUTOREGRESSIVE)))
        for draft in part.drafts:
            found, latency = outcome.drafts[draft.name], timings.get(draft.name)
            rows.append(_draft_row(outcome.task, temperature, draft, found, seed, latency))
            block = draft.model.num_draft_tokens
            speedup = None if latency is None else latency.speedup
            measured.append(Measured(name, draft.name, block, found.rounds, found.domains, speedup))
            for length in part.config.latency_lengths:
                shorter = timings.get(f"{draft.name}:{length}")
                if shorter is not None:
                    timed[name, draft.name, length] = _length_row(name, draft.name, temperature, length, shorter)
    is_full = part.config.schedule.name == "full"
    return rows, make_details(measured, temperature, seed, timed, is_full=is_full)


def _plain_row(outcome: TaskOutcome, temperature: float, latency: Latency | None) -> ResultRow:
    return ResultRow(
        task=outcome.task.name,
        draft=AUTOREGRESSIVE,
        algorithm=AUTOREGRESSIVE,
        domain=outcome.task.domain,
        temperature=temperature,
        num_prompts=outcome.num_prompts if latency is None else latency.num_prompts,
        rounds=0 if latency is None else latency.rounds,
        acceptance_length=1.0,
        acceptance_length_ci95=None,
        survival=(),
        conditional_acceptance=(),
        acceptance_rate=None,
        **({} if latency is None else latency.columns()),
    )


def _draft_row(
    task: TaskConfig, temperature: float, draft: NamedDraft, found: DraftOutcome, seed: int, latency: Latency | None
) -> ResultRow:
    summary = summarise(found.rounds, draft.model.num_draft_tokens, seed)
    return ResultRow(
        task=task.name,
        draft=draft.name,
        algorithm=draft.algorithm,
        domain=task.domain,
        temperature=temperature,
        num_prompts=summary.num_prompts,
        rounds=summary.rounds,
        acceptance_length=summary.acceptance_length,
        acceptance_length_ci95=summary.acceptance_length_ci95,
        survival=tuple(summary.survival),
        conditional_acceptance=tuple(summary.conditional_acceptance),
        acceptance_rate=summary.acceptance_rate,
        verified_yield=summary.verified_yield,
        **({} if latency is None else latency.columns()),
    )


def _length_row(task: str, draft: str, temperature: float, length: int, latency: Latency) -> LengthRow:
    return LengthRow(
        task=task,
        draft=draft,
        temperature=temperature,
        length=length,
        acceptance_length=None,
        measured_acceptance_length=latency.acceptance_length,
        seconds_draft_per_round=latency.seconds_draft_per_round,
        seconds_verify_per_round=latency.seconds_verify_per_round,
        seconds_per_token=latency.seconds_per_token,
        speedup_over_autoregressive=latency.speedup,
    )


def _example(answer: Answer, target: Target) -> Example:
    """An answer whose tokens are coloured by where they came from; refused ones stand before what replaced them."""
    tokens = iter(answer.output_ids)
    pieces = [(next(tokens), "plain")]
    for one in answer.rounds:
        pieces += [(token, "accepted") for token in itertools.islice(tokens, one.accepted)]
        if one.rejected is not None:
            pieces.append((one.rejected, "rejected"))
        pieces += [(token, "bonus") for token in itertools.islice(tokens, one.emitted - one.accepted)]
    segments = [(str(target.tokenizer.decode([token])), kind) for token, kind in pieces[:_EXAMPLE_TOKENS]]
    prompt = str(target.tokenizer.decode(answer.prompt_ids, skip_special_tokens=True))
    return Example("", prompt, segments)
