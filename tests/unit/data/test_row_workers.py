"""Several processes give the samples of one process, row by row, whatever the rows are and whoever dies."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_targets import READING, ascii_tokenizer
from deadly_tokenizer import DEADLY, deadly
from interrupted import kill_after, start
from sample_jobs import maker_of, read_by_processes, text_row, write_texts

from deepspec.data import row_workers
from deepspec.data.answer_rows import OtherTargetError
from deepspec.data.packed import PackedSamples
from deepspec.data.prompts import Row
from deepspec.data.row_workers import row_outcomes
from deepspec.data.samples import read_token_samples
from deepspec.errors import DataError, DeepSpecError

TALK = text_row(0, random.Random(5))["messages"]
BROKEN: list[Any] = [
    "",
    "{",
    "null",
    "[1, 2]",
    json.dumps({"id": "deep", "messages": TALK, "deep": 0}).replace("0}", "[" * 700 + "]" * 700 + "}"),
    json.dumps({"id": "half", "messages": [{"role": "user", "content": "\ud800"}]}),
    json.dumps({"id": "row 3", "messages": TALK}),
    json.dumps({"id": "alone", "messages": TALK[:1]}),
    json.dumps({"id": "ids", "prompt_ids": [[5, 6]], "answer_ids": [[7, 3]]}),
    json.dumps({"id": "outside", "prompt_ids": [[5, 6]], "answer_ids": [[7, 10**6]]}),
    json.dumps({"id": "long", "messages": TALK, "note": "x" * 2**21}),
]


def test_every_row_comes_out_as_from_one_process_and_in_its_order(tmp_path: Path) -> None:
    draw = random.Random(1)
    lines = [json.dumps(text_row(number, draw)) for number in range(150)]
    for one in BROKEN * 3:
        lines.insert(draw.randrange(4, len(lines)), one)
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(lines))
    maker = maker_of(path, vocab_size=500)
    expected = list(row_outcomes(maker, 1))
    assert len(expected) == 180
    assert sum(isinstance(outcome, str) for _, outcome in expected) == 18
    assert list(row_outcomes(maker, 2, rows_alone=20)) == expected


def test_rows_that_cannot_be_sent_stay_here_at_their_place() -> None:
    rows = [Row(1, {"a": 1}), Row(2, {"a": lambda: None}), Row(3, {"a": 2}), Row(4, {"a": 3})]
    (one, sent), (two, kept), (three, more) = row_workers._portions(iter(rows))
    assert (one, two, three) == ([1], [2], [3, 4])
    assert kept is rows[1]
    assert [pickle.loads(blob) for blob in [*sent, *more]] == [rows[0], *rows[2:]]


def test_a_training_reads_the_same_samples_by_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_texts(tmp_path / "answers.jsonl", row_workers.ROWS_ALONE + 150)
    with path.open("a") as file:
        file.write(json.dumps({"id": "row 3", "messages": TALK}) + "\n")
    started = []
    begin = row_workers._started_pool
    monkeypatch.setattr(row_workers, "_started_pool", lambda *given: started.append(given) or begin(*given))

    def read(**changed: Any) -> tuple[PackedSamples, tuple[int, ...]]:
        data = READING.model_copy(update={"max_length": 90, **changed})
        return read_token_samples(path, ascii_tokenizer(), data, enable_thinking=False, system_prompt=None)

    expected = read(workers=1, on_bad_row="skip")
    assert not started
    assert read(workers=2, on_bad_row="skip") == expected
    assert expected[1].bad_rows == 1
    assert len(started) == 1
    with pytest.raises(DataError, match=r"answers\.jsonl line 1151: id 'row 3' is already used by line 4"):
        read(workers=1)


def test_few_rows_of_text_and_rows_with_ids_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_workers, "_started_pool", lambda *_: pytest.fail("processes were started"))
    texts = write_texts(tmp_path / "texts.jsonl", row_workers.ROWS_ALONE - 1)
    ids = tmp_path / "ids.jsonl"
    rows = ({"id": str(number), "prompt_ids": [[5]], "answer_ids": [[6, 3]]} for number in range(3000))
    ids.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(list(row_outcomes(maker_of(texts), 8))) == row_workers.ROWS_ALONE - 1
    assert len(list(row_outcomes(maker_of(ids), 8))) == 3000


def test_a_process_that_dies_ends_the_reading_with_the_lines_that_it_had(tmp_path: Path) -> None:
    draw = random.Random(2)
    rows = [text_row(number, draw) for number in range(400)]
    rows[200]["messages"][0]["content"] = DEADLY
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: list[tuple[int, Any]] = []
    rows_read = row_outcomes(maker_of(path, deadly(ascii_tokenizer())), 2, rows_alone=0)
    with pytest.raises(DataError, match=r"answers\.jsonl line \d+ to \d+: .*data\.workers=1") as caught:
        found.extend(rows_read)
    before = len(found)
    assert found == list(row_outcomes(maker_of(path), 1))[:before]
    words = str(caught.value).split("line ")[1].split()
    first, last = int(words[0]), int(words[2].rstrip(":"))
    assert before + 1 == first <= 201 <= last


def test_answers_of_another_target_are_refused_by_whichever_process_meets_them(tmp_path: Path) -> None:
    draw = random.Random(3)
    path = tmp_path / "answers.jsonl"
    rows = [text_row(number, draw) | {"target": "mine" if number < 50 else "other"} for number in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(OtherTargetError, match=r"holds answers of target 'other'.*for 'mine'"):
        list(row_outcomes(maker_of(path, target_name="mine"), 2, rows_alone=0))


def test_where_no_process_can_be_started_this_one_reads_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_texts(tmp_path / "answers.jsonl", 40)
    maker = maker_of(path)
    expected = list(row_outcomes(maker, 1))
    maker.tokenizer.helper = lambda: None  # nothing that could be sent to another process
    assert list(row_outcomes(maker, 2, rows_alone=5)) == expected
    assert "is tokenised by one process" in capsys.readouterr().out


def test_processes_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    job = start(read_by_processes, write_texts(tmp_path / "answers.jsonl", 30_000))
    assert job.pid is not None
    parent = psutil.Process(job.pid)
    children: set[psutil.Process] = set()

    def are_at_work() -> bool:
        for child in parent.children():
            if "spawn_main" in " ".join(child.cmdline()) and child.cpu_times().user > 0.5:
                children.add(child)
        return len(children) == 2

    assert kill_after(job, are_at_work)
    assert len(children) == 2
    deadline = time.monotonic() + 20
    while any(child.is_running() and child.status() != "zombie" for child in children):
        assert time.monotonic() < deadline, f"still there, of {os.getpid()}"
        time.sleep(0.05)


class StoppedHereError(DeepSpecError):
    """What a handler raises where a signal asks for an end."""


@pytest.mark.parametrize("starting", [True, False])
def test_a_signal_to_the_whole_group_reaches_the_one_who_asks_before_its_processes_are_missed(
    tmp_path: Path, starting: bool
) -> None:
    path = write_texts(tmp_path / "answers.jsonl", 3000)
    asked = threading.Event()

    def stop(*_: object) -> None:
        raise StoppedHereError

    def signal_all() -> None:
        children = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
        while not children or (not starting and sum(one.cpu_times().user for one in children) < 1):
            time.sleep(0.01)
            children = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
        asked.set()
        for one in children:
            one.terminate()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        threading.Thread(target=signal_all, daemon=True).start()
        with pytest.raises(StoppedHereError):
            deque(asked.wait(0.01) for _ in row_outcomes(maker_of(path), 2, rows_alone=0))
    finally:
        signal.signal(signal.SIGTERM, before)
