"""Near-duplicates and overlaps, against comparing every text with every other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.data.grams import GramIndex, first_of_kind, grams, signature, without_set_phrases


def naive_grams(text: str, size: int) -> set[tuple[str, ...]]:
    words = text.lower().split()
    size = min(size, len(words))
    return {tuple(words[at : at + size]) for at in range(len(words) - size + 1)} if words else set()


def naive_jaccard(one: str, other: str, size: int) -> float:
    left, right = naive_grams(one, size), naive_grams(other, size)
    return len(left & right) / len(left | right)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Random sentences, and further ones made from them by changing a few words."""
    draw = random.Random(seed)
    words = [f"word{number}" for number in range(400)]
    made = [" ".join(draw.choices(words, k=draw.randint(1, 60))) for _ in range(count // 2)]
    while len(made) < count:
        changed = draw.choice(made[: count // 2]).split()
        for _ in range(draw.choice([0, 1, 1, 2, 5])):
            changed[draw.randrange(len(changed))] = draw.choice(words)
        made.append(" ".join(changed))
    return made


def test_grams_are_the_runs_of_words_whatever_their_case_and_punctuation() -> None:
    text = "How many eggs, then, does Janet sell?"
    assert len(grams([text], 3)) == len(naive_grams("how many eggs then does janet sell", 3)) == 5
    assert np.array_equal(grams([text], 3), grams(["HOW many; eggs then DOES janet -- sell"], 3))
    assert np.array_equal(grams(["\uff28ow many"], 2), grams(["how many"], 2))  # a full-width letter
    assert len(grams(["\u4f60\u597d\u4e16\u754c"], 3)) == 2  # every Chinese character is a word
    assert len(grams(["?!"], 3)) == 1
    assert len(grams([""], 3)) == len(grams([], 3)) == 0


def test_no_gram_reaches_from_one_text_into_the_next_and_a_short_text_is_one_gram() -> None:
    assert len(grams(["a b c", "d e f"], 3)) == 2
    assert not set(grams(["a b"], 3).tolist()) & set(grams(["a b c"], 3).tolist())
    assert not set(grams(["a b"], 3).tolist()) & set(grams(["a b c"], 2).tolist()) - set(grams(["a b"], 2).tolist())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(alphabet="ab \u00e9\u4e00\n.", max_size=30), max_size=5), st.integers(1, 4))
def test_grams_of_several_texts_are_those_of_each(texts: list[str], size: int) -> None:
    together = set(grams(texts, size).tolist())
    assert together == {gram for text in texts for gram in grams([text], size).tolist()}


def test_signatures_estimate_similarity() -> None:
    draw = random.Random(1)
    errors = []
    for _ in range(60):
        shared = [f"s{draw.random()}" for _ in range(draw.randint(1, 60))]
        one = " ".join(shared + [f"a{draw.random()}" for _ in range(draw.randint(0, 40))])
        other = " ".join(shared + [f"b{draw.random()}" for _ in range(draw.randint(0, 40))])
        found = float((signature(grams([one], 1)) == signature(grams([other], 1))).mean())
        errors.append(found - naive_jaccard(one.replace(".", ""), other.replace(".", ""), 1))
    # 64 independent places: the standard error is at most 0.0625, of 60 means 0.008.
    assert np.abs(errors).max() < 0.25
    assert abs(np.mean(errors)) < 0.03


def test_near_duplicates_are_found_and_others_are_left_alone() -> None:
    texts = sentences(260)
    signatures = np.stack([signature(grams([text], 3)) for text in texts])
    firsts = first_of_kind(signatures, np.arange(len(texts)), 0.7)
    pairs = {(a, b): naive_jaccard(texts[a], texts[b], 3) for a in range(len(texts)) for b in range(a)}
    similar = [pair for pair, value in pairs.items() if value >= 0.5]
    sure = [pair for pair, value in pairs.items() if value >= 0.85]
    assert len(sure) > 40
    assert all(firsts[a] == firsts[b] for a, b in sure)
    for row, first in enumerate(firsts.tolist()):
        assert first <= row
        assert firsts[first] == first
        # Whatever was joined, was joined through texts that share at least half.
        assert first == row or any(row in pair for pair in similar)


def test_only_the_asked_rows_are_compared() -> None:
    texts = ["a b c d e f", "a b c d e f", "x y z", "a b c d e f"]
    signatures = np.stack([signature(grams([text], 3)) for text in texts])
    assert first_of_kind(signatures, np.array([1, 2, 3]), 0.7).tolist() == [0, 1, 0]
    assert first_of_kind(signatures, np.array([], dtype=np.int64), 0.7).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_overlaps_are_exact(seed: int) -> None:
    texts = sentences(80, seed)
    index = GramIndex([grams([text], 3) for text in texts[:30]])
    for text in texts:
        found = index.overlap(grams([text], 3))
        shared = [len(naive_grams(text, 3) & naive_grams(held, 3)) for held in texts[:30]]
        assert found.texts.tolist() == [number for number, count in enumerate(shared) if count]
        assert found.shared.tolist() == [count for count in shared if count]
        expected = [naive_jaccard(text, texts[number], 3) for number in found.texts]
        np.testing.assert_allclose(found.jaccard, expected)


def test_set_phrases_of_a_task_are_forgotten() -> None:
    tail = " please reason step by step and put your answer into a box"
    texts = [f"the {number} birds of {number} sing in {number} trees{tail}" for number in ("one", "two", "ten")]
    index = GramIndex(without_set_phrases([grams([text], 5) for text in texts], 2))
    assert len(index.overlap(grams(["something else entirely" + tail], 5)).texts) == 0
    assert index.overlap(grams([texts[2]], 5)).texts.tolist() == [2]
