"""The reduced draft vocabulary: one map, one invariant, no chance."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_draft, tiny_target

from deepspec.algorithms.base import VocabMap
from deepspec.errors import ConfigError


def _assert_invariant(vocab: VocabMap) -> None:
    tensors = vocab.tensors()
    ids = torch.arange(len(vocab.target_ids))
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], tensors["d2t"] + ids)
    assert torch.equal(vocab.draft_ids[vocab.target_ids], ids)
    assert bool((vocab.draft_ids[~tensors["t2d"]] == -1).all())


def test_offsets_and_mask_describe_the_same_ascending_ids() -> None:
    vocab = VocabMap.from_target_ids([7, 2, 9, 2], 12)
    assert vocab.target_ids.tolist() == [2, 7, 9]
    assert vocab.tensors()["d2t"].tolist() == [2, 6, 7]
    assert vocab.tensors()["t2d"].nonzero()[:, 0].tolist() == [2, 7, 9]
    _assert_invariant(vocab)
    again = VocabMap.from_tensors(vocab.tensors(), 12)
    assert torch.equal(again.target_ids, vocab.target_ids)
    assert torch.equal(again.draft_ids, vocab.draft_ids)


def test_the_vocabulary_holds_stop_tokens_then_what_answers_use_most_then_low_ids() -> None:
    answers = [[5, 5, 5, 8, 8, 1], [8, 9, 5]]
    assert VocabMap.from_answers(answers, 3, 12, always=[11]).target_ids.tolist() == [5, 8, 11]
    assert VocabMap.from_answers(answers, 4, 12, always=[11]).target_ids.tolist() == [1, 5, 8, 11]
    assert VocabMap.from_answers(answers, 7, 12, always=[11]).target_ids.tolist() == [0, 1, 2, 5, 8, 9, 11]
    _assert_invariant(VocabMap.from_answers(answers, 7, 12, always=[11, 11]))


@pytest.mark.parametrize("size", [12, 13, 1])
def test_a_size_that_is_no_reduction_or_has_no_room_for_stop_tokens_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"draft_vocab_size {size}.*12 ids.*use null"):
        VocabMap.from_answers([[1, 2]], size, 12, always=[3, 4])


@pytest.mark.parametrize("algorithm", ["dspark", "dflash", "eagle3"])
def test_probabilities_outside_the_draft_vocabulary_are_zero(algorithm: str) -> None:
    target = tiny_target(stop_token_ids=(50, 3))
    draft = tiny_draft(target, algorithm, draft_vocab_size=20)
    assert draft.vocab is not None
    assert {3, 50} <= set(draft.vocab.target_ids.tolist())
    probs = torch.rand(2, 4, 20)
    full = draft.full_probs(probs)
    assert full.shape == (2, 4, target.vocab_size)
    assert torch.equal(full[..., draft.vocab.target_ids], probs)
    assert bool((full[..., ~draft.vocab.tensors()["t2d"]] == 0).all())
    assert torch.equal(draft.draft_labels(draft.target_tokens(torch.arange(20))), torch.arange(20))
    assert torch.equal(draft.draft_head_weight, target.head.weight[draft.vocab.target_ids])


def test_without_a_reduction_ids_and_probabilities_pass_through() -> None:
    draft = tiny_draft(tiny_target(), "dflash")
    ids, probs = torch.arange(5), torch.rand(2, 96)
    assert draft.vocab is None
    assert torch.equal(draft.draft_labels(ids), ids)
    assert torch.equal(draft.target_tokens(ids), ids)
    assert torch.equal(draft.full_probs(probs), probs)
