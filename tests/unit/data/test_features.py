"""Whatever the memory holds, a training sees the same target states at every position that a loss reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from chat_targets import LAYERS, chat_target
from helpers import coefficients_for, kind_of_draft
from torch import Tensor

from deepspec.config import TargetConfig
from deepspec.data.chat import TokenSample, samples_from_answers
from deepspec.data.features import FeatureMemory, OnlineFeatures, TargetPass, content_key
from deepspec.data.journal import read_journal
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.data.prompts import Conversation, Message
from deepspec.data.regenerate import AnswerSettings, answer_prompts
from deepspec.decoding.sampling import Sampling
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch

CONFIG = TargetConfig(
    name_or_path="tiny-chat",
    dtype="float32",
    attention="sdpa",
    enable_thinking=False,
    short_name="tiny",
)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
# The log normaliser is stored in single precision.
SINGLE = {"rtol": 1e-6, "atol": 1e-6}
GIB_PER_BYTE = 2.0**-30


@lru_cache
def target_in_memory() -> Target:
    return chat_target()


def conversations(count: int = 9) -> list[Conversation]:
    made = []
    for index in range(count):
        texts = ["hello " * (1 + index % 4), "and then?"] if index % 4 == 3 else ["why " * (1 + index % 5)]
        made.append(Conversation(f"c{index}", tuple(Message("user", text) for text in texts), ""))
    return made


def answered(folder: Path, memory: FeatureMemory | None = None) -> list[TokenSample]:
    """Samples of answers that the target gives; a memory that is passed sees them being made."""
    target = target_in_memory()
    settings = AnswerSettings(Sampling(), max_new_tokens=14, seed=2, batch_size=4)
    path = folder / "answers.jsonl"
    answer_prompts(target, CONFIG, conversations(), settings, path, memory)
    rows = sorted(read_journal(path), key=lambda row: str(row["id"]))
    return [
        sample
        for row in rows
        for sample in samples_from_answers(row, target.tokenizer, enable_thinking=False, system_prompt=None)
    ]


def batches(samples: Sequence[TokenSample], micro_batch_size: int = 4, epochs: int = 1) -> list[TokenBatch]:
    loader = BatchLoader(
        samples,
        limits=BatchLimits(len(samples), micro_batch_size),
        num_anchors=6,
        seed=1,
        pad_token_id=0,
    )
    steps = loader.steps()
    return [batch for _ in range(epochs) for batch in next(steps).micro_batches]


def read_positions(tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """Where a loss may read states, and where it reads the normaliser: a label follows, and it is an answer token."""
    positions = torch.arange(tokens.input_ids.shape[1])
    states = positions < tokens.lengths[:, None] - 1
    predicts = torch.zeros_like(tokens.answer_mask)
    predicts[:, :-1] = tokens.answer_mask[:, 1:]
    return states, predicts


def naive(tokens: TokenBatch) -> FeatureBatch:
    """Every sample through the target alone, unpadded."""
    target = target_in_memory()
    target.tap(LAYERS)
    batch, length = tokens.input_ids.shape
    features = torch.zeros(batch, length, len(LAYERS) * target.hidden_size, dtype=target.dtype)
    last_hidden = torch.zeros(batch, length, target.hidden_size, dtype=target.dtype)
    normaliser = torch.zeros(batch, length)
    for row, size in enumerate(tokens.lengths.tolist()):
        found, hidden = target.features(tokens.input_ids[row : row + 1, :size])
        features[row, :size], last_hidden[row, :size] = found[0], hidden[0]
        normaliser[row, :size] = target.logits(hidden[0]).exp().sum(dim=-1).log()
    return FeatureBatch(tokens, features, last_hidden, normaliser)


def assert_same(found: FeatureBatch, expected: FeatureBatch) -> None:
    states, predicts = read_positions(found.tokens)
    assert found.features.shape == expected.features.shape
    torch.testing.assert_close(found.features[states], expected.features[states], **TOLERANCE)
    torch.testing.assert_close(found.last_hidden[states], expected.last_hidden[states], **TOLERANCE)
    if found.log_normaliser is not None:
        assert found.log_normaliser.dtype == torch.float32
        assert expected.log_normaliser is not None
        torch.testing.assert_close(found.log_normaliser[predicts], expected.log_normaliser[predicts], **SINGLE)


class Counted:
    """Counts the rows that the target really runs over."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        run = target.features

        def features(input_ids: Tensor) -> tuple[Tensor, Tensor]:
            self.rows += len(input_ids)
            return run(input_ids)

        monkeypatch.setattr(target, "features", features)


