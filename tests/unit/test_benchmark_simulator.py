"""The benchmark of schedules plays all its steps on a tiny target."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from chat_targets import target_overrides
from eval_places import Place

from benchmarks import simulator


def test_it_measures_simulates_writes_its_result_and_continues(tmp_path: Path) -> None:
    place = Place(tmp_path)
    words = [place.drafts[0], "--tiny", "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    task = [f"task.path={place.folder}/prompts.jsonl"]
    simulator.run(simulator.parse(words), target_overrides(place.target), task)
    (path,) = (tmp_path / "results").iterdir()
    text = path.read_text()
    assert path.name.startswith("simulator_")
    for load in (1, 2, 4):
        for schedule in ("autoregressive", "full", "fixed", "threshold", "throughput", "asynchronous"):
            assert f"| {load} | {schedule} |" in text
    assert re.search(r"Largest difference \d+\.\d%: the goal of 10% is (kept|missed)", text)
    assert re.search(r"in the profile: \d+\.\d\d at 1, \d+\.\d\d at 2\. Predicted times are lengthened by it", text)
    # A killed run continues: nothing is played twice.
    journal = tmp_path / "work" / "eval" / "load" / "sure.jsonl"
    before = journal.read_bytes()
    simulator.run(simulator.parse(words), target_overrides(place.target), task)
    assert journal.read_bytes() == before
