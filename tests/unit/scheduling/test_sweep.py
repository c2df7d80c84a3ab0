"""Sweeps over recorded rounds against what the shorter verification would have done, round by round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up_rounds import closed_form_tau, make_records, save_records

from deepspec.config import compose_job
from deepspec.errors import ConfigError
from deepspec.evaluation.statistics import acceptance_length, acceptance_length_by_length, verified_yield
from deepspec.interop import folder
from deepspec.scheduling.calibration import Calibration, calibration_path
from deepspec.scheduling.cost import CostCurve, write_curve
from deepspec.scheduling.settings import SweepConfig
from deepspec.scheduling.sweep import run_sweep

K = 5


def config_for(place: Path, over: str, *more: str) -> SweepConfig:
    words = [f"over={over}", f"records=['{place / 'eval'}']", f"output_dir='{place / 'out'}'"]
    return compose_job("sweep", SweepConfig, [*words, *more])


def test_threshold_sweep_counts_kept_rejected_and_cut_off_tokens_of_every_round(tmp_path: Path) -> None:
    record = make_records(10, 20, K, stop_every=4)
    save_records(tmp_path / "eval", record)
    lines = run_sweep(config_for(tmp_path, "threshold", "thresholds=[0.0,0.4,0.8,1.0]"))
    rounds = [one for found in record.rounds.values() for one in found]
    for line, threshold in zip(lines, (0.0, 0.4, 0.8, 1.0), strict=True):
        kept, accepted, could, emitted = [], [], [], []
        for one in rounds:
            length = 0
            for prob in one.max_draft_prob:  # the made-up head says the same
                if prob < threshold:
                    break
                length += 1
            length = min(length, one.proposed)  # nothing is verified behind an accepted stop token
            kept.append(length)
            accepted.append(min(one.accepted, length))
            could.append(one.accepted)
            is_over = one.ended_by == "stop" and length == one.accepted
            emitted.append(accepted[-1] if is_over else accepted[-1] + 1)
        assert line.kept == pytest.approx(sum(kept) / len(rounds))
        assert line.rejected == pytest.approx((sum(kept) - sum(accepted)) / len(rounds))
        assert line.dropped == pytest.approx((sum(could) - sum(accepted)) / len(rounds))
        assert line.tau == pytest.approx(sum(emitted) / len(rounds))
        assert line.verified_yield == pytest.approx((sum(accepted) + len(rounds)) / (sum(kept) + len(rounds)))
        assert line.tau_interval is not None
        assert line.tau_interval[0] <= line.tau <= line.tau_interval[1]
    yields = [line.verified_yield for line in lines]
    assert yields == sorted(yields)
    assert lines[-1].tau == 1.0


def test_k_sweep_at_the_whole_block_gives_the_tau_of_the_same_rounds(tmp_path: Path) -> None:
    record = make_records(10, 20, K, stop_every=3)
    save_records(tmp_path / "eval", record)
    lines = run_sweep(config_for(tmp_path, "k"))
    assert [line.tau for line in lines] == pytest.approx(acceptance_length_by_length(record.rounds, K))
    assert lines[-1].tau == pytest.approx(acceptance_length(record.rounds))
    assert lines[-1].verified_yield == pytest.approx(verified_yield(record.rounds))


def test_a_threshold_sweep_finds_the_calibration_of_a_draft_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_records(10, 20, K)._replace(draft_path="someone/draft")
    save_records(tmp_path / "eval", record)
    monkeypatch.setattr(folder, "snapshot_download", lambda *_, **__: str(tmp_path))
    calibration = Calibration(source="head", temperatures=(9.0,) * K, weights="w0", details={})
    calibration_path(tmp_path, "head").write_text(calibration.model_dump_json())
    words = ("threshold", "thresholds=[0.6]")
    found, plain = (run_sweep(config_for(tmp_path, *words, f"calibration={one}"))[0] for one in ("auto", "none"))
    assert found.kept < plain.kept


def test_k_sweep_of_independent_acceptance_follows_the_closed_form(tmp_path: Path) -> None:
    save_records(tmp_path / "eval", make_records(40, 200, K, chance=0.7))
    write_curve(tmp_path / "curve.json", CostCurve((1, 100), (0,), ((10.0, 10.0),), (1,), (0.1,)), {})
    lines = run_sweep(config_for(tmp_path, "k", f"curve='{tmp_path / 'curve.json'}'"))
    assert [line.x for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        # Four standard errors of 8,000 rounds.
        assert line.tau == pytest.approx(closed_form_tau(0.7, int(line.x)), abs=4 * 2.5 / 8000**0.5)
        assert line.ms_per_token == pytest.approx(200 / line.tau)
    numbers = json.loads((tmp_path / "out" / "sweep_k.json").read_text())
    assert [one["tau"] for one in numbers["lines"]] == [line.tau for line in lines]
    assert (tmp_path / "out" / "sweep_k.html").read_text().count("<svg") == 5


def test_depth_sweep_reads_the_layers_of_every_draft_and_needs_two(tmp_path: Path) -> None:
    records = []
    for layers, chance in ((1, 0.4), (3, 0.6)):
        draft = tmp_path / f"draft{layers}"
        draft.mkdir()
        fields = {
            "architectures": ["Qwen3DSparkModel"],
            "num_hidden_layers": layers,
            "target_layer_ids": [1],
            "model_type": "qwen3",
            "hidden_size": 8,
            "vocab_size": 8,
        }
        (draft / "config.json").write_text(json.dumps(fields))
        made = make_records(10, 50, K, chance=chance, draft=f"draft{layers}")
        records.append(made._replace(draft_path=str(draft)))
    save_records(tmp_path / "eval", *records)
    lines = run_sweep(config_for(tmp_path, "depth"))
    assert [(line.draft, line.x) for line in lines] == [("draft1", 1), ("draft3", 3)]
    assert lines[0].tau < lines[1].tau
    with pytest.raises(ConfigError, match="records hold drafts of 3 layers only"):
        run_sweep(config_for(tmp_path, "depth", "draft=draft3"))
