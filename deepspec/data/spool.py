"""Rows of prompts on disk while it is being decided which of them are kept.

Of each row some 350 bytes are held, most of them on disk as well, whatever the length of its text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from deepspec.data.grams import SIGNATURE_SIZE, Hashes, first_of_kind, signature
from deepspec.data.prompts import Conversation, row_of
from deepspec.data.sources import PlacedRow

Rows = npt.NDArray[np.int64]


class UsableRow(NamedTuple):
    """A row that can be trained on."""

    placed: PlacedRow
    conversation: Conversation
    grams: Hashes


class Spool:
    """Usable rows on disk, in the order in which they were read, and what has to be known of each."""

    def __init__(self, folder: Path) -> None:
        """Start empty in a folder of its own."""
        self._rows, self._signatures = folder / "rows.jsonl", folder / "signatures"
        self._offsets, self._ranks, self._domains = array("Q"), array("Q"), array("I")
        self._ids, self._texts = array("Q"), array("Q")
        self._sources, self._numbers = array("I"), array("Q")
        self._domain_numbers: dict[str, int] = {}
        self._source_numbers: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def fill(self, usable: Iterator[UsableRow], seed: int) -> None:
        """Take in all rows."""
        with self._rows.open("wb") as rows, self._signatures.open("wb") as signatures:
            for placed, conversation, held in usable:
                identity = conversation.id.encode()
                line = (json.dumps(row_of(conversation), ensure_ascii=False) + "\n").encode()
                rows.write(line)
                signatures.write(signature(held).tobytes())
                self._offsets.append(self._size)
                self._size += len(line)
                self._ranks.append(xxhash.xxh3_64_intdigest(identity, seed=seed))
                self._ids.append(xxhash.xxh3_64_intdigest(identity))
                self._texts.append(xxhash.xxh3_64_intdigest(line))
                where = f"{placed.source} {placed.unit}"
                self._sources.append(self._source_numbers.setdefault(where, len(self._source_numbers)))
                self._numbers.append(placed.row.number)
                domain = conversation.domain
                self._domains.append(self._domain_numbers.setdefault(domain, len(self._domain_numbers)))

    def place(self, row: int) -> str:
        """File and line of a row."""
        return f"{list(self._source_numbers)[self._sources[row]]} {self._numbers[row]}"

    def repeated(self) -> tuple[Rows, Rows, Rows]:
        """Rows with the id of an earlier one; that earlier row; and whether it says the same, all in order."""
        if not len(self):
            return (np.empty(0, dtype=np.int64),) * 3
        ids, texts = _view(self._ids), _view(self._texts)
        order = np.argsort(ids, kind="stable")
        is_later = np.concatenate([[False], ids[order][1:] == ids[order][:-1]])
        starts = np.maximum.accumulate(np.where(is_later, 0, np.arange(len(order))))
        later, first = order[is_later], order[starts[is_later]]
        in_order = np.argsort(later)
        later, first = later[in_order], first[in_order]
        return later, first, texts[later] == texts[first]

    def firsts(self, rows: Rows, similarity: float) -> Rows:
        """Those of some rows that are not near-duplicates of an earlier one of them."""
        if not len(rows):
            return rows
        shape = (len(self), SIGNATURE_SIZE)
        signatures = np.memmap(self._signatures, dtype=np.uint32, mode="r", shape=shape)
        is_first = first_of_kind(signatures, rows, similarity) == np.arange(len(rows))
        return np.asarray(rows[is_first])

    def lines(self, rows: Rows) -> Iterator[str]:
        """The lines of some rows."""
        with self._rows.open("rb") as file:
            for row in rows.tolist():
                file.seek(self._offsets[row])
                yield file.readline().decode()

    def by_domain(self, rows: Rows) -> dict[str, Rows]:
        """Rows of each domain, in an order drawn for this seed."""
        if not len(rows):
            return {}
        drawn = rows[np.argsort(_view(self._ranks)[rows], kind="stable")]
        domains = _view(self._domains)[drawn]
        found = {name: drawn[domains == number] for name, number in self._domain_numbers.items()}
        return {name: members for name, members in sorted(found.items()) if len(members)}


def _view(values: array[int]) -> npt.NDArray[Any]:
    """An array's own memory; the array must not grow while the view is used."""
    return np.frombuffer(values, dtype=values.typecode)
