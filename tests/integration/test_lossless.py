"""Speculative decoding gives what the target alone would give: greedy token by token, sampled with its distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import KINDS, batch_of, kind_of_draft, overfit, tiny_draft, tiny_target
from scipy.stats import chisquare
from torch import Tensor

from deepspec.algorithms.base import DraftModel
from deepspec.decoding import decoder
from deepspec.decoding.decoder import Finished, Request, generate
from deepspec.decoding.rounds import ENDINGS
from deepspec.decoding.sampling import Sampling, sample
from deepspec.decoding.schedule import Schedule, ThresholdSchedule
from deepspec.decoding.verify import Verdict
from deepspec.errors import DataError
from deepspec.targets.base import Target

GREEDY = Sampling(temperature=0.0)
LENGTHS = (1, 40, 8, 3, 17, 9, 25, 2, 33, 12)
LONGEST = 37
FAMILIES = ("qwen3", "llama", "gemma4")


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 90, (length,), generator=generator).tolist() for length in LENGTHS]


@lru_cache
def _target(family: str) -> Target:
    return tiny_target(family)


@lru_cache
def _greedy(family: str) -> tuple[tuple[int, ...], ...]:
    """Greedy answers by transformers' own forward over the whole sequence, without a cache."""
    model = _target(family).model
    answers = []
    for prompt in _prompts():
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(LONGEST):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(tuple(ids[len(prompt) :]))
    return tuple(answers)


@pytest.fixture
def stopping(request: pytest.FixtureRequest) -> Any:
    """Sets stop tokens that really occur in the answers, and takes them back."""
    changed: list[Target] = []

    def choose(family: str) -> Target:
        target, answers = _target(family), _greedy(family)
        target.stop_token_ids = tuple(max(answers[row], key=answers[row].index) for row in (0, 3))
        changed.append(target)
        return target

    yield choose
    for target in changed:
        target.stop_token_ids = ()


def _expected(family: str, count: int, limit: int) -> list[list[int]]:
    stops = _target(family).stop_token_ids
    cut = []
    for answer in _greedy(family)[:count]:
        end = next((index + 1 for index, token in enumerate(answer) if token in stops), LONGEST)
        cut.append(list(answer[: min(end, limit)]))
    return cut


def _decode(
    target: Target, draft: DraftModel | None, count: int, limit: int, batch_size: int, **more: Any
) -> list[Finished]:
    prompts = _prompts()[:count]
    requests = [Request(f"p{index}", prompt) for index, prompt in enumerate(prompts)]
    found = {
        one.prompt_id: one
        for one in generate(target, draft, requests, GREEDY, max_new_tokens=limit, batch_size=batch_size, **more)
    }
    assert len(found) == count
    for request in requests:
        _check_rounds(found[request.prompt_id], len(request.prompt_ids), target.stop_token_ids, draft, limit)
    return [found[request.prompt_id] for request in requests]


def _check_rounds(
    one: Finished, prompt_length: int, stops: Sequence[int], draft: DraftModel | None, limit: int
) -> None:
    block = 0 if draft is None else draft.num_draft_tokens
    known = 1
    for index, item in enumerate(one.rounds):
        is_last = index == len(one.rounds) - 1
        assert known < limit, "a round started although max_new_tokens were out"
        assert (item.prompt_id, item.round) == (one.prompt_id, index)
        assert item.position == prompt_length + known - 1
        assert 0 <= item.accepted <= item.proposed <= block
        assert item.ended_by in ENDINGS
        assert is_last == (item.ended_by in ("stop", "limit"))
        if not is_last:
            assert item.ended_by == ("reject" if item.accepted < item.proposed else "full")
        if item.ended_by == "stop" and one.output_ids[-1] in stops and known + item.accepted == len(one.output_ids):
            assert item.emitted == item.accepted, "an accepted stop token ends the round without a bonus token"
        elif item.ended_by != "limit":
            assert item.emitted == item.accepted + 1
        else:
            assert item.emitted in (item.accepted, item.accepted + 1)
        assert len(item.max_draft_prob) == block
        assert all(0 < prob <= 1 + 1e-6 for prob in item.max_draft_prob)
        has_confidence = getattr(draft, "confidence_head", None) is not None
        assert (item.confidence_logits is None) != has_confidence
        assert item.confidence_logits is None or len(item.confidence_logits) == block
        known += item.emitted
    assert known >= len(one.output_ids)
    assert len(one.output_ids) <= limit
    assert not set(one.output_ids[:-1]) & set(stops)
    assert (one.finish_reason == "stop") == (one.output_ids[-1] in stops)
    assert one.finish_reason in ("stop", "length")
    if one.finish_reason == "length":
        assert len(one.output_ids) == limit
        assert known >= limit
    else:
        assert known == len(one.output_ids) or (one.rounds[-1].ended_by == "stop" if one.rounds else known == 1)