@pytest.mark.parametrize("needs_log_normaliser", [False, True])
def test_features_are_the_same_without_memory_with_one_and_with_one_filled_while_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_log_normaliser: bool
) -> None:
    target = target_in_memory()
    while_answering = FeatureMemory(1.0)
    samples = answered(tmp_path, while_answering)
    expected = [naive(tokens) for tokens in batches(samples, epochs=2)]
    counted = Counted(target, monkeypatch)
    ran = {}
    for name, memory in (("none", FeatureMemory(0.0)), ("own", FeatureMemory(1.0)), ("filled", while_answering)):
        counted.rows = 0
        features = OnlineFeatures(target, samples, memory, needs_log_normaliser=needs_log_normaliser)
        for tokens, wanted in zip(batches(samples, epochs=2), expected, strict=True):
            found = features.complete(tokens)
            assert (found.log_normaliser is not None) == needs_log_normaliser
            assert_same(found, wanted)
        ran[name] = counted.rows
    # The last turn reads all the others, but their logsumexps were not made in one piece with its own.
    several_turns = len(samples) - sum(len(conversation.turns) == 1 for conversation in conversations())
    assert several_turns > 0
    again = several_turns if needs_log_normaliser else 0
    assert ran == {"none": 2 * len(samples), "own": len(samples), "filled": again}


@pytest.mark.parametrize("kind", ["dspark-vanilla", "dflash-fill_in", "eagle3"])
def test_losses_and_gradients_do_not_depend_on_where_the_features_come_from(tmp_path: Path, kind: str) -> None:
    target = target_in_memory()
    target.tap(LAYERS)
    while_answering = FeatureMemory(1.0)
    samples = answered(tmp_path, while_answering)
    tokens = batches(samples, micro_batch_size=len(samples))[0]
    results = []
    for memory in (FeatureMemory(0.0), while_answering):
        draft = kind_of_draft(target, kind)
        batch = OnlineFeatures(target, samples, memory, needs_log_normaliser=True).complete(tokens)
        terms = draft(batch, coefficients_for(draft, batch))
        terms.objective.backward()
        gradients = [part.grad for part in draft.parameters() if part.grad is not None]
        results.append((terms.objective.detach(), *gradients))
    assert all(bool(gradient.isfinite().all()) for gradient in results[1])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)


def test_features_can_be_saved_by_autograd_and_leave_the_memory_untouched(tmp_path: Path) -> None:
    target = target_in_memory()
    samples = answered(tmp_path)
    tokens = batches(samples)[0]
    features = OnlineFeatures(target, samples, FeatureMemory(1.0), needs_log_normaliser=True)
    for _ in range(2):
        batch = features.complete(tokens)
        weight = torch.ones(batch.features.shape[-1], dtype=target.dtype, requires_grad=True)
        (batch.features * weight).sum().backward()
        assert_same(batch, naive(tokens))
        for part in (batch.features, batch.last_hidden, batch.log_normaliser):
            assert part is not None
            part.fill_(7.0)


def test_a_batch_may_hold_remembered_and_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_in_memory()
    samples = answered(tmp_path)
    whole = batches(samples, micro_batch_size=len(samples))[0]
    counted = Counted(target, monkeypatch)
    features = OnlineFeatures(target, samples, FeatureMemory(1.0), needs_log_normaliser=True)
    for rows in ([4, 1], [1, 3, 4, 0], list(range(len(samples)))):
        part = TokenBatch(*(tensor[rows] for tensor in whole))
        assert_same(features.complete(part), naive(part))
    assert counted.rows == len(samples) + 2 + 4 + len(samples), "the naive passes, and each sample once"


def test_a_pass_without_normaliser_is_made_again_where_one_is_needed_and_then_serves_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, memory = target_in_memory(), FeatureMemory(1.0)
    samples = answered(tmp_path)
    tokens = batches(samples, micro_batch_size=len(samples))[0]
    expected = naive(tokens)
    counted = Counted(target, monkeypatch)
    for needed, rows in ((False, len(samples)), (True, 2 * len(samples)), (False, 2 * len(samples))):
        found = OnlineFeatures(target, samples, memory, needs_log_normaliser=needed).complete(tokens)
        assert_same(found, expected)
        assert (found.log_normaliser is None) != needed
        assert counted.rows == rows


