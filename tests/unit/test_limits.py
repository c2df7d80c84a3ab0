"""What cgroups leave to this process of the machine's CPUs, whatever version they are and whatever cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspec import limits

ROOT = Path(__file__).parents[2]
Files = dict[str, str]


def containered(folder: Path, own: str, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process believe that its cgroups are the files of a folder."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    monkeypatch.setattr(limits, "_CGROUPS", folder / "cgroup")
    monkeypatch.setattr(limits, "_OWN_CGROUPS", folder / "own")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        # Kubernetes limits the pod around the container, and a job may be limited further inside.
        ("0::/pod/own\n", {"pod/cpu.max": "400000 100000", "pod/own/cpu.max": "max 100000"}, 4.0),
        ("0::/pod/own\n", {"pod/cpu.max": "400000 100000", "pod/own/cpu.max": "50000 100000"}, 0.5),
        # In a container the path is the host's, and what it names is not there.
        ("0::/docker/0123\n", {"cpu.max": "300000 100000"}, 3.0),
        ("5:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("5:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ("5:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "250000\n"}, None),
        ("5:cpuset:/a\n4:memory:/a\n", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, None),
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": ""}, None),
        ("0::/\n", {"cpu.max": "0 0\n"}, None),
        ("no cgroup at all\n", {"cpu.max": "100000 100000"}, None),
        ("", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_a_quota_of_either_version_counts_and_what_says_nothing_sets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: Files, quota: float | None
) -> None:
    containered(tmp_path, own, files, monkeypatch)
    assert limits.cpu_quota() == quota


@pytest.mark.parametrize(("quota", "cpus"), [("max", 6), ("50000", 1), ("390000", 3), ("400000", 4), ("9000000", 6)])
def test_cpus_are_those_of_the_quota_rounded_down_and_never_more_than_the_process_may_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    containered(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000"}, monkeypatch)
    assert limits.available_cpus() == cpus


@pytest.mark.parametrize("wished", [None, "2"])
def test_a_process_that_computes_keeps_to_the_quota_unless_it_was_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wished: str | None
) -> None:
    containered(tmp_path, "0::/\n", {"cpu.max": "100000 100000"}, monkeypatch)
    program = (
        "import sys, torch; from pathlib import Path; from deepspec import limits, runtime\n"
        "print(torch.get_num_threads())\n"
        "limits._CGROUPS, limits._OWN_CGROUPS = map(Path, sys.argv[1:])\n"
        "runtime.choose_device('cpu'); print(torch.get_num_threads())"
    )
    words = [sys.executable, "-c", program, str(limits._CGROUPS), str(limits._OWN_CGROUPS)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if wished is None else {"OMP_NUM_THREADS": wished})
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60)
    before, after = ended.stdout.split()
    assert after == ("1" if wished is None else before)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_NUM_THREADS"}),
        ({"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "9"}, {"OMP_WAIT_POLICY"}),
    ],
)
def test_processes_that_share_the_cores_are_told_what_the_user_has_not_said(
    told: dict[str, str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    found = limits.thread_settings(1000)
    assert set(found) == expected
    assert found.get("OMP_NUM_THREADS", "1") == "1"
    # The scripts say the same.
    shell = (ROOT / "scripts" / "threads.sh").read_text()
    assert found.get("GOMP_SPINCOUNT", "3000") in shell
