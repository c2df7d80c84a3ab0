"""States captured while answers are generated are those of the very samples that a training on them reads."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_targets import CONFIG, LAYERS, READING, chat_target
from helpers import coefficients_for, kind_of_draft
from torch import Tensor

from deepspec.data.cache import Cache
from deepspec.data.cache_manifest import manifest_of
from deepspec.data.cache_writer import open_writer
from deepspec.data.cached import CachedFeatures, open_cache
from deepspec.data.features import FeatureMemory, FeatureSource, OnlineFeatures
from deepspec.data.journal import read_journal
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.data.packed import PackedSamples
from deepspec.data.prompts import Conversation, Message
from deepspec.data.regenerate import AnswerSettings, answer_prompts
from deepspec.data.samples import read_token_samples
from deepspec.decoding.sampling import Sampling
from deepspec.errors import DataError
from deepspec.targets.base import Target

ROOM = 512


@lru_cache
def target_in_memory() -> Target:
    target = chat_target()
    target.tap(LAYERS)
    return target


def users(*lengths: int) -> tuple[Message, ...]:
    return tuple(Message("user", chr(97 + length % 26) * length) for length in lengths)


# Of 512 positions; every answer may take 40. Some end for want of room after one turn, some after two, some never.
CONVERSATIONS = [
    Conversation(f"c{number}", users(*lengths), "")
    for number, lengths in enumerate(
        [(300, 300), (200, 90, 300), (10, 20, 30), (420,), (5, 480), (150, 100, 60, 300), (12,), (50, 400, 5)]
    )
]


def captured(folder: Path) -> Path:
    target = target_in_memory()
    settings = AnswerSettings(Sampling(), max_new_tokens=40, seed=0, batch_size=3)
    with open_writer(folder / "cache", target, manifest_of(target, CONFIG, "bf16", None), 1) as writer:
        answer_prompts(target, CONFIG, CONVERSATIONS, settings, folder / "answers.jsonl", writer)
    return folder / "cache"


def samples_of(folder: Path, **changed: Any) -> PackedSamples:
    """What a training reads."""
    data = READING.model_copy(update={"max_length": ROOM, **changed})
    tokenizer = target_in_memory().tokenizer
    return read_token_samples(folder / "answers.jsonl", tokenizer, data, enable_thinking=False, system_prompt=None)[0]


def losses(source: FeatureSource, samples: PackedSamples) -> dict[str, float]:
    draft = kind_of_draft(target_in_memory(), "dspark-gated")
    limits = BatchLimits(len(samples), 3)
    loader = BatchLoader(samples, limits=limits, num_anchors=6, seed=1, pad_token_id=0)
    batches = next(loader.steps()).micro_batches
    sums: dict[str, Tensor] = {}
    source.upcoming(batches)
    for tokens in batches:
        batch = source.complete(tokens)
        for name, ratio in draft(batch, coefficients_for(draft, batch)).losses.items():
            sums[name] = sums.get(name, torch.zeros(2, dtype=torch.float64)) + torch.stack(ratio).double()
    return {name: float(total / count) for name, (total, count) in sums.items()}


def check_equal(cache: Path, samples: PackedSamples) -> None:
    target = target_in_memory()
    read = CachedFeatures(open_cache(cache, target), target, samples, prefetch_batches=2, needs_log_normaliser=True)
    online = OnlineFeatures(target, samples, FeatureMemory(0.0), needs_log_normaliser=True)
    expected = losses(online, samples)
    # bf16 keeps 8 bits: entries are off by 2^-9 of their size, at random, and means over them by less.
    assert losses(read, samples) == pytest.approx(expected, rel=2.0**-8)


def test_a_conversation_that_ends_for_want_of_room_is_captured_up_to_its_last_answer(tmp_path: Path) -> None:
    cache = captured(tmp_path)
    rows = {row["id"]: row for row in read_journal(tmp_path / "answers.jsonl")}
    cut_short = [
        one.id
        for one in CONVERSATIONS
        if len(rows[one.id]["answer_ids"]) < len(one.turns) and rows[one.id]["finish_reason"][-1] == "stop"
    ]
    assert len(cut_short) >= 2, "this seed must let some conversations end for want of room"
    samples = samples_of(tmp_path)
    assert {sample.id for sample in samples} == {one.id for one in CONVERSATIONS}
    stored = Cache(cache)
    assert all(place.length is None for place in stored.places(samples))
    assert len(stored.all_places()) == len(samples)  # each once, and nothing that no training asks for
    check_equal(cache, samples)


def test_a_training_that_cuts_or_supervises_less_reads_the_same_from_what_was_captured(tmp_path: Path) -> None:
    cache = captured(tmp_path)
    lengths = sorted(len(sample.input_ids) for sample in samples_of(tmp_path))
    for changed in ({"max_length": lengths[-1] - 3}, {"max_length": lengths[4] - 3}, {"last_turn_only": True}):
        samples = samples_of(tmp_path, **changed)
        places = Cache(cache).places(samples)
        assert any(place.length is not None for place in places) == ("max_length" in changed)
        check_equal(cache, samples)


def test_a_sample_that_is_no_beginning_of_a_stored_one_is_missed_by_name(tmp_path: Path) -> None:
    cache = Cache(captured(tmp_path))
    most = max(len(sample.input_ids) for sample in samples_of(tmp_path)) - 3
    (cut,) = (sample for sample in samples_of(tmp_path, max_length=most) if len(sample.input_ids) == most)
    assert cache.places([cut])[0].length == most
    other = cut._replace(input_ids=[*cut.input_ids[:-1], 1 + cut.input_ids[-1] % 50])
    unknown = cut._replace(id="another name")
    supervised = cut._replace(answer_mask=[True] * most)
    longer = cut._replace(input_ids=cut.input_ids + [5] * ROOM, answer_mask=cut.answer_mask + [True] * ROOM)
    for sample in (other, unknown, supervised, longer):
        with pytest.raises(DataError, match=r"lacks 1 of this run's 1 samples.*a larger data\.max_length"):
            cache.places([sample])
