"""Every schedule leaves the target's distribution as it is: by exact enumeration, and in the real decoder.

The enumeration goes over every draft of two requests, lets the real schedule choose the lengths of that batch, follows
acceptance and bonus with their exact probabilities, and continues every output by the target up to a fixed length. The
joint distribution of both outputs must then be the product of the target's own, to the last bits of float64. Two
schedules that see too much show that the enumeration notices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from helpers import kind_of_draft, tiny_target
from torch import Tensor

from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.lane import Finished
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import Confidence, FullSchedule, Schedule, Situation, ThresholdSchedule
from deepspec.scheduling.allocation import best_number, first_slots, ranked, survival
from deepspec.scheduling.cost import CostCurve
from deepspec.scheduling.schedules import AsynchronousSchedule, FixedSchedule, ThroughputSchedule

Output = tuple[int, ...]
Joint = dict[tuple[Output, ...], float]


class World:
    """Distributions of target and draft over a tiny vocabulary, and a confidence, each a function of what precedes."""

    def __init__(self, vocab: int, block: int, seed: int) -> None:
        self.vocab, self.block = vocab, block
        self._generator = torch.Generator().manual_seed(seed)
        self._known: dict[tuple[str, int, Output], list[float]] = {}

    def _draw(self, kind: str, request: int, before: Output, size: int, sharpness: float) -> list[float]:
        key = (kind, request, before)
        if key not in self._known:
            weights = torch.randn(size, generator=self._generator, dtype=torch.float64) * sharpness
            self._known[key] = weights.softmax(dim=0).tolist()
        return self._known[key]

    def target(self, request: int, before: Output) -> list[float]:
        return self._draw("p", request, before, self.vocab, 1.0)

    def draft(self, request: int, before: Output) -> list[float]:
        return self._draw("q", request, before, self.vocab, 1.6)

    def confidence(self, request: int, before: Output) -> float:
        return self._draw("c", request, before, 2, 2.0)[0]


class Article(World):
    """The example of algorithms.md 4: token A makes the next slot certain, token B hopeless."""

    def __init__(self) -> None:
        super().__init__(2, 2, 0)

    def target(self, request: int, before: Output) -> list[float]:
        return [0.7, 0.3]

    def draft(self, request: int, before: Output) -> list[float]:
        return [0.5, 0.5]

    def confidence(self, request: int, before: Output) -> float:
        return {(): 0.8, (0,): 0.9, (1,): 0.0}[before]


def situation_of(world: World, drafts: tuple[Output, ...], earlier: Situation | None) -> Situation:
    """What the schedule may know about a batch of drafts."""
    slots = range(world.block)
    confidence = [[world.confidence(r, tokens[:k]) for k in slots] for r, tokens in enumerate(drafts)]
    largest = [[max(world.draft(r, tokens[:k])) for k in slots] for r, tokens in enumerate(drafts)]
    logits = torch.logit(torch.tensor(confidence, dtype=torch.float64))
    proposed = torch.full((len(drafts),), world.block)
    probs = torch.tensor(largest, dtype=torch.float64)
    return Situation(logits, probs, proposed, len(drafts), 0, earlier)


def verified(world: World, request: int, tokens: Output, length: int) -> Iterator[tuple[Output, float]]:
    """Every output of one round and its probability, given the draft and how much of it is verified."""
    kept = 1.0
    for k in range(length):
        p, q = world.target(request, tokens[:k]), world.draft(request, tokens[:k])
        accept = min(1.0, p[tokens[k]] / q[tokens[k]])
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        total = sum(residual)
        for token, weight in enumerate(residual):
            if weight:
                yield (*tokens[:k], token), kept * (1 - accept) * weight / total
        kept *= accept
    for token, prob in enumerate(world.target(request, tokens[:length])):
        yield (*tokens[:length], token), kept * prob


def continued(world: World, request: int, output: Output, prob: float) -> Iterator[tuple[Output, float]]:
    """The output continued by the target itself to K + 1 tokens."""
    if len(output) == world.block + 1:
        yield output, prob
        return
    for token, share in enumerate(world.target(request, output)):
        yield from continued(world, request, (*output, token), prob * share)


def drafts_of(world: World, requests: int) -> Iterator[tuple[tuple[Output, ...], float]]:
    """Every batch of draft blocks and its probability."""
    blocks = list(itertools.product(range(world.vocab), repeat=world.block))
    for drafts in itertools.product(blocks, repeat=requests):
        chance = math.prod(
            world.draft(r, tokens[:k])[tokens[k]] for r, tokens in enumerate(drafts) for k in range(world.block)
        )
        yield drafts, chance


def emitted(world: World, requests: int, schedule: Schedule, earlier: Situation | None = None) -> Joint:
    """The exact joint distribution of all outputs, K + 1 tokens each."""
    joint: Joint = {}
    for drafts, chance in drafts_of(world, requests):
        lengths = schedule.lengths(situation_of(world, drafts, earlier)).tolist()
        each = []
        for r, tokens in enumerate(drafts):
            found: dict[Output, float] = {}
            for output, prob in verified(world, r, tokens, lengths[r]):
                for whole, share in continued(world, r, output, prob):
                    found[whole] = found.get(whole, 0.0) + share
            each.append(found)
        for outputs in itertools.product(*each):
            prob = math.prod(found[output] for found, output in zip(each, outputs, strict=True))
            joint[outputs] = joint.get(outputs, 0.0) + chance * prob
    return joint


def expected(world: World, requests: int) -> Joint:
    """The target's own joint distribution."""
    each = [dict(continued(world, r, (), 1.0)) for r in range(requests)]
    return {
        outputs: math.prod(found[output] for found, output in zip(each, outputs, strict=True))
        for outputs in itertools.product(*each)
    }


