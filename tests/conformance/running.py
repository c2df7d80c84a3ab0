"""Runs of drafts in clients: which there are, what each driver is told, and the processes that do it.

All runs of one client that can share a process do, since starting an engine costs more than decoding in it; two
processes work at a time, while the drafts that later ones need are still being made.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from conformance import controls, objectives, references
from conformance.drafts import CASES, NEW_TOKENS, NUM_LAYERS, TARGETS, Case, K, Workshop
from conformance.environments import UnavailableError, find

DRIVERS = Path(__file__).parent / "drivers"
_SECONDS_TO_START = 120
_SECONDS_A_JOB = 90
BATCH_TOKENS = (1, 7, 8, 64)


class Run(NamedTuple):
    """One draft in one client.

    Attributes:
        case: the draft, a key of CASES.
        client: who reads it, a name of environments.clients() or transformers.
        form: of the export.
        control: what is broken on purpose: taps, layout or rope; None for what must work.
    """

    case: str
    client: str
    form: str
    control: str | None = None

    @property
    def name(self) -> str:
        """Word for the run in test ids and jobs."""
        return "-".join(part for part in self if part is not None)

    @property
    def settings(self) -> Case:
        """The draft's case."""
        return CASES[self.case]

    @property
    def method(self) -> str:
        """How vLLM calls the draft; a flipped layout is another method."""
        method = self.settings.method
        if self.control == "layout" and self.case != "dspark":
            return {"dspark": "dflash", "dflash": "dspark"}[method]
        return method

    @property
    def driver(self) -> str:
        """Script in drivers/."""
        forwards = {"specforge": "specforge_forward", "speculators": "speculators_forward", "sglang": "sglang_parse"}
        return forwards.get(self.client) or {"mlx_dspark": "mlx"}.get(self.client, self.client) + "_decode"

    @property
    def in_second_runner(self) -> bool:
        """Whether it needs vLLM's second model runner, as `deepspec.interop.serving.needs_second_runner` says."""
        is_windowed = "sliding_attention" in TARGETS[self.settings.target].get("layer_types", ())
        return self.client == "vllm" and (self.method == "dspark" or (self.method == "dflash" and is_windowed))

    @property
    def process(self) -> tuple[str, str, bool]:
        """Runs of equal value share a process; vLLM's two runners cannot."""
        return self.client, self.driver, self.in_second_runner


class Bench:
    """Starts what the selected tests need and hands out results.

    Args:
        workshop: where targets, drafts and exports are made.
        runs: those that tests will ask for.
    """

    def __init__(self, workshop: Workshop, runs: Iterable[Run]) -> None:
        self.workshop = workshop
        self._futures: dict[Run, Future[dict[str, Any]]] = {run: Future() for run in runs}
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._is_over = False

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Start everything; at the end nothing that was started is left."""
        groups: dict[tuple[str, str, bool], list[Run]] = {}
        for run in self._futures:
            groups.setdefault(run.process, []).append(run)
        with ThreadPoolExecutor(2) as pool:
            try:
                # DSpark in vLLM takes longest, so it begins.
                for key in sorted(groups, key=lambda key: (key[0] != "vllm", not key[2], key)):
                    self._submit(pool, groups[key])
                yield
            finally:
                self._is_over = True
                with self._lock:
                    for process in self._processes:
                        process.kill()

    def result(self, run: Run) -> dict[str, Any]:
        """What the driver said of a run.

        Raises:
            UnavailableError: the client cannot be installed.
            RuntimeError: it failed; the message is its own.
        """
        return self._futures[run].result()

    def _submit(self, pool: ThreadPoolExecutor, runs: list[Run]) -> None:
        jobs: dict[Run, dict[str, Any]] = {}
        try:
            python = find(runs[0].client)
        except UnavailableError as error:
            for run in runs:
                self._futures[run].set_exception(error)
            return
        for run in runs:
            try:
                jobs[run] = self._job(run)
            except Exception as error:  # a draft that cannot be made fails its own tests only
                self._futures[run].set_exception(error)
        pool.submit(self._drive, python, DRIVERS / f"{runs[0].driver}.py", jobs)

    def _job(self, run: Run) -> dict[str, Any]:
        workshop, case = self.workshop, run.settings
        job: dict[str, Any] = {
            "name": run.name,
            "target": str(workshop.target(case.target)),
            "draft": str(controls.export(workshop, run.case, run.form, run.control)),
            "method": run.method,
            "runner": "second" if run.in_second_runner else "first",
        }
        if run.driver.endswith("_forward"):
            files = {"inputs": references.inputs(workshop, run.case), "batch": objectives.inputs(workshop, run.case)}
            settings = objectives.settings(workshop, run.case, run.client)
            return job | {name: str(file) for name, file in files.items()} | settings
        if run.client == "sglang":
            return job | {"num_target_layers": NUM_LAYERS, "batch_tokens": BATCH_TOKENS}
        if run.client == "vllm" and run.form == "speculators":
            job["method"] = None  # the folder says it
        prompts = workshop.prompt_ids(case.target)
        return job | {"num_draft_tokens": K, "prompts": prompts, "max_new_tokens": NEW_TOKENS}

    def _drive(self, python: Path, driver: Path, jobs: dict[Run, dict[str, Any]]) -> None:
        """Run all jobs; one that takes the process down fails alone, the rest get a process of their own."""
        waiting = dict(jobs)
        try:
            while waiting and not self._is_over:
                last_words = self._attempt(python, driver, waiting)
                waiting = {run: job for run, job in waiting.items() if not self._futures[run].done()}
                if waiting:
                    culprit = next(iter(waiting))
                    waiting.pop(culprit)
                    self._futures[culprit].set_exception(RuntimeError(last_words))
        except Exception as error:  # nobody waits for this thread, but tests wait for the results
            for run in waiting:
                if not self._futures[run].done():
                    self._futures[run].set_exception(error)

    def _attempt(self, python: Path, driver: Path, jobs: dict[Run, dict[str, Any]]) -> str:
        """One process; returns how it ended."""
        by_name = {run.name: run for run in jobs}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "jobs.json"
            file.write_text(json.dumps(list(jobs.values())), encoding="utf-8")
            with (Path(folder) / "stderr").open("w+", encoding="utf-8", errors="replace") as stderr:
                command, pipe = [str(python), str(driver), str(file)], subprocess.PIPE
                with subprocess.Popen(
                    command, stdout=pipe, stderr=stderr, text=True, cwd=folder, env=environment()
                ) as process:
                    with self._lock:
                        self._processes.append(process)
                        if self._is_over:
                            process.kill()
                    limit = threading.Timer(_SECONDS_TO_START + _SECONDS_A_JOB * len(jobs), process.kill)
                    limit.start()
                    assert process.stdout is not None
                    for line in process.stdout:
                        answer = json.loads(line)
                        future = self._futures[by_name[answer["job"]]]
                        if "error" in answer:
                            future.set_exception(RuntimeError(answer["error"]))
                        else:
                            future.set_result(answer["result"])
                limit.cancel()
                stderr.seek(0)
                return f"{driver.name} ended with status {process.returncode}:\n{stderr.read()[-3000:]}"


def environment() -> dict[str, str]:
    """Ours, without what belongs to our own interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
