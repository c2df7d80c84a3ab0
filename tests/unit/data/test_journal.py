"""A journal keeps every whole row through kills, full disks and rivals, and names what it cannot read."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.data.journal import open_journal, read_journal
from deepspec.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "text": 'line\nbreak, quote " and \u2028'},
    {"id": "\u00e9\u4e2d\U0001f600"},
    {"ids": [1, 2, 3]},
]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with open_journal(path) as journal:
        for row in rows:
            journal.append(row)


def test_rows_come_back_in_order_and_a_later_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "rows.jsonl"
    assert read_journal(path) == []
    write(path, ROWS[:2])
    with open_journal(path) as journal:
        assert journal.rows == ROWS[:2]
        journal.append(ROWS[2])
        assert journal.rows == ROWS[:2], "only the rows of earlier runs"
    assert read_journal(path) == ROWS
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] == ROWS


def test_a_row_is_in_the_file_before_append_returns(tmp_path: Path) -> None:
    with open_journal(tmp_path / "rows.jsonl") as journal:
        for count, row in enumerate(ROWS, start=1):
            journal.append(row)
            assert read_journal(tmp_path / "rows.jsonl") == ROWS[:count]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3), min_size=1, max_size=4))
def test_a_file_cut_at_any_byte_keeps_the_whole_rows_before_the_cut(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, rows)
        content = path.read_bytes()
        for size in range(len(content) + 1):
            path.write_bytes(content[:size])
            whole = content[: size + 1].count(b"\n")  # a row that lacks its newline alone is whole
            assert read_journal(path) == rows[:whole]
            with open_journal(path) as journal:
                assert journal.rows == rows[:whole]
                for row in rows[whole:]:
                    journal.append(row)
            assert path.read_bytes().rstrip() == content.rstrip(), "lost rows stand again where they stood"


@pytest.mark.parametrize(
    ("damage", "words"),
    [(b'{"id": "a', "damaged"), (b"", "damaged"), (b'{"id": "\xff"}', "damaged"), (b"[1]", "not an object")],
)
def test_a_damaged_line_in_the_middle_is_named_by_file_and_line_and_left_alone(
    tmp_path: Path, damage: bytes, words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, ROWS)
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(good[0] + damage + b"\n" + good[2])
    before = path.read_bytes()
    for use in (read_journal, lambda file: write(file, [])):
        with pytest.raises(DataError, match=rf"rows\.jsonl line 2 .*{words}.*[Dd]elete that line"):
            use(path)
    assert path.read_bytes() == before
    path.write_bytes(good[0] + good[2])
    write(path, [])


@pytest.mark.parametrize("content", [b'[{"id": "x"}]', b"one line of notes", b'{"id": "x"}\n{"id": "half'])
def test_a_file_is_not_touched_before_the_first_row_is_appended(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with contextlib.suppress(DataError), open_journal(path):
        pass
    assert path.read_bytes() == content


def test_a_last_row_that_lacks_its_newline_alone_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "x"}')
    write(path, [{"id": "y"}])
    assert read_journal(path) == [{"id": "x"}, {"id": "y"}]


def test_a_second_process_is_refused_while_the_first_writes_and_not_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rival = (
        "import sys; from pathlib import Path; from deepspec.data.journal import open_journal\n"
        "from deepspec.errors import DataError\n"
        "try:\n"
        "    with open_journal(Path(sys.argv[1])) as journal: journal.append({'id': 'rival'})\n"
        "except DataError as error: sys.exit(str(error))\n"
    )
    command = [sys.executable, "-c", rival, str(path)]
    with open_journal(path) as journal:
        journal.append(ROWS[0])
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (refused.returncode, refused.stderr.strip()) == (
            1,
            f"{path} is being written by another process. Wait for it, or choose another path.",
        )
        with pytest.raises(DataError, match="another process"):
            write(path, [])
        journal.append(ROWS[1])
    assert subprocess.run(command, timeout=60).returncode == 0
    assert read_journal(path) == [*ROWS[:2], {"id": "rival"}]


def test_the_lock_is_given_back_when_the_work_fails(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def fail() -> None:
        with open_journal(path) as journal:
            journal.append(ROWS[0])
            raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        fail()
    write(path, ROWS[1:])
    assert read_journal(path) == ROWS


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    for path in (tmp_path / "file" / "rows.jsonl", Path("/proc/deepspec/rows.jsonl"), tmp_path / "folder.jsonl"):
        with pytest.raises(DataError) as refused:
            write(path, ROWS)
        assert str(refused.value).startswith(f"{path} cannot be written (")
        assert "Choose" in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(DataError, match=r"closed/rows\.jsonl cannot be written \(Permission denied\)"):
        write(tmp_path / "closed" / "rows.jsonl", ROWS)


def test_a_full_disk_is_named_once_and_what_stands_in_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, ROWS[:1])
    # The kernel then refuses to let any file of this process grow past the limit, as a full disk would.
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = path.stat().st_size + 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(DataError, match=r"rows\.jsonl cannot be written \(.+\)\. Free some space"):
            write(path, [{"id": "x" * 50}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert read_journal(path) == ROWS[:1]
    write(path, ROWS[1:])
    assert read_journal(path) == ROWS