def distance(found: Joint, truth: Joint) -> float:
    """Total variation."""
    return sum(abs(found.get(key, 0.0) - truth.get(key, 0.0)) for key in found.keys() | truth.keys()) / 2


SMOOTH = CostCurve(tuple(range(1, 9)), (0,), (tuple(1 / (1 + 0.25 * n) for n in range(8)),))
SPARSE = CostCurve((1, 4, 8), (0,), ((1.0, 1 / 1.9, 1 / 3.2),))
STAIRS = CostCurve((1, 2, 3, 5), (0,), ((1.0, 0.62, 0.6, 0.35),))
SCHEDULES: dict[str, Schedule] = {
    "full": FullSchedule(),
    "fixed": FixedSchedule(((1, 2), (2, 1))),
    "threshold": ThresholdSchedule(0.5),
    "threshold on max q": ThresholdSchedule(0.6, Confidence("max_prob")),
    "threshold calibrated": ThresholdSchedule(0.5, Confidence("head", (0.5, 2.0))),
    "throughput": ThroughputSchedule(SMOOTH),
    "throughput on stairs": ThroughputSchedule(STAIRS),
    "throughput linear on max q": ThroughputSchedule(SPARSE, Confidence("max_prob"), "linear"),
    "asynchronous": AsynchronousSchedule(STAIRS),
    "asynchronous on max q": AsynchronousSchedule(SMOOTH, Confidence("max_prob")),
}


@dataclass(frozen=True)
class GlobalSearch:
    """Negative control: Algorithm 1 without its stop, on the confidences of the present round."""

    curve: CostCurve

    def lengths(self, situation: Situation) -> Tensor:
        chances = survival(Confidence().of(situation), situation.proposed)
        descending, order = ranked(chances)
        rates = self.curve.rates(situation.requests, chances.numel(), 0, "left", False)
        number = best_number(descending, situation.requests, torch.tensor(rates, dtype=torch.float64))
        return first_slots(order, number, *chances.shape)


