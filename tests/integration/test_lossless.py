"""Greedy speculative decoding gives what the target alone would give, token by token, and its records add up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import KINDS, batch_of, kind_of_draft, overfit, tiny_target, with_features
from torch import Tensor, nn

from deepspec.algorithms.backbone import BlockDraft
from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.eagle3 import Draft as Eagle3Draft
from deepspec.decoding.decoder import Finished, Request, generate
from deepspec.decoding.rounds import ENDINGS
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import ThresholdSchedule
from deepspec.errors import DataError, TargetError
from deepspec.targets.base import Target
from deepspec.types import TokenBatch

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


@lru_cache
def _trained(family: str, kind: str, **overrides: Any) -> DraftModel:
    """A draft that has seen the target's own answers for a few steps, so that blocks are accepted to various depths."""
    target = _target(family)
    draft = kind_of_draft(target, kind, **overrides)
    samples = [(prompt[-8:], answer[:24]) for prompt, answer in zip(_prompts(), _greedy(family), strict=True)]
    overfit(draft, batch_of(target, samples, anchors=24), steps=20)
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


@pytest.mark.parametrize("family", ["llama", "gemma4"])
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
    for limit in (5, 7, 10, 14, 16, 19, 23, 28):
        short = _decode(_target("qwen3"), draft, len(LENGTHS), limit, 8)
        for whole, cut in zip(full, short, strict=True):
            last = len(cut.rounds) - 1
            fields = ("position", "proposed", "accepted", "emitted")
            for field in fields:
                found = [getattr(item, field) for item in cut.rounds]
                assert found == [getattr(item, field) for item in whole.rounds[: last + 1]]
            cuts += cut.rounds[-1].position + 1 + cut.rounds[-1].emitted > cut.rounds[0].position + limit
    assert cuts > 3, "no round went past the limit, so the test says nothing"


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_round_of_a_ragged_batch_drafts_from_what_training_would_see(kind: str, family: str) -> None:
    target = tiny_target(family, dtype=torch.float64)
    draft = kind_of_draft(target, kind).eval()
    for prompt, one in zip(_prompts()[:6], _decode(target, draft, 6, 9, 4), strict=True):
        ids = torch.tensor([[*prompt, *one.output_ids]])
        anchors = torch.tensor([[item.position for item in one.rounds]])
        yes = torch.ones_like(anchors, dtype=torch.bool)
        everywhere = torch.ones_like(ids, dtype=torch.bool)
        tokens = TokenBatch(ids, torch.tensor([ids.shape[1]]), everywhere, anchors, yes, torch.tensor([0]))
        batch = with_features(target, tokens)
        with torch.no_grad():
            if isinstance(draft, BlockDraft):
                hidden = draft.block_hidden(batch)
                previous = ids[0, anchors[0]][:, None].expand(-1, draft.num_draft_tokens)
                rows = torch.arange(previous.numel()).view(previous.shape)[:, 0]
                latent = draft.head_inputs(hidden[0], previous, rows).latent
                logits = draft.head.logits(hidden[0, :, 0])
                if latent is not None and draft.latent_weight is not None:
                    logits = logits + latent @ draft.latent_weight.T
            else:
                assert isinstance(draft, Eagle3Draft)
                first = draft.unroll(batch, anchors - 1)[0, 0]
                logits = draft.head.logits(draft.norm(first), draft.student_weight)
        expected = logits.softmax(dim=-1).amax(dim=-1).tolist()
        # Records hold single precision.
        assert [item.max_draft_prob[0] for item in one.rounds] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["dspark-rnn", "dflash-fill_in", "eagle3", "no draft"])
def test_prompts_that_begin_alike_are_answered_as_if_each_were_alone(kind: str, family: str) -> None:
    target = tiny_target(family, dtype=torch.float64)
    draft = None if kind == "no draft" else kind_of_draft(target, kind).eval()
    prompts = [[*_prompts()[4][:13], *prompt] for prompt in _prompts()]
    # One ends with what all begin with, so the shared part stops a token earlier.
    prompts.append(prompts[0][:13])
    requests = [Request(f"p{index}", prompt) for index, prompt in enumerate(prompts)]

    def answers(some: list[Request], batch_size: int) -> list[Finished]:
        return list(
            generate(target, draft, some, GREEDY, max_new_tokens=9, batch_size=batch_size, capture=True, timers=False)
        )

    alone = {request.prompt_id: answers([request], 1)[0] for request in requests}
    for batch_size in (1, 4, 16):
        for one in answers(requests, batch_size):
            expected = alone[one.prompt_id]
            assert one.output_ids == expected.output_ids
            assert [item.accepted for item in one.rounds] == [item.accepted for item in expected.rounds]
            assert one.captured is not None
            assert expected.captured is not None
            for part, wanted in zip(one.captured, expected.captured, strict=True):
                torch.testing.assert_close(part, wanted, rtol=1e-6, atol=1e-6)


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


def _without_seconds(answers: list[Finished]) -> list[Finished]:
    return [
        one._replace(rounds=[item._replace(seconds_draft=0.0, seconds_verify=0.0) for item in one.rounds])
        for one in answers
    ]


def test_drafts_with_taps_of_their_own_take_turns_on_one_target() -> None:
    target = tiny_target("qwen3", layer_ids=(0, 1, 3))
    first = kind_of_draft(target, "dspark-vanilla").eval()
    alone = _without_seconds(_decode(target, first, 6, 20, 4))
    target.tap((0, 2, 3))
    second = kind_of_draft(target, "dspark-vanilla").eval()
    _decode(target, second, 2, 5, 2)
    assert target.layer_ids == second.spec.layer_ids
    assert _without_seconds(_decode(target, first, 6, 20, 4)) == alone


def test_a_target_whose_logits_are_nan_is_refused_instead_of_decoded() -> None:
    target = tiny_target()
    with torch.no_grad():
        target.head.weight[5] = float("nan")
    with pytest.raises(TargetError, match="gives NaN as logits in float32"):
        list(generate(target, None, [Request("a", [7, 8])], Sampling(0.0), max_new_tokens=4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_target_that_gives_nan_on_the_way_is_named_with_the_place(temperature: float, is_drafted: bool) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dspark-vanilla").eval() if is_drafted else None

    def overflow(module: nn.Module, arguments: tuple[object, ...], output: Tensor) -> Tensor:
        # The rows that have come to an eleventh token.
        return output.masked_fill((places[0] > 10)[..., None], float("nan"))

    def look(module: nn.Module, arguments: tuple[object, ...], named: dict[str, Tensor]) -> None:
        places[0] = named["position_ids"]

    places = [torch.zeros(1, 1)]
    target.layer(0).register_forward_pre_hook(look, with_kwargs=True)
    target.final_norm.register_forward_hook(overflow)
    requests = [Request("short", [7, 8]), Request("long", [7, 8, 9, 10, 11, 12, 13])]
    with pytest.raises(TargetError, match=r"gives NaN behind token \d+ of 'long' in float32"):
        list(generate(target, draft, requests, Sampling(temperature), max_new_tokens=30, batch_size=2))
