"""One run at a time in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepspec.errors import CheckpointError
from deepspec.training.lock import LOCK, OWNER, Owner, find_holder, lock_run_folder, machine_id, read_owner

BEAT = 0.05
HOLD = (
    "import sys; from pathlib import Path\n"
    "from deepspec.training.lock import lock_run_folder\n"
    "with lock_run_folder(Path(sys.argv[1])):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


@contextmanager
def another_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other
        other.kill()


def test_two_runs_cannot_share_a_folder_and_the_second_learns_who_has_it(tmp_path: Path) -> None:
    with another_run(tmp_path) as other:
        refused = pytest.raises(CheckpointError, match=rf"another run \(process {other.pid} on ")
        with refused, lock_run_folder(tmp_path, wait_seconds=0.2):
            pass


def test_the_lock_of_a_killed_run_is_stale_and_is_taken_over_at_once(tmp_path: Path) -> None:
    with another_run(tmp_path) as other:
        other.kill()
        other.wait()
        assert read_owner(tmp_path) is not None  # what it left
        with lock_run_folder(tmp_path, wait_seconds=0.2):
            assert read_owner(tmp_path) != Owner("", "", other.pid, 0)


def test_a_run_that_ends_leaves_no_owner_and_lets_the_next_one_in(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_run_folder(tmp_path, wait_seconds=0.2, beat_seconds=BEAT):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK]


def write_owner(folder: Path, beats: int) -> None:
    owner = Owner("node7", "another-machine", 4242, beats)
    (folder / OWNER).write_text(json.dumps(owner._asdict()))


def test_a_run_on_a_machine_that_the_lock_does_not_reach_is_seen_by_its_signs_of_life(tmp_path: Path) -> None:
    is_over = threading.Event()

    def live() -> None:
        beats = 0
        while not is_over.wait(BEAT / 4):
            beats += 1
            write_owner(tmp_path, beats)

    write_owner(tmp_path, 0)
    thread = threading.Thread(target=live)
    thread.start()
    try:
        refused = pytest.raises(CheckpointError, match=r"process 4242 on node7")
        with refused, lock_run_folder(tmp_path, beat_seconds=BEAT):
            pass
    finally:
        is_over.set()
        thread.join()


def test_a_machine_that_gives_no_sign_of_life_has_lost_its_lock(tmp_path: Path) -> None:
    write_owner(tmp_path, 3)
    with lock_run_folder(tmp_path, beat_seconds=BEAT):
        pass


def test_the_holder_gives_signs_of_life(tmp_path: Path) -> None:
    seen = set()
    with lock_run_folder(tmp_path, beat_seconds=0.01):
        while len(seen) < 3:  # the suite's time limit ends a holder without them
            owner = read_owner(tmp_path)
            if owner is not None:
                assert owner.machine == machine_id()
                seen.add(owner.beats)


def test_whoever_looks_never_finds_half_of_the_owner(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path, beat_seconds=0.0001):
        assert all(read_owner(tmp_path) is not None for _ in range(5000))
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK]


def test_the_holder_of_a_folder_is_named_and_a_free_one_has_none(tmp_path: Path) -> None:
    assert find_holder(tmp_path) is None
    with another_run(tmp_path) as other:
        assert str(find_holder(tmp_path)).startswith(f"another run (process {other.pid} on ")
        other.kill()
        other.wait()
        assert find_holder(tmp_path) is None


def test_a_run_folder_below_a_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(CheckpointError, match="cannot write into the run folder"), lock_run_folder(folder):
        pass
