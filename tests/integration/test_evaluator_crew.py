"""Several members of a crew decode one evaluation; here they are threads over one store, so that all start at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from eval_places import Place
from torch._C._distributed_c10d import HashStore

from deepspec.config import EvalConfig
from deepspec.evaluation.crew import Crew
from deepspec.evaluation.evaluator import evaluate, measure_all
from deepspec.evaluation.report import ResultRow

WORDS = ["max_new_tokens=30", "latency_prompts=0", "batch_size=2", "temperatures=[0,1]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("crew"))
    rows = [{"id": f"q{index}", "turns": [f"why {index}? " + "so " * (index % 5)]} for index in range(20)]
    rows += [{"id": f"d{index}", "turns": [f"first {index}", "then?"]} for index in range(3)]
    (made.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(made.words(*WORDS, output=made.folder / "alone"))
    return made


def answers(output: Path) -> dict[tuple[str, str, str], Any]:
    """Output and accepted counts of every request; a request twice would be a prompt decoded twice."""
    found = {}
    for path in sorted(output.glob("temperature_*/rounds/*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = (path.parent.parent.name, path.stem, row["request_id"])
            assert key not in found
            found[key] = (row["output_ids"], [one["accepted"] for one in row["rounds"]])
    return found


def rows_of(output: Path) -> list[ResultRow]:
    return [ResultRow.model_validate(row) for row in json.loads((output / "results.json").read_text())["rows"]]


class Counting(Crew):
    """A crew member that counts its claims."""

    claims = 0

    def claim(self, name: str) -> Any:
        shared = super().claim(name)

        def claim(count: int) -> int:
            self.claims += 1
            return shared(count)

        return claim


def test_two_members_give_what_one_gives_and_leave_no_part_behind(place: Place, tmp_path: Path) -> None:
    store = HashStore()
    crew = [Counting(store, rank, 2) for rank in range(2)]
    config: EvalConfig = place.words(*WORDS, output=tmp_path)
    helper = threading.Thread(target=measure_all, args=(config, crew[1]))
    helper.start()
    parts = measure_all(config, crew[0])
    helper.join(60)
    assert not helper.is_alive()
    assert answers(tmp_path) == answers(place.folder / "alone")
    assert [row for part in parts for row in part.results.rows] == rows_of(place.folder / "alone")
    assert not list(tmp_path.glob("temperature_*/parts/*"))
    assert all(member.claims > 0 for member in crew)


def test_what_a_killed_member_left_is_taken_over_and_not_decoded_again(place: Place, tmp_path: Path) -> None:
    whole = place.folder / "alone" / "temperature_0" / "rounds" / "prompts--sure.jsonl"
    parts = tmp_path / "temperature_0" / "parts"
    parts.mkdir(parents=True)
    kept = whole.read_text().splitlines(keepends=True)[:9]
    # The last line was cut in two by the kill.
    (parts / "prompts--sure.3.jsonl").write_text("".join(kept) + kept[0][:40])
    marked = [json.loads(line) for line in kept]
    evaluate(place.words(*WORDS, output=tmp_path))
    journal = (tmp_path / "temperature_0" / "rounds" / "prompts--sure.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in journal[:9]] == marked
    assert answers(tmp_path) == answers(place.folder / "alone")


def test_a_member_that_comes_too_late_is_not_waited_for_and_does_nothing() -> None:
    store = HashStore()
    main, late = (Crew(store, rank, 2) for rank in range(2))
    calls: list[int] = []
    main.wait_for_others("stage", lambda: calls.append(1))
    assert not late.enter("stage")
    early = Crew(store, 1, 2)
    assert early.enter("next")
    waiter = threading.Thread(target=main.wait_for_others, args=("next", lambda: calls.append(1)))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive(), "the main one waits for those that entered"
    early.leave("next")
    waiter.join(10)
    assert not waiter.is_alive()


def test_claims_of_two_members_never_overlap() -> None:
    store = HashStore()
    claims = [Crew(store, rank, 2).claim("stage") for rank in range(2)]
    taken: list[int] = []
    for turn in range(30):
        first = claims[turn % 2](turn % 3 + 1)
        taken += range(first, first + turn % 3 + 1)
    assert taken == list(range(len(taken)))


def test_a_member_that_is_not_needed_has_ended_before_anything_is_timed(place: Place) -> None:
    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    main = Crew(HashStore(), 0, 2, start)
    try:
        measure_all(place.words(*WORDS, output=place.folder / "alone"), main)
        assert [member.poll() is not None for member in main._members.values()] == [True]
    finally:
        main.end()


def test_a_member_that_ends_before_it_takes_part_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    main = Crew(HashStore(), 0, 2, start)
    main.begin()
    for member in main._members.values():
        member.wait(60)
    main.wait_for_others("stage", lambda: None)
    main.wait_for_others("next", lambda: None)
    assert capsys.readouterr().err.count("process 1 of 2 ended (exit code 3)") == 1
