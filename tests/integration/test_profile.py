"""The profile times the real steps of a tiny target and draft, and writes what schedules and SGLang read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_targets import save_chat_target, target_overrides
from helpers import kind_of_draft, tiny_target
from torch import Tensor

from deepspec.algorithms.base import Proposal
from deepspec.algorithms.checkpoint import save_draft
from deepspec.attention import Packing
from deepspec.config import compose_job
from deepspec.decoding.judge import Judgement, judge
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.decoding.sampling import Sampling
from deepspec.errors import ConfigError
from deepspec.scheduling.cost import CostCurve, Kind, RoundCosts, read_curve
from deepspec.scheduling.profile import request_tokens, run_profile
from deepspec.scheduling.rehearsal import Rehearsal, cut_budgets, probe, rising, round_costs, settled, turns
from deepspec.scheduling.settings import ProfileConfig
from deepspec.targets.base import Target


def config_for(folder: Path, *more: str) -> ProfileConfig:
    words = [
        *target_overrides(folder / "target"),
        f"output='{folder / 'curve.json'}'",
        "tokens=[1,3,8]",
        "contexts=[5,20]",
        "draft_requests=[1,3]",
        "repeats=2",
        "device=cpu",
    ]
    return compose_job("profile", ProfileConfig, [*words, *more])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    save_chat_target(folder / "target")
    target = Target.load(config_for(folder).target, torch.device("cpu"))
    for kind in ("dspark-vanilla", "eagle3"):
        (folder / kind).mkdir()
        save_draft(kind_of_draft(target, kind), folder / kind)
    return folder


@pytest.mark.parametrize("kind", ["dspark-vanilla", "eagle3", None])
def test_profile_writes_a_curve_with_provenance_and_sglangs_tables(place: Path, kind: str | None) -> None:
    curve = run_profile(config_for(place, f"draft={'null' if kind is None else place / kind}"))
    assert read_curve(place / "curve.json") == curve
    assert curve.tokens == (1, 3, 8)
    assert curve.contexts == (5, 20)
    assert curve.draft_requests == (() if kind is None else (1, 3))
    assert [one.requests for one in curve.rounds] == list(curve.draft_requests)
    for one in curve.rounds:
        assert one.cut_tokens == tuple(one.requests + slots for slots in cut_budgets(one.requests, 4))
        assert one.even_tokens == tuple(one.requests * (1 + window) for window in (0, 1, 2, 4))
        assert list(one.cut) == sorted(one.cut)
        assert list(one.even) == sorted(one.even)
    content = json.loads((place / "curve.json").read_text())
    assert {key: len(values) for key, values in content["seconds"].items()} == {
        f"{context}/{tokens}": 2 for context in (5, 20) for tokens in (1, 3, 8)
    }
    assert {key: len(values) for key, values in content["seconds_rounds"].items()} == {
        key: 2 * turns(one.requests)
        for one in curve.rounds
        for key in (
            f"plain/{one.requests}/{one.requests}",
            f"whole/{one.requests}/{5 * one.requests}",
            *(f"even/{one.requests}/{tokens}" for tokens in one.even_tokens[:-1]),
            *(f"cut/{one.requests}/{tokens}" for tokens in one.cut_tokens),
        )
    }
    assert content["made_with"]["hardware"]["cpus"] >= 1
    assert content["made_with"]["profile"]["repeats"] == 2
    for index, context in enumerate((5, 20)):
        table = json.loads((place / f"curve_sglang_{context}.json").read_text())
        assert table["sample_steps_per_sec"] == list(curve.steps_per_second[index])
        assert list(curve.steps_per_second[index]) == sorted(curve.steps_per_second[index], reverse=True)


def test_contexts_beyond_the_target_and_requests_beyond_a_block_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"contexts \[5, 600\]: .* has 512\. Use contexts up to 504"):
        run_profile(config_for(place, "contexts=[5,600]"))
    # Whole rounds with a draft go on behind the context.
    with pytest.raises(ConfigError, match=r"contexts \[430, 500\]: .* Use contexts up to 447"):
        run_profile(config_for(place, "contexts=[430,500]", f"draft={place / 'dspark-vanilla'}"))
    with pytest.raises(ConfigError, match="tokens_per_request 9 is above the anchor and 7 draft tokens"):
        run_profile(config_for(place, "tokens_per_request=9"))


@pytest.mark.parametrize(
    ("tokens", "each", "expected"),
    [(1, 2, [1]), (2, 2, [2]), (7, 2, [3, 2, 2]), (8, 1, [1] * 8), (3, 8, [3])],
)
def test_tokens_of_a_step_are_spread_evenly_over_requests(tokens: int, each: int, expected: list[int]) -> None:
    assert request_tokens(tokens, each) == expected


def test_rounds_of_the_profile_verify_what_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(
        ids: Tensor, positions: Tensor, cache: RaggedCache, visible: int, packing: Packing | None = None
    ) -> Any:
        ran.append(ids.numel() if packing is None else len(packing.rows))
        return forward(ids, positions, cache, visible, packing)

    target = tiny_target("qwen3")
    draft = kind_of_draft(target, "dspark-vanilla").eval()
    forward, ran = target.forward_cached, list[int]()
    monkeypatch.setattr(target, "forward_cached", counted)
    rehearsal = Rehearsal(target, draft, 20, 3, Sampling())
    block = draft.num_draft_tokens
    for _ in range(2):  # more rounds than one decoding has room for
        for slots in cut_budgets(3, block):
            rehearsal.seconds("cut", slots)
            assert ran[-1] == 3 + slots
    rehearsal.seconds("even", 3 * 2)
    assert ran[-1] == 3 * (1 + 2)
    rehearsal.seconds("whole", 0)
    assert ran[-1] == 3 * (block + 1)
    rehearsal.seconds("plain", 0)
    assert ran[-1] == 3


def test_costs_of_rounds_are_typical_ones_without_the_draft_and_never_fall() -> None:
    cut = {("cut", 2, 2 + slots): [1.0 + slots] * 3 for slots in cut_budgets(2, 3)}
    even = {("even", 2, 2): [2.0] * 3, ("even", 2, 4): [1.0] * 3, ("even", 2, 6): [6.0] * 3}
    others = {("plain", 4, 4): [7.0] * 3}
    seconds = {("plain", 2, 2): [2.0] * 3, ("whole", 2, 8): [5.0] * 3, **even, **cut, **others}
    found = round_costs(2, 3, seconds, 0.25)  # type: ignore[arg-type]
    assert (found.requests, found.plain, found.whole) == (2, pytest.approx(2.0), pytest.approx(4.75))
    # Two that fall count as their mean.
    assert (found.even_tokens, found.even) == ((2, 4, 6, 8), pytest.approx((1.25, 1.25, 5.25, 5.25)))
    assert found.cut_tokens == tuple(2 + slots for slots in cut_budgets(2, 3))
    assert list(found.cut) == pytest.approx([0.75 + slots for slots in cut_budgets(2, 3)])


def test_seconds_are_freed_of_slow_turns_and_of_single_stalls() -> None:
    own = {"a": 1.0, "b": 1.3, "c": 1.7, "d": 4.0}
    speeds = np.array([1.0, 2.0, 0.5, 1.0, 1.6, 0.7, 1.0])
    seconds = {key: value * speeds for key, value in own.items()}
    for index, key in enumerate(own):
        seconds[key][index] *= 30  # a stall, in another turn for each
    found = settled({key: values.tolist() for key, values in seconds.items()})
    assert found == pytest.approx(own)
    assert settled({"a": [3.0, 1.0, 2.0]}) == pytest.approx({"a": 2.0})
    assert settled({}) == {}


def test_the_pace_is_how_much_longer_rounds_of_every_kind_take_than_in_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(self: Rehearsal, kind: Kind, slots: int) -> float:
        played.append((kind, slots))
        return 3 * {"plain": 1.0, "whole": 5.0, "cut": 2.0 + slots}[kind]

    target = tiny_target("qwen3")
    draft = kind_of_draft(target, "dspark-vanilla")
    costs = RoundCosts(2, 1.0, 4.5, (2, 10), (1.0, 4.5), (2, 3, 10), (1.5, 2.5, 9.5))
    curve = CostCurve((1, 10), (20,), ((2.0, 1.0),), (2,), (0.5,), (costs,))
    monkeypatch.setattr(Rehearsal, "seconds", seconds)
    played: list[tuple[str, int]] = []
    pace = probe(target, draft, curve, 3, Sampling())
    assert pace is not None
    assert [pace() for _ in range(6)] == pytest.approx([3.0] * 6)
    assert played == [("plain", 0), ("whole", 0), ("cut", 0), ("cut", 1), ("cut", 8), ("plain", 0)]
    assert probe(target, draft, dataclasses.replace(curve, rounds=()), 3, Sampling()) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0, 3.0], (1, 2, 3)), ([3.0, 2.0, 1.0], (2, 2, 2)), ([1.0, 5.0, 3.0, 4.0, 9.0], (1, 4, 4, 4, 9))],
)
def test_values_that_fall_are_replaced_by_their_mean(values: list[float], expected: tuple[float, ...]) -> None:
    assert rising(values) == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_that_are_cut_alike_run_as_a_rectangle_and_are_judged_as_whole_ones(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spied(ids: Tensor, positions: Tensor, cache: RaggedCache, visible: int, packing: Packing | None = None) -> Any:
        ran.append((ids.shape[1], packing))
        return forward(ids, positions, cache, visible, packing)

    target = tiny_target("qwen3", dtype=torch.float64)
    forward, ran = target.forward_cached, list[tuple[int, Packing | None]]()
    monkeypatch.setattr(target, "forward_cached", spied)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(4, 90, (rows, 9), generator=generator)
    cache = RaggedCache.for_batch(rows)
    forward(ids, torch.arange(9).expand(rows, -1), cache, 9)
    probs = torch.rand(rows, 4, target.vocab_size, generator=generator, dtype=torch.float64).softmax(dim=-1)
    tokens = torch.randint(4, 90, (rows, 4), generator=generator)
    proposal = Proposal(tokens, probs, None, probs.amax(dim=-1))
    uniforms = torch.rand(rows, 6, generator=generator, dtype=torch.float64) / 8  # so that some are accepted
    lengths, starts = torch.full((rows,), 2), torch.full((rows,), 9)

    def judged(packing: Packing | None) -> Judgement:
        return judge(target, cache, ids[:, 0], starts, proposal, lengths, uniforms, 9 + 5, Sampling(), packing=packing)

    cut, whole = judged(Packing.of([3] * rows, target.device)), judged(None)
    assert ran == [(3, None), (5, None)]
    assert torch.equal(cut.accepted, whole.accepted)
    assert torch.equal(cut.bonus, whole.bonus)
    torch.testing.assert_close(cut.features, whole.features[:, :3])


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4"])
def test_packed_tokens_get_the_features_that_they_get_alone(family: str) -> None:
    target = tiny_target(family, dtype=torch.float64)
    ids = torch.randint(4, 90, (3, 30), generator=torch.Generator().manual_seed(1))
    whole, whole_last = target.features(ids)
    cache = RaggedCache.for_batch(3)
    starts = torch.tensor([0, 0, 0])
    target.forward_cached(ids[:, :9], torch.arange(9).expand(3, -1), cache, 9)
    # Prompts of unequal length: what lies behind a row's start is overwritten.
    starts = torch.tensor([9, 4, 7])
    for counts in ((4, 1, 2), (1, 5, 3), (3, 3, 1)):
        positions = starts[:, None] + torch.arange(max(counts))
        packing = Packing.of(counts, torch.device("cpu"))
        visible = int(positions.max()) + 1
        features, last_hidden = target.forward_cached(ids.gather(1, positions), positions, cache, visible, packing)
        assert features.shape[:2] == (1, sum(counts))
        padded, last = packing.padded(features[0]), packing.padded(last_hidden[0])
        for row, count in enumerate(counts):
            begin = int(starts[row])
            torch.testing.assert_close(padded[row, :count], whole[row, begin : begin + count])
            torch.testing.assert_close(last[row, :count], whole_last[row, begin : begin + count])
        starts = starts + torch.tensor(counts)


def test_packing_puts_tokens_side_by_side_and_back() -> None:
    packing = Packing.of([2, 1, 3], torch.device("cpu"))
    padded = torch.arange(9).view(3, 3)
    assert packing.flat(padded).tolist() == [0, 1, 3, 6, 7, 8]
    assert packing.padded(packing.flat(padded)).tolist() == [[0, 1, 0], [3, 0, 0], [6, 7, 8]]
