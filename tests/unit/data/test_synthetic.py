"""Synthetic prompts: deterministic, different, and held-out ones far from the training ones."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

import pytest

from deepspec.data.prompts import Conversation
from deepspec.data.synthetic import DOMAINS, synthetic_prompts, synthetic_topics
from deepspec.errors import ConfigError

SPLITS: tuple[Literal["train", "held_out"], ...] = ("train", "held_out")


def words(conversation: Conversation) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", " ".join(turn.content for turn in conversation.turns).lower()))


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(split: Literal["train", "held_out"]) -> None:
    assert synthetic_prompts(split, 60, 1) == synthetic_prompts(split, 60, 1)
    assert synthetic_prompts(split, 60, 1) != synthetic_prompts(split, 60, 2)


@pytest.mark.parametrize("split", SPLITS)
def test_a_longer_list_begins_with_the_shorter_one(split: Literal["train", "held_out"]) -> None:
    assert synthetic_prompts(split, 90, 0)[:31] == synthetic_prompts(split, 31, 0)


@pytest.mark.parametrize(("split", "count"), [("train", 12_000), ("held_out", 600)])
def test_domains_have_equal_shares_and_no_prompt_comes_twice(split: Literal["train", "held_out"], count: int) -> None:
    prompts = synthetic_prompts(split, count, 0)
    assert Counter(prompt.domain for prompt in prompts) == dict.fromkeys(DOMAINS, count // 3)
    assert len({prompt.id for prompt in prompts}) == count
    assert len({prompt.turns[0].content for prompt in prompts}) == count


@pytest.mark.parametrize("split", SPLITS)
def test_every_slot_is_filled_and_every_turn_is_the_users(split: Literal["train", "held_out"]) -> None:
    for prompt in synthetic_prompts(split, 600, 3):
        for turn in prompt.turns:
            assert turn.role == "user"
            assert re.search(r"\{[a-z]+(_\d)?\}", turn.content) is None, turn.content
            assert turn.content.isascii()


def test_few_training_prompts_and_no_held_out_prompt_have_a_second_turn() -> None:
    train = synthetic_prompts("train", 3000, 0)
    assert 0.01 < sum(len(prompt.turns) == 2 for prompt in train) / len(train) < 0.08
    assert all(len(prompt.turns) == 1 for prompt in synthetic_prompts("held_out", 300, 0))


def test_no_topic_is_shared_between_training_and_held_out() -> None:
    train = frozenset[str]().union(*synthetic_topics("train").values())
    held_out = frozenset[str]().union(*synthetic_topics("held_out").values())
    assert not {topic.lower() for topic in train} & {topic.lower() for topic in held_out}


def test_no_held_out_prompt_resembles_a_training_prompt() -> None:
    train = [(prompt.domain, words(prompt)) for prompt in synthetic_prompts("train", 6000, 0)]
    for prompt in synthetic_prompts("held_out", 150, 0):
        own = words(prompt)
        nearest = max(len(own & other) / len(own | other) for domain, other in train if domain == prompt.domain)
        # Two phrasings of one request share well over half of their words; chance overlap stays near a third.
        assert nearest < 0.5, prompt.turns[0].content


def test_asking_for_more_than_there_is_says_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match=r"5,000 .* only \d+ exist"):
        synthetic_prompts("held_out", 5000, 0)
