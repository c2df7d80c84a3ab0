"""Rounds as a table: what estimates read, small enough to keep those of a whole suite in memory.

It turns records into columns, cuts tables into parts and puts them together; it computes no estimate.
Letters: N rounds, P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspec.decoding.rounds import Round

Integers = NDArray[np.int32]

CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Context lengths, in tokens, at which the parts of `split_by_context` begin."""


class RoundTable(NamedTuple):
    """Rounds as columns: twenty bytes a round, where records take a kilobyte.

    Attributes:
        prompts: ids, ascending, so that no result depends on the order of decoding; some may have no round.
        prompt: [N] index of each round's prompt.
        position: [N] context length at its anchor, in tokens.
        proposed: [N] draft tokens that were verified.
        accepted: [N] those that were kept.
        emitted: [N] accepted + 1, or accepted where an accepted stop token ended the round.
    """

    prompts: list[str]
    prompt: Integers
    position: Integers
    proposed: Integers
    accepted: Integers
    emitted: Integers

    def where(self, chosen: NDArray[np.bool_]) -> RoundTable:
        """Only some rounds; all prompts stay."""
        return RoundTable(self.prompts, *(column[chosen] for column in self[1:]))

    def of_prompts(self, wanted: Iterable[str]) -> RoundTable:
        """Only the rounds of some prompts, and only these prompts."""
        kept = set(wanted)
        places = [index for index, prompt in enumerate(self.prompts) if prompt in kept]
        renumbered = np.full(len(self.prompts), -1, dtype=np.int32)
        renumbered[places] = np.arange(len(places), dtype=np.int32)
        chosen = renumbered[self.prompt] >= 0
        return RoundTable(
            [self.prompts[index] for index in places],
            renumbered[self.prompt[chosen]],
            *(column[chosen] for column in self[2:]),
        )


Rounds = RoundTable | Mapping[str, Sequence[Round]] | Sequence[Round]


def group_by_prompt(rounds: Mapping[str, Sequence[Round]] | Sequence[Round]) -> dict[str, list[Round]]:
    """Return the rounds of each prompt, prompts sorted by id so that no result depends on the order of decoding."""
    if isinstance(rounds, Mapping):
        return {prompt: list(rounds[prompt]) for prompt in sorted(rounds)}
    groups: dict[str, list[Round]] = {}
    for record in rounds:
        groups.setdefault(record.prompt_id, []).append(record)
    return {prompt: groups[prompt] for prompt in sorted(groups)}


def as_table(rounds: Rounds) -> RoundTable:
    """Return rounds of any form as a table."""
    if isinstance(rounds, RoundTable):
        return rounds
    groups = group_by_prompt(rounds)
    rows = [
        (index, record.position, record.proposed, record.accepted, record.emitted)
        for index, records in enumerate(groups.values())
        for record in records
    ]
    columns = np.array(rows, dtype=np.int32).reshape(-1, 5).T.copy()
    return RoundTable(list(groups), *columns)


def split_by_domain(rounds: Rounds, domain_of: Callable[[str], str]) -> dict[str, RoundTable]:
    """Return the rounds of each domain, domains sorted by name."""
    table = as_table(rounds)
    members: dict[str, list[str]] = {}
    for prompt in table.prompts:
        members.setdefault(domain_of(prompt), []).append(prompt)
    return {domain: table.of_prompts(members[domain]) for domain in sorted(members)}


def split_by_context(rounds: Rounds) -> dict[tuple[int, int | None], RoundTable]:
    """Return the rounds whose anchor lies at low <= position < high by (low, high); only prompts that have some.

    The last high is None; parts without a round are left out.
    """
    table = as_table(rounds)
    parts = {}
    highs: list[int | None] = [*CONTEXT_EDGES[1:], None]
    for low, high in zip(CONTEXT_EDGES, highs, strict=True):
        inside = table.where((table.position >= low) & (table.position < (high or np.inf)))
        if len(inside.prompt):
            parts[low, high] = inside.of_prompts(table.prompts[index] for index in set(inside.prompt.tolist()))
    return parts


def pooled(parts: Mapping[str, Rounds]) -> RoundTable:
    """Return the rounds of several tasks as one table; prompts are told apart by their task."""
    tables = {name: as_table(part) for name, part in parts.items()}
    prompts = [f"{name}/{prompt}" for name, table in tables.items() for prompt in table.prompts]
    starts = np.cumsum([0, *(len(table.prompts) for table in tables.values())])
    shifted = [table.prompt + start for table, start in zip(tables.values(), starts, strict=False)]
    columns = [np.concatenate(column) for column in zip(*(table[2:] for table in tables.values()), strict=True)]
    return RoundTable(prompts, np.concatenate(shifted).astype(np.int32), *columns)
