"""Choosing prompts: what is kept depends on rows and seed alone, and what is left out is counted and named."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import read_conversations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupted import finish, kill_after, start

from deepspec.config import DataJobConfig, compose_data_job
from deepspec.data import sources
from deepspec.data.grams import grams
from deepspec.data.jobs import write_prompts
from deepspec.data.prompts import conversation_from_row
from deepspec.data.selection import quotas
from deepspec.data.synthetic import synthetic_prompts
from deepspec.errors import ConfigError, DataError

WORDS = [f"word{number}" for number in range(300)]


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(8, 30)))


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [{"prompt": text(draw), "domain": draw.choice(["maths", "code", "chat", "chat"])} for _ in range(count)]


def write_rows(path: Path, given: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    return path


@lru_cache
def composed(*words: str) -> DataJobConfig:
    return compose_data_job(list(words))


def run(prompts: Path, out: Path, *words: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """Texts to train on, held-out texts and the report."""
    write_prompts(composed(*words).model_copy(update={"prompts": str(prompts), "output_dir": str(out)}))
    report = json.loads((out / "report.json").read_text())
    texts = []
    for name in ("prompts.jsonl", "held_out.jsonl"):
        found = read_conversations(out / name, "stop")[0] if (out / name).exists() else []
        texts.append([one.turns[0].content for one in found])
    return texts[0], texts[1], report


def hashes(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.json*")}


def similarity(one: str, other: str) -> float:
    left, right = (set(grams([text], 3).tolist()) for text in (one, other))
    return len(left & right) / max(1, len(left | right))


def test_the_same_seed_keeps_the_same_prompts_and_another_one_others(tmp_path: Path) -> None:
    given = write_rows(tmp_path / "in.jsonl", rows(120))
    words = ("limit=40", "selection.held_out=10")
    first, second, other = (tmp_path / name for name in ("a", "b", "c"))
    train, held_out, report = run(given, first, *words)
    assert (len(train), len(held_out)) == (40, 10)
    assert not set(train) & set(held_out)
    run(given, second, *words)
    assert hashes(first) == hashes(second)
    assert report["sha256"] == {name: value for name, value in hashes(first).items() if name != "report.json"}
    assert set(run(given, other, *words, "seed=1")[0]) != set(train)
    # More prompts to train on do not change what is held out.
    assert run(given, tmp_path / "d", "limit=90", "selection.held_out=10")[1] == held_out


def test_near_duplicates_are_kept_once_and_none_is_on_both_sides_of_the_split(tmp_path: Path) -> None:
    draw = random.Random(4)
    originals = [text(draw) for _ in range(60)]
    copies = []
    for one in originals[:40]:
        changed = one.split()
        changed[0] = "other"
        copies += [" ".join(changed), one.upper() + "!"]
    mixed = [*originals, *copies]
    draw.shuffle(mixed)
    given = write_rows(tmp_path / "in.jsonl", [{"id": str(n), "prompt": one} for n, one in enumerate(mixed)])
    for name, words in (("once", []), ("all", ["selection.deduplicate=false"])):
        train, held_out, report = run(given, tmp_path / name, "selection.held_out=12", *words)
        kept = train + held_out
        assert len(held_out) == 12
        assert max(similarity(one, other) for one in train for other in held_out) < 0.7
        if name == "once":
            assert report["near_duplicates"] == len(mixed) - len(kept) - report["near_held_out"] >= 78
            pairs = [(a, b) for number, a in enumerate(kept) for b in kept[:number]]
            assert max(similarity(a, b) for a, b in pairs) < 0.85
        else:
            assert report["near_duplicates"] == 0
            assert report["near_held_out"] > 10


def test_prompts_of_evaluation_tasks_are_left_out_and_counted_per_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(2)
    folder = tmp_path / "tasks"
    tail = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    questions = [text(draw) + " and so on" for _ in range(20)]
    write_rows(folder / "gsm8k.jsonl", [{"turns": [question + tail]} for question in questions])
    write_rows(
        folder / "mt-bench.jsonl", [{"turns": [f"Say it {number}.", text(draw) + " twice"]} for number in range(5)]
    )
    monkeypatch.setenv("DEEPSPEC_EVAL_DATA", str(folder))
    held_out = synthetic_prompts("held_out", 300, 0)[7]
    given = [
        {"prompt": text(draw) + tail},  # its template alone is no contamination
        {"prompt": "Hello! " + questions[3].upper()},
        {"turns": ["How are you?", questions[4]]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": questions[5]}]},
        {"turns": [held_out.turns[0].content]},
        {"prompt": text(draw)},
        {"prompt": "Say it 3!"},
    ]
    path = write_rows(tmp_path / "in.jsonl", given)
    train, _, report = run(path, tmp_path / "out", "dataset.decontaminate=[gsm8k,mt-bench,held_out]")
    assert set(train) == {given[0]["prompt"], "Hi", given[5]["prompt"]}
    counts = {name: (entry["prompts"], entry["rows"]) for name, entry in report["contaminated"].items()}
    assert counts == {"gsm8k": (20, 2), "mt-bench": (5, 1), "held_out": (300, 1)}
    assert report["contaminated"]["gsm8k"]["examples"][0] == {"row": f"{path} line 2", "prompt": "gsm8k/3"}


def test_a_task_that_cannot_be_read_stops_the_job_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEC_EVAL_DATA", str(tmp_path))
    given = write_rows(tmp_path / "in.jsonl", rows(3))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    ways_out = r"folder named by DEEPSPEC_EVAL_DATA, or leave gsm8k out of dataset\.decontaminate"
    with pytest.raises(DataError, match=rf"task gsm8k.*hub.*Put gsm8k\.jsonl into a {ways_out}\.$"):
        run(given, tmp_path / "out", "dataset.decontaminate=[gsm8k]")
    assert not (tmp_path / "out" / "prompts.jsonl").exists()


def test_domains_are_kept_by_weight(tmp_path: Path) -> None:
    given = write_rows(tmp_path / "in.jsonl", rows(400))
    train, held_out, report = run(
        given, tmp_path / "a", "limit=60", "selection.held_out=30", "selection.domain_weights={maths: 1, code: 2}"
    )
    assert report["train"] == {"code": 40, "maths": 20}
    assert report["held_out"] == {"code": 20, "maths": 10}
    assert (len(train), len(held_out)) == (60, 30)
    with pytest.raises(ConfigError, match=r"names 'mathematics'.*'chat' \(\d+\), 'code' \(\d+\), 'maths' \(\d+\)"):
        run(given, tmp_path / "b", "selection.domain_weights={mathematics: 1}")


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.tuples(st.integers(1, 50), st.just(0.0) | st.floats(0.01, 5)), min_size=1
    ),
    st.none() | st.integers(0, 300),
)
def test_quotas_follow_the_weights_as_far_as_there_are_prompts(
    domains: dict[str, tuple[int, float]], count: int | None
) -> None:
    available = {name: size for name, (size, _) in domains.items()}
    weights = {name: weight for name, (_, weight) in domains.items()}
    found = quotas(available, weights, count)
    assert all(0 <= taken <= available[name] for name, taken in found.items())
    weighed = {name for name, weight in weights.items() if weight > 0}
    assert {name for name, taken in found.items() if taken} <= weighed
    if count is not None:
        assert sum(found.values()) == min(count, sum(available[name] for name in weighed))
    for one in weighed:
        for other in weighed:
            # Who is not exhausted got no less than its weight asks for beside any other, but for rounding.
            if found.get(one, 0) < available[one]:
                assert found.get(one, 0) + 1 >= found.get(other, 0) / weights[other] * weights[one] - 1e-6 - (
                    weights[one] / weights[other]
                )


def test_a_folder_is_read_file_by_file_and_ids_of_several_files_may_be_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_rows(folder / "b" / "x.jsonl", [{"id": "0", **row} for row in rows(1, 1)])
    write_rows(folder / "a.jsonl", [{"id": "0", **row} for row in rows(1, 2)])
    (folder / "c.json").write_text(json.dumps([{"id": 0, "conversations": [{"from": "human", "value": "Well then"}]}]))
    write_rows(folder / ".hidden" / "y.jsonl", rows(5, 3))
    (folder / "notes.txt").write_text("no prompts")
    import datasets

    datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "From a table"}]}]).to_parquet(
        folder / "d.parquet"
    )
    _, _, report = run(folder, tmp_path / "out")
    ids = [one.id for one in read_conversations(tmp_path / "out" / "prompts.jsonl", "stop")[0]]
    assert ids[:3] == ["a/0", "b/x/0", "c/0"]
    assert len(ids) == 4
    assert list(report["sources"]) == [str(folder / name) for name in ("a.jsonl", "b/x.jsonl", "c.json", "d.parquet")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \.jsonl, \.json, \.parquet file"):
        run(tmp_path / "empty", tmp_path / "out")


def test_a_data_set_of_the_hub_is_streamed_and_its_fields_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load(name: str, *words: object, **options: object) -> Any:
        asked.append((name, *words, options))
        return iter([{"problem": f"What is {number}?", "source": "x/Math", "messages": []} for number in range(3)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    words = ["dataset.hub_id=owner/set:config", "dataset.hub_split=train", "dataset.field=problem"]
    job = [*words, "dataset.domain_field=source", "dataset.domains={x/Math: maths}", f"output_dir={tmp_path}"]
    write_prompts(compose_data_job(job))
    assert asked == [("owner/set", "config", {"split": "train", "streaming": True, "revision": None})]
    found = read_conversations(tmp_path / "prompts.jsonl", "stop")[0]
    assert [one.turns[0].content for one in found] == [f"What is {number}?" for number in range(3)]
    assert {one.domain for one in found} == {"maths"}

    def fail(*_: object, **__: object) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"owner/set:config \(split train\) cannot be read.*no route.*prompts=<folder>"):
        write_prompts(compose_data_job(job))


@pytest.mark.parametrize(
    "name", ["open_perfectblend", "sharegpt", "ultrachat", "openhermes", "numina_math", "evol_code"]
)
def test_every_data_set_reads_a_row_of_its_kind(name: str) -> None:
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    row = {
        "open_perfectblend": {"conversations": talk, "source": "meta-math/MetaMathQA"},
        "sharegpt": {"id": "QWJhYvA_0", "conversations": talk},
        "ultrachat": {
            "prompt": "Why?",
            "prompt_id": "ab12",
            "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}],
        },
        "openhermes": {"conversations": talk, "id": None, "category": None},
        "numina_math": {"problem": "Why?", "solution": "So.", "messages": None, "source": "aops"},
        "evol_code": {"instruction": "Why?", "output": "So."},
    }[name]
    dataset = compose_data_job([f"dataset={name}"]).dataset
    found = conversation_from_row(sources._renamed(row, dataset))
    assert found.turns[0].content == "Why?"
    assert found.domain in ("maths", "code", "chat")
    assert name != "ultrachat" or found.id == "ab12"


BROKEN: list[Any] = [
    None,
    3,
    "text",
    [],
    {},
    {"prompt": None},
    {"prompt": 7},
    {"prompt": ["x"]},
    {"prompt": ""},
    {"conversations": []},
    {"conversations": None, "turns": []},
    {"turns": [None]},
    {"messages": [{"role": "oracle", "content": "x"}]},
    {"messages": [{"role": "user", "content": {"type": "text"}}]},
    {"messages": [{"from": "gpt", "value": "first"}]},
    {"id": [], "prompt": "x"},
    {"id": {"a": 1}, "prompt": "x"},
    {"domain": ["x"], "prompt": "x"},
    {"prompt": "\ud800"},
]


def test_every_broken_row_is_counted_or_stops_the_job_by_file_and_line(tmp_path: Path) -> None:
    good = rows(1)[0]
    for number, broken in enumerate(BROKEN):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(
            b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(one).encode() for one in (good, broken, {"prompt": "b"}))
        )
        with pytest.raises(DataError, match=rf"{number}\.jsonl line 2: .*on_bad_row=skip"):
            run(path, tmp_path / "out")
        train, _, report = run(path, tmp_path / "out", "on_bad_row=skip")
        assert train == [good["prompt"], "b"]
        ((reason, entry),) = report["left_out"].items()
        assert reason
        assert entry == {"rows": 1, "first": [f"{path} line 2"]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({
    "role": st.sampled_from(["user", "assistant", "system", "tool", "oracle", None, 3]),
    "content": JSON,
})  # fmt: skip
ROW = JSON | st.fixed_dictionaries(
    {}, optional={"id": JSON, "domain": JSON, "prompt": JSON, "turns": JSON, "messages": st.lists(MESSAGE, max_size=4)}
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROW, max_size=8), st.binary(max_size=40))
def test_any_rows_and_any_bytes_give_prompts_or_one_named_error(
    tmp_path: Path, values: list[object], junk: bytes
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    path.write_bytes(b"".join(json.dumps(value).encode() + b"\n" for value in [*values, {"prompt": "a"}]) + junk)
    _, _, report = run(path, out, "on_bad_row=skip", "selection.deduplicate=false")
    left_out = sum(entry["rows"] for reason, entry in report["left_out"].items() if reason != "blank line")
    assert report["rows"] == left_out + sum(report["train"].values())


def test_huge_and_long_conversations(tmp_path: Path) -> None:
    hundred = [{"role": "user" if turn % 2 == 0 else "assistant", "content": f"turn {turn}"} for turn in range(100)]
    given = [{"prompt": "x " * 60_000}, {"messages": hundred}, {"prompt": "x " * 40_000}, {"turns": ["y"] * 100}]
    path = write_rows(tmp_path / "in.jsonl", given)
    _, _, report = run(path, tmp_path / "out")
    assert report["left_out"] == {
        "longer than selection.max_characters": {"rows": 1, "first": [f"{path} line 1"]},
    }
    kept = read_conversations(tmp_path / "out" / "prompts.jsonl", "stop")[0]
    assert [len(one.turns) for one in kept] == [100, 1, 100]


def test_an_id_used_for_two_prompts_is_broken_and_the_same_prompt_twice_is_a_repetition(tmp_path: Path) -> None:
    given = [{"id": "a", "prompt": "one"}, {"id": "a", "prompt": "two"}, {"prompt": "three"}, {"prompt": "three"}]
    path = write_rows(tmp_path / "in.jsonl", given)
    with pytest.raises(DataError, match=r"in\.jsonl line 2: its id is already used by .*in\.jsonl line 1\. Repair"):
        run(path, tmp_path / "out")
    train, _, report = run(path, tmp_path / "out", "on_bad_row=skip", "selection.deduplicate=false")
    assert train == ["one", "three"]
    assert {reason: entry["rows"] for reason, entry in report["left_out"].items()} == {
        "the id is used twice": 1,
        "the same prompt again": 1,
    }


def test_when_nothing_is_left_the_error_says_why(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "x " * 60_000}, {"prompt": ""}])
    with pytest.raises(DataError, match=r"no prompt is left of 2 rows; left out: .*longer than.*'prompt' is empty"):
        run(path, tmp_path / "out", "on_bad_row=skip")
    path = write_rows(tmp_path / "in.jsonl", rows(4))
    with pytest.raises(DataError, match=r"held_out=4 leaves nothing of 4 prompts"):
        run(path, tmp_path / "out", "selection.held_out=4")


def test_only_so_many_rows_are_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", rows(50))
    assert run(path, tmp_path / "out", "selection.max_rows=20")[2]["rows"] == 20


def select_in(folder: str) -> None:
    """A job for a process of its own."""
    out = Path(folder)
    write_prompts(
        compose_data_job([f"prompts={out.parent / 'in.jsonl'}", f"output_dir={out}", "selection.held_out=50"])
    )


def test_a_killed_job_leaves_no_output_that_looks_whole_and_is_run_again(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", rows(1500))
    out = tmp_path / "out"
    assert kill_after(start(select_in, str(out)), (out / ".prompts" / "rows.jsonl").exists, 0.01)
    assert not (out / "report.json").exists()
    finish(start(select_in, str(out)))
    report = json.loads((out / "report.json").read_text())
    assert report["sha256"] == {name: value for name, value in hashes(out).items() if name != "report.json"}
    assert not (out / ".prompts").exists()
    domains = Counter(one.domain for one in read_conversations(out / "prompts.jsonl", "stop")[0])
    assert domains == report["train"]
    assert np.sum(list(domains.values())) == 1500 - 50 - report["near_duplicates"] - report["near_held_out"]


def test_a_file_that_grows_while_prompts_are_chosen_from_it_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", rows(3))
    streamed = sources.stream_rows(composed().model_copy(update={"prompts": str(path)}))
    next(streamed)
    with path.open("a") as file:
        file.write('{"prompt": "and')
    with pytest.raises(DataError, match=r"p\.jsonl was changed while it was being read"):
        list(streamed)
