"""The bench that all tests of this folder share, and the record of what came out."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance.drafts import Workshop
from conformance.environments import UnavailableError, lists_id
from conformance.running import Bench, Run

_OUTCOMES = pytest.StashKey[list[dict[str, Any]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "core: the part of the conformance suite that CI runs")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[Bench]:
    """Every run that the selected tests ask for, under way."""
    runs = [run for item in request.session.items if (run := _run_of(item)) is not None]
    made = Bench(workshop, runs)
    with made.working():
        yield made


@pytest.fixture
def found(bench: Bench, run: Run) -> dict[str, Any]:
    """What the client said; a client that cannot be had skips the test with the reason."""
    try:
        return bench.result(run)
    except UnavailableError as error:
        pytest.skip(f"{run.client}: {error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    run = _run_of(item)
    # A test that is skipped or breaks before its call has no call to report.
    if run is not None and (report.when == "call" or (report.when == "setup" and not report.passed)):
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        item.session.stash.setdefault(_OUTCOMES, []).append(
            {
                **run._asdict(),
                "family": run.settings.target,
                "label": run.settings.label,
                "lists": lists_id(run.client),
                "outcome": report.outcome,
                "reason": reason.removeprefix("Skipped: "),
                **dict(item.user_properties),
            }
        )
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what came out to the file that DEEPSPEC_CONFORMANCE_OUTCOMES names; render.py makes pages of it."""
    outcomes, path = session.stash.get(_OUTCOMES, []), os.environ.get("DEEPSPEC_CONFORMANCE_OUTCOMES")
    if outcomes and path:
        outcomes.sort(key=lambda row: (row["client"], row["form"], row["case"], row["control"] or ""))
        Path(path).write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")


def _run_of(item: pytest.Item) -> Run | None:
    """The run that a test is about; tests of other folders have none."""
    call = getattr(item, "callspec", None)
    run = None if call is None else call.params.get("run")
    return run if isinstance(run, Run) else None
