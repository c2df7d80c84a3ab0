"""Sequential temperature scaling: finds what was done to logits, keeps orders, refuses too little, is stored whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_rounds import make_records, save_records
from safetensors.torch import save_file

from deepspec.config import compose_job
from deepspec.errors import DataError
from deepspec.evaluation.answers import weights_id
from deepspec.scheduling.calibrate import run_calibration
from deepspec.scheduling.calibration import (
    MIN_ROUNDS,
    Calibration,
    calibration_path,
    fit_temperatures,
    read_calibration,
    split,
    write_calibration,
)
from deepspec.scheduling.confidence import calibration_error, confidences, prefix_scores
from deepspec.scheduling.records import Slots, full_only, one_draft, read_records, slots_of
from deepspec.scheduling.settings import CalibrateConfig


def naive_fit(slots: Slots, grid: np.ndarray) -> list[float]:
    """Left to right, the first temperature of the grid with the least error."""
    found: list[float] = []
    for k in range(slots.logits.shape[1]):
        best, chosen = np.inf, 1.0
        for temperature in grid:
            product = np.ones(len(slots.logits))
            for j, fixed in enumerate([*found, float(temperature)]):
                product *= confidences(slots.logits[:, j], fixed)
            error = calibration_error(product[slots.labelled[:, k]], slots.accepted[slots.labelled[:, k], k])
            if error < best - 1e-12:
                best, chosen = error, float(temperature)
        found.append(chosen)
    return found


def test_fit_undoes_the_sharpening_of_every_slot_and_the_report_improves_on_other_conversations() -> None:
    sharpness = (3.0, 0.5, 2.0)
    slots = slots_of([make_records(300, 30, 3, sharpness=sharpness)], "head")
    to_fit, held_out = split(slots)
    assert set(slots.prompts[to_fit]).isdisjoint(slots.prompts[held_out])
    temperatures = fit_temperatures(slots.rows(to_fit))
    # A grid of 6 % steps and 4,500 rounds of chance, a quarter of which reach the last slot.
    assert temperatures[:2] == pytest.approx(sharpness[:2], rel=0.2)
    assert temperatures[2] == pytest.approx(sharpness[2], rel=0.4)
    before, after = (prefix_scores(slots.rows(held_out), given) for given in (None, temperatures))
    for k in range(3):
        assert (after[k].ece or 1) < 0.035 < 0.045 < (before[k].ece or 0), k


def test_fit_equals_a_naive_search() -> None:
    slots = slots_of([make_records(20, 20, 2, sharpness=(2.0, 2.0))], "head")
    naive = naive_fit(slots, np.logspace(-1, 1, 81))
    found = fit_temperatures(slots)
    for k in range(2):
        errors = [
            calibration_error(
                np.prod([confidences(slots.logits[:, j], t) for j, t in enumerate(chosen[: k + 1])], axis=0),
                slots.accepted[:, k],
            )
            for chosen in (naive, found)
        ]
        assert errors[0] == pytest.approx(errors[1], abs=1e-12)


def test_temperatures_keep_the_order_of_confidences_within_a_slot() -> None:
    slots = slots_of([make_records(30, 20, 3, sharpness=(5.0, 0.3, 1.0))], "head")
    calibrated = confidences(slots.logits, fit_temperatures(slots))
    assert np.array_equal(
        np.argsort(calibrated, axis=0, kind="stable"), np.argsort(slots.logits, axis=0, kind="stable")
    )


def test_too_few_rounds_are_refused_with_the_number_needed() -> None:
    slots = slots_of([make_records(10, 10, 2)], "head")
    with pytest.raises(DataError, match=r"draft position 1 has 100 labelled rounds .* but 300 are needed .* 3 times"):
        fit_temperatures(slots)
    assert MIN_ROUNDS == 300


def test_rounds_that_a_schedule_cut_are_refused() -> None:
    record = make_records(2, 2, 3, chance=0.9)
    cut = record.rounds["p0"][0]._replace(proposed=1, accepted=1, ended_by="full", emitted=2)
    record.rounds["p0"][0] = cut
    with pytest.raises(DataError, match="were cut by a schedule"):
        full_only([record])
    whole = make_records(2, 2, 3)
    with pytest.raises(DataError, match="Evaluate with schedule=full"):
        full_only([whole._replace(conditions={"schedule": {"name": "threshold"}})])


def config_for(folder: Path, *more: str) -> CalibrateConfig:
    return compose_job("calibrate", CalibrateConfig, [f"records=['{folder}']", *more])


@pytest.fixture
def evaluated(tmp_path: Path) -> tuple[Path, Path]:
    """An evaluation's folder and the draft's own."""
    draft = tmp_path / "draft"
    draft.mkdir()
    save_file({"fc.weight": torch.ones(2, 2)}, draft / "model.safetensors")
    record = make_records(60, 12, 3, sharpness=(3.0, 3.0, 3.0), has_head=True)
    record = record._replace(draft_path=str(draft), weights=weights_id(draft))
    return save_records(tmp_path / "eval", record), draft


def test_a_draft_that_was_trained_on_since_its_rounds_were_recorded_is_not_given_their_temperatures(
    evaluated: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, draft = evaluated
    before = weights_id(draft)
    save_file({"fc.weight": torch.full((2, 2), 2.0)}, draft / "model.safetensors")
    with pytest.raises(DataError, match="holds other weights now than those that the rounds of made_up"):
        run_calibration(config_for(folder))
    assert [file.name for file in draft.iterdir()] == ["model.safetensors"]
    # Elsewhere they do no harm: whoever reads them compares the weights.
    run_calibration(config_for(folder, f"output_dir='{tmp_path / 'apart'}'"))
    assert read_calibration(tmp_path / "apart", "head", before) is not None


def test_temperatures_do_not_depend_on_which_answer_was_finished_first(tmp_path: Path) -> None:
    records = make_records(80, 25, 2, sharpness=[3.0, 0.5])
    shuffled = records._replace(rounds=dict(reversed(records.rounds.items())))
    both = []
    for name, one in (("first", records), ("last", shuffled)):
        slots = slots_of(read_records([str(save_records(tmp_path / name, one))]), "head")
        both.append(fit_temperatures(slots.rows(split(slots)[0])))
    assert both[0] == both[1]


def test_a_slot_whose_error_is_not_known_is_not_stored_as_perfect(tmp_path: Path) -> None:
    known, unknown = {"ece_per_slot": [0.1, 0.2]}, {"ece_per_slot": [0.1, None]}
    calibration = Calibration(
        source="head",
        temperatures=(1.0, 2.0),
        weights="w",
        details={"held_out": {"before": unknown, "after": known}, "fitted_to": {"rounds": 900}},
    )
    with pytest.raises(DataError, match="draft position 2 has no labelled round"):
        write_calibration(tmp_path, calibration, "rounds")
    assert not list(tmp_path.iterdir())


def test_slots_that_were_always_or_never_accepted_are_refused() -> None:
    for chance, word in ((1.0, "accepted"), (0.0, "rejected")):
        slots = slots_of([make_records(20, 20, 2, chance=chance)], "head")
        with pytest.raises(DataError, match=f"draft position 1 was {word} in all of its 400 labelled rounds"):
            fit_temperatures(slots)


def test_one_prompt_in_two_evaluations_is_one_conversation_and_in_two_tasks_two() -> None:
    first, again = (make_records(4, 10, 2, seed=seed) for seed in (0, 1))
    both = slots_of([first, again], "head")
    assert len(both.logits) == 80
    assert len(both.domains) == 4
    to_fit, held_out = split(both)
    assert set(both.prompts[to_fit]).isdisjoint(both.prompts[held_out])
    assert np.array_equal(both.prompts[:40], both.prompts[40:])
    assert len(slots_of([first, again._replace(task="other")], "head").domains) == 8


def test_the_command_stores_both_forms_with_the_draft_and_reports_every_domain(evaluated: tuple[Path, Path]) -> None:
    folder, draft = evaluated
    calibration = run_calibration(config_for(folder))
    stored = read_calibration(draft, "head", weights_id(draft))
    assert stored == calibration
    assert calibration.source == "head"
    details = calibration.details
    assert set(details["held_out_by_domain"]) == {"chat", "code"}
    assert details["held_out"]["after"]["ece"] < details["held_out"]["before"]["ece"]
    assert details["fitted_to"]["rounds"] + details["held_out"]["rounds"] == 720
    theirs = json.loads((draft / "sglang_sts_head.json").read_text())
    assert set(theirs) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert theirs["temperatures"] == list(calibration.temperatures)
    assert len(theirs["ece_before"]) == len(theirs["ece_after"]) == 3
    page = (draft / "calibration_head_report.html").read_text()
    assert "before and after calibration" in page
    assert page.count("<svg") == 4


def test_another_source_has_a_file_of_its_own(evaluated: tuple[Path, Path]) -> None:
    folder, draft = evaluated
    run_calibration(config_for(folder, "confidence=max_prob"))
    assert read_calibration(draft, "head", weights_id(draft)) is None
    assert read_calibration(draft, "max_prob", weights_id(draft)) is not None


def test_a_calibration_of_other_weights_or_a_damaged_one_is_refused(evaluated: tuple[Path, Path]) -> None:
    folder, draft = evaluated
    calibration = run_calibration(config_for(folder))
    with pytest.raises(DataError, match="made with other weights of this draft"):
        read_calibration(draft, "head", "w1")
    path = calibration_path(draft, "head")
    path.write_text(path.read_text()[:200])
    with pytest.raises(DataError, match="is damaged"):
        read_calibration(draft, "head", weights_id(draft))
    write_calibration(draft, calibration, "again")
    assert read_calibration(draft, "head", weights_id(draft)) == calibration


def test_records_of_several_drafts_or_none_are_named(tmp_path: Path) -> None:
    one, other = make_records(4, 4, 2), make_records(4, 4, 2, draft="other")
    folder = save_records(tmp_path / "eval", one, other)
    assert [record.draft for record in read_records([str(folder)])] == ["made_up", "other"]
    with pytest.raises(DataError, match=r"no rounds of nobody\. It holds: made_up, other"):
        read_records([str(folder)], "nobody")
    with pytest.raises(DataError, match=rf"it: eval\. Give one, such as records=\[{folder}\]"):
        read_records([str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no evaluation \(it has no conditions\.json\)\. Give the output_dir"):
        read_records([str(tmp_path / "empty")])
    with pytest.raises(DataError, match=r"gone is no folder\. Give"):
        read_records([str(tmp_path / "gone")])
    with pytest.raises(DataError, match=r"several drafts: made_up, other\. Choose one"):
        one_draft([one, other])
    warm = one._replace(conditions={"sampling": {"temperature": 1.0}})
    with pytest.raises(DataError, match=r"were sampled differently: .* Acceptance depends on it"):
        one_draft([one, warm])
    with pytest.raises(DataError, match="made with different weights"):
        one_draft([one, one._replace(weights="w1")])
