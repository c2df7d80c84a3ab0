"""Synthetic prompts: deterministic, different, and held-out ones about other things than the training ones."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

import pytest

from deepspec.data import synthetic_chat, synthetic_code, synthetic_maths
from deepspec.data.synthetic import DOMAINS, synthetic_prompts, synthetic_topics
from deepspec.data.synthetic_material import Material, split
from deepspec.errors import ConfigError

SPLITS: tuple[Literal["train", "held_out"], ...] = ("train", "held_out")


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(split: Literal["train", "held_out"]) -> None:
    assert synthetic_prompts(split, 60, 1) == synthetic_prompts(split, 60, 1)
    assert synthetic_prompts(split, 60, 1) != synthetic_prompts(split, 60, 2)


@pytest.mark.parametrize("split", SPLITS)
def test_a_longer_list_begins_with_the_shorter_one(split: Literal["train", "held_out"]) -> None:
    assert synthetic_prompts(split, 90, 0)[:31] == synthetic_prompts(split, 31, 0)


@pytest.mark.parametrize(("split", "count"), [("train", 9_000), ("held_out", 900)])
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


def test_every_held_out_prompt_is_about_a_topic_that_no_training_prompt_mentions() -> None:
    topics = synthetic_topics("held_out")
    train: dict[str, str] = dict.fromkeys(DOMAINS, "")
    for prompt in synthetic_prompts("train", 6000, 0):
        train[prompt.domain] += f"\n{prompt.turns[0].content}"
    for prompt in synthetic_prompts("held_out", 300, 0):
        text = prompt.turns[0].content
        own = [topic for topic in topics[prompt.domain] if re.search(rf"(?<!\w){re.escape(topic)}(?!\w)", text)]
        assert own, text
        for topic in own:
            assert re.search(rf"(?<!\w){re.escape(topic)}(?!\w)", train[prompt.domain]) is None, topic


def test_asking_for_more_than_there_is_says_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match=r"9,000 .* only [\d,]+ exist"):
        synthetic_prompts("held_out", 9000, 0)


@pytest.mark.parametrize("material", [synthetic_chat.MATERIAL, synthetic_code.MATERIAL, synthetic_maths.MATERIAL])
def test_every_kind_of_request_names_a_topic_and_is_held_out_too(material: Material) -> None:
    train, held_out = split(material)
    assert train.templates == held_out.templates == material.templates
    for phrasings in material.templates.values():
        for phrasing in phrasings:
            assert any(f"{{{slot}" in phrasing for slot in material.topics), phrasing
    for slot, topics in material.topics.items():
        assert set(train.topics[slot]) | set(held_out.topics[slot]) == set(topics)
        assert len(held_out.topics[slot]) == max(1, round(0.2 * len(topics)))