def _trained(family: str, kind: str, **overrides: Any) -> DraftModel:
    """A draft that has seen the target's own answers for a few steps, so that blocks are accepted to various depths."""
    target = _target(family)
    draft = kind_of_draft(target, kind, **overrides)
    overfit(draft, batch_of(target, list(zip(_prompts(), _greedy(family), strict=True)), anchors=12), steps=25)
    return draft.eval()


def _tau(answers: Sequence[Finished]) -> float:
    rounds = [item for one in answers for item in one.rounds]
    return sum(item.emitted for item in rounds) / len(rounds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [1, 2, LONGEST])
def test_decoding_without_a_draft_equals_the_full_forward_of_transformers(
    family: str, limit: int, stopping: Any
) -> None:
    for target in (_target(family), stopping(family)):
        for batch_size in (1, 8):
            found = _decode(target, None, len(LENGTHS), limit, batch_size)
            assert [one.output_ids for one in found] == _expected(family, len(LENGTHS), limit)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_with_a_trained_draft_equals_greedy_decoding_of_the_target(
    family: str, kind: str, stopping: Any
) -> None:
    draft = _trained(family, kind)
    target = stopping(family)
    for count, batch_size, limit in ((10, 3, 16), (2, 1, LONGEST), (4, 3, 2), (3, 2, 1)):
        found = _decode(target, draft, count, limit, batch_size)
        assert [one.output_ids for one in found] == _expected(family, count, limit)
    everything = _decode(target, draft, len(LENGTHS), LONGEST, 8)
    assert [one.output_ids for one in everything] == _expected(family, len(LENGTHS), LONGEST)
    assert _tau(everything) > 1.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["dspark-rnn", "dflash-fill_in", "eagle3"])
def test_greedy_decoding_with_layers_of_the_targets_own_family_stays_lossless(family: str, kind: str) -> None:
    draft = _trained(family, kind, draft_layers="target")
    found = _decode(_target(family), draft, 6, 20, 4)
    assert [one.output_ids for one in found] == _expected(family, 6, 20)
    assert _tau(found) > 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_with_a_random_or_confidently_wrong_draft_stays_lossless(kind: str) -> None:
    target = _target("qwen3")
    draft = kind_of_draft(target, kind).eval()
    found = _decode(target, draft, 6, 20, 4)
    assert [one.output_ids for one in found] == _expected("qwen3", 6, 20)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(-20.0)
    wrong = _decode(target, draft, 6, 20, 4)
    assert [one.output_ids for one in wrong] == _expected("qwen3", 6, 20)
    assert np.mean([prob for one in wrong for item in one.rounds for prob in item.max_draft_prob]) > 0.9


@pytest.mark.parametrize("kind", ["dspark-vanilla", "dspark-rnn", "dflash-anchor_first", "eagle3", "eagle3-own_head"])
def test_greedy_decoding_with_a_reduced_draft_vocabulary_stays_lossless(kind: str) -> None:
    draft = _trained("qwen3", kind, draft_vocab_size=40)
    found = _decode(_target("qwen3"), draft, 6, 20, 4)
    assert [one.output_ids for one in found] == _expected("qwen3", 6, 20)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_greedy_decoding_under_a_confidence_threshold_stays_lossless(threshold: float) -> None:
    draft = _trained("llama", "dspark-gated")
    found = _decode(_target("llama"), draft, 6, 20, 4, schedule=ThresholdSchedule(threshold))
    assert [one.output_ids for one in found] == _expected("llama", 6, 20)
    proposed = [item.proposed for one in found for item in one.rounds]
    assert set(proposed) == {0.0: {4}, 1.0: {0}}.get(threshold, set(proposed))


