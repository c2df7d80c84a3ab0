"""Schedules with several requests in flight: the real decoder and the simulator play the same prompts.

All ways answer the same prompts in turn, round by round, so that a machine that slows down slows all of them alike; a
round of the profile takes turns with them, which says how fast the machine is meanwhile. The simulator then replays the
rounds of full verification under each. Every repeat has other prompts and is one line of a journal, from which all
numbers follow. The module shows nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.config_eval import LoadConfig
from deepspec.data.journal import open_journal
from deepspec.decoding.decoder import Finished, Request, generate_by_round
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import Confidence
from deepspec.evaluation.details import GainRow, LoadRow
from deepspec.evaluation.statistics import median_ci95
from deepspec.scheduling.cost import CostCurve
from deepspec.scheduling.records import Recorded
from deepspec.scheduling.rehearsal import probe
from deepspec.scheduling.serving import SIMULATOR_VERSION, Conversation, Load, Outcome, Way, conversations_of, simulate
from deepspec.scheduling.simulate import WaySettings, make_way, resampled
from deepspec.targets.base import Target

_WARM_UP_TOKENS = 8
# Acceptance is luck: a repeat of few requests in flight has several batches of prompts, one after the other.
_FEWEST_PROMPTS = 4
# The profile's round is played once in so many turns.
_TURNS_A_PROBE = 2
_SIMULATED_ROUNDS = 200  # of a run without a decoder


class Setup(NamedTuple):
    """What is compared, on what.

    Attributes:
        target: the target.
        draft: the draft.
        name: of the draft.
        weights: its `weights_id`.
        curve: cost of a step of the target and of the draft.
        confidence: where c_k comes from.
        config: loads, schedules, repeats.
        sampling: warpers.
        seed: of all draws.
        machine: what timings must have been measured on to be reused.
    """

    target: Target
    draft: DraftModel
    name: str
    weights: str
    curve: CostCurve
    confidence: Confidence
    config: LoadConfig
    sampling: Sampling
    seed: int
    machine: str

    @property
    def identity(self) -> str:
        """Changes whenever anything does that a line of the journal depends on."""
        config = self.config
        parts = [SIMULATOR_VERSION, self.machine, self.weights, self.seed, repr(self.curve), repr(self.confidence)]
        parts += [config.max_new_tokens, config.threshold, config.lookup]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Played(NamedTuple):
    """One way in one repeat.

    Attributes:
        tokens: emitted by the decoder's rounds, all requests together; None where it was only simulated.
        seconds: these rounds took, prefill excluded; None likewise.
        budget: draft tokens verified per request and round.
        simulated: tokens per second that the simulator predicts on the machine as it was profiled.
    """

    tokens: int | None
    seconds: float | None
    budget: float
    simulated: float

    @property
    def measured(self) -> float | None:
        """Tokens per second of the decoder."""
        return None if self.tokens is None or self.seconds is None else self.tokens / self.seconds


class Repeat(NamedTuple):
    """All ways on the same prompts.

    Attributes:
        requests: in flight.
        ways: all ways.
        pace: how many times as long as in the profile its rounds took, played in turn with the ways, stalls included;
            None where nothing was decoded or no round was profiled.
    """

    requests: int
    ways: dict[str, Played]
    pace: float | None = None

    def predicted(self, name: str) -> float:
        """Tokens per second that the simulator predicts of a way, on the machine as it was meanwhile."""
        return self.ways[name].simulated / (self.pace or 1.0)

    def off(self, name: str) -> float | None:
        """Predicted over measured tokens per second, less one; None where a way was only simulated."""
        measured = self.ways[name].measured
        return None if measured is None else self.predicted(name) / measured - 1


def measure_loads(
    setup: Setup, requests: Sequence[Request], conversations: Sequence[Conversation], path: Path
) -> list[Repeat]:
    """Decode and simulate every way under every load, repeat by repeat; what the journal holds is not played again.

    Args:
        setup: what is compared.
        requests: prompts, at least as many as the largest batch.
        conversations: recorded under full verification: they choose the fixed window and feed what is only simulated.
        path: the journal.

    Raises:
        DataError: the journal cannot be written, or is damaged.
    """
    config = setup.config
    wanted = [(load, repeat) for repeat in range(config.repeats) for load in (*config.batches, *config.simulated)]
    with open_journal(path) as journal:
        known = _known(journal.rows, setup)
        left = [key for key in wanted if key not in known]
        if any(load in config.batches for load, _ in left):
            _warm_up(setup, requests, conversations)
        with console.progress("requests in flight", total=len(wanted), done=len(wanted) - len(left)) as bar:
            for load, repeat in left:
                ways = _ways(setup, conversations, load)
                if load in config.batches:
                    number = load * -(-_FEWEST_PROMPTS // load)
                    found = _measured(setup, ways, chosen(requests, number, repeat, setup.seed), load)
                else:
                    found = _simulated(setup, ways, resampled(conversations, setup.seed + repeat), load, repeat)
                row = {"requests": load, "repeat": repeat, "identity": setup.identity, "pace": found.pace}
                journal.append({**row, "ways": {name: one._asdict() for name, one in found.ways.items()}})
                known[load, repeat] = found
                bar.advance(1)
    return [known[key] for key in wanted]


def _known(rows: Sequence[Mapping[str, Any]], setup: Setup) -> dict[tuple[int, int], Repeat]:
    found = {}
    for row in rows:
        ways = row.get("ways", {})
        is_measured = row.get("requests") not in setup.config.batches or all(
            ways.get(name, {}).get("seconds") is not None for name in setup.config.schedules
        )
        if row.get("identity") == setup.identity and set(setup.config.schedules) <= set(ways) and is_measured:
            kept: dict[str, Played] = {name: Played(**ways[name]) for name in setup.config.schedules}
            found[row["requests"], row["repeat"]] = Repeat(row["requests"], kept, row["pace"])
    return found


def chosen(requests: Sequence[Request], number: int, repeat: int, seed: int) -> list[Request]:
    """Prompts of one repeat: in an order drawn for this load, repeats share none as long as there are enough."""
    order = np.random.default_rng([seed, number]).permutation(len(requests)).tolist()
    return [requests[order[(repeat * number + index) % len(order)]] for index in range(number)]


def _ways(setup: Setup, conversations: Sequence[Conversation], requests: int) -> dict[str, Way]:
    settings = WaySettings(setup.config.threshold, setup.config.lookup)
    return {
        name: make_way(name, settings, setup.curve, setup.confidence, conversations, requests)
        for name in setup.config.schedules
    }


def _warm_up(setup: Setup, requests: Sequence[Request], conversations: Sequence[Conversation]) -> None:
    largest = max(setup.config.batches)
    short = setup._replace(config=setup.config.model_copy(update={"max_new_tokens": _WARM_UP_TOKENS}))
    play_in_turn(short, _ways(short, conversations, largest), chosen(requests, largest, 0, setup.seed))


def play_in_turn(
    setup: Setup, ways: Mapping[str, Way], requests: Sequence[Request], between: Callable[[], object] = lambda: None
) -> dict[str, tuple[list[Finished], float]]:
    """Answers of every way, and the seconds of its rounds; the ways take turns round by round, in changing order.

    Args:
        setup: what is compared.
        ways: all ways.
        requests: all are in flight at once.
        between: called after every turn.
    """
    turns = {
        name: generate_by_round(
            setup.target,
            None if way.schedule is None else setup.draft,
            requests,
            setup.sampling,
            max_new_tokens=setup.config.max_new_tokens,
            batch_size=len(requests),
            seed=setup.seed,
            schedule=way.schedule,
            timers=False,
            stops=False,
        )
        for name, way in ways.items()
    }
    answers = {name: next(prefill) for name, prefill in turns.items()}
    seconds = dict.fromkeys(ways, 0.0)
    order = list(ways)
    while order:
        for name in list(order):
            begin = time.perf_counter()
            found = next(turns[name], None)
            seconds[name] += time.perf_counter() - begin
            if found is None:
                order.remove(name)
            else:
                answers[name] += found
        between()
        # Whoever comes after a long step meets another cache: nobody always does.
        order = [*order[1:], *order[:1]]
    return {name: (answers[name], seconds[name]) for name in ways}


def _measured(setup: Setup, ways: Mapping[str, Way], requests: Sequence[Request], in_flight: int) -> Repeat:
    """Decode and predict, one batch of `in_flight` requests after the other."""
    turns = 0

    def look_at_the_clock() -> None:
        nonlocal turns
        turns += 1
        if pace is not None and turns % _TURNS_A_PROBE == 1:
            paces.append(pace())

    pace = probe(setup.target, setup.draft, setup.curve, in_flight, setup.sampling)
    paces: list[float] = []
    load = Load(in_flight, max_new_tokens=setup.config.max_new_tokens, is_replay=True)
    answers: dict[str, list[Finished]] = {name: [] for name in ways}
    seconds = dict.fromkeys(ways, 0.0)
    predicted: dict[str, list[Outcome]] = {name: [] for name in ways}
    for begin in range(0, len(requests), in_flight):
        played = play_in_turn(setup, ways, requests[begin : begin + in_flight], look_at_the_clock)
        whole = {one.prompt_id: one.rounds for one in played["full"][0]}
        recorded = Recorded("", setup.name, "", setup.weights, dict.fromkeys(whole, ""), whole, {})
        conversations = conversations_of([recorded])
        for name, way in ways.items():
            answers[name] += played[name][0]
            seconds[name] += played[name][1]
            predicted[name].append(simulate(conversations, setup.curve, way, load, 1, setup.seed))
    found = {}
    for name, way in ways.items():
        rounds = [one for answer in answers[name] for one in answer.rounds]
        found[name] = Played(
            tokens=sum(one.emitted for one in rounds),
            seconds=seconds[name],
            budget=sum(one.proposed for one in rounds) / len(rounds) if way.schedule is not None else 0.0,
            simulated=sum(one.tokens for one in predicted[name]) / sum(one.seconds for one in predicted[name]),
        )
    return Repeat(in_flight, found, fmean(paces) if paces else None)


def _simulated(
    setup: Setup, ways: Mapping[str, Way], conversations: Sequence[Conversation], requests: int, repeat: int
) -> Repeat:
    load = Load(requests, max_new_tokens=setup.config.max_new_tokens)
    found = {}
    for name, way in ways.items():
        outcome = simulate(conversations, setup.curve, way, load, _SIMULATED_ROUNDS, setup.seed + repeat)
        found[name] = Played(None, None, outcome.budget, outcome.throughput)
    return Repeat(requests, found)


def load_rows(repeats: Sequence[Repeat], draft: str, temperature: float) -> tuple[list[LoadRow], list[GainRow]]:
    """Medians over repeats, and the throughput schedule's gains over the others, repeat by repeat on the same prompts.

    Args:
        repeats: of all loads.
        draft: its name.
        temperature: of target and draft.
    """
    rows, gains = [], []
    for load in dict.fromkeys(one.requests for one in repeats):
        here = [one for one in repeats if one.requests == load]
        common: dict[str, Any] = {"draft": draft, "temperature": temperature, "requests": load}
        for name in here[0].ways:
            measured = [one.ways[name].measured for one in here]
            predicted = [one.predicted(name) for one in here]
            off = [one.off(name) for one in here]
            rows.append(
                LoadRow(
                    **common,
                    schedule=name,
                    throughput=_median(measured),
                    throughput_ci95=_interval(measured),
                    simulated_throughput=median(predicted),
                    simulated_throughput_ci95=median_ci95(predicted),
                    off=_median(off),
                    off_ci95=_interval(off),
                    pace=_median([one.pace for one in here]),
                    budget=median(one.ways[name].budget for one in here),
                )
            )
            if name == "throughput" or "throughput" not in here[0].ways:
                continue
            ratios = [_ratio(one.ways["throughput"].measured, one.ways[name].measured) for one in here]
            simulated = [one.ways["throughput"].simulated / one.ways[name].simulated for one in here]
            gains.append(
                GainRow(
                    **common,
                    over=name,
                    gain=_median(ratios),
                    gain_ci95=_interval(ratios),
                    simulated_gain=median(simulated),
                    simulated_gain_ci95=median_ci95(simulated),
                )
            )
    return rows, gains


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _known_values(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Sequence[float | None]) -> float | None:
    known = _known_values(values)
    return median(known) if known else None


def _interval(values: Sequence[float | None]) -> tuple[float, float] | None:
    return median_ci95(_known_values(values))
