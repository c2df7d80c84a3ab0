"""Kept samples are those that the file gives now, or none: whatever changed, was damaged, killed or done at once."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from chat_targets import READING, ascii_tokenizer
from interrupted import finish, start
from sample_jobs import maker_of, read_kept, write_texts

from deepspec.data import kept_samples, samples
from deepspec.data.kept_samples import Made, kept_or_made, load, name_of
from deepspec.data.samples import read_token_samples
from deepspec.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept samples; every file is large enough for it."""
    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_samples, "KEPT_FROM_BYTES", 0)
    return tmp_path / "cache" / "samples"


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "answers.jsonl", 25)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose rows were tokenised."""
    paths = []
    work = samples.row_outcomes
    monkeypatch.setattr(samples, "row_outcomes", lambda maker, *given: paths.append(maker.path) or work(maker, *given))
    return paths


def read(path: Path, tokenizer: Any = None, is_kept: bool = True, **changed: Any) -> Made:
    data = READING.model_copy(update=changed)
    tokenizer = tokenizer or ascii_tokenizer()
    return read_token_samples(path, tokenizer, data, enable_thinking=False, system_prompt=None, is_kept=is_kept)


def test_a_second_reading_gives_the_same_without_a_tokenizer_at_work(
    answers: Path, cache: Path, made: list[Path], tmp_path: Path
) -> None:
    first = read(answers)
    expected = read(answers, is_kept=False)
    assert made == [answers, answers]
    again = read(answers)
    moved = tmp_path / "moved.jsonl"
    answers.rename(moved)
    assert read(moved) == again == first == expected
    assert made == [answers, answers]
    assert list(again[0]) == list(expected[0])
    assert again[0][3:9] == expected[0][3:9]
    assert [path.suffix for path in cache.glob("*.samples")] == [".samples"]


def test_anything_that_the_samples_depend_on_makes_them_anew(answers: Path, made: list[Path]) -> None:
    other_template, other_vocabulary = ascii_tokenizer(), ascii_tokenizer()
    other_template.chat_template = other_template.chat_template.replace(r"\n", " ")
    other_vocabulary.add_tokens(["abc"])
    found = [read(answers)]
    for tokenizer in (other_template, other_vocabulary):
        found.append(read(answers, tokenizer))
        assert found[-1] == read(answers, tokenizer, is_kept=False)
    for changed in ({"max_length": 60}, {"min_answer_tokens": 30}, {"last_turn_only": True}):
        found.append(read(answers, **changed))
        assert found[-1] == read(answers, is_kept=False, **changed)
    answers.write_text(answers.read_text() + answers.read_text().replace('"row ', '"other row '))
    found.append(read(answers))
    assert len(found[-1][0]) == 2 * len(found[0][0])
    assert len(made) == 7 + 5
    names = {name_of(maker_of(answers, **one)) for one in (
        {}, {"enable_thinking": True}, {"system_prompt": "Hm"}, {"vocab_size": 200}, {"target_name": "x"},
    )}  # fmt: skip
    assert len(names) == 5
    # What does not change a sample does not cost another file.
    workers = READING.model_copy(update={"workers": 3, "answers": "elsewhere", "num_anchors": 7})
    assert name_of(maker_of(answers, data=workers)) == name_of(maker_of(answers))
    dated = ascii_tokenizer()
    dated.chat_template = "{{- strftime_now('%H:%M:%S.%f') -}}" + dated.chat_template
    assert name_of(maker_of(answers, dated)) != name_of(maker_of(answers, dated))


def test_a_file_with_any_flipped_bit_or_any_length_is_made_anew(
    answers: Path, cache: Path, made: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = read(answers)
    (path,) = cache.glob("*.samples")
    whole = path.read_bytes()
    for damaged in [
        *(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in (0, 20, 90, 1024, len(whole) // 2)),
        *(whole[:length] for length in (0, 1, 700, 1024, len(whole) // 2, len(whole) - 1)),
        whole + b"x",
        b"[]".ljust(2000),
        b"\xff" * 2000,
    ]:
        path.write_bytes(damaged)
        before = len(made)
        assert read(answers) == expected
        assert len(made) == before + 1
        assert path.read_bytes() == whole
    assert "is made anew" in capsys.readouterr().out


def test_broken_rows_are_refused_every_time_and_never_kept(answers: Path, cache: Path) -> None:
    answers.write_text(answers.read_text() + "{\n")
    messages = []
    for _ in range(2):
        with pytest.raises(DataError, match="line 26") as caught:
            read(answers)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert not list(cache.glob("*.samples"))
    assert read(answers, on_bad_row="skip") == read(answers, on_bad_row="skip")
    assert read(answers, on_bad_row="skip")[1].bad_rows == 1


def test_a_disk_that_takes_nothing_costs_the_kept_file_alone(
    answers: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = read(answers, is_kept=False)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert read(answers) == expected
    assert "samples are not kept" in capsys.readouterr().out
    assert not [path for path in cache.iterdir() if path.suffix in (".samples", ".tmp")]
    with monkeypatch.context() as patched:
        patched.setattr(kept_samples, "free_bytes", lambda _: 1000)
        assert read(answers) == expected
    assert "1000.0 B are free" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        (cache.parent / "a file").write_text("")
        patched.setenv("DEEPSPEC_CACHE", str(cache.parent / "a file"))
        assert read(answers) == expected
    assert "name another folder in DEEPSPEC_CACHE" in capsys.readouterr().out


def test_small_files_are_not_kept(answers: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_samples, "KEPT_FROM_BYTES", answers.stat().st_size + 1)
    read(answers)
    assert not cache.exists()


def test_files_that_no_run_has_read_for_long_are_deleted_and_those_in_use_are_not(answers: Path, cache: Path) -> None:
    read(answers, max_length=50)
    read(answers, max_length=60)
    old, used = sorted(cache.glob("*.samples"))
    long_ago = time.time() - 31 * 24 * 3600
    for path in (old, used):
        os.utime(path, (long_ago, long_ago))
    (cache / ".x.samples.tmp").write_text("")
    os.utime(cache / ".x.samples.tmp", (long_ago, long_ago))
    assert load(used) is not None
    read(answers, max_length=70)
    assert not old.exists()
    assert used.exists()
    assert not list(cache.glob(".*.tmp"))


def test_a_writer_killed_at_any_operation_leaves_nothing_that_is_taken_for_whole(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(answers, is_kept=False)
    counted = tmp_path / "count"
    finish(start(read_kept, answers, tmp_path / "undisturbed", 0, counted))
    operations = int(counted.read_text().split()[0])
    assert operations >= 5
    for kill_at in range(1, operations + 1):
        folder = tmp_path / f"killed {kill_at}"
        job = start(read_kept, answers, folder, kill_at)
        job.join(60)
        assert job.exitcode == -9, kill_at
        for path in (folder / "samples").glob("*.samples"):
            found = load(path)
            assert found is None or found == expected, kill_at
        monkeypatch.setenv("DEEPSPEC_CACHE", str(folder))
        assert read(answers) == expected
        (path,) = (folder / "samples").glob("*.samples")
        assert load(path) == expected
        assert not list((folder / "samples").glob(".*.tmp")), kill_at


def test_runs_that_start_at_once_share_one_making(answers: Path, tmp_path: Path, cache: Path) -> None:
    write_texts(answers, 900)
    expected = read(answers, is_kept=False)
    counts = [tmp_path / f"count {number}" for number in range(3)]
    jobs = [start(read_kept, answers, cache.parent, 0, one) for one in counts]
    for job in jobs:
        finish(job)
    (path,) = cache.glob("*.samples")
    assert load(path) == expected
    assert sorted(one.read_text().split()[1] for one in counts) == ["0", "0", "1"]


def test_who_waited_for_nothing_makes_its_own(answers: Path, cache: Path, tmp_path: Path) -> None:
    """The one that makes them is killed while another waits."""
    write_texts(answers, 900)
    expected = read(answers, is_kept=False)
    counted = tmp_path / "count"
    finish(start(read_kept, answers, tmp_path / "undisturbed", 0, counted))
    # The last operations: open, flush, rename, flush.
    first = start(read_kept, answers, cache.parent, int(counted.read_text().split()[0]) - 3)
    deadline = time.monotonic() + 30
    while not list(cache.glob("*.lock")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read(answers) == expected
    first.join()
    assert first.exitcode == -9
    assert read(answers) == expected
    assert kept_or_made(maker_of(answers), lambda _: pytest.fail("made again")) == expected