def test_a_round_that_the_limit_cuts_counts_everything_it_verified() -> None:
    draft = _trained("qwen3", "dspark-vanilla")
    full = _decode(_target("qwen3"), draft, len(LENGTHS), LONGEST, 8)
    cuts = 0
    for limit in (5, 7, 10, 14, 19):
        short = _decode(_target("qwen3"), draft, len(LENGTHS), limit, 8)
        for whole, cut in zip(full, short, strict=True):
            last = len(cut.rounds) - 1
            fields = ("position", "proposed", "accepted", "emitted")
            for field in fields:
                found = [getattr(item, field) for item in cut.rounds]
                assert found == [getattr(item, field) for item in whole.rounds[: last + 1]]
            cuts += cut.rounds[-1].position + 1 + cut.rounds[-1].emitted > cut.rounds[0].position + limit
    assert cuts > 3, "no round went past the limit, so the test says nothing"


@pytest.mark.parametrize("kind", ["dspark-rnn", "dflash-fill_in", "eagle3"])
def test_sampled_output_depends_neither_on_batch_size_nor_on_order(kind: str) -> None:
    target = tiny_target("gemma4", dtype=torch.float64, stop_token_ids=(3, 30))
    draft = kind_of_draft(target, kind).eval()
    requests = [Request(f"p{index}", prompt) for index, prompt in enumerate(_prompts())]

    def answers(ordered: list[Request], batch_size: int, seed: int = 1) -> dict[str, tuple[list[int], list[int]]]:
        found = generate(
            target, draft, ordered, Sampling(), max_new_tokens=12, batch_size=batch_size, seed=seed, timers=False
        )
        return {one.prompt_id: (one.output_ids, [item.accepted for item in one.rounds]) for one in found}

    expected = answers(requests, 8)
    assert answers(requests[::-1], 3) == expected
    assert answers(requests[5:] + requests[:5], 1) == expected
    assert answers(requests, 8, seed=2) != expected


# Distribution of the first three tokens -------------------------------------------------------------------------------

PROMPT = [1, 5, 2]
COUNT = 4000
SMALL = 8


@lru_cache
def _small_target() -> Target:
    return tiny_target("qwen3", vocab_size=SMALL, dtype=torch.float64, seed=4)


def _naive_warp(logits: Tensor, sampling: Sampling) -> list[float]:
    probs = np.exp((logits / sampling.temperature).numpy() - float(logits.max() / sampling.temperature))
    probs /= probs.sum()
    order = np.argsort(-probs)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0.0
        probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= sampling.top_p]] = 0.0
    probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0.0
    return list(probs / probs.sum())


@lru_cache
def _exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every triple of first tokens, from the target's full forward."""
    target = _small_target()
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        prefixes = list(joint)
        ids = torch.tensor([PROMPT + list(prefix) for prefix in prefixes])
        with torch.inference_mode():
            logits = target.model(input_ids=ids, use_cache=False).logits[:, -1]
        rows = [_naive_warp(row, sampling) for row in logits]
        joint = {
            (*prefix, token): joint[prefix] * row[token]
            for prefix, row in zip(prefixes, rows, strict=True)
            for token in range(SMALL)
        }
    return joint


def _p_value(draft: DraftModel | None, sampling: Sampling, schedule: Schedule | None = None, seed: int = 0) -> float:
    requests = [Request(f"r{index}", PROMPT) for index in range(COUNT)]
    found = generate(
        _small_target(), draft, requests, sampling, max_new_tokens=3, batch_size=400, seed=seed, schedule=schedule
    )
    seen = Counter(tuple(one.output_ids) for one in found)
    exact = _exact(sampling)
    assert all(exact[triple] > 0 for triple in seen), "a token of probability 0 was emitted"
    observed, expected, rare = [], [], [0.0, 0.0]
    for triple, prob in exact.items():
        if prob * COUNT >= 5:
            observed.append(float(seen[triple]))
            expected.append(prob * COUNT)
        else:
            rare = [rare[0] + seen[triple], rare[1] + prob * COUNT]
    if rare[1] >= 1:
        observed.append(rare[0])
        expected.append(rare[1])
    else:
        observed[0], expected[0] = observed[0] + rare[0], expected[0] + rare[1]
    assert len(expected) > 10
    return float(chisquare(observed, expected).pvalue)


CASES = [
    ("dspark", {}, None),
    ("dspark", {"markov_head": "rnn"}, ThresholdSchedule(0.5)),
    ("dspark", {"draft_vocab_size": 5}, None),
    ("dflash", {}, None),
    ("dflash", {"layout": "fill_in"}, None),
    ("eagle3", {}, None),
    ("eagle3", {"draft_vocab_size": 4}, None),
]


