"""Records of a schedule are reused only as long as what it decides by is the same, whatever its files are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_places import Place

from deepspec.decoding.schedule import Confidence, FullSchedule, ThresholdSchedule
from deepspec.errors import DataError
from deepspec.evaluation.answers import weights_id
from deepspec.evaluation.evaluator import evaluate
from deepspec.scheduling.calibration import Calibration, calibration_path
from deepspec.scheduling.cost import CostCurve, write_curve
from deepspec.scheduling.schedules import ThroughputSchedule, schedule_id

K = 4
CURVE = CostCurve(tuple(range(1, 40)), (0,), (tuple(1000 / (9 + n) for n in range(1, 40)),), (1, 8), (0.002, 0.004))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("schedules"))


def calibrate(place: Place, temperatures: tuple[float, ...], details: dict[str, Any] | None = None) -> None:
    """Write what `deepspec calibrate` would into the place's folder."""
    weights = weights_id(Path(place.drafts[0]))
    calibration = Calibration(source="head", temperatures=temperatures, weights=weights, details=details or {})
    calibration_path(place.folder, "head").write_text(calibration.model_dump_json())


def whole(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*.jsonl"))}


def test_answers_of_another_calibration_are_refused_and_those_of_the_same_one_are_not_repeated(
    place: Place, tmp_path: Path
) -> None:
    calibrate(place, (1.0,) * K)
    words = ("schedule=threshold", f"schedule.calibration={place.folder}", "latency_prompts=1")
    config = place.words(*words, output=tmp_path, drafts=place.drafts[:1])
    evaluate(config)
    before = whole(tmp_path)
    evaluate(config)
    assert whole(tmp_path) == before
    calibrate(place, (1.0, 1.0, 1.0, 1.1))
    with pytest.raises(DataError, match=r"prompts--sure\.jsonl was decoded under another calibration .*delete that"):
        evaluate(config)
    assert whole(tmp_path) == before
    # With the answers gone, the timings of the earlier calibration are not taken for those of this one either.
    (tmp_path / "rounds" / "prompts--sure.jsonl").unlink()
    evaluate(config)
    first, second = (tmp_path / "latency" / "prompts.jsonl").read_text().splitlines()
    ids = [json.loads(line)["ways"]["sure"]["schedule_id"] for line in (first, second)]
    assert len(set(ids)) == 2


def test_a_calibration_fitted_under_another_sampling_is_refused_before_anything_is_decoded(
    place: Place, tmp_path: Path
) -> None:
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    calibrate(place, (1.0,) * K, {"made_with": {"sampling": [greedy]}})
    words = ("schedule=threshold", f"schedule.calibration={place.folder}", "latency_prompts=0", "limit=1")
    drafts = place.drafts[:1]
    with pytest.raises(DataError, match=r"'temperature': 0\.0.* to be used with .*'temperature': 0\.7"):
        evaluate(place.words(*words, "sampling.temperature=0.7", output=tmp_path, drafts=drafts))
    with pytest.raises(DataError, match=r"or use calibration=none"):
        evaluate(place.words(*words, "temperatures=[0,1]", output=tmp_path, drafts=drafts))
    assert not list(tmp_path.iterdir())
    # Greedy decoding filters nothing, so another top_p is the same sampling.
    evaluate(place.words(*words, "sampling.temperature=0", output=tmp_path, drafts=drafts))


def test_answers_of_another_cost_curve_behind_the_same_path_are_refused(place: Place, tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    write_curve(curve, CURVE, {"made_with": "one"})
    words = ("schedule=throughput", f"schedule.curve={curve}", "latency_prompts=0", "limit=2")
    config = place.words(*words, output=tmp_path / "out", drafts=place.drafts[:1])
    evaluate(config)
    before = whole(tmp_path)
    # Only what the schedule reads counts.
    write_curve(curve, CURVE, {"made_with": "two"})
    evaluate(config)
    assert whole(tmp_path) == before
    slower = CostCurve(CURVE.tokens, CURVE.contexts, CURVE.steps_per_second, (1, 8), (0.002, 0.005))
    write_curve(curve, slower, {})
    with pytest.raises(DataError, match="under another calibration or cost curve than the schedule of sure reads now"):
        evaluate(config)


def test_answers_of_the_first_versions_count_where_everything_was_verified(place: Place, tmp_path: Path) -> None:
    config = place.words("latency_prompts=0", "limit=2", output=tmp_path, drafts=place.drafts[:1])
    evaluate(config)
    journal = tmp_path / "rounds" / "prompts--sure.jsonl"
    assert '"schedule_id": ""' in journal.read_text()
    journal.write_text(journal.read_text().replace(', "schedule_id": ""', ""))
    before = whole(tmp_path)
    evaluate(config)
    assert whole(tmp_path) == before


def test_the_name_of_a_schedule_changes_with_all_that_it_decides_by() -> None:
    slower = CostCurve(CURVE.tokens, CURVE.contexts, CURVE.steps_per_second, (1, 8), (0.002, 0.005))
    schedules = [
        ThresholdSchedule(0.5),
        ThresholdSchedule(0.6),
        ThresholdSchedule(0.5, Confidence("max_prob")),
        ThresholdSchedule(0.5, Confidence("head", (1.0, 2.0))),
        ThresholdSchedule(0.5, Confidence("head", (1.0, 2.1))),
        ThroughputSchedule(CURVE),
        ThroughputSchedule(slower),
        ThroughputSchedule(CURVE, lookup="linear"),
        ThroughputSchedule(CURVE, with_draft=False),
    ]
    assert len({schedule_id(one) for one in schedules}) == len(schedules)
    again = CostCurve(CURVE.tokens, CURVE.contexts, CURVE.steps_per_second, (1, 8), (0.002, 0.004))
    assert schedule_id(ThroughputSchedule(again)) == schedule_id(ThroughputSchedule(CURVE))
    assert schedule_id(FullSchedule()) == schedule_id(None) == ""
