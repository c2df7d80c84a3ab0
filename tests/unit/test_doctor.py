"""The doctor: nothing takes it down, and each thing that would stop a run is found with a way out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import make_place

from deepspec import limits
from deepspec.cli import main
from deepspec.doctor import machine
from deepspec.doctor.experiment import experiment_checks
from deepspec.doctor.finding import Finding, run_check
from deepspec.doctor.report import examine
from deepspec.doctor.room import processes_here
from deepspec.planning.settings import compose_plan
from deepspec.training.lock import LOCK, lock_run_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("doctor"))


def words(place: Path, *overrides: str) -> list[str]:
    return [
        "target=smollm2_135m",
        f"target.name_or_path={place / 'target'}",
        "target.layers=[0,1,3]",
        "target.mask_token_id=95",
        f"data.answers={place / 'answers.jsonl'}",
        "data.max_length=64",
        "data.num_anchors=4",
        f"output_dir={place}",
        "engine.device=cpu",
        "optimizer.global_batch_size=4",
        *overrides,
    ]


def failures(*overrides: str) -> list[Finding]:
    return [finding for finding in examine(overrides) if finding.level == "fail"]


def failing(check: str, *overrides: str) -> list[Finding]:
    """What one check of a run objects to."""
    found = run_check(check, experiment_checks(compose_plan(overrides))[check], 60)
    return [finding for finding in found if finding.level == "fail"]


def test_a_bare_doctor_says_what_the_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    for part in ("Python 3", f"torch {torch.__version__}", "cores", "GiB RAM free", "runs and checkpoints", "gloo"):
        assert part in shown
    for part in ("compiler", "HF_HUB_OFFLINE", "shared memory", "files may be open"):
        assert part in shown
    assert "This machine is fit" in shown


def test_a_run_that_has_all_it_needs_passes(place: Path) -> None:
    found = list(examine(words(place)))
    assert [finding for finding in found if finding.level == "fail"] == []
    texts = "\n".join(finding.text for finding in found)
    for part in (
        "engine=single",
        f"target in {place}",
        "answers: ",
        "a new run: ",
        "RAM for 1 process",
        "checkpoints take",
    ):
        assert part in texts


@pytest.mark.parametrize(
    ("check", "override", "text", "way_out"),
    [
        ("target", "target.name_or_path=/no/such/model", "target: there is no folder /no/such/model", "hub id"),
        ("target", "target.name_or_path=nobody/nothing", "not on this machine, and offline mode is on", "hf download"),
        ("target", "target.chat_template=/no/template", "there is no file /no/template", "path"),
        (
            "answers",
            "data.answers=/no/answers.jsonl",
            "data.answers: there is no file /no/answers.jsonl",
            "deepspec data",
        ),
        ("answers", "features.source=cached", "does not exist or is empty", "deepspec data cache"),
        ("run folder", "output_dir=/proc/deepspec", "/proc cannot be written to", "output_dir"),
        ("start", "checkpoint.warm_start=/no/draft", "checkpoint.warm_start: there is no folder /no/draft", "hub id"),
        ("start", "checkpoint.warm_start=nobody/draft", "not on this machine", "checkpoint.warm_start=<folder>"),
        ("engine", "engine.attention=flex", "engine.attention=flex needs a GPU", "engine.attention=auto"),
    ],
)
def test_each_thing_that_would_stop_a_run_is_found_with_a_way_out(
    place: Path, check: str, override: str, text: str, way_out: str
) -> None:
    (found,) = failing(check, *words(place), override)
    assert text in found.text
    assert way_out in found.way_out


def test_a_cache_that_is_cut_or_lacks_samples_of_the_run_is_found(place: Path, tmp_path: Path) -> None:
    cache = [f"features.cache={tmp_path / 'cache'}", "features.source=cached"]
    main(["data", "cache", *words(place), cache[0], "features.limit=1"])
    assert "lacks" in failing("answers", *words(place), *cache)[0].text
    files = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    shard = max(files, key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    assert any(shard.name in one.text for one in failing("answers", *words(place), *cache))


@pytest.mark.slow
def test_runs_too_large_for_the_machine_and_taps_that_the_target_lacks_are_found(place: Path) -> None:
    (memory,) = failing("memory and disk", *words(place), "features.memory_gib=1000000")
    assert "GiB RAM for 1 process(es), features.memory_gib=1e+06 in each" in memory.text
    assert memory.way_out.startswith("features.memory_gib=0, or less")
    many = ["optimizer.epochs=1000000", "checkpoint.every_steps=1", "checkpoint.keep_every=1"]
    (disk,) = failing("memory and disk", *words(place), *many)
    # Seven rows and four a step: two steps an epoch, and a checkpoint of each.
    assert "at once (2,000,000 of " in disk.text
    assert "are free at" in disk.text
    assert "checkpoint.keep_last=1 checkpoint.keep_every=null" in disk.way_out
    (taps,) = failing("memory and disk", *words(place), "target.layers=[0,4]")
    assert "layer 4 is the last layer" in taps.text


def ram(place: Path, *overrides: str) -> float:
    """GiB of RAM that the doctor asks for."""
    found = experiment_checks(compose_plan(words(place, *overrides)))["memory and disk"]()
    (shown,) = [finding.text for finding in found if "GiB RAM for" in finding.text]
    return float(shown.split()[1])


def test_every_process_keeps_passes_of_its_own_and_none_where_features_come_from_a_cache(place: Path) -> None:
    two = ["engine=ddp", "engine.num_processes=2", "engine.device=cpu"]
    without = ram(place, *two)
    assert ram(place, *two, "features.memory_gib=3") == pytest.approx(without + 6.0, abs=0.11)
    assert ram(place, *two, "features=cached", "features.memory_gib=3") == pytest.approx(without, abs=0.11)


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 16),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_JOB_NUM_NODES": "2"}, 8),
        ({"SLURM_JOB_NUM_NODES": "3"}, 6),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
    ],
)
def test_of_the_processes_of_several_machines_those_here_are_counted(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int
) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for name in [name for name in os.environ if name.startswith("SLURM_") or name == "LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(name)
    for name, value in {**step, "SLURM_STEP_NODELIST": "a[1-2]", **variables}.items():
        monkeypatch.setenv(name, value)
    assert processes_here(16) == count


def test_more_threads_than_the_quota_lets_run_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    found = list(machine.machine_checks({})["processor"]())
    assert "the time of 1.0 by a cgroup's quota: 1 thread(s)" in found[0].text
    assert "OMP_NUM_THREADS is 8, and 1 can run at a time" in found[1].text
    assert found[1].way_out == "unset OMP_NUM_THREADS, or OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optimizer.global_batch_size=0", "ConfigError: optimizer.global_batch_size: got 0"),
        ("algorithm=dsprk", "ConfigError: algorithm 'dsprk' does not exist"),
    ],
)
def test_a_configuration_that_cannot_be_is_found_and_the_machine_shown_all_the_same(
    place: Path, capsys: pytest.CaptureFixture[str], override: str, text: str
) -> None:
    (found,) = failures(*words(place), override)
    assert text in found.text
    assert "GiB RAM free" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_engines_that_need_gpus_are_found_impossible_without(place: Path) -> None:
    (cuda,) = failing("engine", *words(place), "engine.device=cuda")
    assert cuda.text == "engine.device is cuda, and torch sees no GPU"
    (sharded,) = failing("engine", *words(place), "engine=zero2", "engine.num_processes=2", "engine.device=auto")
    assert sharded.text.startswith("engine=zero2 needs a GPU for each process")


def test_a_target_that_was_copied_in_part_is_found(place: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((place / "target" / name).read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one", "b": "two"}}))
    (tmp_path / "one").touch()
    (found,) = failing("target", *words(place), f"target.name_or_path={tmp_path}")
    assert found.text == f"target {tmp_path} has no complete weights"


def test_a_broken_answers_file_and_a_run_folder_with_a_broken_checkpoint_are_both_found(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "answers.jsonl").write_text("\n<html>not found</html>\n")
    (tmp_path / "mine" / "step_3").mkdir(parents=True)
    here = [*words(place), f"data.answers={tmp_path}/answers.jsonl", f"output_dir={tmp_path}", "exp_name=mine"]
    (answers,) = failing("answers", *here)
    assert answers.text.startswith(f"{tmp_path}/answers.jsonl is empty or its first line is no JSON")
    (folder,) = failing("run folder", *here)
    assert folder.text.startswith(f"{tmp_path}/mine holds another run: ")


def test_answers_that_the_run_would_refuse_are_found_with_the_row(place: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    answers = f"data.answers={tmp_path}/answers.jsonl"

    def write(changed: list[dict[str, object]]) -> None:
        (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))

    write([*rows, rows[0]])
    (found,) = failing("answers", *words(place), answers)
    assert f"answers.jsonl line {len(rows) + 1}: id 'p0' is already used by line 1." in found.text
    assert "data.on_bad_row=skip" in found.text
    assert failing("answers", *words(place), answers, "data.on_bad_row=skip") == []
    write([{**row, "target": "another"} for row in rows])
    (found,) = failing("answers", *words(place), answers)
    assert "holds answers of target 'another'" in found.text
    write(rows)
    (found,) = failing("answers", *words(place), answers, "data.min_answer_tokens=60")
    assert "no sample is left" in found.text


def test_prompts_that_the_run_would_decode_but_are_not_there_are_found(place: Path) -> None:
    every = "evaluation.every_steps=5"
    assert failing("evaluation", *words(place), every) == []
    (found,) = failing("evaluation", *words(place), every, "evaluation.prompts=/no/prompts.jsonl")
    assert "/no/prompts.jsonl" in found.text
    assert "evaluation.prompts" in found.way_out


def test_a_checkpoint_to_go_on_from_that_is_not_there_is_found_for_a_new_run_too(place: Path) -> None:
    (found,) = failing("run folder", *words(place), "exp_name=new", "checkpoint.resume=/no/run")
    assert "there is no folder /no/run" in found.text


def test_a_folder_in_which_another_run_trains_is_found_and_left_alone(place: Path, tmp_path: Path) -> None:
    here = [*words(place), f"output_dir={tmp_path}", "exp_name=busy"]
    with lock_run_folder(tmp_path / "busy"):
        (found,) = failing("run folder", *here)
        assert f"another run (process {os.getpid()} on " in found.text
    assert failing("run folder", *here) == []
    assert sorted(path.name for path in (tmp_path / "busy").iterdir()) == [LOCK]


def test_wandb_without_a_login_is_found_and_offline_is_fine(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb.teardown()
    (found,) = failing("wandb", *words(place), "logger=wandb")
    assert "nobody is logged in" in found.text
    assert failing("wandb", *words(place), "logger=wandb", "logger.wandb_mode=offline") == []
    wandb.teardown()


def test_something_that_would_fail_is_exit_status_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The plan is not wanted here, and a target that is not there has none.
    lacking = ["data.answers=/no/answers.jsonl", "target.name_or_path=/no/target"]
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *words(place), *lacking])
    assert stopped.value.code == 1
    shown = capsys.readouterr().out
    assert "  fail data.answers: there is no file /no/answers.jsonl\n       -> " in shown
    assert "2 thing(s) would fail." in shown


def test_a_check_that_raises_or_never_answers_is_a_finding_and_what_it_found_before_stands() -> None:
    def breaks() -> Iterator[Finding]:
        yield Finding("ok", "before")
        raise RuntimeError("two\nlines")

    def hangs() -> Iterator[Finding]:
        yield Finding("ok", "before")
        time.sleep(60)

    assert list(run_check("this", breaks, 10)) == [
        Finding("ok", "before"),
        Finding("note", "this: could not be looked at: RuntimeError: two lines"),
    ]
    first, second = run_check("that", hangs, 0.1)
    assert (first.text, second.text) == ("before", "that: no answer within 0.1 s")


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts_and_its_page_cache_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    gib = 2**30
    files = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit, usage, cache = files[version]
    root = tmp_path / "memory" if version == 1 else tmp_path
    group = root / "jobs" / "mine"
    group.mkdir(parents=True)
    (group / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    (group.parent / limit).write_text(f"{2 * gib}\n")
    (group.parent / usage).write_text(f"{gib}\n")
    (group.parent / "memory.stat").write_text(f"anon 1\n{cache} {gib // 2}\n")
    own = tmp_path / "own"
    own.write_text("0::/jobs/mine\n" if version == 2 else "3:cpu,cpuacct:/x\n4:memory:/jobs/mine\n")
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "_OWN_CGROUPS", own)
    memory = machine.host_memory()
    assert (memory.total, memory.is_limited) == (2 * gib, True)
    assert memory.free == gib + gib // 2


def test_a_hub_that_does_not_answer_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    problem = machine.hub_is_reachable()
    assert problem is not None
    assert problem.startswith("http://127.0.0.1:9 does not answer: ")
    assert "refused" in problem


def test_a_run_folder_below_a_file_is_refused(place: Path) -> None:
    (found,) = failing("run folder", *words(place), f"output_dir={place / 'answers.jsonl'}")
    assert "answers.jsonl cannot be written to" in found.text


def test_a_user_without_a_home_is_told_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for command in (["doctor"], ["plan"]):
        with pytest.raises(SystemExit):
            main(command)
        shown = capsys.readouterr()
        assert "Set HOME" in shown.out + shown.err, command
