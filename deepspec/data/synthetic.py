"""Prompts written for the quickstart: chat, maths and code requests that a very small model answers with some text.

Held-out prompts are the same kinds of request about other things: they share no topic with the training prompts (no
concept, person, item, task or piece of code), so a draft measured on them is measured on new text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal

from deepspec.data import synthetic_chat, synthetic_code, synthetic_maths
from deepspec.data.prompts import Conversation, Message, content_id
from deepspec.data.synthetic_material import Material, draw
from deepspec.data.synthetic_material import split as split_material
from deepspec.errors import ConfigError

DOMAINS = ("chat", "maths", "code")
_SPLIT = {
    "chat": split_material(synthetic_chat.MATERIAL),
    "maths": split_material(synthetic_maths.MATERIAL),
    "code": split_material(synthetic_code.MATERIAL),
}
_MATERIAL: Mapping[str, Mapping[str, Material]] = {
    "train": {domain: train for domain, (train, _) in _SPLIT.items()},
    "held_out": {domain: held_out for domain, (_, held_out) in _SPLIT.items()},
}
_FOLLOW_UP_SHARE = {"train": 0.06, "held_out": 0.0}
# A domain is given up once this many draws in a row gave nothing new.
_PATIENCE = 2000


def synthetic_prompts(split: Literal["train", "held_out"], count: int, seed: int) -> list[Conversation]:
    """Make `count` different prompts, the domains in turn.

    The first prompts do not depend on `count`: a longer list only adds to a shorter one of the same seed.

    Args:
        split: "train", or "held_out" with other topics.
        count: number of prompts; equal shares of chat, maths and code.
        seed: another seed draws another selection and order.

    Raises:
        ConfigError: the split cannot give so many different prompts.
    """
    generators = {domain: random.Random(f"{seed}/{split}/{domain}") for domain in DOMAINS}
    seen: set[tuple[str, ...]] = set()
    prompts: list[Conversation] = []
    for index in range(count):
        domain = DOMAINS[index % len(DOMAINS)]
        for _ in range(_PATIENCE):
            turns = draw(_MATERIAL[split][domain], _FOLLOW_UP_SHARE[split], generators[domain])
            # By the first turn: the same request with and without a follow-up would give the same answer twice.
            if turns[:1] not in seen:
                break
        else:
            raise ConfigError(
                f"{count:,} synthetic {split} prompts are asked for, but only {index:,} exist. Ask for fewer."
            )
        seen.add(turns[:1])
        messages = tuple(Message("user", text) for text in turns)
        prompts.append(Conversation(f"{split}/{domain}/{content_id(messages)}", messages, domain))
    return prompts


def synthetic_topics(split: Literal["train", "held_out"]) -> dict[str, frozenset[str]]:
    """Return what the prompts of a split are about: every topic of every slot, per domain."""
    return {
        domain: frozenset(topic for topics in material.topics.values() for topic in topics)
        for domain, material in _MATERIAL[split].items()
    }
