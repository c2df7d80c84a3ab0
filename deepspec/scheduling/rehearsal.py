"""Whole rounds of the real decoder, with given numbers of requests and of verified tokens, for the cost curve.

A step of the target is not all of a round: the host draws, chooses, packs and records, and blocks of uneven length cost
more than even ones. So the decoder itself plays here: without a draft, with whole blocks, with blocks cut alike, and
under a schedule that chooses as Algorithm 1 does but is told how many slots to take. Prompts are random tokens that
differ in the last one only, so the decoder runs what they share once.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from deepspec.algorithms.base import DraftModel
from deepspec.decoding.decoder import Finished, Request, generate_by_round
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import Situation
from deepspec.scheduling.allocation import causal_number, first_slots, ranked, survival
from deepspec.scheduling.cost import CostCurve, Kind, RoundCosts
from deepspec.targets.base import Target

Key = tuple[Kind, int, int]
"""Kind of a round, requests, tokens verified over all of them."""
_K = TypeVar("_K")

# Of all draft tokens of a batch, how many the cut rounds verify.
_SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
# Slots of each block that is cut like all others; the whole block is the last point.
_WINDOWS = (0, 1, 2)
_FEWEST_REQUESTS = 4
# Of one decoding, before the next one begins: the context must not grow much.
_ROUNDS = len(_SHARES) + len(_WINDOWS)
# A draft that was timed on its own may seem to take longer than the whole round of a tiny target.
_SHORTEST_SECONDS = 1e-6
# Of the median polish: it settles within a few.
_SWEEPS = 10


class _Budget:
    """Algorithm 1 with made-up confidences, and with rates that stop it at a number of slots.

    Attributes:
        slots: how many of the next round are verified, over all requests.
        is_even: whether all blocks are cut alike instead.
    """

    def __init__(self) -> None:
        self.slots, self.is_even = 0, False
        self._generator = torch.Generator().manual_seed(0)

    def lengths(self, situation: Situation) -> Tensor:
        """See `Schedule.lengths`."""
        proposed = situation.proposed
        if self.is_even:
            return proposed.clamp_max(self.slots // situation.requests)
        confidence = torch.rand(situation.max_probs.shape, generator=self._generator).to(proposed.device)
        chances = survival(confidence, proposed)
        descending, order = ranked(chances)
        rates = (torch.arange(chances.numel() + 1, device=proposed.device) <= self.slots).double()
        return first_slots(order, causal_number(descending, situation.requests, rates), *chances.shape)


def cut_budgets(requests: int, block: int) -> list[int]:
    """Slots of the cut rounds of so many requests with blocks of `block` draft tokens, ascending."""
    return sorted({round(share * requests * block) for share in _SHARES})


def even_windows(block: int) -> list[int]:
    """Slots of each block in the rounds that cut all blocks of `block` draft tokens alike, ascending."""
    return [window for window in _WINDOWS if window < block]


def turns(requests: int) -> int:
    """How often a repeat plays each round of so many requests: those of few are short, and as noisy."""
    return -(-_FEWEST_REQUESTS // requests)


def room_needed(block: int) -> int:
    """Positions behind the prompts that rounds may use, so that none is the last of its answer."""
    # Beside the rounds that are timed, the prefill and the round that warms up.
    return (_ROUNDS + 2) * (block + 1)


def timed_rounds(
    target: Target,
    draft: DraftModel,
    context: int,
    requests: Sequence[int],
    sampling: Sampling,
    repeats: int,
    advance: Callable[[], None],
) -> dict[Key, list[float]]:
    """Seconds of every repeat of every kind of round, in an order that changes with every repeat.

    Args:
        target: the target.
        draft: the draft.
        context: tokens behind each request.
        requests: numbers of requests.
        sampling: warpers of both.
        repeats: timed turns; one more warms up.
        advance: called after the rounds of one number of requests, so (repeats + 1) times for each.
    """
    order = random.Random(0)
    found: dict[Key, list[float]] = {}
    for repeat in range(repeats + 1):
        for number in order.sample(list(requests), len(requests)):
            for key, seconds in _play(target, draft, context, number, sampling, order):
                found.setdefault(key, [])
                if repeat:
                    found[key].append(seconds)
            advance()
    return found


def _play(
    target: Target, draft: DraftModel, context: int, number: int, sampling: Sampling, order: random.Random
) -> Iterator[tuple[Key, float]]:
    """Rounds of each kind, timed, in an order that is drawn."""
    block = draft.num_draft_tokens
    rehearsal = Rehearsal(target, draft, context, number, sampling)
    keys: list[Key] = [("plain", number, number), ("whole", number, number * (block + 1))]
    keys += [("even", number, number * (1 + window)) for window in even_windows(block)]
    keys += [("cut", number, number + slots) for slots in cut_budgets(number, block)]
    for _ in range(turns(number)):
        for key in order.sample(keys, len(keys)):
            yield key, rehearsal.seconds(key[0], key[2] - number)


class Rehearsal:
    """Rounds of so many requests with `context` tokens behind each, played and timed whenever asked."""

    def __init__(self, target: Target, draft: DraftModel, context: int, requests: int, sampling: Sampling) -> None:
        """Make up prompts; nothing is played yet."""
        self._target, self._draft, self._sampling = target, draft, sampling
        generator = torch.Generator().manual_seed(context)
        shared = torch.randint(target.vocab_size, (context - 1,), generator=generator).tolist()
        self._prompts = [Request(f"{index}", [*shared, index % target.vocab_size]) for index in range(requests)]
        self._budget = _Budget()
        self._loops: dict[Kind, tuple[Iterator[list[Finished]], int]] = {}

    def seconds(self, kind: Kind, slots: int) -> float:
        """Play a round; one of the kinds `even` and `cut` verifies so many draft tokens over all requests."""
        self._budget.slots, self._budget.is_even = slots, kind == "even"
        shared: Kind = "cut" if kind == "even" else kind
        loop, played = self._loops.get(shared, (None, 0))
        if loop is None or played == _ROUNDS:
            loop, played = self._opened(shared), 0
        begin = time.perf_counter()
        next(loop)
        found = time.perf_counter() - begin
        self._loops[shared] = loop, played + 1
        return found

    def _opened(self, kind: Kind) -> Iterator[list[Finished]]:
        """A new decoding, behind its prefill and the round in which its caches grow."""
        loop = generate_by_round(
            self._target,
            None if kind == "plain" else self._draft,
            self._prompts,
            self._sampling,
            max_new_tokens=room_needed(self._draft.num_draft_tokens),
            batch_size=len(self._prompts),
            schedule=self._budget if kind == "cut" else None,
            timers=False,
            stops=False,
        )
        next(loop)
        next(loop)
        return loop


def settled(seconds: Mapping[_K, Sequence[float]]) -> dict[_K, float]:
    """Typical seconds of every key, freed of how fast the machine was in each turn.

    A shared machine may take twice as long in one turn as in the next, whatever it plays. So seconds are taken for a
    key's own times the turn's, fitted to the logarithms by median polish (Tukey, Exploratory Data Analysis, 1977), and
    a key's are those at the median of the turns.

    Args:
        seconds: of every key, one in each turn; as many for all.
    """
    if not seconds:
        return {}
    logs = np.log(np.maximum(np.array(list(seconds.values())), 1e-9))
    own, turn = np.zeros((len(logs), 1)), np.zeros((1, logs.shape[1]))
    for _ in range(_SWEEPS):
        turn += np.median(logs - own - turn, axis=0, keepdims=True)
        own += np.median(logs - own - turn, axis=1, keepdims=True)
    return dict(zip(seconds, np.exp(own[:, 0] + np.median(turn)).tolist(), strict=True))


def round_costs(requests: int, block: int, seconds: Mapping[Key, Sequence[float]], draft_seconds: float) -> RoundCosts:
    """Costs of one number of requests, turns settled; a round that verifies more is never taken for a faster one.

    Args:
        requests: in flight.
        block: K.
        seconds: of every turn, from `timed_rounds`.
        draft_seconds: of the draft's own step for so many requests, which is taken off.
    """

    def beside(key: Key) -> float:
        return max(typical[key] - draft_seconds, _SHORTEST_SECONDS)

    typical = settled({key: values for key, values in seconds.items() if key[1] == requests})
    even_tokens = tuple(requests * (1 + window) for window in even_windows(block))
    cut_tokens = tuple(requests + slots for slots in cut_budgets(requests, block))
    most = requests * (block + 1)
    whole = beside(("whole", requests, most))
    return RoundCosts(
        requests=requests,
        plain=typical["plain", requests, requests],
        whole=whole,
        even_tokens=(*even_tokens, most),
        even=rising([*(beside(("even", requests, tokens)) for tokens in even_tokens), whole]),
        cut_tokens=cut_tokens,
        cut=rising([beside(("cut", requests, tokens)) for tokens in cut_tokens]),
    )


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest values, by squares, that never fall: neighbours that do are replaced by their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            more, others = pools.pop()
            total, count = total + more, count + others
        pools.append((total, count))
    return tuple(total / count for total, count in pools for _ in range(count))


def probe(
    target: Target, draft: DraftModel, curve: CostCurve, requests: int, sampling: Sampling
) -> Callable[[], float] | None:
    """How many times as long as in the profile a round takes now, whenever asked; None where no round was profiled.

    Args:
        target: the target that was profiled.
        draft: the draft that was.
        curve: their profile.
        requests: about how many are in flight; of the profiled numbers the next lower one is played.
        sampling: warpers of both.
    """

    def pace() -> float:
        kind, slots, expected = next(points)
        return rehearsal.seconds(kind, slots) / expected

    if not curve.rounds:
        return None
    one = [costs for costs in curve.rounds if costs.requests <= max(requests, curve.rounds[0].requests)][-1]
    drafted = curve.draft_time(one.requests)
    # All kinds in turn, so that the error of no single point of the profile counts for much.
    kinds: list[tuple[Kind, int, float]] = [("plain", 0, one.plain), ("whole", 0, one.whole + drafted)]
    for tokens, value in zip(one.cut_tokens, one.cut, strict=True):
        kinds.append(("cut", tokens - one.requests, value + drafted))
    points = itertools.cycle(kinds)
    rehearsal = Rehearsal(target, draft, curve.contexts[0], one.requests, sampling)
    return pace
