"""Every number of results.json, computed once more from the files beside it, by loops."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
from eval_places import PROMPTS, Place

from deepspec.evaluation.evaluator import evaluate

K = 4
Row = dict[str, Any]
Groups = dict[str, list[Row]]


class Folder:
    """An evaluation at two temperatures and what its files say, without any code of the package."""

    def __init__(self, place: Place, folder: Path) -> None:
        config = place.words("temperatures=[0,1]", "latency_lengths=[1,3]", "latency_prompts=2", output=folder)
        evaluate(config)
        self.results = json.loads((folder / "results.json").read_text())
        self.rounds: dict[tuple[str, float], Groups] = {}
        self.domains: dict[str, str] = {}
        self.timings: dict[float, list[Row]] = {}
        for temperature in (0.0, 1.0):
            part = folder / f"temperature_{temperature:g}"
            for draft in ("sure", "plain"):
                groups: Groups = defaultdict(list)
                for line in (part / "rounds" / f"prompts--{draft}.jsonl").read_text().splitlines():
                    answer = json.loads(line)
                    conversation = answer["request_id"].rsplit("#", 1)[0]
                    groups[conversation] += answer["rounds"]
                    self.domains[conversation] = answer["domain"]
                self.rounds[draft, temperature] = groups
            lines = (part / "latency" / "prompts.jsonl").read_text().splitlines()
            self.timings[temperature] = [json.loads(line)["ways"] for line in lines]

    def of(self, draft: str, temperature: float, domain: str | None = None) -> Groups:
        groups = self.rounds[draft, temperature]
        return {key: rounds for key, rounds in groups.items() if domain in (None, self.domains[key])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    place = Place(tmp_path_factory.mktemp("recomputed"))
    return Folder(place, place.folder / "out")


def tau(groups: Groups) -> float:
    rounds = [one for part in groups.values() for one in part]
    return sum(one["emitted"] for one in rounds) / len(rounds)


def resampled(groups: Groups, value: Callable[[list[Row]], float | None], seed: Any) -> list[float]:
    """A value of 2,000 draws of the prompts, as the evaluation draws them."""
    prompts = sorted(key for key, rounds in groups.items() if rounds)
    drawn = np.random.default_rng(seed).integers(len(prompts), size=(2000, len(prompts)))
    found = [value([one for index in row for one in groups[prompts[index]]]) for row in drawn]
    return [one for one in found if one is not None]


def ends(draws: list[float]) -> list[float]:
    return [float(np.percentile(draws, share)) for share in (2.5, 97.5)]


def mean_emitted(rounds: list[Row]) -> float | None:
    return sum(one["emitted"] for one in rounds) / len(rounds) if rounds else None


def conditional(rounds: list[Row], k: int) -> float | None:
    reached = [one for one in rounds if one["proposed"] >= k and one["accepted"] >= k - 1]
    return sum(one["accepted"] >= k for one in reached) / len(reached) if reached else None


def survival(rounds: list[Row], k: int) -> float | None:
    proposed = [one for one in rounds if one["proposed"] >= k]
    return sum(one["accepted"] >= k for one in proposed) / len(proposed) if proposed else None


def same(found: Any, expected: Any) -> None:
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-9))


def test_rows_follow_from_the_rounds(folder: Folder) -> None:
    rows = [row for row in folder.results["rows"] if row["draft"] != "autoregressive"]
    assert len(rows) == 4
    for row in rows:
        groups = folder.of(row["draft"], row["temperature"])
        rounds = [one for part in groups.values() for one in part]
        assert (row["num_prompts"], row["rounds"]) == (len(PROMPTS), len(rounds))
        same(row["acceptance_length"], tau(groups))
        same(row["acceptance_length_ci95"], ends(resampled(groups, mean_emitted, 0)))
        accepted, proposed = (sum(one[key] for one in rounds) for key in ("accepted", "proposed"))
        same(row["acceptance_rate"], accepted / proposed)
        same(row["verified_yield"], (accepted + len(rounds)) / (proposed + len(rounds)))
        for k in range(1, K + 1):
            same(row["survival"][k - 1], survival(rounds, k))
            same(row["conditional_acceptance"][k - 1], conditional(rounds, k))


def _seconds_per_token(ways: list[Row], key: str) -> float:
    return sum(one[key]["seconds"] for one in ways) / sum(one[key]["tokens"] for one in ways)


def test_timings_follow_from_the_timings_of_each_prompt(folder: Folder) -> None:
    for row in folder.results["rows"]:
        ways = folder.timings[row["temperature"]]
        assert len(ways) == 2
        rounds = [one for prompt in ways for one in prompt[row["draft"]]["rounds"]]
        latency_tau = sum(emitted for emitted, _, _ in rounds) / len(rounds)
        drafted, verified = ([one[index] for one in rounds] for index in (1, 2))
        per_token = _seconds_per_token(ways, row["draft"])
        same(row["latency_acceptance_length"], latency_tau)
        same(row["seconds_draft_per_round"], mean(drafted))
        same(row["seconds_verify_per_round"], mean(verified))
        same(row["median_seconds_draft"], median(drafted))
        same(row["median_seconds_verify"], median(verified))
        same(row["seconds_per_token"], per_token)
        same(row["tokens_per_second"], 1 / per_token)
        assert row["overhead_seconds_per_round"] == pytest.approx(
            per_token * latency_tau - mean(drafted) - mean(verified), rel=1e-6, abs=1e-9
        )
        ratios = [_seconds_per_token([one], "autoregressive") / _seconds_per_token([one], row["draft"]) for one in ways]
        same(row["speedup_over_autoregressive"], median(ratios))
        assert row["peak_memory_bytes"] == max(one[row["draft"]]["peak_memory_bytes"] for one in ways)


def test_domains_follow_from_the_rounds(folder: Folder) -> None:
    rows = folder.results["details"]["domains"]
    assert len(rows) == 12
    for row in rows:
        names = ["maths", "own"] if row["domain"] == "all" else [row["domain"]]
        parts = [folder.of(row["draft"], row["temperature"], name) for name in names]
        same(row["acceptance_length"], mean(map(tau, parts)))
        if all(len(part) > 1 for part in parts):
            draws = [resampled(part, mean_emitted, [0, index] if index else 0) for index, part in enumerate(parts)]
            same(row["acceptance_length_ci95"], ends([mean(pair) for pair in zip(*draws, strict=True)]))
        else:
            assert row["acceptance_length_ci95"] is None
        pool = {
            f"{name}/{key}": rounds for name, part in zip(names, parts, strict=True) for key, rounds in part.items()
        }
        rounds = [one for part in pool.values() for one in part]
        assert (row["num_prompts"], row["rounds"]) == (len(pool), len(rounds))
        for k in range(1, K + 1):
            same(row["conditional_acceptance"][k - 1], conditional(rounds, k))
        interval = row["conditional_acceptance_ci95"][0]
        if interval is not None:
            same(interval, ends(resampled(pool, lambda found: conditional(found, 1), 0)))


def test_paired_differences_follow_from_the_rounds(folder: Folder) -> None:
    rows = {(row["task"], row["temperature"]): row for row in folder.results["details"]["pairs"]}
    assert len(rows) == 4
    for temperature in (0.0, 1.0):
        first, second = (folder.of(draft, temperature) for draft in ("sure", "plain"))
        assert list(combinations(("sure", "plain"), 2)) == [("sure", "plain")]
        row = rows["prompts", temperature]
        same(row["difference"], tau(first) - tau(second))
        draws = [resampled(groups, mean_emitted, 0) for groups in (first, second)]
        same(row["ci95"], ends([a - b for a, b in zip(*draws, strict=True)]))
        assert row["p_value"] is None, "there are only seven prompts"
        parts = [[folder.of(draft, temperature, name) for draft in ("sure", "plain")] for name in ("maths", "own")]
        same(rows[None, temperature]["difference"], mean(tau(a) - tau(b) for a, b in parts))


def test_contexts_and_block_lengths_follow_from_the_rounds_and_timings(folder: Folder) -> None:
    details = folder.results["details"]
    seen = 0
    for row in details["contexts"]:
        high = row["high"] or 10**9
        rounds = [
            one
            for part in folder.of(row["draft"], row["temperature"]).values()
            for one in part
            if row["low"] <= one["position"] < high
        ]
        same(row["acceptance_length"], mean_emitted(rounds))
        assert row["rounds"] == len(rounds) > 0
        seen += len(rounds)
    assert seen == sum(row["rounds"] for row in folder.results["rows"] if row["draft"] != "autoregressive")
    assert len(details["lengths"]) == 4 * K
    for row in details["lengths"]:
        rounds = [one for part in folder.of(row["draft"], row["temperature"]).values() for one in part]
        k, emitted = row["length"], 0
        for one in rounds:
            is_stop = one["emitted"] == one["accepted"] <= k
            emitted += min(one["accepted"], k) + (not is_stop)
        same(row["acceptance_length"], emitted / len(rounds))
        key = f"{row['draft']}:{k}"
        ways = folder.timings[row["temperature"]]
        if k not in (1, 3):
            assert row["seconds_per_token"] is None
            continue
        timed = [one for prompt in ways for one in prompt[key]["rounds"]]
        same(row["measured_acceptance_length"], sum(one[0] for one in timed) / len(timed))
        same(row["seconds_verify_per_round"], mean(one[2] for one in timed))
        same(row["seconds_per_token"], _seconds_per_token(ways, key))
        assert max(one[0] for one in timed) <= k + 1
