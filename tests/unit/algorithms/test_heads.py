"""Markov and confidence heads against their formulas, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepspec.algorithms.heads import ConfidenceHead, MarkovHead, VanillaHead, make_markov_head

V, RANK, HIDDEN, BLOCKS, SLOTS = 12, 3, 5, 4, 6


def _head(kind: str) -> MarkovHead:
    torch.manual_seed(1)
    return make_markov_head(kind, V, V - 2, RANK, HIDDEN).double()


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, dtype=torch.float64)
    return torch.randint(0, V, (BLOCKS, SLOTS), generator=generator), hidden


def _formula(head: MarkovHead, kind: str, previous: Tensor, hidden: Tensor) -> Tensor:
    """Latents of one block [K, r], written out."""
    weights = dict(head.named_parameters())
    state, latents = torch.zeros(RANK, dtype=torch.float64), []
    for slot, token in enumerate(previous.tolist()):
        embedded = weights["markov_w1.weight"][token]
        if kind == "vanilla":
            latents.append(embedded)
        elif kind == "gated":
            read = torch.cat([hidden[slot], embedded])
            gate = torch.sigmoid(weights["gate_proj.weight"] @ read + weights["gate_proj.bias"])
            latents.append(gate * embedded)
        else:
            read = torch.cat([state, embedded, hidden[slot]])
            joint = weights["joint_proj.weight"] @ read + weights["joint_proj.bias"]
            gate, candidate, output = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            latents.append(torch.tanh(output))
    return torch.stack(latents)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_walk_over_blocks_follows_the_formula(kind: str) -> None:
    head = _head(kind)
    previous, hidden = _inputs()
    found = head.walk(head.markov_w1(previous), hidden)
    for block in range(BLOCKS):
        torch.testing.assert_close(found[block], _formula(head, kind, previous[block], hidden[block]))
    assert head.markov_w2(found).shape == (BLOCKS, SLOTS, V - 2)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_steps_of_decoding_equal_the_walk_of_training(kind: str) -> None:
    head = _head(kind)
    previous, hidden = _inputs()
    walked = head.walk(head.markov_w1(previous), hidden)
    memory = torch.zeros(BLOCKS, RANK, dtype=torch.float64)
    for slot in range(SLOTS):
        latent, memory = head.step(head.markov_w1(previous[:, slot]), hidden[:, slot], memory)
        torch.testing.assert_close(latent, walked[:, slot])


def test_only_the_rnn_head_remembers_earlier_tokens() -> None:
    previous, hidden = _inputs()
    changed = previous.clone()
    changed[:, 0] = (changed[:, 0] + 1) % V
    for kind, remembers in (("vanilla", False), ("gated", False), ("rnn", True)):
        head = _head(kind)
        before, after = (head.walk(head.markov_w1(ids), hidden)[:, 1:] for ids in (previous, changed))
        assert torch.equal(before, after) != remembers


def test_the_confidence_is_a_single_precision_logit_under_autocast_and_in_bfloat16() -> None:
    torch.manual_seed(0)
    head, inputs = ConfidenceHead(HIDDEN), torch.randn(7, HIDDEN)
    expected = inputs @ head.proj.weight[0] + head.proj.bias
    with torch.autocast("cpu", torch.bfloat16):
        found = head(inputs)
    torch.testing.assert_close(found, expected)
    low = head.to(torch.bfloat16)(inputs.to(torch.bfloat16))
    assert low.dtype == torch.float32
    assert head.double()(inputs.double()).dtype == torch.float64


def test_a_bigram_start_prefers_what_follows_more_often_than_chance() -> None:
    torch.manual_seed(0)
    head = VanillaHead(V, V, V)
    answers = [[1, 2, 3, 1, 2, 3, 1, 2, 4, 5, 4, 5, 4, 5]] * 3
    head.start_from_bigrams(answers, torch.arange(V))
    bias = head.markov_w2(head.markov_w1.weight)
    assert int(bias[1].argmax()) == 2
    assert int(bias[5].argmax()) == 4
    # p(2 | 1) of 9 pairs with one pseudo-count of the unigram, over the unigram 9 / 39.
    unigram = 9 / 39
    torch.testing.assert_close(bias[1, 2].item(), math.log((9 + unigram) / 10 / unigram), rtol=1e-4, atol=1e-5)
    assert bias[7].abs().max() < 1e-5


def test_a_bigram_start_of_a_reduced_vocabulary_counts_its_tokens_alone_and_draws_nothing() -> None:
    head = VanillaHead(V, 3, 2)
    draft_ids = torch.full((V,), -1)
    draft_ids[torch.tensor([2, 3, 5])] = torch.arange(3)
    state = torch.random.get_rng_state()
    head.start_from_bigrams([[1, 2, 7, 1, 2, 3, 9, 5, 9, 5]], draft_ids)
    assert torch.equal(torch.random.get_rng_state(), state)
    bias = head.markov_w2(head.markov_w1.weight)
    assert bias.shape == (V, 3)
    assert int(bias[1].argmax()) == 0
    assert int(bias[9].argmax()) == 2
    first = head.markov_w1.weight.clone()
    head.start_from_bigrams([[1, 2, 7, 1, 2, 3, 9, 5, 9, 5]], draft_ids)
    assert torch.equal(head.markov_w1.weight, first)
