"""Spikes of the confidence loss and the gradient."""

from __future__ import annotations

import math

import pytest

from deepspec.training.spikes import SpikeAlarm


def line(step: int, confidence: float | None, norm: float = 1.0) -> dict[str, float | int | None]:
    return {"step": step, "loss/confidence": confidence, "gradient_norm": norm}


def test_a_spike_is_counted_each_time_and_said_once_with_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    alarm = SpikeAlarm()
    confidence = [0.5, 0.4, 0.6, 0.5, 0.5, 2.4, 2.6, 0.5, 3.0]
    counts = [alarm.look(line(10 * index, value)) for index, value in enumerate(confidence)]
    # 2.4 and 2.6 lie around five times the median, 0.5
    assert counts == [0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert alarm.look(line(90, 4.0, norm=9.0)) == 2
    shown = capsys.readouterr().err.replace("\n", " ")
    assert shown.count("loss/confidence jumped to 2.6 in the line of step 60;") == 1
    assert shown.count("loss/confidence jumped") == shown.count("gradient_norm jumped") == 1


def test_no_spike_is_seen_without_a_past_in_a_lasting_change_or_where_a_number_is_missing() -> None:
    alarm = SpikeAlarm()
    assert [alarm.look(line(step, value)) for step, value in enumerate((0.1, 9.0, 0.1, 9.0))] == [0] * 4
    steady = SpikeAlarm()
    counts = [steady.look(line(step, 0.5 if step < 10 else 5.0)) for step in range(30)]
    assert counts[:10] == [0] * 10
    assert counts[10] == 1
    assert counts[-5:] == [0] * 5
    assert steady.look({"step": 30, "loss/confidence": math.nan}) == 0
    assert steady.look({"step": 31, "gradient_norm": math.inf}) == 1


def test_lines_that_are_recalled_count_as_past_as_they_did_before() -> None:
    straight, resumed = SpikeAlarm(), SpikeAlarm()
    for step in range(8):
        straight.look(line(step, 0.3 + 0.1 * step))
        resumed.recall(line(step, 0.3 + 0.1 * step))
    resumed.recall(line(8, None))  # how NaN is written
    assert straight.look(line(9, 3.5)) == resumed.look(line(9, 3.5)) == 1
