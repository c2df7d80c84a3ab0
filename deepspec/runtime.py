"""What a run knows about the machine it runs on: device, cores, provenance.

It knows nothing of models, data or configuration files.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepspec.errors import ConfigError
from deepspec.limits import available_cpus

__all__ = ["available_cpus", "choose_device", "processor_name", "provenance", "thread_words"]

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_PACKAGES = ("deepspec", "torch", "transformers", "accelerate", "tokenizers", "safetensors", "datasets", "deepspeed")


def choose_device(name: str) -> torch.device:
    """Turn `auto`, `cpu` or `cuda` into the device of this process (one GPU per local rank).

    Whoever asks is about to compute: torch's threads are kept to the CPUs that there are for them.

    Raises:
        ConfigError: `cuda` is asked for where torch sees no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device 'cuda' was asked for, but torch {torch.__version__} sees no GPU here. "
            "Use device auto or cpu, or install a CUDA build of torch."
        )
    _limit_threads()
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def provenance() -> dict[str, Any]:
    """Describe what produced a result: git state of the code, package versions, hardware, command line."""
    return {
        "command": sys.argv,
        "git": _git_state(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "hardware": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor_name(),
            "cpus": available_cpus(),
            "threads": thread_words(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
    }


def thread_words() -> str:
    """How many threads compute, and how they wait for each other, which is worth up to 1.4x (scripts/threads.sh)."""
    waiting = " ".join(f"{name}={os.environ[name]}" for name in _WAITING if name in os.environ)
    return f"{torch.get_num_threads()} threads, {waiting or 'waiting as OpenMP likes'}"


def _limit_threads() -> None:
    """Torch makes a thread for every core that it sees; under a container's quota they would stop each other."""
    if "OMP_NUM_THREADS" not in os.environ and available_cpus() < torch.get_num_threads():
        torch.set_num_threads(available_cpus())


def _git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the checkout that holds this package; None outside a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # Installed into some other project's checkout, the surrounding commit would say nothing about this code.
        if not (Path(git("rev-parse", "--show-toplevel")) / "deepspec").resolve().samefile(folder):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """Name of the CPU model; `platform.processor()` is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
