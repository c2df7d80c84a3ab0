"""`deepspec compare`: what folders tell, and that only like evaluations are put side by side."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from deepspec.cli import main
from deepspec.config import compose_train
from deepspec.errors import DataError
from deepspec.evaluation.compare import compare, merge, show, write
from deepspec.evaluation.report import AUTOREGRESSIVE, ResultRow, write_results
from deepspec.training.runs import different_settings, read_run, training_markdown

CONDITIONS: dict[str, Any] = {
    "target": {"name_or_path": "org/T", "revision": None, "dtype": "bfloat16", "layers": [1, 2], "system_prompt": None},
    "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "max_new_tokens": 64,
    "schedule": {"name": "full"},
    "target_weights": "w1",
    "template_hash": "aa",
    "prompts_hash": {"gsm8k": "p1"},
    "hardware": {"processor": "one CPU", "cpus": 2, "gpus": []},
    "device": "cpu",
}


def row(draft: str, tau: float, task: str = "gsm8k", **values: Any) -> ResultRow:
    settings: dict[str, Any] = {
        "task": task,
        "draft": draft,
        "algorithm": AUTOREGRESSIVE if draft == AUTOREGRESSIVE else "dspark",
        "temperature": 0.0,
        "num_prompts": 4,
        "rounds": 9,
        "acceptance_length": tau,
        "acceptance_length_ci95": None,
        "survival": (0.5, 0.25),
        "conditional_acceptance": (0.5, 0.5),
        "acceptance_rate": 0.4,
    }
    return ResultRow.model_validate(settings | values)


def evaluation(folder: Path, rows: list[ResultRow], **changes: Any) -> Path:
    """A results.json; `changes` names conditions by keys joined with two underscores."""
    conditions = copy.deepcopy(CONDITIONS)
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        place = conditions
        for parent in parents:
            place = place[parent]
        place[leaf] = value
    write_results(folder, rows, conditions)
    return folder


def run_folder(
    folder: Path, *overrides: str, algorithm: str = "dspark", lines: int = 4, tau: float | None = None
) -> Path:
    config = compose_train(
        [f"experiment={algorithm}_smollm2_135m", "optimizer.epochs=null", "optimizer.steps=40", *overrides]
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json())
    slots = {f"acceptance@{slot}": 1 / slot for slot in (1, 2, 10)}
    metrics = [
        {"step": 10 * line, "loss": 8.0 / line, "loss/ce": 4.0 / line, "seconds_per_step": 0.5, **slots}
        for line in range(1, lines + 1)
    ]
    if tau is not None:
        metrics[0]["eval/acceptance_length"] = tau
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + '{"step": 50, "lo')
    return folder


def test_a_run_folder_tells_steps_losses_acceptance_tau_and_seconds(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "one", tau=2.5))
    assert (run.steps, run.planned_steps, run.tau, run.seconds) == (40, 40, 2.5, 20.0)
    assert run.losses == {"loss": 2.0, "ce": 1.0}
    assert run.acceptance == [1.0, 0.5, 0.1]


def test_tables_of_runs_round_small_numbers_too(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "one"))
    run = run._replace(acceptance=[0.25, 0.000783912], losses={"loss": 0.000412345, "ce": 0.000412345})
    cells = [cell.strip() for cell in training_markdown([run]).splitlines()[2].split("|")]
    assert cells[4:7] == ["0.0004123", "ce 0.000412", "0.25 0.00"]


def test_a_table_of_runs_shows_the_settings_in_which_they_differ_and_no_other(tmp_path: Path) -> None:
    runs = [
        read_run(run_folder(tmp_path / "a", "seed=0", "logger.every_steps=3")),
        read_run(run_folder(tmp_path / "b", "seed=1", "optimizer.learning_rate=0.01", lines=2)),
        read_run(run_folder(tmp_path / "c", "seed=1", algorithm="eagle3")),
    ]
    shared = {"optimizer.learning_rate": 0.0025}
    assert different_settings(runs) == [
        {"seed": 0, **shared},
        {"seed": 1, "optimizer.learning_rate": 0.01},
        {"seed": 1, **shared},
    ]
    lines = training_markdown(runs).splitlines()
    assert lines[0].startswith("| run | algorithm | settings | steps | loss |")
    assert "tau" not in lines[0]
    assert lines[3].startswith("| b | dspark | seed=1, learning_rate=0.0100 | 20 of 40 | 4.0000 | ce 2.000 |")


def test_folders_of_every_kind_are_found(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "runs" / "one")
    (run / "step_40").mkdir()
    evaluation(tmp_path / "evals" / "first", [row("d", 2.0)])
    for folder in (run, run / "step_40", tmp_path / "runs"):
        assert [found.name for found in compare([folder], allow_different=False).runs] == ["one"]
    both = compare([tmp_path, tmp_path / "evals" / "first" / "results.json"], allow_different=False)
    assert (len(both.runs), len(both.rows)) == (1, 1)  # nothing twice
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds neither a training run, nor a sweep, nor the"):
        compare([tmp_path / "empty"], allow_different=False)


def test_like_evaluations_are_merged_with_one_row_of_plain_decoding(tmp_path: Path) -> None:
    plain = row(AUTOREGRESSIVE, 1.0, survival=(), conditional_acceptance=(), acceptance_rate=None)
    timed = plain.model_copy(update={"seconds_per_token": 0.05})
    one = evaluation(tmp_path / "one", [plain, row("dspark", 2.0), row("same", 2.1)])
    two = evaluation(tmp_path / "two", [timed, row("eagle3", 2.2), row("same", 2.3)], target__layers=[3])
    rows = compare([one, two], allow_different=False).rows
    assert [(found.draft, found.acceptance_length) for found in rows] == [
        (AUTOREGRESSIVE, 1.0),
        ("dspark", 2.0),
        ("same (one)", 2.1),
        ("same (two)", 2.3),
        ("eagle3", 2.2),
    ]
    assert rows[0].seconds_per_token == 0.05


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"target__name_or_path": "org/U"}, "target.name_or_path: org/T (one), org/U (two)"),
        ({"target__dtype": "float32"}, "target.dtype: bfloat16 (one), float32 (two)"),
        ({"sampling__top_p": 0.9}, "sampling.top_p: 1.0 (one), 0.9 (two)"),
        ({"max_new_tokens": 65}, "max_new_tokens: 64 (one), 65 (two)"),
        ({"schedule": {"name": "threshold", "threshold": 0.5}}, "schedule.name: full (one), threshold (two)"),
        ({"target_weights": "w2"}, "target_weights: w1 (one), w2 (two)"),
        ({"template_hash": "bb"}, "template_hash: aa (one), bb (two)"),
        ({"prompts_hash__gsm8k": "p2"}, "prompts_hash.gsm8k: p1 (one), p2 (two)"),
    ],
)
def test_unlike_evaluations_are_refused_with_what_differs_unless_that_is_wanted(
    tmp_path: Path, changes: dict[str, Any], shown: str
) -> None:
    folders = [
        evaluation(tmp_path / "one", [row("d", 2.0)]),
        evaluation(tmp_path / "two", [row("d", 2.5)], **changes),
    ]
    with pytest.raises(DataError, match="not made alike") as refused:
        compare(folders, allow_different=False)
    assert shown in str(refused.value)
    assert "allow_different=true" in str(refused.value)
    rows = compare(folders, allow_different=True).rows
    assert [found.acceptance_length for found in rows] == [2.0, 2.5]
    assert len({found.task for found in rows}) == 2  # never under one heading


def test_hardware_matters_only_where_something_was_timed(tmp_path: Path) -> None:
    other = {"hardware__processor": "another CPU"}
    untimed = [
        evaluation(tmp_path / "a" / "one", [row("d", 2.0)]),
        evaluation(tmp_path / "a" / "two", [row("e", 2.0)], **other),
    ]
    assert len(compare(untimed, allow_different=False).rows) == 2
    timed = [
        evaluation(tmp_path / "b" / "one", [row("d", 2.0, seconds_per_token=0.1)]),
        evaluation(tmp_path / "b" / "two", [row("e", 2.0)], **other),
    ]
    with pytest.raises(DataError, match=r"hardware\.processor: one CPU \(one\), another CPU \(two\)"):
        compare(timed, allow_different=False)


def test_prompts_of_tasks_that_only_one_evaluation_has_are_no_difference(tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", [row("d", 2.0)])
    two = evaluation(tmp_path / "two", [row("d", 2.5, task="mbpp")], prompts_hash={"mbpp": "p9"})
    comparison = compare([one, two], allow_different=False)
    assert [(found.task, found.draft) for found in comparison.rows] == [("gsm8k", "d"), ("mbpp", "d")]
    assert merge([], {}) == []


def test_tables_are_printed_and_written_as_markdown_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path / "runs" / "mine")
    evaluation(tmp_path / "evals" / "one", [row("my_draft", 2.0)])
    main(["compare", str(tmp_path / "runs"), str(tmp_path / "evals")])
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "my_draft" in shown
    text = (tmp_path / "comparison.md").read_text()
    assert "| mine | dspark | 40 |" in text
    assert "| gsm8k | my_draft | 2.00 |" in text
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["runs"][0]["losses"] == {"loss": 2.0, "ce": 1.0}
    assert content["rows"][0]["acceptance_length"] == 2.0


def test_output_goes_where_it_is_told_and_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run=1")
    main(["compare", str(folder), f"output={tmp_path}/there"])
    assert (tmp_path / "there" / "comparison.md").is_file()
    comparison = compare([folder], allow_different=False)
    show(comparison)
    with pytest.raises(DataError, match="/proc/none cannot be written to"):
        write(comparison, Path("/proc/none"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ConfigError: give the folders to compare"),
        (["/none/such"], "DataError: /none/such does not exist"),
        (["allow_diferent=true"], "ConfigError: 'allow_diferent=true' is neither a folder nor an option."),
        ([".", "allow_different=perhaps"], "ConfigError: allow_different: got 'perhaps'; valid: true, false."),
    ],
)
def test_words_that_cannot_be_understood_are_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *words])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_seconds_of_a_run_that_went_on_from_another_runs_checkpoint_are_its_own(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "fork", lines=0)
    lines = [{"step": step, "seconds_per_step": 0.5} for step in (410, 420)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "provenance.json").write_text(json.dumps([{"step": 405}, {"step": 410}]))
    assert read_run(folder).seconds == 7.5