def test_the_budget_is_never_exceeded_and_what_does_not_fit_is_computed_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_in_memory()
    samples = answered(tmp_path)
    tokens = batches(samples, micro_batch_size=len(samples))[0]
    expected = naive(tokens)
    per_token = (len(LAYERS) + 1) * target.hidden_size * 8 + 4
    sizes = {content_key(sample.input_ids): per_token * len(sample.input_ids) for sample in samples}
    budget = sum(sizes.values()) // 2
    memory = FeatureMemory(budget * GIB_PER_BYTE)
    counted = Counted(target, monkeypatch)
    features = OnlineFeatures(target, samples, memory, needs_log_normaliser=True)
    assert_same(features.complete(tokens), expected)
    held = [key for key in sizes if memory.get(key, True) is not None]
    assert 0 < len(held) < len(samples)
    assert sum(sizes[key] for key in held) <= budget
    assert all(budget - sum(sizes[key] for key in held) < sizes[key] for key in sizes if key not in held)
    for _ in range(2):
        counted.rows = 0
        assert_same(features.complete(tokens), expected)
        assert counted.rows == len(samples) - len(held)


def test_a_pass_takes_the_bytes_that_are_counted_for_it() -> None:
    big = torch.zeros(50, 100, 8, dtype=torch.float64)
    memory = FeatureMemory(2 * (10 * 8 * 8 * 2) * GIB_PER_BYTE)
    for key in (b"a", b"b", b"c", b"a"):
        memory.remember(key, TargetPass(big, big, None).row(0, 10))
    assert [memory.get(key, False) is not None for key in (b"a", b"b", b"c")] == [True, True, False]
    held = memory.get(b"a", False)
    assert held is not None
    assert held.features.untyped_storage().nbytes() == held.features.nbytes, "not a view of the whole batch"


@pytest.mark.parametrize("change", ["target", "dtype", "taps"])
def test_another_target_dtype_or_choice_of_taps_empties_the_memory(tmp_path: Path, change: str) -> None:
    budget = 2**20
    memory = FeatureMemory(budget * GIB_PER_BYTE)
    samples = answered(tmp_path, memory)
    target = target_in_memory()
    keys = [content_key(sample.input_ids) for sample in samples]
    assert any(memory.get(key, True) is not None for key in keys)
    OnlineFeatures(target, samples, memory)
    assert any(memory.get(key, True) is not None for key in keys), "the same target goes on"
    if change == "target":
        OnlineFeatures(chat_target(name="other"), samples, memory)
    elif change == "dtype":
        OnlineFeatures(chat_target(torch.float32), samples, memory)
    else:
        target.tap((0, 2, 3))
        OnlineFeatures(target, samples, memory)
        target.tap(LAYERS)
    assert all(memory.get(key, False) is None for key in keys)
    # Its bytes are free again: one pass of the whole budget's size fits.
    states = torch.zeros(1, budget // 8, dtype=torch.float64)
    memory.remember(b"big", TargetPass(states, states[:, :0], None))
    assert memory.get(b"big", False) is not None


def test_rows_that_only_fill_a_batch_are_completed_but_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_in_memory()
    samples = answered(tmp_path)
    tokens = batches(samples, micro_batch_size=len(samples))[0]
    filler = tokens._replace(answer_mask=tokens.answer_mask & (torch.arange(len(samples)) > 1)[:, None])
    counted = Counted(target, monkeypatch)
    features = OnlineFeatures(target, samples, FeatureMemory(1.0), needs_log_normaliser=True)
    states = read_positions(tokens)[0]
    expected = naive(tokens)
    counted.rows = 0
    found = features.complete(filler)
    torch.testing.assert_close(found.features[states], expected.features[states], **TOLERANCE)
    assert counted.rows == len(samples)
    assert_same(features.complete(tokens), expected)
    assert counted.rows == len(samples) + 2, "the two rows, now with answers, are run again"


def test_further_sets_of_anchors_take_the_features_over_and_leave_the_target_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = answered(tmp_path)
    target = target_in_memory()
    target.tap(LAYERS)
    runs: list[torch.Size] = []
    original = target.features
    monkeypatch.setattr(target, "features", lambda ids: (runs.append(ids.shape), original(ids))[1])
    loader = BatchLoader(
        samples, limits=BatchLimits(len(samples), 4, anchor_sets=3), num_anchors=6, seed=1, pad_token_id=0
    )
    micro_batches = next(loader.steps()).micro_batches
    source = OnlineFeatures(target, samples, FeatureMemory(0.0), needs_log_normaliser=True)
    completed: list[FeatureBatch] = []
    for tokens in micro_batches:
        completed.append(source.complete(tokens, completed[-1] if completed else None))
    assert len(runs) == len(micro_batches) // 3 > 1
    for tokens, batch in zip(micro_batches, completed, strict=True):
        assert batch.tokens is tokens
        assert_same(batch, naive(tokens))
