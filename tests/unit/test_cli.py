"""The command `deepspec`: help, and one line with a way out where a word is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspec.cli import main

COMMANDS = (
    "quickstart",
    "data prompts",
    "data regenerate",
    "data inspect",
    "data stats",
    "data cache",
    "data verify-cache",
    "data cache-answers",
    "plan",
    "train",
    "eval",
    "calibrate",
    "profile",
    "simulate",
    "sweep",
    "export",
    "inspect",
    "compare",
    "doctor",
)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must end with one line on stderr and status 2, and return the line."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


@pytest.mark.parametrize(
    "words", [(), ("--help",), ("-h",), ("help",), ("train", "--help"), ("data", "regenerate", "-h")]
)
def test_help_shows_every_command(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    main(words)
    shown = capsys.readouterr()
    assert shown.err == ""
    for command in COMMANDS:
        assert f"deepspec {command} " in shown.out


def test_help_of_a_section_and_of_the_whole_program_are_found_by_the_words_people_try(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (("data", "--help"), ("data", "-h"), ("data", "help")):
        main(words)
        assert "deepspec data prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named", "meant"),
    [
        (("quickstrat",), "quickstrat", "quickstart"),
        (("data", "regenarate"), "data regenarate", "data regenerate"),
        (("data",), "data", None),
        (("evaluate", "target=qwen3_4b"), "evaluate", "eval"),
        (("preset=smoke",), "preset=smoke", None),
    ],
)
def test_an_unknown_command_is_named_with_those_that_exist(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str, meant: str | None
) -> None:
    line = refused(capsys, *words)
    assert line.startswith(f"ConfigError: command '{named}' does not exist. Available: {', '.join(COMMANDS)}.")
    if meant is not None:
        assert line.endswith(f" Did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("quickstart", "preset=smok"), ("preset 'smok' does not exist", "default, long, smoke", "'smoke'")),
        (("quickstart", "preset.step=3"), ("preset.step: there is no such key", "'preset.steps'")),
        (("quickstart", "algorithms=[dsprk]"), ("algorithms.0: got 'dsprk'", "'dspark'")),
        (("data", "regenerate", "max_new_tokens=0"), ("max_new_tokens: got 0",)),
        (("data", "regenerate", "sampling.temperature=-1"), ("sampling.temperature: got -1",)),
        (("data", "regenerate", "max_new_tokens"), ("'max_new_tokens' cannot be read as key=value",)),
        (("data", "prompts", "data.on_bad_row=skip"), ("data.on_bad_row: there is no such key", "'on_bad_row'")),
        (("train", "algorithm=dsprk"), ("algorithm 'dsprk' does not exist", "'dspark'")),
        (("eval", "sampling.temprature=0"), ("sampling.temprature: there is no such key", "'sampling.temperature'")),
        (("eval", "task=gsm9k"), ("task 'gsm9k' does not exist", "'gsm8k'")),
        (("calibrate", "some/draft"), ("records must be given: records=<value>.",)),
        (("sweep", "treshold", "records=[a]"), ("over: got 'treshold'", "'threshold'")),
        (("profile", "qwen3_4"), ("target 'qwen3_4' does not exist", "'qwen3_4b'")),
        (("simulate", "records=[a]", "curve=b", "schedules=[fulll]"), ("schedules.0: got 'fulll'", "'full'")),
    ],
)
def test_a_wrong_override_is_one_line_that_names_key_and_way_out(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    line = refused(capsys, *words)
    assert line.startswith("ConfigError: ")
    for part in parts:
        assert part in line


def test_files_that_do_not_exist_are_named_with_what_makes_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.jsonl"
    line = refused(capsys, "data", "prompts", f"prompts={missing}", f"output_dir={tmp_path}")
    assert line == f"DataError: {missing} does not exist. Give the path of a .jsonl, .json, .parquet file."
    line = refused(capsys, "data", "prompts", "limit=2", "output_dir=/proc/deepspec")
    assert line.startswith("DataError: /proc/deepspec/prompts.jsonl cannot be written (")
    line = refused(capsys, "data", "inspect", f"answers={missing}")
    assert line == f"DataError: {missing} does not exist. Make it with `deepspec data regenerate answers={missing}`."
    line = refused(capsys, "eval", "target=smollm2_135m", f"drafts=[{tmp_path}/none]", f"output_dir={tmp_path}/out")
    assert line.startswith(f"CheckpointError: {tmp_path}/none is not a draft checkpoint: it has no config.json. ")
    assert list(tmp_path.iterdir()) == []
