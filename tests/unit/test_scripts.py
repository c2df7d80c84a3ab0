from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deepspec.config import config_folder

ROOT = config_folder().parent
TRAIN = ["bash", str(ROOT / "scripts" / "train" / "train.sh")]
EVAL = ["bash", str(ROOT / "scripts" / "eval" / "eval.sh")]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # The scripts fall back to python3 without a .venv: let them find the interpreter that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": path}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)


def composed(command: list[str], folder: Path) -> dict:
    finished = run([*command, "--cfg", "job"], folder)
    assert finished.returncode == 0, finished.stderr
    return yaml.safe_load(finished.stdout)


def refused(command: list[str], folder: Path) -> str:
    """Run a command that must end with one line and status 2, and return the line."""
    finished = run(command, folder)
    assert finished.returncode == 2, finished.stderr
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    return line


def test_train_sh_works_from_any_directory_and_leaves_nothing_there(tmp_path: Path):
    config = composed([*TRAIN, "experiment=dspark5_qwen3_4b", "seed=3"], tmp_path)
    assert (config["algorithm"]["num_draft_tokens"], config["seed"]) == (5, 3)
    assert list(tmp_path.iterdir()) == []


def test_train_sh_without_arguments_and_without_a_gpu_names_the_quickstart(tmp_path: Path):
    assert refused(TRAIN, tmp_path) == (
        "train.sh without arguments trains DSpark for Qwen3-4B and needs a GPU; none found. "
        "On a laptop run: bash scripts/quickstart.sh"
    )


def test_old_form_of_train_sh_names_the_experiment(tmp_path: Path):
    for form in (["--config_path", "config/dspark/dspark_qwen3_4b.py"], ["--config_path=x/dspark_qwen3_4b.py"]):
        line = refused([*TRAIN, *form], tmp_path)
        assert line.startswith("ConfigError: --config_path ")
        assert line.endswith("experiment=dspark_qwen3_4b")


def test_old_form_with_an_unknown_name_lists_the_experiments(tmp_path: Path):
    line = refused([*TRAIN, "--config_path", "config/dspark/mine.py"], tmp_path)
    assert "'mine' is none of: " in line
    assert "dspark_qwen3_4b" in line


def test_known_target_brings_its_own_settings(tmp_path: Path):
    config = composed([*TRAIN, "--target_name_or_path", "Qwen/Qwen3-14B", "algorithm=dflash"], tmp_path)
    assert config["target"]["short_name"] == "qwen3_14b"
    assert config["algorithm"]["name"] == "dflash"


@pytest.mark.parametrize("path", ["/models/a b=c,d'e", "./my-model", "org/Other-7B"])
def test_any_other_target_is_passed_on_whatever_characters_it_has(tmp_path: Path, path: str):
    config = composed([*EVAL, f"--target_name_or_path={path}"], tmp_path)
    assert config["target"]["name_or_path"] == path
    assert config["target"]["mask_token_id"] is None


def test_drafts_may_repeat_or_be_separated_by_commas(tmp_path: Path):
    flags = ["--draft_name_or_path", "a/one,b/two", "--draft_name_or_path=c d/three", "suite=code"]
    config = composed([*EVAL, "--target_name_or_path", "smollm2-135m", *flags], tmp_path)
    assert config["drafts"] == ["a/one", "b/two", "c d/three"]
    assert config["target"]["short_name"] == "smollm2_135m"


def test_unknown_flag_is_refused_with_the_known_ones(tmp_path: Path):
    line = refused([*EVAL, "--draft", "x"], tmp_path)
    assert line.startswith("ConfigError: unknown flag '--draft'. eval.sh knows: --target_name_or_path X, ")
    assert "--draft_name_or_path" in refused([*TRAIN, "--draft_name_or_path", "x"], tmp_path)


def test_help_of_regenerate_sh_answers_nothing(tmp_path: Path):
    finished = run(["bash", str(ROOT / "scripts" / "data" / "regenerate.sh"), "--help"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "deepspec data regenerate" in finished.stdout
    assert list(tmp_path.iterdir()) == []


def test_flag_without_a_value_is_refused(tmp_path: Path):
    assert refused([*EVAL, "--target_name_or_path"], tmp_path).startswith("ConfigError: --target_name_or_path needs a")


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        ("train.py", ["algorithm=dsprk"], "ConfigError: algorithm 'dsprk' does not exist."),
        ("train.py", ["optimizer.lr=1"], "ConfigError: optimizer.lr: there is no such key."),
        ("train.py", ["seed=1,2"], "ConfigError: seed has several values: 1,2."),
        ("train.py", ["-m", "algorithm=dspark,eagle4"], "ConfigError: algorithm 'eagle4' does not exist."),
        ("eval.py", ["suite=papr"], "ConfigError: suite 'papr' does not exist."),
    ],
)
def test_mains_refuse_with_one_line_and_status_two(tmp_path: Path, main: str, arguments: list[str], message: str):
    assert refused([sys.executable, str(ROOT / main), *arguments], tmp_path).startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("main", ["train.py", "eval.py"])
def test_help_says_what_it_does_and_lists_choices_and_examples(tmp_path: Path, main: str):
    finished = run([sys.executable, str(ROOT / main), "--help"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(main)
    examples = finished.stdout.partition("Examples:")[2].partition("Every value")[0]
    assert examples.count(f"python {main} ") == {"train.py": 5, "eval.py": 7}[main]
    assert "target: auto, gemma4_12b" in finished.stdout
