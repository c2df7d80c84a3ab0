"""What results.json says beside its rows: means over domains, paired differences, tau by context and by block length.

Everything follows from round tables and rows; the module reads and writes no file. Letters: K draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from deepspec.evaluation.round_table import RoundTable, pooled, split_by_context, split_by_domain
from deepspec.evaluation.statistics import (
    Interval,
    PairedDifference,
    acceptance_length,
    acceptance_length_by_length,
    acceptance_length_ci95,
    conditional_acceptance,
    conditional_acceptance_ci95,
    macro_acceptance_length,
    macro_average,
    macro_paired_difference,
)

ALL_DOMAINS = "all"
_FEWEST_PROMPTS_FOR_P = 10  # resampling a handful of prompts says nothing about others


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DomainRow(_Part):
    """One draft on one domain at one temperature; every task of the domain weighs the same.

    Attributes:
        domain: `all` is the mean over domains, each weighing the same.
        draft: name of the draft.
        temperature: of target and draft.
        tasks: what it is the mean of.
        num_prompts: over all tasks.
        rounds: over all tasks.
        acceptance_length: mean tau.
        acceptance_length_ci95: bootstrap over the prompts of each task.
        conditional_acceptance: K values over the rounds of all tasks together.
        conditional_acceptance_ci95: their intervals.
        speedup_over_autoregressive: mean over the tasks that were timed; `all` over domains that have such tasks.
    """

    domain: str
    draft: str
    temperature: float
    tasks: tuple[str, ...]
    num_prompts: int
    rounds: int
    acceptance_length: float | None
    acceptance_length_ci95: Interval | None
    conditional_acceptance: tuple[float | None, ...]
    conditional_acceptance_ci95: tuple[Interval | None, ...]
    speedup_over_autoregressive: float | None


class PairRow(_Part):
    """Tau of a draft minus that of another on the same prompts.

    Attributes:
        task: name of the task; None for a mean over all domains.
        draft: the first.
        other: the one that is subtracted.
        temperature: of both.
        difference: in tokens a round.
        ci95: bootstrap interval over prompts, the same ones drawn for both.
        p_value: two-sided; None for fewer than ten prompts.
        num_prompts: that both decoded.
    """

    task: str | None
    draft: str
    other: str
    temperature: float
    difference: float
    ci95: Interval | None
    p_value: float | None
    num_prompts: int


class ContextRow(_Part):
    """Tau of a draft on a task where the context at the anchor has low <= tokens < high; `high` None is open."""

    task: str
    draft: str
    temperature: float
    low: int
    high: int | None
    num_prompts: int
    rounds: int
    acceptance_length: float
    acceptance_length_ci95: Interval | None


class LengthRow(_Part):
    """One draft on one task with at most so many tokens of each block verified.

    Attributes:
        task: name of the task.
        draft: name of the draft.
        temperature: of target and draft.
        length: tokens verified, 1..K.
        acceptance_length: what tau would be, from the rounds of whole blocks; None where a schedule cut them.
        measured_acceptance_length: tau of a decoding with blocks of this length, on the prompts that were timed.
        seconds_draft_per_round: of that decoding.
        seconds_verify_per_round: of that decoding.
        seconds_per_token: of that decoding with the timers off.
        speedup_over_autoregressive: of that decoding.
    """

    task: str
    draft: str
    temperature: float
    length: int
    acceptance_length: float | None
    measured_acceptance_length: float | None = None
    seconds_draft_per_round: float | None = None
    seconds_verify_per_round: float | None = None
    seconds_per_token: float | None = None
    speedup_over_autoregressive: float | None = None


class LoadRow(_Part):
    """One schedule with so many requests in flight; medians over repeats with prompts of their own.

    Attributes:
        draft: name of the draft.
        temperature: of target and draft.
        requests: in flight.
        schedule: how blocks were cut; `autoregressive` decodes without the draft.
        throughput: tokens per second of all requests, prefill excluded; None where it was only simulated.
        throughput_ci95: interval of the median.
        simulated_throughput: what the simulator predicts for the same prompts, or for recorded ones.
        simulated_throughput_ci95: interval of the median.
        off: predicted over measured tokens per second of each repeat, less one; None where it was only simulated.
        off_ci95: interval of the median.
        pace: how many times as long as in the profile its own rounds took meanwhile; predictions count it. None where
            nothing was decoded, or no round was profiled.
        budget: draft tokens verified per request and round.
    """

    draft: str
    temperature: float
    requests: int
    schedule: str
    throughput: float | None
    throughput_ci95: Interval | None
    simulated_throughput: float
    simulated_throughput_ci95: Interval | None
    off: float | None = None
    off_ci95: Interval | None = None
    pace: float | None = None
    budget: float


class GainRow(_Part):
    """Throughput of the schedule `throughput` over that of another; medians of the ratios of each repeat.

    Attributes:
        draft: name of the draft.
        temperature: of target and draft.
        requests: in flight.
        over: the other schedule.
        gain: measured; None where it was only simulated.
        gain_ci95: interval of the median.
        simulated_gain: simulated.
        simulated_gain_ci95: interval of the median.
    """

    draft: str
    temperature: float
    requests: int
    over: str
    gain: float | None
    gain_ci95: Interval | None
    simulated_gain: float
    simulated_gain_ci95: Interval | None


class Details(BaseModel):
    """Everything beside the rows; lists are empty where there is nothing to say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    domains: tuple[DomainRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    contexts: tuple[ContextRow, ...] = ()
    lengths: tuple[LengthRow, ...] = ()
    loads: tuple[LoadRow, ...] = ()
    gains: tuple[GainRow, ...] = ()

    def joined(self, other: Details) -> Details:
        """Both together."""
        return Details(**{field: getattr(self, field) + getattr(other, field) for field in Details.model_fields})

    def renamed(self, name: Callable[[str], str]) -> Details:
        """The same with other names for drafts."""

        def new(row: Any) -> Any:
            fields = ("draft", "other") if isinstance(row, PairRow) else ("draft",)
            return row.model_copy(update={field: name(getattr(row, field)) for field in fields})

        return Details(**{field: tuple(map(new, getattr(self, field))) for field in Details.model_fields})


class Measured(NamedTuple):
    """One draft on one task.

    Attributes:
        task: name of the task.
        draft: name of the draft.
        num_draft_tokens: K.
        rounds: its rounds; conversations are the prompts.
        domains: domain of each conversation.
        speedup: over plain decoding, where it was timed.
    """

    task: str
    draft: str
    num_draft_tokens: int
    rounds: RoundTable
    domains: Mapping[str, str]
    speedup: float | None


def make_details(
    measured: Sequence[Measured],
    temperature: float,
    seed: int,
    timed: Mapping[tuple[str, str, int], LengthRow],
    *,
    is_full: bool = True,
) -> Details:
    """Compute everything beside the rows.

    Args:
        measured: every draft on every task, at one temperature.
        temperature: that one.
        seed: of the bootstrap.
        timed: what was timed with shorter blocks, by (task, draft, length).
        is_full: whether blocks were verified whole; where they were not, they say nothing of other lengths.
    """
    contexts, lengths = [], []
    for one in measured:
        contexts += _context_rows(one, temperature, seed)
        if not is_full:
            lengths += [row for (task, draft, _), row in timed.items() if (task, draft) == (one.task, one.draft)]
            continue
        taus = acceptance_length_by_length(one.rounds, one.num_draft_tokens)
        for length, tau in enumerate(taus, start=1):
            row = timed.get((one.task, one.draft, length)) or LengthRow(
                task=one.task, draft=one.draft, temperature=temperature, length=length, acceptance_length=tau
            )
            lengths.append(row.model_copy(update={"acceptance_length": tau}))
    return Details(
        domains=tuple(_domain_rows(measured, temperature, seed)),
        pairs=tuple(_pair_rows(measured, temperature, seed)),
        contexts=tuple(contexts),
        lengths=tuple(lengths),
    )


def _context_rows(one: Measured, temperature: float, seed: int) -> list[ContextRow]:
    rows = []
    for (low, high), part in split_by_context(one.rounds).items():
        tau = acceptance_length(part)
        assert tau is not None, "parts have rounds"
        rows.append(
            ContextRow(
                task=one.task,
                draft=one.draft,
                temperature=temperature,
                low=low,
                high=high,
                num_prompts=len(part.prompts),
                rounds=len(part.prompt),
                acceptance_length=tau,
                acceptance_length_ci95=acceptance_length_ci95(part, seed),
            )
        )
    return rows


def _by_domain(members: Sequence[Measured]) -> dict[str, dict[str, RoundTable]]:
    """Rounds by domain and task; a task whose prompts have several domains is part of each."""
    parts: dict[str, dict[str, RoundTable]] = {}
    for one in members:
        for domain, table in split_by_domain(one.rounds, one.domains.__getitem__).items():
            parts.setdefault(domain or one.task, {})[one.task] = table
    return dict(sorted(parts.items()))


def _domain_rows(measured: Sequence[Measured], temperature: float, seed: int) -> list[DomainRow]:
    rows = []
    for draft in dict.fromkeys(one.draft for one in measured):
        members = [one for one in measured if one.draft == draft]
        domains = _by_domain(members)
        groups = dict(domains)
        if len(domains) > 1:
            groups[ALL_DOMAINS] = {
                f"{domain}/{task}": part for domain in domains for task, part in domains[domain].items()
            }
        speedups = {
            domain: macro_average(one.speedup for one in members if one.task in parts)
            for domain, parts in domains.items()
        }
        speedups.setdefault(ALL_DOMAINS, macro_average(speedups.values()))
        for domain, parts in groups.items():
            weights = None if domain != ALL_DOMAINS else _weights(domains)
            mean, interval = macro_acceptance_length(list(parts.values()), seed, weights=weights)
            everything = pooled(parts)
            block = max(one.num_draft_tokens for one in members)
            rows.append(
                DomainRow(
                    domain=domain,
                    draft=draft,
                    temperature=temperature,
                    tasks=tuple(parts),
                    num_prompts=len(everything.prompts),
                    rounds=len(everything.prompt),
                    acceptance_length=mean,
                    acceptance_length_ci95=interval,
                    conditional_acceptance=tuple(conditional_acceptance(everything, block)),
                    conditional_acceptance_ci95=tuple(conditional_acceptance_ci95(everything, block, seed)),
                    speedup_over_autoregressive=speedups[domain],
                )
            )
    return rows


def _weights(domains: Mapping[str, Mapping[str, RoundTable]]) -> list[float]:
    """Of each task of each domain, so that domains weigh the same."""
    return [1.0 / len(parts) for parts in domains.values() for _ in parts]


def _pair_rows(measured: Sequence[Measured], temperature: float, seed: int) -> list[PairRow]:
    rows = []
    tasks = dict.fromkeys(one.task for one in measured)
    by_key = {(one.task, one.draft): one for one in measured}
    for first, second in combinations(dict.fromkeys(one.draft for one in measured), 2):
        everywhere: dict[str, dict[str, tuple[RoundTable, RoundTable]]] = {}
        for task in tasks:
            a, b = by_key.get((task, first)), by_key.get((task, second))
            if a is None or b is None:
                continue
            common = set(a.rounds.prompts) & set(b.rounds.prompts)
            pair = a.rounds.of_prompts(common), b.rounds.of_prompts(common)
            if _can_be_compared(pair):
                rows.append(_pair_row(task, first, second, temperature, macro_paired_difference([pair], seed)))
            splits = [split_by_domain(table, a.domains.__getitem__) for table in pair]
            for domain in splits[0]:
                part = splits[0][domain], splits[1][domain]
                if _can_be_compared(part):
                    everywhere.setdefault(domain or task, {})[task] = part
        if len(everywhere) > 1 or any(len(parts) > 1 for parts in everywhere.values()):
            pairs = [pair for parts in everywhere.values() for pair in parts.values()]
            weights = [1.0 / len(parts) for parts in everywhere.values() for _ in parts]
            found = macro_paired_difference(pairs, seed, weights=weights)
            rows.append(_pair_row(None, first, second, temperature, found))
    return rows


def _can_be_compared(pair: tuple[RoundTable, RoundTable]) -> bool:
    return acceptance_length(pair[0]) is not None and acceptance_length(pair[1]) is not None


def _pair_row(task: str | None, first: str, second: str, temperature: float, found: PairedDifference) -> PairRow:
    return PairRow(
        task=task,
        draft=first,
        other=second,
        temperature=temperature,
        difference=found.difference,
        ci95=found.ci95,
        p_value=found.p_value if found.num_prompts >= _FEWEST_PROMPTS_FOR_P else None,
        num_prompts=found.num_prompts,
    )
