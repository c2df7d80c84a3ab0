"""An engine as witness that crashes or hangs: what was measured stays, and the same command asks for the rest."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_places import Place
from helpers import kind_of_draft

from deepspec.algorithms.checkpoint import save_draft
from deepspec.config import EvalConfig
from deepspec.errors import ConfigError, EngineError
from deepspec.evaluation.evaluator import evaluate
from deepspec.targets.base import Target

# It answers the first few of the prompts that it is asked, each with the tokens 5 6 7, and then fails.
STAND_IN = """#!{python}
import json, os, sys, time
job = json.loads(sys.stdin.readline())
def say(**message): print(json.dumps(message), flush=True)
say(kind="ready", version="0", device={device!r})
if job["requests"]:
    draft = job["speculative"]["model"]
    job["files"] = sorted(os.listdir(draft))
    with open({log!r}, "a") as log: log.write(json.dumps(job) + "\\n")
    for one in job["requests"][:{answers}]:
        say(kind="answer", id=one["id"], output_ids=[5, 6, 7], finish_reason="length", proposed=[4], accepted=[1])
    if len(job["requests"]) > {answers}:
        sys.exit("the engine broke")
say(kind="done")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("witness"))


def stand_in(folder: Path, answers: int, device: str = "cuda") -> tuple[str, Path]:
    program, log = folder / "python", folder / "jobs.jsonl"
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log), answers=answers, device=device))
    program.chmod(0o755)
    return str(program), log


def words(place: Place, python: str, output: Path, *more: str, drafts: list[str] | None = None) -> EvalConfig:
    return place.words(
        "engine=vllm", f"witness.python={python}", "latency_prompts=0", *more, output=output, drafts=drafts
    )


