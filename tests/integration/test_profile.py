"""The profile times the real steps of a tiny target and draft, and writes what schedules and SGLang read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_targets import save_chat_target, target_overrides
from helpers import kind_of_draft, tiny_target

from deepspec.algorithms.checkpoint import save_draft
from deepspec.attention import Packing
from deepspec.config import compose_job
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.errors import ConfigError
from deepspec.scheduling.cost import read_curve
from deepspec.scheduling.profile import request_tokens, run_profile
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
    content = json.loads((place / "curve.json").read_text())
    assert {key: len(values) for key, values in content["seconds"].items()} == {
        f"{context}/{tokens}": 2 for context in (5, 20) for tokens in (1, 3, 8)
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
    with pytest.raises(ConfigError, match="tokens_per_request 9 is above the anchor and 7 draft tokens"):
        run_profile(config_for(place, "tokens_per_request=9"))


@pytest.mark.parametrize(
    ("tokens", "each", "expected"),
    [(1, 2, [1]), (2, 2, [2]), (7, 2, [3, 2, 2]), (8, 1, [1] * 8), (3, 8, [3])],
)
def test_tokens_of_a_step_are_spread_evenly_over_requests(tokens: int, each: int, expected: list[int]) -> None:
    assert request_tokens(tokens, each) == expected


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
