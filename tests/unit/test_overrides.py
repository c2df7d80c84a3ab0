"""Words on their way to Hydra: folders that a sweep named after its settings reach every command as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspec.cli import main
from deepspec.command import check_command_line
from deepspec.config import compose_data_job, compose_eval, compose_job, expand_home, quoted
from deepspec.errors import ConfigError
from deepspec.interop.settings import compose_export
from deepspec.overrides import first_as, is_value
from deepspec.scheduling.settings import CalibrateConfig

DRAFT = "a_algorithm=dspark/step_latest"
HARD = ["it's", "ends\\", "a\\'b", "a b,c", "a[0]=1", 'say "x"', "\\\\server\\x=y/z"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds the draft's folder."""
    (tmp_path / DRAFT).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("value", [DRAFT, *HARD])
def test_quoted_values_reach_the_configuration_as_they_are(value: str) -> None:
    config = compose_eval(["task=held_out", f"drafts=[{quoted(value)},b]", f"output_dir={quoted(value)}"])
    assert (config.drafts, config.output_dir) == ((value, "b"), value)


def test_a_word_is_a_value_unless_a_key_stands_before_its_first_equals_sign(here: Path) -> None:
    for word in (DRAFT, f"{here}/{DRAFT}", f"./{DRAFT}", "runs/gone_seed=1/step_latest", "runs/plain", "dspark"):
        assert is_value(word)
    for word in ("draft=x", f"draft={DRAFT}", "target.layers=[1,2]", "+new=1", "records=[runs/b_seed=1]"):
        assert not is_value(word)


@pytest.mark.parametrize("before", ["", "./", "{here}/"])
def test_commands_take_a_folder_with_an_equals_sign_as_their_first_word(here: Path, before: str) -> None:
    word = before.format(here=here) + DRAFT
    calibration = compose_job("calibrate", CalibrateConfig, [*first_as("draft", [word]), f"records=[{word}]"])
    assert (calibration.draft, calibration.records) == (word, (word,))
    for words in ([word, "format=vllm"], ["--format", "vllm", word], [f"draft={word}", "format=vllm"]):
        assert compose_export([*words, "target=smollm2_135m"]).draft == word


def test_paths_with_equals_signs_need_no_quotes_of_their_own_in_a_value() -> None:
    words = [f"drafts=[{DRAFT},b/step_1,/c_x=1_y=2/step_3]", "output_dir=out/a=b", "task=held_out"]
    config = compose_eval(words)
    assert config.drafts == (DRAFT, "b/step_1", "/c_x=1_y=2/step_3")
    assert config.output_dir == "out/a=b"
    assert compose_data_job([f"answers={DRAFT}/answers.jsonl"]).answers == f"{DRAFT}/answers.jsonl"
    sweep = check_command_line("eval", ["-m", f"drafts=[{DRAFT}],[b/c]", "task=held_out", "target=smollm2_135m"])
    assert sweep is not None
    assert [job.overrides[0] for job in sweep.jobs] == [f"drafts=['{DRAFT}']", "drafts=[b/c]"]


def test_words_that_hydra_reads_itself_are_left_alone() -> None:
    words = ["a=1", "b=[x,y/z]", "c={d: e/f}", "g='h/i=j,k/l=m'", "n=${o.p}", "q=r=s", "data@t/u=v", "~w/x=y"]
    assert expand_home(words) == words
    with pytest.raises(ConfigError, match=r"'seed=1=2' cannot be read as key=value"):
        compose_eval(["seed=1=2"])


@pytest.mark.parametrize("command", ["inspect", "export", "calibrate", "compare"])
def test_a_folder_with_an_equals_sign_is_looked_into_by_every_command(
    here: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = {"export": ["format=vllm", "target=smollm2_135m"], "calibrate": [f"records=[{DRAFT}]"]}
    with pytest.raises(SystemExit):
        main([command, DRAFT, *more.get(command, [])])
    line = capsys.readouterr().err
    assert "cannot be read" not in line
    assert DRAFT in line
