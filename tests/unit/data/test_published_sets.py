"""Copies in the very shapes in which data sets are published: every row is a prompt or a counted skip."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from helpers import read_conversations

from deepspec.config import compose_data_job
from deepspec.data.jobs import write_prompts
from deepspec.data.prompts import Message
from deepspec.errors import DataError

Rows = list[dict[str, Any]]
Saved = Callable[[Path, Rows], Path]


def as_jsonl(folder: Path, rows: Rows) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    return path


def as_json(folder: Path, rows: Rows) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(rows, default=str), encoding="utf-8")
    return path


def as_parquet(folder: Path, rows: Rows) -> Path:
    import datasets

    path = folder / "data.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    return path


def as_folder(folder: Path, rows: Rows) -> Path:
    inside = folder / "copy" / "data"
    inside.mkdir(parents=True)
    (folder / "copy" / "README.md").write_text("---\nlicense: mit\n---\n")
    as_parquet(inside, rows).rename(inside / "train-00000-of-00001.parquet")
    return folder / "copy"


EVERY_WAY = [as_jsonl, as_json, as_parquet, as_folder]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rows], None]:
    """Stands for the one call that reaches the network; what it gives is a real stream out of a real file."""
    import datasets

    def answer_with(rows: Rows) -> None:
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))

    return answer_with


def chosen(out: Path, *words: str) -> tuple[list[list[Message]], dict[str, Any]]:
    """Conversations in the order of the rows, and the report."""
    job = ["dataset.decontaminate=[]", "selection.deduplicate=false", f"output_dir={out}", *words]
    write_prompts(compose_data_job(job))
    found = read_conversations(out / "prompts.jsonl", "stop")[0]
    return [list(one.turns) for one in found], json.loads((out / "report.json").read_text())


def shared(*turns: tuple[str, str], **others: Any) -> Rows:
    return [{"from": name, "value": text, **others} for name, text in turns]


def talk(*turns: tuple[str, str], **others: Any) -> Rows:
    return [{"content": text, "role": role, **others} for role, text in turns]


ASKED = ("human", "Why is the sky blue?"), ("gpt", "Light scatters.")
CHAT = ("user", "Why is the sky blue?"), ("assistant", "Light scatters.")
HERMES = dict.fromkeys(
    ["custom_instruction", "topic", "model_name", "model", "skip_prompt_formatting", "category", "views", "language",
     "id", "title", "idx", "hash", "avatarUrl", "system_prompt"]
)  # fmt: skip
MODERATION = [{"flagged": False, "categories": {"hate": False}, "category_scores": {"hate": 0.1}}]
PUBLISHED: dict[str, Rows] = {
    "open_perfectblend": [
        {"conversations": shared(*ASKED), "source": "meta-math/MetaMathQA"},
        {"conversations": shared(*ASKED, ("human", "Really?"), ("gpt", "Yes.")), "source": "openbmb/UltraInteract_sft"},
    ],
    "ultrachat": [
        {"prompt": "Why is the sky blue?", "prompt_id": f"{number:064x}", "messages": talk(*CHAT)} for number in (1, 2)
    ],
    "sharegpt": [
        {"id": "QWJhYvA_0", "conversations": shared(*ASKED)},
        {"id": "i6IyJda_0", "conversations": shared(("user", "Why is the sky blue?"), ("chatgpt", "Light scatters."))},
    ],
    "openhermes": [
        HERMES | {"conversations": shared(("system", "Be brief."), *ASKED, weight=None), "source": "airoboros2.2"},
        HERMES | {"conversations": shared(*ASKED, weight=None), "source": None, "id": "identity_7", "idx": "7"},
    ],
    "wildchat": [
        {
            "conversation_hash": f"{number:032x}",
            "model": "gpt-4-0314",
            "timestamp": datetime(2023, 4, 9, 0, 2, 53),
            "conversation": talk(*CHAT, country=None, hashed_ip="22fc", language="English", redacted=False, toxic=False,
                                 turn_identifier=101002),
            "turn": 1,
            "language": "English",
            "openai_moderation": MODERATION,
            "toxic": False,
        }
        for number in (1, 2)
    ],
    "lmsys_chat": [
        {
            "conversation_id": f"{number:032x}",
            "model": "vicuna-13b",
            "conversation": talk(*CHAT),
            "turn": 1,
            "language": "English",
            "openai_moderation": MODERATION,
            "redacted": False,
        }
        for number in (1, 2)
    ],
    "magpie": [
        {
            "uuid": f"df3eca22-{number}",
            "model": "Llama-3-70B-Instruct",
            "gen_input_configs": {"temperature": 1.0, "top_p": 1.0},
            "instruction": "Why is the sky blue?",
            "response": "Light scatters.",
            "conversations": shared(*ASKED),
        }
        for number in (1, 2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("save", EVERY_WAY)
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_row_of_a_published_shape_is_read(tmp_path: Path, name: str, save: Saved) -> None:
    rows = PUBLISHED[name]
    found, report = chosen(tmp_path / "out", f"dataset={name}", f"prompts={save(tmp_path, rows)}")
    assert report["left_out"] == {}
    assert len(found) == len(rows)
    for turns in found:
        asked = [turn.content for turn in turns if turn.role == "user"]
        assert asked[0] == "Why is the sky blue?"
        assert {turn.role for turn in turns} <= {"system", "user", "assistant"}
        assert turns[-1].role == "assistant"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_stream_of_the_hub_gives_the_same_as_a_copy(tmp_path: Path, name: str, hub: Callable[[Rows], None]) -> None:
    copied = chosen(tmp_path / "a", f"dataset={name}", f"prompts={as_parquet(tmp_path, PUBLISHED[name])}")
    hub(PUBLISHED[name])
    streamed = chosen(tmp_path / "b", f"dataset={name}")
    assert streamed[0] == copied[0]
    lines = [(tmp_path / out / "prompts.jsonl").read_text().splitlines() for out in ("a", "b")]
    assert [json.loads(line)["id"] for line in lines[0]] == [json.loads(line)["id"] for line in lines[1]]


ROLES = ["human", "gpt", "system", "user", "chatgpt", "bing", "bard", "assistant", "tool"]


@pytest.mark.parametrize("save", [as_json, as_parquet])
def test_every_role_of_sharegpt_maps_or_is_a_counted_skip_wherever_it_stands(tmp_path: Path, save: Saved) -> None:
    rows = []
    for first in ROLES:
        for second in ROLES:
            rows.append({"id": f"{first}-{second}", "conversations": shared((first, "One"), (second, "Two"))})
    rows.append({"id": "odd", "conversations": shared(("human", "One"), ("function_call", "Two"))})
    rows.append({"id": "empty", "conversations": []})
    out = tmp_path / "out"
    found, report = chosen(out, "dataset=sharegpt", "on_bad_row=skip", f"prompts={save(tmp_path, rows)}")
    kept = {json.loads(line)["id"] for line in (out / "prompts.jsonl").read_text().splitlines()}
    users, assistants = {"human", "user"}, {"gpt", "chatgpt", "bing", "bard", "assistant"}
    expected = {f"{one}-{other}" for one in users for other in assistants} | {f"system-{one}" for one in users}
    assert kept == expected
    assert len(found) + sum(entry["rows"] for entry in report["left_out"].values()) == len(rows)
    assert any("unknown" in reason for reason in report["left_out"])


def test_a_folder_is_read_by_the_split_that_its_files_are_named_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    for split in ("train_sft", "test_sft", "train_gen"):
        part = [{"prompt": split, "prompt_id": split, "messages": talk(("user", split), ("assistant", "So."))}]
        (folder / split).mkdir(parents=True)
        as_parquet(folder / split, part).rename(folder / f"{split}-00000-of-00001-a3ecf92756993583.parquet")
    for split in ("train_sft", "test_sft"):
        found, _ = chosen(tmp_path / split, "dataset=ultrachat", f"dataset.hub_split={split}", f"prompts={folder}")
        assert [turns[0].content for turns in found] == [split]
        assert f"2 files of other splits than {split} are not read" in capsys.readouterr().out
    # Files that are not named after splits are all read.
    (folder / "train_sft-00000-of-00001-a3ecf92756993583.parquet").rename(folder / "a.parquet")
    assert len(chosen(tmp_path / "all", "dataset=ultrachat", f"prompts={folder}")[0]) == 3


@pytest.mark.parametrize("save", EVERY_WAY)
@pytest.mark.parametrize("name", ["wildchat", "ultrachat"])
def test_a_field_that_is_not_there_is_met_at_once_with_the_fields_that_are(
    tmp_path: Path, name: str, save: Saved
) -> None:
    rows = [{"dialog": talk(*CHAT), "model": "x", "labels": ["a", "b"], "question": "Why?"} for _ in range(3)]
    with pytest.raises(DataError) as caught:
        chosen(tmp_path / "out", f"dataset={name}", "on_bad_row=skip", f"prompts={save(tmp_path, rows)}")
    field = {"wildchat": "conversation", "ultrachat": "messages"}[name]
    assert f"the first 3 rows have no field '{field}' (dataset.field)" in str(caught.value)
    assert "'dialog' (messages of role and content), 'model' (text), 'labels' (a list of texts)" in str(caught.value)
    ways = [text.split(".")[0] for text in str(caught.value).split("dataset.field=")[1:]]
    assert ways[0] == "dialog"
    assert ways[1] == "question"
    # What the error says is what reads them.
    for way in ways[:2]:
        words = [f"dataset={name}", f"dataset.field={way}", f"prompts={save(tmp_path / way, rows)}"]
        assert len(chosen(tmp_path / f"out-{way}", *words, "on_bad_row=skip")[0]) == 1  # all say the same


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path) -> None:
    for name in ("dialog", "question"):
        (tmp_path / name).mkdir()


def test_the_hub_gets_the_same_error_and_files_without_a_description_too(
    tmp_path: Path, hub: Callable[[Rows], None]
) -> None:
    hub([{"conversation": talk(*CHAT), "turn": 1}])
    with pytest.raises(DataError, match=r"ultrachat_200k \(split train_sft\): the first row has no field 'messages'"):
        chosen(tmp_path / "out", "dataset=ultrachat")
    path = as_jsonl(tmp_path, [{"conversation": talk(*CHAT), "turn": 1}, {"conversation": None, "turn": 2}])
    keys = "'conversations', 'messages', 'turns', 'prompt'"
    with pytest.raises(DataError, match=rf"have none of {keys}.*set dataset\.field=conversation\."):
        chosen(tmp_path / "out", f"prompts={path}", "on_bad_row=skip")
    assert not (tmp_path / "out" / "prompts.jsonl").exists()


def test_a_broken_row_at_the_beginning_is_no_reason_to_refuse_a_set(tmp_path: Path) -> None:
    rows: Rows = [{"other": 1}, {"messages": None, "n": 3}, {"messages": talk(*CHAT)}]
    words = ["dataset=ultrachat", f"prompts={as_jsonl(tmp_path, rows)}"]
    found, report = chosen(tmp_path / "out", *words, "on_bad_row=skip")
    assert len(found) == 1
    assert sum(entry["rows"] for entry in report["left_out"].values()) == 2
    with pytest.raises(DataError, match=r"data\.jsonl line 1: none of 'conversations'"):
        chosen(tmp_path / "out", *words)


def test_fields_that_nothing_can_be_made_of_are_listed_without_a_guess(tmp_path: Path) -> None:
    rows: Rows = [{f"f{number}": number for number in range(40)} | {"x": {"a": 1}, "y": [], "z": [{"q": 1}]}]
    with pytest.raises(DataError, match=r"and 19 more\. None of them looks like .* dataset\.field=<name>"):
        chosen(tmp_path / "out", f"prompts={as_jsonl(tmp_path, rows)}", "on_bad_row=skip")
