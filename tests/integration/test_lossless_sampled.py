"""Sampled speculative decoding has the target's own joint distribution, and does not depend on the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import kind_of_draft, tiny_draft, tiny_target
from scipy.stats import chisquare
from torch import Tensor

from deepspec.algorithms.base import DraftModel
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling, sample
from deepspec.decoding.schedule import Schedule, ThresholdSchedule
from deepspec.decoding.verify import Verdict
from deepspec.targets.base import Target

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
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, lengths: Tensor, uniforms: Tensor, places: Any
) -> Verdict:
    return _broken(draft_tokens, draft_probs, target_probs, uniforms, places, is_inverse=True)


def _draws_the_bonus_from_p(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, lengths: Tensor, uniforms: Tensor, places: Any
) -> Verdict:
    return _broken(draft_tokens, draft_probs, target_probs, uniforms, places, is_inverse=False)


def _broken(
    tokens: Tensor, q: Tensor, p: Tensor, uniforms: Tensor, places: Tensor | None, *, is_inverse: bool
) -> Verdict:
    block = tokens.shape[1]
    p = p if places is None else p[places]
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
    monkeypatch.setattr("deepspec.decoding.judge.verify", broken)
    assert _p_value(tiny_draft(_small_target(), "dspark").eval(), Sampling()) < 1e-6


@pytest.mark.parametrize("kind", ["dspark-rnn", "dflash-fill_in", "eagle3"])
def test_sampled_output_depends_neither_on_batch_size_nor_on_order(kind: str) -> None:
    target = tiny_target("gemma4", dtype=torch.float64, stop_token_ids=(3, 30))
    draft = kind_of_draft(target, kind).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(4, 90, (length,), generator=generator).tolist() for length in (1, 40, 8, 3, 17, 9, 25, 2, 33)
    ]
    requests = [Request(f"p{index}", prompt) for index, prompt in enumerate(prompts)]

    def answers(ordered: list[Request], batch_size: int, seed: int = 1) -> dict[str, tuple[list[int], list[int]]]:
        found = generate(
            target, draft, ordered, Sampling(), max_new_tokens=12, batch_size=batch_size, seed=seed, timers=False
        )
        return {one.prompt_id: (one.output_ids, [item.accepted for item in one.rounds]) for one in found}

    expected = answers(requests, 8)
    assert answers(requests[::-1], 3) == expected
    assert answers(requests[5:] + requests[:5], 1) == expected
    assert answers(requests, 8, seed=2) != expected
