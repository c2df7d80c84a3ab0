"""Every number of results.json and the intervals of the page, computed once more from the files beside them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from math import exp
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
from eval_places import PROMPTS, Place

from deepspec.evaluation.evaluator import evaluate

K = 4
DRAFTS = ("sure", "plain")
TEMPERATURES = (0.0, 1.0)
DOMAINS = ("maths", "own")
# Of two tasks, both with prompts of both domains, so that every mean over tasks and domains has several members.
TASKS = {
    "first": [*PROMPTS, {"id": "another", "turns": ["two and two?"], "domain": "maths"}],
    "second": [
        {"id": f"again-{index}", "turns": [f"and {index} " + "how " * 4 * index], "domain": DOMAINS[index % 2]}
        for index in range(10)
    ],
}
Row = dict[str, Any]
Groups = dict[str, list[Row]]


class Folder:
    """An evaluation of two tasks at two temperatures and what its files say, without any code of the package."""

    def __init__(self, place: Place, folder: Path) -> None:
        config = place.words("temperatures=[0,1]", "latency_lengths=[1,3]", "latency_prompts=2", output=folder)
        (task,) = config.tasks
        tasks = []
        for name, prompts in TASKS.items():
            path = place.folder / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
            tasks.append(task.model_copy(update={"name": name, "path": str(path)}))
        evaluate(config.model_copy(update={"tasks": tuple(tasks)}))
        self.results = json.loads((folder / "results.json").read_text())
        self.page = (folder / "report.html").read_text()
        self.rounds: dict[tuple[str, str, float], Groups] = {}
        self.domains: dict[str, str] = {}
        self.timings: dict[tuple[str, float], list[Row]] = {}
        for temperature in TEMPERATURES:
            part = folder / f"temperature_{temperature:g}"
            for name in TASKS:
                for draft in DRAFTS:
                    groups: Groups = defaultdict(list)
                    for line in (part / "rounds" / f"{name}--{draft}.jsonl").read_text().splitlines():
                        answer = json.loads(line)
                        conversation = answer["request_id"].rsplit("#", 1)[0]
                        groups[conversation] += answer["rounds"]
                        self.domains[conversation] = answer["domain"]
                    self.rounds[name, draft, temperature] = groups
                lines = (part / "latency" / f"{name}.jsonl").read_text().splitlines()
                self.timings[name, temperature] = [json.loads(line)["ways"] for line in lines]

    def of(self, task: str, draft: str, temperature: float, domain: str | None = None) -> Groups:
        groups = self.rounds[task, draft, temperature]
        return {key: rounds for key, rounds in groups.items() if domain in (None, self.domains[key])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    place = Place(tmp_path_factory.mktemp("recomputed"))
    return Folder(place, place.folder / "out")


def flat(groups: Groups) -> list[Row]:
    return [one for part in groups.values() for one in part]


def emitted(rounds: list[Row]) -> tuple[float, float]:
    """Tokens and rounds, whose ratio is tau."""
    return sum(one["emitted"] for one in rounds), len(rounds)


def kept_at(k: int) -> Callable[[list[Row]], tuple[float, float]]:
    """Rounds that accepted token k and rounds that came to it, whose ratio is the conditional acceptance."""

    def count(rounds: list[Row]) -> tuple[float, float]:
        reached = [one for one in rounds if one["proposed"] >= k and one["accepted"] >= k - 1]
        return sum(one["accepted"] >= k for one in reached), len(reached)

    return count


def tau(groups: Groups) -> float:
    total, number = emitted(flat(groups))
    return total / number


def ratio(rounds: list[Row], count: Callable[[list[Row]], tuple[float, float]]) -> float | None:
    total, number = count(rounds)
    return total / number if number else None


def resampled(groups: Groups, count: Callable[[list[Row]], tuple[float, float]], seed: Any) -> list[float]:
    """A ratio of 2,000 draws of the prompts, as the evaluation draws them; draws that never came there say nothing."""
    pairs = [count(groups[key]) for key in sorted(key for key, rounds in groups.items() if rounds)]
    found = []
    for drawn in np.random.default_rng(seed).integers(len(pairs), size=(2000, len(pairs))).tolist():
        number = sum(pairs[index][1] for index in drawn)
        if number:
            found.append(sum(pairs[index][0] for index in drawn) / number)
    return found


def ends(draws: list[float]) -> list[float]:
    return [float(np.percentile(draws, share)) for share in (2.5, 97.5)]


def survival(rounds: list[Row], k: int) -> float | None:
    proposed = [one for one in rounds if one["proposed"] >= k]
    return sum(one["accepted"] >= k for one in proposed) / len(proposed) if proposed else None


def same(found: Any, expected: Any) -> None:
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-9))


def test_rows_follow_from_the_rounds(folder: Folder) -> None:
    rows = [row for row in folder.results["rows"] if row["draft"] != "autoregressive"]
    assert len(rows) == 8
    for row in rows:
        groups = folder.of(row["task"], row["draft"], row["temperature"])
        rounds = flat(groups)
        assert (row["num_prompts"], row["rounds"]) == (len(TASKS[row["task"]]), len(rounds))
        same(row["acceptance_length"], tau(groups))
        same(row["acceptance_length_ci95"], ends(resampled(groups, emitted, 0)))
        accepted, proposed = (sum(one[key] for one in rounds) for key in ("accepted", "proposed"))
        same(row["acceptance_rate"], accepted / proposed)
        same(row["verified_yield"], (accepted + len(rounds)) / (proposed + len(rounds)))
        for k in range(1, K + 1):
            same(row["survival"][k - 1], survival(rounds, k))
            same(row["conditional_acceptance"][k - 1], ratio(rounds, kept_at(k)))


def _seconds_per_token(ways: list[Row], key: str) -> float:
    return sum(one[key]["seconds"] for one in ways) / sum(one[key]["tokens"] for one in ways)


def test_timings_follow_from_the_timings_of_each_prompt(folder: Folder) -> None:
    for row in folder.results["rows"]:
        ways = folder.timings[row["task"], row["temperature"]]
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


def draws_of(parts: list[Groups]) -> list[list[float]]:
    """Draws of the tau of every part, whose prompts are drawn anew."""
    return [resampled(part, emitted, [0, index] if index else 0) for index, part in enumerate(parts)]


def parts_of(folder: Folder, draft: str, temperature: float, domains: list[str]) -> dict[str, Groups]:
    return {f"{domain}/{task}": folder.of(task, draft, temperature, domain) for domain in domains for task in TASKS}


def test_domains_follow_from_the_rounds(folder: Folder) -> None:
    rows = folder.results["details"]["domains"]
    assert len(rows) == 12
    for row in rows:
        domains = list(DOMAINS) if row["domain"] == "all" else [row["domain"]]
        parts = parts_of(folder, row["draft"], row["temperature"], domains)
        # Tasks weigh the same in a domain, domains the same in all: every domain has both tasks here.
        same(row["acceptance_length"], mean(map(tau, parts.values())))
        draws = [sum(each) / len(each) for each in zip(*draws_of(list(parts.values())), strict=True)]
        same(row["acceptance_length_ci95"], ends(draws))
        # Prompts are numbered task by task: a letter in front keeps that order when their names are sorted.
        pool = {
            f"{index}{key}": rounds for index, part in enumerate(parts.values()) for key, rounds in sorted(part.items())
        }
        rounds = flat(pool)
        assert (row["num_prompts"], row["rounds"]) == (len(pool), len(rounds))
        for k in range(1, K + 1):
            same(row["conditional_acceptance"][k - 1], ratio(rounds, kept_at(k)))
            came = sum(kept_at(k)(part)[1] > 0 for part in pool.values())
            expected = ends(resampled(pool, kept_at(k), 0)) if came > 1 else None
            same(row["conditional_acceptance_ci95"][k - 1], expected)
        speedups = [
            one["speedup_over_autoregressive"]
            for one in folder.results["rows"]
            if (one["draft"], one["temperature"]) == (row["draft"], row["temperature"])
        ]
        same(row["speedup_over_autoregressive"], mean(speedups))


def p_value(draws: list[float]) -> float:
    beyond = min(sum(draw <= 0 for draw in draws), sum(draw >= 0 for draw in draws))
    return min(1.0, 2 * (beyond + 1) / (len(draws) + 1))


def test_paired_differences_follow_from_the_rounds(folder: Folder) -> None:
    rows = {(row["task"], row["temperature"]): row for row in folder.results["details"]["pairs"]}
    assert len(rows) == 6
    for (task, temperature), row in rows.items():
        assert (row["draft"], row["other"]) == DRAFTS
        if task is None:
            sides = [list(parts_of(folder, draft, temperature, list(DOMAINS)).values()) for draft in DRAFTS]
        else:
            sides = [[folder.of(task, draft, temperature)] for draft in DRAFTS]
        same(row["difference"], mean(tau(a) - tau(b) for a, b in zip(*sides, strict=True)))
        # The same prompts are drawn for both; parts that differ by nothing must not be told apart by rounding.
        share, draws = 1 / len(sides[0]), [0.0] * 2000
        for first, second in zip(*map(draws_of, sides), strict=True):
            draws = [draw + share * (a - b) for draw, a, b in zip(draws, first, second, strict=True)]
        same(row["ci95"], ends(draws))
        prompts = sum(map(len, sides[0]))
        assert row["num_prompts"] == prompts
        same(row["p_value"], p_value(draws) if prompts >= 10 else None)
    assert {row["p_value"] is None for row in rows.values()} == {False, True}


def test_contexts_and_block_lengths_follow_from_the_rounds_and_timings(folder: Folder) -> None:
    details = folder.results["details"]
    seen = 0
    for row in details["contexts"]:
        high = row["high"] or 10**9
        inside = {
            key: [one for one in rounds if row["low"] <= one["position"] < high]
            for key, rounds in folder.of(row["task"], row["draft"], row["temperature"]).items()
        }
        rounds = flat(inside)
        same(row["acceptance_length"], ratio(rounds, emitted))
        assert row["rounds"] == len(rounds) > 0
        assert row["num_prompts"] == sum(map(bool, inside.values()))
        expected = ends(resampled(inside, emitted, 0)) if row["num_prompts"] > 1 else None
        same(row["acceptance_length_ci95"], expected)
        seen += len(rounds)
    assert seen == sum(row["rounds"] for row in folder.results["rows"] if row["draft"] != "autoregressive")
    assert len({row["low"] for row in details["contexts"]}) > 1
    assert len(details["lengths"]) == 8 * K
    for row in details["lengths"]:
        rounds = flat(folder.of(row["task"], row["draft"], row["temperature"]))
        k, total = row["length"], 0
        for one in rounds:
            is_stop = one["emitted"] == one["accepted"] <= k
            total += min(one["accepted"], k) + (not is_stop)
        same(row["acceptance_length"], total / len(rounds))
        key = f"{row['draft']}:{k}"
        ways = folder.timings[row["task"], row["temperature"]]
        if k not in (1, 3):
            assert row["seconds_per_token"] is None
            continue
        timed = [one for prompt in ways for one in prompt[key]["rounds"]]
        same(row["measured_acceptance_length"], sum(one[0] for one in timed) / len(timed))
        same(row["seconds_verify_per_round"], mean(one[2] for one in timed))
        same(row["seconds_per_token"], _seconds_per_token(ways, key))
        assert max(one[0] for one in timed) <= k + 1


def test_intervals_of_the_confidence_section_follow_from_the_rounds(folder: Folder) -> None:
    # Of each domain every second conversation is judged, the others would be fitted to; here they are too few to fit.
    for temperature in TEMPERATURES:
        section = folder.page.split(f"<h2>Confidence at temperature {temperature:g}</h2>")[1].split("</table>")[0]
        for draft in DRAFTS:
            line, *slots = re.findall(rf'<tr><td class="left">{draft}</td>(.*?)</tr>', section)
            assert len(slots) == K
            source, slot, before, after, auc, brier = re.findall("<td>(.*?)</td>", line)[:6]
            assert slot == "all"
            assert source == ("head" if draft == "sure" else "max_prob")
            assert after == "-"
            judged = judged_pairs(folder, draft, temperature, source)
            everything = [pair for pairs in judged for pair in pairs]
            generator = np.random.default_rng(0)
            draws = []
            for _ in range(400):
                drawn = generator.choice(np.arange(len(judged)), len(judged))
                draws.append([pair for index in drawn for pair in judged[index]])
            for cell, value in ((before, calibration_error), (auc, area)):
                found = [one for one in map(value, draws) if one is not None]
                moved = value(everything) - mean(found)
                low, high = (min(max(end + moved, 0.0), 1.0) for end in ends(found))
                assert cell == f"{value(everything):.3f} [{low:.3f}, {high:.3f}]"
            assert brier == f"{mean((p - hit) ** 2 for p, hit in everything):.3f}"


def judged_pairs(folder: Folder, draft: str, temperature: float, source: str) -> list[list[tuple[float, bool]]]:
    """Predicted survival and what happened, of every verified slot, by conversation."""
    members: dict[str, list[int]] = defaultdict(list)
    conversations: list[list[Row]] = []
    for task in TASKS:
        for key, rounds in sorted(folder.of(task, draft, temperature).items()):
            if rounds:
                members[folder.domains[key]].append(len(conversations))
                conversations.append(rounds)
    fitted = {index for domain in members.values() for index in domain[::2]}
    found = []
    for index, rounds in enumerate(conversations):
        if index in fitted:
            continue
        pairs = []
        for one in rounds:
            survived = 1.0
            for k in range(one["proposed"]):
                logit = one["confidence_logits"][k] if source == "head" else None
                survived *= one["max_draft_prob"][k] if logit is None else 1 / (1 + exp(-logit))
                pairs.append((survived, one["accepted"] > k))
        found.append(pairs)
    return found


def calibration_error(pairs: list[tuple[float, bool]]) -> float:
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for predicted, hit in pairs:
        bins[min(int(predicted * 15), 14)].append((predicted, hit))
    gaps = [abs(sum(predicted for predicted, _ in part) - sum(hit for _, hit in part)) for part in bins.values()]
    return sum(gaps) / len(pairs)


def area(pairs: list[tuple[float, bool]]) -> float | None:
    """Share of pairs of an accepted and a rejected slot in which the accepted one ranks higher, ties by halves."""
    hits, misses = (np.array([p for p, hit in pairs if hit == wanted]) for wanted in (True, False))
    if not len(hits) or not len(misses):
        return None
    wins = (hits[:, None] > misses).sum() + (hits[:, None] == misses).sum() / 2
    return float(wins / (len(hits) * len(misses)))