@pytest.mark.parametrize(("algorithm", "overrides", "schedule"), CASES)
def test_the_first_three_sampled_tokens_have_the_targets_joint_distribution(
    algorithm: str, overrides: dict[str, Any], schedule: Schedule | None
) -> None:
    draft = tiny_draft(_small_target(), algorithm, **overrides).eval()
    assert _p_value(draft, Sampling(), schedule) > 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=4),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=0.8, min_p=0.1),
        Sampling(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
    ],
)
def test_filters_of_the_sampling_leave_the_warped_joint_distribution(sampling: Sampling) -> None:
    assert _p_value(tiny_draft(_small_target(), "dspark").eval(), sampling) > 1e-3


def test_stop_tokens_leave_the_joint_distribution_of_a_draft_that_stops_at_them() -> None:
    target = _small_target()
    draft = tiny_draft(target, "eagle3").eval()
    exact = _exact(Sampling())
    target.stop_token_ids = (int(np.argmax([sum(p for t, p in exact.items() if t[1] == v) for v in range(SMALL)])),)
    try:
        stop = target.stop_token_ids[0]
        requests = [Request(f"r{index}", PROMPT) for index in range(COUNT)]
        found = generate(target, draft, requests, Sampling(), max_new_tokens=3, batch_size=300)
        seen = Counter(tuple(one.output_ids) for one in found)
    finally:
        target.stop_token_ids = ()
    cut: Counter[tuple[int, ...]] = Counter()
    for triple, prob in exact.items():
        cut[triple[: triple.index(stop) + 1] if stop in triple else triple] += prob * COUNT
    common = [key for key, count in cut.items() if count >= 5]
    observed = [float(seen[key]) for key in common] + [float(COUNT - sum(seen[key] for key in common))]
    expected = [cut[key] for key in common] + [COUNT - sum(cut[key] for key in common)]
    assert chisquare(observed, expected).pvalue > 1e-3


def _accepts_by_the_inverse_ratio(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, lengths: Tensor, uniforms: Tensor
) -> Verdict:
    return _broken(draft_tokens, draft_probs, target_probs, uniforms, is_inverse=True)


def _draws_the_bonus_from_p(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, lengths: Tensor, uniforms: Tensor
) -> Verdict:
    return _broken(draft_tokens, draft_probs, target_probs, uniforms, is_inverse=False)


def _broken(tokens: Tensor, q: Tensor, p: Tensor, uniforms: Tensor, *, is_inverse: bool) -> Verdict:
    block = tokens.shape[1]
    of_q = q.gather(-1, tokens[..., None])[..., 0]
    of_p = p[:, :block].gather(-1, tokens[..., None])[..., 0]
    kept = uniforms[:, :block] * of_p < of_q if is_inverse else uniforms[:, :block] * of_q < of_p
    accepted = kept.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(tokens))
    next_probs = p[rows, accepted]
    if is_inverse:
        padded = torch.cat([q, torch.zeros_like(q[:, :1])], dim=1)
        residual = (next_probs - padded[rows, accepted]).clamp(min=0)
        next_probs = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, next_probs)
    return Verdict(accepted, sample(next_probs, uniforms[:, block]))


@pytest.mark.parametrize("broken", [_accepts_by_the_inverse_ratio, _draws_the_bonus_from_p])
def test_the_distribution_test_notices_a_broken_verifier(
    broken: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "verify", broken)
    assert _p_value(tiny_draft(_small_target(), "dspark").eval(), Sampling()) < 1e-6


def test_an_empty_a_repeated_and_an_overlong_prompt_are_refused() -> None:
    target = _target("qwen3")
    for requests, word in (
        ([Request("a", [])], "empty"),
        ([Request("a", [5]), Request("a", [6])], "twice"),
        ([Request("a", [5] * 505)], "512"),
    ):
        with pytest.raises(DataError, match=word):
            list(generate(target, None, requests, GREEDY, max_new_tokens=8))


def test_a_prompt_that_just_fits_the_context_is_answered() -> None:
    target = _target("qwen3")
    found = list(generate(target, None, [Request("a", [5] * 503)], GREEDY, max_new_tokens=8))
    assert len(found[0].output_ids) == 8
