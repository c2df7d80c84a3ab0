"""Texts as sets of word n-grams: near-duplicates among millions by MinHash, exact overlap with a few chosen texts.

Works on numbers only, so that a million texts cost a few hundred bytes each. Knows nothing of rows, files or tasks.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]
Signatures = npt.NDArray[np.uint32]

# Word trigrams find a prompt in which a word or two was changed.
DUPLICATE_WORDS = 3
# Enough for a standard error of 0.06 in an estimated similarity.
SIGNATURE_SIZE = 64
# Two texts of similarity s are compared with probability 1 - (1 - s^4)^16: 0.988 at 0.7, 0.9998 at 0.8.
_BANDS = 16
_PAIRS_PER_CHUNK = 65_536
# Chinese and Japanese put no space between words: there every character counts as one.
_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)


def _multipliers() -> Hashes:
    digests = [xxhash.xxh3_64_intdigest(b"%d" % number) | 1 for number in range(SIGNATURE_SIZE)]
    return np.array(digests, dtype=np.uint64)


_MULTIPLIERS = _multipliers()


def grams(texts: Iterable[str], size: int) -> Hashes:
    """Hashes of all runs of `size` words inside a text, each once, ascending.

    Case, punctuation and the spelling of characters (NFKC) do not count. A text of fewer words is one gram, which only
    an equally short text with the same words shares.

    Args:
        texts: the texts; no gram reaches from one into the next.
        size: words of a gram.
    """
    parts = [_grams_of(text, size) for text in texts]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.uint64)


def _grams_of(text: str, size: int) -> Hashes:
    normal = unicodedata.normalize("NFKC", text).casefold()
    words = _WORD.findall(normal) or [char for char in normal if not char.isspace()]
    digests = (xxhash.xxh3_64_intdigest(word.encode()) for word in words)
    hashes = np.fromiter(digests, dtype=np.uint64, count=len(words))
    length = min(size, len(words))
    if length == 0:
        return hashes
    combined = np.full(len(words) - length + 1, length, dtype=np.uint64)
    for offset in range(length):
        combined = combined * _BASE + hashes[offset : len(words) - length + 1 + offset]
    return _mixed(combined)


def _mixed(values: Hashes) -> Hashes:
    """Spread the information of all bits over all bits: products alone leave the low ones poor."""
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x7FB5D329728EA185)
    return np.asarray(values ^ (values >> np.uint64(27)))


def signature(of: Hashes) -> Signatures:
    """MinHash of a set of grams [SIGNATURE_SIZE]: two agree at a place with probability = Jaccard similarity."""
    if not len(of):
        return np.full(SIGNATURE_SIZE, np.iinfo(np.uint32).max, dtype=np.uint32)
    smallest: Hashes = _mixed(_MULTIPLIERS[:, None] * of).min(axis=1)
    return np.asarray((smallest >> np.uint64(32)).astype(np.uint32))


def first_of_kind(signatures: Signatures, rows: npt.NDArray[np.int64], similarity: float) -> npt.NDArray[np.int64]:
    """For each of some texts, the first of them that it is a near-duplicate of, even through others; else itself.

    Args:
        signatures: [m, SIGNATURE_SIZE], may be memory-mapped.
        rows: [n] which of them.
        similarity: least estimated Jaccard similarity of near-duplicates.

    Returns:
        [n] indices into `rows`.
    """
    parents = list(range(len(rows)))
    for band in range(0, SIGNATURE_SIZE, SIGNATURE_SIZE // _BANDS):
        keys = signatures[rows, band : band + SIGNATURE_SIZE // _BANDS].astype(np.uint64)
        keys = _mixed(keys[:, 0] << np.uint64(32) | keys[:, 1]) ^ (keys[:, 2] << np.uint64(32) | keys[:, 3])
        order = np.argsort(keys, kind="stable")
        is_later = np.concatenate([[False], keys[order][1:] == keys[order][:-1]])
        starts = np.maximum.accumulate(np.where(is_later, 0, np.arange(len(order))))
        later = np.flatnonzero(is_later)
        for other in (starts[later], later - 1):
            _join(parents, signatures, rows, np.stack([order[later], order[other]]), similarity)
    return np.array([_root(parents, row) for row in range(len(parents))], dtype=np.int64)


def _join(
    parents: list[int],
    signatures: Signatures,
    rows: npt.NDArray[np.int64],
    pairs: npt.NDArray[np.int64],
    similarity: float,
) -> None:
    """Unite the pairs [2, p] that are alike; the first of a group is its root."""
    for begin in range(0, pairs.shape[1], _PAIRS_PER_CHUNK):
        one, other = pairs[:, begin : begin + _PAIRS_PER_CHUNK]
        alike = (signatures[rows[one]] == signatures[rows[other]]).mean(axis=1) >= similarity
        for a, b in zip(one[alike].tolist(), other[alike].tolist(), strict=True):
            low, high = sorted((_root(parents, a), _root(parents, b)))
            parents[high] = low


def _root(parents: list[int], row: int) -> int:
    while parents[row] != row:
        parents[row] = parents[parents[row]]
        row = parents[row]
    return row


class Overlap(NamedTuple):
    """What one text shares with the texts of an index.

    Attributes:
        texts: [s] their numbers, ascending.
        shared: [s] grams that each shares with it.
        jaccard: [s] similarity of each with it.
    """

    texts: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]
    jaccard: npt.NDArray[np.float64]


class GramIndex:
    """Finds which of a few thousand texts share grams with another one, exactly."""

    def __init__(self, texts: Sequence[Hashes]) -> None:
        """Index the grams of texts."""
        self._sizes = np.array([len(text) for text in texts], dtype=np.int64)
        joined = np.concatenate(texts) if texts else np.empty(0, dtype=np.uint64)
        order = np.argsort(joined, kind="stable")
        self._grams, self._texts = joined[order], np.repeat(np.arange(len(texts)), self._sizes)[order]

    def overlap(self, with_grams: Hashes) -> Overlap:
        """Every indexed text that shares a gram with the given, distinct ones."""
        begins = np.searchsorted(self._grams, with_grams, side="left")
        is_there = begins < len(self._grams)
        is_there[is_there] = self._grams[begins[is_there]] == with_grams[is_there]
        begins = begins[is_there]
        ends = np.searchsorted(self._grams, with_grams[is_there], side="right")
        found = [self._texts[begin:end] for begin, end in zip(begins, ends, strict=True)]
        texts, shared = np.unique(np.concatenate(found) if found else self._texts[:0], return_counts=True)
        return Overlap(texts, shared, shared / (self._sizes[texts] + len(with_grams) - shared))


def without_set_phrases(texts: Sequence[Hashes], most_texts: int) -> list[Hashes]:
    """The grams of texts, without those that more than `most_texts` of them have."""
    counts = Counter(gram for text in texts for gram in text.tolist())
    return [text[np.array([counts[gram] <= most_texts for gram in text.tolist()], dtype=bool)] for text in texts]
