"""Several processes that decode one evaluation: who takes which prompts, and how they wait for each other.

The processes share nothing but a small key-value store on the hosts (that of torchrun, or one of our own) and a file
system: nothing is exchanged between devices, so it is the same with GPUs and without. A process that dies takes
nothing with it: what it has answered lies in its own journal, and the others decode the rest. The module knows neither
prompts nor models.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from deepspec import console
from deepspec.config import EvalConfig
from deepspec.errors import ConfigError
from deepspec.limits import thread_settings
from deepspec.runtime import available_cpus

_POLL_SECONDS = 0.05
_LONG = datetime.timedelta(days=7)  # the main process may time latency for hours while the others wait


class Crew:
    """The processes of one evaluation, this one included.

    Args:
        store: where they leave each other words.
        rank: of this process; 0 is the main one, which alone writes results.
        size: how many there are.
        start: starts one of the others by its rank; None where somebody else has.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        start: Callable[[int], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._start = start
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: set[int] = set()

    @property
    def is_main(self) -> bool:
        """Whether this process hands out the work and writes results."""
        return self.rank == 0

    def begin(self) -> None:
        """Start the others, where that is this process's to do; only once everything is known to fit."""
        if self._start is not None:
            self._members = {rank: self._start(rank) for rank in range(1, self.size)}

    def end(self) -> None:
        """End those that this process has started."""
        for member in self._members.values():
            member.terminate()
        for member in self._members.values():
            member.wait()

    @contextlib.contextmanager
    def sharing_threads(self) -> Iterator[None]:
        """Use only this process's share of the cores; those it has started were given theirs."""
        before = torch.get_num_threads()
        if self._members:
            torch.set_num_threads(max(1, min(before, available_cpus() // self.size)))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def post(self, name: str, text: str) -> None:
        """Say something that every process may wait for."""
        self._store.set(name, text)

    def receive(self, name: str) -> str:
        """Wait for what the main process posts."""
        self._store.wait([name], _LONG)
        return str(self._store.get(name).decode())

    def claim(self, name: str) -> Callable[[int], int]:
        """A counter that all share: takes so many places and returns the first of them."""
        return lambda count: int(self._store.add(f"{name}/taken", count)) - count

    def count(self, name: str, number: int = 0) -> int:
        """Add to a number that all share, and return it."""
        return int(self._store.add(name, number))

    def enter(self, stage: str) -> bool:
        """Say that this process takes part in a stage; False where the main one no longer waits for it."""
        self._store.set(f"{stage}/entered/{self.rank}", "")
        return not self._store.check([f"{stage}/closed"])

    def leave(self, stage: str) -> None:
        """Say that this process has nothing left to do in a stage."""
        self._store.set(f"{stage}/left/{self.rank}", "")

    def wait_for_others(self, stage: str, meanwhile: Callable[[], None]) -> None:
        """Close a stage and wait until all others that entered it have left or died.

        Others may still be loading their models: they enter before they look whether the stage is closed, and it is
        closed before this process looks who entered.

        Args:
            stage: its name.
            meanwhile: called now and then.
        """
        self._store.set(f"{stage}/closed", "")
        present = [rank for rank in range(1, self.size) if self._store.check([f"{stage}/entered/{rank}"])]
        waiting = [rank for rank in present if rank not in self._lost]
        while True:
            self._look_for_lost()
            waiting = [
                rank for rank in waiting if rank not in self._lost and not self._store.check([f"{stage}/left/{rank}"])
            ]
            meanwhile()
            if not waiting:
                return
            time.sleep(_POLL_SECONDS)

    def _look_for_lost(self) -> None:
        """Say which processes have ended since, even those that never came to take part."""
        for rank, member in self._members.items():
            if rank not in self._lost and member.poll() is not None:
                self._lost.add(rank)
                console.error(
                    f"warning: process {rank} of {self.size} ended (exit code {member.returncode}); the others "
                    "decode what it had not finished."
                )


@contextlib.contextmanager
def open_crew(config: EvalConfig) -> Iterator[Crew]:
    """Join the processes of torchrun, or start `config.num_processes`, or be alone.

    Raises:
        ConfigError: more GPU processes are asked for than there are GPUs, or both ways at once.
    """
    size = crew_size(config)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if config.num_processes not in (1, size):
            raise ConfigError(
                f"num_processes is {config.num_processes}, but {size} processes were started (WORLD_SIZE). Leave "
                "num_processes out under torchrun."
            )
        store, rank, size = next(iter(rendezvous("env://")))
        console.set_quiet(rank != 0)
        yield Crew(PrefixStore("deepspec_eval", store), rank, size)
        return
    if config.num_processes == 1:
        yield Crew(HashStore(), 0, 1)
        return
    _check_gpus(config)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="deepspec_eval_") as name:
        path = Path(name) / "config.json"
        path.write_text(config.model_dump_json(), encoding="utf-8")
        crew = Crew(store, 0, config.num_processes, lambda rank: _start(path, store.port, rank, config))
        try:
            yield crew
        finally:
            crew.end()


def crew_size(config: EvalConfig) -> int:
    """How many processes decode: as many as torchrun has started, or as are asked for."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    return started if started > 1 else config.num_processes


def join_crew(port: int, rank: int, size: int) -> Crew:
    """Join the process that has started this one."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    return Crew(store, rank, size)


def _start(path: Path, port: int, rank: int, config: EvalConfig) -> subprocess.Popen[bytes]:
    environment = thread_settings(config.num_processes) | os.environ | {"LOCAL_RANK": str(rank)}
    words = [str(path), str(port), str(rank), str(os.getpid())]
    command = [sys.executable, "-m", "deepspec.evaluation.member", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _check_gpus(config: EvalConfig) -> None:
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if gpus and config.num_processes > gpus:
        raise ConfigError(
            f"num_processes is {config.num_processes}, but this machine has {gpus} GPUs. Use num_processes={gpus}."
        )
