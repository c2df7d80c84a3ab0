"""An evaluation can be killed, repeated and checked: every number of a row follows from the rounds on disk."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_targets import save_chat_target, target_overrides
from eval_places import PROMPTS, Place
from helpers import STOP_TOKEN
from interrupted import finish, kill_after, lines, start
from safetensors.torch import load_file, save_file

from deepspec.config import EvalConfig, config_folder
from deepspec.decoding.rounds import Round, from_json
from deepspec.errors import CheckpointError, ConfigError, DataError, DeepSpecError
from deepspec.evaluation.evaluator import evaluate
from deepspec.evaluation.preparation import draft_names
from deepspec.evaluation.report import read_results
from deepspec.evaluation.statistics import acceptance_length_ci95
from deepspec.targets.base import Target

K = 4
TURNS = 8
TIMINGS = ("seconds_draft", "seconds_verify")
LATENCY = (
    "tokens_per_second",
    "seconds_draft_per_round",
    "seconds_verify_per_round",
    "median_seconds_draft",
    "median_seconds_verify",
    "overhead_seconds_per_round",
    "seconds_per_token",
    "latency_acceptance_length",
    "speedup_over_autoregressive",
    "peak_memory_bytes",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("evaluator"))


@pytest.fixture(scope="module")
def done(place: Place) -> Path:
    """Output folder of an undisturbed evaluation."""
    output = place.folder / "undisturbed"
    evaluate(place.words(output=output))
    return output


def journals(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((output / "rounds").glob("*.jsonl"))}


def answers(output: Path, draft: str, *, as_expected: bool = False) -> dict[str, dict[str, Any]]:
    """Rows of a draft's journal by request, without the seconds.

    As expected ones they equal others up to rounding: batches of another composition differ in the last bits.
    """
    rows = [json.loads(line) for line in (output / "rounds" / f"prompts--{draft}.jsonl").read_text().splitlines()]
    found = {row["request_id"]: row for row in rows}
    assert len(found) == len(rows), "a prompt is doubled"
    for row in rows:
        for one in row["rounds"]:
            for key in TIMINGS:
                assert one.pop(key) == 0.0, "the acceptance pass runs without timers"
            if as_expected:
                one["max_draft_prob"] = pytest.approx(one["max_draft_prob"], rel=1e-4)
                one["overlap"] = pytest.approx(one["overlap"], rel=1e-3, abs=1e-4)
                if one["confidence_logits"] is not None:
                    one["confidence_logits"] = pytest.approx(one["confidence_logits"], rel=1e-3, abs=1e-4)
    return found


def acceptance(output: Path) -> list[dict[str, Any]]:
    rows = json.loads((output / "results.json").read_text())["rows"]
    # The rounds of plain decoding are those of the latency pass.
    return [{key: value for key, value in row.items() if key not in LATENCY} for row in rows]


def test_results_hold_plain_decoding_first_then_every_draft(place: Place, done: Path) -> None:
    content = json.loads((done / "results.json").read_text())
    assert content["schema"] == 1
    assert [(row["task"], row["draft"], row["algorithm"]) for row in content["rows"]] == [
        ("prompts", "autoregressive", "autoregressive"),
        ("prompts", "sure", "dspark"),
        ("prompts", "plain", "dflash"),
    ]
    made_with = content["provenance"]
    assert made_with["drafts"] == dict(zip(("sure", "plain"), place.drafts, strict=True))
    assert made_with["target"]["name_or_path"] == str(place.target)
    for key in ("template_hash", "dtype", "sampling", "seed", "tasks", "packages", "hardware", "prompts_hash"):
        assert made_with[key] is not None
    assert read_results(done).provenance == made_with
    assert (done / "report.html").stat().st_size > 1000


def test_every_number_of_a_row_follows_from_the_rounds_on_disk(done: Path) -> None:
    by_draft = {row.draft: row for row in read_results(done).rows}
    for name in ("sure", "plain"):
        row = by_draft[name]
        rounds: dict[str, list[Round]] = {}
        for line in (done / "rounds" / f"prompts--{name}.jsonl").read_text().splitlines():
            one = json.loads(line)
            rounds.setdefault(one["request_id"].split("#")[0], []).extend(map(from_json, one["rounds"]))
        flat = [one for records in rounds.values() for one in records]
        assert row.num_prompts == len(PROMPTS) == len(rounds)
        assert row.rounds == len(flat) > len(PROMPTS)
        assert row.acceptance_length == pytest.approx(sum(one.emitted for one in flat) / len(flat))
        assert 1 <= row.acceptance_length <= K + 1
        assert row.acceptance_length_ci95 == pytest.approx(acceptance_length_ci95(rounds, seed=0))
        for k in range(1, K + 1):
            proposed = [one for one in flat if one.proposed >= k]
            reached = [one for one in proposed if one.accepted >= k - 1]
            kept = sum(one.accepted >= k for one in proposed)
            assert row.survival[k - 1] == pytest.approx(kept / len(proposed))
            expected = kept / len(reached) if reached else None
            assert row.conditional_acceptance[k - 1] == pytest.approx(expected)
        accepted, proposed_tokens = sum(one.accepted for one in flat), sum(one.proposed for one in flat)
        assert row.acceptance_rate == pytest.approx(accepted / proposed_tokens)
        assert row.verified_yield == pytest.approx((accepted + len(flat)) / (proposed_tokens + len(flat)))


def test_latency_columns_are_complete_and_plain_decoding_is_its_own_baseline(done: Path) -> None:
    rows = read_results(done).rows
    for row in rows:
        for key in LATENCY:
            may_be_small = key in ("seconds_draft_per_round", "median_seconds_draft", "overhead_seconds_per_round")
            assert getattr(row, key) > 0 or may_be_small, f"{row.draft} {key}"
        assert row.tokens_per_second == pytest.approx(1 / row.seconds_per_token)
    plain, *drafts = rows
    assert plain.speedup_over_autoregressive == 1.0
    assert plain.acceptance_length == plain.latency_acceptance_length == 1.0
    assert (plain.acceptance_length_ci95, plain.survival, plain.num_prompts) == (None, (), 2)
    assert all(row.seconds_draft_per_round > 0 for row in drafts)


def test_each_turn_reads_the_draft_s_own_earlier_answer(place: Place, done: Path) -> None:
    tokenizer = Target.load_tokenizer(place.words().target)
    for name in ("sure", "plain"):
        rows = answers(done, name)
        assert len(rows) == TURNS
        first, second = rows["double#0"], rows["double#1"]
        ids = first["output_ids"]
        text = tokenizer.decode(ids[:-1] if ids[-1] == STOP_TOKEN else ids)
        assert tokenizer.decode(second["prompt_ids"]) == (
            "<|im_start|>user\nwhat is it?<|im_end|>\n"
            f"<|im_start|>assistant\n{text}<|im_end|>\n"
            "<|im_start|>user\nand why?<|im_end|>\n<|im_start|>assistant\n"
        )
        for row in rows.values():
            assert (row["finish_reason"] == "stop") == (row["output_ids"][-1] == STOP_TOKEN)
            assert len(row["output_ids"]) <= 20


def test_a_rerun_repeats_no_prompt_and_gives_the_same_acceptance(place: Place, done: Path, tmp_path: Path) -> None:
    before, numbers = journals(done), acceptance(done)
    assert len(before) == 2
    evaluate(place.words("latency_prompts=1", output=done))
    assert journals(done) == before
    again = acceptance(done)
    assert again[1:] == numbers[1:]
    evaluate(place.words(output=done))


def test_a_draft_is_added_to_an_evaluation_without_repeating_the_others(
    place: Place, done: Path, tmp_path: Path
) -> None:
    evaluate(place.words("latency_prompts=0", output=tmp_path, drafts=place.drafts[:1]))
    before = journals(tmp_path)
    evaluate(place.words("latency_prompts=0", output=tmp_path))
    assert {name: content for name, content in journals(tmp_path).items() if name in before} == before
    assert acceptance(tmp_path)[1:] == acceptance(done)[1:]


def test_without_drafts_only_plain_decoding_is_measured(place: Place, tmp_path: Path) -> None:
    evaluate(place.words(output=tmp_path, drafts=[]))
    (row,) = read_results(tmp_path).rows
    assert (row.draft, row.num_prompts, row.speedup_over_autoregressive) == ("autoregressive", 2, 1.0)


def test_an_evaluation_killed_in_the_middle_continues_to_the_same_numbers(
    place: Place, done: Path, tmp_path: Path
) -> None:
    config = place.words("latency_prompts=0", output=tmp_path)
    files = [tmp_path / "rounds" / f"prompts--{name}.jsonl" for name in ("sure", "plain")]
    draw = random.Random(1)
    killed = 0
    for _ in range(5):
        before = [lines(path) for path in files]
        wanted = sum(before) + draw.randint(1, 4)
        process = start(evaluate, config)
        killed += kill_after(process, lambda: sum(map(lines, files)) >= wanted, draw.random() * 0.01)  # noqa: B023
        assert all(lines(path) >= count for path, count in zip(files, before, strict=True))
    assert killed > 0
    finish(start(evaluate, config))
    for name in ("sure", "plain"):
        assert answers(tmp_path, name) == answers(done, name, as_expected=True)
    assert acceptance(tmp_path)[1:] == acceptance(done)[1:]


def refused(kind: type[DeepSpecError], words: str, config: EvalConfig) -> None:
    """The evaluation must be refused, and leave its folder as it is."""
    output = Path(config.output_dir)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(kind, match=words) as caught:
        evaluate(config)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sampling.temperature=0", "sampling"),
        ("max_new_tokens=21", "max_new_tokens 20; this one has 21"),
        ("seed=1", "seed 0; this one has 1"),
        ("target.system_prompt=hi", "target"),
        ("task.limit=2", "tasks"),
    ],
)
def test_other_conditions_are_not_mixed_into_a_folder(place: Place, done: Path, change: str, words: str) -> None:
    refused(
        DataError,
        f"undisturbed holds an evaluation with {words}.*Choose another output_dir",
        place.words(change, output=done),
    )


def test_prompts_that_changed_behind_the_same_path_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    config = place.words("latency_prompts=0", drafts=place.drafts[1:])
    evaluate(config)
    rows = [*PROMPTS[:-1], {"turns": ["another question"]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(DataError, "prompts.*Choose another output_dir", config)


def test_changed_weights_of_a_draft_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    config = place.words("latency_prompts=0", drafts=place.drafts[:1])
    evaluate(config)
    weights = Path(place.drafts[0]) / "model.safetensors"
    state = load_file(weights)
    state["norm.weight"] = state["norm.weight"] * 1.5
    save_file(state, weights, metadata={"format": "pt"})
    refused(DataError, "other weights of sure: those of .*step_3 as it was then.*Choose another output_dir", config)


def test_a_target_too_small_for_the_default_layers_takes_those_of_the_draft(tmp_path: Path) -> None:
    place = Place(tmp_path)
    evaluation = evaluate(place.words("target.layers=null", "latency_prompts=0", drafts=place.drafts[1:]))
    assert [row.rounds > 0 for row in evaluation.results.rows] == [False, True]


def test_a_line_of_the_training_log_that_a_kill_cut_in_two_is_left_out_of_the_page(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "plain" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    evaluation = evaluate(place.words("latency_prompts=0", drafts=place.drafts[1:]))
    assert evaluation.report.curves == {"plain": [{"step": 1, "loss": 2.0}]}


def test_damaged_files_of_an_earlier_run_are_named(tmp_path: Path) -> None:
    place = Place(tmp_path)
    config = place.words("latency_prompts=0", drafts=place.drafts[:1])
    evaluate(config)
    journal = tmp_path / "out" / "rounds" / "prompts--sure.jsonl"
    whole = journal.read_text()
    for damaged in (whole.replace('"output_ids"', '"output"', 1), whole.replace('"accepted"', '"taken"', 1)):
        journal.write_text(damaged)
        refused(DataError, r"prompts--sure\.jsonl", config)
    journal.write_text(whole)
    (tmp_path / "out" / "conditions.json").write_text("{")
    refused(DataError, r"conditions\.json is damaged", config)


def test_an_output_folder_that_cannot_be_written_is_named_before_the_first_prompt(place: Place) -> None:
    refused(DataError, r"/proc/deepspec.* cannot be written", place.words(output=Path("/proc/deepspec")))


def test_a_target_of_another_size_is_refused_before_anything_is_written(place: Place, tmp_path: Path) -> None:
    other = save_chat_target(tmp_path / "other", hidden_size=48)
    config = place.words(f"target.name_or_path={other}", output=tmp_path / "out")
    refused(CheckpointError, "step_3 was trained for a target with hidden_size 32, but .*other has 48", config)
    assert not (tmp_path / "out").exists()


def test_the_same_draft_twice_is_refused_however_its_folder_is_written(place: Place, tmp_path: Path) -> None:
    draft = place.drafts[0]
    (tmp_path / "step_latest").symlink_to(draft)
    for other in (draft, f"{draft}/", f"{draft}/../step_3", str(tmp_path / "step_latest")):
        config = place.words(output=tmp_path / "out", drafts=[draft, other])
        refused(ConfigError, "drafts names a folder twice: .*Give each draft once", config)
    assert not (tmp_path / "out").exists()


def test_a_confidence_head_that_is_asked_for_must_be_there(place: Place, tmp_path: Path) -> None:
    config = place.words("schedule=threshold", "schedule.confidence=head", output=tmp_path / "out")
    refused(ConfigError, "schedule.confidence is 'head', but .*plain/step_3 has no confidence head", config)
    assert not (tmp_path / "out").exists()


def test_a_confidence_threshold_shortens_what_is_verified(place: Place, done: Path, tmp_path: Path) -> None:
    config = place.words("schedule=threshold", "latency_prompts=0", output=tmp_path, drafts=place.drafts[:1])
    evaluate(config)
    rounds = [one for row in answers(tmp_path, "sure").values() for one in row["rounds"]]
    assert {one["proposed"] for one in rounds} > {K}
    for one in rounds:
        sure = [logit >= 0 for logit in one["confidence_logits"]]
        assert one["proposed"] <= (sure.index(False) if False in sure else K)


def test_a_first_prompt_that_is_too_long_is_named_before_any_task_is_decoded(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "turns": ["a" * 600]}) + "\n")
    for drafts in (place.drafts, []):
        refused(DataError, "prompt 'long#0' has .* 512 positions", place.words(drafts=drafts))
    assert not (tmp_path / "out").exists()


def test_eval_py_ends_with_one_line_and_status_2_for_a_draft_that_does_not_exist(place: Place, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(config_folder().parent / "eval.py"),
        *target_overrides(place.target),
        f"drafts=[{tmp_path}/none]",
        f"output_dir={tmp_path}/out",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"CheckpointError: {tmp_path}/none is not a draft checkpoint: it has no config.json. ")
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_every_set_of_conditions_gets_its_own_and_the_same_ones_continue(
    place: Place, tmp_path: Path
) -> None:
    words = ("output_dir=null", f"results_dir={tmp_path}", "latency_prompts=0", "max_new_tokens=4")
    first = evaluate(place.words(*words)).folder
    kept = journals(first)
    other = evaluate(place.words(*words, "sampling.temperature=0.5")).folder
    assert first.parent == other.parent
    assert first.parent.parent == tmp_path
    assert first != other
    assert evaluate(place.words(*words)).folder == first
    assert journals(first) == kept


def test_results_of_other_drafts_in_the_same_folder_are_kept(place: Place, tmp_path: Path) -> None:
    for draft in place.drafts:
        evaluate(place.words(output=tmp_path, drafts=[draft]))
    kept, new = (read_results(tmp_path / name) for name in ("results-1.json", "results.json"))
    assert [{row.draft for row in found.rows} for found in (kept, new)] == [
        {"autoregressive", "sure"},
        {"autoregressive", "plain"},
    ]
    assert (tmp_path / "report-1.html").is_file()


def test_a_draft_never_takes_the_name_of_plain_decoding() -> None:
    assert draft_names(["/runs/autoregressive/step_3"]) == ["autoregressive_step_3"]
