"""What the records of an evaluation are tied to: the target's and the draft's weights, the load, and earlier turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_places import Place
from safetensors.torch import load_file, save_file

from deepspec.config import compose_job
from deepspec.data.chat_template import ChatTemplate, generated_message
from deepspec.data.prompts import Message
from deepspec.errors import DataError
from deepspec.evaluation.evaluator import evaluate
from deepspec.evaluation.preparation import prepare
from deepspec.evaluation.report import read_results
from deepspec.scheduling.settings import SweepConfig
from deepspec.scheduling.sweep import run_sweep
from deepspec.targets.base import Target

FEW = ("latency_prompts=0", "limit=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("conditions"))


def test_a_later_turn_reads_earlier_answers_with_the_special_tokens_that_regeneration_keeps(
    place: Place, tmp_path: Path
) -> None:
    config = place.words("latency_prompts=0", output=tmp_path, drafts=place.drafts[:1])
    tokenizer = Target.load_tokenizer(config.target)
    evaluate(config)
    journal = tmp_path / "rounds" / "prompts--sure.jsonl"
    rows = {row["request_id"]: row for row in map(json.loads, journal.read_text().splitlines())}
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    rows["double#0"]["output_ids"] = [10, special, 11, 12]
    del rows["double#1"]
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    evaluate(config)
    (second,) = [row for row in map(json.loads, journal.read_text().splitlines()) if row["request_id"] == "double#1"]
    template = ChatTemplate(tokenizer, config.target.enable_thinking, config.target.system_prompt)
    text = str(tokenizer.decode([10, special, 11, 12], skip_special_tokens=False))
    history = [Message("user", "what is it?"), generated_message(text, template.reasoning_marks())]
    assert second["prompt_ids"] == template.tokenize(template.prompt([*history, Message("user", "and why?")]))
    assert second["prompt_ids"].count(special) == 5


def test_a_target_with_other_weights_under_the_same_name_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path / "place")
    config = place.words(*FEW, output=tmp_path / "out", drafts=place.drafts[:1])
    evaluate(config)
    evaluate(config)
    file = place.target / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith("layers.0.self_attn.q_proj.weight"))
    weights[name][0, 0] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match="holds an evaluation with target_weights"):
        evaluate(config)


def test_what_decides_the_load_is_a_condition_where_the_load_decides_lengths(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conditions(*words: str) -> dict[str, object]:
        return prepare(place.words(*FEW, *words, drafts=place.drafts[:1])).conditions

    fixed = ("schedule=fixed", "schedule.windows=[[1,3],[2,1]]")
    assert conditions(*fixed) != conditions(*fixed, "memory_gib=1")
    assert conditions(*fixed) != conditions(*fixed, "num_processes=2")
    assert conditions() == conditions("memory_gib=1", "num_processes=2")
    started_here = conditions(*fixed, "num_processes=2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert conditions(*fixed) == started_here


def test_records_name_the_step_that_step_latest_stood_for(place: Place, tmp_path: Path) -> None:
    latest = Path(place.drafts[0]).parent / "step_latest"
    latest.symlink_to("step_3")
    evaluate(place.words(*FEW, output=tmp_path, drafts=[str(latest)]))
    latest.unlink()
    row = json.loads((tmp_path / "rounds" / "prompts--sure.jsonl").read_text().splitlines()[0])
    assert row["draft"] == str(Path(place.drafts[0]).resolve())


def test_a_sweep_at_whole_blocks_has_the_tau_of_the_results(place: Place, tmp_path: Path) -> None:
    config = place.words("latency_prompts=0", output=tmp_path)
    evaluate(config)
    # Whether a tiny model's answers end on an accepted stop token is chance: some are made to.
    stops = 0
    for journal in sorted((tmp_path / "rounds").glob("*.jsonl")):
        answers = [json.loads(line) for line in journal.read_text().splitlines()]
        for one in (one for answer in answers for one in answer["rounds"] if one["accepted"]):
            one |= {"proposed": one["accepted"], "emitted": one["accepted"], "ended_by": "stop"}
            stops += 1
        journal.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    assert stops
    evaluate(config)
    rows = {row.draft: row for row in read_results(tmp_path).rows}
    words = ["over=k", f"records=['{tmp_path}']", f"output_dir='{tmp_path / 'sweep'}'"]
    for line in run_sweep(compose_job("sweep", SweepConfig, words)):
        if line.x == 4:
            assert line.tau == pytest.approx(rows[line.draft].acceptance_length)
            assert line.verified_yield == pytest.approx(rows[line.draft].verified_yield)


def test_a_stale_part_of_another_process_is_named_by_its_own_path(place: Place, tmp_path: Path) -> None:
    config = place.words(*FEW, output=tmp_path, drafts=place.drafts[:1])
    evaluate(config)
    journal = tmp_path / "rounds" / "prompts--sure.jsonl"
    (row, *_) = map(json.loads, journal.read_text().splitlines())
    (tmp_path / "parts").mkdir(exist_ok=True)
    (tmp_path / "parts" / "prompts--sure.1.jsonl").write_text(json.dumps({**row, "draft_id": "older"}) + "\n")
    journal.unlink()
    with pytest.raises(DataError, match=r"parts/prompts--sure\.1\.jsonl was decoded with other weights"):
        evaluate(config)