@pytest.mark.parametrize("name", SCHEDULES)
def test_outputs_of_a_batch_have_the_targets_joint_distribution_to_the_last_bits(name: str) -> None:
    seen = set()
    for seed in range(6):
        world = World(2, 2, seed)
        earlier = situation_of(world, ((0, 1), (1, 1)), None)
        assert distance(emitted(world, 2, SCHEDULES[name], earlier), expected(world, 2)) < 1e-12
        lengths = [SCHEDULES[name].lengths(situation_of(world, drafts, earlier)) for drafts, _ in drafts_of(world, 2)]
        seen.add(len({tuple(found.tolist()) for found in lengths}) > 1)
    # Lengths that never depend on the draft would prove nothing about a schedule that reads confidences.
    assert (True in seen) == (name not in ("full", "fixed"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_three_tokens_and_three_slots_keep_the_distribution_of_a_single_request(name: str) -> None:
    schedule = SCHEDULES[name]
    if name == "threshold calibrated":
        schedule = ThresholdSchedule(0.5, Confidence("head", (0.5, 2.0, 1.0)))
    for seed in (5, 6):
        world = World(3, 3, seed)
        earlier = situation_of(world, ((2, 0, 1),), None)
        assert distance(emitted(world, 1, schedule, earlier), expected(world, 1)) < 1e-12


def test_the_causal_stop_keeps_the_articles_example_at_seven_tenths() -> None:
    curve = CostCurve((1, 2, 3), (0,), ((1.0, 0.5, 0.45),))
    found = emitted(Article(), 1, ThroughputSchedule(curve))
    assert sum(prob for (output,), prob in found.items() if output[0] == 0) == pytest.approx(0.70, abs=1e-12)


def test_the_enumeration_catches_a_global_search_over_the_present_round() -> None:
    curve = CostCurve((1, 2, 3), (0,), ((1.0, 0.5, 0.45),))
    found = emitted(Article(), 1, GlobalSearch(curve))
    assert sum(prob for (output,), prob in found.items() if output[0] == 0) == pytest.approx(0.85, abs=1e-12)
    assert distance(found, expected(Article(), 1)) > 0.1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_enumeration_catches_a_schedule_steered_by_the_probability_of_the_drawn_token(seed: int) -> None:
    world = World(2, 2, seed)
    joint: Joint = {}
    for drafts, chance in drafts_of(world, 1):
        tokens = drafts[0]
        own = torch.tensor([[world.draft(0, tokens[:k])[tokens[k]] for k in range(2)]])
        steered = situation_of(world, drafts, None)._replace(max_probs=own)
        length = int(ThresholdSchedule(0.5, Confidence("max_prob")).lengths(steered)[0])
        for output, prob in verified(world, 0, tokens, length):
            for whole, share in continued(world, 0, output, prob):
                joint[(whole,)] = joint.get((whole,), 0.0) + chance * share
    assert sum(joint.values()) == pytest.approx(1.0)
    assert distance(joint, expected(world, 1)) > 0.01


FAMILIES = ("qwen3", "llama", "gemma4")
PROMPTS = [[1, 5, 2], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [3, 4], [20, 21, 22, 23, 24], [30]]
# Steps that get dearer fast, so that lengths vary; contexts that change on the way.
STEEP = CostCurve((1, 4, 6, 8, 12, 20), (0, 12), ((9.0, 8.7, 8.3, 7.7, 6.0, 3.5), (9.0, 8.8, 8.5, 8.0, 6.0, 3.0)))
IN_DECODER: dict[str, Schedule] = {
    "fixed": FixedSchedule(((1, 3), (3, 1))),
    "threshold": ThresholdSchedule(0.5),
    "throughput": ThroughputSchedule(STEEP),
    "asynchronous": AsynchronousSchedule(STEEP, lookup="linear"),
}


def decode(family: str, kind: str | None, schedule: Schedule | None, sampling: Sampling, batch: int) -> list[Finished]:
    target = tiny_target(family, dtype=torch.float64, stop_token_ids=(3, 40))
    draft = None if kind is None else kind_of_draft(target, kind).eval()
    requests = [Request(f"r{index}", prompt) for index, prompt in enumerate(PROMPTS)]
    found = generate(
        target, draft, requests, sampling, max_new_tokens=20, batch_size=batch, schedule=schedule, overlap=True
    )
    return sorted(found, key=lambda one: one.prompt_id)


@lru_cache
def plain(family: str) -> list[list[int]]:
    return [one.output_ids for one in decode(family, None, None, Sampling(temperature=0.0), 2)]


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("fixed", "llama", "eagle3"),
        ("threshold", "gemma4", "dflash-fill_in"),
        ("throughput", "qwen3", "dspark-rnn"),
        ("throughput", "gemma4", "dflash-anchor_first"),
        ("asynchronous", "llama", "dspark-vanilla"),
    ],
)
def test_greedy_decoding_in_the_real_decoder_is_the_targets_own(name: str, family: str, kind: str) -> None:
    for batch in (1, 3):
        found = decode(family, kind, IN_DECODER[name], Sampling(temperature=0.0), batch)
        assert [one.output_ids for one in found] == plain(family)


@pytest.mark.parametrize("name", IN_DECODER)
def test_verified_slots_of_a_scheduled_round_are_judged_as_those_of_a_whole_block(name: str) -> None:
    # Draws depend on the round alone: up to the first cut that mattered both decoders agree on every number.
    found = decode("qwen3", "dspark-vanilla", IN_DECODER[name], Sampling(), 4)
    whole = decode("qwen3", "dspark-vanilla", None, Sampling(), 4)
    compared = 0
    for one, other in zip(found, whole, strict=True):
        for mine, theirs in zip(one.rounds, other.rounds, strict=False):
            assert mine.max_draft_prob == pytest.approx(theirs.max_draft_prob, abs=1e-6)
            assert mine.overlap == pytest.approx(theirs.overlap[: mine.proposed], abs=1e-6)
            assert mine.accepted == min(theirs.accepted, mine.proposed)
            compared += len(mine.overlap)
            # At a cut the bonus comes from p, where the whole block goes on or draws from what is left of p - q.
            if mine.accepted == mine.proposed < 4:
                break
    assert compared > 10
    assert len({record.proposed for one in found for record in one.rounds}) > 1