def jobs(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_crash_loses_nothing_and_the_same_command_asks_for_the_rest(place: Place, tmp_path: Path) -> None:
    """Eight turns; the engine crashes after three, again after three, then answers the last two of each draft."""
    output = tmp_path / "out"
    python, log = stand_in(tmp_path, answers=3)
    with pytest.raises(EngineError) as caught:
        evaluate(words(place, python, output))
    message = str(caught.value)
    assert message.startswith(
        "vLLM failed with sure, plain: vLLM ended with status 1. Its last lines: the engine broke."
    )
    assert "the same command asks vLLM for what is left" in message
    assert (output / "results.json").is_file()
    partial = json.loads((output / "witness.json").read_text())
    assert partial["rows"] == []
    assert set(partial["not_measured"]) == {"sure", "plain"}
    # What a kill would have left of an export is in nobody's way.
    left = output / "witness" / "sure.export"
    left.mkdir()
    (left / "half").write_text("x")
    with pytest.raises(EngineError):
        evaluate(words(place, python, output))
    evaluate(words(place, python, output))
    asked = jobs(log)
    assert [len(job["requests"]) for job in asked] == [8, 8, 5, 5, 2, 2]
    assert all(job["files"] == ["README.md", "config.json", "model.safetensors"] for job in asked)
    assert not list((output / "witness").glob("*.export"))
    content = json.loads((output / "witness.json").read_text())
    assert [(row["draft"], row["num_answers"], row["witness_rounds"]) for row in content["rows"]] == [
        ("sure", 8, 8),
        ("plain", 8, 8),
    ]
    assert content["not_measured"] == {}
    assert content["provenance"]["engine"]["version"] == "0"
    # A wrong engine is not taken for a right one.
    assert all(row["witness_acceptance_length"] == 2.0 for row in content["rows"])
    page = (output / "report.html").read_text()
    assert "Another engine as witness" in page
    # All answers are known: nothing is asked any more.
    evaluate(words(place, python, output))
    assert len(jobs(log)) == 6


def test_the_engine_is_asked_the_very_prompts_under_the_very_conditions(place: Place, tmp_path: Path) -> None:
    output = tmp_path / "out"
    python, log = stand_in(tmp_path, answers=99)
    evaluate(words(place, python, output, "temperatures=[0,0.7]", "sampling.top_p=0.9", drafts=place.drafts[:1]))
    greedy, sampled = jobs(log)
    for folder, job, temperature in (("temperature_0", greedy, 0.0), ("temperature_0.7", sampled, 0.7)):
        path = output / folder / "rounds" / "prompts--sure.jsonl"
        mine = sorted(json.loads(line)["prompt_ids"] for line in path.read_text().splitlines())
        assert sorted(one["prompt_ids"] for one in job["requests"]) == mine
        assert job["sampling"] == {"temperature": temperature, "top_k": 0, "top_p": 0.9}
        assert (job["max_new_tokens"], job["batch_size"], job["stop_token_ids"]) == (20, 3, [3])
        assert job["max_model_len"] == max(map(len, mine)) + 20 + 4 + 1
        assert (job["dtype"], job["target"]) == ("float32", str(place.target))
        assert len({one["seed"] for one in job["requests"]}) == 8
    assert {key: greedy["speculative"][key] for key in ("method", "num_speculative_tokens")} == {
        "method": "dspark",
        "num_speculative_tokens": 4,
    }
    assert "draft_sample_method" not in greedy["speculative"]
    assert sampled["speculative"]["draft_sample_method"] == "probabilistic"
    content = json.loads((output / "witness.json").read_text())
    assert [(row["temperature"], row["same_answers"]) for row in content["rows"]] == [(0.0, 0), (0.7, None)]


def test_other_arguments_or_another_engine_are_asked_anew(place: Place, tmp_path: Path) -> None:
    output = tmp_path / "out"
    python, log = stand_in(tmp_path, answers=99)
    evaluate(words(place, python, output, drafts=place.drafts[:1]))
    evaluate(words(place, python, output, "witness.arguments={block_size:32}", drafts=place.drafts[:1]))
    program = Path(python)
    program.write_text(program.read_text().replace('version="0"', 'version="1"'))
    evaluate(words(place, python, output, drafts=place.drafts[:1]))
    assert [len(job["requests"]) for job in jobs(log)] == [8, 8, 8]


def test_a_draft_that_the_engine_cannot_serve_is_told_before_anything_is_decoded(place: Place, tmp_path: Path) -> None:
    loaded = Target.load(place.words().target, torch.device("cpu"))
    gated = tmp_path / "gated"
    gated.mkdir()
    save_draft(kind_of_draft(loaded, "dspark-gated"), gated)
    python, log = stand_in(tmp_path, answers=99)
    output = tmp_path / "out"
    with pytest.raises(ConfigError) as caught:
        evaluate(words(place, python, output, drafts=[str(gated)]))
    assert "engine=vllm can serve none of the drafts. gated: vLLM's dspark has the vanilla Markov head only" in str(
        caught.value
    )
    assert not output.exists()
    evaluate(words(place, python, output, drafts=[str(gated), place.drafts[0]]))
    content = json.loads((output / "witness.json").read_text())
    assert [row["draft"] for row in content["rows"]] == ["sure"]
    assert content["not_measured"]["gated"].startswith("vLLM's dspark has the vanilla Markov head only")
    assert len(jobs(log)) == 1


def test_a_temperature_at_which_the_engine_cannot_draw_is_told_and_the_greedy_part_measured(
    place: Place, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    python, log = stand_in(tmp_path, answers=99, device="cpu")
    evaluate(words(place, python, output, "temperatures=[1,0]", drafts=place.drafts[:1]))
    content = json.loads((output / "witness.json").read_text())
    assert [row["temperature"] for row in content["rows"]] == [0.0]
    assert content["not_measured"]["sure at temperature 1"].startswith("vLLM's second model runner, which")
    assert [job["second_runner"] for job in jobs(log)] == [True]


def test_a_target_that_the_engine_cannot_tap_is_told_before_anything_is_decoded(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place.words().target.name_or_path, other)
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(fields | {"architectures": ["Glm4ForCausalLM"]}))
    python, _ = stand_in(tmp_path, answers=99)
    with pytest.raises(ConfigError, match=r"can serve none of the drafts.*cannot hand layers of Glm4ForCausalLM"):
        evaluate(words(place, python, tmp_path / "out", f"target.name_or_path={other}", drafts=place.drafts[:1]))
    assert not (tmp_path / "out").exists()


def test_a_missing_environment_is_told_before_anything_is_decoded(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"witness.python /nowhere/python is no program"):
        evaluate(words(place, "/nowhere/python", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
