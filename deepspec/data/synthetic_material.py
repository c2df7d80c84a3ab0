"""What a family of synthetic prompts is made of: templates with slots, and what may fill the slots."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SLOT = re.compile(r"\{([a-z]+)(?:_\d)?\}")
_HELD_OUT_SHARE = 0.2


class Material(NamedTuple):
    """One domain's prompts of one split.

    Attributes:
        templates: for each kind of request its phrasings; {slot} is filled from `topics` or `common`, {slot_1} and
            {slot_2} with different values. Each names a topic, so that all kinds can be held out.
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


def split(material: Material) -> tuple[Material, Material]:
    """Training and held-out material: the same kinds of request, every slot's topics divided between them.

    Which topics are held out is decided by their hashes, so it is a random fifth and nobody's choice. Held-out requests
    have one turn.
    """
    kept: dict[str, Sequence[str]] = {}
    held_out: dict[str, Sequence[str]] = {}
    for slot, topics in material.topics.items():
        ranked = sorted(topics, key=_hash)
        count = max(1, round(_HELD_OUT_SHARE * len(topics)))
        held_out[slot] = tuple(ranked[:count])
        kept[slot] = tuple(topic for topic in topics if topic not in held_out[slot])

    return material._replace(topics=kept), material._replace(topics=held_out, follow_ups={})


def _hash(topic: str) -> bytes:
    return hashlib.blake2b(topic.encode(), digest_size=8).digest()
