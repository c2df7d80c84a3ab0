"""What a family of synthetic prompts is made of: templates with slots, and what may fill the slots."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SLOT = re.compile(r"\{([a-z]+)(?:_\d)?\}")


class Material(NamedTuple):
    """One domain's prompts of one split.

    Attributes:
        templates: for each kind of request its phrasings; {slot} is filled from `topics` or `common`, {slot_1} and
            {slot_2} with different values.
        topics: the fillers that say what a prompt is about; never shared between splits.
        common: fillers of manner (tone, length, numbers), which splits may share.
        follow_ups: for a kind of request, second turns that fit any answer to it.
    """

    templates: Mapping[str, Sequence[str]]
    topics: Mapping[str, Sequence[str]]
    common: Mapping[str, Sequence[object]]
    follow_ups: Mapping[str, Sequence[str]]


def draw(material: Material, follow_up_share: float, generator: random.Random) -> tuple[str, ...]:
    """Draw one request, everything uniformly; a share of them gets a second turn where the kind has one."""
    kind = generator.choice(list(material.templates))
    used: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        slot, name = match.group(0), match.group(1)
        if slot not in used:
            choices = material.topics[name] if name in material.topics else material.common[name]
            taken = {value for key, value in used.items() if key.startswith(f"{{{name}_")}
            value = str(generator.choice(choices))
            while value in taken:
                value = str(generator.choice(choices))
            used[slot] = value
        return used[slot]

    turns = [_SLOT.sub(fill, generator.choice(material.templates[kind]))]
    if kind in material.follow_ups and generator.random() < follow_up_share:
        turns.append(generator.choice(material.follow_ups[kind]))
    return tuple(turns)


def on_other_topics(material: Material, topics: Mapping[str, Sequence[str]]) -> Material:
    """The same kinds of request about other things: templates whose topics all have a filler in `topics`."""

    def fits(template: str) -> bool:
        slots = {match.group(1) for match in _SLOT.finditer(template)} - set(material.common)
        return bool(slots) and slots <= set(topics)

    chosen = {kind: tuple(filter(fits, phrasings)) for kind, phrasings in material.templates.items()}
    return Material({kind: phrasings for kind, phrasings in chosen.items() if phrasings}, topics, material.common, {})
