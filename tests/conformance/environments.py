"""The clients' own Python environments: built once for each content of their requirement lists, then found again.

    python tests/conformance/environments.py [CLIENT ...]     builds what is missing and says where each is

A client is a folder in clients/ with requirements.txt (installed with their own requirements),
without_dependencies.txt (installed alone: packages that ask for CUDA, or for versions that exclude each other), and
where CI depends on it constraints-3.11.txt (every version of an installation that worked, for that Python). It knows
neither drafts nor tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_LISTS = Path(__file__).parent / "clients"
# An installation of half a minute may take many on a slow index; one that hangs must end some time.
_INSTALL_SECONDS = 1800


class UnavailableError(Exception):
    """A client cannot be installed or run here; the message is the reason."""


def clients() -> list[str]:
    """Every client that has requirement lists."""
    return sorted(path.name for path in _LISTS.iterdir() if path.is_dir())


def find(client: str) -> Path:
    """The python of a client's environment; nothing is built.

    DEEPSPEC_<CLIENT>_PYTHON names another one.

    Raises:
        UnavailableError: there is none, with the reason where building it failed.
    """
    if client == "transformers":
        return Path(sys.executable)  # the project's own requirement
    variable = f"DEEPSPEC_{client.upper()}_PYTHON"
    given = os.environ.get(variable)
    if given:
        if not Path(given).is_file():
            raise UnavailableError(f"{variable} names {given}, which is no file")
        return Path(given)
    folder = _folder(client)
    if _stamp(folder).is_file():
        return folder / "bin" / "python"
    if _failure(folder).is_file():
        raise UnavailableError(f"could not be installed: {_failure(folder).read_text(encoding='utf-8').strip()}")
    raise UnavailableError("its environment is not built; run: bash scripts/conformance.sh")


def build(client: str) -> Path:
    """Make a client's environment if it is not there, and drop those of earlier lists.

    Raises:
        UnavailableError: pip failed; the reason is kept for `find`, and the next call tries again.
    """
    folder = _folder(client)
    with _locked(folder):
        if _stamp(folder).is_file():
            return folder / "bin" / "python"
        for earlier in folder.parent.glob(f"{client}-*"):
            if earlier.is_dir():
                shutil.rmtree(earlier)
        _failure(folder).unlink(missing_ok=True)
        try:
            _run([sys.executable, "-m", "venv", str(folder)])
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            constraints = _LISTS / client / f"constraints-{sys.version_info.major}.{sys.version_info.minor}.txt"
            pinned = ["-c", str(constraints)] if constraints.is_file() else []
            _run([*pip, "-r", str(_LISTS / client / "requirements.txt"), *pinned])
            _run([*pip, "--no-deps", "-r", str(_LISTS / client / "without_dependencies.txt")])
        except UnavailableError as error:
            _failure(folder).write_text(f"{error}\n", encoding="utf-8")
            raise
        _stamp(folder).touch()
    return folder / "bin" / "python"


def lists_id(client: str) -> str:
    """Word for what a client's lists ask for now; outcomes keep it, so that those of other lists are not shown."""
    return "" if client == "transformers" else _digest(client, b"")


def _digest(client: str, start: bytes) -> str:
    digest = hashlib.sha256(start)
    for path in sorted((_LISTS / client).iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _folder(client: str) -> Path:
    """Named by the content of the lists and the interpreter, so that a changed list is another environment."""
    cache = Path(os.environ.get("DEEPSPEC_CACHE", "~/.cache/deepspec")).expanduser()
    return cache / "conformance" / f"{client}-{_digest(client, f'{sys.version_info[:2]}'.encode())}"


def _stamp(folder: Path) -> Path:
    """Written last: an environment that a kill left half installed has none."""
    return folder / ".complete"


def _failure(folder: Path) -> Path:
    return folder.with_suffix(".failed")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{' '.join(command[1:])} took more than {_INSTALL_SECONDS} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("[notice]")]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise UnavailableError((errors or lines or [f"{command[2]} ended with {done.returncode}"])[-1].strip())


def main(names: list[str]) -> None:
    """Build the named clients' environments, or all; a failure is said and does not end the others.

    A client that was named must be there; of all of them, those that cannot be had here are skipped by the tests.
    """
    unknown = sorted(set(names) - set(clients()))
    if unknown:
        sys.exit(f"no such client: {', '.join(unknown)}. There are: {', '.join(clients())}.")
    missing = []
    for client in names or clients():
        begin = time.monotonic()
        try:
            python = build(client)
        except UnavailableError as error:
            print(f"{client}: not available: {error}", flush=True)
            missing.append(client)
        else:
            print(f"{client}: {python} ({time.monotonic() - begin:.0f} s)", flush=True)
    if names and missing:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
