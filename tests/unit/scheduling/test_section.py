"""The section Confidence of an evaluation's page: every slot, before and after temperatures."""

from __future__ import annotations

from pathlib import Path

from made_up_rounds import make_records, save_records

from deepspec.scheduling.calibration import fit_temperatures, split
from deepspec.scheduling.confidence import prefix_scores
from deepspec.scheduling.records import read_records, slots_of
from deepspec.scheduling.section import confidence_sections

K = 3


def test_it_shows_every_slot_before_and_after_temperatures_that_other_conversations_gave(tmp_path: Path) -> None:
    # A head that shouts: its logits are three times the true ones.
    records = make_records(80, 25, K, sharpness=[3.0] * K)
    folder = save_records(tmp_path, records)
    (section,) = confidence_sections(folder, 1.0, ["made_up"])
    assert len(section.rows) == 1 + K
    assert [row[:3] for row in section.rows] == [["made_up", "head", slot] for slot in ("all", "1", "2", "3")]
    slots = slots_of(read_records([str(folder)]), "head")
    to_fit, held_out = split(slots)
    temperatures = fit_temperatures(slots.rows(to_fit))
    before, after = prefix_scores(slots.rows(held_out)), prefix_scores(slots.rows(held_out), temperatures)
    for row, old, new in zip(section.rows[1:], before, after, strict=False):
        assert row[3:8] == [f"{value:.3f}" for value in (old.ece, new.ece, new.auc, old.brier, new.brier)]
        assert row[9] == str(old.number)
    ece_before, ece_after, auc = section.rows[0][3:6]
    for cell, value in ((ece_before, before[-1].ece), (ece_after, after[-1].ece), (auc, after[-1].auc)):
        assert cell.startswith(f"{value:.3f} [")
        low, high = map(float, cell.split("[")[1].rstrip("]").split(", "))
        assert low <= round(value, 3) <= high
    assert float(ece_after.split()[0]) < 0.5 * float(ece_before.split()[0])
    assert section.charts[0].startswith("<svg")


def test_rounds_too_few_to_fit_to_are_judged_as_they_are(tmp_path: Path) -> None:
    folder = save_records(tmp_path, make_records(8, 10, K))
    (section,) = confidence_sections(folder, 0.0, ["made_up"])
    assert all(row[4] == row[7] == "-" for row in section.rows)
    assert all(row[3] != "-" for row in section.rows)
    assert confidence_sections(folder, 0.0, ["another"]) == []
