"""Statistics of an answers file: every figure recounted by hand, and a page that stands alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from chat_targets import save_chat_target, target_overrides

from deepspec.cli import main
from deepspec.config import compose_data_job
from deepspec.data.chat import TokenSample
from deepspec.data.kept_samples import SampleCounts
from deepspec.data.stats import Statistics, Turns, measure, read_turns, statistics_lines, write_page

# Tokens and supervised tokens of each sample.
SIZES = [(10, 4), (20, 15), (64, 3), (100, 90), (33, 32)]


def sample(length: int, supervised: int) -> TokenSample:
    return TokenSample(f"s{length}", [5] * length, [i >= length - supervised for i in range(length)])


def measured(*words: str) -> Statistics:
    stats = compose_data_job([f"stats.{word}" for word in words]).stats
    counts = SampleCounts(rows=6, bad_rows=1, samples=len(SIZES), truncated=0, too_short=0, answer_tokens=144)
    turns = Turns(Counter({1: 3, 2: 2}), Counter({"stop": 6, "length": 1}))
    return measure([sample(*size) for size in SIZES], counts, turns, stats.data, stats.optimizer, seed=1)


def test_what_the_limits_of_a_training_drop_is_counted() -> None:
    """At 40 tokens the sample of 64 loses all 3 supervised ones and that of 100 keeps 30; four are required."""
    found = measured("data.max_length=40", "data.min_answer_tokens=4")
    assert (found.truncated, found.dropped) == (2, 1)
    assert found.lost_tokens == 3 + 60
    whole = measured()
    assert (whole.truncated, whole.dropped, whole.lost_tokens) == (0, 0, 0)


def test_padding_is_what_the_loader_pads() -> None:
    """One step of five samples in one forward: every row as long as the longest, every anchor row as the fullest."""
    waste = measured("optimizer.global_batch_size=5", "optimizer.micro_batch_size=5", "data.num_anchors=8").waste
    assert waste is not None
    longest = 100  # a size of the loader as it is
    assert waste.padded_tokens == pytest.approx(1 - sum(length for length, _ in SIZES) / (5 * longest))
    anchors = [min(8, supervised - 1) for _, supervised in SIZES]
    assert waste.padded_anchors == pytest.approx(1 - sum(anchors) / (5 * 8))
    alone = measured("optimizer.global_batch_size=5", "optimizer.micro_batch_size=1").waste
    assert alone is not None
    assert alone.padded_tokens < 0.02
    assert alone.steps == 1


def test_lines_say_shares_of_the_right_totals() -> None:
    lines = dict(statistics_lines(measured("data.max_length=40", "data.min_answer_tokens=4")))
    assert lines["rows"] == "6, 1 of them broken"
    assert lines["supervised tokens"] == f"144, {144 / 227:.1%}"
    assert lines["generated turns"] == "7, 1.40 a row"
    assert lines["answers cut at max_new_tokens"] == f"1, {1 / 7:.1%}"
    assert lines["longer than max_length 40"] == "2 samples, 40.0%"
    assert lines["length of a sample"].endswith("most 100")


def test_turns_are_read_from_what_was_generated_or_from_the_messages(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant", "user", "assistant")]
    rows = [{"finish_reason": ["stop", "length"]}, {"finish_reason": ["stop"]}, {"messages": talk}, 5, {"messages": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{half")
    turns = read_turns(path)
    assert turns.per_row == Counter({2: 1, 1: 1, 3: 1})
    assert turns.reasons == Counter({"stop": 2, "length": 1, "not recorded": 3})


def test_the_page_stands_alone_and_escapes_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, measured(), "<script>.jsonl")
    page = path.read_text()
    assert "default-src 'none'" in page
    assert "<script>" not in page
    assert "http://" not in page
    assert page.count("<svg") == 5
    assert "Supervised share" in page


def test_the_command_measures_a_file_and_writes_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "answers.jsonl"
    rows = [
        {"id": f"r{i}", "prompt_ids": [[5] * 6], "answer_ids": [[6] * i], "finish_reason": ["stop"]} for i in (2, 4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = save_chat_target(tmp_path / "target")
    main(["data", "stats", f"answers={path}", *target_overrides(folder), "stats.data.max_length=8"])
    shown = capsys.readouterr().out
    assert "1 samples, 50.0%" in shown
    assert str(tmp_path / "answers.stats.html") in shown
    assert (tmp_path / "answers.stats.html").exists()
